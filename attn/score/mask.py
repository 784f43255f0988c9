"""Definition of a mask: it leaves each row an interval of columns. Each query sees an interval of keys, and each key is seen by an interval of
queries."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from attn.problem import Problem
from attn.score.term import Positions
from attn.tinygrad_compat import Tensor, UOp

@dataclass(frozen=True)
class Walk:
  """The rows and columns of a workgroup's loop. The workgroup owns `own` rows, and loops over `count` columns: rows are queries and columns are keys,
  or the reverse. The place of a key is its number. The place of a query is its number plus the offset of the problem. A query and a key with the same
  place meet on the diagonal."""
  p: Problem
  over: str            # "keys" or "queries"
  offset: int|UOp      # from the number of a row to the column where the diagonal meets it
  count: int|UOp
  own: int|UOp
  def place(self, row:Any) -> Any:
    """Returns the place of a row on the axis that queries and keys share: the number of a key, or the number of a query plus the problem's offset."""
    return row + self.offset if self.over == "keys" else row
  def column(self, place:Any) -> Any:
    """Returns the column at a place on the axis that queries and keys share. See `Walk`."""
    return place if self.over == "keys" else place + self.offset
  def diagonal(self, row:UOp) -> UOp:
    """Returns the column where the diagonal meets a row."""
    return row + self.offset

class Interval(NamedTuple):
  """First and last column that a row sees. None: the mask hides nothing on that side. From one row to the next, neither number becomes smaller. An
  int holds for all rows."""
  first: Any = None
  last: Any = None

SeenColumns = Callable[[Walk, Any], Interval]      # of a row: a UOp, or a Tensor of numbers of rows
PlainMask = Callable[[Problem, Positions], Tensor|None]

def by_places(seen:SeenColumns) -> PlainMask:
  """Makes a mask's form in tensor operations from `seen`, for a mask that depends on places alone. This form says whether a query sees a key; None:
  every query sees every key."""
  def sees(p:Problem, at:Positions) -> Tensor|None:
    first, last = seen(Walk(p, "keys", 0, p.Sk, p.Sq), at.query)
    return both_hold(None if first is None else at.key >= first, None if last is None else at.key <= last)
  return sees

def both_hold(x:Tensor|None, y:Tensor|None) -> Tensor|None:
  """Joins two conditions into the condition that both hold. None stands for a condition that always holds."""
  return y if x is None else x if y is None else x & y

@dataclass(frozen=True)
class Mask:
  """One row of the table of masks. All code that computes with masks reads it.

  seen: returns the interval of columns that a row sees. The interval decides which tiles a kernel loops over, which of these tiles need no mask,
    and which columns of a fragment are hidden
  plain: the mask in tensor operations
  moves: whether the mask hides the same pairs if queries and keys are both counted from another row. Devices that share a sequence count rows from
    their own first one"""
  name: str               # field of Problem that says what it hides, or "count"
  seen: SeenColumns
  plain: PlainMask
  moves: bool = True
