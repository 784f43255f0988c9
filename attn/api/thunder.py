"""attn's replacement for tinygrad's extra/thunder/amd/fa.py: functions with equal arguments, for every chip, shape and number of heads.

With HK_FLASH_ATTENTION=1, tinygrad's examples/mlperf/models/flat_llama.py and gpt_oss.py import the functions of fa.py. To use attn's functions,
change the import to

  from attn.api.thunder import fused_qkv_rope, thunder_attention as flash_attention

Without HK_FLASH_ATTENTION flat_llama.py calls `Tensor.scaled_dot_product_attention`. Then `attn.installed()` is enough."""
from __future__ import annotations
from attn import values
from attn.api.attention import attention
from attn.tinygrad_compat import Ops, Tensor

@values.names_itself
def thunder_attention(xq:Tensor, xk:Tensor, xv:Tensor, attn_mask:None=None, is_causal:bool=False, write_flat:bool=False, sinks:Tensor|None=None,
                      window:int=0) -> tuple[Tensor, Tensor, Tensor]:
  """Computes attention of (B, S, H, D) tensors, with the arguments of tinygrad's extra/thunder/amd/fa.py. Returns (o, o, lse): the output twice, as
  tinygrad's function does, and lse as float32 (B, H, 1, S).

      is_causal   the last query sees all keys, each earlier query one key less
      write_flat  the shape of the output is (B, S, H*D)
      sinks       (H): score of one extra key per head that has no value
      window      number of keys that a query sees: the key at the query's own position and keys before this position; 0: all keys

  Inside a function under tinygrad's decorator `@function(precompile=True)` that returns o and lse, the gradient uses the returned o and lse, and does
  not compute o and lse again. Raises NotImplementedError for a mask, and ValueError or NotImplementedError for arguments that `attention` does not
  support."""
  if attn_mask is not None: raise NotImplementedError("attn_mask: must be None; attn.attention takes a bias")
  window = values.whole_number("window", window, 0, 2**31 - 1, "the number of keys that a query sees, or 0")
  o, lse = attention(xq, xk, xv, causal=is_causal, window=(window - 1, -1), layout="bshd", sinks=sinks, return_lse=True)
  B, S, H, D = o.shape
  o, lse = written_as(o, lse, ((B, S, H*D) if write_flat else (B, S, H, D), (B, H, 1, S)))
  return o, o, lse

def written_as(o:Tensor, lse:Tensor, shapes:tuple[tuple[int, ...], ...]) -> tuple[Tensor, Tensor]:
  """Returns o and lse reshaped to the two `shapes`, as if their kernel had written them in these shapes."""
  # tinygrad's `@function` keeps only outputs of kernels for the gradient. With reshaped views, the gradient would run the kernel again. So the
  # kernel's call gets output buffers of these shapes.
  if o.uop.op is not Ops.AFTER or o.uop.src[1].op is not Ops.CALL: return o.reshape(shapes[0]), lse.reshape(shapes[1])
  call = o.uop.src[1]
  instead = {t.uop.src[0]: t.uop.src[0].reshape(shape) for t, shape in zip((o, lse), shapes)}
  call = call.replace(src=tuple(instead.get(u, u) for u in call.src))
  new_o, new_lse = (Tensor(u.after(call)) for u in instead.values())
  return new_o, new_lse

@values.names_itself
def fused_qkv_rope(xqkv:Tensor, freqs_cis:Tensor, n_heads:int, n_kv_heads:int, head_dim:int) -> tuple[Tensor, Tensor, Tensor]:
  """Splits the projection xqkv into q, k and v, each (B, S, heads, D), and applies the rotary embedding to q and k. Returns (q, k, v).

    xqkv       (B, S, width): the last dimension has, for each key/value head, the query heads, the key head and the value head
    freqs_cis  (1, at least S, 1, D/2, 2): cosines and sines"""
  B, S, width = xqkv.shape
  group = n_heads//n_kv_heads
  if width != n_kv_heads*(group + 2)*head_dim:
    raise ValueError(f"xqkv has shape {values.shown_shape(xqkv.shape)}: its last dimension must be {n_kv_heads*(group + 2)*head_dim}, that of "
                     f"{n_heads} query heads and {n_kv_heads} key/value heads of {head_dim} elements")
  x = xqkv.reshape(B, S, n_kv_heads, group + 2, head_dim)
  cosine, sine = (freqs_cis[:, :S, :, :, i].float() for i in range(2))
  def rotated(x:Tensor, heads:int) -> Tensor:
    a, b = x.reshape(B, S, heads, head_dim//2, 2).float().split(1, -1)
    a, b = a.squeeze(-1), b.squeeze(-1)
    return (a*cosine - b*sine).stack(a*sine + b*cosine, dim=-1).flatten(-2).cast(xqkv.dtype)
  q, k, v = x[:, :, :, :group], x[:, :, :, group], x[:, :, :, group + 1]
  return rotated(q, n_heads), rotated(k, n_kv_heads), v
