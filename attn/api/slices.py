"""`scaled_dot_product_attention` on keys and values whose length depends on Variables, or grows from call to call: one kernel serves all lengths, and
reads slices of a cache in place."""
from __future__ import annotations
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any
from attn import values
from attn.api.checked_call import CheckedCall
from attn.api.launch import run
from attn.calls.checked_kernel import arch_of
from attn.calls.placement import Placement
from attn.calls.views import InBuffer, Size, cache_of, count_of, is_causal_mask, most, room_for_rows, same_size, whole_places
from attn.choose.dispatch import Choice
from attn.problem import Problem, check_dropout_p, check_softmax_scale
from attn.tinygrad_compat import TRAINING, Tensor, UOp, buffer_under, capturing, dtypes
from attn.values import FLOATS, static_shape

# Keys and values that are no slice of a cache are first copied into buffers of the largest size.

@dataclass(frozen=True, eq=False)
class SdpaCall:
  """The arguments of a call of `scaled_dot_product_attention`, not checked yet."""
  query: Tensor
  key: Tensor
  value: Tensor
  attn_mask: Tensor|None
  dropout_p: float
  is_causal: bool
  enable_gqa: bool
  scale: float|None
  # no arguments of the user's: only attention that a model writes out has them. They broadcast to the scores
  sinks: Tensor|None = None      # (..., 1, 1): logits of attention sinks
  seen: Tensor|None = None       # bool: a score is -inf where this is False, whatever the key is. attn_mask is added to the scores before
  @property
  def dropped(self) -> float:
    """Probability that dropout makes an attention weight 0: dropout_p where tinygrad's TRAINING is set, else 0."""
    return self.dropout_p if TRAINING else 0.0
  @property
  def sliced(self) -> bool:
    """Whether the size of query, key or value depends on a Variable."""
    return any(map(is_symbolic, (self.query, self.key, self.value)))

@dataclass(frozen=True)
class SlicedCall:
  """Call of `scaled_dot_product_attention` for which one kernel serves all numbers of keys."""
  call: CheckedCall  # with q padded to the largest number of queries
  rows: Size  # queries that come from the caller: the first ones
  column: Tensor|None = None  # the caller's mask, if it has a single column for all keys
  def choice(self) -> Choice: return self.call.choice()
  def run(self) -> Tensor:
    """Computes the attention and returns the output o (B, H, Sq, Dv) of the caller's queries."""
    o, = run(self.call)
    o = (o if isinstance(self.rows, int) else o.shrink((None, (0, self.rows), None, None))).transpose(1, 2)
    return o if self.column is None else hidden_by(o, self.column)

def is_symbolic(t:Any) -> bool:
  """Returns whether `t` is a Tensor whose size depends on a Variable."""
  return isinstance(t, Tensor) and any(isinstance(n, UOp) for n in t.shape)

def dtypes_of(query:Tensor, key:Tensor, value:Tensor) -> tuple[str, str]:
  """Returns (dtype in which attention is computed, dtype of the result)."""
  types = [values.dtype_name(name, values.tensor(name, t).dtype, FLOATS) for name, t in (("query", query), ("key", key), ("value", value))]
  # If some inputs are float32 and others float16 (or bfloat16), the inputs are rounded to 16 bits, and the result is float32, like the result of
  # tinygrad's scaled_dot_product_attention.
  if len(narrow := set(types) - {"float32"}) > 1:
    raise ValueError(f"query, key and value have dtypes {', '.join(types)}: must be the same, or float32 and one 16-bit dtype")
  return (narrow.pop() if narrow else "float32"), "float32" if "float32" in types else types[0]

def hidden_by(o:Tensor, column:Tensor) -> Tensor:
  """Applies a mask with one number for each query to the output o: a query whose number is -inf or False sees no key and gets 0."""
  # A column treats all keys alike, so a finite number leaves the weights of a row as they are. -inf or False hides all keys of a row. NaN and +inf
  # give NaN.
  if column.dtype == dtypes.bool: return column.where(o, 0)
  return (column == -math.inf).where(0, (column.abs() < math.inf).where(o, math.nan))

def _heads(H:int, of_k:int, of_v:int, enable_gqa:bool) -> None:
  if of_k != of_v or H % of_k or not (enable_gqa or of_k in (1, H)):
    raise NotImplementedError(f"query, key and value have {H}, {of_k} and {of_v} heads: key and value must have the same number, which divides "
                              "that of query" + ("" if enable_gqa else "; enable_gqa=True lets query heads share a key/value head"))

