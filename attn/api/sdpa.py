"""`scaled_dot_product_attention` with the arguments of tinygrad and PyTorch, and `install`, which makes `Tensor.scaled_dot_product_attention` use
attn's kernels."""
from __future__ import annotations
import contextlib, math, warnings
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Iterator
from attn import values
from attn.api.attention import attention, choice_of
from attn.api.leading import Leading
from attn.api.slices import SdpaCall, call_of_any_length, dtypes_of, is_symbolic
from attn.api.written_out import WrittenOut
from attn.calls.views import is_causal_mask
from attn.problem import check_dropout_p, check_softmax_scale
from attn.tinygrad_compat import TRAINING, Rerouted, Tensor, UOp, dtypes, levels_to_caller, method_of_tinygrad
from attn.values import static_shape

def _broadcast(name:str, mask:Tensor, q:Tensor, k:Tensor, leading:Leading) -> Tensor:
  """Returns a mask with four axes, (B or 1, H or 1, Sq or 1, Sk or 1), or raises ValueError if the mask does not broadcast to the scores."""
  if mask.device not in (None, q.device) and (isinstance(q.device, str) or not isinstance(mask.device, str)):
    raise ValueError(f"{name} is on {mask.device} but query on {q.device}: must be on the same device, or the same devices")
  shape, whole = static_shape(name, mask.shape), (*leading.sizes, int(q.shape[-2]), int(k.shape[-2]))
  if len(shape) > len(whole) or any(n not in (1, full) for n, full in zip(shape[::-1], whole[::-1])):
    raise ValueError(f"{name} has shape {values.shown_shape(shape)}: must broadcast to {whole}")
  return leading.of_scores(mask)

def _shown_by(seen:Tensor, offset:int) -> dict[str, Any]:
  """Returns the options mask_mod and mod_tensors of `attention` for a bool tensor `seen` (True: the query sees the key), with `offset` Sk - Sq."""
  wide = tuple(int(n) > 1 for n in seen.shape)
  def mask_mod(b:UOp, h:UOp, i:UOp, j:UOp, mask:UOp) -> UOp:
    return mask[tuple(place if full else 0 for place, full in zip((b, h, i - offset, j), wide))]
  return {"mask_mod": mask_mod, "mod_tensors": (seen,)}

def _arguments(x:SdpaCall) -> tuple[tuple[Tensor, ...], dict[str, Any], Leading]:
  """Translates arguments of `scaled_dot_product_attention` into q, k and v of four dimensions, options of `attention`, and the sorted leading
  dimensions."""
  q, k, v, mask = x.query, x.key, x.value, x.attn_mask
  check_dropout_p("dropout_p", x.dropout_p)
  is_causal, enable_gqa = values.truth("is_causal", x.is_causal), values.truth("enable_gqa", x.enable_gqa)
  if is_causal and mask is not None: raise RuntimeError("attn_mask with is_causal=True: must be None, or is_causal False")
  dtype, out_dtype = dtypes_of(q, k, v)
  for name, t in (("query", q), ("key", k), ("value", v)):
    if t.ndim < 2: raise ValueError(f"{name} has shape {values.shown_shape(t.shape)}: must be (..., S, D)")
    if 0 in static_shape(name, t.shape): raise ValueError(f"{name} has shape {t.shape}: every dimension must be at least 1")
    if t.device != q.device: raise ValueError(f"{name} is on {t.device} but query on {q.device}: all must be on the same device, or the same devices")
  if k.shape[-1] != q.shape[-1]: raise ValueError(f"key has shape {k.shape}: its head dimension is {k.shape[-1]} but that of query is {q.shape[-1]}")
  if v.shape[-2] != k.shape[-2]: raise ValueError(f"value has shape {v.shape}: its length is {v.shape[-2]} but that of key is {k.shape[-2]}")
  scale = None if x.scale is None else check_softmax_scale("scale", x.scale)
  rank = max(q.ndim, k.ndim, v.ndim, 4)
  q, k, v = (t.cast(values.FLOATS[dtype]).reshape(*[1]*(rank - t.ndim), *t.shape) for t in (q, k, v))
  sinks = None if x.sinks is None else x.sinks.reshape(*[1]*(rank - x.sinks.ndim), *x.sinks.shape)
  leading = Leading.of(q, k, v, sinks, enable_gqa)
  options: dict[str, Any] = {"causal": "top-left" if is_causal else False, "softmax_scale": scale, "dropout_p": x.dropped, "out_dtype": out_dtype}
  if isinstance(mask, Tensor) and not is_symbolic(mask) and is_causal_mask(mask, q.shape[-2], k.shape[-2]):
    options["causal"], mask = "bottom-right", None
  if mask is not None:
    mask = values.tensor("attn_mask", mask)
    seen = mask.dtype == dtypes.bool
    if not seen: values.dtype_name("attn_mask", mask.dtype, values.FLOATS)
    mask = _broadcast("attn_mask", mask, q, k, leading)
    options["bias"] = mask.where(0.0, -math.inf).cast(dtypes.float) if seen else mask
  if x.seen is not None: options |= _shown_by(_broadcast("mask", x.seen, q, k, leading), int(k.shape[-2]) - int(q.shape[-2]))
  if sinks is not None: options["sinks"] = leading.of_heads(sinks)
  return (leading.of_queries(q), leading.of_keys("key", k), leading.of_keys("value", v)), options, leading

