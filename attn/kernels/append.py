"""Appends rows to the key/value cache in place: new row i of batch b becomes row lengths[b] + i of the cache. A row that would lie outside the cache
is not stored."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
from attn.kernels.parts.memory.rows import Table, strides
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import bounded, ceildiv, left_alone
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Pages, Strided
from attn.tinygrad_compat import AxisType, KernelInfo, UOp
from attn.values import cache_of_kernels

THREADS = 64

@dataclass(frozen=True)
class Append:
  """The shapes of an append: `new` rows of `width` elements, in `layout`, for each of H heads of each of B batches. The cache has `capacity` rows for
  each head. `places` holds where the cache begins in its buffer, and the strides between its batches, heads and rows. With `pages`, the cache
  consists of pages, and the stride between batches is the stride between pages."""
  B: int
  H: int
  new: int
  capacity: int
  width: int
  layout: str
  places: Strided
  pages: Pages|None = None
  threads: bool = True   # False on a device without threads: one loop does everything
  checked: bool = True   # contains the operation by which the emulator finds rows that share a slot; False where a device can't print this operation

@cache_of_kernels
def append(a:Append) -> Callable[..., UOp]:
  """Returns the kernel, a function of the placeholders (cache, rows, lengths, [block_table]). `cache` is the buffer that holds the cache. `rows` (B,
  H, new, width) has the layout `a.layout` and the dtype of the cache. `lengths` is int32 (B), `block_table` int32 (B, a.pages.most)."""
  def kernel(cache:UOp, rows:UOp, lengths:UOp, *table:UOp) -> UOp:
    numbers = Allocator()
    row = numbers.range(a.B*a.H*a.new, AxisType.GLOBAL if a.threads else AxisType.LOOP)
    thread = numbers.range(THREADS, AxisType.LOCAL if a.threads else AxisType.LOOP)
    part = numbers.range(ceildiv(a.width, THREADS), AxisType.LOOP)
    batch, head, i, column = row//(a.H*a.new), row//a.new%a.H, row%a.new, part*THREADS + thread
    sb, sh, ss = strides(a.layout, a.H, a.new, a.width)
    value = flat(rows)[(batch*sb + head*sh + i*ss + column).valid(column < a.width)].load()
    to = bounded(flat(lengths)[batch].load(), -a.new, a.capacity) + i
    inside = (to >= 0) & (to < a.capacity)
    place = place_of(a, batch, head, to, inside, thread.eq(0) & part.eq(0), [flat(x) for x in table])
    gate = left_alone(inside)     # otherwise tinygrad takes it for granted, and reads the table for rows outside of the cache, too
    store = flat(cache)[(place + column).valid(gate & (column < a.width))].store(value)
    return store.end(part, row, thread).sink(arg=KernelInfo(f"attn_append_{a.new}_{a.capacity}_{a.width}", opts_to_apply=()))
  return kernel

def place_of(a:Append, batch:UOp, head:UOp, to:UOp, inside:UOp, once:UOp, table:list[UOp]) -> UOp:
  """Returns the index of the first element of row `to` in the cache's buffer, for one head of one batch. `inside` is true if the cache has this row.
  The condition `once` is true in only one of the threads that copy the row."""
  at = a.places
  if a.pages is None: return at.start + batch*at.batch + head*at.head + to*at.row
  in_page = to%a.pages.size
  page = Table(table[0], batch*a.pages.most, a.pages.size, a.pages.count, at.batch, False, a.checked).page(to, inside)
  if a.checked:   # the emulator stops if two rows go to one slot: a sequence must not append to a page that it shares
    page = bounded(ops.alone(page, (page*a.pages.size + in_page)*a.H + head, inside & once), 0, a.pages.count - 1)
  return at.start + page*at.batch + head*at.head + in_page*at.row
