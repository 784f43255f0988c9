"""Accuracy law: how far an element of an output may be from exact, in units of the element's own rounding error. The law holds for every element, for
all inputs and all kernels: |out - exact| <= 6 sigma + slack. docs/contract.md derives it. Begin with `law_of` and `judge`."""
from __future__ import annotations
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any
import numpy as np
from attn.ops.numerics import ROUNDOFF
from attn.ops.softmax import LIFT
from attn.reference import (PLAIN, Array, Options, TermStep, with_heads, batch_options, finished_scores, slope_of, softmax_of, summed_to, term_steps,
                            exact, exact_backward)

# `exact` is the float64 computation on the inputs as rounded to their dtype (attn/reference.py).
# `sigma` is the standard deviation, to first order, of the error that comes from the roundings which the dtypes force. These numbers are rounded: P
# (and in backward dS) to the inputs' dtype, where P or dS is a factor of a matrix product; O to the output's dtype; each gradient to the gradient's
# dtype. Backward computes delta = rowsum(dO * O) - dLSE from the rounded O. The error of rounding a number x to nearest has a standard deviation of
# at most u |x|/sqrt(3), where u is the roundoff of the dtype. Different numbers have independent errors. Equal numbers have equal errors. All dS of a
# row are computed from the one delta of the row, so an error of delta changes all dS of the row together.
# `slack` bounds all other errors: the errors of fp32 arithmetic, and the errors of elements of P that are so small that float16 stores them as a
# denormal number or as 0.
# The root mean square of error/sigma is taken over all elements with slack < sigma/4. If there are 10^4 such elements or more, this root mean square
# is at most 1. An output has NaN and inf exactly where `exact` has NaN and inf, and also has inf where a result is too large for the output's dtype.

SIGMAS = 6.0                    # standard deviations that the random part of an element's error may have
ENOUGH_ELEMENTS = 10**4                  # a root mean square counts only over this many elements or more
FP32 = ROUNDOFF["float32"]
# smallest normal numbers
SMALLEST = {"float16": 2.0**-14, "bfloat16": 2.0**-126, "float32": 2.0**-126, "fp8e4m3": 2.0**-6, "fp8e4m3fnuz": 2.0**-7}
OVERFLOWS = {"float16": 65520.0, "bfloat16": 2.0**128 - 2.0**119, "float32": 2.0**128 - 2.0**103}      # from here on a number is rounded to inf
VANISHING = 2.0**-96            # bound of errors below the normal numbers of fp32, 2^-126, times the largest size and number of inputs
MOST = 700.0                    # exponent of e: beyond it float64 overflows
EVENLY_SPREAD = 0.6                    # root mean square of a number that is spread evenly over 0..1, rounded up
STEP = 16                       # number of keys, or of elements of a row, that a matrix instruction adds at a time
SHORT_CAP = 64.0                # up to this softcap, kernels of 16-bit inputs compute tanh as 1 - 2/(1 + exp(2x)), everywhere

@dataclass(frozen=True)
class ShortSums:
  """How precisely a matrix unit sums products of 8-bit floats, if its sums have fewer bits than fp32."""
  # The unit drops the bits of a product below 2^-bits times the largest partial sum. After `run` products the unit's sum is added to an fp32 sum; 0:
  # the unit adds all products without fp32.
  bits: int
  run: int
  @property
  def unit(self) -> float: return 2.0**-self.bits
  def runs(self, n:int) -> list[slice]: return [slice(i, i + (self.run or n)) for i in range(0, n, self.run or n)]

@dataclass(frozen=True)
class Law:
  """Exact values of an output, and the limit of each element's error: 6 `sigma` + `slack`."""
  exact: Array
  sigma: Array  # standard deviation of the rounding errors that the dtypes force
  slack: Array  # limit of all other errors
  # A second check is the root mean square of error/sigma over many elements, which must be at most 1. It leaves out an element whose error comes from
  # few roundings or equals the error of another element, and an element below the smallest normal number of the dtype.
  left_out: Array
  def of(self, change:Callable[[Array], Array]) -> Law:
    """Returns the exact values and error limits of a part or a rearrangement of the output: applies `change`, e.g. a transpose, to each array."""
    return Law(*[change(getattr(self, x.name)) for x in fields(self)])
  def __getitem__(self, at:Any) -> Law: return self.of(lambda a: a[at])
  def put(self, at:Any, law:Law) -> None:
    """Overwrites the exact values and error limits of the elements `at` (a numpy index) with those of `law`."""
    for x in fields(self): getattr(self, x.name)[at] = getattr(law, x.name)
  def add(self, at:Any, law:Law) -> None:
    """Adds the exact values of `law` to the elements `at` (a numpy index) and widens their error limits: each element becomes a sum of two
    results."""
    # The errors of the two results must be independent: the variances (sigma^2) and the slacks add up.
    self.exact[at] += law.exact
    self.sigma[at] = np.hypot(self.sigma[at], law.sigma)
    self.slack[at] += law.slack
    self.left_out[at] |= law.left_out
  def rounded_to(self, dtype:str) -> Law:
    """Returns the exact values and error limits of the output after one more rounding, to `dtype`."""
    exact = _in_dtype(self.exact, dtype)
    return replace(self, exact=exact, sigma=np.hypot(self.sigma, _largest_error(_finite(exact), dtype)/math.sqrt(3)))
  @property
  def limit(self) -> Array: return SIGMAS*self.sigma + self.slack

