"""How a kernel divides the work on one chip."""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips.matrix import Matrix

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b

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
  rescale_above: float = 8.0   # accumulators are rescaled when a row maximum has grown by more than this, in powers of two; 0: whenever one has grown

  @property
  def block_m(self) -> int: return self.waves*self.q_tiles*self.matrix.N
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def options(self) -> str:
    """What is not by default, in words."""
    return " ".join([name for name in ("q_in_lds", "fenced") if getattr(self, name)] + [f"prefetch={self.prefetch}"]*(self.prefetch != 1))
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"
