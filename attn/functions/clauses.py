"""A traced mask as clauses. A query sees a key if all clauses hold, and a clause holds if at least one of its literals holds. A literal is an edge (a
limit such as j <= i) or any other condition, as a UOp."""
from __future__ import annotations
import functools
from collections.abc import Iterable
from attn.functions.edges import Edge, FloorStep, Steps, first_above, followed, last_below, then
from attn.functions.symbols import KEY, QUERY
from attn.tinygrad_compat import Ops, UOp, dtypes

MOST_CLAUSES = 64     # a condition that would become more clauses stays one literal
MOST_CHOICES = 8      # a comparison with more WHEREs and MAXes stays one literal

# ***** clauses *****

Literal = Edge|UOp
Clause = tuple[Literal, ...]
Clauses = tuple[Clause, ...]
ALWAYS: Clauses = ()
NEVER: Clauses = ((),)

def not_(literal:Literal) -> Literal:
  if isinstance(literal, Edge): return literal.negated
  return literal.src[0] if literal.op is Ops.CMPNE and literal.src[1].op is Ops.CONST and literal.src[1].arg is True else literal.logical_not()

def implies(x:Literal, y:Literal) -> bool:
  """Returns whether it is certain that the condition `y` holds wherever the condition `x` holds."""
  return x.implies(y) if isinstance(x, Edge) and isinstance(y, Edge) else x is y

def covers(x:Clause, y:Clause) -> bool:
  """Returns whether it is certain that the clause `y` holds wherever the clause `x` holds."""
  return all(any(implies(a, b) for b in y) for a in x)

def _joined(x:Clause, y:Clause) -> Clause|None:
  """Returns the clause that holds if the clause x or the clause y holds; None if it always holds."""
  found = dict.fromkeys(x + y)
  if any(implies(not_(a), b) for a in found for b in found): return None
  # A literal that implies another one of the clause is left out.
  def needless(a:Literal, k:int) -> bool:     # of conditions that imply each other, the first one stays
    return any(implies(a, b) and not (k < n and implies(b, a)) for n, b in enumerate(found) if n != k)
  return tuple(a for k, a in enumerate(found) if not needless(a, k))

def without_covered(clauses:Iterable[Clause]) -> Clauses:
  """Drops each clause that holds wherever another of the clauses holds."""
  kept: list[Clause] = []
  for x in clauses:
    if not any(covers(y, x) for y in kept): kept = [y for y in kept if not covers(x, y)] + [x]
  return tuple(kept)

def conjoined(x:Clauses, y:Clauses) -> Clauses: return without_covered(x + y)

def without_contradicted(clauses:Clauses) -> Clauses:
  """Drops from each clause the literals that contradict the other clauses: beside [a], the clause [not a, b] becomes [b]."""
  # For example, the clause [a] means that a always holds, so the clause [not a, b] becomes [b].
  while True:
    single = [x[0] for x in clauses if len(x) == 1]
    def possible(x:Clause, single:list[Literal]=single) -> Clause:
      return x if len(x) == 1 else tuple(a for a in x if not any(implies(b, not_(a)) for b in single))
    fewer = without_covered(map(possible, clauses))
    if fewer == clauses: return clauses
    clauses = fewer

# ***** sums *****

ONE = UOp.const(1)
TermSum = dict[UOp, int]     # how many times each term is added. A constant n is n times ONE
INTEGERS = (dtypes.int, dtypes.long, ONE.dtype)

def _plus(x:TermSum, y:TermSum, times:int=1) -> TermSum: return {u: n for u in x | y if (n := x.get(u, 0) + times*y.get(u, 0))}

def _terms(x:TermSum) -> list[tuple[UOp, int]]: return [(u, n) for u, n in x.items() if u is not ONE]

def _constant(u:UOp) -> int|None: return int(u.arg) if u.op is Ops.CONST else None

def _division(u:UOp) -> tuple[UOp, int]|None:
  """Returns the dividend and the divisor if `u` is an integer divided by a positive constant, rounded down; otherwise None."""
  if u.op is not Ops.FLOORDIV and not (u.op is Ops.CDIV and u.src[0].vmin >= 0): return None
  return (u.src[0], over) if (over := _constant(u.src[1]) or 0) > 0 else None

def _choice(u:UOp) -> tuple[UOp, UOp, UOp]|None:
  """Returns (condition, x, y) if the integer `u` equals x where the condition is true and y where it is false; otherwise None."""
  if u.op is Ops.WHERE: return u.src[0], u.src[1], u.src[2]
  if u.op is Ops.CAST and u.src[0].dtype == dtypes.bool: return u.src[0], ONE, ONE*0
  if u.op is Ops.MUL:
    for v, factor in (u.src, u.src[::-1]):
      if (found := _choice(factor)) is not None: return found[0], v*found[1], v*found[2]
  return None

