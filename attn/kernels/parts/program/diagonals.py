"""Diagonals of tiles: the tiles of scores in which one number, i - j, belongs to each place in the tile.

A tile has `block_m` queries and `block_n` keys. From one tile of a diagonal to the next, queries and keys both move on by the least common multiple
of block_m and block_n, so i - j stays as it is at each place of the tile. The sum of the tiles of a diagonal has the sums of block_m + block_n - 1
values of i - j. Together the diagonals hold every tile of scores once."""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.kernels.parts.program.counts import ceildiv
from attn.tinygrad_compat import UOp

@dataclass(frozen=True)
class Diagonals:
  """The diagonals of a problem's tiles. They are numbered by (phase, offset): a diagonal has the block of queries `phase + n*step_m` and the tile of
  keys `n*step_n + offset - offset_0`, for each n for which both exist."""
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
    """Most tiles of a diagonal that there may be."""
    return ceildiv(self.blocks, self.step_m)
  @property
  def offset_0(self) -> int: return (self.most - 1)*self.step_n
  @property
  def offsets(self) -> int: return self.offset_0 + self.tiles
  @property
  def count(self) -> int: return self.phases*self.offsets

  def place(self, number:UOp, n:UOp) -> tuple[UOp, UOp]:
    """Returns the block of queries and the tile of keys of a diagonal for one n. For an n for which there is no tile, returns a tile that
    exists."""
    block, tile = number//self.offsets + n*self.step_m, n*self.step_n + number%self.offsets - self.offset_0
    return block.minimum(self.blocks - 1), tile.maximum(0).minimum(self.tiles - 1)
  def range(self, number:UOp) -> tuple[UOp, UOp]:
    """Returns the first n of a diagonal, and how many there are: 0 if the diagonal has no tile."""
    phase, offset = number//self.offsets, number%self.offsets - self.offset_0
    first = ((self.step_n - 1 - offset)//self.step_n).maximum(0)
    of_queries, of_keys = (self.blocks - phase + (self.step_m - 1))//self.step_m, (self.tiles - offset + (self.step_n - 1))//self.step_n
    return first, (of_queries.minimum(of_keys) - first).maximum(0).minimum(self.most)