def without_error(shape:tuple[int, ...], value:float=0.0) -> Law:
  """Makes the `Law` (exact values and error limits) of an output each of whose elements must be exactly `value`."""
  return Law(np.full(shape, value), np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_))

@dataclass(frozen=True)
class Laws:
  """Exact values and error limits (a `Law`) of each gradient; None for a gradient of a tensor, such as a bias, that the call was not given."""
  q: Law
  k: Law
  v: Law
  bias: Law|None = None
  sinks: Law|None = None
  alibi_slopes: Law|None = None

# ***** the verdict *****

@dataclass(frozen=True)
class Verdict:
  """Result of a comparison of an output with its exact values and error limits."""
  # `error`, `limit`, `sigma` and the index `where` are those of the element with the largest error/limit. An element's limit is 6 sigma + slack.
  error: float
  limit: float
  sigma: float
  where: tuple[int, ...]
  rms: float = 0.0  # root mean square of error/sigma over the elements that count
  furthest: float = 0.0  # largest error/sigma of the elements that count
  # Number of elements that count: the slack is below sigma/4, and the error comes from many roundings and equals no other element's error.
  resolved: int = 0
  count: int = 0  # number of all elements
  pattern: str = ""  # which NaN or inf is out of place; "": none
  @property
  def ratio(self) -> float:
    """Largest error/limit of all elements; a number above 1 means that the element at the index `where` is wrong."""
    return self.error/self.limit if self.limit else math.inf if self.error else 0.0
  @property
  def scattered(self) -> bool:
    """Whether the errors are too large as a whole: the root mean square of error/sigma over all elements is above 1."""
    # A mean of few errors says nothing.
    return self.resolved >= ENOUGH_ELEMENTS and self.rms > 1
  @property
  def ok(self) -> bool: return not self.pattern and self.error <= self.limit and not self.scattered
  def __str__(self) -> str:
    if self.pattern: return self.pattern
    return (f"error {self.error:.2e} at {self.where}, limit {self.limit:.2e}, sigma {self.sigma:.2e}; "
            f"rms of error/sigma {self.rms:.2f} over {self.resolved} elements")

def judge(out:Array, law:Law) -> Verdict:
  """Compares an output with its exact values and error limits; a wrong output raises no error, but `Verdict.ok` is False."""
  assert out.shape == law.exact.shape, (out.shape, law.exact.shape)
  for name, of in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
    if (wrong := of(out) != of(law.exact)).any():
      at = tuple(int(i) for i in np.argwhere(wrong)[0])
      return Verdict(math.nan, 0.0, 0.0, at, pattern=f"{name} pattern differs at {at} and {int(wrong.sum())} elements in all: "
                                                     f"got {out[at]}, exact is {law.exact[at]}")
  if not (finite := np.isfinite(law.exact)).any(): return Verdict(0.0, 0.0, 0.0, ())
  with np.errstate(all="ignore"):
    error = np.where(finite, np.abs(out.astype(np.float64) - law.exact), 0)
    limit = np.where(finite, law.limit, 1)
    at = tuple(map(int, np.unravel_index(int(np.nan_to_num(error/limit, nan=0).argmax()), error.shape)))
    resolved = finite & (law.slack < law.sigma/4) & ~law.left_out
    sigmas = error[resolved]/law.sigma[resolved]
  rms, furthest = (float(np.sqrt(np.square(sigmas).mean())), float(sigmas.max())) if sigmas.size else (0.0, 0.0)
  return Verdict(float(error[at]), float(limit[at]), float(law.sigma[at]), at, rms, furthest, sigmas.size, error.size)

# ***** rounding errors *****

def _finite(x:Array) -> Array: return x if (found := np.isfinite(x)).all() else np.where(found, x, 0)

def _in_dtype(x:Array, dtype:str) -> Array:
  """Returns x with inf, of the same sign, in place of each number that is too large for `dtype`."""
  return np.where(np.abs(x) >= OVERFLOWS[dtype], np.copysign(np.inf, x), x)

def _flushed(x:Array, dtype:str) -> Array: return np.where(np.abs(x) < SMALLEST[dtype], 0, x)

def _largest_error(x:Array, dtype:str) -> Array:
  """Returns, for each element of x, the largest error that rounding the element to `dtype` can make."""
  # This is the roundoff times |x|, or times the smallest normal number if |x| is smaller.
  return ROUNDOFF[dtype]*np.maximum(np.abs(x), SMALLEST[dtype])

@dataclass(frozen=True)
class _Moments:
  """Errors of each element of a result, before the element is rounded to the output's dtype: variance of the rounding errors, and a limit of all
  other errors."""
  variance: Array  # of an element's rounding errors
  slack: Array  # limit of the element's other errors
  alike: Array  # some terms of the element have equal rounding errors, which cannot cancel
  @staticmethod
  def none(shape:tuple[int, ...]) -> _Moments: return _Moments(np.zeros(shape), np.zeros(shape), np.zeros(shape, np.bool_))
  def add(self, at:Any, x:_Moments) -> None:
    self.variance[at] += x.variance
    self.slack[at] += x.slack
    self.alike[at] |= x.alike

