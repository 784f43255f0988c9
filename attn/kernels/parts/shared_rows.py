"""Where the waves of a workgroup share the rows of O: each has some of its columns, and of the scores some queries and some keys of each trip."""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Any
from attn.kernels.parts.allocator import Allocator, InLds
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.scores import Scores
from attn.problem import Problem
from attn.tinygrad_compat import UOp, dtypes

class SharingTile:
  """A tile of a kernel whose waves share rows: of the queries of all heads that share a key/value head, and of a trip's keys."""
  matrix: Any
  row_tiles: int
  key_parts: int
  @property
  def waves(self) -> int: return self.row_tiles*self.key_parts
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def pack_gqa(self) -> bool: return True
  def told(self, p:Problem) -> Told: return Told(self.key_parts, 1 + p.writes_lse)

@dataclass(frozen=True)
class Share:
  """A wave's part of the work on `row_tiles` matrix tiles of queries and `block_n` keys, which come in `key_parts`."""
  wave: UOp
  row_tiles: int
  block_n: int
  key_parts: int
  @property
  def keys(self) -> int:
    """Of a part."""
    return self.block_n//self.key_parts
  @property
  def tile(self) -> UOp:
    """The queries whose scores the wave computes."""
    return self.wave%self.row_tiles
  @property
  def part(self) -> UOp:
    """The keys of a trip whose scores it computes."""
    return self.wave//self.row_tiles
  def scores(self, of_all:Scores) -> Scores:
    """Those of the wave, among the scores of the workgroup: its tile number in trip t is `number(t)`."""
    return replace(of_all, block_n=self.keys)
  def number(self, t:UOp) -> UOp: return t*self.key_parts + self.part

@dataclass(frozen=True)
class Told:
  """The numbers of a row that waves tell each other: by which factor what was accumulated of it is to be multiplied, its largest score among each of
  `parts` of the keys, and at the end its reference and the sums of P over each part, of `kinds` kinds."""
  parts: int
  kinds: int
  factor: int = 0
  reference: int = 1
  @property
  def count(self) -> int: return 2 + self.parts*(1 + self.kinds)
  def top(self, part:int|UOp) -> int|UOp: return 2 + part
  def total(self, kind:int, part:int|UOp) -> int|UOp: return 2 + (1 + kind)*self.parts + part

@dataclass(frozen=True)
class RowScalars(InLds):
  """Numbers in fp32, `count` of them for each of `rows` rows, in LDS."""
  buffer: UOp       # units
  rows: int
  base: UOp|int = 0
  @staticmethod
  def units(rows:int, count:int) -> int: return ceildiv(rows*count, 4)
  @staticmethod
  def of(new:Allocator, rows:int, count:int) -> RowScalars: return RowScalars(new.lds(RowScalars.units(rows, count)), rows)
  def after(self, *deps:UOp) -> RowScalars: return replace(self, buffer=self.buffer.after(*deps))
  def at(self, i:int|UOp, row:UOp) -> UOp: return self.base*4 + i*self.rows + row
  def load(self, i:int|UOp, row:UOp) -> UOp: return self.buffer.bitcast(dtypes.float)[self.at(i, row)].load()
  def store(self, i:int|UOp, row:UOp, value:UOp, gate:UOp) -> UOp: return self.buffer.bitcast(dtypes.float)[self.at(i, row).valid(gate)].store(value)
