"""Textbook attention in numpy. `exact` computes in float64 from inputs that have already been rounded to their dtype, and `same` rounds in the same
places as FlashAttention-2. `exact_backward` and `same_backward` compute the gradients."""
from __future__ import annotations
import functools, operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.ops.eight_bits import numbers, rounded_bytes
from attn.ops.formats import FORMATS
from attn.ops.numerics import ROUNDOFF, round_bf16, round_fp16, widen

# attn/accuracy.py says how far a kernel's result may be from the result of `exact`. `same` computes scores and sums in fp32, and rounds P and O. The
# gradients take dO rounded to the dtype of q, k and v, because dO is a factor of matrix products. A score that a mask hides adds exactly 0 to every
# result, even if the row of q, k or v to which the score belongs is NaN. In some kernels such a NaN reaches further; docs/attention.md says how far.

Array = NDArray[Any]

def rounded(x:Array, dtype:str) -> Array:
  """Rounds x to `dtype` (to nearest even), and returns the result as float32."""
  if dtype == "float32": return x.astype(np.float32)
  if dtype in FORMATS: return numbers(rounded_bytes(x, dtype, True), dtype)
  bits = (round_fp16 if dtype == "float16" else round_bf16)(np.ascontiguousarray(x, dtype=np.float32))
  return widen(bits, dtype)

def arrange(x:Array, layout:str) -> Array:
  """Rearranges a tensor (B, H, S, D) to `layout`."""
  if layout == "thd": return x[0].swapaxes(0, 1)
  return x.swapaxes(1, 2) if layout == "bshd" else x.reshape(-1, *x.shape[2:]) if layout == "nsd" else x

def restore(x:Array, layout:str, shape:tuple[int, ...]) -> Array:
  """Rearranges a tensor in `layout` to the shape (B, H, S, D)."""
  # Layout "nsd" joins B and H in one axis, so only `shape` tells the sizes of both.
  return x.swapaxes(1, 2) if layout == "bshd" else x.swapaxes(0, 1)[None] if layout == "thd" else x.reshape(shape)

def visible(Sq:int, Sk:int, window:tuple[int, int], offset:int) -> Array:
  """Returns which query sees which key, as bool (Sq, Sk)."""
  # Query i sees key j if i + offset - left <= j <= i + offset + right. A negative `left` or `right` stands for no bound.
  (left, right), i, j = window, np.arange(Sq)[:, None] + offset, np.arange(Sk)[None]
  return ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))

@dataclass(frozen=True)
class Options:
  """Options that change the scores or the number of keys, as arrays; attn.problem.Problem has the formula."""
  softcap: float = 0.0  # 0: none
  alibi_slopes: Array|None = None  # (H) or (B, H)
  bias: Array|None = None  # (B|1, H|1, Sq|1, Sk|1)
  # Function of all scores (B, H, Sq, Sk). Returns the changed scores; the derivative of each changed score by its score; and an upper bound of |x|
  # for every intermediate result x of the function, by which attn/accuracy.py bounds rounding errors. Not with kv_lengths.
  score_mod: Callable[[Array], tuple[Array, Array, float]]|None = None
  # bool (B|1, H|1, Sq|1, Sk|1): True for a query and a key that the mask leaves visible. Not with kv_lengths.
  mask_mod: Array|None = None
  sinks: Array|None = None  # (H)
  # (B), the number of keys of each batch. Batch b has the offset `offset` + kv_lengths[b] - Sk, where `offset` is that of `exact`; with `top_left`
  # every batch has the offset of `exact`.
  kv_lengths: Array|None = None
  top_left: bool = False
  # bool (B, H, Sq, Sk): True for an element of P that dropout keeps. Dropout divides kept elements by 1 - dropout_p and sets the other elements to 0.
  # None: no dropout.
  kept: Array|None = None
  dropout_p: float = 0.0

PLAIN = Options()

