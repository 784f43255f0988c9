"""Layouts of a tile's rows in LDS (on NVIDIA: shared memory) that avoid bank conflicts. A layout says where each 16-byte unit of a row lies."""
from __future__ import annotations
from dataclasses import dataclass, field, replace
from typing import Self
from attn.chips.matrix import Int
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.ops import common as ops
from attn.tinygrad_compat import UOp, dtypes

# A place is a position in LDS, counted in units of 16 bytes. There is one layout for each way in which rows are written and read: lanes that access
# LDS at the same time use different banks.
LINE = 8              # units in a line of 128 bytes, which spans all banks of NVIDIA's chips
WAVE_UNITS = 64       # units that a wave loads straight to LDS with one instruction, one unit per lane

@dataclass(frozen=True)
class SharedLayout:
  """Layout of a tile of `rows` rows, each `units` units of 16 bytes long, in shared memory."""
  rows: int
  units: int
  base: UOp|int = field(default=0, kw_only=True)   # index of the 16-byte unit of shared memory at which the tile begins
  @property
  def size(self) -> int:
    """Number of 16-byte units that a tile takes in shared memory, including gaps."""
    raise NotImplementedError
  def place(self, row:UOp, unit:UOp) -> UOp:
    """Returns where 16-byte unit number `unit` of a row lies in shared memory, counted in 16-byte units."""
    raise NotImplementedError
  def moved_to(self, base:UOp|int) -> Self:
    """Returns the same layout for a tile that begins at the 16-byte unit `base` of shared memory."""
    return replace(self, base=base)

@dataclass(frozen=True)
class PaddedRows(SharedLayout):
  """Layout with one row after another, and padding behind each row."""
  # By default a row and its padding take an odd number of 16-byte units, so that eight neighbouring rows lie in different banks. If `skew` is above
  # 0, a gap of `skew` units follows every `together` rows.
  skew: int = 0
  together: int = 16
  padded: int = 0     # units of a row with its padding; 0: the next odd number of units
  @property
  def stride(self) -> int: return self.padded or self.units | 1
  @property
  def size(self) -> int: return self.begin(self.rows) + (self.skew if self.rows%self.together else 0)
  def begin(self, row:Int) -> Int:
    """Returns where row number `row` begins in its tile, counted in 16-byte units."""
    return row*self.stride + row//self.together*self.skew
  def place(self, row:UOp, unit:UOp, pieces:int=1) -> UOp:
    """Returns where 16-byte unit `unit` of a row lies in LDS, counted in units. If `pieces` is given, `unit` and the result count pieces of
    16/`pieces` bytes."""
    # `row` may be a sum x + c with a constant c. Rows lie in groups of `together` rows. Then c must be a multiple of `together`, or x and x + c must
    # lie in the same group. Constants are added last, so that tinygrad computes the common part of many places only once.
    (row, rows), (unit, units) = row.pop_const(), unit.pop_const()
    common = (self.base + self.begin(row))*pieces + unit
    return common.cast(dtypes.int) + (self.begin(int(rows))*pieces + int(units))

@dataclass(frozen=True)
class ExchangedChunks(SharedLayout):
  """Layout in chunks of 1024 bytes. One load instruction of a wave brings the rows of a chunk from global memory straight to LDS."""
  # A chunk is 64 units of 16 bytes: several whole rows. There is padding between chunks. In row r of a chunk, unit u lies at place u ^ r*exchange of
  # the row. This xor has few different values, so few registers hold addresses; the rest of an address is a constant offset in the instruction.
  exchange: int = 1
  @property
  def chunk(self) -> int:
    """Number of rows in a chunk, the 1024 bytes that one load instruction of a wave brings to LDS."""
    return WAVE_UNITS//self.units
  @property
  def stride(self) -> int:
    """Number of 16-byte units from one chunk to the next, including the padding between them."""
    return WAVE_UNITS + 4
  @property
  def size(self) -> int: return self.rows//self.chunk*self.stride
  def exchanged(self, row:UOp, unit:UOp) -> UOp:
    """Returns the position, in its row, of 16-byte unit number `unit`; `row` is counted from the first row of its chunk."""
    # its own inverse: for a place it returns the unit that lies there
    return unit ^ row*self.exchange
  def place(self, row:UOp, unit:UOp) -> UOp:
    in_chunk = row%self.chunk
    return row//self.chunk*self.stride + in_chunk*self.units + self.exchanged(in_chunk, unit)

@dataclass(frozen=True)
class CopiedLayout(SharedLayout):
  """Layout for rows that threads copy with cp.async, 16 bytes in each copy."""
  @property
  def across(self) -> int:
    """Number of neighbouring threads that copy one row together, 16 bytes each at a time."""
    raise NotImplementedError
  @property
  def panels(self) -> int:
    """Number of steps in which the threads that share a row copy it, 128 bytes in each step; 1 if each thread makes a single copy."""
    return 1
  @property
  def panel(self) -> int:
    """Distance in shared memory, in 16-byte units, from the bytes that a thread copies in one step to those of its next step."""
    return LINE
  @property
  def pitch(self) -> int:
    """Average distance between neighbouring rows, in 16-byte units: rows r and r + 8 lie exactly 8 times this distance apart."""
    # the distance of rows r and r + 8 is exactly 8 times this number
    raise NotImplementedError

