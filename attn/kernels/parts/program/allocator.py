"""Makes the ranges (UOps that are indices of loops, workgroups or threads), the registers and the LDS buffers of a kernel. tinygrad distinguishes
ranges by numbers, and buffers, too. An `Allocator` gives out all these numbers: none is written by hand in a kernel."""
from __future__ import annotations
import itertools
from typing import Self
from attn.ops import common as ops
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

LDS_UNIT = ops.u32(4)

class InLds:
  """Base class of objects that lie in LDS, such as tiles. `after(*deps)` returns the object such that its loads and stores come after the operations
  `deps`."""
  def after(self, *deps:UOp) -> Self: raise NotImplementedError

class Allocator:
  """Makes a kernel's ranges (UOps that are indices) and buffers, each with a number by which tinygrad distinguishes it from others. The numbers rise
  from one request to the next. Of two ranges, tinygrad makes the one with the higher number the inner loop. Of two buffers that nothing else orders,
  the one with the lower number comes first in the program."""
  def __init__(self) -> None: self._axes, self._slots = itertools.count(), itertools.count()
  def range(self, n:int|UOp, kind:AxisType, unrolled:int=1) -> UOp:
    """Returns a new range, a UOp that is an index from 0 to n - 1. `kind` says what it counts: iterations of a loop, workgroups of the grid, or
    threads. nvcc and NVRTC compute `unrolled` iterations of a loop in one (attn/ops/renderers.py)."""
    # Without simplify() tinygrad would simplify n in the expressions that use the range, but not in the operation that ends its loop, and would take
    # the two for different ranges.
    made = UOp.range(n.simplify() if isinstance(n, UOp) else n, number := next(self._axes), kind)
    return made if unrolled == 1 else made.replace(arg=(number, -unrolled, kind))
  def registers(self, n:int, dtype:DType=dtypes.float) -> UOp:
    """Returns a new register array with n values of the dtype `dtype` in each thread."""
    return UOp.placeholder((n,), dtype, next(self._slots), AddrSpace.REG)
  def lds(self, units:int, dtype:DType=LDS_UNIT) -> UOp:
    """Returns a new LDS buffer, which the threads of a workgroup share: `units` units of 16 bytes, by default vectors of four dwords."""
    return UOp.placeholder((units,), dtype, next(self._slots), AddrSpace.LOCAL)
