"""Problem: what attention is to be computed, validated. Everything a kernel specialises on stands here and nowhere else."""
from __future__ import annotations
import math
from dataclasses import dataclass, field
from typing import Sequence

DTYPES = ("float16", "bfloat16")
OUT_DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = {"bhsd": "(B, H, S, D)", "bshd": "(B, S, H, D)", "nsd": "(B*H, S, D)"}
CAUSAL = {False: "full", True: "bottom-right: query i sees keys j <= i + Sk - Sq", "bottom-right": "the same", "top-left": "query i sees keys j <= i"}
MAX_D = 256

@dataclass(frozen=True)
class Problem:
  """One attention problem: O = softmax(softmax_scale * Q K^T + mask) V.

  q is (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o (B, H, Sq, Dv), lse (B, H, Sq), in the order of `layout`. Query head h reads key/value
  head h // (H // Hkv). `window` = (left, right): query i sees keys j with i + offset - left <= j <= i + offset + right, -1 for no bound; causal is
  (-1, 0). `offset` is Sk - Sq (bottom-right alignment) or 0 (top-left).
  """
  B: int
  H: int
  Hkv: int
  Sq: int
  Sk: int
  D: int
  Dv: int
  dtype: str = "float16"
  out_dtype: str = "float16"
  layout: str = "bhsd"
  window: tuple[int, int] = (-1, -1)
  offset: int = 0
  softmax_scale: float = field(default=0.0)
  return_lse: bool = False

  def __post_init__(self) -> None:
    for name in ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv"):
      if (value := getattr(self, name)) < 1: raise ValueError(f"{name}={value}: every dimension must be at least 1")
    if self.H % self.Hkv: raise ValueError(f"H={self.H} query heads are not a multiple of Hkv={self.Hkv} key/value heads")
    for name in ("D", "Dv"):
      if (value := getattr(self, name)) > MAX_D: raise NotImplementedError(f"{name}={value}: the matrix kernels hold a row in registers, up to {MAX_D}")
    if self.dtype not in DTYPES: raise NotImplementedError(f"dtype={self.dtype!r}: q, k and v must be one of {', '.join(DTYPES)}")
    if self.out_dtype not in OUT_DTYPES: raise NotImplementedError(f"output dtype {self.out_dtype!r}: must be one of {', '.join(OUT_DTYPES)}")
    if not (math.isfinite(self.softmax_scale) and self.softmax_scale > 0):
      raise ValueError(f"softmax_scale={self.softmax_scale}: must be finite and positive")

  @property
  def flops(self) -> int:
    """Floating-point operations of the two matrix products on visible scores, the usual way of counting (FlashAttention's benchmark)."""
    left, right = self.window
    visible = sum(max(0, min(self.Sk - 1, i + self.offset + right if right >= 0 else self.Sk) - max(0, i + self.offset - left if left >= 0 else 0) + 1)
                  for i in range(self.Sq)) if self.window != (-1, -1) else self.Sq*self.Sk
    return 2*self.B*self.H*visible*(self.D + self.Dv)

def _dims(name:str, shape:Sequence[int], layout:str) -> tuple[int, int, int, int]:
  """(B, H, S, D) of a tensor given in `layout`; (B*H, S, D) is taken as B=1."""
  if len(shape) != (3 if layout == "nsd" else 4):
    raise ValueError(f"{name} has shape {tuple(shape)}; layout={layout!r} needs {LAYOUTS[layout]}")
  if layout == "nsd": return 1, shape[0], shape[1], shape[2]
  b, x, y, d = shape
  return (b, x, y, d) if layout == "bhsd" else (b, y, x, d)

def problem_of(o:Sequence[int], q:Sequence[int], k:Sequence[int], v:Sequence[int], *, dtypes:Sequence[str], lse:Sequence[int]|None=None,
               causal:bool|str=False, window:tuple[int, int]=(-1, -1), softmax_scale:float|None=None, layout:str="bhsd") -> Problem:
  """The Problem that the shapes of o, q, k, v (and lse) pose; `dtypes` are the dtype names of (o, q, k, v[, lse]).

  Raises ValueError for shapes, dtypes or options that contradict each other and NotImplementedError for what is not supported.
  """
  if layout not in LAYOUTS: raise ValueError(f"layout={layout!r}: must be one of {', '.join(f'{k!r} {v}' for k, v in LAYOUTS.items())}")
  if causal not in CAUSAL: raise ValueError(f"causal={causal!r}: must be one of {', '.join(repr(c) for c in CAUSAL)}")
  if len(window) != 2 or any(not isinstance(w, int) or w < -1 for w in window):
    raise ValueError(f"window={window!r}: must be (left, right), each -1 (no bound) or the number of further keys seen on that side")
  B, H, Sq, D = _dims("q", q, layout)
  Bk, Hkv, Sk, Dk = _dims("k", k, layout)
  Bv, Hv, Sv, Dv = _dims("v", v, layout)
  for name, got, want, why in (("k", Bk, B, "batch of q"), ("v", Bv, B, "batch of q"), ("v", Hv, Hkv, "heads of k"), ("v", Sv, Sk, "sequence length of k"),
                               ("k", Dk, D, "head dimension of q")):
    if got != want: raise ValueError(f"{name} has shape {tuple(k if name == 'k' else v)}: its {why.split(' of ')[0]} is {got} but the {why} is {want}")
  if _dims("o", o, layout) != (B, H, Sq, Dv): raise ValueError(f"o has shape {tuple(o)}: q {tuple(q)} and v {tuple(v)} give an output of "
                                                              f"B={B}, H={H}, Sq={Sq}, Dv={Dv} in layout {layout!r}")
  if lse is not None and tuple(lse) != (want_lse := (H, Sq) if layout == "nsd" else (B, H, Sq)):
    raise ValueError(f"lse has shape {tuple(lse)}: must be {want_lse}, whatever the layout")
  if lse is not None and dtypes[4] != "float32": raise ValueError(f"lse has dtype {dtypes[4]}: must be float32")
  if len(set(dtypes[1:4])) != 1: raise ValueError(f"q, k and v have dtypes {', '.join(dtypes[1:4])}: all three must be the same")
  if causal and (window[1] > 0): raise ValueError(f"causal={causal!r} with window={window!r}: causal allows no key on the right")
  scale = softmax_scale if softmax_scale is not None else 1/math.sqrt(D)
  return Problem(B, H, Hkv, Sq, Sk, D, Dv, dtypes[1], dtypes[0], layout, (window[0], 0) if causal else window,
                 0 if causal == "top-left" else Sk - Sq, scale, lse is not None)
