"""The one module that imports tinygrad internals. tinygrad's kernel API is alpha: it is pinned to one version, and test/test_compat.py
pins every name and signature used here, so that another version fails with one clear sentence and not somewhere in the middle.
"""
from __future__ import annotations
import contextlib, ctypes, functools, math, re
from collections.abc import Callable, Iterator
from typing import Any
from tinygrad import Device, Tensor
from tinygrad.codegen import full_rewrite_to_sink, line_rewrite, pm_linearize_cleanups
from tinygrad.codegen.decomp.transcendental import xexp2, xlog2
from tinygrad.codegen.late.linearizer import linearize
from tinygrad.device import Allocator, Buffer, BufferSpec, Compiled, CompileError, Compiler, Program, TinyELF
from tinygrad.dtype import AddrSpace, DType, dtypes
from tinygrad.engine.realize import capturing
from tinygrad.engine.realize import compile_linear, get_runtime, run_linear
from tinygrad.helpers import ALLOW_TF32, DEV, TRAINING, Context, GlobalCounters, Target
from tinygrad.renderer import Estimates, Renderer
from tinygrad.renderer.cstyle import CStyleLanguage, CUDARenderer, HIPCCRenderer, HIPRenderer, NVCCRenderer
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.uop.spec import glbls as spec_names
from tinygrad.uop.ops import AxisType, GroupOp, KernelInfo, Ops, PatternMatcher, ProgramInfo, UOp, UPat, exec_alu

__all__ = ["ALLOW_TF32", "AddrSpace", "Allocator", "AxisType", "Buffer", "BufferSpec", "CUDARenderer", "CompileError", "Compiled",
           "Compiler", "Context", "DEV", "DType", "Device", "Estimates", "GroupOp", "HIPCCRenderer", "HIPRenderer", "KernelInfo",
           "NVCCRenderer", "NamedHIPCCRenderer", "NamedHIPRenderer", "NamedVectors", "Ops", "Program", "ProgramInfo", "Renderer",
           "TRAINING", "Target", "Tensor", "TinyELF", "UOp", "VECTORS", "VECTOR_ELEMENTS", "allow_dynamic_shared", "capturing", "compiled",
           "cuda_seconds", "decode_instruction", "device_seconds", "double_transcendentals", "dtypes", "dynamic_shared_name",
           "elf_loader", "exec_alu", "foreign_cuda_context", "lower", "opened_devices", "render", "vector_dtype"]

# **** vector-typed values ****
# A fragment is ONE value of a clang vector type and not n scalars: the devectorizer would take a shaped value apart into n UOps, and lowering time
# goes with the number of UOps. A dtype's name is printed as it stands, so the C type itself is the name; every pass sees a scalar of a strange dtype.
class VectorDType(DType):
  """A class of its own, so that a compile worker that unpickles one imports this module."""
  def __repr__(self) -> str: return f"VectorDType({self.name!r})"

VECTORS: dict[DType, tuple[str, int]] = {}   # dtype -> (numpy element type, lanes)
_ELEMENT = {"float32": "float", "uint32": "uint"}

@functools.cache
def vector_dtype(element:str, n:int) -> DType:
  """The dtype of a register vector of `n` elements ("float32" or "uint32"), under the name that HIP and CUDA both have for it, such as float4."""
  dtype = VectorDType(20, 32*n, f"{_ELEMENT[element]}{n}", None)
  VECTORS[dtype] = (element, n)
  return dtype

# With SPEC=2 tinygrad prints each AST as Python and evaluates that, where it must find what `VectorDType.__repr__` names.
spec_names["VectorDType"] = lambda name: next(dtype for dtype in VECTORS if dtype.name == name)

# CUDA declares its vectors of up to four elements, clang none: a HIP source declares those that it names. (Up to clang 20 the attribute stands in
# typedefs only.)
VECTOR_ELEMENTS = {"float": "float", "uint": "unsigned", "int": "int", "short": "short", "half": "_Float16", "bfloat": "__bf16"}

