"""Spans: the lowest and the highest value that a caller's mask_mod can have on a tile of queries and keys. If both are equal, the mask hides all
scores of the tile, or none. Begin with `span_of`."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from attn.functions.symbols import KEY, QUERY, depends
from attn.tinygrad_compat import Ops, UOp, dtypes

# A one-sided expression of a mask is an expression that depends on the query or on the key, but not on both. For example the mask `i//64 ==
# tokens[j]` has two one-sided expressions: i//64, with a value for each row of a tile, and tokens[j], with a value for each column. A kernel finds
# the extremes (the lowest and the highest value) of each one-sided expression over the rows or the columns of a tile. From these extremes follow the
# extremes of the comparison that joins query and key: if the highest i//64 is below the lowest token, the comparison is false on the whole tile.

FALSE, TRUE = UOp.const(False, dtypes.bool), UOp.const(True, dtypes.bool)
LEAST_INT, MOST_INT = -2**31, 2**31 - 1
# dtypes of one-sided expressions -> dtypes that hold their values
ORDERED = {dtypes.int: dtypes.int, dtypes.short: dtypes.int, dtypes.ushort: dtypes.int, dtypes.char: dtypes.int, dtypes.uchar: dtypes.int,
           dtypes.float: dtypes.float, dtypes.half: dtypes.float, dtypes.bfloat16: dtypes.float}
FLOAT_OPS = (Ops.INDEX, Ops.CONST, Ops.CAST, Ops.WHERE, Ops.MAX)     # operations that do not round

class Extremes(NamedTuple):
  """Lowest and highest value of an expression on a tile of queries and keys, as UOps."""
  # A condition whose highest value is False is never true on the tile. A condition whose lowest value is True is always true on the tile.
  low: UOp
  high: UOp

@dataclass(frozen=True)
class MaskSpan:
  """Lowest and highest value of an expression in a mask: on one tile (`extremes`, as UOps), and on every tile of every problem (`least`, `most`)."""
  extremes: Extremes  # on one tile of queries and keys
  # Limits of an int expression that hold on every tile of every problem. For a float or a condition they are 0 and not used.
  least: int = 0
  most: int = 0
  @property
  def low(self) -> UOp: return self.extremes.low
  @property
  def high(self) -> UOp: return self.extremes.high

EITHER_VALUE = MaskSpan(Extremes(FALSE, TRUE))      # a condition that may have either value

def smaller_of(x:UOp, y:UOp) -> UOp: return (x < y).where(x, y)
def larger_of(x:UOp, y:UOp) -> UOp: return (x < y).where(y, x)

def is_one_sided(u:UOp) -> bool:
  """Returns whether an expression depends on at most one of the query and the key."""
  return not (depends(u, QUERY) and depends(u, KEY))

class MaskSpans:
  """Finds the lowest and the highest value of each expression in a mask_mod on a tile of queries and keys."""
  # `extremes_of` returns the lowest and the highest value of an expression of the query alone or of the key alone: two bools for a condition, two
  # int32 for an int expression, two float32 for a float expression. The extremes of a float expression that is NaN somewhere on the tile are -inf and
  # inf. The span of a comparison with such an expression then includes the value that the comparison has for NaN.
  def __init__(self, extremes_of:Callable[[UOp], Extremes]) -> None:
    self.extremes_of, self.found = extremes_of, dict[UOp, MaskSpan|None]()

  def of(self, u:UOp) -> MaskSpan|None:
    """Returns the lowest and the highest value of an expression in a mask; None if they are not known."""
    # A condition always has a span.
    if u not in self.found:
      if is_one_sided(u): found = self._one_sided(u)
      else: found = self._condition(u) if u.dtype == dtypes.bool else self._integer(u)
      self.found[u] = EITHER_VALUE if found is None and u.dtype == dtypes.bool else found
    return self.found[u]
  def condition(self, u:UOp) -> MaskSpan:
    found = self.of(u)
    assert found is not None
    return found

  def _one_sided(self, u:UOp) -> MaskSpan|None:
    if u.op is Ops.CONST and u.dtype != dtypes.bool and u.dtype not in ORDERED and isinstance(u.val, int):
      return MaskSpan(Extremes(u, u), int(u.val), int(u.val)) if LEAST_INT <= u.val <= MOST_INT else None
    if u.dtype == dtypes.bool: return MaskSpan(Extremes(u, u) if u.op is Ops.CONST else self.extremes_of(u))
    if u.dtype not in ORDERED: return None
    x = u.cast(ORDERED[u.dtype])
    if x.dtype == dtypes.float and any(y.op not in FLOAT_OPS for y in u.toposort() if y._shape == () and dtypes.is_float(y.dtype)): return None
    extremes = Extremes(x, x) if u.op is Ops.CONST else self.extremes_of(u)
    return MaskSpan(extremes) if x.dtype == dtypes.float else MaskSpan(extremes, *_within_int(u))

  def _condition(self, u:UOp) -> MaskSpan|None:
    if u.op is Ops.WHERE: return self._chosen(u)
    if len(u.src) != 2: return None
    if all(s.dtype == dtypes.bool for s in u.src):
      x, y = (self.condition(s) for s in u.src)
      same = MaskSpan(Extremes((x.low & y.low) | (x.high | y.high).logical_not(), (x.high & y.high) | (x.low | y.low).logical_not()))
      match u.op:
        case Ops.AND | Ops.MUL: return MaskSpan(Extremes(x.low & y.low, x.high & y.high))
        case Ops.OR | Ops.ADD | Ops.MAX: return MaskSpan(Extremes(x.low | y.low, x.high | y.high))
        case Ops.XOR | Ops.CMPNE: return _negated(same)
        case Ops.CMPEQ: return same
      return None
    one, two = (self.of(s) for s in u.src)
    if one is None or two is None: return None
    equal = MaskSpan(Extremes(one.low.eq(one.high) & two.low.eq(two.high) & one.low.eq(two.low),
                        ((one.high < two.low) | (two.high < one.low)).logical_not()))
    match u.op:
      case Ops.CMPLT: return MaskSpan(Extremes(one.high < two.low, one.low < two.high))
      case Ops.CMPNE: return _negated(equal)
      case Ops.CMPEQ: return equal
    return None

  def _integer(self, u:UOp) -> MaskSpan|None:
    """Returns the lowest and highest value of an int32 expression of both query and key; None if they are not known or it may overflow."""
    if u.dtype != dtypes.int: return None
    if u.op is Ops.CAST and u.src[0].dtype == dtypes.bool:
      return MaskSpan(Extremes(*[n.cast(u.dtype) for n in self.condition(u.src[0]).extremes]), 0, 1)
    if u.op is Ops.WHERE: return self._chosen(u)
    if len(u.src) != 2 or any(s.dtype == dtypes.bool for s in u.src): return None
    x, y = (self.of(s) for s in u.src)
    if x is None or y is None: return None
    if u.op is Ops.MUL and x.least == x.most: x, y = y, x
    match u.op:
      case Ops.ADD: return _in_int(Extremes(x.low + y.low, x.high + y.high), x.least + y.least, x.most + y.most)
      case Ops.MAX: return MaskSpan(Extremes(larger_of(x.low, y.low), larger_of(x.high, y.high)), max(x.least, y.least), max(x.most, y.most))
      case Ops.MUL if y.least == y.most:
        ends = (x.least*y.least, x.most*y.least)
        times = Extremes(x.low*y.low, x.high*y.low)
        return _in_int(times if y.least >= 0 else Extremes(*times[::-1]), min(ends), max(ends))
      case Ops.FLOORDIV if y.least == y.most > 0: return MaskSpan(Extremes(x.low//y.low, x.high//y.low), x.least//y.least, x.most//y.least)
    return None

  def _chosen(self, u:UOp) -> MaskSpan|None:
    """Returns the lowest and highest value of the WHERE `u`; None if they are not known for one of its two alternatives."""
    c, yes, no = self.condition(u.src[0]), self.of(u.src[1]), self.of(u.src[2])
    if yes is None or no is None: return None
    if u.dtype == dtypes.bool: either = Extremes(yes.low & no.low, yes.high | no.high)
    else: either = Extremes(smaller_of(yes.low, no.low), larger_of(yes.high, no.high))
    extremes = Extremes(*(c.low.where(a, c.high.where(b, n)) for a, b, n in zip(yes.extremes, either, no.extremes)))
    return MaskSpan(extremes, min(yes.least, no.least), max(yes.most, no.most))

def _negated(x:MaskSpan) -> MaskSpan: return MaskSpan(Extremes(x.high.logical_not(), x.low.logical_not()))

def _within_int(u:UOp) -> tuple[int, int]:
  """Returns the least and the largest value that an integer expression can have in any problem."""
  inside = all(x.vmin >= LEAST_INT and x.vmax <= MOST_INT for x in u.toposort() if dtypes.is_int(x.dtype))
  # If a number in the expression may overflow, the bounds are those of int32.
  return (int(u.vmin), int(u.vmax)) if inside else (LEAST_INT, MOST_INT)

def _in_int(extremes:Extremes, least:int, most:int) -> MaskSpan|None:
  return MaskSpan(extremes, least, most) if least >= LEAST_INT and most <= MOST_INT else None

def classes_of(mask:UOp) -> tuple[UOp, UOp]|None:
  """If the mask is x == y, with x computed from the query and y from the key (e.g. document numbers), returns (x, y), otherwise None."""
  # Such a mask divides queries and keys into classes, for example into documents.
  negated = 0
  while mask.op is Ops.CMPNE and mask.src[1] is TRUE: mask, negated = mask.src[0], negated + 1
  if mask.op is not (Ops.CMPNE if negated % 2 else Ops.CMPEQ): return None
  x, y = mask.src if depends(mask.src[0], QUERY) else mask.src[::-1]
  return (x, y) if is_one_sided(x) and depends(y, KEY) and not depends(y, QUERY) else None

def one_sided_expressions(mask:UOp) -> list[UOp]:
  """Returns the expressions in a mask that depend on the query alone or on the key alone: [i//64, tokens[j]] for i//64 == tokens[j]."""
  found = dict[UOp, None]()
  def taken(u:UOp) -> Extremes:
    found[u] = None
    return Extremes(FALSE, TRUE) if u.dtype == dtypes.bool else Extremes(*(UOp.const(n, ORDERED[u.dtype]) for n in (0, 1)))
  MaskSpans(taken).of(mask)
  return list(found)

def span_of(mask:UOp, extremes_of:Callable[[UOp], Extremes]) -> Extremes:
  """Returns (whether all scores of a tile are visible, whether any score is) under a mask. `extremes_of(x)` returns the lowest and the highest value
  of an expression x of the query or the key alone."""
  # `extremes_of` returns the lowest and the highest value of an expression of the query alone or of the key alone.
  return MaskSpans(extremes_of).condition(mask).extremes

def may_be_whole(mask:UOp) -> bool:
  """Returns whether the lowest and highest values of a mask's parts may prove, for some tile, that the mask hides no score of the tile."""
  def unknown(u:UOp) -> Extremes:
    if u.dtype == dtypes.bool: return Extremes(*[UOp.variable(name, False, True, dtypes.bool, param=True) for name in ("low", "high")])
    kind = ORDERED[u.dtype]
    return Extremes(*[UOp.variable(name, kind.min, kind.max, kind, param=True) for name in ("low", "high")])
  return bool(span_of(mask, unknown).low.simplify() is not FALSE)
