"""Arithmetic on whole numbers: rounding up, bounds of an index, and gates (the conditions of loads and stores)."""
from __future__ import annotations
from attn.tinygrad_compat import Ops, UOp, dtypes

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b

def bounded(x:UOp, low:int, high:int) -> UOp:
  """Returns `x`, such as a loaded number, as an index that is clamped to `low`..`high`."""
  # tinygrad chooses between 32 and 64 bits for an index by its bounds, and knows none of a loaded number
  # an index first, because the sum of an index and an int32 would be an int32, whatever its bounds
  return x.cast(dtypes.weakint).maximum(low).minimum(high)

def below(x:UOp, limit:int|UOp) -> UOp:
  """Returns the condition x < limit as a gate of a load or store."""
  return UOp.const(True) if isinstance(limit, int) and x.vmax < limit else left_alone(x < limit)

def left_alone(gate:UOp) -> UOp:
  """Returns `gate`, the condition of a load or store, written so that tinygrad does not simplify addresses by it."""
  # The condition as a number, compared with 0: tinygrad derives nothing from such a comparison. Simplifying addresses by gates, in three passes,
  # takes up to a third of the lowering time.
  return gate if gate.op is Ops.CONST else gate.where(UOp.const(1, dtypes.int), UOp.const(0, dtypes.int)).ne(0)
