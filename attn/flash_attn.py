"""Functions of FlashAttention (github.com/Dao-AILab/flash-attention), with FlashAttention's names and conventions: tensors are (B, S, H, D), `causal`
is bottom-right, and `window_size` counts neighbours on each side, where a number below 0 means no bound. With `causal`, no key on the right is seen,
whatever `window_size` says. softcap <= 0 means no cap. One result differs: the softmax_lse of a row that sees no key is -inf, not +inf. One argument
is new: the keyword `dropout_seed` decides which elements of P become 0. docs/flash_attention.md lists every argument."""
from __future__ import annotations
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any
from attn import values
from attn.api.attention import attend, attention
from attn.api.cache import attention_with_kv_cache, check_caches
from attn.api.checked_call import check_sequences, lengths, prepare
from attn.api.dropout import drawn_seed, dropout_mask
from attn.calls.checked_kernel import dtype_of, numbers_at_hand
from attn.calls.options import AttentionOptions, check_lengths, check_longest
from attn.calls.placement import Placement, local_shape, place, placement_of
from attn.calls.quantized import GivenRows, QuantizedRows, check_quantized, stored_rows
from attn.tinygrad_compat import Tensor, UOp, dtypes
from attn.values import FLOATS, static_shape

Window = tuple[int, int]|list[int]
_OURS = {"window_size": "window", "return_attn_probs": "return_lse", "return_softmax_lse": "return_lse"}   # FlashAttention's name -> attention's

def _window(x:Any) -> Any:
  """Converts FlashAttention's window, in which any number below 0 means no bound, to a window of `attention`."""
  if not isinstance(x, (tuple, list)) or len(x) != 2 or not all(values.is_whole(n) for n in x): return x
  return tuple(max(int(n), -1) for n in x)

def _softcap(x:Any) -> Any:
  """Converts FlashAttention's softcap, where 0 or less means no cap, to a softcap of `attention`."""
  return 0.0 if isinstance(x, (int, float)) and not isinstance(x, bool) and x <= 0 else x

def _options(arguments:dict[str, Any]) -> dict[str, Any]:
  """Returns the checked options of `attention`, by name, from the arguments of a function of this module."""
  # Error messages use FlashAttention's names.
  checks = {f.name: f.metadata["check"] for f in fields(AttentionOptions)}
  meant: dict[str, Callable[[Any], Any]] = {"window_size": _window, "softcap": _softcap}
  options = {_OURS.get(name, name): checks[_OURS.get(name, name)](name, meant.get(name, lambda x: x)(x)) for name, x in arguments.items()
             if _OURS.get(name, name) in checks}
  if options["causal"]: options["window"] = (options["window"][0], 0)     # causal wins over the window's right bound
  return options

def _check_starts(name:str, starts:Any) -> Tensor:
  """Checks and returns the tensor, called `name`, with the first row of each packed sequence; raises an error for a wrong dtype or shape."""
  values.dtype_name(name, values.tensor(name, starts).dtype, ("int32",))
  if starts.ndim != 1 or starts.shape[0] < 2:
    raise ValueError(f"{name} has shape {values.shown_shape(starts.shape)}: must be (sequences + 1,)")
  return starts

def _lengths(cu_seqlens:Tensor|None) -> Tensor:
  """Returns the length of each packed sequence."""
  starts = _check_starts("cu_seqlens_k", cu_seqlens)
  return (starts[1:] - starts[:-1]).contiguous()

def _attend(options:dict[str, Any], q:Tensor, k:Tensor, v:Tensor, layout:str, longest:tuple[int, int]|None=None) -> Any:
  """Calls `attention`, and arranges the results as FlashAttention does: out, or (out, softmax_lse, S_dmask)."""
  if not options["return_lse"] or not options["dropout_p"]:
    found = attention(q, k, v, layout=layout, **options)
    return (*found, None) if options["return_lse"] else found
  device = values.tensor("q", q).device
  if options["dropout_seed"] is None and device is not None: options["dropout_seed"] = drawn_seed(Placement(device))
  out, lse = attention(q, k, v, layout=layout, **options)
  sizes = (q.shape[0], q.shape[1], k.shape[1]) if longest is None else (options["cu_seqlens_q"].shape[0] - 1, *longest)
  B, Sq, Sk = map(int, sizes)
  # S_dmask is None without dropout. With dropout it is (B, H, Sq, Sk) in the dtype of q: 1 where dropout keeps an element of P, and -1 where the
  # element becomes 0. `longest` gives Sq and Sk for packed sequences.
  kept = dropout_mask(options["dropout_seed"], options["dropout_p"], B, int(q.shape[-2]), Sq, Sk)
  return out, lse, kept.where(1.0, -1.0).cast(q.dtype)