def exact(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0, options:Options=PLAIN) -> tuple[Array, Array]:
  """Computes attention in float64: returns (o, lse) for q (..., H, Sq, D), k (..., Hkv, Sk, D) and v (..., Hkv, Sk, Dv)."""
  # A query that sees no key has 0 in o and -inf in lse. `window` and `offset` say which keys a query sees (see `visible`).
  return _attention(q, k, v, scale, window, offset, np.float64, None, options)

def same(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0, options:Options=PLAIN, *, dtype:str,
         out_dtype:str) -> tuple[Array, Array]:
  """Computes textbook attention in fp32, rounded in the same places as in FlashAttention-2; returns (o, lse)."""
  # arXiv 2307.08691, algorithm 1, with all keys in one tile. P = exp(S - max S) is rounded to `dtype`, O to `out_dtype`. The divisor of O is the sum
  # of P: of P after rounding if `out_dtype` has more bits of precision than `dtype`, otherwise of P before rounding.
  o, lse = _attention(q, k, v, scale, window, offset, np.float32, (dtype, out_dtype), options)
  return rounded(o, out_dtype), lse

def batch_options(x:Options, b:int, keys:int) -> Options:
  """Returns the options for batch b alone; `keys` is the number of its keys."""
  assert x.score_mod is None and x.mask_mod is None
  slopes = x.alibi_slopes if x.alibi_slopes is None or x.alibi_slopes.ndim == 1 else x.alibi_slopes[b:b+1]
  bias = x.bias if x.bias is None or len(x.bias) == 1 else x.bias[b:b+1]
  if bias is not None and bias.shape[-1] > 1: bias = bias[..., :keys]
  return replace(x, kv_lengths=None, alibi_slopes=slopes, bias=bias, kept=None if x.kept is None else x.kept[b:b+1, ..., :keys])

def _dropped(p:Array, x:Options) -> Array:
  return p if x.kept is None else np.where(x.kept, p/p.dtype.type(1 - x.dropout_p), p.dtype.type(0))

Types = tuple[str, str]     # the dtypes to which P and dS, and O, are rounded

def _attention(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int], offset:int, work:Any, types:Types|None,
               x:Options) -> tuple[Array, Array]:
  if x.kv_lengths is not None:   # each batch by itself, with its own number of keys
    shift = [0 if x.top_left else int(n) - k.shape[-2] for n in x.kv_lengths]
    parts = [_attention(q[b:b+1], k[b:b+1, :, :n], v[b:b+1, :, :n], scale, window, offset + shift[b], work, types, batch_options(x, b, int(n)))
             for b, n in enumerate(x.kv_lengths)]
    return np.concatenate([o for o, _ in parts]), np.concatenate([lse for _, lse in parts])
  q, k, v = with_heads(q, k, v, work)
  with np.errstate(all="ignore"):
    s, _ = _scores(q, k, scale, window, offset, x)
    return _output(s, v, visible(q.shape[-2], k.shape[-2], window, offset), x, types), softmax_of(s, x)[1]

def _output(s:Array, v:Array, seen:Array, x:Options, types:Types|None) -> Array:
  """Computes o, not yet rounded, from the scores `s`. Products where `seen` is False count as 0; P is rounded to types[0] if `types` is given."""
  # `seen` says which query sees which key. With `types` None P is not rounded.
  weights, own, _ = _weights(s, x)
  total = weights.sum(-1, keepdims=True)
  if types is not None:
    weights = rounded(weights, types[0])
    if ROUNDOFF[types[1]] < ROUNDOFF[types[0]]: total = weights.sum(-1, keepdims=True)
  total = total + own
  return _of_visible(_dropped(weights, x), v, seen)/np.where(total == 0, 1, total)

def with_heads(q:Array, k:Array, v:Array, work:Any) -> tuple[Array, Array, Array]:
  """Casts q, k and v to the dtype `work`, and repeats the heads of k and v until they have as many heads as q."""
  ratio = q.shape[-3]//k.shape[-3]
  return q.astype(work), np.repeat(k, ratio, -3).astype(work), np.repeat(v, ratio, -3).astype(work)