def _column(mask:Tensor, queries:tuple[Size, ...], device:str) -> Tensor:
  """Checks and returns a mask whose last axis has size 1, so that it masks all keys of a query or none; `queries` is (B, H, Sq)."""
  if mask.dtype != dtypes.bool: values.dtype_name("attn_mask", mask.dtype, FLOATS)
  if mask.device not in (None, device): raise ValueError(f"attn_mask is on {mask.device} but query on {device}: must be on the same device")
  if mask.ndim > 4 or any(n != 1 and not same_size(n, full) for n, full in zip(mask.shape[-2::-1], queries[::-1])):
    raise ValueError(f"attn_mask has shape {values.shown_shape(mask.shape)}: must broadcast to {values.shown_shape((*queries, 1))}")
  return mask

def _sinks(sinks:Tensor, heads:int) -> Tensor:
  """Reshapes sinks (..., 1, 1) to (heads), one number for each query head in float32; raises NotImplementedError if each batch has its own sinks."""
  if sinks.ndim > 3 and any(n != 1 for n in sinks.shape[:-3]):
    raise NotImplementedError(f"attention sinks of shape {sinks.shape} with a symbolic length: must be one number for each head, (H, 1, 1)")
  return sinks.reshape(-1).expand(heads).cast(dtypes.float)

def _mask(mask:Tensor|None, is_causal:bool, n_q:Size, n_k:Size) -> tuple[tuple[int, int], bool]:
  """Translates attn_mask and is_causal into the fields `window` and `top_left` of `Problem`, for n_q queries and n_k keys."""
  if mask is None: return (-1, 0) if is_causal else (-1, -1), is_causal and not same_size(n_q, n_k)
  if is_causal_mask(mask, n_q, n_k): return (-1, 0), False
  # Only the causal mask can be translated.
  raise NotImplementedError(f"attn_mask of shape {values.shown_shape(mask.shape)} with keys of symbolic length: only the causal mask is known, "
                            "Tensor.full(shape, -inf).triu(keys - queries + 1), and masks of one column")

def _copied(t:Tensor, rows:int) -> tuple[Tensor, InBuffer]:
  """Copies keys or values (B, heads, S, D) to a buffer with room for `rows` rows; returns (copy, where its rows lie in the buffer)."""
  B, heads, _, width = t.shape
  shape = int(B), rows, int(heads), int(width)
  return t.transpose(1, 2).pad_to(shape).contiguous(), InBuffer(whole_places(shape, "bshd"), 1, rows)

