"""What users call. `flash_attention` is a kernel for `Tensor.custom_kernel`; `flash_attention_fn` makes one for other options."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Any, Protocol
from attn.arch import get_arch
from attn.dispatch import choose_tile
from attn.kernels.forward import forward
from attn.problem import Problem, problem_of
from attn.tinygrad_compat import Device, Ops, UOp, dtypes

DTYPE_NAMES = {dtypes.half: "float16", dtypes.bfloat16: "bfloat16", dtypes.float: "float32"}

class Kernel(Protocol):
  """A function for `Tensor.custom_kernel(..., fxn=...)`."""
  def __call__(self, *placeholders:UOp) -> CheckedKernel: ...

@dataclass(frozen=True)
class CheckedKernel:
  """A kernel's AST that looks at the tensors it is called on: tinygrad would run it on a view of an output and drop what it wrote."""
  sink: UOp
  outputs: tuple[str, ...]   # the names of the leading arguments, which the kernel writes
  def call(self, *srcs:UOp, **kwargs:Any) -> UOp:
    for name, src in zip(self.outputs, srcs):
      u = src
      while u.op in (Ops.RESHAPE, Ops.AFTER, Ops.UNSHARD, Ops.CONTIGUOUS): u = u.src[0]
      if u.op not in (Ops.BUFFER, Ops.PARAM):
        raise ValueError(f"{name} is a view or a computed value ({u.op.name} of a buffer): an output must be a whole contiguous buffer, such as "
                         "Tensor.empty(...), or Tensor.empty_like of a sharded tensor; what a kernel writes to a view is lost")
    return self.sink.call(*srcs, **kwargs)

def default_arch() -> str:
  """The architecture of tinygrad's default device. Raises ValueError where that has no matrix unit known to these kernels."""
  device = Device.DEFAULT
  target = Device[device].renderer.target
  if device.split(":")[0] not in ("AMD", "HIP", "EMU"):
    raise ValueError(f"device {device} has no matrix unit that these kernels know: use DEV=AMD on an AMD GPU, or DEV=EMU::gfx942 without one")
  return target.arch

def dtype_name(name:str, u:UOp) -> str:
  if u.dtype not in DTYPE_NAMES: raise NotImplementedError(f"{name} has dtype {u.dtype}: supported are {', '.join(DTYPE_NAMES.values())}")
  return DTYPE_NAMES[u.dtype]

@functools.cache
def flash_attention_fn(*, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd", window:tuple[int, int]=(-1, -1), arch:str|None=None,
                       return_lse:bool=False) -> Kernel:
  """A kernel function for `Tensor.custom_kernel(o, q, k, v, fxn=...)`, or `(o, lse, q, k, v)` when `return_lse`. One object per set of options.

  causal:        False; True or "bottom-right" (query i sees keys j <= i + Sk - Sq); "top-left" (query i sees keys j <= i)
  softmax_scale: factor of the scores, 1/sqrt(D) by default
  layout:        "bhsd", "bshd" or "nsd" (B*H, S, D)
  window:        (left, right) keys seen on each side of the diagonal, itself included; -1 for no bound
  arch:          such as "gfx942"; by default that of tinygrad's default device
  return_lse:    also write the natural-log sum of exponentials, float32 (B, H, Sq)

  q, k, v: float16 or bfloat16; o: float16, bfloat16 or float32. Rows that see no key give o = 0 and lse = -inf.
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  if arch is not None: get_arch(arch)
  outputs = ("o", "lse") if return_lse else ("o",)

  def kernel(*placeholders:UOp) -> CheckedKernel:
    names = (*outputs, "q", "k", "v")
    if len(placeholders) != len(names): raise ValueError(f"{len(placeholders)} tensors given: this kernel takes ({', '.join(names)})")
    t = dict(zip(names, placeholders))
    for name, u in t.items():
      if not all(isinstance(s, int) for s in u.shape): raise NotImplementedError(f"{name} has the symbolic shape {u.shape}: shapes must be integers")
    found = get_arch(arch or default_arch())
    p = problem_of(*[tuple(map(int, t[n].shape)) for n in ("o", "q", "k", "v")], dtypes=[dtype_name(n, t[n]) for n in ("o", "q", "k", "v", *outputs[1:])],
                   lse=tuple(map(int, t["lse"].shape)) if return_lse else None, causal=causal, window=window, softmax_scale=softmax_scale, layout=layout)
    return CheckedKernel(kernel_of(p, found.name)(*placeholders), outputs)
  return kernel

def kernel_of(p:Problem, arch:str) -> Any:
  """The kernel that dispatch chooses for `p` on `arch`, as a function of its placeholders."""
  return forward(p, a := get_arch(arch), choose_tile(p, a))

def flash_attention(o:UOp, q:UOp, k:UOp, v:UOp) -> CheckedKernel:
  """Full attention of (B, H, S, D) tensors: `Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, fxn=flash_attention)[0]`."""
  return flash_attention_fn()(o, q, k, v)
