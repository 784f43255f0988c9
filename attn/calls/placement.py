"""Placement of tensors on devices: which axes of q, k and v may be sharded, and on which devices optional tensors, such as a bias, have to lie."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from attn import values
from attn.problem import INPUT_SCALES
from attn.score.terms import TERM_TENSORS
from attn.tinygrad_compat import Device, DType, Tensor, UOp, device_of, dtypes, new_buffer

# If tensors are sharded along batch or heads, every device holds the inputs of a part of the output, and the devices exchange nothing.
# attn/parallel/context.py says what devices do if the rows of a sequence are divided among them.

# names of the axes of q, k, v and o, by layout
AXES = {"bhsd": ("batch", "heads", "rows", "width"), "bshd": ("batch", "rows", "heads", "width"), "nsd": ("heads", "rows", "width"),
        "thd": ("rows", "heads", "width")}

@dataclass(frozen=True)
class Placement:
  """Devices of a call's tensors, and the axis along which the tensors are divided among the devices."""
  device: str|tuple[str, ...]  # of all tensors
  shared: str|None = None  # "batch", "heads", "keys" (rows of k and v), "rows" (rows of q, k and v); None: each device computes everything
  @property
  def count(self) -> int: return 1 if isinstance(self.device, str) else len(self.device)
  def axis(self, names:tuple[str|None, ...]) -> int|None:
    """Returns the index of the sharded axis in a tensor whose axes have these names, such as "heads"; None if no axis is sharded."""
    return None if self.shared is None or self.shared not in names else names.index(self.shared)

def opened(name:str, device:str) -> str:
  """Opens a device and returns tinygrad's name of it, such as "CUDA" for "cuda:0". Raises ValueError, naming the argument, if that fails."""
  try: device_of(device)
  except Exception as e: raise ValueError(f"{name}={device!r}: this device does not open: {e}") from None   # each backend raises another exception
  return Device.canonicalize(device)

def device_names(name:str, x:Any) -> tuple[str, ...]:
  """Returns tinygrad's names of the devices that `x` names, or raises ValueError if they are no devices, not different, or do not open."""
  if isinstance(x, str) and x: return (opened(name, x),)
  if not isinstance(x, (tuple, list)) or not x or not all(isinstance(part, str) and part for part in x):
    raise values.wrong(name, x, "the name of a device, or the names of several in a tuple, such as ('EMU:0', 'EMU:1')")
  names = tuple(opened(name, part) for part in x)
  if len(set(names)) < len(names): raise ValueError(f"{name}={values.shown(x)}: must be different devices, but some are the same")
  return names

def local_shape(t:Tensor) -> tuple[int, ...]: return tuple(t.uop.max_shard_shape)

def placement_of(q:Tensor, k:Tensor, v:Tensor, layout:str) -> Placement:
  """Returns on which devices q, k and v lie and along which axis, or raises ValueError for a sharding that attn does not support."""
  for name, t in (("k", k), ("v", v)):
    if t.device != q.device:
      raise ValueError(f"{name} is on {t.device} but q on {q.device}: all tensors must be on the same device, or the same devices")
  if q.device is None: raise ValueError("q, k and v are constants without a device: call .contiguous() on a device first")
  if isinstance(q.device, str): return Placement(q.device)
  of = {name: None if t.uop.axis is None else AXES[layout][t.uop.axis] for name, t in (("q", q), ("k", k), ("v", v))}
  match of["q"], of["k"], of["v"]:
    case (None|"batch"|"heads" as q_axis, k_axis, v_axis) if q_axis == k_axis == v_axis: return Placement(q.device, q_axis)
    case "heads", None, None if k.shape[AXES[layout].index("heads")] == 1: return Placement(q.device, "heads")
    case None, "rows", "rows": return Placement(q.device, "keys")
    case "rows", "rows", "rows": return Placement(q.device, "rows")
  raise ValueError(f"q, k and v are sharded along {', '.join(f'{name}: {axis}' for name, axis in of.items())}; supported are all three along "
                   "batch, along heads or along their rows, q along heads with a single key/value head on every device, k and v along "
                   "their rows with q whole, or all three whole")

def extra_axes(name:str, shape:tuple[int, ...]) -> tuple[str|None, ...]:
  """Returns one entry for each axis of the optional tensor `name`: the axis of q, "batch" or "heads", with which that axis may be sharded, or
  None."""
  if (tensor := TERM_TENSORS.get(name)) is not None: return tuple(axis if axis in ("batch", "heads") else None for axis in tensor.names(shape))
  if name in INPUT_SCALES: return tuple(axis if n > 1 else None for axis, n in zip(("batch", "heads"), shape))
  return {"sinks": ("heads",), "kv_lengths": ("batch",), "kv_starts": ("batch",), "cache_seqlens": ("batch",)}.get(name, (None,))

def rows_dimension(name:str) -> int|None:
  """Returns the index of the axis of queries in the tensor `name` that a score term reads, such as "bias"; None for a tensor without this axis."""
  return TERM_TENSORS[name].dimension("rows") if name in TERM_TENSORS else None

def gradient_of_shards(g:UOp, call:UOp) -> tuple[UOp|None, ...]:
  """Gradient function (grad_fxn) of `sharded_with_gradient`: gathers the sharded gradient on the device of the whole tensor."""
  return (Tensor(g).to(call.src[1].device).uop,)

def sharded_with_gradient(t:Tensor, devices:tuple[str, ...], axis:int|None) -> Tensor:
  """Shards a tensor of one device over `devices`, like Tensor.shard, but so that gradients flow back to `t`."""
  # tinygrad 0.14.0 raises an error for the gradient of a shard along an axis.
  if axis is None or not dtypes.is_float(t.dtype): return t.shard(devices, axis)
  sharded = Tensor(t.uop.param_like(0)).shard(devices, axis).uop
  return Tensor(UOp.maketuple(sharded).call(t.uop, grad_fxn=gradient_of_shards).gettuple(0))

def place(name:str, t:Tensor, at:Placement) -> Tensor:
  """Returns an optional tensor, such as a bias, sharded over or copied to the devices `at` of q; raises ValueError if its own devices do not fit."""
  if t.device is None: t = t.clone(at.device if isinstance(at.device, str) else at.device[0])
  if isinstance(at.device, str):
    if t.device != at.device: raise ValueError(f"{name} is on {t.device} but q on {at.device}: all tensors must be on the same device")
    return t
  axis = at.axis(extra_axes(name, tuple(map(int, t.shape))))
  if at.shared == "rows" and t.device == at.device and t.uop.axis is not None and t.uop.axis == rows_dimension(name): return t     # sharded like q
  if not isinstance(t.device, str):
    if t.device != at.device: raise ValueError(f"{name} is on {t.device} but q on {at.device}: all tensors must be on the same devices")
    if t.uop.axis == axis: return t
    t = t.to(at.device[0])
  return sharded_with_gradient(t, at.device, axis)

def of_each_device(t:Tensor, axis:int|None) -> Tensor:
  """Joins the shards `t` of all devices to one tensor that is sharded along `axis`; if `axis` is None, returns `t` itself."""
  return t if axis is None else Tensor(t.uop.unshard(axis))

def empty(shape:tuple[int, ...], dtype:DType, device:str|tuple[str, ...], axis:int|None) -> Tensor:
  """Makes a new buffer of `shape` on each device; several buffers are the shards of one tensor that is sharded along `axis`."""
  return of_each_device(Tensor(new_buffer(shape, dtype, device)), axis)