@values.names_itself
def flash_attn_func(q:Tensor, k:Tensor, v:Tensor, dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1),
                    softcap:float=0.0, alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False, *,
                    dropout_seed:Tensor|None=None) -> Any:
  """Computes attention of q (B, Sq, H, D) and k, v (B, Sk, Hkv, D). Returns out (B, Sq, H, D), or with return_attn_probs (out, softmax_lse (B, H,
  Sq), S_dmask). S_dmask (B, H, Sq, Sk) is 1 where dropout keeps an element of P, and -1 where the element becomes 0. S_dmask is None without dropout.
  docs/flash_attention.md lists every argument.

  out has equal bits in every run. With `deterministic` the gradients also have equal bits in every run, but may take longer. Dropout is active
  whenever dropout_p is not 0. The seed of dropout is dropout_seed, uint32 (2), or, if dropout_seed is None, a new seed from tinygrad's generator."""
  options = _options(locals())
  return _attend(options, q, k, v, "bshd")

def _packed(name:str, t:Tensor, parts:int, shape:str) -> list[Tensor]:
  """Splits a packed tensor of the required `shape` into its parts, along the third-last axis."""
  dtype_of(name, values.tensor(name, t))
  sizes = static_shape(name, t.shape)
  if len(sizes) != shape.count(",") + 1 or sizes[-3] != parts or 0 in sizes:
    raise ValueError(f"{name} has shape {sizes}: must be {shape}, each at least 1")
  return [t[..., i, :, :] for i in range(parts)]

def _others(arguments:dict[str, Any], *packed:str) -> dict[str, Any]:
  return {name: x for name, x in arguments.items() if name not in packed}

@values.names_itself
def flash_attn_kvpacked_func(q:Tensor, kv:Tensor, dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1),
                             softcap:float=0.0, alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False, *,
                             dropout_seed:Tensor|None=None) -> Any:
  """Computes `flash_attn_func` of k and v that are packed in one tensor: kv (B, Sk, 2, Hkv, D)."""
  others, (k, v) = _others(locals(), "q", "kv"), _packed("kv", kv, 2, "(B, Sk, 2, Hkv, D)")
  return flash_attn_func(q, k, v, **others)

@values.names_itself
def flash_attn_qkvpacked_func(qkv:Tensor, dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1),
                              softcap:float=0.0, alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False, *,
                              dropout_seed:Tensor|None=None) -> Any:
  """Computes `flash_attn_func` of q, k and v that are packed in one tensor: qkv (B, S, 3, H, D)."""
  others, (q, k, v) = _others(locals(), "qkv"), _packed("qkv", qkv, 3, "(B, S, 3, H, D)")
  return flash_attn_func(q, k, v, **others)

@values.names_itself
def flash_attn_varlen_func(q:Tensor, k:Tensor, v:Tensor, cu_seqlens_q:Tensor, cu_seqlens_k:Tensor, max_seqlen_q:int, max_seqlen_k:int,
                           dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1), softcap:float=0.0,
                           alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False, block_table:Tensor|None=None, *,
                           dropout_seed:Tensor|None=None) -> Any:
  """Computes attention of packed sequences q (total_q, H, D) and k, v (total_k, Hkv, D). cu_seqlens_q and cu_seqlens_k, int32 (B + 1), have the first
  row of each sequence, and then the total. max_seqlen_q and max_seqlen_k are the lengths of the longest sequences. Returns out (total_q, H, D), or
  with return_attn_probs (out, softmax_lse (H, total_q), S_dmask). S_dmask (B, H, max_seqlen_q, max_seqlen_k) is as in `flash_attn_func`.

  block_table: int32 (B, max_blocks). With block_table, k and v are pages (pages, page_size, Hkv, D): row b of the table names the pages of sequence
  b, and cu_seqlens_k says how many rows the sequence has in these pages."""
  options = _options(locals())
  longest = check_longest("max_seqlen_q", max_seqlen_q), check_longest("max_seqlen_k", max_seqlen_k)
  if options["block_table"] is not None:
    options |= {"cu_seqlens_k": None, "max_seqlen_k": None, "kv_lengths": _lengths(options["cu_seqlens_k"])}
  return _attend(options, q, k, v, "thd", longest)

