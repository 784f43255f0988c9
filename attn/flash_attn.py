"""The names and conventions of FlashAttention (github.com/Dao-AILab/flash-attention), for those who come from there: tensors are (B, S, H, D),
`causal` is bottom-right, `window_size` counts neighbours on each side. What the kernels don't have raises NotImplementedError."""
from __future__ import annotations
from dataclasses import fields
from typing import Any
from attn import values
from attn.api.attention import attend, attention, prepare
from attn.api.cache import attention_with_kv_cache, check_caches
from attn.api.checked_kernel import dtype_of
from attn.api.options import AttentionOptions, check_lengths
from attn.tinygrad_compat import Tensor, UOp

Window = tuple[int, int]
_OURS = {"window_size": "window", "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse"}   # FlashAttention's name -> attention's

def _refuse(**arguments:Any) -> None:
  """What the kernels don't have, by its name here; 0 and False are none of it."""
  for name, value in arguments.items():
    if value is not None and (isinstance(value, Tensor) or not values.is_nothing(value)):
      raise NotImplementedError(f"{name}={values.shown(value)}: not supported, leave it at its default")

def _options(**arguments:Any) -> dict[str, Any]:
  """Options of `attention`, checked by the names that they have here."""
  checks = {f.name: f.metadata["check"] for f in fields(AttentionOptions)}
  return {_OURS.get(name, name): checks[_OURS.get(name, name)](name, value) for name, value in arguments.items()}

def _lengths(cu_seqlens:Tensor|None) -> Tensor:
  """How long the sequences are that begin at these rows."""
  if cu_seqlens is None: raise values.wrong("cu_seqlens_k", cu_seqlens, "a Tensor")
  dtype_of("cu_seqlens_k", cu_seqlens)
  if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2: raise ValueError(f"cu_seqlens_k has shape {cu_seqlens.shape}: must be (sequences + 1,)")
  return (cu_seqlens[1:] - cu_seqlens[:-1]).contiguous()

def _result(x:Any, wanted:bool) -> Any: return (*x, None) if wanted else x   # (out, softmax_lse, S_dmask): attn.dropout_mask has the latter

def flash_attn_func(q:Tensor, k:Tensor, v:Tensor, dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1),
                    softcap:float=0.0, alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False) -> Any:
  """q (B, Sq, H, D), k and v (B, Sk, Hkv, D) -> out (B, Sq, H, D); with return_attn_probs (out, softmax_lse (B, H, Sq), None). Always
  deterministic. dropout_p drops whenever it is not 0, by a seed from tinygrad's generator."""
  values.truth("deterministic", deterministic)
  options = _options(dropout_p=dropout_p, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
                     alibi_slopes=alibi_slopes, return_attn_probs=return_attn_probs)
  return _result(attention(q, k, v, layout="bshd", **options), options["return_lse"])

def _packed(name:str, t:Tensor, parts:int, shape:str) -> list[Tensor]:
  """The parts of a packed tensor."""
  values.tensor(name, t)
  if t.ndim != 5 or t.shape[2] != parts: raise ValueError(f"{name} has shape {values.shown_shape(t.shape)}: must be {shape}")
  return [t[:, :, i] for i in range(parts)]

def flash_attn_kvpacked_func(q:Tensor, kv:Tensor, *args:Any, **kwargs:Any) -> Any:
  """`flash_attn_func` of q and kv (B, Sk, 2, Hkv, D)."""
  k, v = _packed("kv", kv, 2, "(B, Sk, 2, Hkv, D)")
  return flash_attn_func(q, k, v, *args, **kwargs)

def flash_attn_qkvpacked_func(qkv:Tensor, *args:Any, **kwargs:Any) -> Any:
  """`flash_attn_func` of qkv (B, S, 3, H, D)."""
  q, k, v = _packed("qkv", qkv, 3, "(B, S, 3, H, D)")
  return flash_attn_func(q, k, v, *args, **kwargs)

def flash_attn_varlen_func(q:Tensor, k:Tensor, v:Tensor, cu_seqlens_q:Tensor, cu_seqlens_k:Tensor, max_seqlen_q:int, max_seqlen_k:int,
                           dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1), softcap:float=0.0,
                           alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False,
                           block_table:Tensor|None=None) -> Any:
  """q (total_q, H, D), k and v (total_k, Hkv, D), cu_seqlens int32 (B + 1) -> out (total_q, H, D), or with softmax_lse (H, total_q) and None.

  block_table: int32 (B, max_blocks): k and v are pages, (pages, page_size, Hkv, D), and cu_seqlens_k says how many rows sequences have in them."""
  values.truth("deterministic", deterministic)
  options = _options(dropout_p=dropout_p, causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap,
                     alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                     max_seqlen_k=max_seqlen_k, return_attn_probs=return_attn_probs, block_table=block_table)
  if options["block_table"] is not None: options |= {"cu_seqlens_k": None, "max_seqlen_k": None, "kv_lengths": _lengths(options["cu_seqlens_k"])}
  return _result(attention(q, k, v, layout="thd", **options), options["return_lse"])

def flash_attn_with_kvcache(q:Tensor, k_cache:Tensor, v_cache:Tensor, k:Tensor|None=None, v:Tensor|None=None, rotary_cos:Tensor|None=None,
                            rotary_sin:Tensor|None=None, cache_seqlens:int|UOp|Tensor|None=None, cache_batch_idx:Tensor|None=None,
                            cache_leftpad:Tensor|None=None, block_table:Tensor|None=None, softmax_scale:float|None=None, causal:bool=False,
                            window_size:Window=(-1, -1), softcap:float=0.0, rotary_interleaved:bool=True, alibi_slopes:Tensor|None=None,
                            num_splits:int=0, return_softmax_lse:bool=False) -> Any:
  """q (B, Sq, H, D), caches (B, capacity, Hkv, D), new rows k and v (B, new, Hkv, D), which are appended in place at cache_seqlens -> out, or (out,
  lse).

  cache_seqlens: the rows filled, without the new ones: an int, a Variable or an int32 Tensor (B); without it the caches are full."""
  _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table)
  options = _options(causal=causal, softmax_scale=softmax_scale, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
                     num_splits=num_splits, return_softmax_lse=return_softmax_lse)
  k, v = values.tensor_or_none("k", k), values.tensor_or_none("v", v)
  if (k is None) != (v is None): raise ValueError(f"k={values.shown(k)}, v={values.shown(v)}: one is given without the other")
  if k is not None and v is not None:
    if cache_seqlens is None: raise ValueError("cache_seqlens=None with new rows k and v: must say where they go")
    return attention_with_kv_cache(q, k, v, k_cache, v_cache, cache_seqlens, layout="bshd", **options)
  if cache_seqlens is not None: cache_seqlens = check_lengths("cache_seqlens", cache_seqlens)
  check_caches(q, k_cache, v_cache, "bshd")
  return attend(prepare(q, k_cache, v_cache, AttentionOptions(layout="bshd", kv_lengths=cache_seqlens, **options), "cache_seqlens"))
