"""Code for kernels whose waves compute O of the same rows together. Each wave holds some columns of O, and computes the scores of some queries and
some keys of each tile."""
from __future__ import annotations
from dataclasses import dataclass, replace
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.common import ScalarPlaces
from attn.tinygrad_compat import UOp, dtypes

@dataclass(frozen=True)
class Share:
  """The part of a tile's scores that one wave computes. The workgroup has `row_tiles` matrix tiles of queries and `block_n` keys. The keys are
  divided into `key_parts` parts."""
  wave: UOp
  row_tiles: int
  block_n: int
  key_parts: int
  @property
  def keys(self) -> int:
    """Number of keys in this wave's part of the `block_n` keys."""
    return self.block_n//self.key_parts
  @property
  def tile(self) -> UOp:
    """Index of the matrix tile of queries whose scores this wave computes."""
    return self.wave%self.row_tiles
  @property
  def part(self) -> UOp:
    """Index of this wave's part of the keys: the part whose scores the wave computes."""
    return self.wave//self.row_tiles
  def scores(self, of_all:Scores) -> Scores:
    """Returns the `Scores` of this wave: the rows of the workgroup's scores `of_all`, but only the wave's part of the keys. The wave counts tiles by
    the size of its own part: in iteration t its keys are the tile with the index `tile_number(t)`."""
    return replace(of_all, block_n=self.keys)
  def tile_number(self, t:UOp) -> UOp: return t*self.key_parts + self.part

@dataclass(frozen=True)
class RowScalars(InLds):
  """Table of fp32 values in LDS, through which waves exchange values that belong to a row, such as its maximum and its sum. The table has one value
  of each kind for each of the `rows` rows."""
  buffer: UOp       # in units of 16 bytes
  rows: int
  base: UOp|int = 0
  @staticmethod
  def of(new:Allocator, rows:int, places:ScalarPlaces) -> RowScalars: return RowScalars(new.lds(places.units(rows)), rows)
  def after(self, *deps:UOp) -> RowScalars: return replace(self, buffer=self.buffer.after(*deps))
  def place(self, i:int|UOp, row:UOp) -> UOp: return self.base*4 + i*self.rows + row
  def load(self, i:int|UOp, row:UOp) -> UOp: return self.buffer.bitcast(dtypes.float)[self.place(i, row)].load()
  def store(self, i:int|UOp, row:UOp, value:UOp, gate:UOp) -> UOp:
    return self.buffer.bitcast(dtypes.float)[self.place(i, row).valid(gate)].store(value)