@values.names_itself
def flash_attn_varlen_kvpacked_func(q:Tensor, kv:Tensor, cu_seqlens_q:Tensor, cu_seqlens_k:Tensor, max_seqlen_q:int, max_seqlen_k:int,
                                    dropout_p:float=0.0, softmax_scale:float|None=None, causal:bool=False, window_size:Window=(-1, -1),
                                    softcap:float=0.0, alibi_slopes:Tensor|None=None, deterministic:bool=False, return_attn_probs:bool=False, *,
                                    dropout_seed:Tensor|None=None) -> Any:
  """Computes `flash_attn_varlen_func` of k and v that are packed in one tensor: kv (total_k, 2, Hkv, D)."""
  others, (k, v) = _others(locals(), "q", "kv"), _packed("kv", kv, 2, "(total_k, 2, Hkv, D)")
  return flash_attn_varlen_func(q, k, v, **others)

@values.names_itself
def flash_attn_varlen_qkvpacked_func(qkv:Tensor, cu_seqlens:Tensor, max_seqlen:int, dropout_p:float=0.0, softmax_scale:float|None=None,
                                     causal:bool=False, window_size:Window=(-1, -1), softcap:float=0.0, alibi_slopes:Tensor|None=None,
                                     deterministic:bool=False, return_attn_probs:bool=False, *, dropout_seed:Tensor|None=None) -> Any:
  """Computes `flash_attn_varlen_func` of q, k and v that are packed in one tensor: qkv (total, 3, H, D), cu_seqlens int32 (B + 1), max_seqlen the
  longest sequence."""
  others, (q, k, v) = _others(locals(), "qkv", "cu_seqlens", "max_seqlen"), _packed("qkv", qkv, 3, "(total, 3, H, D)")
  starts, longest = _check_starts("cu_seqlens", cu_seqlens), check_longest("max_seqlen", max_seqlen)
  check_sequences("cu_seqlens", starts, int(qkv.shape[0]), longest, "max_seqlen")
  return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **others)

# ***** a cache *****

def _rotary(name:str, x:Tensor, cos:Tensor, sin:Tensor, at:Tensor|UOp|int, interleaved:bool, moving:bool) -> Tensor:
  """Rotates the first columns of x (B, S, H, D) by the angles of each row's position, as RoPE does (arXiv 2104.09864); `at` has the position of each
  batch's first row."""
  # cos and sin are (positions, rotary_dim/2). With `moving`, row i of batch b has the position at[b] + i, otherwise all rows of batch b have the
  # position at[b]. `interleaved` says which columns make a pair: 0 and 1, 2 and 3, ...; or else column n and column n + rotary_dim/2.
  half, rows = int(cos.shape[1]), int(x.shape[1])
  if 2*half > x.shape[3]:
    raise ValueError(f"rotary_cos has shape {cos.shape}: its second size must be at most half of the {x.shape[3]} columns of {name}")
  steps = Tensor.arange(rows, dtype=dtypes.int)*int(moving)
  if isinstance(at, Tensor): places = at.reshape(-1, 1) + steps
  else: places = (Tensor.full((1,), at, dtype=dtypes.int) + steps).reshape(1, -1)
  c, s = (t[places.to(x.device)].float().reshape(-1, rows, 1, half) for t in (cos, sin))
  turned, rest = x[..., :2*half].float(), x[..., 2*half:]
  pairs = turned.reshape(*turned.shape[:-1], half, 2) if interleaved else turned.reshape(*turned.shape[:-1], 2, half).transpose(-1, -2)
  first, second = pairs[..., 0], pairs[..., 1]
  both = Tensor.stack(first*c - second*s, second*c + first*s, dim=-1 if interleaved else -2).reshape(*turned.shape).cast(x.dtype)
  return both if 2*half == x.shape[3] else both.cat(rest, dim=-1)