def _of_visible(weights:Array, rows:Array, seen:Array) -> Array:
  """Computes weights @ rows, but a product where `seen` is False counts as 0, even if the weight or the row is NaN."""
  nothing, weights = weights.dtype.type(0), np.where(seen, weights, 0)
  odd = np.asarray(~np.isfinite(rows).all(-1, keepdims=True))
  total = np.asarray(weights @ np.where(odd, nothing, rows))
  for j in np.flatnonzero(odd[..., 0].any(tuple(range(odd.ndim - 2)))):
    row = np.where(odd, rows, nothing)[..., j:j + 1, :]
    total += np.where(seen[:, j:j + 1], weights[..., j:j + 1]*row, nothing)
  return total

# ***** terms: from raw scores to the scores of the softmax *****

@dataclass(frozen=True)
class TermStep:
  """One score term (softcap, ALiBi, bias or score_mod) applied to scores: the scores before and after, and the derivative at each score."""
  name: str
  before: Array
  after: Array
  slope: Array|None  # None: the derivative is 1

def _capped(s:Array, x:Options, offset:int) -> tuple[Array, Array|None]:
  cap = s.dtype.type(x.softcap)
  t = np.tanh(s/cap)
  return cap*t, 1 - t*t

def _moved(s:Array, x:Options, offset:int) -> tuple[Array, Array|None]:
  assert x.alibi_slopes is not None
  work, (Sq, Sk) = s.dtype.type, s.shape[-2:]
  return s - x.alibi_slopes.astype(work)[..., None, None]*np.abs(np.arange(Sq)[:, None] + offset - np.arange(Sk)).astype(work), None

def _biased(s:Array, x:Options, offset:int) -> tuple[Array, Array|None]:
  assert x.bias is not None
  return s + x.bias.astype(s.dtype.type), None

def _modified(s:Array, x:Options, offset:int) -> tuple[Array, Array|None]:
  assert x.score_mod is not None
  return x.score_mod(s)[:2]

# terms in order, by the name of their option: (scores, options, offset) -> (scores after the term, its slope)
TEXTBOOK: dict[str, Callable[[Array, Options, int], tuple[Array, Array|None]]] = {"softcap": _capped, "alibi_slopes": _moved, "bias": _biased,
                                                                                    "score_mod": _modified}

def term_steps(s:Array, offset:int, x:Options) -> list[TermStep]:
  """Applies the score terms (softcap, ALiBi, bias, score_mod) to the scores `s`, softmax_scale * Q K^T; returns a TermStep for each term, in
  order."""
  # Query i stands at position i + `offset` among the keys.
  found = list[TermStep]()
  for name, value in TEXTBOOK.items():
    if isinstance(given := getattr(x, name), np.ndarray) or given:
      found.append(TermStep(name, s, *value(s, x, offset)))
      s = found[-1].after
  return found

def slope_of(steps:list[TermStep], after:str|None=None) -> Any:
  """Returns the derivative, at each score, of the final score by softmax_scale * Q K^T, or by the score after the term named `after`."""
  names = [step.name for step in steps]
  some = steps if after is None else steps[names.index(after) + 1:]
  slopes: list[Any] = [step.slope for step in some if step.slope is not None]
  return functools.reduce(operator.mul, slopes) if slopes else 1

def _scores(q:Array, k:Array, scale:float, window:tuple[int, int], offset:int, x:Options) -> tuple[Array, list[TermStep]]:
  return finished_scores((q @ k.swapaxes(-1, -2))*q.dtype.type(scale), window, offset, x)

def finished_scores(s:Array, window:tuple[int, int], offset:int, x:Options) -> tuple[Array, list[TermStep]]:
  """Applies score terms and masks to the scores `s`, softmax_scale * Q K^T. Returns (scores for the softmax, a TermStep for each term)."""
  steps, (Sq, Sk) = term_steps(s, offset, x), s.shape[-2:]
  seen = visible(Sq, Sk, window, offset) if x.mask_mod is None else visible(Sq, Sk, window, offset) & x.mask_mod
  # A score that a mask hides is -inf.
  return np.where(seen, steps[-1].after if steps else s, s.dtype.type(-np.inf)), steps

