"""The rows of q, k and v in global memory."""
from __future__ import annotations
from dataclasses import dataclass, field, replace
from typing import Callable, Self
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.program.counts import below, bounded, left_alone
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp

def strides(layout:str, heads:int, length:int, width:int) -> tuple[int, int, int]:
  """Distances, in elements, of batches, heads and rows of a contiguous tensor in `layout`; packed sequences ("thd") begin at a row of their own."""
  if layout == "thd": return 0, width, heads*width
  return (heads*length*width, width, heads*width) if layout == "bshd" else (heads*length*width, length*width, width)

def halves(words:UOp, dtype:str) -> list[UOp]:
  """A unit of numbers of 16 bits in fp32: two vectors of four."""
  return [ops.widen_to_float(ops.slice_(words, 2*i, 2), 4, dtype) for i in range(2)]

@dataclass(frozen=True)
class GlobalRows:
  """The rows of one head of q, k or v in global memory: `base` the flat index of row 0, `stride` the distance of rows, both in elements."""
  buffer: UOp
  base: UOp
  stride: int
  count: int|UOp     # rows there are
  width: int         # elements of a row
  size: int          # bytes of an element
  pin: bool = False  # clang would compute the range in vector registers, and load in a loop over its values: take it to a scalar register
  begins_whole: bool = True   # row 0 begins at a whole unit of the buffer

  @property
  def in_units(self) -> bool:
    """Whether rows are whole units, which a load or a copy takes at once."""
    return self.width % self.unit == 0 and self.stride % self.unit == 0 and self.begins_whole
  @property
  def unit(self) -> int: return UNIT_BYTES//self.size   # elements of a unit

  def after(self, *deps:UOp) -> Self:
    """The rows, loaded only after `deps`."""
    return replace(self, buffer=self.buffer.after(*deps))

  @property
  def regular(self) -> bool:
    """Whether neighbouring rows are `stride` apart."""
    return True
  def origin(self, first:UOp) -> UOp:
    """Where row `first` begins in the buffer, from which the rows of a tile go on."""
    return self.base + first*self.stride
  def start(self, first:UOp, row:UOp) -> UOp:
    """Where row `first` + `row` begins in the buffer."""
    return self.origin(first) + row*self.stride
  def up_to(self, count:int|UOp) -> Self:
    """The rows, of which `count` are read."""
    return replace(self, count=count)

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    """The `unit`-th 16 bytes of row `first` + `row`, of which rows beyond the last and columns beyond the width read as zero.

    `first` is uniform over the workgroup, `row` < `rows` is not. A row whose units are not all 16-byte aligned is read element by element.
    """
    left = (self.count - first).maximum(0).minimum(rows)
    records = ((left - 1)*self.stride + self.width).maximum(0)*self.size
    if self.pin: records = ops.uniform(records)
    return self._load(self.buffer[self.origin(first)], records, row*self.stride, unit, gate)

  def load_floats(self, first:UOp, rows:int, row:UOp, part:UOp, n:int, dtype:str) -> UOp:
    """The `part`-th `n` elements of a row of `dtype`, in fp32: one unit or two."""
    if self.size == 2: return ops.widen_to_float(self.load_units(first, rows, row, part), n, dtype)
    return ops.concat(*[ops.as_float(self.load_units(first, rows, row, part*2 + i)) for i in range(2)])

  def load_quads(self, first:UOp, rows:int, row:UOp, part:UOp, dtype:str) -> list[UOp]:
    """The `part`-th 8 elements of a row of `dtype`, in fp32: two vectors of four."""
    if self.size == 4: return [ops.as_float(self.load_units(first, rows, row, part*2 + i)) for i in range(2)]
    return halves(self.load_units(first, rows, row, part), dtype)

  def load_number(self, first:UOp, rows:int, row:UOp, gate:UOp) -> UOp:
    """The fp32 number that row `first` + `row` is, where rows are single numbers; 0 beyond the last."""
    records = (self.count - first).maximum(0).minimum(rows)*self.size
    if self.pin: records = ops.uniform(records)
    return ops.as_float(ops.buffer_load(self.buffer[self.base + first], records, gate.where(row*self.size, ops.OUT_OF_RANGE), self.size))

  def _load(self, base:UOp, records:UOp, start:UOp, unit:UOp, gate:UOp|None) -> UOp:
    """The `unit`-th 16 bytes of the row at `start`, of which elements that `gate` or the width excludes read as zero."""
    offset = (start + unit*self.unit)*self.size
    def load(i:int, inside:UOp, nbytes:int) -> UOp:
      return ops.buffer_load(base, records, inside.where(offset + self.size*i, ops.OUT_OF_RANGE), nbytes)
    return self._unit_of(unit, gate, load)

  def _unit_of(self, unit:UOp, gate:UOp|None, load:Callable[[int, UOp, int], UOp]) -> UOp:
    """The `unit`-th 16 bytes of a row, of what `load` (the number of the first element, whether it is there, bytes) finds: all at once, or where
    rows are no whole units element by element."""
    def inside(place:UOp, width:int) -> UOp: return below(place, width) if gate is None else gate & below(place, width)
    if self.in_units: return load(0, inside(unit, self.width//self.unit), UNIT_BYTES)
    parts = [load(i, inside(unit*self.unit + i, self.width), self.size) for i in range(self.unit)]
    for size, selector in ((1, 0x01010400), (2, 0x05040100)):   # two elements side by side, until they fill dwords
      if size >= self.size: parts = [amd.byte_perm(hi, lo, selector) for lo, hi in zip(parts[0::2], parts[1::2])]
    return ops.build(*parts)

@dataclass(frozen=True)
class Table:
  """Where the rows of a sequence are that lie in pages: the entries of a block table from `first` on, each the number of a page of `size` rows. There
  are `count` pages, `apart` elements one from the next; `whole` where no tile of rows that begins at a multiple of its length reaches over two."""
  entries: UOp
  first: UOp
  size: int
  count: int
  apart: int
  whole: bool
  checked: bool = True
  def page(self, row:UOp, there:UOp) -> UOp:
    """The page of a row, if there is such a row; what the table says beyond the rows that there are is not read. The emulator stops at an entry that
    is no page, elsewhere it is held to those that there are."""
    entry = self.entries[(self.first + row//self.size).valid(left_alone(there))].load()
    if self.checked: entry = ops.page_number(entry, there, self.count)
    return bounded(ops.uniform(entry) if self.whole else entry, 0, self.count - 1)
  def start(self, row:UOp, stride:int, there:UOp) -> UOp:
    """Where a row begins, `stride` elements after the one before it in its page."""
    return self.page(row, there)*self.apart + row%self.size*stride

@dataclass(frozen=True)
class PagedRows(GlobalRows):
  """Rows in pages. `base` is where row 0 begins from the beginning of a page on; `begin` is the row of the sequence that counts as the first one
  here."""
  table: Table|None = None
  begin: UOp|int = 0

  @property
  def regular(self) -> bool: return self.pages.whole
  @property
  def pages(self) -> Table:
    assert self.table is not None
    return self.table
  def origin(self, first:UOp) -> UOp:
    return self.base + self.pages.start(first, self.stride, first < self.count)
  def start_in_pages(self, first:UOp, row:UOp, there:UOp) -> UOp:
    """Where a row begins, of a tile that may reach over several pages."""
    return self.base + self.pages.start(self.begin + first + row, self.stride, there)
  def start(self, first:UOp, row:UOp) -> UOp:
    return super().start(first, row) if self.pages.whole else self.start_in_pages(first, row, first + row < self.count)

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    if self.pages.whole: return super().load_units(first, rows, row, unit, gate)
    there = first + row < self.count if gate is None else gate & (first + row < self.count)
    place = self.start_in_pages(first, row, there) + unit*self.unit
    return self._unit_of(unit, there, lambda i, inside, nbytes: ops.load_where(self.buffer[place + i], inside, nbytes))

@dataclass(frozen=True)
class PackedRows(GlobalRows):
  """The rows of `heads` neighbouring heads as one list: row r is row r//heads of head r%heads. `count` counts them all."""
  heads: int = 1
  head_stride: int = 0
  extent: UOp = field(default_factory=lambda: UOp.const(0))   # bytes from the first row of the first head to the end of the last row of the last one

  @staticmethod
  def of(rows:GlobalRows, heads:int, head_stride:int) -> PackedRows:
    """The packed rows of `heads` heads; `rows` are those of the first head."""
    reach = ((UOp.const(0) + rows.count - 1)*rows.stride + (heads - 1)*head_stride + rows.width).maximum(0)*rows.size
    return PackedRows(rows.buffer, rows.base, rows.stride, rows.count*heads, rows.width, rows.size, False, rows.begins_whole, heads, head_stride,
                      reach)

  @property
  def regular(self) -> bool: return False
  def start(self, first:UOp, row:UOp) -> UOp: return self.base + self.in_heads(first + row)
  def in_heads(self, packed:UOp) -> UOp:
    """Where a row of the list begins, from the first row on."""
    return packed//self.heads*self.stride + packed%self.heads*self.head_stride

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    packed = first + row
    there = packed < self.count if gate is None else gate & (packed < self.count)
    return self._load(self.buffer[self.base], self.extent, self.in_heads(packed), unit, there)

@dataclass(frozen=True)
class ConvertedRows:
  """Rows in global memory whose units are wanted in another dtype, `to`, of 16 bits."""
  given: GlobalRows
  dtype: str
  to: str
  @property
  def width(self) -> int: return self.given.width
  @property
  def in_units(self) -> bool: return self.given.in_units
  def up_to(self, count:int|UOp) -> ConvertedRows: return replace(self, given=self.given.up_to(count))
  def after(self, *deps:UOp) -> ConvertedRows: return replace(self, given=self.given.after(*deps))
  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    """Where `gate` does not hold what is loaded is never stored."""
    return ops.concat(*[ops.pack(x, self.to) for x in self.given.load_quads(first, rows, row, unit, self.dtype)])
  def load_floats(self, first:UOp, rows:int, row:UOp, part:UOp, n:int, dtype:str) -> UOp:
    """Loads numbers as `GlobalRows.load_floats` does, rounded to `dtype`, which is `to`."""
    return ops.widen_to_float(self.load_units(first, rows, row, part), n, dtype)
  def load_quads(self, first:UOp, rows:int, row:UOp, part:UOp, dtype:str) -> list[UOp]:
    """Loads quads as `GlobalRows.load_quads` does, rounded to `dtype`, which is `to`."""
    return halves(self.load_units(first, rows, row, part), dtype)

Rows = GlobalRows|ConvertedRows
