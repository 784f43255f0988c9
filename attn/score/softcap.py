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
from attn.score.places import Positions
from attn.score.term import Fragment, ScoreTerm, ScoreUnit
from attn.tinygrad_compat import Tensor, UOp, dtypes
from attn.values import LOG2E

SMALL_CAP = 64.0           # up to this softcap the short formula has an error of at most 1e-5, less than the rounding of P to 16 bits

@functools.cache
def tanh_series(terms:int) -> tuple[tuple[float, ...], float]:
  """Returns `terms` coefficients of tanh(y)/y as a series in y^2, and the largest y^2 at which their sum is exact in fp32."""
  # Each coefficient follows from the coefficients before it, by tanh' = 1 - tanh^2. At the largest y^2 the next term of the series is below half a
  # unit in the last place of fp32.
  found = [Fraction(1)]
  for k in range(1, terms + 1): found.append(-sum((found[i]*found[k - 1 - i] for i in range(k)), Fraction(0))/(2*k + 1))
  return tuple(map(float, found[:terms])), float(2.0**-24/abs(found[terms]))**(1/terms)

@compound("softcap")
def _softcap(c:Any, x:Value, inner:Value, outer:Value, *, terms:int) -> Value:
  """Computes outer*tanh(x*inner); near 0 it uses the first `terms` terms of the series of tanh."""
  # tanh(y) = 1 - 2/(1 + exp2(2*log2(e)*y)) gives exactly 1 and -1 for large |y|, but near 0 it loses digits by cancellation.
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
  """Computes outer * tanh(x * inner) with an error of at most 1e-7 * outer."""
  # `terms` is the number of terms of the series near 0. With 4 terms the error is a few units in the last place of the value for |x * inner| up to
  # 0.2, with 10 terms for every x.
  return emit("softcap", x.dtype, x, UOp.const(inner, dtypes.float), UOp.const(outer, dtypes.float), terms=terms)

def _capped(x:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  p = at.p
  terms = 10 if p.dtype == "float32" else 4 if p.softcap > SMALL_CAP else 0
  return [softcap(y, unit.natural/p.softcap, p.softcap*at.unit.of_natural, terms) for y in x]

def _slope(before:list[UOp], after:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  """Computes the derivative of a softcap, 1 - tanh^2, from `after`, the scores after the softcap."""
  tanhs = [ops.mul(y, 1/(at.p.softcap*at.unit.of_natural)) for y in after]
  return [ops.sub(ops.splat(1.0, ops.length(y)), ops.mul(y, y)) for y in tanhs]

def tanh(x:Tensor) -> Tensor:
  """Computes tanh, near 0 by the first terms of its series."""
  # The absolute error of tinygrad's own tanh is one unit in the last place of 1, even near 0. A large softcap would multiply this error.
  near = x.abs() < 0.25
  small = near.where(x, 0.0)      # the series has no gradient at an infinite x, even where it is not selected
  y = small*small
  return near.where(small*(1 + y*(-1/3 + y*(2/15 - y*(17/315)))), x.tanh())

def _plain(s:Tensor, p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor: return tanh(s/p.softcap)*p.softcap

SOFTCAP = ScoreTerm("softcap", _capped, _slope, _plain)
