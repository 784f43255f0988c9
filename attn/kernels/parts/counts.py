"""Whole numbers of things."""
from __future__ import annotations

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b
