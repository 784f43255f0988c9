"""Recognises attention that a model writes out in operations of Tensor: softmax(q k^T * scale + mask) v, where the mask may also be applied by
`where`."""
from __future__ import annotations
import contextlib, functools, math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary
from attn.calls.views import filled_with, just_stored
from attn.tinygrad_compat import GroupOp, Ops, Rerouted, Tensor, UOp, dtypes, maker_of_latent_cache, method_of_tinygrad, on_top

# Such models are tinygrad's models with latent attention (MLA), extra/models/t5.py and examples/mlperf/models/gpt_oss.py.

def stored_in_its_dtype(t:Tensor) -> Tensor:
  """Returns `t`. If `t` views a cache to which pending stores write rows of another dtype, the stores in the result first cast these rows to the
  cache's dtype."""
  # Without a cast, tinygrad renders a store of a vector such as *(half4*)p = make_float4(...), which the compilers of CUDA and HIP refuse.
  after = t.uop
  while after.op in GroupOp.Movement: after = after.src[0]
  def uneven(u:UOp) -> bool: return u.op is Ops.STORE and u.src[0].dtype != u.src[1].dtype
  if after.op is not Ops.AFTER or not any(map(uneven, after.src[1:])): return t
  cast = [u.src[0].store(u.src[1].cast(u.src[0].dtype)) if uneven(u) else u for u in after.src[1:]]
  view = on_top(t.uop, after, after.src[0].after(*cast))
  return t if view is None else Tensor(view)

class WrittenScores(NamedTuple):
  """Scores that a model computes by operations of Tensor: q @ k^T * `scale` + `masks`."""
  q: UOp
  keys: UOp
  scale: float = 1.0
  masks: tuple[UOp, ...] = ()
  seen: tuple[UOp, ...] = ()  # conditions: -inf where one is False

class WrittenWeights(NamedTuple):
  """Weights that a model computes by a softmax of `scores`; the softmax's sum includes exp(sink) unless `sink` is None."""
  scores: UOp
  sink: UOp|None = None

# takes q, k, v, a mask that is added to the scores, a bool mask that selects scores, scale and sinks (..., 1, 1), and returns None if no kernel
# computes this
AttendWritten = Callable[[Tensor, Tensor, Tensor, Tensor|None, Tensor|None, float, Tensor|None], Tensor|None]

def joined(operation:Callable[[Tensor, Tensor], Tensor], parts:tuple[UOp, ...]) -> Tensor|None:
  return functools.reduce(operation, map(Tensor, parts)) if parts else None

def uncast(u:UOp) -> UOp:
  """Returns the value that `u` was before its last casts between floating-point dtypes and its last assignments, such as scores += bias."""
  while True:
    if u.op is Ops.CAST and dtypes.is_float(u.src[0].dtype): u = u.src[0]
    # In scores += bias, the assigned value is the sum.
    elif (value := just_stored(u)) is not None: u = value
    else: return u

def exponents(u:UOp) -> tuple[UOp, ...]:
  """Returns the two terms x and y if `u` is (x + y).exp(), otherwise ()."""
  # tinygrad writes (x + y).exp() as exp2((x + y)*log2(e)), in float32 if x and y have 16 bits.
  if (power := uncast(u)).op is not Ops.EXP2 or power.src[0].op is not Ops.MUL: return ()
  return total.src if (total := uncast(power.src[0].src[0])).op is Ops.ADD else ()

def weights_with_sink(u:UOp) -> WrittenWeights|None:
  """If `u` is softmax weights whose sum includes a sink, returns their scores and the sink (..., 1, 1), otherwise None."""
  # The weights are e/(e.sum(-1, keepdim=True) + (sink - m).exp()), with e = (scores - m).exp(). Any tensor m is accepted, because m cancels. The
  # weights are recognised by the exact expression that tinygrad builds, so no other expression is mistaken for weights.
  if u.op is not Ops.MUL or u.src[1].op is not Ops.RECIPROCAL or u.src[1].src[0].op is not Ops.ADD: return None
  e, terms = Tensor(u.src[0]), u.src[1].src[0].src
  if not (of_e := exponents(u.src[0])): return None
  for of_sink in map(exponents, terms):
    if not of_sink or of_sink[1] is not of_e[1] or of_sink[0].shape[-2:] != (1, 1): continue
    scores, sink, shift = Tensor(of_e[0]), Tensor(of_sink[0]), Tensor(of_e[1])
    total, one = e.sum(-1, keepdim=True), (sink + shift).exp()
    if (scores + shift).exp().uop is e.uop and u in ((e/(total + one)).uop, (e/(one + total)).uop): return WrittenWeights(scores.uop, sink.uop)
  return None

