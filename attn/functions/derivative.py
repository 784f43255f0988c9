"""Derivative of a traced function (an expression of UOps) by one of its inputs, the variable: the score, or an element of a tensor. Begin with
`derivative`."""
from __future__ import annotations
import math
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple
from attn.functions.symbols import SCORE, elements_of
from attn.tinygrad_compat import Ops, UOp, committed, dtypes
from attn.values import LN2, LOG2E

# Differentiation goes forward, from the variable to the function's value. Each operation gets a slope: the derivative of the operation's result by
# the variable. The rules are tinygrad's: at a tie of MAX both sides count half, and integers, comparisons and truncation have the derivative 0. Three
# things differ from tinygrad's differentiation, which multiplies slopes from the function's value back to the variable:
# - The slope of a WHERE is selected from the slopes of both branches. tinygrad multiplies the slope of the branch that is not taken by 0, which gives
# NaN if this slope is infinite.
# - A factor of exactly 0 times a slope is 0, even if the slope is infinite. So 1/(1 + x^4) has the slope 0 where x^4 overflows, and sqrt(x^2) has the
# slope 0 at 0. An added WHERE selects 0 or the product, which costs two instructions. Where the slope cannot be infinite, no WHERE is added.
# - The slope of r = 1/(1 + 2^y), which is inside tanh and sigmoid, is computed as (r - r^2)*-ln(2)*dy. This form is finite even where 2^y overflows.
# A slope that float32 cannot hold, such as the slope of 1/x at 1e-30, is infinite, and the difference of two such slopes is NaN. Where a WHERE makes
# the score -inf, the weight of the key is 0 and so is every gradient, whatever the derivative is. So the slope of the branch that is not -inf is
# taken there. A mask written as `visible.where(score, -inf)` therefore has the derivative 1.

_ZERO, _ONE = UOp.const(0.0), UOp.const(1.0)     # Python numbers: constants are rounded to float32 once, at the end

class Slope(NamedTuple):
  """Derivative of one operation in a score_mod, as a UOp, and whether it may be infinite."""
  # `steep`: the derivative may be infinite although the operation's value is finite and no intermediate result overflows. An example is a square
  # root, whose derivative at 0 is infinite.
  value: UOp
  steep: bool

Slopes = Mapping[UOp, Slope]     # slopes of the operations that depend on the variable

# ***** products in which 0 wins over infinity *****

_LARGEST = 2.0**120     # assumed to be the largest element of a tensor, so that 2^8 times an element is finite
_OVERFLOW = 2.0**128    # larger than every float32

def _as_float32(u:UOp) -> UOp:
  return u if u.dtype in (dtypes.float, dtypes.weakfloat) else u.cast(dtypes.float)

def _product(factor:UOp, slope:UOp, guarded:bool) -> UOp:
  """Returns factor*slope; if `guarded`, the product is 0 where the factor is 0, even if the slope is infinite."""
  if slope is _ONE: return factor
  return factor.ne(0).where(factor*slope, _ZERO) if guarded else factor*slope

def _exponent_of_sigmoid(u:UOp) -> UOp|None:
  # y, if `u` is 1/(1 + 2^y)
  if u.op is not Ops.RECIPROCAL or u.src[0].op is not Ops.ADD: return None
  one, power = u.src[0].src if u.src[0].src[0].op is Ops.CONST else u.src[0].src[::-1]
  return power.src[0] if one.op is Ops.CONST and one.val == 1 and power.op is Ops.EXP2 else None

def _limit_of_operand(u:UOp) -> float:
  """Returns an upper limit for the absolute value of `u`, a constant, symbol or tensor element in an expression."""
  # The score may be -inf.
  if u is SCORE: return math.inf
  return _LARGEST if u.op is Ops.INDEX and dtypes.is_float(u.dtype) else max(abs(u.vmin), abs(u.vmax))

