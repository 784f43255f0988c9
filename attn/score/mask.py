"""Mask rows. A mask leaves each row an interval of columns: each query some keys, or seen from the other side each key some queries."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from attn.problem import Problem
from attn.score.term import Positions
from attn.tinygrad_compat import Tensor, UOp

@dataclass(frozen=True)
class Walk:
  """A workgroup's walk: over the keys if it owns queries, or over the queries if it owns keys. Its own are called rows, and there are `own` of them.
  What it walks over are called columns, and there are `count` of them. The place of a key is its number. The place of a query is its number plus the
  offset of the problem. A query and a key with the same place meet on the diagonal."""
  p: Problem
  over: str            # "keys" or "queries"
  offset: int|UOp      # from the number of a row to the column where the diagonal meets it
  count: int|UOp
  own: int|UOp
  def place(self, row:Any) -> Any:
    """Place of a row."""
    return row + self.offset if self.over == "keys" else row
  def column(self, place:Any) -> Any:
    """Column at a place."""
    return place if self.over == "keys" else place + self.offset
  def diagonal(self, row:UOp) -> UOp:
    """Column where the diagonal meets a row."""
    return row + self.offset

class Interval(NamedTuple):
  """First and last column that a row sees. None: the mask hides nothing on that side. Neither of them falls from one row to the next. An int is the
  same for all rows."""
  first: Any = None
  last: Any = None

SeenColumns = Callable[[Walk, Any], Interval]      # of a row: a UOp, or a Tensor of numbers of rows
PlainMask = Callable[[Problem, Positions], Tensor|None]

def by_places(seen:SeenColumns) -> PlainMask:
  """Makes the plain form of a mask that depends on places alone: whether a query sees a key, None if it sees all."""
  def sees(p:Problem, at:Positions) -> Tensor|None:
    first, last = seen(Walk(p, "keys", 0, p.Sk, p.Sq), at.query)
    return both_hold(None if first is None else at.key >= first, None if last is None else at.key <= last)
  return sees

def both_hold(x:Tensor|None, y:Tensor|None) -> Tensor|None:
  """Joins two conditions. None always holds."""
  return y if x is None else x if y is None else x & y

@dataclass(frozen=True)
class Mask:
  """One row of the table of masks. All code that computes with masks reads it.

  seen: interval of columns of a row. It decides which tiles are walked over, which of them need no mask, and the limits in a fragment
  plain: the same in tensor operations
  moves: whether it hides the same pairs if queries and keys are both counted from another place. Devices that share a sequence count them so
  """
  name: str               # field of Problem that says what it hides, or "count"
  seen: SeenColumns
  plain: PlainMask
  moves: bool = True
