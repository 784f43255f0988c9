"""The numbers that tinygrad knows a kernel's ranges, registers and LDS by: handed out here, none is written by hand."""
from __future__ import annotations
import itertools
from typing import Self
from attn.ops import common as ops
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

LDS_UNIT = ops.u32(4)

class InLds:
  """A value that lies in LDS: after a barrier it is what was stored before that, by all threads."""
  def after(self, *deps:UOp) -> Self: raise NotImplementedError

class Allocator:
  """Gives each range of one kernel its id and each placeholder its slot, in the order in which they are asked for. tinygrad nests ranges by their
  ids, and lines up by slots what nothing else orders."""
  def __init__(self) -> None: self._axes, self._slots = itertools.count(), itertools.count()
  def range(self, n:int|UOp, kind:AxisType) -> UOp:
    """0..n-1. Its bound is simplified here: where an expression that has the range in it is simplified, it would be else, and a range with another
    bound is another range, which no loop ends."""
    return UOp.range(n.simplify() if isinstance(n, UOp) else n, next(self._axes), kind)
  def registers(self, n:int, dtype:DType=dtypes.float) -> UOp:
    """n values of each thread."""
    return UOp.placeholder((n,), dtype, next(self._slots), AddrSpace.REG)
  def lds(self, units:int, dtype:DType=LDS_UNIT) -> UOp:
    """Reserves `units` units of 16 bytes in LDS, as vectors of four dwords."""
    return UOp.placeholder((units,), dtype, next(self._slots), AddrSpace.LOCAL)
