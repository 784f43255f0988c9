"""Facts about tinygrad's devices, and what tinygrad has for AMD's machine code: ROCm's compiler library comgr, tables of instructions, and expansions
of exp2 and log2 of doubles."""
from __future__ import annotations
import contextlib, ctypes, os, sys, types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from tinygrad import Device
from tinygrad.codegen.decomp.transcendental import xexp2, xlog2
from tinygrad.device import Compiled, Compiler
from tinygrad.dtype import dtypes
from tinygrad.helpers import Context
from tinygrad.renderer.cstyle import CStyleLanguage
from tinygrad.renderer.llvmir import LLVMRenderer
from tinygrad.runtime.support.compiler_cpu import ClangCompiler
from tinygrad.uop.ops import Ops, PatternMatcher, UPat

def device_of(name:str) -> Compiled:
  """Returns the device of this name, also inside tinygrad's `@function`."""
  # `@function` forbids the use of devices, because the Python function that it calls must not run anything. This only looks up a device.
  with Context(ALLOW_DEVICE_USAGE=1): return Device[name]

def c_compiler(name:str) -> str|None:
  """Returns the command by which tinygrad compiles C for a device, or None if tinygrad compiles no C for this device."""
  command = os.environ.get("CC", "clang")
  try: return command if isinstance(device_of(name).renderer.compiler, ClangCompiler) else None
  # A CPU device does not open if the command is missing.
  except FileNotFoundError: return command

def opened_devices(name:str) -> list[Compiled]:
  """Returns the devices of a kind, such as "AMD", that this process has opened."""
  return [Device[d] for d in Device._opened_devices if d.split(":")[0] == name]

# **** properties for kernels of plain UOps ****
@dataclass(frozen=True)
class DeviceAbilities:
  """What a device offers to kernels without matrix instructions: local memory and workgroups."""
  local_memory: int  # bytes that a workgroup may use; 0 if threads are faster without
  serial: bool = False  # the device has no workgroups

def workgroups_of(device:str) -> DeviceAbilities|None:
  """Returns what a device offers to kernels without matrix instructions, or None if tinygrad renders neither C nor LLVM for it."""
  opened = device_of(device)
  if not opened.renderers or not isinstance(renderer := opened.renderer, CStyleLanguage|LLVMRenderer): return None
  if not renderer.has_local: return DeviceAbilities(0, serial=True)
  return DeviceAbilities(0 if is_cpu(opened) else renderer.shared_max if renderer.has_shared else 0)

def is_cpu(device:Any) -> bool:
  """Returns whether a device is a CPU that runs OpenCL, whose local memory is ordinary memory."""
  if type(device).__name__ != "CLDevice": return False
  from tinygrad.runtime.autogen import opencl
  kind = ctypes.c_uint64()
  opencl.clGetDeviceInfo(device.cl_dev, opencl.CL_DEVICE_TYPE, 8, ctypes.byref(kind), None)
  return bool(kind.value & opencl.CL_DEVICE_TYPE_CPU)

# **** the card ****
@dataclass(frozen=True)
class CardFacts:
  """Facts about a card that its device tells, such as the card's name; None for an unknown fact."""
  name: str|None = None
  compute_units: int|None = None
  driver: str|None = None
  render_minor: int|None = None  # number of the card's file, as in /dev/dri/renderD128
  pci: str|None = None  # address on the PCI bus

def card_facts(device:str) -> CardFacts:
  """Returns what an AMD or a CUDA device tells of its card. Other devices tell nothing."""
  opened: Any = device_of(device)
  if type(opened).__name__ == "AMDDevice":
    props = opened.device_props()
    units = props["simd_count"]//props["simd_per_cu"] if props.get("simd_per_cu") else None
    return CardFacts(compute_units=units, render_minor=props.get("drm_render_minor"))
  return cuda_card_facts(opened) if type(opened).__name__ == "CUDADevice" else CardFacts()

def cuda_card_facts(opened:Any) -> CardFacts:
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check
  name, pci, units, version = ctypes.create_string_buffer(100), ctypes.create_string_buffer(20), ctypes.c_int(), ctypes.c_int()
  check(cuda.cuDeviceGetName(name, len(name), opened.cu_device))
  check(cuda.cuDeviceGetPCIBusId(pci, len(pci), opened.cu_device))
  check(cuda.cuDeviceGetAttribute(ctypes.byref(units), cuda.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, opened.cu_device))
  check(cuda.cuDriverGetVersion(ctypes.byref(version)))
  return CardFacts(name.value.decode(), units.value, f"CUDA {version.value//1000}.{version.value%1000//10}", pci=pci.value.decode())

# **** machine code ****
# tinygrad's own expansions of exp2 and log2 of doubles, which the hardware and LLVM don't have (as in tinygrad's AMDLLVMRenderer)
double_transcendentals = PatternMatcher([(UPat(op, dtype=dtypes.double, src=(UPat.var("d"),)), expand)
                                         for op, expand in ((Ops.LOG2, xlog2), (Ops.EXP2, xexp2))])

def decode_instruction(data:bytes, tables:str) -> Any:
  """Decodes the first AMD instruction of `data` by tinygrad's tables "cdna" (cdna3 and cdna4), "rdna3" or "rdna4"."""
  # Raises ValueError for an instruction that is not in the tables.
  from tinygrad.renderer.amd import decode_inst
  from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF
  from tinygrad.runtime.autogen.amd.rdna4.ins import VBUFFER
  try: return decode_inst(data, tables)
  except ValueError:
    # tinygrad's search omits the buffer instructions of RDNA, although it has their tables
    form = {"rdna3": MUBUF, "rdna4": VBUFFER}.get(tables)
    if form is None or int.from_bytes(data[:4], "little") >> 26 != {"rdna3": 0b111000, "rdna4": 0b110001}[tables]: raise
    return form.from_bytes(data)

@contextlib.contextmanager
def without_comgr() -> Iterator[None]:
  """Context in which a HIP renderer can be constructed without loading comgr, ROCm's compiler library."""
  # tinygrad's constructor imports its compilers, and so loads comgr. Here it imports a stand-in. The LLVM inside comgr ends the process if another
  # LLVM is already loaded, for example that of an OpenCL driver.
  name = "tinygrad.runtime.support.compiler_amd"
  if name in sys.modules:
    yield
    return
  stand_in = types.ModuleType(name)
  stand_in.__dict__.update(dict.fromkeys(("HIPCompiler", "HIPCCCompiler"), lambda arch: Compiler()))
  sys.modules[name] = stand_in
  try: yield
  finally: del sys.modules[name]

def comgr_compiler(arch:str) -> Any:
  """Returns tinygrad's compiler that uses ROCm's comgr, or raises AssertionError if that library can't be loaded."""
  from tinygrad.runtime.support.compiler_amd import HIPCompiler
  return HIPCompiler(arch)

def comgr_version() -> tuple[int, int]:
  """Returns the version of the loaded comgr's interface, such as (3, 0)."""
  from tinygrad.runtime.autogen import comgr
  major, minor = ctypes.c_uint64(), ctypes.c_uint64()
  comgr.amd_comgr_get_version(ctypes.byref(major), ctypes.byref(minor))
  return major.value, minor.value
