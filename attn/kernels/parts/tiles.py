"""How a kernel divides a problem over workgroups and threads: what every tile says, and the tile of AMD's kernels."""
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar, Protocol
from attn.chips.matrix import UNIT_BYTES, Matrix
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.layouts import PaddedRows
from attn.kernels.parts.staging import both_ways_layout, column_layout, row_layout
from attn.problem import Problem

class BlockTile(Protocol):
  """What a kernel's tile says of how its workgroups divide the work."""
  @property
  def block_m(self) -> int: """Queries of a workgroup, times the heads that share its rows."""
  @property
  def block_n(self) -> int: """Keys of a trip."""
  @property
  def waves(self) -> int: """Waves (on NVIDIA warps) of a workgroup."""
  @property
  def threads(self) -> int: """Threads of a workgroup."""
  @property
  def pack_gqa(self) -> bool: """Whether a tile's rows are the queries of all the heads that share a key/value head."""
  def lds_bytes(self, p:Problem) -> int: """LDS that a workgroup takes."""

def heads_of(p:Problem, tile:BlockTile) -> int:
  """Query heads of a workgroup: row r of its block is query r//heads of head r%heads."""
  return p.H//p.Hkv if tile.pack_gqa else 1

def numbers_of_queries(p:Problem) -> tuple[str, ...]:
  """The tensors that have the numbers of each query which kernels that own keys bring to shared memory."""
  return ("lse", "delta", *["lse_rest"]*p.wide_scores)

def units_of_numbers(p:Problem, queries:int) -> int:
  """The units that the numbers of so many queries take there."""
  return len(numbers_of_queries(p))*4*queries//UNIT_BYTES

def blocks_of_queries(p:Problem, tile:BlockTile) -> tuple[int, int]:
  """(pieces, workgroups for each of them) of the queries of a head, or of as many heads as a workgroup takes. Where a device holds a piece from the
  front of a sequence and one from the back (`DealtRows`) none has rows of both: it would walk over keys which the first ones don't see."""
  pieces = 1 if p.dealt is None or not p.dealt.front else 2
  return pieces, ceildiv(p.Sq//pieces*heads_of(p, tile), tile.block_m)

@dataclass(frozen=True)
class Tile:
  """How a kernel divides the work on one chip."""
  matrix: Matrix
  waves: int         # waves of a workgroup, each with its own queries
  q_tiles: int       # tiles of matrix.N queries of a wave: they share the K and V operands
  block_n: int       # keys of a trip
  q_in_lds: bool = False       # Q is read from LDS in every trip instead of being kept in registers
  fenced: bool = False         # matrix work on one K or V tile is done before the next one is read from LDS: fewer registers
  prefetch: int = 1            # K and V tiles are loaded 0: for their own trip, 1: during the one before, 2: so, and stored to a second buffer in LDS
  pack_gqa: bool = False       # a tile's rows are the queries of all the heads that share a key/value head: K and V are read once for them
  sparing: bool = False        # without prefetch a trip loads K and V one after the other: fewer registers
  rescale_above: float = 8.0   # accumulators are rescaled when a row maximum has grown by more than this, in powers of two; 0: whenever one has grown
  anew: bool = False           # a trip that loads one after the other computes the addresses of pieces of rows anew: fewer registers still

  kernel: ClassVar[str] = "forward"

  @property
  def block_m(self) -> int: return self.waves*self.q_tiles*self.matrix.N
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  def layouts(self, p:Problem) -> tuple[PaddedRows, PaddedRows, PaddedRows]:
    """The tiles of Q, of K and of V^T in LDS."""
    mat = self.matrix
    return row_layout(mat, self.block_m, p.D), row_layout(mat, self.block_n, p.D), column_layout(mat, self.block_n, p.Dv)
  @property
  def in_turn(self) -> bool: return self.prefetch == 0 and self.sparing
  @property
  def by_item(self) -> bool: return False
  @property
  def buffers(self) -> int:
    """K tiles in LDS, and as many V tiles."""
    return max(1, self.prefetch)
  def lds_bytes(self, p:Problem) -> int:
    q, k, v = self.layouts(p)
    return UNIT_BYTES*(self.buffers*(k.size + v.size) + (q.size if self.q_in_lds else 0))
  @property
  def options(self) -> str:
    """What is not by default, in words."""
    said = [name for name in ("q_in_lds", "fenced", "sparing", "anew") if getattr(self, name)]
    return " ".join(said + [f"prefetch={self.prefetch}"]*(self.prefetch != 1))
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"

@dataclass(frozen=True)
class BackwardTile:
  """How a backward kernel divides the work: a workgroup has `block_m` rows of its own, queries in backward_dq and keys in backward_dkdv, and walks
  over the others by `block_n`."""
  matrix: Matrix
  waves: int         # waves of a workgroup, each with its own rows
  block_n: int
  own_in_lds: tuple[bool, bool] = (False, False)   # Q and dO, or K and V, are read from LDS in every trip instead of being kept in registers
  fenced: int = 0                                  # work on so many units of a row is done before the next ones are read from LDS; 0: no fences
  prefetch: int = 1
  sparing: bool = False    # what is waited for comes a few units at a time, own rows and what a trip loads for itself: fewer registers
  keys: bool = False       # its own rows are keys
  passes: int = 1          # over the queries: 2 for dv first and then dk, each with all registers for itself, and S twice
  by_item: bool = False    # of what a sparing trip loads for itself a thread takes one item after another: fewer registers still
  read_ahead: int = 0      # of a gradient's products operands of so many tiles are read while one before them is worked on, in spite of fences

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
  def in_turn(self) -> bool:
    """Whether of the tensors that a trip loads for itself one comes after another."""
    return self.prefetch == 0 and self.sparing
  @property
  def anew(self) -> bool: return True
  def lds_bytes(self, p:Problem) -> int:
    rows = [both_ways_layout(self.matrix, self.block_n, width).size for width in (p.D, p.Dv)]
    columns = [column_layout(self.matrix, self.block_n, width).size for width in ((p.D, p.Dv) if self.keys else (p.D,))]
    own = [row_layout(self.matrix, self.block_m, width).size for width, in_lds in zip((p.D, p.Dv), self.own_in_lds) if in_lds]
    numbers = units_of_numbers(p, self.block_n) if self.keys else 0
    return UNIT_BYTES*(self.buffers*(sum(rows) + (sum(columns) if self.passes == 1 else max(columns)) + numbers) + sum(own))
  @property
  def options(self) -> str:
    """What is not by default, in words."""
    kept = [name for name, in_lds in zip(("k", "v") if self.keys else ("q", "do"), self.own_in_lds) if in_lds]
    numbers = [f"{name}={value}" for name, value, usual in (("fenced", self.fenced, 0), ("prefetch", self.prefetch, 1), ("passes", self.passes, 1),
                                                                   ("read_ahead", self.read_ahead, 0)) if value != usual]
    flags = [name for name in ("sparing", "by_item") if getattr(self, name)]
    return " ".join([f"{' and '.join(kept)} in LDS"]*bool(kept) + numbers + flags)
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"
