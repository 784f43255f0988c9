"""Hides columns beyond the last key or query of a sequence. Such columns exist if the tensor is larger than the sequence, or if the last tile is not
full."""
from __future__ import annotations
from typing import Any
from attn.problem import Problem
from attn.score.mask import Interval, Mask, Walk
from attn.score.term import Positions
from attn.tinygrad_compat import Tensor

def _those_there(walk:Walk, row:Any) -> Interval: return Interval(last=walk.count - 1)

def _belonging(p:Problem, at:Positions) -> Tensor|None: return at.belongs

COUNT = Mask("count", _those_there, _belonging)
