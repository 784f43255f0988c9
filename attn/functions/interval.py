"""Interval of the columns that a row sees under a mask. A row is a query and its columns are keys, or a row is a key and its columns are queries."""
from __future__ import annotations
from typing import Any, NamedTuple

class Interval(NamedTuple):
  """First and last column that a row sees. None says that the mask hides nothing on that side. From one row to the next, neither number decreases. A
  number that is an int holds for every row."""
  first: Any = None
  last: Any = None