def _weights(s:Array, x:Options) -> tuple[Array, Array, Array]:
  """Returns three arrays for rows of scores: exp(score - m), exp(sink - m), and m, the number subtracted (the row's maximum)."""
  work = s.dtype.type
  sink = np.full((*s.shape[:-1], 1), -np.inf, work) if x.sinks is None else np.broadcast_to(x.sinks.astype(work)[:, None, None], (*s.shape[:-1], 1))
  m = np.fmax(np.fmax.reduce(s, axis=-1, keepdims=True, initial=-np.inf), sink)
  safe = np.where(m == -np.inf, work(0), m)
  return np.exp(s - safe), np.exp(sink - safe), safe

def softmax_of(s:Array, x:Options) -> tuple[Array, Array]:
  """Computes (P, lse) from the scores `s`; a row without visible keys has P = 0."""
  weights, own, safe = _weights(s, x)
  total, nothing = weights.sum(-1, keepdims=True) + own, s.dtype.type(0)
  # Each row of P is divided by the row's sum, which includes the weight of the sink.
  return np.where(total == 0, nothing, weights/total), np.where(total == 0, -np.inf, safe + np.log(total))[..., 0]

# ***** backward *****

@dataclass(frozen=True)
class Gradients:
  """Gradients of a loss by each input, in the input's shape; None for an input that was not given."""
  q: Array
  k: Array
  v: Array
  bias: Array|None = None
  sinks: Array|None = None
  alibi_slopes: Array|None = None

def exact_backward(q:Array, k:Array, v:Array, do:Array|None, dlse:Array|None, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0,
                   options:Options=PLAIN) -> Gradients:
  """Computes the gradients of a loss in float64, from its gradients `do` and `dlse` by o and lse (None: 0)."""
  # The values of `do` must already be rounded to the dtype of q, k and v. A query that sees no key adds exactly 0 to each gradient, and the query's
  # own gradient is 0. The gradients of keys beyond kv_lengths are 0.
  return _backward(q, k, v, do, dlse, scale, window, offset, options, np.float64, None)

def same_backward(q:Array, k:Array, v:Array, do:Array|None, dlse:Array|None, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0,
                  options:Options=PLAIN, *, dtype:str, out_dtype:str, bias_dtype:str="float32") -> Gradients:
  """Computes textbook gradients in fp32, rounded in the same places as in FlashAttention-2."""
  # arXiv 2307.08691, algorithm 2: P = exp(S - lse), delta = rowsum(dO * O) - dLSE, dP = dO V^T and dS = P * (dP - delta). lse is computed from fp32
  # scores and from the sum of P before rounding. O is rounded to `out_dtype`, as in `same`. P and dS are rounded to `dtype` before the products with
  # dO, K and Q. The gradients of q, k and v are rounded to `dtype`. The bias's gradient, an fp32 sum of dS, is rounded to `bias_dtype`. The sinks'
  # gradient stays in fp32. Dropout applies to dP, and to P before P is rounded and multiplied with V and dO.
  found = _backward(q, k, v, do, dlse, scale, window, offset, options, np.float32, (dtype, out_dtype))
  bias = None if found.bias is None else rounded(found.bias, bias_dtype)
  return Gradients(rounded(found.q, dtype), rounded(found.k, dtype), rounded(found.v, dtype), bias, found.sinks)

