"""Kernels that check the tensors given to them, and the chip of a device."""
from __future__ import annotations
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol
import numpy as np
from attn import values
from attn.cache.kept_programs import has_program
from attn.calls.history import keep_inputs
from attn.chips import Chip, get_chip, other_chip
from attn.chips.matrix import UNIT_BYTES
from attn.compilers.choice import compiled_on
from attn.compilers.renderer import check_opens, require
from attn.functions.symbols import FUNCTION_TENSOR_DTYPES
from attn.ops.renderers import adapt
from attn.problem import INPUT_SCALES, MOD_TENSORS
from attn.score.terms import TERM_TENSORS
from attn.tinygrad_compat import (AddrSpace, AxisType, Device, Ops, Tensor, UOp, ast_of, begins_at, capturing, compile_at_once, copied, device_of,
                                  in_threads, inside_function, with_params, workgroups_of)
from attn.values import FLOATS

MATRIX_DEVICES = ("AMD", "HIP", "EMU", "CUDA")   # devices whose chip may have a matrix unit that the kernels know

PLAIN_DEVICES = (*MATRIX_DEVICES, "CPU", "CL", "METAL", "NV")   # devices that run kernels of plain UOps, without a matrix unit

class KernelFunction(Protocol):
  """Type of the function `fxn` of `Tensor.custom_kernel`: takes a placeholder for each tensor, and returns the kernel."""
  def __call__(self, *placeholders:UOp) -> CheckedKernel: ...

def region(u:UOp) -> tuple[UOp, int, int]|None:
  """Returns the memory that holds a kernel's output `u` as (buffer, first element, number of elements), or None if `u` has no memory of its own."""
  # `u` has memory if it is a buffer, or the `contiguous()` of a slice without gaps: tinygrad then makes no copy, but gives the kernel this part of
  # the buffer. Any other view, and a computed value, has none.
  count, sliced = u.max_numel(), False
  while u.op in (Ops.RESHAPE, Ops.AFTER, Ops.UNSHARD, Ops.CONTIGUOUS, Ops.MSELECT):
    if u.op is Ops.MSELECT and u.has_buffer_identity(after_ok=True): return u.buf_uop, 0, count     # one device's buffer of a tensor on several
    sliced |= u.op is Ops.CONTIGUOUS
    u = u.src[0]
  if u.op in (Ops.BUFFER, Ops.PARAM): return u, 0, count
  if not sliced or inside_function() or (view := u.contiguous_view()) is None: return None
  base = region(view[0])
  return None if base is None else (base[0], base[1] + view[1], count)

def whole_buffer(name:str, u:UOp) -> None:
  """Raises ValueError if a kernel's output `u`, called `name`, is a view or a computed value: what a kernel writes there would be lost."""
  if region(u) is not None: return
  while u.op in (Ops.RESHAPE, Ops.AFTER, Ops.UNSHARD, Ops.CONTIGUOUS): u = u.src[0]
  raise ValueError(f"{name} is a view or a computed value ({u.op.name} of a buffer): an output must be a whole contiguous buffer, such as "
                   "Tensor.empty(...), or Tensor.empty_like of a sharded tensor; what a kernel writes to a view is lost")

def check_output(name:str, u:UOp) -> None:
  """Raises ValueError unless attention can write its output `u`, called `name`: a whole buffer that begins at a multiple of UNIT_BYTES."""
  whole_buffer(name, u)
  if (first := begins_at(u)) % UNIT_BYTES:
    raise ValueError(f"{name} begins at byte {first} of its buffer: kernels write rows by {UNIT_BYTES} bytes, so it must begin at a multiple of that")

def at_a_whole_unit(u:UOp) -> UOp:
  """Returns `u` if it begins at a multiple of 16 bytes in its buffer, otherwise a copy of `u`."""
  # Kernels read rows in units of 16 bytes.
  if not begins_at(u) % UNIT_BYTES: return u
  # The copy is made from the slice itself, because tinygrad's `contiguous()` would read whole vectors at misaligned addresses.
  while u.op is Ops.CONTIGUOUS: u = u.src[0]
  return copied(u)

