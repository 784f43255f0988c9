"""The names and conventions of FlashAttention (github.com/Dao-AILab/flash-attention), for those who come from there: tensors are (B, S, H, D),
`causal` is bottom-right, `window_size` counts neighbours on each side. What the kernels don't have raises NotImplementedError."""
from __future__ import annotations
from typing import Any
from attn.api.attention import attention
from attn.api.cache import attention_with_kv_cache
from attn.tinygrad_compat import Tensor, UOp

Window = tuple[int, int]

def _refuse(**arguments:Any) -> None:
  for name, value in arguments.items():
    if isinstance(value, Tensor) or value: raise NotImplementedError(f"{name}={value}: not supported, leave it at its default")

def _result(x:Any, wanted:bool) -> Any: return (*x, None) if wanted else x   # (out, softmax_lse, S_dmask): there is no dropout mask

def flash_attn_func(q:Tensor, k:Tensor, v:Tensor, dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1),
                    softcap:float=0.0, alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False) -> Any:
  """q (B, Sq, H, D), k and v (B, Sk, Hkv, D) -> out (B, Sq, H, D); with return_attn_probs (out, softmax_lse (B, H, Sq), None). Always
  deterministic."""
  _refuse(dropout_p=dropout_p)
  return _result(attention(q, k, v, causal=causal, softmax_scale=softmax_scale, layout="bshd", window=window_size, softcap=softcap,
                           alibi_slopes=alibi_slopes, return_lse=return_attn_probs), return_attn_probs)

def flash_attn_kvpacked_func(q:Tensor, kv:Tensor, *args:Any, **kwargs:Any) -> Any:
  """`flash_attn_func` of q and kv (B, Sk, 2, Hkv, D)."""
  return flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], *args, **kwargs)

def flash_attn_qkvpacked_func(qkv:Tensor, *args:Any, **kwargs:Any) -> Any:
  """`flash_attn_func` of qkv (B, S, 3, H, D)."""
  return flash_attn_func(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2], *args, **kwargs)

def flash_attn_varlen_func(q:Tensor, k:Tensor, v:Tensor, cu_seqlens_q:Tensor, cu_seqlens_k:Tensor, max_seqlen_q:int, max_seqlen_k:int,
                           dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1), softcap:float=0.0,
                           alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False,
                           block_table:Tensor|None=None) -> Any:
  """q (total_q, H, D), k and v (total_k, Hkv, D), cu_seqlens int32 (B + 1) -> out (total_q, H, D), or with softmax_lse (H, total_q) and None."""
  _refuse(dropout_p=dropout_p, block_table=block_table)
  return _result(attention(q, k, v, causal=causal, softmax_scale=softmax_scale, layout="thd", window=window_size, softcap=softcap,
                           alibi_slopes=alibi_slopes, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q,
                           max_seqlen_k=max_seqlen_k, return_lse=return_attn_probs), return_attn_probs)

def flash_attn_with_kvcache(q:Tensor, k_cache:Tensor, v_cache:Tensor, k:Tensor|None=None, v:Tensor|None=None, rotary_cos:Tensor|None=None,
                            rotary_sin:Tensor|None=None, cache_seqlens:int|UOp|Tensor|None=None, cache_batch_idx:Tensor|None=None,
                            cache_leftpad:Tensor|None=None, block_table:Tensor|None=None, softmax_scale:float|None=None, causal:bool=False,
                            window_size:Window=(-1, -1), softcap:float=0.0, rotary_interleaved:bool=True, alibi_slopes:Tensor|None=None,
                            num_splits:int=0, return_softmax_lse:bool=False) -> Any:
  """q (B, Sq, H, D), caches (B, capacity, Hkv, D), new rows k and v (B, new, Hkv, D), which are appended in place at cache_seqlens -> out, or (out,
  lse).

  cache_seqlens: the rows filled, without the new ones: an int, a Variable or an int32 Tensor (B); without it the caches are full."""
  _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, block_table=block_table)
  options: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "layout": "bshd", "window": window_size, "softcap": softcap,
                             "alibi_slopes": alibi_slopes, "num_splits": num_splits, "return_lse": return_softmax_lse}
  if (k is None) != (v is None): raise ValueError("k and v: one is given without the other")
  if k is None or v is None: return attention(q, k_cache, v_cache, kv_lengths=cache_seqlens, **options)
  if cache_seqlens is None: raise ValueError("cache_seqlens=None with new rows k and v: must say where they go")
  return attention_with_kv_cache(q, k, v, k_cache, v_cache, cache_seqlens, **options)