def _stored(x:Array, errors:_Moments, dtype:str) -> Law:
  """Makes the `Law` (exact values and error limits) of results x that are rounded to `dtype`; `errors` are the errors before this rounding."""
  x = _in_dtype(x, dtype)
  finite = _finite(x)
  sigma = np.sqrt(errors.variance + np.square(_largest_error(finite, dtype))/3)
  slack = errors.slack + 8*FP32*np.abs(finite) + VANISHING
  # Elements below the smallest normal number don't count in the root mean square of error/sigma, because their own root mean square is 1, which is
  # all that the accuracy law allows. (Normal numbers have 0.73.)
  return Law(x, sigma, slack, errors.alike | (np.abs(finite) < SMALLEST[dtype]))

def _rounding(w:Array, dtype:str, flushes:bool, off:Array|float=0.0) -> tuple[Array, Array|None]:
  """Returns (limit of the random error, limit of the systematic error) of rounding the weights w to `dtype`; None in place of the second if there is
  none."""
  # Random errors partly cancel when weights are added. Systematic errors don't: for example, many small weights become 0. float32 weights are not
  # rounded.
  if dtype == "float32": return np.zeros_like(w), None
  size, largest = np.abs(w), _largest_error(w, dtype)
  # bfloat16 has the exponents of fp32, so no weight has a systematic error.
  if dtype == "bfloat16": return np.minimum(size, largest), None
  # A float16 weight below 2^-22, which is 4 times the smallest denormal number, has a systematic error in place of a random one. If the matrix unit
  # replaces denormal numbers by 0 (`flushes`), this applies to every weight below the smallest normal number plus `off`, where `off` is the error
  # that the weight had before.
  small = size < (SMALLEST[dtype] + off if flushes else 8*ROUNDOFF[dtype]*SMALLEST[dtype])
  lost = size if flushes else np.minimum(size, largest)
  return np.where(small, 0, largest), lost*small if (small & (size > 0)).any() else None

# ***** sums *****

def _squares(r:Array, x:Array, factor:Array|None=None, centre:Array|None=None) -> Array:
  """Computes for each row of r and column of x the sum over j of (r_j (factor_j x_j - centre))^2, a variance; `factor` None means 1, `centre` None
  means 0."""
  # This is the variance of the error of the sum over j of weight_j (factor_j x_j - centre), if the weights of a row have independent errors with the
  # standard deviations r_j. r and `factor` (None: 1) are (..., n, m), x is (..., m, columns), `centre` (None: 0) and the result are (..., n,
  # columns).
  found, of_x = r*r, r*r if factor is None else r*r*factor
  total = (of_x if factor is None else of_x*factor) @ (x*x)
  if centre is not None: total += centre*(centre*found.sum(-1, keepdims=True) - 2*(of_x @ x))
  return np.maximum(total, 0)

EQUAL, NOTHING = 1e-11, 1e-12    # relative tolerances: float64 may add up equal numbers in different orders
TOGETHER = 2**21                # most numbers that are grouped at a time

def _rows_with_equals(values:Array) -> Array:
  """Returns for each row of `values` (..., n, m) whether two of the row's m numbers have equal magnitude."""
  size = np.sort(np.abs(values), axis=-1)
  # A value below 1e-12 times the largest magnitude of its row does not count.
  if size.shape[-1] < 2: return np.zeros(size.shape[:-1], np.bool_)
  return ((size[..., 1:] - size[..., :-1] <= EQUAL*size[..., 1:]) & (size[..., 1:] > NOTHING*size[..., -1:])).any(-1)

