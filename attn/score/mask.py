"""What a mask is, and what it may go by: it leaves each row of what is walked over an interval of columns, seen from either side."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from attn.problem import Problem
from attn.score.term import Positions
from attn.tinygrad_compat import Tensor, UOp

@dataclass(frozen=True)
class Walk:
  """What a workgroup walks over, as its own rows see it: the keys, from its queries, or the queries, from its keys. Own rows are rows, of which there
  are `own`, and what is walked over are columns, of which there are `count`. A key's place is its number, a query's its number and the offset of the
  diagonal: where both have the same place they meet on the diagonal."""
  p: Problem
  over: str            # "keys" or "queries"
  offset: int|UOp      # from the number of a row to the column where the diagonal meets it
  count: int|UOp
  own: int|UOp
  def place(self, row:Any) -> Any:
    """Where a row is."""
    return row + self.offset if self.over == "keys" else row
  def column(self, place:Any) -> Any:
    """The column at a place."""
    return place if self.over == "keys" else place + self.offset
  def diagonal(self, row:UOp) -> UOp:
    """The column where the diagonal meets a row."""
    return row + self.offset

class Interval(NamedTuple):
  """The first column that a row sees and the last one, None where a mask hides none on that side. Neither falls from one row to the next. A number,
  where that is no UOp, is the same for all rows."""
  first: Any = None
  last: Any = None

SeenColumns = Callable[[Walk, Any], Interval]      # of a row, which is a UOp, or a Tensor of numbers
PlainMask = Callable[[Problem, Positions], Tensor|None]

def by_places(seen:SeenColumns) -> PlainMask:
  """A mask that goes by places alone, in tensor operations: whether a query sees a key, None where it sees all."""
  def sees(p:Problem, at:Positions) -> Tensor|None:
    first, last = seen(Walk(p, "keys", 0, p.Sk, p.Sq), at.query)
    return both_hold(None if first is None else at.key >= first, None if last is None else at.key <= last)
  return sees

def both_hold(x:Tensor|None, y:Tensor|None) -> Tensor|None:
  """What two conditions leave, of which None is none."""
  return y if x is None else x if y is None else x & y

@dataclass(frozen=True)
class Mask:
  """A row: what a mask is, for all that computes with it.

  seen: the interval of columns of a row. From it follow the tiles that are walked over, which of them need no mask, and the limits in a fragment
  plain: the same in tensor operations
  moves: whether it hides the same pairs where queries and keys are counted from another place: so devices that share a sequence count them
  """
  name: str               # the field of Problem that says what it hides; or what is counted
  seen: SeenColumns
  plain: PlainMask
  moves: bool = True
