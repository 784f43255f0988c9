"""Interval of the keys that a query sees under a mask, or of the queries that see a key."""
from __future__ import annotations
from typing import Any, NamedTuple

class Interval(NamedTuple):
  """First and last key that a query sees, or first and last query that sees a key."""
  # An int is the same for every query (or key). A UOp or Tensor is computed from the position of the query (or key), and never decreases from one
  # position to the next.
  first: Any = None  # None: the mask hides nothing on this side
  last: Any = None