class WrittenOut:
  """Replaces written-out attention by attn's kernels: the methods `dot` and `softmax` of this class take the place of tinygrad's."""
  # When a model multiplies softmax(scores) by values, the function `attend` computes the attention. If `attend` returns None, the model's own product
  # is computed. A product or softmax is remembered only as long as the model's code refers to the result.
  def __init__(self, attend:AttendWritten) -> None:
    self.attend, self.watching = attend, True
    self.products: WeakKeyDictionary[UOp, WrittenScores] = WeakKeyDictionary()
    self.weights: WeakKeyDictionary[UOp, WrittenWeights] = WeakKeyDictionary()      # results of softmax
    self.rerouted: list[Rerouted] = []
    for own, to in ((method_of_tinygrad("dot"), self.dot), (method_of_tinygrad("softmax"), self.softmax),
                    (maker_of_latent_cache(), self.init_state)):
      if own is not None: self.reroute(own, to)

  def reroute(self, own:FunctionType, to:Callable[..., Any]) -> None:
    found = Rerouted(own, lambda *args, **kwargs: to(found.before, *args, **kwargs))
    self.rerouted.append(found)

  def end(self) -> None:
    for x in self.rerouted: x.end()

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Context in which written-out attention is not recognised."""
    # tinygrad's own attention, which runs in this context, is also written out.
    self.watching = False
    try: yield
    finally: self.watching = True

  def scores(self, u:UOp) -> WrittenScores|None:
    """Returns the q, keys, scale and masks from which a model computed the scores `u`, or None if attn does not recognise the operations."""
    # The supported operations are a matrix product, then multiplication by a number, then addition of masks, then `where` with -inf.
    if (u := uncast(u)) in self.products: return self.products[u]
    if u.op is Ops.WHERE: return self.selected(*map(Tensor, u.src))
    if u.op not in (Ops.ADD, Ops.MUL): return None
    for of, other in (u.src, u.src[::-1]):
      if (found := self.scores(of)) is None or found.seen: continue
      if u.op is Ops.ADD: return found._replace(masks=(*found.masks, other))
      factor = 1/filled if other.op is Ops.RECIPROCAL and (filled := filled_with(other.src[0])) else filled_with(other)
      return None if factor is None or found.masks else found._replace(scale=found.scale*factor)
    return None

  def selected(self, condition:Tensor, x:Tensor, y:Tensor) -> WrittenScores|None:
    """Returns condition.where(x, y) as masked scores if one of x and y is scores and the other one is -inf; None otherwise."""
    for seen, of, other in ((condition, x, y), (condition.logical_not(), y, x)):
      if filled_with(other.uop) == -math.inf and (found := self.scores(of.uop)) is not None: return found._replace(seen=(*found.seen, seen.uop))
    return None

  def weights_of(self, u:UOp) -> WrittenWeights|None:
    """Returns the scores and the sink from which the attention weights `u` were computed, or None if `u` is not the weights of an attention."""
    return found if (found := self.weights.get(u)) is not None else weights_with_sink(u)

  def softmax(self, own:Callable[..., Tensor], x:Any, axis:int=-1, dtype:Any=None) -> Any:
    found = own(x, axis, dtype)
    if self.watching and isinstance(x, Tensor) and axis in (-1, x.ndim - 1) and self.scores(x.uop) is not None:
      self.weights[found.uop] = WrittenWeights(x.uop)
    return found

  def dot(self, own:Callable[..., Tensor], x:Any, w:Any, dtype:Any=None) -> Any:
    if not self.watching or not isinstance(x, Tensor) or not isinstance(w, Tensor) or min(x.ndim, w.ndim) < 4 or x.ndim != w.ndim:
      return own(x, w, dtype)
    w = stored_in_its_dtype(w)
    if dtype is None and (weights := self.weights_of(uncast(x.uop))) is not None and (found := self.scores(weights.scores)) is not None:
      mask, seen = joined(Tensor.add, found.masks), joined(Tensor.bitwise_and, found.seen)
      sinks = None if weights.sink is None else Tensor(weights.sink)
      o = self.attend(Tensor(found.q), Tensor(found.keys).transpose(-1, -2), w, mask, seen, found.scale, sinks)
      if o is not None: return o.cast(own(x, w).dtype)
    product = own(x, w, dtype)
    self.products[uncast(product.uop)] = WrittenScores(x.uop, w.uop)
    return product

  @staticmethod
  def init_state(before:Callable[..., None], block:Any, x:Tensor) -> None:
    """Makes the cache of a latent attention block of tinygrad.llm in float16; tinygrad's own method, `before`, would leave the cache in float32."""
    # `before` is tinygrad's method. It makes the cache in float32, but no kernel reads float32 rows of 576 numbers. float16 is the dtype of the
    # caches of tinygrad's other blocks.
    new = not hasattr(block, "cache_k")
    before(block, x)
    if new: block.cache_k = Tensor.empty(*block.cache_k.shape, dtype=dtypes.half, device=block.cache_k.device)
