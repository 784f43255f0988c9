"""How the rows of a tile lie in LDS, which CUDA calls shared memory: one layout for each way in which rows are written and read.

A place is counted in units of 16 bytes. Each layout sees to it that what some lanes access at a time lies in different banks: docs/algorithm.md.
"""
from __future__ import annotations
from dataclasses import dataclass, field, replace
from typing import Self
from attn.chips.matrix import Int
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.ops import common as ops
from attn.tinygrad_compat import UOp, dtypes

LINE = 8              # units of 128 bytes: all banks of NVIDIA's chips
WAVE_UNITS = 64       # units that a wave loads straight to LDS at a time, one a lane

@dataclass(frozen=True)
class SharedLayout:
  """A tile of `rows` rows of `units` units each, from place `base` on."""
  rows: int
  units: int
  base: UOp|int = field(default=0, kw_only=True)
  @property
  def size(self) -> int:
    """Units that the tile takes, with its gaps."""
    raise NotImplementedError
  def place(self, row:UOp, unit:UOp) -> UOp:
    """Where a unit of a row lies."""
    raise NotImplementedError
  def moved_to(self, base:UOp|int) -> Self:
    """The tile at another place, which begins at unit `base`."""
    return replace(self, base=base)

@dataclass(frozen=True)
class PaddedRows(SharedLayout):
  """Rows one after another. By default their stride is an odd number of units, so that eight neighbouring rows lie in different banks; after every
  `together` rows there may be a gap of `skew` units."""
  skew: int = 0
  together: int = 16
  padded: int = 0     # units of a row with its padding; 0: as many as make an odd number
  @property
  def stride(self) -> int: return self.padded or self.units | 1
  @property
  def size(self) -> int: return self.begin(self.rows) + (self.skew if self.rows%self.together else 0)
  def begin(self, row:Int) -> Int:
    """Where a row begins, counted from the first one."""
    return row*self.stride + row//self.together*self.skew
  def place(self, row:UOp, unit:UOp, pieces:int=1) -> UOp:
    """The same for a unit in so many pieces. What is added to a row is a multiple of `together`, or stays in its `together`. Constants come last:
    tinygrad then works once on the sum that many places have in common."""
    (row, rows), (unit, units) = row.pop_const(), unit.pop_const()
    common = (self.base + self.begin(row))*pieces + unit
    return common.cast(dtypes.int) + (self.begin(int(rows))*pieces + int(units))

@dataclass(frozen=True)
class ExchangedChunks(SharedLayout):
  """One direct load of a wave fills 64 units without a gap: a chunk of rows. Chunks are padded apart, and row r of a chunk has its unit u at place
  u ^ r*exchange. Few exchanges keep the addresses few: the rest is in the instructions' offsets."""
  exchange: int = 1
  @property
  def chunk(self) -> int:
    """Rows of a chunk."""
    return WAVE_UNITS//self.units
  @property
  def stride(self) -> int:
    """Units from one chunk to the next."""
    return WAVE_UNITS + 4
  @property
  def size(self) -> int: return self.rows//self.chunk*self.stride
  def exchanged(self, row:UOp, unit:UOp) -> UOp:
    """The place of a unit in row `row` of a chunk. The function is its own inverse: of a place it is the unit that lies there."""
    return unit ^ row*self.exchange
  def place(self, row:UOp, unit:UOp) -> UOp:
    in_chunk = row%self.chunk
    return row//self.chunk*self.stride + in_chunk*self.units + self.exchanged(in_chunk, unit)

@dataclass(frozen=True)
class CopiedLayout(SharedLayout):
  """A layout that threads copy to by cp.async, a unit each."""
  @property
  def across(self) -> int:
    """Threads that copy a row."""
    raise NotImplementedError
  @property
  def panels(self) -> int:
    """How often they do, LINE units further on each time."""
    return 1
  @property
  def pitch(self) -> int:
    """Units from a row to the one eight further on, over eight."""
    raise NotImplementedError