class NamedVectors(CStyleLanguage):
  """What HIPRenderer hands its source to, when this stands behind it among the bases of a class: adds the declarations of vector types."""
  def render_kernel(self, function_name:str, kernel:list[str], bufs:Any, uops:list[UOp], prefix:list[str]|None=None) -> str:
    body = "\n".join(kernel)
    names = sorted(set(re.findall(rf"\b({'|'.join(VECTOR_ELEMENTS)})(\d+)\b", body)), key=lambda x: (x[0], int(x[1])))
    types = [f"typedef {VECTOR_ELEMENTS[element]} {element}{n} __attribute__((ext_vector_type({n})));" for element, n in names]
    return super().render_kernel(function_name, kernel, bufs, uops, [*(prefix or []), *types])

class NamedHIPRenderer(HIPRenderer, NamedVectors): pass
class NamedHIPCCRenderer(HIPCCRenderer, NamedVectors): pass

# **** lowering without a device ****
def lower(sink:UOp, renderer:Renderer) -> list[UOp]:
  """A kernel's AST (a SINK) -> the linear list of UOps that `renderer` prints, by the steps of tinygrad's own `to_program`."""
  with Context(ALLOW_DEVICE_USAGE=0):
    return line_rewrite(linearize(full_rewrite_to_sink(sink, renderer, optimize=sink.tag is None)), pm_linearize_cleanups)

def render(sink:UOp, arch:str) -> str:
  """The HIP (gfx...) or CUDA (sm_...) source of a kernel's AST for `arch`; needs no compiler and no GPU."""
  renderer = DynamicNVCCRenderer(Target("CUDA", "NVCC", arch)) if arch.startswith("sm_") else NamedHIPCCRenderer(Target("AMD", "HIPCC", arch))
  return renderer.render(lower(sink, renderer))

# **** CUDA kernels with more than 48 KB of shared memory ****
# It must be dynamic: declared `extern`, and asked for with the function's attribute and at each launch. tinygrad's CUDAProgram does the latter two
# given `smem`, which nothing in tinygrad gives it: here the kernel's name carries the number.
STATIC_SHARED = 49152

def dynamic_shared_name(name:str, nbytes:int) -> str:
  """The name of a kernel that has `nbytes` of shared memory, in one buffer."""
  return name if nbytes <= STATIC_SHARED else f"{name}_smem{nbytes}"

class _Dynamic(Renderer):
  """And for sm_90 the compiler's target is sm_90a, which has wgmma: tinygrad takes what follows "sm_" for a number, so the renderer's can't be."""
  def __init__(self, target:Target):
    super().__init__(target)
    compiler: Any = self.compiler
    if target.arch == "sm_90": self.compiler = type(compiler)("sm_90a", ptx=compiler.ptx)
  def render_buffer(self, x:UOp) -> str:
    text = super().render_buffer(x)   # type: ignore[misc]
    if x.addrspace is not AddrSpace.LOCAL or x.max_numel()*x.dtype.itemsize <= STATIC_SHARED: return text
    return f"extern {text[:text.rindex('[')]}[];".replace("__align__(16)", "__align__(1024)")    # wgmma's swizzle goes by the address

class DynamicCUDARenderer(_Dynamic, CUDARenderer): pass
class DynamicNVCCRenderer(_Dynamic, NVCCRenderer): pass

def dynamic_shared_program(dev:Any, obj:TinyELF) -> Program[Any]:
  from tinygrad.runtime.ops_cuda import CUDAProgram
  return CUDAProgram(dev, obj, smem=int(found[1]) if (found := re.search(r"_smem(\d+)", obj.name)) else 0)

