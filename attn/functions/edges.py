"""Edges: limits that a mask sets by the position i of a query and the position j of a key, such as the causal j <= i. A mask made of edges shows each
query an interval of keys, and each key to an interval of queries."""
from __future__ import annotations
import functools, math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple
from attn.functions.symbols import FAR, KEY, QUERY
from attn.tinygrad_compat import UOp

# An edge shows the pairs with `j <= F(i)`, or the pairs with `j >= F(i)`. F never decreases: F consists of multiplications and floor divisions by
# positive constants, and of additions of constants. So an edge can also be written as a limit of the query, with a function G of the same kind: `j <=
# F(i)` holds exactly if `i >= G(j)`. Causal masks, windows, prefixes and chunks have such edges.

MOST_INSIDE = 2**30     # no number in the computation of an edge is farther from 0, so that the offset of a problem can be added in int32

class FloorStep(NamedTuple):
  """Function of x: (times*x + plus)//over, with `times` and `over` not negative."""
  # If `over` is 0, the result is infinite, with the sign of times*x + plus, where 0 counts as positive. For example, a mask that shows keys only to
  # queries i >= 3 is the edge `j <= (i - 3)//0`.
  times: int
  plus: int
  over: int

Steps = tuple[FloorStep, ...]     # functions applied one after another