@dataclass(frozen=True)
class SwizzledRows(CopiedLayout):
  """Whole lines of 128 bytes, whose units are permuted by xor with the row's number. Then neither the eight rows of an 8x8 matrix nor the eight units
  of a line that is copied share a bank."""
  @property
  def stride(self) -> int: return round_up(self.units, LINE)
  @property
  def size(self) -> int: return self.rows*self.stride
  @property
  def across(self) -> int: return self.stride
  @property
  def pitch(self) -> int: return self.stride
  def place(self, row:UOp, unit:UOp) -> UOp:
    return (self.base + row*self.stride).cast(dtypes.int) + (unit.cast(dtypes.int) ^ (row%LINE).cast(dtypes.int))
  def further(self, row:UOp, unit:UOp, rows:int, units:int) -> tuple[UOp, int]:
    """Where a unit lies that is `rows` (a multiple of 8) rows and `units` (even) units on from `unit` (0 or 1) of `row`: a part for a register, of
    which there are few different ones, and a constant."""
    return self.place(row, unit) ^ units%LINE, rows*self.stride + units//LINE*LINE

@dataclass(frozen=True)
class LongRows(SwizzledRows):
  """Swizzled rows of many lines, which few threads copy line by line: each unit that a thread copies is a constant distance from its first one."""
  @property
  def across(self) -> int: return LINE
  @property
  def panels(self) -> int: return self.stride//LINE

@dataclass(frozen=True)
class SwizzledPanels(CopiedLayout):
  """Panels of 128 bytes across all rows (a multiple of 8), one after another, as wgmma reads them: see attn/ops/hopper.py."""
  @property
  def across(self) -> int: return 1 << (self.units - 1).bit_length()
  @property
  def pitch(self) -> int: return LINE
  @property
  def panel(self) -> int:
    """Units of a panel."""
    return self.rows*LINE
  @property
  def size(self) -> int: return ceildiv(self.units, LINE)*self.panel
  def place(self, row:UOp, unit:UOp) -> UOp:
    line = self.base + unit//LINE*self.panel + row*LINE
    return line.cast(dtypes.int) + ((unit%LINE).cast(dtypes.int) ^ (row%LINE).cast(dtypes.int))

@dataclass(frozen=True)
class LdsTile(InLds):
  """A tile in LDS, or several of them one after another: a buffer and the layout of its rows."""
  buffer: UOp
  layout: SharedLayout
  @staticmethod
  def of(new:Allocator, layout:SharedLayout, buffers:int=1) -> LdsTile:
    """Reserves `buffers` tiles of this layout."""
    return LdsTile(new.lds(buffers*layout.size), layout)
  def after(self, *deps:UOp) -> LdsTile: return replace(self, buffer=self.buffer.after(*deps))
  def nth(self, i:UOp) -> LdsTile: return replace(self, layout=self.layout.moved_to(i*self.layout.size))
  @property
  def halves(self) -> UOp:
    """The buffer in pieces of 8 bytes, of which a unit has two."""
    return self.buffer.bitcast(ops.u32(2))
  def from_row(self, row:UOp) -> LdsTile:
    """The rows from `row`, a multiple of 16, on."""
    return replace(self, layout=self.layout.moved_to(self.layout.place(row, UOp.const(0))))
  def load(self, row:UOp, unit:UOp) -> UOp: return self.buffer[self.layout.place(row, unit)].load()
  def store(self, row:UOp, unit:UOp, value:UOp, gate:UOp) -> UOp: return self.buffer[self.layout.place(row, unit).valid(gate)].store(value)
  def store_half(self, row:UOp, half:UOp, value:UOp, gate:UOp) -> UOp:
    """Stores 8 bytes at the `half`-th half unit of a row, in a layout that has a row's units side by side."""
    assert isinstance(self.layout, PaddedRows)
    return self.halves[self.layout.place(row, half, 2).valid(gate)].store(value)
