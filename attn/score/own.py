"""The caller's own functions as table rows: score_mod, a score term, and mask_mod, a mask. attn/functions makes UOps of them."""
from __future__ import annotations
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from attn.functions.derivative import derivative, is_additive, may_be_infinite, tidied, why_no_derivative
from attn.functions.interval import Interval
from attn.functions.symbols import SCORE, elements_of
from attn.functions.trace import Traced
from attn.ops import common as ops
from attn.problem import Problem
from attn.score.in_tensors import parts_in_tensors, with_gradients
from attn.score.lifted import Elementwise, Lifted
from attn.score.mask import Mask, both_hold
from attn.score.places import Positions, Walk
from attn.score.term import Fragment, ScoreTerm, ScoreUnit, TermRegisters, one
from attn.tinygrad_compat import Tensor, UOp, dtypes

# ***** score_mod *****

def score_function(p:Problem) -> Traced:
  assert p.score_mod is not None
  return p.score_mod

def _value(x:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  mod = score_function(at.p)
  return Lifted(at, f"score_mod={mod}", x, unit.natural).scaled(tidied(mod.value), at.unit.of_natural)

def float_elements(p:Problem) -> list[UOp]:
  """Returns the elements of mod_tensors that score_mod reads and that have a gradient."""
  return [u for u in elements_of(score_function(p).value) if dtypes.is_float(u.dtype)]

def _variable(p:Problem) -> UOp:
  """Returns the UOp by which a kernel differentiates score_mod: the score, or the tensor element with the number `p.by_element`."""
  return SCORE if p.by_element is None else float_elements(p)[p.by_element]

def _slope(before:list[UOp], after:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  """Computes the derivative of score_mod by the score, or by a tensor element, at the scores `before`; `after` are score_mod's results."""
  mod = score_function(at.p)
  slopes = Lifted(at, f"score_mod={mod}", before, unit.natural).scaled(derivative(mod.value, _variable(at.p)), 1.0)
  if not may_be_infinite(mod.value) and not float_elements(at.p): return slopes     # without tensors, which may hold -inf
  # Where the function returns -inf, P is 0, and P times the derivative must be 0, too, although the derivative could be infinite or NaN.
  def nothing(x:UOp) -> list[UOp]: return [ops.extract(x, i).eq(-math.inf) for i in range(ops.length(x))]
  return [ops.select_each(nothing(x), 0.0, slope) for slope, x in zip(slopes, after)]

def _plain(s:Tensor, p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor:
  return with_gradients(score_function(p).value, s, at, given)

def _of(p:Problem) -> ScoreTerm:
  """Returns the ScoreTerm of score_mod for one problem."""
  mod = score_function(p)
  # A function that attn cannot differentiate is marked as not differentiable. A function that only adds to the score has the derivative 1.
  if why_no_derivative(mod.value, SCORE) is not None: return replace(SCORE_MOD, differentiable=False)
  return replace(SCORE_MOD, derivative=one) if is_additive(mod.value, _variable(p)) else SCORE_MOD

SCORE_MOD = ScoreTerm("score_mod", _value, _slope, _plain, (), TermRegisters.COLUMNS, placed=True, moves=False, of=_of)

# ***** mask_mod *****

def _interval(walk:Walk, row:Any) -> Interval:
  if (bounds := walk.p.mask_bounds) is None: return Interval()
  if walk.over == "keys": return bounds.keys_of(walk.place(row))
  first, last = bounds.queries_of(row)
  return Interval(None if first is None else walk.column(first), None if last is None else walk.column(last))

def _seen(at:Fragment) -> Elementwise:
  mod = at.p.mask_mod
  assert mod is not None
  return Lifted(at, f"mask_mod={mod}").each(mod.value)

def _sees(p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor|None:
  found = None
  if p.mask_bounds is not None:
    first, last = p.mask_bounds.keys_of(at.place_of_query)
    found = both_hold(None if first is None else at.place_of_key >= first, None if last is None else at.place_of_key <= last)
  return found if p.mask_mod is None else both_hold(found, parts_in_tensors(p.mask_mod.value, None, at, given)[p.mask_mod.value])

MASK_MOD = Mask("mask_mod", _interval, _sees, _seen, moves=False)
