"""Kernels for `Tensor.custom_kernel`: `flash_attention` and `flash_attention_fn`."""
from __future__ import annotations
import functools, math
from dataclasses import dataclass, replace
from typing import Any, Protocol
from attn import values
from attn.api.options import KernelOptions
from attn.chips import Chip, get_chip
from attn.choose.dispatch import single_kernel
from attn.compilers.choice import compiled_on
from attn.compilers.renderer import require
from attn.ops.renderers import adapt
from attn.problem import EXTRAS, problem_of
from attn.tinygrad_compat import AddrSpace, AxisType, Device, Ops, UOp
from attn.values import FLOATS

MATRIX_DEVICES = ("AMD", "HIP", "EMU", "CUDA")   # devices that may have a matrix unit that the kernels know

class KernelFunction(Protocol):
  """A function for `Tensor.custom_kernel(..., fxn=...)`."""
  def __call__(self, *placeholders:UOp) -> CheckedKernel: ...

def region(u:UOp) -> tuple[UOp, int, int]|None:
  """(buffer, first element, elements) of what a kernel writes to when it is given `u`; None where that is no memory of u's own. A slice of a buffer
  without gaps is a region of it once it is `contiguous()`: tinygrad gives the kernel that part of the buffer."""
  count, sliced = u.max_numel(), False
  while u.op in (Ops.RESHAPE, Ops.AFTER, Ops.UNSHARD, Ops.CONTIGUOUS):
    sliced |= u.op is Ops.CONTIGUOUS
    u = u.src[0]
  if u.op in (Ops.BUFFER, Ops.PARAM): return u, 0, count
  if not sliced or (view := u.contiguous_view()) is None: return None
  base = region(view[0])
  return None if base is None else (base[0], base[1] + view[1], count)

def whole_buffer(name:str, u:UOp) -> None:
  """Raises ValueError unless `u`, which a kernel is to write, is a buffer or a region of one, and not a view."""
  if region(u) is not None: return
  while u.op in (Ops.RESHAPE, Ops.AFTER, Ops.UNSHARD, Ops.CONTIGUOUS): u = u.src[0]
  raise ValueError(f"{name} is a view or a computed value ({u.op.name} of a buffer): an output must be a whole contiguous buffer, such as "
                   "Tensor.empty(...), or Tensor.empty_like of a sharded tensor; what a kernel writes to a view is lost")

WORKGROUP_MOST, GRID_MOST = 1024, 2**31 - 1     # threads, and workgroups: of AMD's and NVIDIA's chips alike
OF_THREADS = (AxisType.WARP, AxisType.LOCAL)

def check_means(sink:UOp, arch:Chip) -> None:
  """Raises NotImplementedError for a kernel that needs more threads, LDS or workgroups than `arch` has."""
  ranges, lds = {u for u in sink.toposort() if u.op is Ops.RANGE}, {}
  for u in sink.toposort():
    if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL: lds[u.arg] = u.max_numel()*u.dtype.itemsize
  def product(*kinds:AxisType) -> int: return math.prod(int(u.vmax) + 1 for u in ranges if u.arg[-1] in kinds)
  for what, need, most in (("threads of a workgroup", product(*OF_THREADS), WORKGROUP_MOST), ("workgroups", product(AxisType.GLOBAL), GRID_MOST),
                           ("bytes of LDS of a workgroup", sum(lds.values()), arch.lds)):
    if need > most: raise NotImplementedError(f"{sink.arg.name} needs {need} {what}: {arch.name} has {most}")

@dataclass(frozen=True)
class CheckedKernel:
  """A kernel's AST that looks at the tensors it is called on: tinygrad would run it on a view of an output and drop what it wrote."""
  sink: UOp
  outputs: tuple[str, ...]   # the names of the leading arguments, which the kernel writes
  arch: str|None = None      # the chip that its caller named
  def call(self, *srcs:UOp, **kwargs:Any) -> UOp:
    for name, src in zip(self.outputs, srcs): whole_buffer(name, src)
    devices = srcs[0].device
    if self.arch is not None:
      for device in (devices,) if isinstance(devices, str) else devices or (): check_device(self.arch, device)
    adapt(devices)
    require(devices)
    return self.sink.call(*srcs, **kwargs)

def default_arch() -> str:
  """The architecture of tinygrad's default device. Raises ValueError where that has no matrix unit known to these kernels."""
  device = Device.DEFAULT
  target = Device[device].renderer.target
  if device.split(":")[0] not in MATRIX_DEVICES:
    raise ValueError(f"device {device} has no matrix unit that these kernels know: use DEV=AMD on an AMD GPU, or DEV=EMU::gfx942 without one")
  return target.arch

def chip_of(name:str, device:str) -> Chip:
  """The table row of the chip `name` that `device` is. A real one may have tiles that TUNE=1 found."""
  return replace(compiled_on(get_chip(name), device), tuned=device.split(":")[0] != "EMU")

def named_chip(name:str) -> Chip:
  """The table row of the chip `name`, for the compiler of tinygrad's default device. A kernel can be made where there is no device at all."""
  try: device = Device.DEFAULT
  except RuntimeError: return get_chip(name)
  return compiled_on(get_chip(name), device)

def device_arch() -> Chip:
  """The table row of tinygrad's default device."""
  return chip_of(default_arch(), Device.DEFAULT)