def _check_rotary(cos:Tensor|None, sin:Tensor|None, interleaved:bool, k:Tensor|None) -> None:
  values.truth("rotary_interleaved", interleaved)
  for name, t in (("rotary_cos", cos), ("rotary_sin", sin)):
    if values.tensor_or_none(name, t) is not None and t is not None: values.dtype_name(name, t.dtype, FLOATS)
  if (cos is None) != (sin is None):
    raise ValueError(f"rotary_cos={values.shown(cos)}, rotary_sin={values.shown(sin)}: must both be Tensors, or both None")
  if cos is None or sin is None: return
  if k is None:
    raise ValueError("rotary_cos without new rows k and v: must be None; rows in the cache were rotated when they were appended")
  if cos.ndim != 2 or cos.shape != sin.shape:
    raise ValueError(f"rotary_cos and rotary_sin have shapes {cos.shape} and {sin.shape}: must both be (positions, rotary_dim/2)")
  if 0 in cos.shape: raise ValueError(f"rotary_cos has shape {cos.shape}: both dimensions must be at least 1")

def _check_positions(cos:Tensor, cache:Tensor, table:Tensor|None) -> None:
  """Raises ValueError, as FlashAttention does, if rotary_cos has fewer rows than a sequence in the cache may have; `table` is the block table or
  None."""
  of_table = () if table is None else table.shape
  if len(of_table) not in (0, 2): raise ValueError(f"block_table has shape {values.shown_shape(of_table)}: must be (B, max_blocks)")
  rows = math.prod([*static_shape("k_cache", cache.shape)[1:2], *static_shape("block_table", of_table)[1:2]])
  if (there := int(cos.shape[0])) < rows:
    raise ValueError(f"rotary_cos has {there} positions: must have at least {rows}, the rows that a sequence of the cache may have")

def _batches(name:str, cache:GivenRows, batch:int) -> GivenRows:
  """Returns the first `batch` batches of a cache, which may have more batches than q."""
  if not isinstance((count := stored_rows(name, cache).shape[0]), int) or count <= batch: return cache
  if isinstance(cache, Tensor): return cache[:batch]
  x = check_quantized(name, cache)
  return QuantizedRows(x.stored[:batch], x.scales[:batch])

def check_batches(numbers:Tensor, count:int) -> None:
  """Raises ValueError if a number in a tensor is not the index of one of the `count` batches of the cache."""
  # Only numbers that the host can read at no cost are checked.
  if (found := numbers_at_hand(numbers)) is not None and ((found < 0) | (found >= count)).any():
    raise ValueError(f"cache_batch_idx={values.shown(found.tolist())}: must lie in 0..{count - 1}, the batches of k_cache")

