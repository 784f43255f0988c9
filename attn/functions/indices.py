"""The indices by which a caller's function reads an element of a tensor: along each axis a constant, or b, h, i, j or i - j (batch, head, query, key,
distance) with either sign and with a constant added."""
from __future__ import annotations
from typing import NamedTuple
from attn.functions.symbols import BATCH, KEY, QUERY, QUERY_HEAD, depends, elements_of, indices_of
from attn.tinygrad_compat import Ops, UOp, dtypes

class Along(NamedTuple):
  """Index along one axis of a tensor: `sign*what + plus`, such as i - j + 3."""
  what: str|None  # "b", "h", "i", "j" or "i - j"; None: a constant index
  sign: int
  plus: int

# factors of b, h, i and j in an index -> what the index counts, and its sign
_COUNTED: dict[tuple[int|None, ...], tuple[str|None, int]] = {(0, 0, 0, 0): (None, 1)} | {
  tuple(sign*x for x in factors): (what, sign) for sign in (1, -1) for what, factors in (
    ("b", (1, 0, 0, 0)), ("h", (0, 1, 0, 0)), ("i", (0, 0, 1, 0)), ("j", (0, 0, 0, 1)), ("i - j", (0, 0, 1, -1)))}

def linear_in(u:UOp, symbol:UOp) -> int|None:
  """Returns the factor of `symbol` in the int expression `u` (0 without it), or None if `u` is not linear in it."""
  if u is symbol: return 1
  if not depends(u, symbol): return 0
  if u.op is Ops.ADD:
    x, y = (linear_in(s, symbol) for s in u.src)
    return None if x is None or y is None else x + y
  if u.op is Ops.MUL and u.src[1].op is Ops.CONST:
    return None if (x := linear_in(u.src[0], symbol)) is None else x*int(u.src[1].val)
  return None

def _along(index:UOp) -> Along|None:
  symbols = (BATCH, QUERY_HEAD, QUERY, KEY)
  factors = tuple(linear_in(index, symbol) for symbol in symbols)
  if factors not in _COUNTED or elements_of(index): return None
  plus = index.substitute({symbol: UOp.const(0, dtypes.int) for symbol in symbols}).simplify()
  what, sign = _COUNTED[factors]
  return Along(what, sign, int(plus.val)) if plus.op is Ops.CONST else None

def simple_index(element:UOp) -> tuple[Along, ...]|None:
  """Returns for each axis of a tensor the index by which an element of it is read; None if kernels do not support one of the indices."""
  found = [_along(index) for index in indices_of(element)]
  known = tuple(x for x in found if x is not None)
  # None of b, h, i and j may occur in the indices of two axes.
  counted = [symbol for x in known if x.what is not None for symbol in x.what.split(" - ")]
  return known if len(known) == len(found) and len({*counted}) == len(counted) else None
