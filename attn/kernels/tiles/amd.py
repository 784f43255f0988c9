"""Tile descriptions of the kernels on AMD's matrix units, MFMA and WMMA: how many rows a workgroup owns and loops over, how waves divide them, and
how rows lie in LDS."""
from __future__ import annotations
import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Matrix, contraction
from attn.chips.shapes import BackwardShape, ForwardShape, MlaShape
from attn.kernels.parts.memory.layouts import PaddedRows
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.common import SharingTile, units_of_query_values
from attn.problem import Problem

WAVES_OF_DQ = 4     # fewest waves among which the columns of dQ are divided, in a kernel that computes all gradients at once

# Sixteen lanes store at the same time, 8 bytes each, to `v_columns` columns of V (rows of V^T). These columns must lie in different banks.
def v_columns(block_n:int) -> int: return 16//math.gcd(block_n//4, 8)
def v_skew(mat:Matrix, block_n:int) -> int:
  """Returns how many 16-byte units stay empty after each matrix tile of V^T in LDS, to avoid bank conflicts."""
  # Sixteen lanes store to LDS at the same time. If matrix tiles have 16 rows, the columns of V that these lanes store lie in different tiles. The gap
  # puts these columns into different banks.
  return 8//v_columns(block_n) if mat.M == 16 and mat.accumulator == mat.unit else 0