def allow_dynamic_shared(devices:str|tuple[str, ...]|None) -> None:
  """From now on those of `devices` that are CUDA compile and launch kernels named by `dynamic_shared_name`."""
  for name in (devices,) if isinstance(devices, str) else devices or ():
    if name.split(":")[0] != "CUDA" or (dev := Device[name]).runtime_t is dynamic_shared_program: continue
    dev.runtime_t, dev.cached_renderer = dynamic_shared_program, {}   # type: ignore[assignment]
    dev.renderers = [{CUDARenderer: DynamicCUDARenderer, NVCCRenderer: DynamicNVCCRenderer}.get(r, r) for r in dev.renderers]   # type: ignore[call-overload]
    dev._renderer_name = lambda r: r.__name__.upper().removesuffix("RENDERER").removeprefix("DYNAMIC").removeprefix("CUDA") or "CUDA"   # type: ignore[method-assign]

# **** machine code (attn/isa) ****
# exp2 and log2 of doubles by tinygrad's own expansions: the hardware and LLVM have none (as in tinygrad's AMDLLVMRenderer)
double_transcendentals = PatternMatcher([(UPat(op, dtype=dtypes.double, src=(UPat.var("d"),)), expand)
                                         for op, expand in ((Ops.LOG2, xlog2), (Ops.EXP2, xexp2))])

def decode_instruction(data:bytes, arch:str) -> Any:
  """The instruction that `data` begins with, by tinygrad's own tables of AMD's instruction sets: they have cdna3 with cdna4, rdna3 and rdna4.
  Raises ValueError for one that is not in them."""
  from tinygrad.renderer.amd import decode_inst
  from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF
  from tinygrad.runtime.autogen.amd.rdna4.ins import VBUFFER
  family = "cdna" if arch.startswith("gfx9") else "rdna4" if arch.startswith("gfx12") else "rdna3"
  try: return decode_inst(data, family)
  except ValueError:
    # tinygrad's search leaves out the buffer instructions of RDNA, though it has their tables
    form = {"rdna3": MUBUF, "rdna4": VBUFFER}.get(family)
    if form is None or int.from_bytes(data[:4], "little") >> 26 != {"rdna3": 0b111000, "rdna4": 0b110001}[family]: raise
    return form.from_bytes(data)

def opened_devices(name:str) -> list[Compiled]:
  """The devices of kind `name` that this process has opened."""
  return [Device[d] for d in Device._opened_devices if d.split(":")[0] == name]

# **** timing (bench.py) ****
def compiled(*outputs:Tensor) -> UOp:
  """The schedule that computes `outputs` from tensors that are already there, lowered and compiled."""
  return compile_linear(outputs[0].schedule_linear(*outputs[1:]))

def device_seconds(schedule:UOp) -> float:
  """Runs a compiled schedule; the time that the device says it took."""
  before = GlobalCounters.time_sum_s
  run_linear(schedule, jit=True, wait=True)
  return GlobalCounters.time_sum_s - before

def cuda_seconds(schedule:UOp, count:int) -> float:
  """Seconds of one launch of the only kernel of a compiled schedule on a CUDA device, by events around `count` launches."""
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check, cu_time_execution
  call, = (u for u in schedule.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.PROGRAM)
  info, buffers = call.src[0].arg, [call.src[1 + i].buffer for i in call.src[0].arg.globals]
  program, raw = get_runtime(buffers[0].device, call.src[0]), [b.get_buf(b.device) for b in buffers]
  def launch() -> None:
    for _ in range(count): program(*raw, global_size=info.global_size, local_size=info.local_size)
  check(cuda.cuCtxSetCurrent(program.dev.context))     # events belong to a context, and cu_time_execution takes any
  return (cu_time_execution(launch, True) or math.nan)/count

@contextlib.contextmanager
def foreign_cuda_context() -> Iterator[Callable[[Callable[[], Any]], Callable[[], Any]]]:
  """Another library's context is the current one now and will be again; within, what is given turns a function into one that runs in it."""
  from tinygrad.runtime.autogen import cuda
  theirs = cuda.CUcontext()
  cuda.cuCtxGetCurrent(ctypes.byref(theirs))
  def wrap(fn:Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
      cuda.cuCtxSetCurrent(theirs)
      return fn()
    return run
  try: yield wrap
  finally: cuda.cuCtxSetCurrent(theirs)
