"""Stand-in for tinygrad's AMD device. The emulator executes each kernel once; every launch then counts as 50 ms of the stand-in's time. The stand-in
counts programs, launches, and bytes of memory."""
from __future__ import annotations
import collections, sys, types
from typing import Any
from attn.emulator import device as emulated
from attn.tinygrad_compat import BufferSpec, Target

CHIP, SECONDS = "gfx1103", 0.05     # Radeon 780M
PROPERTIES = {"simd_count": 24, "simd_per_cu": 2, "drm_render_minor": 128}     # as KFD and tinygrad name them: 12 compute units
programs, launches, seen = list[str](), collections.Counter[str](), set[tuple[int, ...]]()
memory = {"held": 0, "most": 0}

class AMDProgram(emulated.EMUProgram):
  def __init__(self, dev:Any, obj:Any):
    super().__init__(dev, obj)
    self.name = obj.name
    programs.append(obj.name)
  def __call__(self, *bufs:Any, wait:bool=False, **kwargs:Any) -> float|None:
    launches[self.name] += 1
    if (key := (id(self), *map(id, bufs))) not in seen: super().__call__(*bufs, **kwargs)
    seen.add(key)
    return SECONDS if wait else None

class CountingAllocator(emulated.EMUAllocator):
  def _alloc(self, size:int, options:BufferSpec) -> Any:
    memory["held"] += size
    memory["most"] = max(memory.values())
    return super()._alloc(size, options)
  def _free(self, opaque:Any, options:BufferSpec) -> None: memory["held"] -= opaque.size

class AMDDevice(emulated.EMUDevice):
  def __init__(self, device:str):
    super().__init__(device)
    self.allocator, self.runtime_t = CountingAllocator(self), AMDProgram
  @property
  def target(self) -> Target: return Target("AMD", "", CHIP)
  def device_props(self) -> dict[str, int]: return PROPERTIES

def install() -> None:
  # Makes tinygrad use the stand-in of this module as its device AMD. Must be called before tinygrad opens AMD.
  module: Any = types.ModuleType("tinygrad.runtime.ops_amd")
  module.AMDDevice = AMDDevice
  sys.modules[module.__name__] = module
