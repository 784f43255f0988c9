"""Appends rows to the key/value cache in place: row i of batch b goes to row lengths[b] + i, unless that lies outside the cache."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Callable
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.rows import flat, strides
from attn.tinygrad_compat import AxisType, KernelInfo, UOp

THREADS = 64

@dataclass(frozen=True)
class Append:
  """`new` rows for each of B*H heads of a cache that holds `capacity` rows of `width` elements, in `layout`."""
  B: int
  H: int
  new: int
  capacity: int
  width: int
  layout: str
  threads: bool = True   # False on a device without: one loop over everything

@functools.cache
def append(a:Append) -> Callable[..., UOp]:
  """The kernel (cache, rows, lengths): cache (B, H, capacity, width) and rows (B, H, new, width) in `a.layout`, of one dtype, lengths int32 (B)."""
  def kernel(cache:UOp, rows:UOp, lengths:UOp) -> UOp:
    numbers = Allocator()
    row = numbers.range(a.B*a.H*a.new, AxisType.GLOBAL if a.threads else AxisType.LOOP)
    thread = numbers.range(THREADS, AxisType.LOCAL if a.threads else AxisType.LOOP)
    part = numbers.range(ceildiv(a.width, THREADS), AxisType.LOOP)
    batch, head, i, column = row//(a.H*a.new), row//a.new%a.H, row%a.new, part*THREADS + thread
    def index(length:int, at:UOp) -> UOp:
      sb, sh, ss = strides(a.layout, a.H, length, a.width)
      return batch*sb + head*sh + at*ss + column
    to = flat(lengths)[batch].load() + i
    inside = (to >= 0) & (to < a.capacity) & (column < a.width)
    value = flat(rows)[index(a.new, i).valid(column < a.width)].load()
    store = flat(cache)[index(a.capacity, to).valid(inside)].store(value)
    return store.end(part, row, thread).sink(arg=KernelInfo(f"attn_append_{a.new}_{a.capacity}_{a.width}", opts_to_apply=()))
  return kernel