def then(steps:Steps, step:FloorStep) -> Steps:
  """Appends `step` to `steps`, functions that are applied to a number one after another."""
  common = math.gcd(step.times, step.over)
  step = FloorStep(step.times//common, step.plus//common, step.over//common)
  if step == (1, 0, 1): return steps
  if not steps: return (step,)
  # The last two steps become one step if one step can do the same as both.
  last = steps[-1]
  if last.over == 1: return then(steps[:-1], FloorStep(last.times*step.times, last.plus*step.times + step.plus, step.over))
  if step.times == 1: return then(steps[:-1], FloorStep(last.times, last.plus + step.plus*last.over, last.over*step.over))
  return (*steps, step)

def followed(steps:Steps, more:Steps) -> Steps: return functools.reduce(then, more, steps)

def last_below(steps:Steps) -> Steps:
  """F applies `steps` to x one after another. Returns the steps of its inverse, a function G for which F(x) <= y exactly if x <= G(y)."""
  return followed((), tuple(FloorStep(x.over, x.over - 1 - x.plus, x.times) for x in reversed(steps)))

def first_above(steps:Steps) -> Steps:
  """F applies `steps` to x one after another. Returns the steps of its inverse, a function G for which F(x) >= y exactly if x >= G(y)."""
  return followed((), tuple(FloorStep(x.over, x.times - 1 - x.plus, x.times) for x in reversed(steps)))

def larger(x:Any, y:Any) -> Any:
  """Returns the maximum of two numbers, UOps or Tensors."""
  if isinstance(x, int): return max(x, y) if isinstance(y, int) else y.maximum(x)
  return x.maximum(y)

def smaller(x:Any, y:Any) -> Any:
  """Returns the minimum of two numbers, UOps or Tensors."""
  if isinstance(x, int): return min(x, y) if isinstance(y, int) else y.minimum(x)
  return x.minimum(y)

def _applied(step:FloorStep, x:Any) -> Any:
  times, plus, over = step
  if times == 0: return max(-FAR, min(plus, FAR))
  if over == 0:
    beyond = x >= -plus
    return (FAR if beyond else -FAR) if isinstance(x, int) else beyond.where(FAR, -FAR)
  if times > 1: x = x*times
  if plus != 0: x = x + plus
  return x//over if over > 1 else x

def applied(steps:Steps, x:Any) -> Any:
  """Applies the functions `steps` to x one after another. x is a number, a UOp or a Tensor; FAR in the result stands for infinity."""
  # If the function is constant, the result is an int.
  return functools.reduce(lambda y, step: _applied(step, y), steps, x)

def exact_range(steps:Steps) -> tuple[int, int]:
  """Returns the first and the last x for which all intermediate results of `steps` lie in -2^30..2^30 (MOST_INSIDE)."""
  first, last = -MOST_INSIDE, MOST_INSIDE
  for times, plus, over in reversed(steps):
    if times == 0 or over == 0: first, last = -MOST_INSIDE, MOST_INSIDE
    else: first, last = -((plus - max(-MOST_INSIDE, first*over))//times), (min(MOST_INSIDE, last*over + over - 1) - plus)//times
  return first, last

def fits(steps:Steps) -> bool:
  """Returns whether a mask stays the same if x is clamped to `exact_range` before the functions `steps` are applied to x."""
  first, last = exact_range(steps)
  # Positions lie between -FAR and FAR. So the mask stays the same if first or f(first) is at most -FAR, and last or f(last) is at least FAR.
  return (first <= -FAR or applied(steps, first) <= -FAR) and (last >= FAR or applied(steps, last) >= FAR)

def clamped(steps:Steps, x:Any) -> Any:
  """Applies the functions `steps` to x one after another, in int32 without overflow: x is first clamped to `exact_range`."""
  first, last = exact_range(steps)
  if first > -FAR: x = larger(x, first)
  if last < FAR: x = smaller(x, last)
  return applied(steps, x)

def _band(steps:Steps) -> tuple[Fraction, Fraction, Fraction]|None:
  """Returns (slope, least, most) such that least <= F(x) - slope*x <= most for every x, for the function F of `steps`; None if F is infinite."""
  slope, least, most = Fraction(1), Fraction(0), Fraction(0)
  for times, plus, over in steps:
    if over == 0: return None
    slope, least, most = slope*times/over, (least*times + plus - over + 1)/over, (most*times + plus)/over
  return slope, least, most

def never_above(f:Steps, g:Steps) -> bool:
  """Returns whether F(x) <= G(x) is certain for each x, where F applies the steps `f` to x, and G the steps `g`."""
  (*start, x), (*other_start, y) = f or (FloorStep(1, 0, 1),), g or (FloorStep(1, 0, 1),)
  if start == other_start and (x.times, x.over) == (y.times, y.over): return x.plus <= y.plus
  one, two = _band(f), _band(g)
  return one is not None and two is not None and one[0] == two[0] and one[2] <= two[1]

@dataclass(frozen=True, order=True)
class Edge:
  """Condition on the position i of a query and the position j of a key: `j <= F(i)` if `upper`, otherwise `j >= F(i)`."""
  upper: bool
  steps: Steps  # functions that make up F, applied one after another

  @functools.cached_property
  def inverse(self) -> Steps:
    """Steps of the function G that solves the condition for i: i >= G(j) if `upper`, otherwise i <= G(j)."""
    return first_above(self.steps) if self.upper else last_below(self.steps)
  def key(self, i:Any) -> Any:
    """Returns the last key that the query at position i sees under this condition; if not `upper`, the first key."""
    return clamped(self.steps, i)
  def query(self, j:Any) -> Any:
    """Returns the first query that sees the key at position j under this condition; if not `upper`, the last query."""
    return clamped(self.inverse, j)
  @property
  def known(self) -> bool|None:
    """Whether every pair of a query and a key fulfils the condition (True), no pair does (False), or neither is certain (None)."""
    least, most = applied(self.steps, -FAR), applied(self.steps, FAR)
    if self.upper: return True if least >= FAR else False if most < 0 else None
    return True if most <= 0 else False if least > FAR else None
  @property
  def fits(self) -> bool: return fits(self.steps) and fits(self.inverse)
  @property
  def negated(self) -> Edge: return Edge(not self.upper, then(self.steps, FloorStep(1, 1 if self.upper else -1, 1)))
  def implies(self, other:Edge) -> bool:
    """Returns whether every pair of a query and a key that fulfils this condition is certain to fulfil the condition of `other`."""
    if self.upper != other.upper: return False
    return never_above(self.steps, other.steps) if self.upper else never_above(other.steps, self.steps)
  @property
  def condition(self) -> UOp:
    """The condition, such as j <= i, as a UOp of the symbols QUERY and KEY."""
    if any(step.over == 0 for step in self.steps): x, y = (self.query(KEY), QUERY) if self.upper else (QUERY, self.query(KEY))
    else: x, y = (KEY, self.key(QUERY)) if self.upper else (self.key(QUERY), KEY)
    return x <= y