def _limit(value:UOp) -> float:
  """Returns an upper limit for the absolute value of an expression, or infinity if no limit is known."""
  found = dict[UOp, float]()
  for u in value.toposort(lambda u: dtypes.is_float(u.dtype) and u.op not in (Ops.CONST, Ops.PARAM, Ops.INDEX)):
    of = [found[x] if x in found else _limit_of_operand(x) for x in u.src]
    match u.op:
      case Ops.ADD: found[u] = sum(of)
      case Ops.MUL: found[u] = of[0]*of[1]
      case Ops.WHERE: found[u] = max(of[1:])
      case Ops.MAX | Ops.CAST: found[u] = max(of)
      case _: found[u] = math.inf if _exponent_of_sigmoid(u) is None else 1.0
  return found[value] if value in found else _limit_of_operand(value)

def may_be_infinite(value:UOp) -> bool:
  """Returns whether an expression may be infinite in float32; the score itself may be -inf."""
  return not _limit(value.simplify()) < _OVERFLOW

# ***** a rule for each operation *****

def _slope(u:UOp, at:Slopes) -> UOp: return at[u].value if u in at else _ZERO

def _total(parts:list[UOp]) -> UOp: return parts[0] if len(parts) == 1 else parts[0] + parts[1]

def _of_add(u:UOp, at:Slopes) -> UOp: return _total([at[x].value for x in u.src if x in at])

def _of_mul(u:UOp, at:Slopes) -> UOp:
  x, y = u.src
  return _total([_product(_as_float32(factor), *at[variable]) for factor, variable in ((y, x), (x, y)) if variable in at])

def _of_reciprocal(u:UOp, at:Slopes) -> UOp:
  r, y = _as_float32(u), _exponent_of_sigmoid(u)
  if y is not None: return _product(r - r*r, at[y].value*-LN2, may_be_infinite(at[y].value))
  slope = at[u.src[0]].value
  return _product(r, r*slope*-1, may_be_infinite(slope))

def _of_exp2(u:UOp, at:Slopes) -> UOp:
  slope = at[u.src[0]].value
  return _product(_as_float32(u), slope*LN2, may_be_infinite(slope))

def _of_log2(u:UOp, at:Slopes) -> UOp: return _product(_as_float32(u.src[0]).reciprocal()*LOG2E, at[u.src[0]].value, False)

def _of_sin(u:UOp, at:Slopes) -> UOp: return _product((math.pi/2 - _as_float32(u.src[0])).sin(), at[u.src[0]].value, False)

def _of_sqrt(u:UOp, at:Slopes) -> UOp: return _product(at[u.src[0]].value, _as_float32(u).reciprocal()*0.5, True)

def _is_flat_at_zero(u:UOp) -> bool:
  """Returns whether the power `u` has a finite derivative by its base where the base is 0."""
  return u.src[1].op is Ops.CONST and u.src[1].val >= 1

def _of_pow(u:UOp, at:Slopes) -> UOp:
  base, exponent = map(_as_float32, u.src)
  parts = []
  if (found := at.get(u.src[0])) is not None:
    part = _product(exponent.ne(0).where(exponent*base.pow(exponent - 1), _ZERO), *found)
    parts.append(part if _is_flat_at_zero(u) else found.value.ne(0).where(part, _ZERO))
  if (found := at.get(u.src[1])) is not None:
    slope = base.log2()*LN2*found.value
    parts.append(base.ne(0).where(_product(_as_float32(u), slope, may_be_infinite(slope)), _ZERO))
  return _total(parts)

def _of_max(u:UOp, at:Slopes) -> UOp:
  (x, y), (a, b) = u.src, [_slope(x, at) for x in u.src]
  return x.ne(y).where((y < x).where(a, b), (a + b)*0.5)

def _of_where(u:UOp, at:Slopes) -> UOp: return u.src[0].where(*[_slope(x, at) for x in u.src[1:]])

def _of_cast(u:UOp, at:Slopes) -> UOp: return at[u.src[0]].value