@values.names_itself
def scaled_dot_product_attention(query:Tensor, key:Tensor, value:Tensor, attn_mask:Tensor|None=None, dropout_p:float=0.0, is_causal:bool=False,
                                 enable_gqa:bool=False, *, scale:float|None=None) -> Tensor:
  """Computes softmax(query key^T * scale + attn_mask) value. The arguments are those of tinygrad and PyTorch.

    query       (..., H, Sq, D), float16, bfloat16 or float32
    key         (..., Hkv, Sk, D)
    value       (..., Hkv, Sk, Dv)
    attn_mask   bool (True: the query sees the key), or numbers added to the scores; broadcastable to (..., H, Sq, Sk)
    is_causal   query i sees keys j <= i (`attention(causal=True)`: keys j <= i + Sk - Sq)
    enable_gqa  H may be a multiple of Hkv: query heads share key/value heads
    scale       factor of the scores, 1/sqrt(D) by default
    dropout_p   probability that an attention weight becomes 0, at least 0 and less than 1; active only where tinygrad's TRAINING is set

  If some of query, key and value are float32 and the rest float16 (or bfloat16), all three are rounded to 16 bits, and the result is float32. A query
  that sees no key gives 0; tinygrad's own function gives NaN. key and value may be slices of a cache whose length is a tinygrad Variable: see
  `install`. Raises RuntimeError for attn_mask with is_causal, ValueError or NotImplementedError for other arguments that don't fit together."""
  return attended(SdpaCall(**locals()))

def attended(x:SdpaCall) -> Tensor:
  if (call := call_of_any_length(x)) is not None: return call.run()
  tensors, options, leading = _arguments(x)
  o, rank = leading.restored(attention(*tensors, **options)), max(x.query.ndim, x.key.ndim, x.value.ndim)
  return o.reshape(o.shape[-rank:])

# ***** in place of tinygrad's own *****

@dataclass(frozen=True)
class Decision:
  """What computed one call of `Tensor.scaled_dot_product_attention` after `install`: the name of attn's kernel, and why."""
  kernel: str|None  # None: the function from before `install` computed the call
  reason: str

NAME = "scaled_dot_product_attention"
decisions: deque[Decision] = deque(maxlen=1024)   # one for each call while installed, the latest calls
@dataclass
class Installed:
  """What `install` has replaced in tinygrad, so that `uninstall` can restore it."""
  active: bool = False
  before: Any = None  # what `Tensor.scaled_dot_product_attention` was before
  rerouted: Rerouted|None = None  # redirects calls of tinygrad's own function; None if `before` is another library's function
  written_out: WrittenOut|None = None
  said: set[str] = field(default_factory=set)     # the reasons that a warning gave

installation = Installed()

def _decide(x:SdpaCall) -> Decision:
  if (call := call_of_any_length(x)) is not None: choice = call.choice()
  else:
    tensors, options, _ = _arguments(x)
    choice = choice_of(*tensors, **options)
  if choice.kernel == "three_pass": return Decision(None, "; ".join(f"{name}: {reason}" for name, reason in choice.refused))
  return Decision(choice.kernel, str(choice))

def _attended_if_possible(call:SdpaCall) -> Tensor|None:
  """Returns the result of a call of scaled_dot_product_attention if a kernel of attn can compute it, otherwise None, with a warning."""
  # Each reason is warned of once. The list that `install` returned gets the Decision in both cases.
  try: decision = _decide(call)
  except (ValueError, NotImplementedError, RuntimeError) as e: decision = Decision(None, str(e))
  decisions.append(decision)
  if decision.kernel is not None: return attended(call)
  if decision.reason not in installation.said:
    installation.said.add(decision.reason)
    warnings.warn(f"scaled_dot_product_attention goes to tinygrad's own: {decision.reason}", stacklevel=levels_to_caller())
  return None