@values.names_itself
def flash_attn_with_kvcache(q:Tensor, k_cache:GivenRows, v_cache:GivenRows, k:Tensor|None=None, v:Tensor|None=None, rotary_cos:Tensor|None=None,
                            rotary_sin:Tensor|None=None, cache_seqlens:int|UOp|Tensor|None=None, cache_batch_idx:Tensor|None=None,
                            cache_leftpad:Tensor|None=None, block_table:Tensor|None=None, softmax_scale:float|None=None, causal:bool=False,
                            window_size:Window=(-1, -1), softcap:float=0.0, rotary_interleaved:bool=True, alibi_slopes:Tensor|None=None,
                            num_splits:int=0, return_softmax_lse:bool=False) -> Any:
  """Computes attention over a key/value cache. If k and v are given, first appends these new rows to the cache in place, at row cache_seqlens.
  Returns out, or (out, lse) with return_softmax_lse.

    q                (B, Sq, H, D)
    k_cache, v_cache (B or more, capacity, Hkv, D): Tensors, or QuantizedRows
    k, v             new rows (B, new, Hkv, D), or None
    cache_seqlens    rows filled before the call: an int, a Variable or an int32 Tensor (B); None means that the caches are full
    cache_batch_idx  int32 (B): batch of the caches for each batch of q; by default batch b of the caches for batch b of q
    cache_leftpad    int32 (B): row where each sequence begins; cache_seqlens still counts from the first row of the cache
    block_table      int32 (B, max_blocks): the caches are pages, (pages, page_size, Hkv, D), and row b of the table names the pages of sequence b
    rotary_cos, rotary_sin  (positions, rotary_dim/2), with at least one position for each row that a sequence may have. q is rotated, and the new
                            rows k are rotated before the append. Row i has position cache_seqlens + i. With neither causal nor a window, all rows of
                            q have position cache_seqlens.
    rotary_interleaved  True: columns 0 and 1, 2 and 3 ... make pairs. False: columns 0 and rotary_dim/2, 1 and rotary_dim/2 + 1 ...

  A row that sees no key has lse = -inf. (FlashAttention gives +inf.)"""
  options = _options(locals())
  k, v = values.tensor_or_none("k", k), values.tensor_or_none("v", v)
  of_k, of_v = stored_rows("k_cache", k_cache), stored_rows("v_cache", v_cache)
  new = [(name, t) for name, t in (("k", k), ("v", v)) if t is not None]
  for name, t in (("q", q), ("k_cache", of_k), ("v_cache", of_v), *new):
    if values.tensor(name, t).ndim != 4: raise ValueError(f"{name} has shape {values.shown_shape(t.shape)}: must be (B, S, H, D)")
  if (k is None) != (v is None): raise ValueError(f"k={values.shown(k)}, v={values.shown(v)}: must both be Tensors, or both None")
  _check_rotary(rotary_cos, rotary_sin, rotary_interleaved, k)
  for name, of_batches in (("cache_leftpad", cache_leftpad), ("cache_batch_idx", cache_batch_idx)):
    if values.tensor_or_none(name, of_batches) is None or of_batches is None: continue
    values.dtype_name(name, of_batches.dtype, ("int32",))
    if of_batches.shape != q.shape[:1]:
      raise ValueError(f"{name} has shape {values.shown_shape(of_batches.shape)}: must be ({q.shape[0]},)")
  options["kv_starts"] = cache_leftpad
  if cache_batch_idx is not None:
    if block_table is not None:
      raise ValueError("cache_batch_idx with block_table: only one may be given, the table says where the rows are")
    check_batches(cache_batch_idx, static_shape("k_cache", of_k.shape)[0])
    options["block_table"] = cache_batch_idx.reshape(-1, 1)      # each batch of a cache serves as one page
    if cache_seqlens is None: cache_seqlens = int(of_k.shape[1])
  elif block_table is None:
    k_cache, v_cache = (_batches(name, t, int(q.shape[0])) for name, t in (("k_cache", k_cache), ("v_cache", v_cache)))
  if k is not None and v is not None:
    if cache_seqlens is None:
      raise ValueError("cache_seqlens=None with new rows k and v: must be the number of rows filled, after which they go")
    if rotary_cos is not None and rotary_sin is not None:
      _check_positions(rotary_cos, of_k, options["block_table"])
      if k.device != q.device: raise ValueError(f"k is on {k.device} but q on {q.device}: must be on the same device, or the same devices")
      moving, at = bool(options["causal"]) or options["window"] != (-1, -1), check_lengths("cache_seqlens", cache_seqlens)
      of_q = placement_of(q, q, q, "bshd")
      # raises if `at` is not one length per batch
      if isinstance(at, Tensor): lengths(at, local_shape(q)[0], 0, of_q, "cache_seqlens")
      rotary_cos, rotary_sin = (place(name, t, of_q) for name, t in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)))
      q = _rotary("q", q, rotary_cos, rotary_sin, at, rotary_interleaved, moving)
      k = _rotary("k", k, rotary_cos, rotary_sin, at, rotary_interleaved, True)
    return attention_with_kv_cache(q, k, v, k_cache, v_cache, cache_seqlens, layout="bshd", **options)
  if cache_seqlens is not None: cache_seqlens = check_lengths("cache_seqlens", cache_seqlens)
  elif options["kv_starts"] is not None: cache_seqlens = int(of_k.shape[1])
  if options["block_table"] is None: check_caches(q, k_cache, v_cache, "bshd")
  checked = AttentionOptions(layout="bshd", kv_lengths=cache_seqlens, **options)
  return attend(prepare(q, k_cache, v_cache, checked, "cache_seqlens", in_place=True))
