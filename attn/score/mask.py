"""Definition of a mask: each row of the score matrix sees an interval of columns. In a loop over keys, rows are queries and columns are keys; in a
loop over queries, the reverse."""
from __future__ import annotations
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from attn.functions.interval import Interval
from attn.problem import Problem
from attn.score.places import Positions, Walk
from attn.score.term import Fragment
from attn.tinygrad_compat import Tensor, UOp

SeenColumns = Callable[[Walk, Any], Interval]      # of a row: a UOp, or a Tensor of numbers of rows
PlainMask = Callable[[Problem, Positions, Mapping[str, Tensor]], Tensor|None]     # the last argument: the optional tensors by name
SeenEach = Callable[[Fragment], list[list[UOp]]]

def by_places(seen:SeenColumns) -> PlainMask:
  """Returns a mask in tensor operations, for a mask that depends only on the positions of query and key."""
  # The result is a bool tensor, whether a query sees a key, or None if every query sees every key.
  def sees(p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor|None:
    first, last = seen(Walk(p, "keys", 0, p.Sk, p.Sq), at.query)
    return both_hold(None if first is None else at.key >= first, None if last is None else at.key <= last)
  return sees

def both_hold(x:Tensor|None, y:Tensor|None) -> Tensor|None:
  """Returns the condition that x and y both hold; None stands for a condition that always holds."""
  if x is None or y is None: return y if x is None else x
  return x & y

@dataclass(frozen=True)
class Mask:
  """A mask, such as the window: the functions that compute, in kernels and in tensor operations, which keys a query sees."""
  name: str               # field of Problem that says what it hides, or "count"
  seen: SeenColumns  # interval of columns that a row sees: decides which tiles a kernel loops over, and which need a mask
  plain: PlainMask  # the mask in tensor operations
  # None if a row sees its whole interval. Otherwise a function that says for each score that a lane holds whether the query sees the key, and a
  # problem has this mask only if the field called `name` is not None.
  each: SeenEach|None = None
  # Whether the mask stays right if queries and keys are both counted from a later row, as on a device that holds a part of a sequence.
  moves: bool = True
