"""Appends rows to the key/value cache in place: new row i of batch b becomes row lengths[b] + i of the cache. A row that would lie outside the cache
is not stored. A cache of 8 bits gets the row's numbers of 8 bits, and its scale, which follows from the largest element."""
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

THREADS = 64

@dataclass(frozen=True)
class Scales:
  """The scales of a cache of 8 bits: the format of its rows (attn/ops/formats.py), the dtype of the scales, and where the scales lie in their
  buffer."""
  format: str
  dtype: str
  places: Strided

@dataclass(frozen=True)
class Append:
  """The shapes of an append: `new` rows of `width` elements, in `layout`, for each of H heads of each of B batches. The cache has `capacity` rows for
  each head. `places` holds where the cache begins in its buffer, and the strides between its batches, heads and rows. With `pages`, the cache
  consists of pages, and the stride between batches is the stride between pages. With `scales`, the cache has rows of 8 bits. If the new rows are
  longer than those of the cache, `of_row` is their length, and the cache gets `width` elements of each, from element `column` on."""
  B: int
  H: int
  new: int
  capacity: int
  width: int
  layout: str
  places: Strided
  pages: Pages|None = None
  scales: Scales|None = None
  of_row: int|None = None
  column: int = 0
  threads: bool = True   # False on a device without threads: loops do everything
  checked: bool = True   # contains the operation by which the emulator finds rows that share a slot; False where a device can't render this operation
  @property
  def columns(self) -> int:
    """Number of threads that copy a row."""
    return THREADS if self.threads else 1

@dataclass(frozen=True)
class NewRow:
  """A new row, as one of the threads that copy it sees it. `place` is the row of the cache at which it is stored, if `inside` is true. `batch` is the
  index of its batch, or of its page."""
  a: Append
  numbers: Allocator
  rows: UOp
  first: UOp       # index of the row's first element in `rows`
  thread: UOp
  batch: UOp
  head: UOp
  place: UOp
  inside: UOp

  def element(self, part:UOp) -> tuple[UOp, UOp, UOp]:
    """Loads one of the elements of the row that this thread copies. `part` says which of them: the range that `part()` makes. Returns the element's
    column, whether the row has this column, and the element."""
    column = part*self.a.columns + self.thread
    there = column < self.a.width
    return column, there, self.rows[(self.first + column).valid(there)].load()
  def part(self, kind:AxisType) -> UOp: return self.numbers.range(ceildiv(self.a.width, self.a.columns), kind)
  def index(self, at:Strided) -> UOp:
    """Returns the index at which the row begins in the buffer of the cache, if `at` says where the cache's rows lie. Returns the index of the row's
    scale, if `at` says where the scales lie."""
    return at.start + self.batch*at.batch + self.head*at.head + self.place*at.row
  def largest(self) -> UOp:
    """Returns the largest absolute value of the row: each thread finds that of its elements, and all exchange what they found."""
    mine = sizes_of(self.element(part := self.part(AxisType.REDUCE))[2].cast(dtypes.float)).reduce(part, arg=Ops.MAX)
    if not self.a.threads: return mine
    found = self.numbers.lds(THREADS, dtypes.float)
    met = found.after(found[self.thread].store(mine))      # tinygrad puts a barrier after this store
    each = [met[i].load() for i in range(THREADS)]
    while len(each) > 1: each = [x.maximum(y) for x, y in zip(each[::2], each[1::2])]
    return each[0]

@cache_of_kernels
def append(a:Append) -> Callable[..., UOp]:
  """Returns the kernel, a function of the tensors (cache, [scales], rows, lengths, [block_table]). `cache` is the buffer that holds the cache,
  `scales` the one that holds its scales. `rows` (B, H, new, width) has the layout `a.layout`, and the dtype of a cache without scales. `lengths` is
  int32 (B), `block_table` int32 (B, a.pages.most)."""
  def kernel(*placeholders:UOp) -> UOp:
    cache, *scales = map(flat, placeholders[:1 + (a.scales is not None)])
    rows, lengths, *table = map(flat, placeholders[1 + len(scales):])
    numbers = Allocator()
    row = numbers.range(a.B*a.H*a.new, AxisType.GLOBAL if a.threads else AxisType.LOOP)
    threads = [numbers.range(THREADS, AxisType.LOCAL)] if a.threads else []
    thread = threads[0] if threads else UOp.const(0)
    new = new_row(a, numbers, row, thread, rows, lengths, table)
    part, stores = new.part(AxisType.LOOP), []
    column, there, value = new.element(part)
    gate = left_alone(new.inside)     # otherwise tinygrad takes it for granted, and reads the table for rows outside of the cache, too
    if a.scales is not None:
      format, largest = FORMATS[a.scales.format], new.largest()
      scale = format.scale_of(largest, dtype := FLOATS[a.scales.dtype])
      value = format.stored(value.cast(dtypes.float), scale)
      stores.append(scales[0][new.index(a.scales.places).valid(gate & thread.eq(0))].store(scale.cast(dtype)))
    stores.append(cache[(new.index(a.places) + column).valid(gate & there)].store(value).end(part))
    return UOp.group(*stores).end(row, *threads).sink(arg=KernelInfo(f"attn_append_{a.new}_{a.capacity}_{a.width}", opts_to_apply=()))
  return kernel

def new_row(a:Append, numbers:Allocator, row:UOp, thread:UOp, rows:UOp, lengths:UOp, table:list[UOp]) -> NewRow:
  """Finds where the new row `row`, counted over all batches and heads, comes from and goes to."""
  batch, head, i = row//(a.H*a.new), row//a.new%a.H, row%a.new
  sb, sh, ss = strides(a.layout, a.H, a.new, a.width if a.of_row is None else a.of_row)
  to = bounded(lengths[batch].load(), -a.new, a.capacity) + i
  inside = (to >= 0) & (to < a.capacity)
  new = NewRow(a, numbers, rows, batch*sb + head*sh + i*ss + a.column, thread, batch, head, to, inside)
  if a.pages is None: return new
  in_page = to%a.pages.size
  page = Table(table[0], batch*a.pages.most, a.pages.size, a.pages.count, a.places.batch, False, a.checked).page(to, inside)
  if a.checked:   # the emulator stops if two rows go to one slot: a sequence must not append to a page that it shares
    page = bounded(ops.alone(page, (page*a.pages.size + in_page)*a.H + head, inside & thread.eq(0)), 0, a.pages.count - 1)
  return replace(new, batch=page, place=in_page)
