"""Makes the ranges, registers and LDS buffers of a kernel, each with a number by which tinygrad tells them apart."""
from __future__ import annotations
import itertools
from typing import Self
from attn.ops import common as ops
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

LDS_UNIT = ops.u32(4)

class InLds:
  """Base class of objects that lie in LDS, such as tiles."""
  def after(self, *deps:UOp) -> Self:
    """Returns this object with loads and stores that come after the operations `deps`."""
    raise NotImplementedError

class Allocator:
  """Makes the ranges, registers and LDS buffers of one kernel."""
  # Numbers rise from one request to the next. Of two ranges, tinygrad makes the one with the higher number the inner loop. Of two buffers that
  # nothing else orders, the one with the lower number comes first in the program.
  def __init__(self) -> None: self._axes, self._slots = itertools.count(), itertools.count()
  def range(self, n:int|UOp, kind:AxisType, unrolled:int=1) -> UOp:
    """Returns a new range UOp from 0 to n - 1: the index of a loop's iteration, a workgroup or a thread, as `kind` says."""
    # Without simplify() tinygrad would simplify n in the expressions that use the range, but not in the operation that ends its loop, and would take
    # the two for different ranges.
    made = UOp.range(n.simplify() if isinstance(n, UOp) else n, number := next(self._axes), kind)
    # nvcc and NVRTC compute `unrolled` iterations in one (attn/ops/renderers.py)
    return made if unrolled == 1 else made.replace(arg=(number, -unrolled, kind))
  def registers(self, n:int, dtype:DType=dtypes.float) -> UOp:
    """Returns a new register array with `n` values in each thread."""
    return UOp.placeholder((n,), dtype, next(self._slots), AddrSpace.REG)
  def lds(self, units:int, dtype:DType=LDS_UNIT) -> UOp:
    """Returns a new LDS buffer of `units` elements, by default units of 16 bytes."""
    return UOp.placeholder((units,), dtype, next(self._slots), AddrSpace.LOCAL)
