"""tinygrad device `EMU`: with `DEV=EMU::gfx942` the emulator runs kernels as lowered for that chip. Begin with `register`."""
from __future__ import annotations
from typing import Any, ClassVar
import hashlib, pickle, sys, weakref, zlib
import numpy as np
from attn.ops.renderers import OperationsHIPTextRenderer, OperationsNVCCRenderer
from attn.tinygrad_compat import (ALLOW_TF32, DEV, Allocator, BufferSpec, Compiled, Compiler, DType, Program,
                                  Renderer, Target, TinyELF, UOp, dtypes, watch_kernels)
from attn.emulator.launch import launch
from attn.emulator.listing import remember
from attn.emulator.memory import Allocation, View
from attn.emulator.chips import emulated_chip
from attn.emulator.plan import Plan

# The renderer is tinygrad's HIPRenderer (CUDARenderer for sm_xx), so a kernel is lowered and rendered as for hardware. The "binary" is the pickled
# list of the rendered UOps. The list has to contain everything that a run needs, because tinygrad lowers several kernels at the same time in worker
# processes. fp8 is not a supported type: tinygrad emulates fp8 with integers, as on hardware without fp8.

DEFAULT_ARCH = "gfx942"

class UOpCompiler(Compiler):
  """Compiler of the emulator. Its binary for a source text is a list, pickled, of the UOps from which the text was rendered."""
  # the UOps of each text that the renderer in this process has rendered: the compiler looks them up
  printed: ClassVar[dict[str, list[UOp]]] = {}
  def __init__(self) -> None: super().__init__(None)   # nothing goes to the disk cache
  @classmethod
  def note(cls, text:str, uops:list[UOp]) -> None:
    while len(cls.printed) >= 64: cls.printed.pop(next(iter(cls.printed)))
    cls.printed[text] = uops
  def compile(self, src:str) -> bytes: return zlib.compress(pickle.dumps(self.printed[src]), 1)

class _Emulated(Renderer):
  """Base class that changes one of tinygrad's GPU renderers so that the emulator can run what it lowers."""
  # another compiler, no fp8, and only the matrix instructions that the chip has
  target: Target
  def adapt(self) -> None:
    self.compiler = UOpCompiler()
    # tinygrad assumes RDNA3's matrix instructions for chips that it doesn't know, such as gfx90a and gfx1030. A chip with longer waves, or without a
    # matrix unit, does not have them.
    chip = emulated_chip(self.target.arch)
    self.tensor_cores = [t for t in self.tensor_cores if t.dtype_in not in dtypes.fp8s and (t.dtype_in != dtypes.float or ALLOW_TF32)
                         and t.threads == chip.wave and chip.multiplies]
  def supported_dtypes(self) -> set[DType]: return super().supported_dtypes() - set(dtypes.fp8s)
  def render(self, uops:list[UOp]) -> str:
    text = super().render(uops)
    UOpCompiler.note(text, uops)
    return text

class EmulatedHIPRenderer(_Emulated, OperationsHIPTextRenderer):
  def __init__(self, target:Target):
    OperationsHIPTextRenderer.__init__(self, target)
    self.adapt()
    self.shared_max = emulated_chip(target.arch).lds   # tinygrad has one limit for all chips

class EmulatedCUDARenderer(_Emulated, OperationsNVCCRenderer):
  def __init__(self, target:Target):
    OperationsNVCCRenderer.__init__(self, target)
    self.adapt()

def renderer_of(target:Target) -> Renderer: return (EmulatedCUDARenderer if target.arch.startswith("sm_") else EmulatedHIPRenderer)(target)

class EMUProgram(Program["EMUDevice"]):
  # The devices EMU:0 and EMU:1 share a plan. The plan is dropped when neither device keeps the program any longer.
  plans: ClassVar[weakref.WeakValueDictionary[tuple[str, str, str], Plan]] = weakref.WeakValueDictionary()
  def __init__(self, dev:EMUDevice, obj:TinyELF):
    key, target = (hashlib.sha256(obj.lib).hexdigest(), obj.name, obj.target.arch), obj.target
    if (found := self.plans.get(key)) is None:
      found = self.plans[key] = Plan(pickle.loads(zlib.decompress(obj.lib)), obj.name, target.arch, lambda: renderer_of(target))
    self.plan = found
  def __call__(self, *bufs:Any, global_size:tuple[int, int, int]=(1, 1, 1), local_size:tuple[int, int, int]|None=(1, 1, 1), vals:tuple[int, ...]=(),
               wait:bool=False, **kwargs:Any) -> float|None:
    seconds = launch(self.plan, list(bufs), vals, global_size, local_size or (1, 1, 1))
    return seconds if wait else None

class EMUAllocator(Allocator["EMUDevice"]):
  def _alloc(self, size:int, options:BufferSpec) -> View: return View(Allocation(size), 0, size)
  def _offset(self, buf:View, size:int, offset:int) -> View: return buf.sub(offset, size)
  def _copyin(self, dest:View, src:memoryview) -> None: dest.fill(np.frombuffer(src, np.uint8))
  def _copyout(self, dest:memoryview, src:View) -> None:
    src.check_written()
    np.frombuffer(dest, np.uint8)[:] = src.data
  def _transfer(self, dest:View, src:View, sz:int, src_dev:Any, dest_dev:Any) -> None:
    source = src.sub(0, sz)
    dest.sub(0, sz).fill(source.data, source.written)

class EMUDevice(Compiled):
  def __init__(self, device:str):
    super().__init__(device, EMUAllocator(self), [EmulatedHIPRenderer, EmulatedCUDARenderer], EMUProgram, arch=DEFAULT_ARCH)
    emulated_chip(self.target.arch)
  @property
  def target(self) -> Target: return DEV.target("EMU", arch=DEFAULT_ARCH)
  def _select_renderer(self) -> Renderer:
    # the arch may change while the device is open: with Context(DEV="EMU::gfx950")
    target = self.target
    if target not in self.cached_renderer:
      emulated_chip(target.arch)
      self.cached_renderer[target] = renderer_of(target)
    return self.cached_renderer[target]

def register() -> None:
  """Registers the device `EMU` in tinygrad, and remembers from now on which kernels are made for `EMU`."""
  if "tinygrad.runtime.ops_emu" in sys.modules: return
  watch_kernels("EMU", remember)
  # tinygrad finds a device by the name of this module
  sys.modules["tinygrad.runtime.ops_emu"] = sys.modules[__name__]