def _backward(q:Array, k:Array, v:Array, do:Array|None, dlse:Array|None, scale:float, window:tuple[int, int], offset:int, x:Options, work:Any,
              types:Types|None) -> Gradients:
  if do is None: do = np.zeros((*q.shape[:-1], v.shape[-1]), work)
  if dlse is None: dlse = np.zeros(q.shape[:-1], work)
  if x.kv_lengths is not None: return _backward_by_batch(q, k, v, do, dlse, scale, window, offset, x, work, types)
  seen = visible(q.shape[-2], k.shape[-2], window, offset)
  groups = (k.shape[-3], q.shape[-3]//k.shape[-3])         # query heads with the same keys are neighbours
  do, dlse, (q, k, v) = do.astype(work), dlse.astype(work), with_heads(q, k, v, work)
  def operand(a:Array) -> Array: return a if types is None else rounded(a, types[0])
  def of_group(a:Array) -> Array: return a.reshape(*a.shape[:-3], *groups, *a.shape[-2:]).sum(-3)
  with np.errstate(all="ignore"):
    s, steps = _scores(q, k, scale, window, offset, x)
    o, lse = _output(s, v, seen, x, types), softmax_of(s, x)[1]
    if types is not None: o = rounded(o, types[1])
    safe = np.where(lse == -np.inf, work(0), lse)        # a row that sees no key has only scores of -inf
    p = np.where(seen, np.exp(s - safe[..., None]), work(0))
    delta = (do*o).sum(-1) - np.where(lse == -np.inf, work(0), dlse)
    ds = np.where(s == -np.inf, work(0), p*(_dropped(do @ v.swapaxes(-1, -2), x) - delta[..., None]))
    dsinks = None if x.sinks is None else summed_to(-np.exp(x.sinks.astype(work)[:, None] - lse)*delta, (x.sinks.shape[0], 1))[:, 0]
    dscores = operand(ds*slope_of(steps))
    dq, dk = _of_visible(dscores, k, seen)*work(scale), of_group(_of_visible(dscores.swapaxes(-1, -2), q, seen.T)*work(scale))
    dv = of_group(_of_visible(operand(_dropped(p, x)).swapaxes(-1, -2), do, seen.T))
    dslopes = None if x.alibi_slopes is None else _of_slopes(ds*slope_of(steps, "alibi_slopes"), offset, x.alibi_slopes.shape)
    dbias = None if x.bias is None else summed_to(ds*slope_of(steps, "bias"), x.bias.shape)
  return Gradients(dq, dk, dv, dbias, dsinks, dslopes)

def _of_slopes(ds:Array, offset:int, shape:tuple[int, ...]) -> Array:
  away = np.abs(np.arange(ds.shape[-2])[:, None] + offset - np.arange(ds.shape[-1])).astype(ds.dtype)
  return -summed_to((ds*away).sum((-1, -2)), shape)

def summed_to(a:Array, shape:tuple[int, ...]) -> Array:
  """Sums `a`, a gradient, to `shape`: adds up the dimensions along which a tensor of this shape was broadcast."""
  a = a.sum(tuple(range(a.ndim - len(shape))))
  return a.sum(tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)

def _backward_by_batch(q:Array, k:Array, v:Array, do:Array, dlse:Array, scale:float, window:tuple[int, int], offset:int, x:Options, work:Any,
                       types:Types|None) -> Gradients:
  """Computes the gradients of each batch by itself, with the batch's own number of keys."""
  # `work` is the dtype of the computation. `types` are the dtypes to which P and dS, and o, are rounded; None: nothing is rounded.
  assert x.kv_lengths is not None
  dq, dk, dv = (np.zeros(a.shape, work) for a in (q, k, v))
  dbias, dsinks, dslopes = (None if a is None else np.zeros(a.shape, work) for a in (x.bias, x.sinks, x.alibi_slopes))
  for b, n in enumerate(map(int, x.kv_lengths)):
    one, shift = slice(b, b + 1), 0 if x.top_left else n - k.shape[-2]
    found = _backward(q[one], k[one, :, :n], v[one, :, :n], do[one], dlse[one], scale, window, offset + shift, batch_options(x, b, n), work, types)
    dq[one], dk[one, :, :n], dv[one, :, :n] = found.q, found.k, found.v
    if dsinks is not None: dsinks += found.sinks
    if dslopes is not None and found.alibi_slopes is not None: dslopes[one if dslopes.ndim == 2 else slice(None)] += found.alibi_slopes
    if dbias is not None and found.bias is not None:
      dbias[one if len(dbias) > 1 else slice(None), ..., :found.bias.shape[-1]] += found.bias
  return Gradients(dq, dk, dv, dbias, dsinks, dslopes)
