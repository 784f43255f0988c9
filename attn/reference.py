"""Attention by the textbook, in numpy, and the accuracy contract that every kernel is held to.

Contract: with `exact` the float64 computation on the inputs as they are rounded to their dtype, and `same` the textbook computation with the roundings
that the dtypes force (fp32 scores and sums, P and O rounded), every element of a kernel's output must satisfy
  |out - exact| <= 2 * max|same - exact| + 1e-5,
and be NaN, +inf or -inf exactly where `exact` is.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.intrinsics import round_bf16, round_fp16, widen

Array = NDArray[Any]

def rounded(x:Array, dtype:str) -> Array:
  """x rounded to `dtype` (to nearest even), as float32."""
  if dtype == "float32": return x.astype(np.float32)
  bits = (round_fp16 if dtype == "float16" else round_bf16)(np.ascontiguousarray(x, dtype=np.float32))
  return widen(bits, dtype)

def visible(Sq:int, Sk:int, window:tuple[int, int], offset:int) -> Array:
  """bool (Sq, Sk): whether query i sees key j, i + offset - left <= j <= i + offset + right."""
  (left, right), i, j = window, np.arange(Sq)[:, None] + offset, np.arange(Sk)[None]
  return ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))

def exact(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0) -> tuple[Array, Array]:
  """(o, lse) of q (..., H, Sq, D), k (..., Hkv, Sk, D), v (..., Hkv, Sk, Dv) in float64. A row that sees no key gives 0 and -inf."""
  return _attention(q, k, v, scale, window, offset, np.float64, None)

def same(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int]=(-1, -1), offset:int=0, *, dtype:str, out_dtype:str) -> tuple[Array, Array]:
  """The textbook computation in fp32 with P rounded to `dtype` and O to `out_dtype`."""
  o, lse = _attention(q, k, v, scale, window, offset, np.float32, dtype)
  return rounded(o, out_dtype), lse

def _attention(q:Array, k:Array, v:Array, scale:float, window:tuple[int, int], offset:int, work:Any, p_dtype:str|None) -> tuple[Array, Array]:
  ratio = q.shape[-3]//k.shape[-3]
  q, k, v = q.astype(work), np.repeat(k, ratio, -3).astype(work), np.repeat(v, ratio, -3).astype(work)
  with np.errstate(all="ignore"):
    s = (q @ k.swapaxes(-1, -2))*work(scale)
    s = np.where(visible(q.shape[-2], k.shape[-2], window, offset), s, work(-np.inf))
    m = np.fmax.reduce(s, axis=-1, keepdims=True, initial=-np.inf)
    p = np.exp(s - np.where(m == -np.inf, work(0), m))
    total = p.sum(-1, keepdims=True)
    p = np.where(total == 0, work(0), p/total)
    o = (p if p_dtype is None else rounded(p, p_dtype)).astype(work) @ v
    lse = np.where(total == 0, -np.inf, m + np.log(total))[..., 0]
  return o, lse

@dataclass(frozen=True)
class Verdict:
  """How far an output is from exact: `error` and `limit` of the worst element, which stands at `where`; `pattern` says what NaN or inf is out of place."""
  error: float
  limit: float
  where: tuple[int, ...]
  pattern: str = ""
  @property
  def ok(self) -> bool: return not self.pattern and self.error <= self.limit
  def __str__(self) -> str: return self.pattern or f"max error {self.error:.2e} at {self.where}, limit {self.limit:.2e}"

def judge(out:Array, exact_:Array, same_:Array) -> Verdict:
  """Holds `out` to the contract."""
  for name, of in (("NaN", np.isnan), ("+inf", np.isposinf), ("-inf", np.isneginf)):
    if (wrong := of(out) != of(exact_)).any():
      at = tuple(int(i) for i in np.argwhere(wrong)[0])
      return Verdict(float("nan"), 0.0, at, f"{name} pattern differs at {at} and {int(wrong.sum())} elements in all: got {out[at]}, exact is {exact_[at]}")
  finite = np.isfinite(exact_)
  difference = np.where(finite, np.abs(out.astype(np.float64) - np.where(finite, exact_, 0)), 0)
  rounding = np.where(finite & np.isfinite(same_), np.abs(same_.astype(np.float64) - np.where(finite, exact_, 0)), 0)
  at = np.unravel_index(int(difference.argmax()), difference.shape)
  return Verdict(float(difference[at]), 2*float(rounding.max()) + 1e-5, tuple(int(i) for i in at))
