"""Sorts the leading dimensions of a call of `scaled_dot_product_attention`, which broadcast, into the batch and the heads of `attention`."""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.tinygrad_compat import Tensor

Axes = tuple[int, ...]

@dataclass(frozen=True)
class Leading:
  """Leading axes of q, k and v (all but the last two) in three groups: batch, key/value heads, and query heads that share a key/value head."""
  sizes: tuple[int, ...]      # size of query and output along each leading axis
  kv_sizes: tuple[int, ...]   # size of key and value along each leading axis
  batch: Axes
  heads: Axes
  shared: Axes  # only q has a size above 1: one key/value head, not repeated in memory, serves all these queries

  @staticmethod
  def of(q:Tensor, k:Tensor, v:Tensor, sinks:Tensor|None, enable_gqa:bool) -> Leading:
    """Finds out which leading axes of q, k, v and `sinks` are batch axes and which are head axes; raises ValueError if the numbers of heads don't
    fit."""
    last = q.ndim - 3
    sizes = [max(map(int, n)) for n in zip(*(t.shape[:-2] for t in (q, k, v)))]
    if enable_gqa:
      heads, kv_heads = int(q.shape[last]), max(int(k.shape[last]), int(v.shape[last]))
      if heads % kv_heads: raise ValueError(f"enable_gqa=True with {heads} query heads: must be a multiple of the {kv_heads} key/value heads")
      sizes[last] = heads
    shared = tuple(a for a, n in enumerate(sizes) if k.shape[a] == v.shape[a] == 1 < n)
    kv_sizes = [1 if a in shared else n for a, n in enumerate(sizes)]
    if enable_gqa: kv_sizes[last] = kv_heads
    # The axes along which `sinks` has more than one number are head axes. Without sinks, only the last leading axis is a head axis.
    of_sinks = () if sinks is None else tuple(a for a in range(last + 1) if sinks.shape[a] != 1)
    own = tuple(a for a in of_sinks or (last,) if a not in shared)
    return Leading(tuple(sizes), tuple(kv_sizes), tuple(a for a in range(last + 1) if a not in own + shared), own, shared)

  def size(self, axes:Axes) -> int: return math.prod(self.sizes[a] for a in axes)
  def ordered(self, t:Tensor) -> Tensor:
    """Returns `t` with the batch axes first, then the head axes, then the axes whose queries share a key/value head."""
    # So queries with the same key/value head lie side by side.
    return t.permute(*self.batch, *self.heads, *self.shared, t.ndim - 2, t.ndim - 1)

  def of_queries(self, q:Tensor) -> Tensor:
    """Returns queries as (B, H, Sq, D)."""
    return self.ordered(q.expand(*self.sizes, *q.shape[-2:])).reshape(self.size(self.batch), self.size(self.heads + self.shared), *q.shape[-2:])
  def of_keys(self, name:str, t:Tensor) -> Tensor:
    """Returns keys or values as (B, Hkv, Sk, D); raises ValueError, with the argument's `name`, if their leading axes do not broadcast to those of
    the call."""
    try: whole = self.ordered(t.expand(*self.kv_sizes, *t.shape[-2:]))
    except (ValueError, RuntimeError) as e:
      hint = "; enable_gqa=True lets query heads share a key/value head" if self.sizes == self.kv_sizes else ""
      raise ValueError(f"{name} has batch and head dimensions {t.shape[:-2]}: must broadcast to {self.kv_sizes}{hint}") from e
    return whole.reshape(self.size(self.batch), math.prod(self.kv_sizes[a] for a in self.heads), *t.shape[-2:])
  def of_scores(self, mask:Tensor) -> Tensor:
    """Reshapes a mask with the call's leading axes to four axes, each full or of size 1: (B or 1, H or 1, Sq or 1, Sk or 1)."""
    mask = mask.reshape(*[1]*(len(self.sizes) + 2 - mask.ndim), *mask.shape)
    for axes in (self.batch, self.heads + self.shared):
      if any(mask.shape[a] > 1 for a in axes): mask = mask.expand(*(self.sizes[a] if a in axes else n for a, n in enumerate(mask.shape)))
    batch, heads = (math.prod(mask.shape[a] for a in axes) for axes in (self.batch, self.heads + self.shared))
    return self.ordered(mask).reshape(batch, heads, *mask.shape[-2:])
  def of_heads(self, sinks:Tensor) -> Tensor:
    """Reshapes sinks (..., 1, 1) with the call's leading axes to (H), one number for each query head."""
    return self.ordered(sinks.expand(*(1 if a in self.batch else n for a, n in enumerate(self.sizes)), 1, 1)).flatten()
  def restored(self, o:Tensor) -> Tensor:
    """Returns the output o (B, H, Sq, Dv) with the leading axes of the call in place of B and H."""
    order = self.batch + self.heads + self.shared
    o = o.reshape(*(self.sizes[a] for a in order), *o.shape[-2:])
    return o.permute(*(order.index(a) for a in range(len(order))), o.ndim - 2, o.ndim - 1)
