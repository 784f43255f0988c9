"""Where the rows of q, k and v lie in global memory, and how a kernel loads them: plain tensors, pages, and tiles with rows of several heads."""
from __future__ import annotations
from dataclasses import dataclass, field, replace
from typing import Callable, Self
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.program.counts import below, bounded, left_alone
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp

LOW_HALVES = 0x05040100      # byte_perm: the low halves of two dwords side by side

def strides(layout:str, heads:int, length:int, width:int) -> tuple[int, int, int]:
  """Returns the strides (of batches, of heads, of rows) of a contiguous tensor, counted in elements."""
  # packed sequences: each begins at a row of its own
  if layout == "thd": return 0, width, heads*width
  return (heads*length*width, width, heads*width) if layout == "bshd" else (heads*length*width, length*width, width)

def halves(words:UOp, dtype:str) -> list[UOp]:
  """Returns eight 16-bit numbers, given as four dwords, converted to fp32: two vectors of four."""
  return [ops.widen_to_float(ops.slice_(words, 2*i, 2), 4, dtype) for i in range(2)]

@dataclass(frozen=True)
class GlobalRows:
  """Rows of one head of a tensor in global memory: the buffer, where the rows begin, and how they are loaded."""
  buffer: UOp
  base: UOp     # flat index of row 0, in elements
  stride: int   # distance between rows, in elements
  count: int|UOp     # number of rows
  width: int         # elements of a row
  size: int          # bytes of an element
  pin: bool = False  # computes the range of the loads in a scalar register: in vector registers, clang would loop over its different values
  begins_whole: bool = True   # whether row 0 begins at a whole unit of the buffer
  unit_bytes: int = UNIT_BYTES   # bytes that a unit takes in this tensor

  @property
  def in_units(self) -> bool:
    """Whether start and length of every row are multiples of `unit_bytes`, so that one load brings a whole unit of `unit_bytes`."""
    return self.width % self.unit == 0 and self.stride % self.unit == 0 and self.begins_whole
  @property
  def unit(self) -> int: return self.unit_bytes//self.size   # elements of a unit

  def after(self, *deps:UOp) -> Self:
    """Returns a copy of these rows whose loads wait for the operations `deps`."""
    return replace(self, buffer=self.buffer.after(*deps))

  @property
  def regular(self) -> bool:
    """Whether every row begins `stride` elements after the row before it."""
    return True
  def origin(self, first:UOp) -> UOp:
    """Returns the index, in the tensor's buffer, of the first element of row `first`, with which a tile begins."""
    return self.base + first*self.stride
  def start(self, first:UOp, row:UOp) -> UOp:
    """Returns the index, in the tensor's buffer, of the first element of row `first` + `row`."""
    return self.origin(first) + row*self.stride
  def up_to(self, count:int|UOp) -> Self:
    """Returns a copy that has only the first `count` rows: later rows are read as zeros."""
    return replace(self, count=count)

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    """Loads unit number `unit` (of `unit_bytes` bytes, usually 16) of row `first` + `row`: zeros if the row does not exist or `gate` is false."""
    # `first` is equal in the whole workgroup; `row`, which is below `rows`, differs between threads. A row that does not consist of whole, aligned
    # units is read element by element.
    left = (self.count - first).maximum(0).minimum(rows)
    records = ((left - 1)*self.stride + self.width).maximum(0)*self.size
    if self.pin: records = ops.uniform(records)
    return self._load(self.buffer[self.origin(first)], records, row*self.stride, unit, gate)

  def load_floats(self, first:UOp, rows:int, row:UOp, part:UOp, n:int, dtype:str) -> UOp:
    """Loads n elements of row `first` + `row`, from element n*`part` on, converted to fp32."""
    # `n` elements fill one 16-byte unit, or two units if `dtype` is float32
    if self.size == 2: return ops.widen_to_float(self.load_units(first, rows, row, part), n, dtype)
    return ops.concat(*[ops.as_float(self.load_units(first, rows, row, part*2 + i)) for i in range(2)])

  def load_quads(self, first:UOp, rows:int, row:UOp, part:UOp, dtype:str) -> list[UOp]:
    """Loads eight elements of row `first` + `row`, from element 8*`part` on, in fp32, as two vectors of four."""
    if self.size == 4: return [ops.as_float(self.load_units(first, rows, row, part*2 + i)) for i in range(2)]
    return halves(self.load_units(first, rows, row, part), dtype)

  def load_number(self, first:UOp, rows:int, row:UOp, gate:UOp) -> UOp:
    """Loads the only number of row `first` + `row` in fp32: 0 if the row does not exist or `gate` is false."""
    records = (self.count - first).maximum(0).minimum(rows)*self.size
    if self.pin: records = ops.uniform(records)
    return ops.as_float(ops.buffer_load(self.buffer[self.base + first], records, gate.where(row*self.size, ops.OUT_OF_RANGE), self.size))

  def _load(self, base:UOp, records:UOp, start:UOp, unit:UOp, gate:UOp|None) -> UOp:
    """Loads one unit (`unit_bytes` bytes, usually 16) of the row that begins `start` elements after `base`."""
    # Addresses count from `base`. Elements beyond `records` bytes from there, and elements beyond the row's width, read as zero. `start` is the
    # number of elements from `base` to the row.
    offset = (start + unit*self.unit)*self.size
    def load(i:int, inside:UOp, nbytes:int) -> UOp:
      return ops.buffer_load(base, records, inside.where(offset + self.size*i, ops.OUT_OF_RANGE), nbytes)
    return self._unit_of(unit, gate, load)

  def _unit_of(self, unit:UOp, gate:UOp|None, load:Callable[[int, UOp, int], UOp]) -> UOp:
    """Returns one unit (`unit_bytes` bytes) of a row, loaded by `load`: in one access, or element by element if rows are not aligned."""
    # `load(i, exists, n)` loads n bytes from element i of the unit on, or zeros where the condition `exists` is false
    def inside(place:UOp, width:int) -> UOp: return below(place, width) if gate is None else gate & below(place, width)
    if self.in_units: return load(0, inside(unit, self.width//self.unit), self.unit_bytes)
    parts = [load(i, inside(unit*self.unit + i, self.width), self.size) for i in range(self.unit)]
    for size, selector in ((1, 0x01010400), (2, 0x05040100)):   # two elements side by side, until they fill dwords
      if size >= self.size: parts = [amd.byte_perm(hi, lo, selector) for lo, hi in zip(parts[0::2], parts[1::2])]
    return ops.build(*parts) if len(parts) > 1 else parts[0]

def columns_of_rows(x:GlobalRows, first:UOp, rows:int, column:UOp, units:list[UOp]) -> list[UOp]:
  """Loads 16-bit elements of one column. The result has a vector for each u in `units`: the elements in rows `first` + 8*u to `first` + 8*u + 7."""
  # rows beyond the last row of `x` read as zero
  records = (((x.count - first).maximum(0).minimum(rows) - 1)*x.stride + x.width).maximum(0)*x.size
  def one(unit:UOp, i:int) -> UOp:
    return ops.buffer_load(x.buffer[x.origin(first)], records, ((unit*x.unit + i)*x.stride + column)*x.size, x.size)
  def pair(unit:UOp, i:int) -> UOp: return amd.byte_perm(one(unit, i + 1), one(unit, i), LOW_HALVES)
  return [ops.build(*[pair(unit, i) for i in range(0, x.unit, 2)]) for unit in units]

@dataclass(frozen=True)
class Table:
  """Block table of one sequence: a list of the pages in which its rows lie."""
  entries: UOp   # each entry is the index of a page
  first: UOp     # index in `entries` at which the list begins
  size: int      # rows of a page
  count: int     # number of pages in memory
  apart: int     # elements from one page to the next
  whole: bool    # whether a tile that begins at a multiple of its own length never reaches into a second page
  checked: bool = True
  def page(self, row:UOp, there:UOp) -> UOp:
    """Returns the index of the page with row `row`, loaded from the block table if `there` is true."""
    entry = self.entries[(self.first + row//self.size).valid(left_alone(there))].load()
    # if an entry is not the index of a page, the emulator stops; on a device the entry is clamped to the pages that exist
    if self.checked: entry = ops.page_number(entry, there, self.count)
    return bounded(ops.uniform(entry) if self.whole else entry, 0, self.count - 1)
  def start(self, row:UOp, stride:int, there:UOp) -> UOp:
    """Returns the index, in the cache of pages, of the first element of row `row`."""
    return self.page(row, there)*self.apart + row%self.size*stride

@dataclass(frozen=True)
class PagedRows(GlobalRows):
  """Rows of one head of a sequence that lie in pages."""
  # `base` is where the rows of this head begin in each page
  table: Table|None = None
  begin: UOp|int = 0   # row of the sequence that is row 0 of this object

  @property
  def regular(self) -> bool: return self.pages.whole
  @property
  def pages(self) -> Table:
    assert self.table is not None
    return self.table
  def origin(self, first:UOp) -> UOp:
    return self.base + self.pages.start(first, self.stride, first < self.count)
  def start_in_pages(self, first:UOp, row:UOp, there:UOp) -> UOp:
    """Returns the index, in the cache of pages, of the first element of row `first` + `row`, whose page is looked up for this row alone."""
    # the page is looked up for this row alone, because neighbouring rows can lie in different pages
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
  """Rows of `heads` neighbouring heads as one list: entry r is row r//heads of head r%heads."""
  # `count` is the length of the list
  heads: int = 1
  head_stride: int = 0
  extent: UOp = field(default_factory=lambda: UOp.const(0))   # bytes from the first row of the first head to the end of the last row of the last one

  @staticmethod
  def of(rows:GlobalRows, heads:int, head_stride:int) -> PackedRows:
    """Makes the list of rows of `heads` neighbouring heads, given the rows of the first head."""
    reach = ((UOp.const(0) + rows.count - 1)*rows.stride + (heads - 1)*head_stride + rows.width).maximum(0)*rows.size
    return PackedRows(rows.buffer, rows.base, rows.stride, rows.count*heads, rows.width, rows.size, False, rows.begins_whole, rows.unit_bytes, heads,
                      head_stride, reach)

  @property
  def regular(self) -> bool: return False
  def start(self, first:UOp, row:UOp) -> UOp: return self.base + self.in_heads(first + row)
  def in_heads(self, packed:UOp) -> UOp:
    """Returns the distance, in elements, from entry 0 of the list to entry `packed`."""
    return packed//self.heads*self.stride + packed%self.heads*self.head_stride

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    packed = first + row
    there = packed < self.count if gate is None else gate & (packed < self.count)
    return self._load(self.buffer[self.base], self.extent, self.in_heads(packed), unit, there)

@dataclass(frozen=True)
class ConvertedRows:
  """Rows in global memory that are loaded as 16-bit numbers, although they are stored in another dtype, such as float32."""
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
    """Loads eight elements of row `first` + `row`, from element 8*`unit` on, rounded to 16 bits and packed into four dwords."""
    # ignores `gate`: the caller must not use the result where the gate is false
    return ops.concat(*[ops.pack(x, self.to) for x in self.given.load_quads(first, rows, row, unit, self.dtype)])
  def load_floats(self, first:UOp, rows:int, row:UOp, part:UOp, n:int, dtype:str) -> UOp:
    """Loads n elements of row `first` + `row`, from element n*`part` on, rounded to the 16-bit `dtype` and then converted to fp32."""
    # `dtype` is equal to `to`
    return ops.widen_to_float(self.load_units(first, rows, row, part), n, dtype)
  def load_quads(self, first:UOp, rows:int, row:UOp, part:UOp, dtype:str) -> list[UOp]:
    """Loads eight elements of row `first` + `row`, from element 8*`part` on, rounded to the 16-bit `dtype`, as two fp32 vectors of four."""
    # `dtype` is equal to `to`
    return halves(self.load_units(first, rows, row, part), dtype)

Rows = GlobalRows|ConvertedRows

@dataclass(frozen=True)
class LatentRows:
  """Rows of K of a latent cache with 8-bit numbers in the first columns, and 16-bit numbers in the rotary columns."""
  # a unit is eight elements of a row
  stored: GlobalRows          # in units of 8 bytes, of which a row has a whole number
  rotary: GlobalRows|None     # in units of 16 bytes
  widen: Callable[[UOp], UOp]   # converts eight stored numbers to 16 bits
  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    """Loads eight elements of row `first` + `row`, from element 8*`unit` on: 8-bit numbers in two dwords, or 16-bit (rotary) ones in four dwords."""
    # `widened` converts the 8-bit numbers. Rows beyond the last one read as zero, and the whole unit where `gate` is false.
    if self.rotary is None or unit.vmax < (count := self.stored.width//self.stored.unit):
      return self.stored.load_units(first, rows, row, unit, gate)
    in_rotary, there = unit >= count, UOp.const(True) if gate is None else gate
    if unit.vmin >= count: return self.rotary.load_units(first, rows, row, unit - count, gate)
    low = self.widen(self.stored.load_units(first, rows, row, unit, gate))
    high = self.rotary.load_units(first, rows, row, bounded(amd.opaque(unit - count, row), 0, int(unit.vmax) - count), there & in_rotary)
    return ops.build(*[in_rotary.where(ops.extract(high, i), ops.extract(low, i)) for i in range(ops.length(low))])
  def widened(self, x:UOp) -> UOp:
    """Returns the result `x` of `load_units` as eight 16-bit numbers in four dwords."""
    return self.widen(x) if ops.length(x)*4 == self.stored.unit_bytes else x
