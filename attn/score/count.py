"""Mask that hides keys beyond the last key of a sequence, or, in a kernel that loops over queries, queries beyond the last query."""
from __future__ import annotations
from collections.abc import Mapping
from typing import Any
from attn.functions.interval import Interval
from attn.problem import Problem
from attn.score.mask import Mask
from attn.score.places import Positions, Walk
from attn.tinygrad_compat import Tensor

# Such keys and queries exist if the tensor is larger than the sequence, or if the last tile is not full.

def _those_there(walk:Walk, row:Any) -> Interval: return Interval(last=walk.count - 1)

def _belonging(p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor|None: return at.belongs

COUNT = Mask("count", _those_there, _belonging)
