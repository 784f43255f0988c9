"""Layouts of the rows of a tile in LDS (CUDA: shared memory). There is one layout for each way in which rows are written and read.

Places are counted in units of 16 bytes. Each layout makes sure that lanes which access LDS at the same time use different banks: docs/algorithm.md.
"""
from __future__ import annotations
from dataclasses import dataclass, field, replace
from typing import Self
from attn.chips.matrix import Int
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.ops import common as ops
from attn.tinygrad_compat import UOp, dtypes

LINE = 8              # units in a line of 128 bytes, which spans all banks of NVIDIA's chips
WAVE_UNITS = 64       # units that a wave loads straight to LDS with one instruction, one unit per lane

@dataclass(frozen=True)
class SharedLayout:
  """A tile of `rows` rows of `units` units each, from place `base` on."""
  rows: int
  units: int
  base: UOp|int = field(default=0, kw_only=True)
  @property
  def size(self) -> int:
    """Units that the tile takes, including its gaps."""
    raise NotImplementedError
  def place(self, row:UOp, unit:UOp) -> UOp:
    """Returns the place of a unit of a row."""
    raise NotImplementedError
  def moved_to(self, base:UOp|int) -> Self:
    """Returns the layout of this tile at another base."""
    return replace(self, base=base)

@dataclass(frozen=True)
class PaddedRows(SharedLayout):
  """A layout of rows one after another. By default the stride is an odd number of units, so that eight neighbouring rows lie in different banks.
  After every `together` rows there may be a gap of `skew` units."""
  skew: int = 0
  together: int = 16
  padded: int = 0     # units of a row with its padding; 0: the next odd number of units
  @property
  def stride(self) -> int: return self.padded or self.units | 1
  @property
  def size(self) -> int: return self.begin(self.rows) + (self.skew if self.rows%self.together else 0)
  def begin(self, row:Int) -> Int:
    """Returns the units from the beginning of the tile to a row."""
    return row*self.stride + row//self.together*self.skew
  def place(self, row:UOp, unit:UOp, pieces:int=1) -> UOp:
    """Returns the place of a unit, counted in `pieces` pieces of a unit. A constant that is added to a row must be a multiple of `together`, or must
    stay within the `together` rows of that row. Constants are added last: tinygrad then computes the common part of many places only once."""
    (row, rows), (unit, units) = row.pop_const(), unit.pop_const()
    common = (self.base + self.begin(row))*pieces + unit
    return common.cast(dtypes.int) + (self.begin(int(rows))*pieces + int(units))

@dataclass(frozen=True)
class ExchangedChunks(SharedLayout):
  """A layout for direct loads to LDS. One direct load of a wave fills a chunk of rows: 64 units without a gap. There is padding between chunks, and
  row r of a chunk has its unit u at place u ^ r*exchange. Few different exchanges need few address registers: the rest goes into the instructions'
  offsets."""
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
    """Returns the place of a unit in row `row` of a chunk. Given a place, returns the unit that lies there."""
    return unit ^ row*self.exchange
  def place(self, row:UOp, unit:UOp) -> UOp:
    in_chunk = row%self.chunk
    return row//self.chunk*self.stride + in_chunk*self.units + self.exchanged(in_chunk, unit)

@dataclass(frozen=True)
class CopiedLayout(SharedLayout):
  """A layout to which threads copy by cp.async, one unit each."""
  @property
  def across(self) -> int:
    """Number of threads that copy one row."""
    raise NotImplementedError
  @property
  def panels(self) -> int:
    """Number of times that these threads copy a part of a row, each time LINE units further on."""
    return 1
  @property
  def pitch(self) -> int:
    """Units from a row to the row eight further on, divided by eight."""
    raise NotImplementedError

@dataclass(frozen=True)
class SwizzledRows(CopiedLayout):
  """A layout of rows in whole lines of 128 bytes. The units of a line are permuted by xor with the row's number. Then neither the eight rows of an
  8x8 matrix that ldmatrix reads nor the eight units of a line that is copied share a bank."""
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
    """Returns the place of the unit that is `rows` rows (a multiple of 8) and `units` units (even) beyond unit `unit` (0 or 1) of row `row`. The
    place is the sum of two parts: one for a register, which takes few different values, and a constant."""
    return self.place(row, unit) ^ units%LINE, rows*self.stride + units//LINE*LINE

@dataclass(frozen=True)
class LongRows(SwizzledRows):
  """A `SwizzledRows` layout for rows of many lines, which few threads copy line by line. All units that one thread copies lie at constant distances
  from its first unit."""
  @property
  def across(self) -> int: return LINE
  @property
  def panels(self) -> int: return self.stride//LINE

@dataclass(frozen=True)
class SwizzledPanels(CopiedLayout):
  """A layout that wgmma reads (attn/ops/hopper.py): panels one after another, each with 128 bytes of every row. The number of rows is a multiple
  of 8."""
  @property
  def across(self) -> int: return 1 << (self.units - 1).bit_length()
  @property
  def pitch(self) -> int: return LINE
  @property
  def panel(self) -> int:
    """Units in one panel."""
    return self.rows*LINE
  @property
  def size(self) -> int: return ceildiv(self.units, LINE)*self.panel
  def place(self, row:UOp, unit:UOp) -> UOp:
    line = self.base + unit//LINE*self.panel + row*LINE
    return line.cast(dtypes.int) + ((unit%LINE).cast(dtypes.int) ^ (row%LINE).cast(dtypes.int))

@dataclass(frozen=True)
class LdsTile(InLds):
  """A tile in LDS, or several tiles one after another: a buffer and the layout of its rows."""
  buffer: UOp
  layout: SharedLayout
  @staticmethod
  def of(new:Allocator, layout:SharedLayout, buffers:int=1) -> LdsTile:
    """Allocates LDS for `buffers` tiles of a layout, one after another."""
    return LdsTile(new.lds(buffers*layout.size), layout)
  def after(self, *deps:UOp) -> LdsTile: return replace(self, buffer=self.buffer.after(*deps))
  def nth(self, i:UOp) -> LdsTile: return replace(self, layout=self.layout.moved_to(i*self.layout.size))
  @property
  def halves(self) -> UOp:
    """The buffer as pieces of 8 bytes, two per unit."""
    return self.buffer.bitcast(ops.u32(2))
  def from_row(self, row:UOp) -> LdsTile:
    """Returns the part of the tile that begins at row `row`, a multiple of 16."""
    return replace(self, layout=self.layout.moved_to(self.layout.place(row, UOp.const(0))))
  def load(self, row:UOp, unit:UOp) -> UOp: return self.buffer[self.layout.place(row, unit)].load()
  def store(self, row:UOp, unit:UOp, value:UOp, gate:UOp) -> UOp: return self.buffer[self.layout.place(row, unit).valid(gate)].store(value)
  def store_half(self, row:UOp, half:UOp, value:UOp, gate:UOp) -> UOp:
    """Stores 8 bytes at the `half`-th half unit of a row. The layout must have the units of a row side by side."""
    assert isinstance(self.layout, PaddedRows)
    return self.halves[self.layout.place(row, half, 2).valid(gate)].store(value)
