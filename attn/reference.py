"""Attention by the textbook, in numpy, and the accuracy contract that every kernel is held to.

Contract: with `exact` the float64 computation on the inputs as they are rounded to their dtype, and `same` the textbook computation with the
roundings that the dtypes force (fp32 scores and sums, P and O rounded), every element of a kernel's output must satisfy
  |out - exact| <= 2 * max|same - exact| + 1e-5,
and be NaN, +inf or -inf exactly where `exact` is.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.ops.numerics import round_bf16, round_fp16, widen

Array = NDArray[Any]

def rounded(x:Array, dtype:str) -> Array:
  """x rounded to `dtype` (to nearest even), as float32."""
  if dtype == "float32": return x.astype(np.float32)
  bits = (round_fp16 if dtype == "float16" else round_bf16)(np.ascontiguousarray(x, dtype=np.float32))
  return widen(bits, dtype)

def arrange(x:Array, layout:str) -> Array:
  """(B, H, S, D) in `layout`."""
  if layout == "thd": return x[0].swapaxes(0, 1)
  return x.swapaxes(1, 2) if layout == "bshd" else x.reshape(-1, *x.shape[2:]) if layout == "nsd" else x

def restore(x:Array, layout:str, shape:tuple[int, ...]) -> Array:
  """What `arrange` was given, of this shape."""
  return x.swapaxes(1, 2) if layout == "bshd" else x.swapaxes(0, 1)[None] if layout == "thd" else x.reshape(shape)

def visible(Sq:int, Sk:int, window:tuple[int, int], offset:int) -> Array:
  """bool (Sq, Sk): whether query i sees key j, i + offset - left <= j <= i + offset + right."""
  (left, right), i, j = window, np.arange(Sq)[:, None] + offset, np.arange(Sk)[None]
  return ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))

@dataclass(frozen=True)
class Options:
  """What may change the scores, or which keys there are; the arrays broadcast to (B, H, Sq, Sk). See attn.problem.Problem for the formula.

  softcap: 0 for none; alibi_slopes (H) or (B, H); bias (B|1, H|1, Sq|1, Sk|1); sinks (H); kv_lengths (B), which moves the diagonal unless `top_left`.
  """
  softcap: float = 0.0
  alibi_slopes: Array|None = None
  bias: Array|None = None
  sinks: Array|None = None
  kv_lengths: Array|None = None
  top_left: bool = False

PLAIN = Options()

def exact(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0, options:Options=PLAIN) -> tuple[Array, Array]:
  """(o, lse) of q (..., H, Sq, D), k (..., Hkv, Sk, D), v (..., Hkv, Sk, Dv) in float64. A row that sees no key gives 0 and -inf."""
  return _attention(q, k, v, scale, window, offset, np.float64, None, options)

def same(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0, options:Options=PLAIN, *, dtype:str,
         out_dtype:str) -> tuple[Array, Array]:
  """The textbook computation in fp32 with P rounded to `dtype` and O to `out_dtype`."""
  o, lse = _attention(q, k, v, scale, window, offset, np.float32, dtype, options)
  return rounded(o, out_dtype), lse

def _batch(x:Options, b:int, keys:int) -> Options:
  """The options of batch b, which has so many keys."""
  slopes = x.alibi_slopes if x.alibi_slopes is None or x.alibi_slopes.ndim == 1 else x.alibi_slopes[b:b+1]
  bias = x.bias if x.bias is None or len(x.bias) == 1 else x.bias[b:b+1]
  if bias is not None and bias.shape[-1] > 1: bias = bias[..., :keys]
  return replace(x, kv_lengths=None, alibi_slopes=slopes, bias=bias)

def _attention(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int], offset:int, work:Any, p_dtype:str|None,
               x:Options) -> tuple[Array, Array]:
  if x.kv_lengths is not None:   # each batch by itself, with the keys it has
    shift = [0 if x.top_left else int(n) - k.shape[-2] for n in x.kv_lengths]
    parts = [_attention(q[b:b+1], k[b:b+1, :, :n], v[b:b+1, :, :n], scale, window, offset + shift[b], work, p_dtype, _batch(x, b, int(n)))
             for b, n in enumerate(x.kv_lengths)]
    return np.concatenate([o for o, _ in parts]), np.concatenate([lse for _, lse in parts])
  ratio, (Sq, Sk) = q.shape[-3]//k.shape[-3], (q.shape[-2], k.shape[-2])
  q, k, v = q.astype(work), np.repeat(k, ratio, -3).astype(work), np.repeat(v, ratio, -3).astype(work)
  with np.errstate(all="ignore"):
    s = (q @ k.swapaxes(-1, -2))*work(scale)
    if x.softcap: s = work(x.softcap)*np.tanh(s/work(x.softcap))
    if x.alibi_slopes is not None:
      s = s - x.alibi_slopes.astype(work)[..., None, None]*np.abs(np.arange(Sq)[:, None] + offset - np.arange(Sk)).astype(work)
    if x.bias is not None: s = s + x.bias.astype(work)
    s = np.where(visible(Sq, Sk, window, offset), s, work(-np.inf))
    sink = np.full((*s.shape[:-1], 1), -np.inf, work) if x.sinks is None else np.broadcast_to(x.sinks.astype(work)[:, None, None], (*s.shape[:-1], 1))
    m = np.fmax(np.fmax.reduce(s, axis=-1, keepdims=True, initial=-np.inf), sink)
    safe = np.where(m == -np.inf, work(0), m)
    p = np.exp(s - safe)
    total = p.sum(-1, keepdims=True) + np.exp(sink - safe)
    p = np.where(total == 0, work(0), p/total)
    o = (p if p_dtype is None else rounded(p, p_dtype)).astype(work) @ v
    lse = np.where(total == 0, -np.inf, m + np.log(total))[..., 0]
  return o, lse

@dataclass(frozen=True)
class Verdict:
  """How far an output is from exact: `error` and `limit` of the worst element, which stands at `where`; `pattern` says what NaN or inf is out of
  place."""
  error: float
  limit: float
  where: tuple[int, ...]
  pattern: str = ""
  @property
  def ok(self) -> bool: return not self.pattern and self.error <= self.limit
  def __str__(self) -> str: return self.pattern or f"max error {self.error:.2e} at {self.where}, limit {self.limit:.2e}"

LSE_ULPS = 2.0**-22   # an lse is a sum of a large and a small fp32 term: two units in the last place of its own size are allowed besides

def judge(out:Array, exact_:Array, same_:Array, relative:float=0.0) -> Verdict:
  """Holds `out` to the contract; `relative` times the exact value's size is allowed besides (LSE_ULPS for an lse)."""
  for name, of in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
    if (wrong := of(out) != of(exact_)).any():
      at = tuple(int(i) for i in np.argwhere(wrong)[0])
      return Verdict(float("nan"), 0.0, at,
                     f"{name} pattern differs at {at} and {int(wrong.sum())} elements in all: got {out[at]}, exact is {exact_[at]}")
  finite = np.isfinite(exact_)
  difference = np.where(finite, np.abs(out.astype(np.float64) - np.where(finite, exact_, 0)), 0)
  rounding = np.where(finite & np.isfinite(same_), np.abs(same_.astype(np.float64) - np.where(finite, exact_, 0)), 0)
  limit = 2*rounding.max() + 1e-5 + relative*np.abs(np.where(finite, exact_, 0))
  at = tuple(map(int, np.unravel_index(int((difference - limit).argmax()), difference.shape)))
  return Verdict(float(difference[at]), float(limit[at]), at)
