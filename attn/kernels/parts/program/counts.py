"""Arithmetic on whole numbers: rounding up, bounds of an index, and gates of accesses."""
from __future__ import annotations
from attn.tinygrad_compat import Ops, UOp, dtypes

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b

def bounded(x:UOp, low:int, high:int) -> UOp:
  """Makes an index from a number whose bounds tinygrad does not know, such as a loaded number, and clamps the index to `low`..`high`. tinygrad
  computes an index in 32 or in 64 bits, depending on the bounds of the numbers in it. If an int32 is added to an index, the sum is an int32, whatever
  its bounds."""
  return x.cast(dtypes.weakint).maximum(low).minimum(high)

def below(x:UOp, limit:int|UOp) -> UOp:
  """Returns the condition x < limit, as the gate of a load or a store."""
  return UOp.const(True) if isinstance(limit, int) and x.vmax < limit else left_alone(x < limit)

def left_alone(gate:UOp) -> UOp:
  """Rewrites a gate (the condition of a load or a store) so that tinygrad does not use it to simplify addresses. tinygrad does this in three passes,
  which take up to a third of the lowering time. The rewritten gate compares a number that is 1 or 0, and tinygrad derives nothing from this
  number."""
  return gate if gate.op is Ops.CONST else gate.where(UOp.const(1, dtypes.int), UOp.const(0, dtypes.int)).ne(0)