def arch_of(device:str) -> Chip|None:
  """The table row of a device's chip; None where it has no matrix unit that the kernels know."""
  if device.split(":")[0] not in MATRIX_DEVICES: return None
  try: return chip_of(Device[device].renderer.target.arch, device)
  except ValueError: return None

def check_device(arch:str, device:str) -> None:
  """Raises ValueError where `arch` is not the chip of the device that is to run a kernel."""
  if (found := arch_of(device)) is None: raise ValueError(f"arch={arch!r}: {device} has no matrix unit that these kernels know")
  if found.name != get_chip(arch).name: raise ValueError(f"arch={arch!r}: {device} is {found.name}, and runs kernels for no other chip")

def static_shape(name:str, shape:tuple[Any, ...]) -> tuple[int, ...]:
  if all(isinstance(s, int) for s in shape): return tuple(map(int, shape))
  raise NotImplementedError(f"{name} has the symbolic shape {values.shown_shape(shape)}: shapes must be integers, a variable number of keys is what "
                            "kv_lengths is for")

TENSOR_DTYPES = {"lse": ("float32",), "alibi_slopes": ("float32",), "sinks": ("float32",), "kv_lengths": ("int32",), "cu_seqlens_q": ("int32",),
                 "cu_seqlens_k": ("int32",)}   # of those whose dtype is given

def dtype_of(name:str, t:Any) -> str:
  """The name of the dtype of a problem's tensor `name`. Raises NotImplementedError for one that it can't have."""
  return values.dtype_name(name, t.dtype, TENSOR_DTYPES.get(name, FLOATS))

def flash_attention_fn(*, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd", window:tuple[int, int]=(-1, -1),
                       softcap:float=0.0, max_seqlen_q:int|None=None, max_seqlen_k:int|None=None, return_lse:bool=False, arch:str|None=None,
                       extras:tuple[str, ...]=()) -> KernelFunction:
  """A kernel function for `Tensor.custom_kernel(o, q, k, v, fxn=...)`, or `(o, lse, q, k, v)` when `return_lse`. One object per set of options.

  causal:        False; True or "bottom-right" (query i sees keys j <= i + Sk - Sq); "top-left" (query i sees keys j <= i)
  softmax_scale: factor of the scores, 1/sqrt(D) by default
  layout:        "bhsd", "bshd" or "nsd" (B*H, S, D), or "thd" (sequences one after another)
  window:        (left, right) keys seen on each side of the diagonal, itself included; -1 for no bound
  arch:          such as "gfx942"; by default that of tinygrad's default device
  return_lse:    also write the natural-log sum of exponentials, float32 (B, H, Sq)
  softcap:       scores become softcap*tanh(score/softcap)
  extras:        names of the tensors that follow v, in this order: alibi_slopes, bias, sinks, kv_lengths, cu_seqlens_q, cu_seqlens_k (see Problem)
  max_seqlen_q, max_seqlen_k: the longest sequence, of layout "thd"

  q, k, v: float16 or bfloat16; o: float16, bfloat16 or float32. Rows that see no key give o = 0 and lse = -inf.
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  options = KernelOptions(causal=causal, softmax_scale=softmax_scale, layout=layout, window=window, softcap=softcap, max_seqlen_q=max_seqlen_q,
                          max_seqlen_k=max_seqlen_k, return_lse=return_lse, arch=arch)
  if not isinstance(extras, (tuple, list)) or list(extras) != [*(names := tuple(name for name in EXTRAS if name in extras))]:
    raise values.wrong("extras", extras, f"some of {', '.join(EXTRAS)}, in this order")
  return _kernel_of(options, names)

@functools.cache
def _kernel_of(options:KernelOptions, extras:tuple[str, ...]) -> KernelFunction:
  outputs = ("o", "lse") if options.return_lse else ("o",)
  def kernel(*placeholders:UOp) -> CheckedKernel:
    names = (*outputs, "q", "k", "v", *extras)
    if len(placeholders) != len(names): raise ValueError(f"{len(placeholders)} tensors given: this kernel takes ({', '.join(names)})")
    t = dict(zip(names, placeholders))
    shapes = {name: static_shape(name, u.shape) for name, u in t.items()}
    found = named_chip(options.arch) if options.arch is not None else device_arch()
    p = problem_of(*[shapes[n] for n in ("o", "q", "k", "v")], dtypes=[dtype_of(n, t[n]) for n in ("o", "q", "k", "v", *outputs[1:])],
                   lse=shapes["lse"] if options.return_lse else None, causal=options.causal, window=options.window,
                   softmax_scale=options.softmax_scale, layout=options.layout, softcap=options.softcap, max_seqlen_q=options.max_seqlen_q,
                   max_seqlen_k=options.max_seqlen_k, extras={n: (shapes[n], dtype_of(n, t[n])) for n in extras})
    sink = single_kernel(p, found)[0](*placeholders)
    check_means(sink, found)
    return CheckedKernel(sink, outputs, options.arch)
  return kernel

def flash_attention(o:UOp, q:UOp, k:UOp, v:UOp) -> CheckedKernel:
  """Full attention of (B, H, S, D) tensors: `Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, fxn=flash_attention)[0]`."""
  return flash_attention_fn()(o, q, k, v)
