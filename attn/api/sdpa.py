"""`scaled_dot_product_attention` with the arguments of tinygrad and of PyTorch, and its installation as `Tensor.scaled_dot_product_attention`."""
from __future__ import annotations
import contextlib, math
from collections import deque
from dataclasses import dataclass
from typing import Any, Iterator
from attn.api.attention import attention
from attn.api.attention import choice_of
from attn.tinygrad_compat import TRAINING, Tensor, dtypes

def _arguments(q:Tensor, k:Tensor, v:Tensor, mask:Tensor|None, dropout_p:float, is_causal:bool, enable_gqa:bool,
               scale:float|None) -> tuple[tuple[Tensor, ...], dict[str, Any], tuple[int, ...]]:
  """(q, k, v) as four dimensions, the options of `attention`, and the shape of the output."""
  if dropout_p: raise NotImplementedError(f"dropout_p={dropout_p}: the kernels have no dropout; only 0.0 is supported")
  if is_causal and mask is not None: raise RuntimeError("attn_mask with is_causal=True: cannot set attn_mask when is_causal=True")
  for name, t in (("query", q), ("key", k), ("value", v)):
    if t.ndim < 2: raise ValueError(f"{name} has shape {t.shape}: must be (..., S, D)")
    if not all(isinstance(s, int) for s in t.shape): raise NotImplementedError(f"{name} has the symbolic shape {t.shape}: shapes must be integers")
  rank = max(q.ndim, k.ndim, v.ndim, 4)
  q, k, v = (t.reshape(*[1]*(rank - t.ndim), *t.shape) for t in (q, k, v))
  batch = tuple(int(max(sizes)) for sizes in zip(*(t.shape[:-3] for t in (q, k, v))))
  heads, kv_heads = int(q.shape[-3]), int(max(k.shape[-3], v.shape[-3]))
  if not enable_gqa: heads = kv_heads = max(heads, kv_heads)
  elif heads % kv_heads: raise ValueError(f"enable_gqa=True with {heads} query heads: must be a multiple of the {kv_heads} key/value heads")
  fold = (math.prod(batch),)
  def four(t:Tensor, h:int, name:str) -> Tensor:
    try: return t.expand(*batch, h, *t.shape[-2:]).reshape(*fold, h, *t.shape[-2:])
    except (ValueError, RuntimeError) as e:
      raise ValueError(f"{name} has batch and head dimensions {t.shape[:-2]}: must broadcast to {(*batch, h)}"
                       + ("" if enable_gqa else "; enable_gqa=True lets query heads share a key/value head")) from e
  options: dict[str, Any] = {"causal": "top-left" if is_causal else False, "softmax_scale": scale}
  if mask is not None:
    if mask.dtype == dtypes.bool: mask = mask.where(0.0, -math.inf).cast(dtypes.float)
    mask = mask.reshape(*[1]*(rank - mask.ndim), *mask.shape)
    if any(n > 1 for n in mask.shape[:-3]): mask = mask.expand(*batch, *mask.shape[-3:])
    options["bias"] = mask.reshape(math.prod(mask.shape[:-3]), *mask.shape[-3:])
  return (four(q, heads, "query"), four(k, kv_heads, "key"), four(v, kv_heads, "value")), options, (*batch, heads, int(q.shape[-2]), int(v.shape[-1]))

def scaled_dot_product_attention(query:Tensor, key:Tensor, value:Tensor, attn_mask:Tensor|None=None, dropout_p:float=0.0, is_causal:bool=False,
                                 enable_gqa:bool=False, *, scale:float|None=None) -> Tensor:
  """softmax(query key^T * scale + attn_mask) value, of query (..., H, Sq, D), key (..., Hkv, Sk, D) and value (..., Hkv, Sk, Dv) in float16,
  bfloat16 or float32.

  attn_mask:  bool (True: seen) or added to the scores, broadcastable to (..., H, Sq, Sk)
  is_causal:  query i sees keys j <= i, counted from the first (`attention(causal=True)` counts from the last)
  enable_gqa: H may be a multiple of Hkv
  scale:      1/sqrt(D) by default
  A row that sees no key gives 0, where tinygrad's own gives NaN.
  Raises NotImplementedError for dropout_p other than 0, RuntimeError for attn_mask with is_causal, ValueError for shapes that don't fit.
  """
  rank = max(query.ndim, key.ndim, value.ndim)
  tensors, options, shape = _arguments(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, scale)
  return attention(*tensors, **options).reshape(shape[-rank:] if rank < 4 else shape)

# ***** in place of tinygrad's own *****

@dataclass(frozen=True)
class Decision:
  """What a call of `Tensor.scaled_dot_product_attention` came to: the kernel, or None and the reason for which tinygrad's own was used."""
  kernel: str|None
  reason: str

decisions: deque[Decision] = deque(maxlen=1024)   # of the latest calls while installed
_own: list[Any] = []                               # tinygrad's method, while another stands in its place

def _decide(q:Tensor, k:Tensor, v:Tensor, *args:Any, **kwargs:Any) -> Decision:
  if TRAINING: return Decision(None, "TRAINING is set: the kernels have no dropout, and no gradient that this method could give")
  tensors, options, _ = _arguments(q, k, v, *args, **kwargs)
  choice = choice_of(*tensors, **options)
  if choice.kernel == "three_pass": return Decision(None, "; ".join(f"{name}: {reason}" for name, reason in choice.refused))
  return Decision(choice.kernel, str(choice))

def _installed(self:Tensor, key:Tensor, value:Tensor, attn_mask:Tensor|None=None, dropout_p:float=0.0, is_causal:bool=False,
               enable_gqa:bool=False, *, scale:float|None=None) -> Tensor:
  dropped = dropout_p if TRAINING else 0.0   # tinygrad drops out in training only
  try: decision = _decide(self, key, value, attn_mask, dropped, is_causal, enable_gqa, scale)
  except (ValueError, NotImplementedError) as e: decision = Decision(None, str(e))
  decisions.append(decision)
  if decision.kernel is not None: return scaled_dot_product_attention(self, key, value, attn_mask, dropped, is_causal, enable_gqa, scale=scale)
  if scale is not None: self = self*(scale*math.sqrt(self.shape[-1]))      # tinygrad's own has no such argument
  return _own[0](self, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)

def install() -> deque[Decision]:
  """Makes `Tensor.scaled_dot_product_attention` use these kernels wherever dispatch says yes, and tinygrad's own otherwise. Returns the list of
  decisions, which grows with every call (under TinyJit: with every capture) up to the latest 1024. Installing twice is the same as once."""
  if not _own:
    _own.append(Tensor.scaled_dot_product_attention)
    setattr(Tensor, "scaled_dot_product_attention", _installed)   # noqa: B010
  return decisions

def uninstall() -> None:
  """Puts tinygrad's own method back; nothing if it is there."""
  if not _own: return
  _own.clear()
  del Tensor.scaled_dot_product_attention   # Tensor inherits tinygrad's

@contextlib.contextmanager
def installed() -> Iterator[deque[Decision]]:
  """`install` for the length of a with statement: `with attn.installed() as decisions: ...`. Within one another, the outermost ends it."""
  outermost = not _own
  try: yield install()
  finally:
    if outermost: uninstall()
