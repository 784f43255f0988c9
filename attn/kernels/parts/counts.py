"""Whole numbers of things."""
from __future__ import annotations
from attn.tinygrad_compat import UOp, dtypes

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b

def below(x:UOp, limit:int|UOp) -> UOp:
  """x < limit, as the gate of an access. tinygrad tries in three passes to simplify an address by what its gate says of the numbers in it, which is
  up to a third of the time for lowering; an int is none of them."""
  if isinstance(limit, int) and x.vmax < limit: return UOp.const(True)
  return x.cast(dtypes.int) < limit
