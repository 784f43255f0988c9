"""Columns that a mask leaves to a row."""
from __future__ import annotations
from typing import Any, NamedTuple

class Interval(NamedTuple):
  """First and last column that a row sees. None: the mask hides nothing on that side. From one row to the next, neither number becomes smaller. An
  int holds for all rows."""
  first: Any = None
  last: Any = None
