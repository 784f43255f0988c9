"""Latent attention: how a workgroup's waves divide the scores of a tile. Of O, each wave holds some columns for all queries."""
from __future__ import annotations
from dataclasses import dataclass, replace
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.common import ScalarPlaces
from attn.tinygrad_compat import UOp, dtypes

@dataclass(frozen=True)
class Share:
  """The scores that one wave computes in an iteration: those of one matrix tile of queries with one of `key_parts` parts of the tile's keys."""
  wave: UOp
  row_tiles: int   # matrix tiles of queries of the workgroup
  block_n: int     # keys of a tile
  key_parts: int   # parts into which the keys of a tile are divided
  @property
  def keys(self) -> int:
    """Number of keys in one part of a tile."""
    return self.block_n//self.key_parts
  @property
  def tile(self) -> UOp:
    """Index of the wave's matrix tile, among the matrix tiles of queries that the workgroup owns."""
    return self.wave%self.row_tiles
  @property
  def part(self) -> UOp:
    """Index of the wave's part, among the `key_parts` parts of the keys of each tile."""
    return self.wave//self.row_tiles
  def scores(self, of_all:Scores) -> Scores:
    """Returns `of_all`, the scores of the whole workgroup, restricted to the scores that this wave computes."""
    # a tile then has only the keys of one wave: in iteration t the wave computes tile number `tile_number(t)`
    return replace(of_all, block_n=self.keys)
  def tile_number(self, t:UOp) -> UOp: return t*self.key_parts + self.part

@dataclass(frozen=True)
class RowScalars(InLds):
  """LDS buffer through which the waves of a workgroup exchange fp32 numbers of each query, such as the maximum of its scores."""
  buffer: UOp       # in units of 16 bytes
  rows: int   # the table has this many numbers of each kind, one for each row
  base: UOp|int = 0
  @staticmethod
  def of(new:Allocator, rows:int, places:ScalarPlaces) -> RowScalars: return RowScalars(new.lds(places.units(rows)), rows)
  def after(self, *deps:UOp) -> RowScalars: return replace(self, buffer=self.buffer.after(*deps))
  def place(self, i:int|UOp, row:UOp) -> UOp: return self.base*4 + i*self.rows + row
  def load(self, i:int|UOp, row:UOp) -> UOp: return self.buffer.bitcast(dtypes.float)[self.place(i, row)].load()
  def store(self, i:int|UOp, row:UOp, value:UOp, gate:UOp) -> UOp:
    return self.buffer.bitcast(dtypes.float)[self.place(i, row).valid(gate)].store(value)