def _all(*found:Clauses|None) -> Clauses|None:
  """Returns one list of clauses that all hold exactly where all the given lists hold; None if one of the lists is None."""
  # None stands for a list that would be too long.
  return functools.reduce(lambda x, y: None if x is None or y is None else conjoined(x, y), found)

class Reader:
  """Writes conditions of a traced mask as clauses, and keeps the results, because a mask may use a UOp several times."""
  def __init__(self) -> None:
    self.sums: dict[UOp, TermSum] = {}
    self.found: dict[tuple[UOp, bool], Clauses] = {}

  # *** conditions ***

  def clauses(self, u:UOp, holds:bool=True) -> Clauses:
    """Returns clauses that all hold exactly where the condition `u` is true (or, unless `holds`, false)."""
    if (u, holds) not in self.found: self.found[u, holds] = self._clauses(u, holds)
    return self.found[u, holds]
  def _clauses(self, u:UOp, holds:bool) -> Clauses:
    if u.vmin == u.vmax: return ALWAYS if bool(u.vmin) is holds else NEVER
    literal: Clauses = ((u if holds else not_(u),),)
    if all(x.dtype == dtypes.bool for x in u.src): found = self._logic(u, holds)
    elif u.op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ) and all(x.dtype in INTEGERS for x in u.src): found = self._comparison(u, holds)
    else: found = None
    return literal if found is None else found
  def _either(self, x:Clauses|None, y:Clauses|None) -> Clauses|None:
    if x is None or y is None or len(x)*len(y) > MOST_CLAUSES: return None
    return without_covered(c for a in x for b in y if (c := _joined(a, b)) is not None)
  def _chosen(self, c:UOp, yes:Clauses|None, no:Clauses|None) -> Clauses|None:
    """Returns the clauses of the condition "if c then `yes`, else `no`"; None if they are too many."""
    # These are (not c or yes) and (c or no) and (yes or no). "yes or no" follows from the rest, but may give an edge if c is no edge.
    return _all(self._either(self.clauses(c, False), yes), self._either(self.clauses(c), no), self._either(yes, no))
  def _logic(self, u:UOp, holds:bool) -> Clauses|None:
    """Returns the clauses of a condition `u` that combines two conditions (AND, OR, ...), or of its negation; None for another operation or too many
    clauses."""
    def is_(x:UOp, so:bool=True) -> Clauses: return self.clauses(x, so is holds)
    if u.op is Ops.WHERE: return self._chosen(u.src[0], is_(u.src[1]), is_(u.src[2]))
    if len(u.src) != 2: return None
    x, y = u.src
    match u.op:
      case Ops.AND | Ops.MUL: return conjoined(is_(x), is_(y)) if holds else self._either(is_(x), is_(y))
      case Ops.OR | Ops.ADD | Ops.MAX: return self._either(is_(x), is_(y)) if holds else conjoined(is_(x), is_(y))
      case Ops.XOR | Ops.CMPNE: return self._chosen(x, is_(y, False), is_(y))
      case Ops.CMPEQ: return self._chosen(x, is_(y), is_(y, False))
    return None
  def _comparison(self, u:UOp, holds:bool) -> Clauses|None:
    """Returns the clauses of a comparison of integers, or of its negation; None if no clause limits the key, or there are too many clauses."""
    if sum(x.op in (Ops.WHERE, Ops.MAX) for x in u.toposort()) > MOST_CHOICES: return None
    x, y = (self.sum(v) for v in u.src)
    at_most, at_least = _plus(x, y, -1), _plus(y, x, -1)
    less, more = (_plus(v, {ONE: 1}) for v in (at_most, at_least))
    if u.op is Ops.CMPLT: found = self.not_positive(less if holds else at_least)
    elif holds is (u.op is Ops.CMPEQ): found = _all(self.not_positive(at_most), self.not_positive(at_least))
    else: found = self._either(self.not_positive(less), self.not_positive(more))
    # Only a clause of edges alone limits the keys.
    told = found is not None and (not found or any(all(isinstance(a, Edge) for a in clause) for clause in found))
    return found if told else None

  # *** integers ***

  def sum(self, u:UOp) -> TermSum:
    """Writes an integer expression as a sum of terms with integer factors: 3*i - j + 5 gives {i: 3, j: -1, ONE: 5}."""
    if u not in self.sums: self.sums[u] = self._sum(u)
    return self.sums[u]
  def _sum(self, u:UOp) -> TermSum:
    if u.op is Ops.CONST: return {ONE: int(u.arg)}
    if u.op is Ops.CAST and u.dtype == dtypes.long and u.src[0].dtype == dtypes.int: return self.sum(u.src[0])
    if len(u.src) != 2: return {u: 1}
    x, y = u.src
    n = _constant(y)
    match u.op:
      case Ops.ADD: return _plus(self.sum(x), self.sum(y))
      case Ops.MUL:
        for v, factor in ((x, self.sum(y)), (y, self.sum(x))):
          if not _terms(factor): return _plus({}, self.sum(v), factor.get(ONE, 0))
      case Ops.XOR if n == -1: return _plus({ONE: -1}, self.sum(x), -1)
      case Ops.SHL if n is not None and 0 <= n < 31: return _plus({}, self.sum(x), 1 << n)
      case Ops.SHR if n is not None and 0 <= n < 31: return {x//(1 << n): 1}
      case Ops.FLOORMOD if n is not None and n > 0: return _plus(self.sum(x), {x//n: 1}, -n)
    return {u: 1}
  def not_positive(self, x:TermSum) -> Clauses|None:
    """Returns clauses that all hold exactly where the sum `x` is at most 0; None if they would be too many."""
    # All comparisons of integers are written in this form: a <= b is a - b <= 0.
    terms, plus = _terms(x), x.get(ONE, 0)
    if not terms: return ALWAYS if plus <= 0 else NEVER
    for u, n in terms:
      if u.op is Ops.MAX:
        one, two = (self.not_positive(_plus(_plus(x, {u: -n}), self.sum(v), n)) for v in u.src)
        return _all(one, two) if n > 0 else self._either(one, two)
      if (found := _choice(u)) is not None:
        yes, no = (self.not_positive(_plus(_plus(x, {u: -n}), self.sum(v), n)) for v in found[1:])
        return self._chosen(found[0], yes, no)
    if len(terms) == 1 and (divided := _division(terms[0][0])) is not None:
      (v, over), n = divided, terms[0][1]
      if n > 0: return self.not_positive(_plus(self.sum(v), {ONE: -(-plus//n*over + over - 1)}))
      return self.not_positive(_plus({ONE: -(-plus//-n)*over}, self.sum(v), -1))
    if (edge := self._edge(terms, plus)) is None: return ((functools.reduce(UOp.__add__, [u*n for u, n in terms]) <= -plus,),)
    return ((edge,),) if edge.known is None else ALWAYS if edge.known else NEVER
  def _edge(self, terms:list[tuple[UOp, int]], plus:int) -> Edge|None:
    """Returns the condition that the sum of `terms` and `plus` is at most 0 as an edge, a limit of the key's position; None if it is no such
    limit."""
    # The sum must have the form f(i) + g(j) with the positions i of the query and j of the key. A limit must not decrease from one query to the next,
    # and the numbers of the edge must fit int32.
    found: dict[UOp, tuple[int, Steps]] = {}
    for u, n in terms:
      if (chain := self._chain(u)) is None or chain[0] in found: return None
      found[chain[0]] = n*chain[1], chain[2]
    (a, f), (b, g) = found.get(QUERY, (0, ())), found.get(KEY, (0, ()))
    if b >= 0 >= a: edge = Edge(True, followed(then(f, FloorStep(-a, -plus, b)), last_below(g)))
    elif a >= 0 >= b: edge = Edge(False, followed(then(f, FloorStep(a, plus - b - 1, -b)), first_above(g)))
    else: return None
    return edge if edge.known is not None or edge.fits else None
  def _chain(self, u:UOp) -> tuple[UOp, int, Steps]|None:
    """Writes u as sign * f(x), where x is the query's or the key's position; returns (x, sign, steps of f), or None if u has another form."""
    # f is made of steps x -> (x*times + plus)//over.
    if u is QUERY or u is KEY: return u, 1, ()
    if (divided := _division(u)) is None: return None
    x, over = self.sum(divided[0]), divided[1]
    terms, plus = _terms(x), x.get(ONE, 0)
    if len(terms) != 1 or (inner := self._chain(terms[0][0])) is None: return None
    symbol, sign, steps = inner
    times = terms[0][1]*sign
    step = FloorStep(times, plus, over) if times > 0 else FloorStep(-times, over - 1 - plus, over)
    return symbol, 1 if times > 0 else -1, then(steps, step)
