"""Appends rows to the key/value cache in place: row i of batch b goes to row lengths[b] + i, unless that lies outside the cache."""
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
  """`new` rows of `width` elements, in `layout`, for each of B*H heads of a cache that holds `capacity` rows of each: where `places` says, whose
  batches are pages where there are `pages`."""
  B: int
  H: int
  new: int
  capacity: int
  width: int
  layout: str
  places: Strided
  pages: Pages|None = None
  threads: bool = True   # False on a device without: one loop over everything
  checked: bool = True   # False on a device that can't print attn's own operations: there is nothing then for the emulator to look at

@cache_of_kernels
def append(a:Append) -> Callable[..., UOp]:
  """The kernel (cache, rows, lengths, [block_table]): cache the buffer that has the cache, rows (B, H, new, width) in `a.layout`, of one dtype,
  lengths int32 (B), block_table int32 (B, a.pages.most)."""
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
    gate = left_alone(inside)     # which tinygrad would take for given, and read the table where there is no such row
    store = flat(cache)[(place + column).valid(gate & (column < a.width))].store(value)
    return store.end(part, row, thread).sink(arg=KernelInfo(f"attn_append_{a.new}_{a.capacity}_{a.width}", opts_to_apply=()))
  return kernel

def place_of(a:Append, batch:UOp, head:UOp, to:UOp, inside:UOp, once:UOp, table:list[UOp]) -> UOp:
  """Where row `to` of a head begins. `once` holds in one thread of those that carry the row."""
  at = a.places
  if a.pages is None: return at.start + batch*at.batch + head*at.head + to*at.row
  in_page = to%a.pages.size
  page = Table(table[0], batch*a.pages.most, a.pages.size, a.pages.count, at.batch, False, a.checked).page(to, inside)
  if a.checked:   # the emulator stops where two rows go to one slot: to a page that two sequences share nobody may append
    page = bounded(ops.alone(page, (page*a.pages.size + in_page)*a.H + head, inside & once), 0, a.pages.count - 1)
  return at.start + page*at.batch + head*at.head + in_page*at.row
