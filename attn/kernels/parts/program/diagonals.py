"""Lists of tiles of scores along diagonals. All tiles of a list have the same i - j (query number minus key number) at their first score."""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.kernels.parts.program.counts import ceildiv
from attn.tinygrad_compat import UOp

# A tile has `block_m` queries and `block_n` keys. From one tile of a diagonal to the next, queries and keys both move on by the least common multiple
# of block_m and block_n, so i - j stays as it is at each position in the tile. If the tiles of a diagonal are added up, the result has sums for
# block_m + block_n - 1 values of i - j. Every tile of scores belongs to exactly one diagonal.

@dataclass(frozen=True)
class Diagonals:
  """Lists of tiles of scores along diagonals. All tiles of a list have the same i - j (query number minus key number) at their first score."""
  # The n-th tile of a diagonal has the block of queries `phase + n*step_m` and the tile of keys `n*step_n + offset - offset_0`. The numbers `phase`
  # and `offset` choose the diagonal. `offset_0` makes every `offset` nonnegative. A diagonal has only those n for which both the block and the tile
  # exist.
  queries: int
  keys: int
  block_m: int
  block_n: int

  @property
  def step_m(self) -> int: return self.block_n//math.gcd(self.block_m, self.block_n)
  @property
  def step_n(self) -> int: return self.block_m//math.gcd(self.block_m, self.block_n)
  @property
  def blocks(self) -> int: return ceildiv(self.queries, self.block_m)
  @property
  def tiles(self) -> int: return ceildiv(self.keys, self.block_n)
  @property
  def phases(self) -> int: return min(self.step_m, self.blocks)
  @property
  def most(self) -> int:
    """Upper bound on the number of tiles in a diagonal."""
    return ceildiv(self.blocks, self.step_m)
  @property
  def offset_0(self) -> int: return (self.most - 1)*self.step_n
  @property
  def offsets(self) -> int: return self.offset_0 + self.tiles
  @property
  def count(self) -> int: return self.phases*self.offsets

  def place(self, number:UOp, n:UOp) -> tuple[UOp, UOp]:
    """Returns (index of the block of queries, index of the tile of keys) of the n-th tile on diagonal number `number`."""
    block, tile = number//self.offsets + n*self.step_m, n*self.step_n + number%self.offsets - self.offset_0
    # if the diagonal has no such tile: some tile that exists
    return block.minimum(self.blocks - 1), tile.maximum(0).minimum(self.tiles - 1)
  def range(self, number:UOp) -> tuple[UOp, UOp]:
    """Returns (n of the first tile on diagonal number `number`, number of tiles on it)."""
    phase, offset = number//self.offsets, number%self.offsets - self.offset_0
    first = ((self.step_n - 1 - offset)//self.step_n).maximum(0)
    of_queries, of_keys = (self.blocks - phase + (self.step_m - 1))//self.step_m, (self.tiles - offset + (self.step_n - 1))//self.step_n
    return first, (of_queries.minimum(of_keys) - first).maximum(0).minimum(self.most)