_RULES:dict[Ops, Callable[[UOp, Slopes], UOp]] = {
  Ops.ADD: _of_add, Ops.MUL: _of_mul, Ops.RECIPROCAL: _of_reciprocal, Ops.EXP2: _of_exp2, Ops.LOG2: _of_log2, Ops.SIN: _of_sin, Ops.SQRT: _of_sqrt,
  Ops.POW: _of_pow, Ops.MAX: _of_max, Ops.WHERE: _of_where, Ops.CAST: _of_cast}
_REASONS = {Ops.BITCAST: "the bits of a number (BITCAST)"}     # other operations without a rule are named by their names in tinygrad

# ***** the pass *****

def _has_slope_zero(u:UOp) -> bool:
  """Returns whether an operation, such as a comparison, has the derivative 0 by each of its operands."""
  # The operands of a read of a tensor's element are only the int indices.
  if u.op is Ops.CAST: return u.dtype == dtypes.bool or (dtypes.is_float(u.src[0].dtype) and not dtypes.is_float(u.dtype))
  return u.op in (Ops.CMPLT, Ops.CMPNE, Ops.CMPEQ, Ops.TRUNC, Ops.INDEX)

def _shown_part(value:UOp) -> UOp:
  """Returns the function `value` without its masks: a WHERE between x and -inf becomes x."""
  made = dict[UOp, UOp]()
  for u in value.toposort(lambda u: u.op in (Ops.WHERE, Ops.ADD)):
    src = tuple(made.get(x, x) for x in u.src)
    hidden = [x.op is Ops.CONST and x.val == -math.inf for x in src]
    made[u] = src[2 if hidden[1] else 1] if u.op is Ops.WHERE and any(hidden[1:]) else u.replace(src=src)
  return made.get(value, value)

def tidied(u:UOp) -> UOp:
  """Simplifies an expression and casts it to float32."""
  # Elements of tensors stay as they are, so that a kernel recognises the elements that it has already read.
  instead = {x: UOp.variable(f"element{n}", x.dtype.min, x.dtype.max, x.dtype, param=True) for n, x in enumerate(elements_of(u))}
  return committed(u.substitute(instead).simplify().cast(dtypes.float)).substitute({y: x for x, y in instead.items()})

@lru_cache(256)
def derivative_or_reason(value:UOp, of:UOp) -> UOp|str:
  """Returns the derivative of the function `value` by `of`, or the name of an operation that has none."""
  shown, at = _shown_part(value), {of: Slope(_ONE, False)}
  for u in shown.toposort(lambda u: not _has_slope_zero(u)):
    moving = [at[x] for x in u.src if x in at]
    if not moving: continue
    if u.op not in _RULES: return _REASONS.get(u.op, f"the operation {u.op.name}")
    steep = u.op is Ops.SQRT or (u.op is Ops.POW and not _is_flat_at_zero(u)) or any(slope.steep for slope in moving)
    at[u] = Slope(_RULES[u.op](u, at), steep)
  return tidied(_slope(shown, at))

def derivative(value:UOp, of:UOp) -> UOp:
  """Returns the derivative of a score_mod's result by the score or an element of a tensor, as a float32 UOp; raises NotImplementedError without
  one."""
  found = derivative_or_reason(value, of)
  if isinstance(found, str): raise NotImplementedError(f"{found} has no derivative")
  return found

def why_no_derivative(value:UOp, of:UOp) -> str|None:
  """Returns the name of the operation because of which the function `value` has no derivative by `of`; None if it has one."""
  found = derivative_or_reason(value, of)
  return found if isinstance(found, str) else None

def is_additive(value:UOp, to:UOp=SCORE) -> bool:
  """Returns whether the function `value` only adds a number to `to`, so that its derivative by `to` is 1."""
  found = derivative_or_reason(value, to)
  return isinstance(found, UOp) and found.op is Ops.CONST and found.val == 1
