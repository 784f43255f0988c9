"""Sharded tensors: what may be sharded over devices, where an optional tensor then has to lie, and the merge of attention over shards of the keys.

Along batch or heads every device has all that its part of the output takes, and nothing is communicated. Along the keys each device computes
attention over its own keys, normalised, with the log of its sum of exponentials (LSE), and the parts are averaged with weights exp(LSE).
"""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.tinygrad_compat import DType, Tensor, UOp

# what the axes of q, k, v and o are
AXES = {"bhsd": ("batch", "heads", "rows", "width"), "bshd": ("batch", "rows", "heads", "width"), "nsd": ("heads", "rows", "width"),
        "thd": ("rows", "heads", "width")}

@dataclass(frozen=True)
class Placement:
  """`device` of all tensors, and what of the problem its several devices share out: "batch", "heads", "keys" or None (each computes all of it)."""
  device: str|tuple[str, ...]
  shared: str|None = None
  @property
  def count(self) -> int: return 1 if isinstance(self.device, str) else len(self.device)
  def axis(self, names:tuple[str|None, ...]) -> int|None:
    """The axis that is sharded of a tensor whose axes are `names`."""
    return None if self.shared is None or self.shared not in names else names.index(self.shared)

def local_shape(t:Tensor) -> tuple[int, ...]: return tuple(t.uop.max_shard_shape)

def placement_of(q:Tensor, k:Tensor, v:Tensor, layout:str) -> Placement:
  """Where q, k and v lie. Raises ValueError where that is not one of the ways that Placement knows."""
  for name, t in (("k", k), ("v", v)):
    if t.device != q.device:
      raise ValueError(f"{name} is on {t.device} but q on {q.device}: all tensors must be on the same device, or the same devices")
  if q.device is None: raise ValueError("q, k and v are constants without a device: .contiguous() on a device first")
  if isinstance(q.device, str): return Placement(q.device)
  of = {name: None if t.uop.axis is None else AXES[layout][t.uop.axis] for name, t in (("q", q), ("k", k), ("v", v))}
  match of["q"], of["k"], of["v"]:
    case (None|"batch"|"heads" as q_axis, k_axis, v_axis) if q_axis == k_axis == v_axis: return Placement(q.device, q_axis)
    case "heads", None, None if k.shape[AXES[layout].index("heads")] == 1: return Placement(q.device, "heads")
    case None, "rows", "rows": return Placement(q.device, "keys")
  raise ValueError(f"q, k and v are sharded along {', '.join(f'{name}: {axis}' for name, axis in of.items())}; supported are all three along "
                   "batch or along heads, q along heads with a single key/value head on every device, k and v along their rows with q "
                   "whole, or all three whole")

def extra_axes(name:str, shape:tuple[int, ...]) -> tuple[str|None, ...]:
  """What the axes of an optional tensor are."""
  if name == "alibi_slopes": return ("batch", "heads")[2 - len(shape):]
  if name == "bias": return tuple(axis if n > 1 else None for axis, n in zip(("batch", "heads", None, None), shape))
  return {"sinks": ("heads",), "kv_lengths": ("batch",), "kv_starts": ("batch",), "cache_seqlens": ("batch",)}.get(name, (None,))

def place(name:str, t:Tensor, at:Placement) -> Tensor:
  """An optional tensor, wherever it is, laid out as the placement needs it."""
  if t.device is None: t = t.to(at.device if isinstance(at.device, str) else at.device[0]).contiguous()
  if isinstance(at.device, str):
    if t.device != at.device: raise ValueError(f"{name} is on {t.device} but q on {at.device}: all tensors must be on the same device")
    return t
  axis = at.axis(extra_axes(name, tuple(map(int, t.shape))))
  if not isinstance(t.device, str):
    if t.device != at.device: raise ValueError(f"{name} is on {t.device} but q on {at.device}: all tensors must be on the same devices")
    if t.uop.axis == axis: return t
    t = t.to(at.device[0])
  return t.shard(at.device, axis)

def empty(shape:tuple[int, ...], dtype:DType, device:str|tuple[str, ...], axis:int|None) -> Tensor:
  """A whole buffer, or one on each device of a tensor sharded along `axis` whose shards have `shape`."""
  u = UOp.empty(shape, dtype=dtype, device=device)
  return Tensor(u if axis is None else u.unshard(axis))

def on_device(t:Tensor, i:int) -> Tensor:
  """What the i-th device holds of a tensor on several, without a copy."""
  u = t.contiguous().realize().uop     # the shards are buffers from here on
  return Tensor((u.src[0] if t.uop.axis is not None else u).mselect(i))

def merge_devices(parts:list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
  """(o, lse), whole on every device, of what each device found of them over its own keys: o (..., rows, width) float32, lse (..., rows)."""
  def stack(tensors:list[Tensor]) -> Tensor:
    first, *rest = [t.unsqueeze(0).contiguous().uop for t in tensors]
    return Tensor(first.mstack(*rest).unshard(0))
  o, lse = stack([part[0] for part in parts]), stack([part[1] for part in parts])
  m = lse.max(0)
  weight = (lse - (m == -math.inf).where(0.0, m)).exp()
  total = weight.sum(0)
  mean = (o*weight.unsqueeze(-1)).sum(0)/(total == 0).where(1.0, total).unsqueeze(-1)
  return mean, (total == 0).where(-math.inf, (m == -math.inf).where(0.0, m) + total.log())