def _with_equals(total:Array, values:Array, columns:int, terms:Callable[[tuple[Array, ...], Array], Array]) -> tuple[Array, Array]:
  # Adds errors of equal numbers in a row before they are squared; returns the corrected sums of squares, and whether each row was corrected.
  # `values` (..., n, m) has n rows of m numbers. A row stands for a sum of m terms, one for each number. `total` (..., n, columns) is the sum of the
  # squares of a row's terms, as if their errors were independent. But terms with equal numbers have equal errors, so they must be added first and
  # squared then. `terms(rows, order)` returns the terms of some rows (a numpy index), (count, m, columns); `order` (count, m) says in which order.
  equals = _rows_with_equals(values)
  at = np.argwhere(equals)
  step = max(1, TOGETHER//max(1, values.shape[-1]*columns))
  for first in range(0, len(at), step):
    here = tuple(at[first:first + step].T)
    size = np.abs(values[here])
    order = np.argsort(size, axis=-1)
    size = np.take_along_axis(size, order, -1)
    begins = np.ones(size.shape, np.bool_)
    begins[:, 1:] = size[:, 1:] - size[:, :-1] > EQUAL*size[:, 1:]
    starts = np.flatnonzero(begins)
    groups = np.add.reduceat(terms(here, order).reshape(size.size, columns), starts, axis=0)
    total[here] = np.add.reduceat(groups*groups, np.searchsorted(starts, np.arange(len(size))*size.shape[1]), axis=0)
  return total, equals[..., None]

def _grouped(values:Array, r:Array, x:Array, factor:Array|None=None, centre:Array|None=None) -> tuple[Array, Array]:
  # Computes the variance of the error of sum_j weight_j (factor_j x_j - centre), and whether each row has equal weights.
  # The error of weight_j has the standard deviation r_j. Two weights i and j of a row have equal errors if values_i and values_j are equal, and
  # independent errors otherwise. `values`, r and `factor` (None: 1) are (..., n, m), x is (..., m, columns), `centre` (None: 0) and the variance are
  # (..., n, columns). The second result, bool (..., n, 1), says which rows have two equal values.
  x = np.broadcast_to(x, (*r.shape[:-2], *x.shape[-2:]))
  def terms(here:tuple[Array, ...], order:Array) -> Array:
    def ordered(a:Array) -> Array: return np.take_along_axis(a[here], order, -1)[..., None]
    rows = x[(*(i[:, None] for i in here[:-1]), order)]
    if factor is not None: rows = rows*ordered(factor)
    if centre is not None: rows = rows - centre[here][:, None]
    return rows*ordered(r)
  return _with_equals(_squares(r, x, factor, centre), values, x.shape[-1], terms)

def _prefixes(w:Array, x:Array, factor:Array|None=None, centre:Array|None=None) -> tuple[Array, Array|None]:
  # Estimates the largest magnitude that the running sums of w_j factor_j x_j, and of w_j (factor_j x_j - centre), reach.
  # Partial sums at the ends of at most 32 blocks are computed exactly. Partial sums inside a block are estimated as a random walk: the root of the
  # sum of the squares of all terms. The results are (..., n, columns), the second None without `centre`.
  m = w.shape[-1]
  running, mass = np.zeros((*w.shape[:-1], x.shape[-1])), np.zeros((*w.shape[:-1], 1))
  largest = np.sqrt(_squares(w, x, factor))
  centred = None if centre is None else np.sqrt(_squares(w, x, factor, centre))
  step = max(64, -(-m//32))
  for first in range(0, m, step):
    here = slice(first, first + step)
    running += (w[..., here] if factor is None else w[..., here]*factor[..., here]) @ x[..., here, :]
    np.maximum(largest, np.abs(running), out=largest)
    if centre is None or centred is None: continue
    mass += w[..., here].sum(-1, keepdims=True)
    np.maximum(centred, np.abs(running - mass*centre), out=centred)
  return largest, centred

def _roundings(w:Array) -> Array:
  """Returns factors (..., 1), one for each row of w. An fp32 sum of products with the row has an error of at most factor * fp32 roundoff * largest
  partial sum."""
  # w (..., m) has the first factor of each product; a product with w = 0 does not count. The bound holds for two ways to add: a matrix instruction
  # that adds 16 products at a time and may truncate the sum, and a chain of multiply-adds that round to nearest.
  terms = (w != 0).sum(-1, keepdims=True)
  return np.maximum(2*np.ceil(terms/STEP), SIGMAS/2*np.sqrt(terms))

def _added(w:Array, largest:Array) -> Array:
  """Bounds the rounding error of an fp32 sum of products w_j x_j; `largest` is the largest magnitude that the running sum reaches."""
  return FP32*_roundings(w)*largest

def _dot_error(n:int, size:Array, squares:Array) -> Array:
  """Estimates the standard deviation of the error of fp32 dot products; `size` are the results, `squares` the sums of their n squared terms."""
  return FP32*math.sqrt(n)/2*(np.abs(size) + np.sqrt(squares))

def _short_dot_errors(short:ShortSums, q:Array, k_transposed:Array, products:Array) -> tuple[Array, Array]:
  """Estimates for q k^T in a matrix unit that cuts low bits off products: (standard deviation of the error, limit of the systematic error)."""
  # A cut moves a product towards zero, so the cuts of positive and of negative products partly cancel.
  unit = short.unit*(np.abs(products) + np.sqrt((q*q) @ (k_transposed*k_transposed)))
  return unit*EVENLY_SPREAD*math.sqrt(q.shape[-1]), unit*np.abs(np.sign(q) @ np.sign(k_transposed))/2

def _short_sum_errors(short:ShortSums, w:Array, x:Array, cut_below:float=2.0) -> Array:
  """Returns a limit for the error of the sums w @ x in a matrix unit that cuts low bits off each product."""
  # Only products with weights below `cut_below` times the sum of the weights are assumed to lose bits. The default 2 includes every weight.
  random, signed = np.zeros((*w.shape[:-1], x.shape[-1])), np.zeros((*w.shape[:-1], x.shape[-1]))
  for here in short.runs(w.shape[-1]):
    some, of_x = w[..., here], x[..., here, :]
    mass, counted = some @ np.abs(of_x), np.where((some > 0) & (some < cut_below*some.sum(-1, keepdims=True)), 1.0, 0.0)
    random += np.square(short.unit*mass)*(counted @ np.sign(np.abs(of_x)))
    signed += short.unit*mass*np.abs(counted @ np.sign(of_x))/2
  return SIGMAS*EVENLY_SPREAD*np.sqrt(random) + signed

# ***** the pairs of queries and keys *****

def _clean(x:Array) -> Array: return _finite(x.astype(np.float64))

@dataclass(frozen=True)
class _Pairs:
  """Values in float64, such as the weights P, from which the error limits of o and lse are computed."""
  # An array is (..., H, Sq, Sk), or (..., H, Sq, 1). The heads of k and v are repeated, so that q, k and v have equal numbers of heads.
  dtype: str
  flushes: bool
  scale: float
  q: Array
  k: Array
  v: Array
  raw: Array             # softmax_scale times the product of query and key
  p: Array               # weight P
  slope: Array           # derivative of the final score by `raw`: softcap and score_mod change it from 1
  slope_off: Array       # error of `slope`
  factor: Array|None     # 1/(1 - dropout_p) for a pair that dropout keeps, 0 for another pair; None without dropout
  off: Array             # standard deviation of the final score's error in fp32
  own: Array             # part of `off` from the last operations: terms that add to the score, and the subtraction of lse
  lse: Array             # of a row
  lse_off: Array         # error of a row's lse
  rounding: tuple[Array, Array|None]     # largest rounding error and loss of `weights`: see _rounding
  weights: Array         # P; with rows of 8 bits, P times the scale of the key's row of V. Forward rounds these numbers times a factor of each row
  short: ShortSums|None = None           # how the matrix unit adds, if not in fp32
  def kept(self, a:Array) -> Array:
    """Applies dropout to `a`, which has a value for each query and key: the value becomes 0 if dropout drops the pair, otherwise it is multiplied by
    1/(1 - dropout_p)."""
    return a if self.factor is None else a*self.factor

def _off_by_the_cap(off:Array, step:TermStep, x:Options, dtype:str) -> tuple[Array, Array]:
  capped = np.abs(step.after)
  off = off*step.slope + 4*FP32*capped + (0 if dtype == "float32" else 2*FP32*min(x.softcap, SHORT_CAP))
  return off, 4*FP32 + 2*capped*off/x.softcap**2

def _off_by_a_function(off:Array, step:TermStep, x:Options, dtype:str) -> tuple[Array, Array]:
  assert x.score_mod is not None and step.slope is not None
  slope, (_, moved, inner) = np.abs(step.slope), x.score_mod(step.before + off)     # the slope moves with the score
  new_off = off*slope + 4*FP32*(np.abs(step.before*slope) + np.abs(_finite(step.after)) + inner)
  return new_off, 4*FP32*(1 + slope) + np.abs(moved - step.slope)

# Terms that do more than add to a score, by the name of their option. The function of a term gets the standard deviation of the scores' error before
# the term. It returns the standard deviation after the term, and a limit of the error of the term's slope.
BENT: dict[str, Callable[[Array, TermStep, Options, str], tuple[Array, Array]]] = {
  "softcap": _off_by_the_cap, "score_mod": _off_by_a_function}

def _pairs(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int], offset:int, x:Options, dtype:str, flushes:bool,
           v_scales:Array|None=None, short:ShortSums|None=None) -> _Pairs:
  given_q, given_k, v = with_heads(q, k, _clean(v), np.float64)
  q, k = _finite(given_q), _finite(given_k)
  if x.bias is not None: x = replace(x, bias=np.where(np.isnan(x.bias) | np.isposinf(x.bias), 0, x.bias.astype(np.float64)))
  turned = k.swapaxes(-1, -2)
  raw = (q @ turned)*scale
  with np.errstate(all="ignore"):
    given_raw = raw if q is given_q and k is given_k else (given_q @ given_k.swapaxes(-1, -2))*scale
    s, steps = finished_scores(given_raw, window, offset, x)
    slope = _finite(np.asarray(slope_of(steps), np.float64))
    p, lse = (_finite(a) for a in softmax_of(s, x))
    top = _finite(np.fmax.reduce(s, axis=-1, initial=-np.inf))[..., None]
    none_bent: dict[str, Any] = dict.fromkeys(BENT, 0.0)
    # the sum of what terms add to scores
    bare = _finite(finished_scores(np.zeros_like(raw), (-1, -1), offset, replace(x, **none_bent))[0])
  lse = lse[..., None]
  off, size, slope_off = scale*_dot_error(q.shape[-1], raw/scale, (q*q) @ (turned*turned)), np.abs(raw), np.zeros_like(raw)
  of_sign = np.zeros_like(raw)
  if short is not None:
    more, of_sign = (scale*a for a in _short_dot_errors(short, q, turned, raw/scale))
    off = off + more + of_sign/3
  for step in term_steps(raw, offset, x):
    if step.name not in BENT: continue
    off, more = BENT[step.name](off, step, x, dtype)
    size, slope_off = np.abs(step.after), slope_off + more
  size = size + np.abs(bare)
  own = FP32*((size + np.abs(lse))/2 + 1.5)
  off = np.minimum(off + own, 1)
  lse_off = SIGMAS*np.sqrt(_grouped(raw, p*off, np.ones((p.shape[-1], 1)))[0]) + FP32*(
    3*(p*size).sum(-1, keepdims=True) + 4*(1 + np.abs(lse)) + _roundings(p)) + (p*of_sign).sum(-1, keepdims=True)
  above = np.exp(np.minimum(lse - top, MOST))      # forward's weights are relative to the row's largest score, or to a lower number
  above = above*2.0**LIFT.get(dtype, 0.0)           # times the weight of the largest score
  weights = p
  if v_scales is not None:                         # then relative to the row's largest product of P and a scale
    scales = np.repeat(_scales_in_range(v_scales), q.shape[-3]//v_scales.shape[-2], axis=-2)[..., None, :]
    weights = p*scales
    largest = weights.max(-1, keepdims=True, initial=0)
    above = scales/np.where(largest > 0, largest, 1)
  r, lost = _rounding(p*above, dtype, flushes)
  factor = None if x.kept is None else np.broadcast_to(np.where(x.kept, 1/(1 - x.dropout_p), 0), p.shape)
  return _Pairs(dtype, flushes, scale, q, k, v, raw, p, np.broadcast_to(slope, p.shape), slope_off, factor, off, own, lse, lse_off,
                (r/above, None if lost is None else lost/above), weights, short)

# ***** forward *****

def _scales_in_range(scales:Array) -> Array:
  """Returns scales with 2^-100 in place of each scale that is 0 or NaN."""
  # A row of zeros has the scale 0, and a row with a NaN has the scale NaN. A kernel may use any small number in place of such a scale.
  return np.where(scales > 0, scales, 2.0**-100)

def law_of(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0, options:Options=PLAIN, *, dtype:str,
           out_dtype:str, flushes:bool=False, v_scales:Array|None=None, short:ShortSums|None=None) -> tuple[Law, Law]:
  """Computes the exact values and error limits of o and lse, for q, k and v that a kernel multiplies in `dtype`."""
  # `window`, `offset` (the position of query 0 among the keys) and `options` (masks, bias, lengths, ...) describe the call. `flushes` says that the
  # matrix unit treats denormal 16-bit numbers as zero, as CDNA2 does. k and v of a cache with rows of 8-bit numbers (QuantizedRows) are given as
  # float64, each row times the row's scale, and `v_scales` (B, Hkv, Sk) has the scales of the rows of V. If all of q, k and v are 8-bit floats, they
  # are given as float64, times q_scale, k_scale and v_scale. `short` says how the matrix unit adds the products of 8-bit floats, if not in fp32.
  o, lse = exact(q, k, v, scale, window, offset, options)
  of_o, of_lse = _Moments.none(o.shape), _Moments.none(lse.shape)
  for one, n, shift, x in _batches(k, options):
    keys = (one, Ellipsis, slice(n), slice(None))
    scales = None if v_scales is None else v_scales[one, ..., :n]
    t = _pairs(q[one], k[keys], v[keys], scale, window, offset + shift, x, dtype, flushes, scales, short)
    centre = _finite(o[one])
    total, equals = _grouped(t.weights, t.rounding[0], t.v, t.factor, centre)
    of_o.add(one, _Moments(total/3, _slack_of_o(t, centre), equals))
    of_lse.slack[one] = t.lse_off[..., 0]
  if flushes:
    of_keys = (k, v) if v_scales is not None else (_flushed(k, dtype), _flushed(v, dtype))
    small = exact(_flushed(q, dtype), *of_keys, scale, window, offset, options)
    for found, a, b in zip((of_o, of_lse), small, (o, lse)): found.slack[...] += np.abs(_finite(a) - _finite(b))
  return _stored(o, of_o, out_dtype), _stored(lse, of_lse, "float32")

def _batches(k:Array, x:Options) -> Iterator[tuple[slice, int, int, Options]]:
  """Yields groups of sequences with equal numbers of keys: (slice of the batch axis, number of keys, number added to query 0's position, options)."""
  # With kv_lengths, each sequence has its own number of keys, and is a group.
  if x.kv_lengths is None: yield slice(None), k.shape[-2], 0, x
  else:
    for b, n in enumerate(map(int, x.kv_lengths)):
      # The shift is added to the position of query 0 among the keys. It moves the last query to the sequence's last key, and is 0 for a causal mask
      # that is aligned top-left.
      shift = 0 if x.top_left else n - k.shape[-2]
      yield slice(b, b + 1), n, shift, batch_options(x, b, n)

def _slack_of_o(t:_Pairs, o:Array) -> Array:
  """Returns the slack of o: the limit of all errors of o except the rounding errors that the dtypes make unavoidable; `o` has the exact values."""
  # The slack is the sum of four limits:
  # 1. fp32 errors of the scores. Independent errors partly cancel in the sum over the keys, but equal errors add up, so keys with equal errors are
  # added first. These are keys with equal q.k for the error of this product, and keys with equal weights for the error of all later operations
  # 2. errors of adding up the products with V, in fp32 or, if `t.short` is given, in a matrix unit that adds with fewer bits
  # 3. errors of rescaling the sums when the softmax subtracts a larger number than before
  # 4. systematic errors of rounding small weights (see `_rounding`).
  largest, centred = _prefixes(t.p, t.v, t.factor, o)
  assert centred is not None
  of_products, _ = _grouped(t.raw, t.p*t.off, t.v, t.factor, o)
  of_weights, _ = _grouped(t.p, t.p*np.minimum(t.own, 1), t.v, t.factor, o)
  found = SIGMAS*np.sqrt(of_products + of_weights)
  found += _added(t.p, largest) + np.minimum(4*FP32*(1 + np.abs(t.lse)), 1)*centred
  if t.short is not None:
    found += _short_sum_errors(t.short, t.p, t.v)
    found += _short_sum_errors(t.short, t.p, np.ones((t.p.shape[-1], 1)), 2.0**(4 - t.short.bits))*np.abs(o)      # P has 4 significant bits
  if (lost := t.rounding[1]) is not None:
    mass = lost.sum(-1, keepdims=True) if t.weights is t.p else np.zeros_like(t.lse)     # sums of scaled weights lose nothing
    found += (t.kept(lost) @ np.abs(t.v) + mass*np.abs(o))/np.maximum(1 - mass, FP32)
  return found

# ***** backward *****

def law_of_gradients(q:Array, k:Array, v:Array, do:Array|None, dlse:Array|None, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0,
                     options:Options=PLAIN, *, dtype:str, out_dtype:str, bias_dtype:str="float32", flushes:bool=False) -> Laws:
  """Computes the exact values and error limits of the gradients, for inputs of this `dtype` and a bias of `bias_dtype`."""
  # `window`, `offset` (the position of query 0 among the keys) and `options` (masks, bias, lengths, ...) describe the call. `do` is the gradient of
  # o, rounded to `dtype`, and `dlse` the gradient of lse. o is rounded to `out_dtype`. `flushes` says that the matrix unit treats denormal 16-bit
  # numbers as zero, as CDNA2 does.
  if do is None: do = np.zeros((*q.shape[:-1], v.shape[-1]))
  if dlse is None: dlse = np.zeros(q.shape[:-1])
  want = exact_backward(q, k, v, do, dlse, scale, window, offset, options)
  types = {"q": dtype, "k": dtype, "v": dtype, "bias": bias_dtype, "sinks": "float32", "alibi_slopes": "float32"}
  results = {n: a for n in types if (a := getattr(want, n)) is not None}
  total = {n: _Moments.none(a.shape) for n, a in results.items()}
  if flushes:       # the matrix unit sees these inputs
    q, k, v, do = (_flushed(a, dtype) for a in (q, k, v, do))
    seen = exact_backward(q, k, v, do, dlse, scale, window, offset, options)
    for name, a in results.items(): total[name].slack[...] += np.abs(_finite(getattr(seen, name)) - _finite(a))
  for one, n, shift, x in _batches(k, options):
    keys = (one, Ellipsis, slice(n), slice(None))
    t = _pairs(q[one], k[keys], v[keys], scale, window, offset + shift, x, dtype, flushes)
    g = _Gradients.of(t, _clean(do[one]), _clean(dlse[one]), k.shape[-3], out_dtype)
    found = {"q": ((one,), g.of_q()), "k": (keys, g.of_k()), "v": (keys, g.of_v())}
    def of_batch(a:Array) -> slice: return one if len(a) > 1 else slice(None)
    if x.bias is not None and options.bias is not None:
      some = slice(n) if options.bias.shape[-1] > 1 else slice(None)
      found["bias"] = (of_batch(options.bias), Ellipsis, some), g.of_scores(np.ones(t.p.shape[-2:]), x.bias.shape)
    if (slopes := options.alibi_slopes) is not None and x.alibi_slopes is not None:
      into_slopes = (of_batch(slopes) if slopes.ndim == 2 else Ellipsis,)
      found["alibi_slopes"] = into_slopes, g.of_slopes(offset + shift, x.alibi_slopes.shape)
    if x.sinks is not None: found["sinks"] = (Ellipsis,), g.of_sinks(x.sinks.astype(np.float64))
    for name, (into, moments) in found.items(): total[name].add(into, moments)
  return Laws(**{n: _stored(a, total[n], types[n]) for n, a in results.items()})

@dataclass(frozen=True)
class _Gradients:
  """Values in float64, such as dS, from which the exact gradients and their error limits are computed."""
  t: _Pairs
  do: Array
  heads: int                 # key/value heads
  ds: Array                  # derivative of the loss by the final score
  d_raw: Array               # derivative of the loss by `raw`, the product of query and key before softcap and score_mod
  ds_off: Array              # variance of the fp32 error of `ds`
  d_raw_off: Array           # variance of the fp32 error of `d_raw`
  p_off: Array               # standard deviation of the fp32 error of P, relative to P
  delta: Array               # of a row
  delta_rounding: Array      # variance of delta's error from the roundings that the dtypes force
  delta_fp32: Array          # variance of delta's error from fp32 arithmetic
  alike: Array               # marks rows with two equal weights P

  @staticmethod
  def of(t:_Pairs, do:Array, dlse:Array, heads:int, out_dtype:str) -> _Gradients:
    raw, squares = do @ t.v.swapaxes(-1, -2), (do*do) @ (t.v*t.v).swapaxes(-1, -2)
    width = t.v.shape[-1]
    o, dp, dp_off = t.kept(t.p) @ t.v, t.kept(raw), t.kept(_dot_error(width, raw, squares))
    of_o = (do*o).sum(-1, keepdims=True)
    delta, terms = of_o - dlse[..., None], t.rounding[0]*(dp - of_o)
    def ordered(here:tuple[Array, ...], order:Array) -> Array: return np.take_along_axis(terms[here], order, -1)
    of_p, alike = _with_equals((terms*terms).sum(-1, keepdims=True), t.p, 1, ordered)
    variance = of_p/3 + np.square(do*_largest_error(o, out_dtype)).sum(-1, keepdims=True)/3
    of_dot = _dot_error(width, delta, np.square(do*o).sum(-1, keepdims=True))
    fp32 = np.square(do*_slack_of_o(t, o)/3).sum(-1, keepdims=True) + np.square(of_dot)
    p_off, difference = t.off + t.lse_off/3, dp - delta
    off = np.square(t.p)*(np.square(p_off*difference) + np.square(dp_off + 4*FP32*(np.abs(dp) + np.abs(delta))))
    ds = t.p*difference
    d_raw_off = off*np.square(t.slope) + np.square(ds*t.slope_off)
    return _Gradients(t, do, heads, ds, ds*t.slope, off, d_raw_off, p_off, delta, variance, fp32, alike)

  def by_key(self, a:Array) -> Array:
    """Rearranges values of pairs of a query and a key to (..., Hkv, Sk, queries of all heads that share the key)."""
    return self.rows(a).swapaxes(-1, -2)
  def rows(self, a:Array) -> Array:
    """Rearranges queries (..., H, Sq, D) to (..., Hkv, rows, D): the rows of all query heads that share a key/value head, one head after another."""
    return a.reshape(*a.shape[:-3], self.heads, a.shape[-3]//self.heads*a.shape[-2], a.shape[-1])

  def product(self, w:Array, off:Array, x:Array, of_delta:Array|float=0.0) -> _Moments:
    """Returns the errors of w @ x, where each element of w has an error of variance `off` and is then rounded to the inputs' dtype."""
    # `off` and `of_delta` are the variances of the errors that each element of w has before it is rounded. Errors of `off` are independent. Errors of
    # `of_delta` come from delta, and all elements of one query share them. Here `of_delta` only decides which elements may round to 0; the caller
    # adds the other effects of an error of delta.
    r, lost = _rounding(w, self.t.dtype, self.t.flushes, SIGMAS*np.sqrt(off + of_delta))
    slack, (total, equals) = SIGMAS*np.sqrt(off @ (x*x)) + _added(w, _prefixes(w, x)[0]), _grouped(w, r, x)
    return _Moments(total/3, slack if lost is None else slack + lost @ np.abs(x), equals)

  def of_q(self) -> _Moments:
    common, scale = np.square(self.t.p*self.t.slope)*(self.delta_rounding + self.delta_fp32), self.t.scale
    x = self.product(self.d_raw, self.d_raw_off, self.t.k, common)
    moved = np.square((self.t.p*self.t.slope) @ self.t.k)          # an error of delta moves all dS of a row
    slack = x.slack + SIGMAS*np.sqrt(self.delta_fp32*moved) + self.t.lse_off*np.abs(self.d_raw @ self.t.k)
    return _Moments((x.variance + self.delta_rounding*moved)*scale**2, slack*abs(scale), x.alike | self.alike)

  def of_k(self) -> _Moments:
    moves, q, scale = np.square(self.t.p*self.t.slope), self.rows(self.t.q), self.t.scale
    off, common = self.by_key(self.d_raw_off + moves*self.delta_fp32), self.by_key(moves*self.delta_rounding)
    x = self.product(self.by_key(self.d_raw), off, q, common)
    return _Moments((x.variance + common @ (q*q))*scale**2, x.slack*abs(scale), x.alike)

  def of_v(self) -> _Moments:
    p = self.t.kept(self.t.p)
    return self.product(self.by_key(p), self.by_key(np.square(p*self.p_off)), self.rows(self.do))

  def of_scores(self, weights:Array, shape:tuple[int, ...]) -> _Moments:
    """Returns the errors of a gradient of this `shape` (of a bias, or of ALiBi slopes): a sum of `weights` * dS over the scores."""
    # The gradient of an element is an fp32 sum of `weights` * dS, over all scores (B, H, Sq, Sk) to which the element is broadcast. `weights` (Sq,
    # Sk) is the derivative of a score by the term: 1 for a bias, the distance |i - j| for slopes.
    mass = weights*self.t.p
    if shape[-1] == 1: mass = mass.sum(-1, keepdims=True)
    def total(a:Array) -> Array: return summed_to(a, shape)
    terms = weights*self.ds
    sum_off = _dot_error(max(1, terms.size//max(1, math.prod(shape))), total(terms), total(terms*terms))
    fp32 = total(np.square(weights)*self.ds_off) + total(np.square(mass)*self.delta_fp32)
    return _Moments(total(np.square(mass)*self.delta_rounding), SIGMAS*(np.sqrt(fp32) + sum_off), np.zeros(1, np.bool_))

  def of_slopes(self, offset:int, shape:tuple[int, ...]) -> _Moments:
    Sq, Sk = self.t.p.shape[-2:]
    away = np.abs(np.arange(Sq)[:, None] + offset - np.arange(Sk)).astype(np.float64)
    x = self.of_scores(away, (*(1, *shape)[-2:], 1, 1))
    return _Moments(x.variance.reshape(shape), x.slack.reshape(shape), x.alike)

  def of_sinks(self, sinks:Array) -> _Moments:
    sink = sinks[:, None, None]
    weight = np.exp(sink - self.t.lse)
    terms, shape = weight*self.delta, (len(sinks), 1, 1)
    def total(a:Array) -> Array: return summed_to(a, shape)[:, 0, 0]
    off = FP32*(2*np.abs(sink) + 2*np.abs(self.t.lse) + 4) + self.t.lse_off/3
    fp32 = total(np.square(terms*off) + np.square(weight)*self.delta_fp32)
    sum_off = _dot_error(max(1, terms.size//len(sinks)), total(terms), total(terms*terms))
    return _Moments(total(np.square(weight)*self.delta_rounding), SIGMAS*(np.sqrt(fp32) + sum_off), np.zeros(1, np.bool_))