def row_layout(mat:Matrix, rows:int, width:int) -> PaddedRows:
  """Returns the LDS layout for rows of `width` elements, as operand A of products that sum over the elements of a row."""
  return PaddedRows(rows, contraction(mat, width)//mat.unit)

def both_ways_layout(mat:Matrix, rows:int, width:int) -> PaddedRows:
  """Returns the LDS layout for rows of `width` elements, for a kernel that holds a tile row by row and also transposed."""
  # A read reaches neighbouring rows. A store reaches rows of different groups of four neighbouring rows (`staging.key_rows`). In matrix tiles of 32
  # rows these rows are 4 apart: then neighbouring rows of a group begin an even number of 16-byte units apart, and neighbouring groups an odd number.
  # In other matrix tiles the rows of a store are 8 apart, or belong to another lane group.
  # this layout is for the tile that lies row by row
  units = contraction(mat, width)//mat.unit
  if mat.M == 32:
    apart = mat.banks//16
    return PaddedRows(rows, units, 1, 4, units + (apart - units)%(2*apart))
  if mat.block == 1: return PaddedRows(rows, units, 4 if rows == 16 else 2, 8)
  return PaddedRows(rows, units, 1, 8)

def column_layout(mat:Matrix, block_n:int, width:int) -> PaddedRows:
  """Returns the LDS layout for a transposed tile of `block_n` rows, as operand A of products that sum over the tile's rows."""
  return PaddedRows(round_up(width, mat.M), block_n//mat.unit, v_skew(mat, block_n))

def turned_layout(mat:Matrix, rows:int, width:int) -> PaddedRows:
  """Returns the LDS layout of rows of `width` elements, from which loads that transpose read columns."""
  # such a load reaches four neighbouring rows, 64 bytes of each: these lie in different banks; so do sixteen neighbouring rows, of which other loads
  # read 16 bytes each
  units = contraction(mat, width)//mat.unit
  return PaddedRows(rows, units, 1, 4, units + (4 - units)%8)

@dataclass(frozen=True)
class Tile(ForwardShape):
  """Tile description of the forward kernel on AMD's matrix units."""
  _: KW_ONLY
  matrix: Matrix
  pack_gqa: bool = False       # a tile has the queries of all heads that share a key/value head: K and V are read once for all of them
  sparing: bool = False        # without prefetch, an iteration loads V only after K is in LDS: fewer registers
  rescale_above: float = 8.0   # accumulators are rescaled when a row maximum grows by more than this, in powers of two; 0: whenever it grows
  new_addresses: bool = False  # with `sparing`, an iteration computes the addresses of its loads again, instead of keeping them: even fewer registers

  kernel: ClassVar[str] = "forward"

  @property
  def block_m(self) -> int: return self.waves*self.q_tiles*self.matrix.N
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  def layouts(self, p:Problem) -> tuple[PaddedRows, PaddedRows, PaddedRows]:
    """Returns (layout of Q, layout of K, layout of V^T) in LDS."""
    mat = self.matrix
    return row_layout(mat, self.block_m, p.D), row_layout(mat, self.block_n, p.D), column_layout(mat, self.block_n, p.Dv)
  @property
  def by_tensor(self) -> bool: return self.prefetch == 0 and self.sparing
  @property
  def by_item(self) -> bool: return False
  @property
  def buffers(self) -> int:
    """Number of LDS buffers for tiles of K, and also for tiles of V: 2 if `prefetch` is 2, otherwise 1."""
    return max(1, self.prefetch)
  def lds_bytes(self, p:Problem) -> int:
    q, k, v = self.layouts(p)
    return UNIT_BYTES*(self.buffers*(k.size + v.size) + (q.size if self.q_in_lds else 0))
  @property
  def options(self) -> str:
    """Text that names the options of this tile description whose values are not the default, such as "prefetch=2"."""
    said = [name for name in ("q_in_lds", "fenced", "sparing", "new_addresses") if getattr(self, name)]
    return " ".join(said + [f"prefetch={self.prefetch}"]*(self.prefetch != 1))
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"

@dataclass(frozen=True)
class BackwardTile(BackwardShape):
  """Tile description of a backward kernel on AMD's matrix units: a workgroup owns `block_m` rows and loops over tiles of `block_n` rows."""
  # own rows: queries in backward_dq, keys in backward_dkdv; walked rows: of the other kind
  _: KW_ONLY
  matrix: Matrix
  keys: bool = False       # the own rows are keys
  dq_matrix: Matrix|None = None    # matrix instruction of the product dQ = dS K; given if the own rows are keys, and the workgroup also adds their
                                   # part of dQ to memory

  suffix: ClassVar[str] = ""

  @property
  def block_m(self) -> int: return self.waves*self.matrix.N
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def pack_gqa(self) -> bool: return False
  @property
  def buffers(self) -> int: return max(1, self.prefetch)
  @property
  def by_tensor(self) -> bool: return self.prefetch == 0 and self.sparing
  @property
  def new_addresses(self) -> bool: return True
  @property
  def torn(self) -> bool:
    """Whether this tile description is invalid: the compiler could not read all 16-byte units of a matrix operand between two fences."""
    # The compiler moves no read from LDS across a fence, and there is a fence after every `fenced` units of 16 bytes. The operand of a matrix
    # instruction must be read between two fences.
    return bool(self.fenced and self.fenced % max(1, self.matrix.operand//self.matrix.unit))
  @property
  def ds(self) -> PaddedRows:
    """Layout of dS in LDS: a row for each query of the tile, or, if loads transpose (field `turning`), a row for each key."""
    return turned_layout(self.matrix, self.block_m, self.block_n) if self.turning else PaddedRows(self.block_n, self.block_m//self.matrix.unit)
  def row_layout(self, width:int) -> PaddedRows:
    """Returns the layout, in LDS, of a tile of rows of `width` elements, not transposed."""
    return (turned_layout if self.turning else both_ways_layout)(self.matrix, self.block_n, width)
  @property
  def adds_dq(self) -> bool: return self.dq_matrix is not None
  def dq_columns(self, p:Problem) -> int:
    """Returns how many matrix tiles lie side by side in a row of dQ."""
    assert self.dq_matrix is not None
    # the number of waves is a multiple of this number
    return p.D//self.dq_matrix.N
  def dq_tiles(self, p:Problem) -> int:
    """Returns how many matrix tiles of dQ each wave computes for a tile of queries."""
    assert self.dq_matrix is not None
    return self.block_n//self.dq_matrix.M*self.dq_columns(p)//self.waves
  def products_of_trip(self, p:Problem) -> int:
    """Returns how many matrix instructions a wave that owns keys needs in one iteration for S, dP, dV and dK."""
    return 2*(p.D + p.Dv)*self.block_n//(self.matrix.M*self.matrix.K)
  def products_of_dq(self, p:Problem) -> int:
    """Returns how many matrix instructions a wave needs in one iteration for its part of dQ."""
    assert self.dq_matrix is not None
    return self.dq_tiles(p)*self.block_m//self.dq_matrix.K
  def lds_bytes(self, p:Problem) -> int:
    rows = [self.row_layout(width).size for width in (p.D, p.Dv)]
    columns = [0 if self.turning else column_layout(self.matrix, self.block_n, width).size for width in ((p.D, p.Dv) if self.keys else (p.D,))]
    own = [row_layout(self.matrix, self.block_m, width).size for width, in_lds in zip((p.D, p.Dv), self.own_in_lds) if in_lds]
    numbers = units_of_query_values(p, self.block_n) if self.keys else 0
    own += [self.ds.size]*self.adds_dq
    return UNIT_BYTES*(self.buffers*(sum(rows) + (sum(columns) if self.passes == 1 else max(columns)) + numbers) + sum(own))
  @property
  def options(self) -> str:
    kept = [name for name, in_lds in zip(("k", "v") if self.keys else ("q", "do"), self.own_in_lds) if in_lds]
    numbers = [f"{name}={value}" for name, value, usual in (("fenced", self.fenced, 0), ("prefetch", self.prefetch, 1), ("passes", self.passes, 1),
                                                                   ("ahead", self.ahead, 0), ("read_ahead", self.read_ahead, 0)) if value != usual]
    flags = [name for name in ("sparing", "by_item", "turning") if getattr(self, name)]
    return " ".join([f"{' and '.join(kept)} in LDS"]*bool(kept) + numbers + flags)
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"

def matrix_of_dq(p:Problem, arch:Chip) -> Matrix:
  """Returns the matrix instruction of the product dQ = dS K in kernels whose workgroups own keys and add to dQ."""
  large, small = arch.matrix[p.dtype]
  # the chip's larger one if four waves then each have columns of dQ of their own, and otherwise the smaller one
  return large if p.D >= WAVES_OF_DQ*large.N else small

def at_once_tile(p:Problem, arch:Chip, shape:BackwardShape) -> BackwardTile:
  """Returns the tile description of the kernel that computes dq, dk and dv at once, with the tile shape `shape`."""
  return BackwardTile(**vars(shape), matrix=arch.matrix[p.dtype][0], keys=True, dq_matrix=matrix_of_dq(p, arch))

@dataclass(frozen=True)
class MlaTile(MlaShape, SharingTile):
  """Tile description of the kernel of latent attention on AMD's matrix units."""
  _: KW_ONLY
  matrix: Matrix
  rescale_above: float = 8.0   # the reference of a row is raised when its largest score exceeds it by more than this, in powers of two

  kernel: ClassVar[str] = "mla"

  @property
  def block_m(self) -> int: return self.row_tiles*self.matrix.N
  @property
  def by_tensor(self) -> bool: return False
  @property
  def new_addresses(self) -> bool: return False
  @property
  def by_item(self) -> bool: return False
  @property
  def buffers(self) -> int: return 1
  def columns(self, p:Problem) -> int:
    """Returns the number of matrix tiles, side by side in a row of O, that each wave computes."""
    return ceildiv(ceildiv(p.Dv, self.matrix.M), self.waves)
  def layouts(self, p:Problem) -> tuple[PaddedRows, PaddedRows]:
    """Returns (layout of K, layout of P) in LDS."""
    return row_layout(self.matrix, self.block_n, p.D), PaddedRows(self.block_m, self.block_n//self.matrix.unit)
  def lds_bytes(self, p:Problem) -> int:
    k, weights = self.layouts(p)
    return UNIT_BYTES*(k.size + weights.size + self.scalar_places(p).units(self.block_m))
  @property
  def options(self) -> str:
    numbers = [f"{name}={value}" for name, value, usual in (("fenced", self.fenced, 0), ("weight_parts", self.weight_parts, 1),
                                                            ("prefetch", self.prefetch, 1)) if value != usual]
    return " ".join(["q_reloaded"]*self.q_reloaded + numbers)
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"
