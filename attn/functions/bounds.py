"""The intervals that a traced mask function leaves visible: the keys that each query sees, and the queries that see each key. Begin with
`mask_bounds`."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from attn.functions.clauses import Clause, Literal, Reader, covers, without_contradicted
from attn.functions.edges import Edge, FloorStep, larger, smaller
from attn.functions.interval import Interval
from attn.tinygrad_compat import Ops, UOp, dtypes

Edges = tuple[Edge, ...]     # a clause made of edges of one direction: it shows a pair if at least one of them does

@dataclass(frozen=True)
class Bounds:
  """A mask: query i sees key j if each clause holds (at least one of its edges, limits such as j <= i, holds), and the condition `rest` holds as
  well."""
  # The keys that query i sees under all clauses are an interval. From query i to query i + 1, neither end of this interval decreases. The clauses
  # `before` hide the keys before a limit, such as j >= i - 5; the clauses `after` hide the keys after a limit, such as j <= i.
  before: tuple[Edges, ...]
  after: tuple[Edges, ...]
  rest: UOp|None  # condition on batch, head, query and key for what clauses cannot express; None: nothing

  def keys_of(self, i:Any) -> Interval:
    """Returns the interval of keys that the query at position i sees."""
    return Interval(_combined(self.before, lambda x: x.key(i), smaller, larger), _combined(self.after, lambda x: x.key(i), larger, smaller))
  def queries_of(self, j:Any) -> Interval:
    """Returns the interval of the positions of the queries that see the key at position j."""
    return Interval(_combined(self.after, lambda x: x.query(j), smaller, larger), _combined(self.before, lambda x: x.query(j), larger, smaller))

NO_BOUNDS = Bounds((), (), None)     # a mask that hides no pair

Combine = Callable[[Any, Any], Any]

def _combined(clauses:tuple[Edges, ...], at:Callable[[Edge], Any], one_of:Combine, all_of:Combine) -> Any:
  """Returns one end of the interval that all clauses leave visible, such as the last key; None without clauses. at(edge) returns the limit that an
  edge sets."""
  # A clause allows what at least one of its edges allows. `one_of` combines the limits of a clause's edges, and `all_of` the limits of all clauses:
  # for upper limits the maximum and the minimum, for lower limits the reverse.
  return functools.reduce(all_of, [functools.reduce(one_of, map(at, edges)) for edges in clauses]) if clauses else None

def _conjuncts(u:UOp) -> list[UOp]:
  if u.op in (Ops.AND, Ops.MUL) and u.dtype == dtypes.bool: return [x for v in u.src for x in _conjuncts(v)]
  return [u]

def _condition(clauses:list[Clause]) -> UOp:
  """Returns a UOp that is true if all these clauses hold."""
  def of(x:Literal) -> UOp: return x.condition if isinstance(x, Edge) else x
  return functools.reduce(UOp.__and__, [functools.reduce(UOp.__or__, map(of, clause)) for clause in clauses])

def _direction(clause:Clause) -> bool|None:
  """Returns True if all conditions in a clause are upper limits of the key's position (j <= ...), False if all are lower limits, otherwise None."""
  found = {x.upper if isinstance(x, Edge) else None for x in clause}
  return found.pop() if len(found) == 1 else None

NO_PAIR = Edge(True, (FloorStep(0, -1, 1),))     # no query sees a key

def mask_bounds(mask:UOp) -> Bounds:
  """Finds the intervals that a traced mask leaves visible, and the further condition that hides keys inside these intervals."""
  reader, conjuncts = Reader(), _conjuncts(mask)
  read = [reader.clauses(u) for u in conjuncts]
  clauses = without_contradicted(tuple(x for found in read for x in found))
  if () in clauses: return Bounds((), ((NO_PAIR,),), None)
  def edges(upper:bool) -> tuple[Edges, ...]:
    found = [clause for clause in clauses if _direction(clause) is upper]
    return tuple(sorted(tuple(sorted(x for x in clause if isinstance(x, Edge))) for clause in found))
  others, rest = [x for x in clauses if _direction(x) is None], []
  for u, found in zip(conjuncts, read):
    mine = [x for x in others if any(covers(x, y) for y in found)]
    others = [x for x in others if x not in mine]
    if mine: rest.append(min(u, _condition(mine), key=lambda v: len(v.toposort())))
  return Bounds(edges(False), edges(True), functools.reduce(UOp.__and__, rest) if rest else None)
