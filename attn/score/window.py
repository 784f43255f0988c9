"""Window around the diagonal: a query sees the keys from `left` before its place to `right` after it. A causal mask is a window with right = 0."""
from __future__ import annotations
from typing import Any
from attn.functions.interval import Interval
from attn.score.mask import Mask, by_places
from attn.score.places import Walk

def _near(walk:Walk, row:Any) -> Interval:
  back, ahead = walk.p.window if walk.over == "keys" else walk.p.window[::-1]
  place = walk.place(row)
  return Interval(None if back < 0 else walk.column(place - back), None if ahead < 0 else walk.column(place + ahead))

WINDOW_MASK = Mask("window", _near, by_places(_near))