WORKGROUP_MOST, GRID_MOST = 1024, 2**31 - 1     # most threads of a workgroup, most workgroups: equal on AMD's and NVIDIA's chips
OF_THREADS = (AxisType.WARP, AxisType.LOCAL)

def check_resources(ast:UOp, arch:Chip) -> None:
  """Raises NotImplementedError if a kernel, given as its AST, needs more threads, LDS or workgroups than the chip has."""
  ranges, lds = {u for u in ast.toposort() if u.op is Ops.RANGE}, {}
  for u in ast.toposort():
    if u.op is Ops.BUFFER and u.addrspace is AddrSpace.LOCAL: lds[u.arg] = u.max_numel()*u.dtype.itemsize
  def product(*kinds:AxisType) -> int: return math.prod(int(u.vmax) + 1 for u in ranges if u.arg[-1] in kinds)
  for what, need, most in (("threads of a workgroup", product(*OF_THREADS), WORKGROUP_MOST), ("workgroups", product(AxisType.GLOBAL), GRID_MOST),
                           ("bytes of LDS of a workgroup", sum(lds.values()), arch.lds)):
    if need > most: raise NotImplementedError(f"{ast.arg.name} needs {need} {what}: {arch.name} has {most}")

def checked_ast(program:Callable[..., UOp], arch:Chip, *placeholders:UOp) -> UOp:
  """Returns the AST of the kernel that `program` builds from placeholders, or raises NotImplementedError if the chip is too small for it."""
  # The AST is kept for each `program`, so a caller should pass the identical function object for the same kernel.
  return ast_of(_checked_ast, program, arch, *placeholders)

def _checked_ast(program:Callable[..., UOp], arch:Chip, *placeholders:UOp) -> UOp:
  check_resources(sink := program(*placeholders), arch)
  return sink

@dataclass(frozen=True)
class CheckedKernel:
  """A kernel for tinygrad, as an AST, with checks of the tensors on which the kernel is called."""
  # tinygrad alone would accept a view as an output, run the kernel, and drop the result.
  sink: UOp
  outputs: tuple[str, ...]   # names of the leading arguments, which the kernel writes
  arch: str|None = None      # the chip that the caller named
  gradient: Callable[..., Any]|None = None   # the grad_fxn if the caller gives none
  variables: tuple[UOp, ...] = ()            # bound Variables that the kernel takes besides its tensors
  kept: bool = False         # keep the inputs, so that a gradient can be taken after the outputs are computed
  takes: int|None = None     # number of leading tensors that the kernel uses, None for all; the rest only have to exist when it runs
  small: bool = False        # compile as soon as it is called, unless its device compiles in threads. Other kernels wait, unless an earlier process
                             # has lowered them
  ahead: bool = False        # begin to compile as soon as it is called, if its device compiles in threads
  def call(self, *srcs:UOp, grad_fxn:Callable[..., Any]|None=None, **kwargs:Any) -> UOp:
    for name, src in zip(self.outputs, srcs): check_output(name, src)
    devices = srcs[0].device
    if self.arch is not None:
      for device in (devices,) if isinstance(devices, str) else devices or (): check_device(self.arch, device)
    adapt(devices)
    require(devices)
    gradient, count = grad_fxn or self.gradient, len(self.outputs)
    outputs, inputs, others = srcs[:count], srcs[count:self.takes], srcs[self.takes:] if self.takes else ()
    called = with_params(self.sink, srcs).call(*outputs, *map(at_a_whole_unit, inputs), *others, *self.variables, grad_fxn=gradient, **kwargs)
    if self.kept and gradient is not None: keep_inputs(srcs[:count], srcs[count:], gradient)
    if devices:
      first = devices if isinstance(devices, str) else devices[0]
      renderer = device_of(first).renderer
      if (self.ahead if in_threads(renderer) else self.small) or has_program(called.src[0], renderer): compile_at_once(called, first)
    return called

