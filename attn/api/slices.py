"""Runs `scaled_dot_product_attention` on keys and values that are slices of a cache and whose length depends on Variables. One kernel serves all
lengths and reads the cache in place."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from attn import values
from attn.api.checked_call import CheckedCall
from attn.api.launch import run
from attn.calls.checked_kernel import arch_of
from attn.calls.placement import Placement
from attn.calls.views import Size, cache_of, count_of, is_causal_mask, most, same_size
from attn.choose.dispatch import Choice
from attn.problem import Problem, check_softmax_scale
from attn.tinygrad_compat import TRAINING, Tensor, UOp
from attn.values import FLOATS, static_shape

@dataclass(frozen=True, eq=False)
class SdpaCall:
  """The arguments of `scaled_dot_product_attention`."""
  query: Tensor
  key: Tensor
  value: Tensor
  attn_mask: Tensor|None
  dropout_p: float
  is_causal: bool
  enable_gqa: bool
  scale: float|None
  @property
  def dropped(self) -> float:
    """Probability with which elements of P become 0: dropout is active only where tinygrad's TRAINING is set."""
    return self.dropout_p if TRAINING else 0.0
  @property
  def sliced(self) -> bool:
    """Whether the size of any tensor depends on a Variable."""
    return any(map(is_symbolic, (self.query, self.key, self.value)))

@dataclass(frozen=True)
class SlicedCall:
  """A checked call of attention on slices of a cache. The problem's Sq is the largest number of queries that the Variables allow; q and the result
  have `rows` queries."""
  call: CheckedCall
  rows: Size
  def choice(self) -> Choice: return self.call.choice()
  def run(self) -> Tensor:
    """Computes the attention. Returns its output o (B, H, rows, Dv)."""
    o, = run(self.call)
    return (o if isinstance(self.rows, int) else o.shrink((None, (0, self.rows), None, None))).transpose(1, 2)

def is_symbolic(t:Any) -> bool:
  """Returns whether x is a Tensor whose size depends on a Variable."""
  return isinstance(t, Tensor) and any(isinstance(n, UOp) for n in t.shape)

def _dtype(q:Tensor, k:Tensor, v:Tensor) -> str:
  """Returns the dtype of key and value. A float32 query will be rounded to this dtype, as the cache was."""
  of_q, of_k, of_v = (values.dtype_name(name, t.dtype, FLOATS) for name, t in (("query", q), ("key", k), ("value", v)))
  if of_k != of_v or of_q not in (of_k, "float32"):
    raise ValueError(f"query, key and value have dtypes {of_q}, {of_k}, {of_v}: key and value must have the same, and query that or float32")
  return of_k

def _heads(H:int, of_k:int, of_v:int, enable_gqa:bool) -> None:
  if of_k != of_v or H % of_k or not (enable_gqa or of_k in (1, H)):
    raise NotImplementedError(f"query, key and value have {H}, {of_k} and {of_v} heads: key and value must have the same number, which divides "
                              "that of query" + ("" if enable_gqa else "; enable_gqa=True lets query heads share a key/value head"))

def _mask(mask:Tensor|None, is_causal:bool, n_q:Size, n_k:Size) -> tuple[tuple[int, int], bool]:
  """Returns the (window, top_left) of a problem that stand for the same mask as attn_mask and is_causal."""
  if mask is None: return (-1, 0) if is_causal else (-1, -1), is_causal and not same_size(n_q, n_k)
  if is_causal: raise RuntimeError("attn_mask with is_causal=True: must be None, or is_causal False")
  if is_causal_mask(values.tensor("attn_mask", mask), n_q, n_k): return (-1, 0), False
  raise NotImplementedError(f"attn_mask of shape {values.shown_shape(mask.shape)} with keys of symbolic length: only the causal mask is known, "
                            "Tensor.full(shape, -inf).triu(keys - queries + 1)")

def sliced_call(x:SdpaCall) -> SlicedCall:
  """Checks the arguments of `scaled_dot_product_attention` and returns the checked call with its problem. Raises ValueError, NotImplementedError or
  RuntimeError for arguments that don't fit together."""
  q, k, v = x.query, x.key, x.value
  is_causal, enable_gqa = values.truth("is_causal", x.is_causal), values.truth("enable_gqa", x.enable_gqa)
  for name, t in (("query", q), ("key", k), ("value", v)):
    if values.tensor(name, t).ndim != 4:
      raise NotImplementedError(f"{name} has shape {values.shown_shape(t.shape)}: with a symbolic length only (B, H, S, D) is supported")
    static_shape(name, (*t.shape[:2], t.shape[3]))
    if not isinstance(t.device, str) or t.device != q.device:
      raise NotImplementedError(f"{name} is on {t.device} with a symbolic shape: query, key and value must be on the same single device")
  dtype, n_q, n_k = _dtype(q, k, v), q.shape[2], k.shape[2]
  B, H, D, Bk, of_k, Dk, Bv, of_v, Dv = (int(t.shape[axis]) for t in (q, k, v) for axis in (0, 1, 3))
  if (Bk, Dk, Bv) != (B, D, B) or not same_size(n_k, v.shape[2]):
    raise ValueError(f"query, key and value have shapes {', '.join(values.shown_shape(t.shape) for t in (q, k, v))}: must be (B, H, Sq, D), "
                     "(B, Hkv, Sk, D) and (B, Hkv, Sk, Dv)")
  if x.dropped: raise NotImplementedError(f"dropout_p={x.dropped} with a symbolic shape: attention over a cache has no dropout; must be 0")
  _heads(H, of_k, of_v, enable_gqa)
  window, top_left = _mask(x.attn_mask, is_causal, n_q, n_k)
  if (cache := cache_of(k, v)) is None:
    raise NotImplementedError(f"key has the symbolic shape {values.shown_shape(k.shape)} and key or value is no slice of a buffer with constant "
                              "strides: with a symbolic length both must be slices of a cache that is a buffer")
  keys, queries = count_of(n_k), count_of(n_q)
  if keys is None or queries is None:
    raise NotImplementedError(f"query and key have shapes {values.shown_shape(q.shape)} and {values.shown_shape(k.shape)}: a symbolic length must "
                              "be a sum of bound Variables and a number")
  (in_k, in_v), Sq = cache, most(n_q)
  Sk = min(in_k.rows, in_v.rows)
  p = Problem(B, H, of_k//in_k.group, Sq, Sk, D, Dv, dtype, values.dtype_text(q.dtype), "bshd", window, 0 if top_left else Sk - Sq,
              D**-.5 if x.scale is None else check_softmax_scale("scale", x.scale), top_left=top_left, sk_variable=keys[0],
              sq_variable=None if isinstance(n_q, int) else queries[0], k_view=in_k.places, v_view=in_v.places, num_splits=0)
  rows = q.cast(FLOATS[dtype]).transpose(1, 2)
  if not isinstance(n_q, int): rows = rows.pad_to((B, Sq, H, D))
  variables = tuple({u.src[0].expr: u for u in (*keys[1], *queries[1])}.values())
  device = str(q.device)
  return SlicedCall(CheckedCall(p, {"q": rows, "k": k, "v": v}, arch_of(device), Placement(device), None, variables), n_q)
