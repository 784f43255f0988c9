"""Softcap: softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118)."""
from __future__ import annotations
from collections.abc import Mapping
from attn.ops import common as ops
from attn.problem import Problem
from attn.score.term import LOG2E, Fragment, Positions, ScoreTerm, Unit
from attn.tinygrad_compat import Tensor, UOp

SMALL_CAP = 64.0           # a softcap up to this has an error of 1e-5 at most by the short formula: less than P's rounding to 16 bits

def _capped(x:list[UOp], at:Fragment, unit:Unit) -> list[UOp]:
  p = at.p
  terms = 10 if p.dtype == "float32" else 4 if p.softcap > SMALL_CAP else 0
  return [ops.softcap(y, unit.natural/p.softcap, p.softcap*LOG2E, terms) for y in x]

def _slope(before:list[UOp], after:list[UOp], at:Fragment, unit:Unit) -> list[UOp]:
  """1 - tanh^2."""
  tanhs = [ops.mul(y, 1/(at.p.softcap*LOG2E)) for y in after]
  return [ops.sub(ops.splat(1.0, ops.length(y)), ops.mul(y, y)) for y in tanhs]

def tanh(x:Tensor) -> Tensor:
  """tinygrad's has an error of an ulp of 1, which a large softcap would multiply: near 0 by the first terms of its series."""
  near = x.abs() < 0.25
  small = near.where(x, 0.0)      # of an infinite x the series has no gradient, although it is not selected
  y = small*small
  return near.where(small*(1 + y*(-1/3 + y*(2/15 - y*(17/315)))), x.tanh())

def _plain(s:Tensor, p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor: return tanh(s/p.softcap)*p.softcap

SOFTCAP = ScoreTerm("softcap", _capped, _slope, _plain)
