"""Whole numbers of things."""
from __future__ import annotations
from attn.tinygrad_compat import Ops, UOp, dtypes

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b

def bounded(x:UOp, low:int, high:int) -> UOp:
  """A number that tinygrad knows nothing of, such as one that is loaded, as an index: held within `low`..`high`. tinygrad computes an index in 32
  bits or in 64, as the bounds of the numbers in it ask for. Where an int32 is added to it, it becomes an int32 itself, whatever its bounds."""
  return x.cast(dtypes.weakint).maximum(low).minimum(high)

def below(x:UOp, limit:int|UOp) -> UOp:
  """x < limit, as the gate of an access."""
  return UOp.const(True) if isinstance(limit, int) and x.vmax < limit else left_alone(x < limit)

def left_alone(gate:UOp) -> UOp:
  """A gate that tinygrad does not try on the addresses that it guards. In three passes it would simplify each by what the gate says of the numbers in
  it, which is up to a third of the time for lowering; of a number that is 1 or 0 it knows nothing."""
  return gate if gate.op is Ops.CONST else gate.where(UOp.const(1, dtypes.int), UOp.const(0, dtypes.int)).ne(0)
