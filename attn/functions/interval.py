"""Interval of columns that a mask leaves visible to a row. A row is a query and the columns are keys, or the reverse."""
from __future__ import annotations
from typing import Any, NamedTuple

class Interval(NamedTuple):
  """First and last column that a row sees. None: the mask hides nothing on that side. From one row to the next, neither number decreases. An int is
  the number for all rows."""
  first: Any = None
  last: Any = None
