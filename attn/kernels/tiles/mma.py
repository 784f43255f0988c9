"""Tile descriptions of the kernels on NVIDIA's mma.sync: how many rows a block owns and loops over, how warps divide them, and how rows lie in shared
memory."""
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar
from attn.chips.matrix import UNIT_BYTES, Mma
from attn.chips.shapes import MlaMmaShape, MmaBackwardShape, MmaShape
from attn.kernels.parts.memory.layouts import LINE, LongRows, SwizzledRows
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.common import SharingTile, units_of_query_values
from attn.problem import Problem

def fragments(width:int, mat:Mma) -> int:
  """Returns how many C fragments a lane holds of a matrix C with 16 rows and `width` columns."""
  return round_up(width, mat.K)//mat.N

@dataclass(frozen=True)
class MmaTile(MmaShape):
  """Tile description of the forward kernel on mma.sync."""
  _: KW_ONLY
  matrix: Mma
  waves: int                   # warps of a block
  pack_gqa: bool = False       # a tile has the queries of all heads that share a key/value head: K and V are read once for all of them
  rescale_above: float = 8.0   # accumulators are rescaled when a row's sum of P over a part is more than 2 to this power
  key_waves: int = 1           # warps with the same queries: each computes some keys of a tile; after the last tile their results are added

  kernel: ClassVar[str] = "forward_mma"

  @property
  def block_m(self) -> int: return self.waves//self.key_waves*self.q_tiles*self.matrix.M
  @property
  def warp_keys(self) -> int:
    """Number of keys that one warp computes in each tile."""
    return self.block_n//self.key_waves
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  def layouts(self, p:Problem) -> tuple[SwizzledRows, SwizzledRows, SwizzledRows]:
    """Returns (layout of Q, layout of K, layout of V) in shared memory."""
    def units(width:int, size:int) -> int: return round_up(width, 2*UNIT_BYTES//size)*size//UNIT_BYTES      # ldmatrix reads two units at a time
    of_q, of_k, of_v = units(p.D, p.itemsize), units(p.D, p.key_itemsize), units(p.Dv, p.key_itemsize)
    return SwizzledRows(self.block_m, of_q), SwizzledRows(self.block_n, of_k), SwizzledRows(self.block_n, of_v)
  def scales(self, p:Problem) -> int:
    """Returns the number of 16-byte units of shared memory that the scales of the 8-bit rows of a tile take."""
    # first those of K, then those of V
    return 2*self.block_n*4//UNIT_BYTES if p.stored else 0
  def lds_bytes(self, p:Problem) -> int:
    q, k, v = self.layouts(p)
    found = self.waves*self.matrix.wave*self.units_of_results(p) if self.key_waves > 1 else 0
    return UNIT_BYTES*max(q.size + self.stages*(k.size + v.size + self.scales(p)), found)
  def units_of_results(self, p:Problem) -> int:
    """Returns how many 16-byte units of shared memory one lane needs for its results: m, row sums and elements of O."""
    # the warps with the same queries exchange them: for each matrix tile of queries, elements of O, m and the row sums
    return self.q_tiles*(fragments(p.Dv, self.matrix) + 2)
  def __str__(self) -> str:
    shared = f", {self.key_waves} share keys" if self.key_waves > 1 else ""
    return f"{self.block_m}x{self.block_n} {self.waves} waves{shared} {self.matrix.M}x{self.matrix.N}x{self.matrix.K} {self.stages} stages"

@dataclass(frozen=True)
class MlaMmaTile(MlaMmaShape, SharingTile):
  """Tile description of the kernel of latent attention on mma.sync."""
  _: KW_ONLY
  matrix: Mma
  rescale_above: float = 8.0   # the reference of a row is raised when its largest score exceeds it by more than this, in powers of two

  kernel: ClassVar[str] = "mla_mma"

  @property
  def block_m(self) -> int: return self.row_tiles*self.matrix.M
  def columns(self, p:Problem) -> int:
    """Returns the number of C fragments, side by side in a row of O, that each warp computes."""
    # their columns fill whole 128-byte lines of shared memory
    return round_up(ceildiv(fragments(p.Dv, self.matrix), self.waves), LINE)
  def widens(self, p:Problem) -> bool:
    """Whether threads convert the 8-bit columns of a tile in shared memory, once for all warps, instead of each warp when it reads them."""
    # if there is only one matrix tile of queries, no two warps compute scores of the same keys: then each warp converts what it reads
    return bool(p.stored) and self.row_tiles > 1
  def layouts(self, p:Problem) -> tuple[LongRows, LongRows, LongRows, SwizzledRows]:
    """Returns (layout of Q, layout of K, layout of the rotary columns of K, layout of P) in shared memory."""
    # if the latent columns of K are stored in 8 bits, the rotary columns have 16 bits and lie apart from them; otherwise they are a part of K
    def rows(count:int, width:int, size:int) -> LongRows: return LongRows(count, round_up(width*size, LINE*UNIT_BYTES)//UNIT_BYTES)
    return (rows(self.block_m, p.D, p.itemsize), rows(self.block_n, p.k_width, p.itemsize if self.widens(p) else p.key_itemsize),
            rows(self.block_n, p.D - p.k_width, p.itemsize), SwizzledRows(self.block_m, self.block_n//self.matrix.unit))
  def stage(self, p:Problem) -> int:
    """Returns the size of one stage of the ring buffer, a tile of K with its scales, in 16-byte units of shared memory."""
    # if threads convert K in shared memory (`widens`), K itself is not counted: it lies outside of the ring buffer
    _, k, rotary, _ = self.layouts(p)
    return (0 if self.widens(p) else k.size) + rotary.size + (round_up(self.block_n*4//UNIT_BYTES, LINE) if p.stored else 0)
  def raw(self, p:Problem) -> int:
    """Returns how many 16-byte units of shared memory the 8-bit numbers of one tile of K take before they are converted."""
    # only if threads convert them in shared memory (`widens`)
    return round_up(self.layouts(p)[1].size//2, self.threads) if self.widens(p) else 0
  def weights_at(self, p:Problem) -> int:
    """Returns the index of the 16-byte unit of shared memory at which P begins."""
    q, k, _, _ = self.layouts(p)
    return q.size + self.stages*self.stage(p) + (k.size + self.raw(p) if self.widens(p) else 0)
  def lds_bytes(self, p:Problem) -> int:
    return UNIT_BYTES*(self.weights_at(p) + self.layouts(p)[-1].size + self.scalar_places(p).units(self.block_m))
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K} {self.stages} stages"

@dataclass(frozen=True)
class MmaBackwardTile(MmaBackwardShape):
  """Tile description of a backward kernel on mma.sync: a block owns `block_m` rows and loops over tiles of `block_n` rows."""
  # own rows: queries in backward_dq_mma, keys in backward_dkdv_mma; walked rows: of the other kind
  _: KW_ONLY
  matrix: Mma
  stages: int = 2          # tiles of the walked rows in shared memory
  keys: bool = False       # the own rows are keys

  suffix: ClassVar[str] = "_mma"

  @property
  def block_m(self) -> int: return self.waves*self.row_tiles*self.matrix.M
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def pack_gqa(self) -> bool: return False
  @property
  def options(self) -> str: return f"passes={self.passes}"*(self.passes > 1)
  def layouts(self, p:Problem, rows:int) -> tuple[SwizzledRows, SwizzledRows]:
    """Returns (layout for rows of q or k, layout for rows of do or v) in shared memory, each for `rows` rows."""
    of_d, of_dv = (SwizzledRows(rows, round_up(d, self.matrix.K)//self.matrix.unit) for d in (p.D, p.Dv))
    return of_d, of_dv
  def units_of_query_values(self, p:Problem) -> int:
    """Returns the number of 16-byte units of shared memory for lse, delta (and lse_rest) of a tile's queries."""
    # whole lines (128 bytes), because the rows that lie behind must begin at a whole line
    return round_up(units_of_query_values(p, self.block_n), LINE) if self.keys else 0
  @property
  def carried(self) -> int:
    """Number of queries of a tile whose lse and delta one thread copies to shared memory."""
    return ceildiv(self.block_n, self.threads)
  def stage(self, p:Problem) -> int:
    """Returns the size of one stage of the ring buffer, a tile of rows with lse and delta of its queries, in 16-byte units of shared memory."""
    return sum(x.size for x in self.layouts(p, self.block_n)) + self.units_of_query_values(p)
  def lds_bytes(self, p:Problem) -> int:
    return UNIT_BYTES*(sum(x.size for x in self.layouts(p, self.block_m)) + self.stages*self.stage(p))
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K} {self.stages} stages"
