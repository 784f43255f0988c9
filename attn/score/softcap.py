"""Softcap: softcap * tanh(score / softcap) (Gemma 2, arXiv 2408.00118)."""
from __future__ import annotations
import functools
from collections.abc import Mapping
from fractions import Fraction
from typing import Any
from attn.ops import common as ops
from attn.ops.language import compound
from attn.ops.operation import Value, emit
from attn.problem import Problem
from attn.score.term import LOG2E, Fragment, Positions, ScoreTerm, Unit
from attn.tinygrad_compat import Tensor, UOp, dtypes

SMALL_CAP = 64.0           # a softcap up to this has an error of 1e-5 at most by the short formula: less than P's rounding to 16 bits

@functools.cache
def tanh_series(terms:int) -> tuple[tuple[float, ...], float]:
  """The first terms of tanh(y)/y as a series in y^2, and the y^2 up to which the next one is below half a unit in the last place of fp32. They follow
  from tanh' = 1 - tanh^2, coefficient by coefficient."""
  found = [Fraction(1)]
  for k in range(1, terms + 1): found.append(-sum((found[i]*found[k - 1 - i] for i in range(k)), Fraction(0))/(2*k + 1))
  return tuple(map(float, found[:terms])), float(2.0**-24/abs(found[terms]))**(1/terms)

@compound("softcap")
def _softcap(c:Any, x:Value, inner:Value, outer:Value, *, terms:int) -> Value:
  """tanh(y) = 1 - 2/(1 + exp2(2*log2(e)*y)), which is 1 and -1 at the ends. Near 0 that cancels: the first terms of its series, where it matters."""
  y = c.let("y", x*inner)
  far = c.let("far", 1.0 - 2.0*c.rcp(c.let("above", 1.0 + c.exp2(c.let("power", y*(2*LOG2E))))))
  if not terms: return far*outer
  (*factors, last), near = tanh_series(terms)
  square, n = c.let("square", y*y), c.length(x)
  series = c.variable("near", c.splat(c.number(last), n))
  for factor in reversed(factors): c.assign(series, c.fma(square, series.value, c.splat(c.number(factor), n)))
  c.assign(series, y*series.value)
  def element(i:int) -> Value: return c.select(c.element(square, i) < near, c.element(series.value, i), c.element(far, i))
  return c.vector(*map(element, range(n)))*outer

def softcap(x:UOp, inner:float, outer:float, terms:int) -> UOp:
  """outer * tanh(x * inner), to 1e-7 * outer; with so many `terms` of its series near 0 also to a few units in the last place of the value: with 4 up
  to |x * inner| of 0.2, with 10 everywhere."""
  return emit("softcap", x.dtype, x, UOp.const(inner, dtypes.float), UOp.const(outer, dtypes.float), terms=terms)

def _capped(x:list[UOp], at:Fragment, unit:Unit) -> list[UOp]:
  p = at.p
  terms = 10 if p.dtype == "float32" else 4 if p.softcap > SMALL_CAP else 0
  return [softcap(y, unit.natural/p.softcap, p.softcap*at.unit.of_natural, terms) for y in x]

def _slope(before:list[UOp], after:list[UOp], at:Fragment, unit:Unit) -> list[UOp]:
  """1 - tanh^2."""
  tanhs = [ops.mul(y, 1/(at.p.softcap*at.unit.of_natural)) for y in after]
  return [ops.sub(ops.splat(1.0, ops.length(y)), ops.mul(y, y)) for y in tanhs]

def tanh(x:Tensor) -> Tensor:
  """tinygrad's has an error of an ulp of 1, which a large softcap would multiply: near 0 by the first terms of its series."""
  near = x.abs() < 0.25
  small = near.where(x, 0.0)      # of an infinite x the series has no gradient, although it is not selected
  y = small*small
  return near.where(small*(1 + y*(-1/3 + y*(2/15 - y*(17/315)))), x.tanh())

def _plain(s:Tensor, p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor: return tanh(s/p.softcap)*p.softcap

SOFTCAP = ScoreTerm("softcap", _capped, _slope, _plain)