def _installed(self:Tensor, key:Tensor, value:Tensor, attn_mask:Tensor|None=None, dropout_p:float=0.0, is_causal:bool=False,
               enable_gqa:bool=False, *, scale:float|None=None) -> Tensor:
  if installation.active:      # if not, another library still calls this function, which it found in place of tinygrad's own
    unused = not TRAINING and isinstance(dropout_p, (int, float)) and dropout_p in (0, 1)      # attn refuses 1, tinygrad's own does not
    call = SdpaCall(self, key, value, attn_mask, 0.0 if unused else dropout_p, is_causal, enable_gqa, scale)
    if (found := _attended_if_possible(call)) is not None: return found
  if scale is not None: self = self*(scale*math.sqrt(self.shape[-1]))      # tinygrad's own has no such argument
  with contextlib.nullcontext() if installation.written_out is None else installation.written_out.paused():
    return installation.before(self, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, enable_gqa=enable_gqa)

def _attend_written_out(q:Tensor, k:Tensor, v:Tensor, mask:Tensor|None, seen:Tensor|None, scale:float, sinks:Tensor|None) -> Tensor|None:
  return _attended_if_possible(SdpaCall(q, k, v, mask, 0.0, False, False, scale, sinks, seen))

def install() -> deque[Decision]:
  """Makes `Tensor.scaled_dot_product_attention` run attn's kernels. A call that no kernel can compute goes to the function that `install` has
  replaced, with a warning that says why (once for each reason). A second `install` changes nothing.

  Returns a list of decisions: one `Decision` for each call, with the name of the kernel and the reason. The list grows with every call (under
  TinyJit: with every capture) and keeps the latest 1024 decisions.

  Caches: key and value may be slices of a cache whose length depends on tinygrad Variables, as in tinygrad's models. Slices are read in place, one
  kernel serves all lengths, and the mask triu(start_pos + 1) of -inf counts as causal. Slices with a length that is an int are also read in place.
  The first length of a cache gets a kernel for this length alone. A second length gets a kernel for all lengths. Where TRAINING is set, and while
  TinyJit captures, each length gets a kernel.

  Other names: a module may have given tinygrad's method another name before `install`, as extra/models/unet.py does. Calls by this name also run
  attn's kernels.

  Written-out attention: (q @ k.transpose(-1, -2)*scale + mask).softmax(-1) @ v in four or more dimensions counts as a call. Sinks may be written as
  in tinygrad's examples/mlperf/models/gpt_oss.py. A mask may also be seen.where(scores, -inf) or masked_fill: both replace a NaN score of a hidden
  key by -inf. A mask that is added to the scores leaves NaN.

  tinygrad.llm: latent attention (MLA) blocks get a cache in float16 instead of float32."""
  if not installation.active and Tensor.scaled_dot_product_attention is not _installed:
    if (own := method_of_tinygrad(NAME)) is not None:
      installation.rerouted = Rerouted(own, _installed)
      installation.before = installation.rerouted.before
    else:
      installation.before = Tensor.scaled_dot_product_attention
      setattr(Tensor, NAME, _installed)
  if installation.written_out is None: installation.written_out = WrittenOut(_attend_written_out)
  installation.active = True
  return decisions

def uninstall() -> None:
  """Ends the effect of `install`: `Tensor.scaled_dot_product_attention` is again the function from before. Does nothing if `install` was not called.

  If another library has replaced the function since `install`, its replacement stays. Where this replacement still calls attn's function, attn passes
  the call on to the function from before `install`."""
  installation.active = False
  if installation.rerouted is not None: installation.rerouted.end()
  elif Tensor.scaled_dot_product_attention is _installed: setattr(Tensor, NAME, installation.before)
  installation.rerouted = None
  if installation.written_out is not None: installation.written_out.end()
  installation.written_out = None

@contextlib.contextmanager
def installed() -> Iterator[deque[Decision]]:
  """Context manager that calls `install` at the beginning and `uninstall` at the end. `decisions` gets one `Decision` for each call of
  `Tensor.scaled_dot_product_attention`, which says what computed the call and why.

    with attn.installed() as decisions: ...

  If such statements are nested, only the outermost statement calls `uninstall`."""
  outermost = not installation.active
  try: yield install()
  finally:
    if outermost: uninstall()
