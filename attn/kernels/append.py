"""Appends rows to the key/value cache in place: new row i of batch b becomes row lengths[b] + i of the cache. A cache of 8-bit numbers also gets a
scale for each row."""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Callable
from attn.kernels.parts.memory.rows import Table, strides
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import bounded, ceildiv, left_alone
from attn.ops import common as ops
from attn.ops.common import flat
from attn.ops.formats import FORMATS, sizes_of
from attn.problem import Pages, Strided
from attn.tinygrad_compat import AxisType, KernelInfo, Ops, UOp, dtypes
from attn.values import FLOATS, cache_of_kernels

# A row that would lie outside the cache is not stored. The scale of a row follows from the row's largest element; each element is stored divided by
# the scale.

THREADS = 64

@dataclass(frozen=True)
class Scales:
  """Scales of a cache that stores 8-bit numbers: their dtype, where they lie, and the format of the 8-bit numbers."""
  format: str       # format of the 8-bit numbers (attn/ops/formats.py)
  dtype: str        # dtype of the scales
  places: Strided   # where the scales lie in their buffer

@dataclass(frozen=True)
class Append:
  """What a kernel appends to a cache (`new` rows for each head of each batch), and how the cache and the new rows lie in memory."""
  # `new` rows of `width` elements for each of H heads of each of B batches, in `layout`
  B: int
  H: int
  new: int
  capacity: int   # rows of the cache for each head
  width: int
  layout: str
  places: Strided              # where the cache begins in its buffer, and the strides between its batches (or pages), heads and rows
  pages: Pages|None = None     # None if the cache does not consist of pages
  scales: Scales|None = None   # given if the cache stores 8-bit numbers
  of_row: int|None = None      # length of a new row, if the cache gets only some of its columns
  column: int = 0              # first of the `width` columns that the cache gets
  threads: bool = True   # False on a device without threads: loops do everything
  checked: bool = True   # contains the operation by which the emulator finds rows that share a slot; False where a device can't render this operation
  @property
  def threads_of_row(self) -> int: return THREADS if self.threads else 1

@dataclass(frozen=True)
class NewRow:
  """A new row of the cache: where it lies, where the cache stores it, and the thread that copies a part of it."""
  a: Append
  allocator: Allocator
  rows: UOp
  first: UOp             # index of the row's first element in `rows`
  thread: UOp
  batch: UOp             # index of the row's batch, or of the page in a cache of pages
  head: UOp
  place: UOp             # row number in the cache, or in the page
  inside: UOp            # whether the row is stored

  def element(self, part:UOp) -> tuple[UOp, UOp, UOp]:
    """Returns (column, whether the row has this column, the loaded element) for the thread's element number `part` of the row."""
    column = part*self.a.threads_of_row + self.thread
    there = column < self.a.width
    return column, there, self.rows[(self.first + column).valid(there)].load()
  def part(self, kind:AxisType) -> UOp: return self.allocator.range(ceildiv(self.a.width, self.a.threads_of_row), kind)
  def index(self, at:Strided) -> UOp:
    """Returns the index at which this row, or its scale, begins in a buffer whose strides are `at`."""
    return at.start + self.batch*at.batch + self.head*at.head + self.place*at.row
  def largest(self) -> UOp:
    """Returns the largest absolute value of this row."""
    # each thread finds the largest of the elements that it copies; then the threads exchange these maxima
    mine = sizes_of(self.element(part := self.part(AxisType.REDUCE))[2].cast(dtypes.float)).reduce(part, arg=Ops.MAX)
    if not self.a.threads: return mine
    found = self.allocator.lds(THREADS, dtypes.float)
    met = found.after(found[self.thread].store(mine))      # tinygrad puts a barrier after this store
    each = [met[i].load() for i in range(THREADS)]
    while len(each) > 1: each = [x.maximum(y) for x, y in zip(each[::2], each[1::2])]
    return each[0]

@cache_of_kernels
def append(a:Append) -> Callable[..., UOp]:
  """Returns the kernel that appends rows: a function of the tensors (cache, [scales], rows, lengths, [block_table])."""
  # `cache` and `scales` are the buffers in which the cache and its scales lie. `rows` (B, H, new, width), in the layout `a.layout`, has the new rows:
  # floats, of the cache's dtype unless the cache stores 8-bit numbers. `lengths` (B) and `block_table` (B, a.pages.most) are int32.
  def kernel(*placeholders:UOp) -> UOp:
    cache, *scales = map(flat, placeholders[:1 + (a.scales is not None)])
    rows, lengths, *table = map(flat, placeholders[1 + len(scales):])
    allocator = Allocator()
    row = allocator.range(a.B*a.H*a.new, AxisType.GLOBAL if a.threads else AxisType.LOOP)
    threads = [allocator.range(THREADS, AxisType.LOCAL)] if a.threads else []
    thread = threads[0] if threads else UOp.const(0)
    new = new_row(a, allocator, row, thread, rows, lengths, table)
    part, stores = new.part(AxisType.LOOP), []
    column, there, value = new.element(part)
    gate = left_alone(new.inside)     # else tinygrad, sure that the row is inside, would read the table for every row
    if a.scales is not None:
      format, largest = FORMATS[a.scales.format], new.largest()
      scale = format.scale_of(largest, dtype := FLOATS[a.scales.dtype])
      value = format.stored(value.cast(dtypes.float), scale)
      stores.append(scales[0][new.index(a.scales.places).valid(gate & thread.eq(0))].store(scale.cast(dtype)))
    stores.append(cache[(new.index(a.places) + column).valid(gate & there)].store(value).end(part))
    return UOp.group(*stores).end(row, *threads).sink(arg=KernelInfo(f"attn_append_{a.new}_{a.capacity}_{a.width}", opts_to_apply=()))
  return kernel

def new_row(a:Append, allocator:Allocator, row:UOp, thread:UOp, rows:UOp, lengths:UOp, table:list[UOp]) -> NewRow:
  """Returns the new row number `row`: where it lies in the tensor `rows`, and where it is stored in the cache."""
  # `row` is counted over all batches and heads; `table` has the block table if the cache consists of pages, and is empty otherwise
  batch, head, i = row//(a.H*a.new), row//a.new%a.H, row%a.new
  sb, sh, ss = strides(a.layout, a.H, a.new, a.width if a.of_row is None else a.of_row)
  to = bounded(lengths[batch].load(), -a.new, a.capacity) + i
  inside = (to >= 0) & (to < a.capacity)
  new = NewRow(a, allocator, rows, batch*sb + head*sh + i*ss + a.column, thread, batch, head, to, inside)
  if a.pages is None: return new
  in_page = to%a.pages.size
  page = Table(table[0], batch*a.pages.most, a.pages.size, a.pages.count, a.places.batch, False, a.checked).page(to, inside)
  if a.checked:   # the emulator stops if two rows go to one slot: a sequence must not append to a page that it shares
    page = bounded(ops.alone(page, (page*a.pages.size + in_page)*a.H + head, inside & thread.eq(0)), 0, a.pages.count - 1)
  return replace(new, batch=page, place=in_page)
