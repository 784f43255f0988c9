"""Ids by which tinygrad tells a kernel's ranges, registers and LDS buffers apart. An `Allocator` gives out all these ids. No kernel contains an id
that is written by hand."""
from __future__ import annotations
import itertools
from typing import Self
from attn.ops import common as ops
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

LDS_UNIT = ops.u32(4)

class InLds:
  """Base class of objects that lie in LDS, such as tiles. The method `after` returns the object as it is after given operations."""
  def after(self, *deps:UOp) -> Self: raise NotImplementedError

class Allocator:
  """Gives out the numbers by which tinygrad tells a kernel's ranges (by id) and placeholders (by slot) apart. Numbers rise with each request.
  tinygrad nests ranges in the order of their ids, and places placeholders in the order of their slots if nothing else orders them."""
  def __init__(self) -> None: self._axes, self._slots = itertools.count(), itertools.count()
  def range(self, n:int|UOp, kind:AxisType) -> UOp:
    """Makes a range over 0..n-1. Simplifies the bound n first. Otherwise tinygrad would simplify n later, but only inside the expressions that use
    the range. It would take the changed range for another one, which no loop ends."""
    return UOp.range(n.simplify() if isinstance(n, UOp) else n, next(self._axes), kind)
  def registers(self, n:int, dtype:DType=dtypes.float) -> UOp:
    """Allocates registers for n values per thread."""
    return UOp.placeholder((n,), dtype, next(self._slots), AddrSpace.REG)
  def lds(self, units:int, dtype:DType=LDS_UNIT) -> UOp:
    """Allocates LDS, which the threads of a workgroup share: `units` units of 16 bytes, by default vectors of four dwords."""
    return UOp.placeholder((units,), dtype, next(self._slots), AddrSpace.LOCAL)