@dataclass(frozen=True)
class SwizzledRows(CopiedLayout):
  """Layout of rows of whole 128-byte lines. In each line, 16-byte unit u of row r lies at position u xor r%8."""
  # As a result, the eight rows of an 8x8 matrix that ldmatrix reads lie in different banks, and so do the eight units of a line that threads copy.
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
    """Returns where unit `unit` + `units` of row `row` + `rows` lies, as (UOp, constant): the sum of both is the index of the 16-byte unit."""
    # The UOp is equal for many units, so few registers hold it. `rows` must be a multiple of 8. `unit` must be 0; if `units` is even, it can also be
    # 1. The tile must begin at a multiple of 128 bytes.
    base = UOp.const(0) + self.base
    first = int(base.vmin)
    # otherwise the xor that permutes the units of a line would lead out of the line
    assert base.const_factor()%LINE == 0, f"a tile must begin at a multiple of {LINE} units, not at {base.render()}"
    return self.moved_to(base - first).place(row, unit) ^ units%LINE, first + rows*self.stride + units//LINE*LINE

@dataclass(frozen=True)
class LongRows(SwizzledRows):
  """`SwizzledRows` for long rows: eight threads copy each row, 128 bytes in each step."""
  # everything that one thread copies then lies at constant distances from the first 16 bytes that it copies
  @property
  def across(self) -> int: return LINE
  @property
  def panels(self) -> int: return self.stride//LINE

@dataclass(frozen=True)
class SwizzledPanels(CopiedLayout):
  """Layout that wgmma reads: one panel after another, where a panel has 128 bytes of every row."""
  # attn/ops/hopper.py; there must be a multiple of 8 rows
  @property
  def across(self) -> int: return 1 << (self.units - 1).bit_length()
  @property
  def pitch(self) -> int: return LINE
  @property
  def panel(self) -> int:
    """Number of 16-byte units of one panel (128 bytes of every row)."""
    return self.rows*LINE
  @property
  def size(self) -> int: return ceildiv(self.units, LINE)*self.panel
  def place(self, row:UOp, unit:UOp) -> UOp:
    line = self.base + unit//LINE*self.panel + row*LINE
    return line.cast(dtypes.int) + ((unit%LINE).cast(dtypes.int) ^ (row%LINE).cast(dtypes.int))

@dataclass(frozen=True)
class WholeRows(SwizzledPanels):
  """`SwizzledPanels` for rows of at most 128 bytes: as many threads copy a row as it has 16-byte units."""
  @property
  def across(self) -> int: return self.units

@dataclass(frozen=True)
class LongPanels(SwizzledPanels):
  """`SwizzledPanels` for long rows: eight threads copy each row, 128 bytes in each step."""
  @property
  def across(self) -> int: return LINE
  @property
  def panels(self) -> int: return ceildiv(self.units, LINE)

@dataclass(frozen=True)
class LdsTile(InLds):
  """A tile in LDS, or several tiles one after another: the LDS buffer, and the layout of a tile's rows."""
  buffer: UOp
  layout: SharedLayout
  @staticmethod
  def of(new:Allocator, layout:SharedLayout, buffers:int=1) -> LdsTile:
    """Returns a new LDS buffer for `buffers` tiles of the given layout, one after another."""
    return LdsTile(new.lds(buffers*layout.size), layout)
  def after(self, *deps:UOp) -> LdsTile: return replace(self, buffer=self.buffer.after(*deps))
  def nth(self, i:UOp) -> LdsTile: return replace(self, layout=self.layout.moved_to(i*self.layout.size))
  @property
  def halves(self) -> UOp:
    """The LDS buffer as an array of 8-byte elements, the halves of 16-byte units."""
    return self.in_pieces(2)
  def in_pieces(self, pieces:int) -> UOp:
    """Returns the LDS buffer as an array of elements of 16/`pieces` bytes."""
    return self.buffer.bitcast(ops.u32(4//pieces))
  def from_row(self, row:UOp) -> LdsTile:
    """Returns the part of this tile that begins at row `row`, a multiple of 16, as a tile of its own."""
    return replace(self, layout=self.layout.moved_to(self.layout.place(row, UOp.const(0))))
  def load(self, row:UOp, unit:UOp) -> UOp: return self.buffer[self.layout.place(row, unit)].load()
  def store(self, row:UOp, unit:UOp, value:UOp, gate:UOp) -> UOp: return self.buffer[self.layout.place(row, unit).valid(gate)].store(value)
  def store_piece(self, row:UOp, piece:UOp, pieces:int, value:UOp, gate:UOp) -> UOp:
    """Returns the store of `value` to piece number `piece` of a row, if `gate` is true. A piece, like `value`, has 16/`pieces` bytes."""
    # the layout must keep the 16-byte units of a row side by side and in order
    assert isinstance(self.layout, PaddedRows)
    return self.in_pieces(pieces)[self.layout.place(row, piece, pieces).valid(gate)].store(value)
