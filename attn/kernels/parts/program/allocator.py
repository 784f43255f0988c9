"""Ids by which tinygrad tells a kernel's ranges, registers and LDS buffers apart. An `Allocator` gives out all these ids. No kernel contains an id
that is written by hand."""
from __future__ import annotations
import itertools
from typing import Self
from attn.ops import common as ops
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

LDS_UNIT = ops.u32(4)

class InLds:
  """A value that lies in LDS. After a barrier it contains what all threads stored before the barrier."""
  def after(self, *deps:UOp) -> Self: raise NotImplementedError

class Allocator:
  """Gives each range and each placeholder of one kernel its number (tinygrad's id or slot), in the order of the requests. tinygrad nests ranges by
  their ids. Where nothing else orders placeholders, tinygrad orders them by their slots."""
  def __init__(self) -> None: self._axes, self._slots = itertools.count(), itertools.count()
  def range(self, n:int|UOp, kind:AxisType) -> UOp:
    """Makes a range over 0..n-1. The bound n is simplified here, because tinygrad would otherwise simplify it later, inside the expressions that use
    the range. tinygrad would take the range with the simplified bound for a different range, and no loop would end it."""
    return UOp.range(n.simplify() if isinstance(n, UOp) else n, next(self._axes), kind)
  def registers(self, n:int, dtype:DType=dtypes.float) -> UOp:
    """Allocates registers for n values per thread."""
    return UOp.placeholder((n,), dtype, next(self._slots), AddrSpace.REG)
  def lds(self, units:int, dtype:DType=LDS_UNIT) -> UOp:
    """Allocates LDS, which the threads of a workgroup share: `units` units of 16 bytes, by default vectors of four dwords."""
    return UOp.placeholder((units,), dtype, next(self._slots), AddrSpace.LOCAL)