def sliced_call(x:SdpaCall) -> SlicedCall:
  """Checks the arguments of `scaled_dot_product_attention` and returns a call in which the number of keys is a Variable."""
  check_dropout_p("dropout_p", x.dropout_p)
  dtype, out_dtype = dtypes_of(x.query, x.key, x.value)
  q, k, v = (t.cast(FLOATS[dtype]) for t in (x.query, x.key, x.value))
  is_causal, enable_gqa = values.truth("is_causal", x.is_causal), values.truth("enable_gqa", x.enable_gqa)
  for name, t in (("query", q), ("key", k), ("value", v)):
    if t.ndim != 4:
      raise NotImplementedError(f"{name} has shape {values.shown_shape(t.shape)}: with a symbolic length only (B, H, S, D) is supported")
    static_shape(name, (*t.shape[:2], t.shape[3]))
    if not isinstance(t.device, str) or t.device != q.device:
      raise NotImplementedError(f"{name} is on {t.device} with a symbolic shape: query, key and value must be on the same single device")
  n_q, n_k, device = q.shape[2], k.shape[2], str(q.device)
  B, H, D, Bk, of_k, Dk, Bv, of_v, Dv = (int(t.shape[axis]) for t in (q, k, v) for axis in (0, 1, 3))
  if (Bk, Dk, Bv) != (B, D, B) or not same_size(n_k, v.shape[2]):
    raise ValueError(f"query, key and value have shapes {', '.join(values.shown_shape(t.shape) for t in (q, k, v))}: must be (B, H, Sq, D), "
                     "(B, Hkv, Sk, D) and (B, Hkv, Sk, Dv)")
  if x.seen is not None: raise NotImplementedError("scores masked by `where` with a symbolic length: only lengths that are ints are supported")
  if x.dropped: raise NotImplementedError(f"dropout_p={x.dropped} with a symbolic shape: attention over a cache has no dropout; must be 0")
  _heads(H, of_k, of_v, enable_gqa)
  sinks = {} if x.sinks is None else {"sinks": _sinks(x.sinks, H)}
  if x.attn_mask is not None and is_causal: raise RuntimeError("attn_mask with is_causal=True: must be None, or is_causal False")
  mask = values.tensor_or_none("attn_mask", x.attn_mask)
  column = None if mask is None or mask.shape[-1:] != (1,) or same_size(n_k, 1) else _column(mask, (B, H, n_q), device)
  window, top_left = _mask(mask if column is None else None, is_causal, n_q, n_k)
  if (cache := cache_of(k, v)) is not None: in_k, in_v = cache
  else: (k, in_k), (v, in_v) = (_copied(t, most(n_k)) for t in (k, v))
  Sq, Sk = most(n_q), min(in_k.rows, in_v.rows)
  if not x.sliced:
    Sk = min(room_for_rows(in_k.places, B, of_k//in_k.group, D), room_for_rows(in_v.places, B, of_v//in_v.group, Dv))
    # An int becomes a Variable with this value.
    n_k = UOp.variable("attn_keys", 1, Sk).bind(n_k)
  keys, queries = count_of(n_k), count_of(n_q)
  if keys is None or queries is None:
    raise NotImplementedError(f"query and key have shapes {values.shown_shape(q.shape)} and {values.shown_shape(k.shape)}: a symbolic length must "
                              "be a sum of bound Variables and a number")
  v_in_k = cache is not None and in_v.places == in_k.places and Dv <= D and buffer_under(k.uop) is buffer_under(v.uop)
  p = Problem(B, H, of_k//in_k.group, Sq, Sk, D, Dv, dtype, out_dtype, "bshd", window, 0 if top_left else Sk - Sq,
              D**-.5 if x.scale is None else check_softmax_scale("scale", x.scale), top_left=top_left, sk_variable=keys[0],
              sq_variable=None if isinstance(n_q, int) else queries[0], k_view=in_k.places, v_view=None if v_in_k else in_v.places,
              v_in_k=v_in_k, sinks=bool(sinks), num_splits=0)
  rows = q.transpose(1, 2)
  if not isinstance(n_q, int): rows = rows.pad_to((B, Sq, H, D))
  variables = tuple({u.src[0].expr: u for u in (*keys[1], *queries[1])}.values())
  tensors = {"q": rows, "k": k} | ({} if v_in_k else {"v": v}) | sinks
  return SlicedCall(CheckedCall(p, tensors, arch_of(device), Placement(device), None, variables), n_q, column)

# ***** a cache that grows by an int *****

MOST_PROBLEMS = 1024     # of which `lengths_seen` knows the lengths, the latest
lengths_seen: OrderedDict[Problem, set[int]] = OrderedDict()

def is_part_of_a_buffer(t:Tensor) -> bool:
  """Returns whether a tensor is a view of a realized buffer with more elements."""
  base = buffer_under(t.uop)
  return base is not None and base.has_buffer_identity() and base.max_numel() > t.uop.max_numel()

def call_of_any_length(x:SdpaCall) -> SlicedCall|None:
  """Returns the call with a Variable as its number of keys, so that one kernel serves all numbers of keys; None if a kernel for the present number is
  better."""
  if x.sliced: return sliced_call(x)
  # A kernel for all numbers has no gradient. While TinyJit captures, a number that is an int gets a kernel of its own, too.
  if TRAINING or capturing or not all(isinstance(t, Tensor) and is_part_of_a_buffer(t) for t in (x.key, x.value)): return None
  try: call = sliced_call(x)
  except (ValueError, NotImplementedError, RuntimeError): return None
  lengths = lengths_seen.setdefault(call.call.problem, set())
  lengths_seen.move_to_end(call.call.problem)
  if len(lengths_seen) > MOST_PROBLEMS: lengths_seen.popitem(last=False)
  # A slice of a cache gets a kernel for all numbers of keys in its second length, so a growing cache needs only two compilations.
  lengths.add(int(x.key.shape[2]))
  return call if len(lengths) > 1 and call.choice().kernel != "three_pass" else None