def default_arch() -> str:
  """Returns the name of the chip of tinygrad's default device, or raises ValueError if no kernel for a matrix unit runs there."""
  device = Device.DEFAULT
  target = device_of(device).renderer.target
  if device.split(":")[0] not in MATRIX_DEVICES:
    raise ValueError(f"device {device} has no matrix unit that these kernels know: use DEV=AMD on an AMD GPU, or DEV=EMU::gfx942 without a GPU")
  return target.arch

def chip_of(name:str, device:str) -> Chip:
  """Returns the `Chip` record of the chip `name` on which `device` runs kernels."""
  # The record has the LLVM release of the device's compiler. Except on the emulator, dispatch may use tile descriptions that a search (TUNE=1) found.
  return replace(compiled_on(get_chip(name), device), tuned=device.split(":")[0] != "EMU")

def named_chip(name:str) -> Chip:
  """Returns the `Chip` record of the chip `name`, which need not be in this machine."""
  # The record has the LLVM release of the compiler of tinygrad's default device.
  try: device = Device.DEFAULT
  except RuntimeError: return get_chip(name)
  return compiled_on(get_chip(name), device)

def device_arch() -> Chip:
  """Returns the chip of tinygrad's default device, or raises ValueError if no kernel of attn runs on this device."""
  if (found := arch_of(device := Device.DEFAULT)) is not None: return found
  raise ValueError(f"device {device} runs none of these kernels: use DEV=AMD on an AMD GPU, DEV=CUDA on an NVIDIA GPU, DEV=CL, DEV=CPU with a clang, "
                   "or DEV=EMU::gfx942 without a GPU")

def arch_of(device:str) -> Chip|None:
  """Returns the chip of a device, or None if no kernel of attn runs on the device."""
  kind = device.split(":")[0]
  if kind in MATRIX_DEVICES:
    try: return chip_of(device_of(device).renderer.target.arch, device)
    except ValueError: pass
  if kind not in PLAIN_DEVICES: return None
  check_opens(device)
  if (means := workgroups_of(device)) is None: return None
  name = device_of(device).renderer.target.arch if kind in MATRIX_DEVICES else kind
  return replace(other_chip(name, means.local_memory, means.serial), tuned=kind != "EMU")

def check_device(arch:str, device:str) -> None:
  """Raises ValueError if `arch` is not the chip of the device on which the kernel will run."""
  if (found := arch_of(device)) is None: raise ValueError(f"arch={arch!r}: no kernel runs on device {device}")
  if found.name != arch.split(":")[0]: raise ValueError(f"arch={arch!r}: must be {found.name!r}, the chip of device {device}")

def numbers_at_hand(t:Tensor) -> np.ndarray|None:
  """Returns the numbers in a tensor if the host can read them at once (a realized tensor on the emulator), otherwise None."""
  # Reading costs nothing for a realized tensor on the emulator. Under TinyJit the captured code will run on other numbers.
  there = isinstance(t.device, str) and t.device.split(":")[0] == "EMU" and t.uop.is_realized and not capturing
  return t.numpy() if there and all(isinstance(n, int) for n in t.shape) else None

TENSOR_DTYPES = {"lse": ("float32",), "sinks": ("float32",), "kv_lengths": ("int32",), "kv_starts": ("int32",), "block_table": ("int32",),
                 "cu_seqlens_q": ("int32",), "cu_seqlens_k": ("int32",), "dropout_seed": ("uint32",), "first_batch_and_head": ("uint32",),
                 **dict.fromkeys(INPUT_SCALES, ("float32",)), **{name: tensor.dtypes for name, tensor in TERM_TENSORS.items()},
                 **dict.fromkeys(MOD_TENSORS, tuple(FUNCTION_TENSOR_DTYPES))}   # tensors with a dtype of their own

def dtype_of(name:str, t:Any) -> str:
  """Returns the name of the tensor's dtype, or raises an error if a tensor called `name`, such as "bias", can't have this dtype."""
  return values.dtype_name(name, t.dtype, TENSOR_DTYPES.get(name, FLOATS))
