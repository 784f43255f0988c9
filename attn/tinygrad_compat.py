"""The one module that imports tinygrad internals. tinygrad's kernel API is alpha: it is pinned to one version, and test/test_compat.py
pins every name and signature used here, so that another version fails with one clear sentence and not somewhere in the middle.
"""
from __future__ import annotations
import contextlib, ctypes, functools, gc, math, os, re, sqlite3, sys, types, warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
import tinygrad
from tinygrad import Device, Tensor, TinyJit, codegen, helpers, schedule
from tinygrad.engine import realize
from tinygrad.codegen import full_rewrite_to_sink, line_rewrite, pm_linearize_cleanups, to_program, to_program_key
from tinygrad.codegen.decomp.transcendental import xexp2, xlog2
from tinygrad.codegen.late.linearizer import linearize
from tinygrad.device import Allocator, Buffer, BufferSpec, Compiled, CompileError, Compiler, MultiBuffer, Program, TinyELF
from tinygrad.dtype import AddrSpace, DType, dtypes, promo_lattice
from tinygrad.engine.realize import capturing, compile_linear, get_call_arg_uops, get_runtime, resolve_params, run_linear, unwrap_multi
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.helpers import ALLOW_TF32, CCACHE, DEBUG, DEV, TRAINING, VIZ, Context, GlobalCounters, Target
from tinygrad.renderer import Estimates, Renderer
from tinygrad.renderer.llvmir import LLVMRenderer
from tinygrad.renderer.cstyle import CStyleLanguage, CUDARenderer, HIPCCRenderer, HIPRenderer, NVCCRenderer
from tinygrad.runtime.support.elf import elf_loader
from tinygrad.schedule.rangeify import pm_mops
from tinygrad.tensor import _apply_map_to_tensors, all_tensors
from tinygrad.uop.spec import glbls as spec_names
from tinygrad.uop.symbolic import symbolic
from tinygrad.uop.ops import (AxisType, GroupOp, KernelInfo, Ops, PatternMatcher, ProgramInfo, RewriteContext, UOp, UOpMetaClass, UPat, exec_alu,
                              graph_rewrite)

__all__ = ["ALLOW_TF32", "AddrSpace", "Allocator", "AxisType", "Buffer", "BufferSpec", "CCACHE", "CStyleLanguage", "CUDARenderer", "CompileError",
           "Compiled", "Compiler", "Context", "DEBUG", "DEV", "DType", "Device", "Estimates", "GlobalCounters", "GroupOp", "HIPCCRenderer",
           "HIPRenderer", "KernelInfo", "MARK", "Means", "NVCCRenderer", "Ops", "PatternMatcher", "Places", "Program", "ProgramInfo", "Renderer",
           "TRAINING", "Target", "Tensor", "TinyELF", "TinyJit", "ToProgram", "UOp", "UPat", "VECTORS", "VIZ", "VectorDType", "adapt_cuda",
           "around_gradients", "buffer_under", "capturing", "comgr_compiler", "comgr_version", "compile_at_once", "compiled", "copy_call",
           "cuda_graph_seconds", "cuda_seconds", "decode_instruction", "device_of", "device_seconds", "differentiated", "double_transcendentals",
           "dtypes", "dynamic_shared_name", "elf_loader", "exec_alu", "foreign_cuda_context", "forget_oldest_kernels", "launch_of", "linear_view",
           "lower", "lowered_with_places", "made_with_places", "make_current", "opened_devices", "program_key", "program_of_launch",
           "programs_through", "put_into_tensors", "remembered", "run_alone", "shared_memory_text", "spec_names",
           "statements", "survive_a_damaged_cache", "tinygrad_folder", "vector_dtype", "watch_kernels", "with_outputs", "with_params",
           "with_selected_inputs", "without_comgr", "workgroups_of", "written_to"]

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
  promo_lattice[dtype] = []     # it goes with itself alone: tinygrad asks for the type of a sum when SPEC=2 has it print one
  return dtype

# With SPEC=2 tinygrad prints each AST as Python and evaluates that, where it must find what `VectorDType.__repr__` names.
spec_names["VectorDType"] = lambda name: next(dtype for dtype in VECTORS if dtype.name == name)

MARK = "// a kernel of attn"   # the first line of a source that is ours: attn/compilers/renderer.py goes by it

# **** what a device has for kernels of plain UOps ****
@dataclass(frozen=True)
class Means:
  """Bytes of local memory that a workgroup may have, 0 where threads do better by themselves; `serial` where there are no workgroups at all."""
  local_memory: int
  serial: bool = False

def workgroups_of(device:str) -> Means|None:
  """Of a device that tinygrad renders C or LLVM for; None of another."""
  opened = Device[device]
  if not opened.renderers or not isinstance(renderer := opened.renderer, CStyleLanguage|LLVMRenderer): return None
  if not renderer.has_local: return Means(0, serial=True)
  return Means(0 if is_cpu(opened) else renderer.shared_max if renderer.has_shared else 0)

def is_cpu(device:Any) -> bool:
  """Whether an OpenCL device is a CPU: what a work-group shares is then memory like any other."""
  if type(device).__name__ != "CLDevice": return False
  from tinygrad.runtime.autogen import opencl
  kind = ctypes.c_uint64()
  opencl.clGetDeviceInfo(device.cl_dev, opencl.CL_DEVICE_TYPE, 8, ctypes.byref(kind), None)
  return bool(kind.value & opencl.CL_DEVICE_TYPE_CPU)

# **** lowering without a device ****
@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
  """Within, Python does not look for cycles of objects: UOps are in none, and walking over all of them took a sixth of a kernel's lowering."""
  enabled = gc.isenabled()
  gc.disable()
  try: yield
  finally:
    if enabled: gc.enable()

def lower(sink:UOp, renderer:Renderer) -> list[UOp]:
  """A kernel's AST (a SINK) -> the linear list of UOps that `renderer` prints, by the steps of tinygrad's own `to_program`."""
  with Context(ALLOW_DEVICE_USAGE=0), _without_collections():
    return line_rewrite(linearize(full_rewrite_to_sink(sink, renderer, optimize=sink.tag is None)), pm_linearize_cleanups)

def compile_at_once(kernel:UOp, device:str) -> None:
  """Lowers and compiles the kernel of a CALL now, in this process. tinygrad starts worker processes, which takes longer than a small kernel does,
  where a schedule has more than one to compile."""
  to_program(kernel.src[0], device_of(device).renderer)

ToProgram = Callable[[UOp, Renderer], UOp]   # a kernel's AST, or its PROGRAM with a source, -> its PROGRAM with machine code

def programs_through(through:Callable[[ToProgram, UOp, Renderer], UOp]) -> None:
  """From now on, in this process, tinygrad asks `through` for a kernel's PROGRAM, giving it its own way to one."""
  own = codegen.do_to_program
  @functools.wraps(own)
  def asked(ast:UOp, renderer:Renderer) -> UOp:
    with _without_collections(): return through(own, ast, renderer)
  codegen.do_to_program = asked   # type: ignore[assignment]

def forget_oldest_kernels(prefix:str, most:int) -> None:
  """Where this process has lowered more than `most` kernels whose names begin with `prefix`, drops the oldest from what tinygrad keeps of them, until
  half as many are left. Without that, tinygrad keeps each for ever. Who has captured a kernel, as TinyJit has, keeps it."""
  if len(codegen.to_program_cache) <= most: return
  ours = [key for key, program in codegen.to_program_cache.items() if program.src[0].arg.name.startswith(prefix)]
  if len(ours) <= most: return
  oldest = ours[:len(ours) - most//2]
  programs, asts = {codegen.to_program_cache.pop(key).key for key in oldest}, {key[0] for key in oldest}
  loaded = [key for key in realize.runtime_cache if key[0] in programs]
  for device in {device for _, device in loaded}: Device[device].synchronize()      # nothing of what is dropped still runs
  for key in loaded: del realize.runtime_cache[key]
  launched = [key for key, linear in schedule.schedule_cache.items() if any(call.src[0].key in asts for call in linear.src)]
  for schedule_key in launched: del schedule.schedule_cache[schedule_key]

def survive_a_damaged_cache() -> None:
  """From now on, in this process, tinygrad's cache of compiled kernels is as good as empty, after a warning, where its file is no database or cannot
  be written. Otherwise every kernel, tinygrad's own as well, ends in an error of sqlite."""
  own = helpers.db_connection
  @functools.cache
  def connection() -> sqlite3.Connection:
    try:
      (opened := own()).execute("BEGIN IMMEDIATE")
      opened.rollback()
      return opened
    except (OSError, sqlite3.Error) as e:
      warnings.warn(f"tinygrad's cache of compiled kernels, {helpers.CACHEDB}, cannot be used: {e}. Nothing is kept there until it is removed; "
                    "CACHEDB names another file", stacklevel=2)
      return sqlite3.connect(":memory:", isolation_level="IMMEDIATE")
  helpers.db_connection = connection

def program_key(ast:UOp, renderer:Renderer) -> tuple[str, ...]:
  """What tinygrad has a PROGRAM depend on, for another process to find it by."""
  key, kind, *rest = to_program_key(ast, renderer)
  return (key.hex(), f"{kind.__module__}.{kind.__qualname__}", *map(str, rest))

def launch_of(program:UOp) -> dict[str, Any]|None:
  """A PROGRAM without its UOps and its machine code, as plain numbers and texts; None where they are not all plain, as with a Variable."""
  info, own = program.arg, program.src[0].arg
  estimates, sizes = own.estimates, (info.global_size, info.local_size)
  numbers = (*info.global_size, *(info.local_size or ()), estimates.ops, estimates.lds, estimates.mem)
  if info.vars or not all(isinstance(n, int) for n in numbers): return None
  return {"name": own.name, "source": program.src[2].arg, "estimates": [estimates.ops, estimates.lds, estimates.mem], "sizes": sizes,
          "slots": [u.arg.slot for u in program.src[1].src if u.op is Ops.PARAM], "globals": info.globals, "outs": info.outs, "ins": info.ins}

def program_of_launch(launch:dict[str, Any], ast:UOp, renderer:Renderer) -> UOp:
  """The PROGRAM of the AST with its source, from what `launch_of` gave."""
  params = {u.arg.slot: u for u in ast.toposort() if u.op is Ops.PARAM}
  sink = UOp(Ops.SINK, src=(), arg=replace(ast.arg, name=launch["name"], estimates=Estimates(*launch["estimates"])))
  linear = UOp(Ops.LINEAR, src=tuple(params[slot] for slot in launch["slots"]))
  global_size, local_size = (tuple(size) if size is not None else None for size in launch["sizes"])
  takes = {name: tuple(launch[name]) for name in ("globals", "outs", "ins")}
  info = ProgramInfo(launch["name"], global_size or (), local_size, **takes, target=renderer.target)
  return UOp(Ops.PROGRAM, src=(sink, linear, UOp(Ops.SOURCE, arg=launch["source"])), arg=info)

# **** CUDA kernels with more than 48 KB of shared memory, and of machine code ****
# Shared memory must then be dynamic: declared `extern`, and asked for with the function's attribute and at each launch. tinygrad's CUDAProgram does
# the latter two given `smem`, which nothing in tinygrad gives it: here the kernel's name carries the number. With DEBUG=5 it prints what it loads as
# text, for it takes that for PTX, which machine code is not.
STATIC_SHARED = 49152

def dynamic_shared_name(name:str, nbytes:int) -> str:
  """The name of a kernel that has `nbytes` of shared memory, in one buffer."""
  return name if nbytes <= STATIC_SHARED else f"{name}_smem{nbytes}"

def shared_memory_text(x:UOp, text:str) -> str:
  """The declaration of a buffer, which makes it dynamic where it has to be."""
  if x.addrspace is not AddrSpace.LOCAL or x.max_numel()*x.dtype.itemsize <= STATIC_SHARED: return text
  return f"extern {text[:text.rindex('[')]}[];".replace("__align__(16)", "__align__(1024)")    # wgmma's swizzle goes by the address

def dynamic_shared_program(dev:Any, obj:TinyELF) -> Program[Any]:
  from tinygrad.runtime.ops_cuda import CUDAProgram
  with Context(DEBUG=min(DEBUG.value, 4) if obj.lib.startswith(b"\x7fELF") else DEBUG.value):
    return CUDAProgram(dev, obj, smem=int(found[1]) if (found := re.search(r"_smem(\d+)", obj.name)) else 0)

def copied_anew(graph:Any, moved:list[int]) -> None:
  """Makes a CUDA graph copy what the parameters of these nodes say now. The graph is instantiated anew: a copy that is changed in an instance is no
  longer one of the copy engine's, but of multiprocessors, and waits until a kernel has left some to it (measured on H200s, driver 580)."""
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check
  for node, params, _, _ in (graph.nodes[i] for i in moved): check(cuda.cuGraphMemcpyNodeSetParams(node, ctypes.byref(params)))
  check(cuda.cuGraphExecDestroy(graph.instance))      # one that still runs is freed when it has ended
  check(cuda.cuGraphInstantiate_v2(ctypes.byref(graph.instance), graph.graph, None, None, 0))

@functools.cache
def with_selected_inputs(graph:type, copy_anew:Callable[[Any, list[int]], None]=copied_anew) -> type:
  """A class of tinygrad's graphs under TinyJit that gives each call the buffers of its own inputs. tinygrad does so for an input that a kernel or a
  copy takes whole, but for one device's part of it, or a region, it keeps the buffers of the first call. What is of an input that lies where it lay
  in the call before stays as it is: to find a region takes the host a tenth of a millisecond, and to change the graph its time, too. `copy_anew`
  changes copies of what lies elsewhere."""
  class SelectedInputs(graph):   # type: ignore[misc, valid-type]
    def __init__(self, linear:UOp, input_uops:tuple[UOp, ...]=()):
      super().__init__(linear, input_uops)
      self.selected = list[tuple[int, int, int, UOp]]()     # (node, argument, input, what it takes of that)
      number = 0
      for call in self.linear.src:
        inputs = [(i, slot, u) for i, u in enumerate(get_call_arg_uops(call)) if (slot := input_of(u)) is not None]
        for _ in unwrap_multi(call, resolve_params(call, input_uops)):
          is_copy = self.nodes[number][3]
          self.selected += [(number, *taken) for taken in inputs if (taken[0] < 2 if is_copy else taken[2].op is not Ops.PARAM)]
          number += 1
      kernels = {node for node in (*self.updatable, *(node for node, *_ in self.selected)) if not self.nodes[node][3]}
      self.of_inputs, self.of_variables = sorted(kernels), sorted({*self.var_vals_replace, *self.launch_dims_replace})
      self.copied = {(node, i): address_of(self.calls[node][2][i]) for node, i, *_ in self.selected if self.nodes[node][3]}
      self.lay = [list[Any]() for _ in input_uops]      # where inputs lay in the call before, on each device
    def _access_resources(self, bufs:list[Buffer], write:list[int], new_dependency:Any) -> Any:
      """What a node waits for, by the regions that it has, of which tinygrad names the whole allocations, and a copy by what it has besides its two.
      A buffer that is given it besides a region of the same, lest the memory planner think it unused, it does not read."""
      call = self.calls[len(self.nodes)]
      regions = [(i, b) for i, b in enumerate(call[2]) if i in write or not any(holds(b, call[2][n]) for n in write)]
      return super()._access_resources([b for _, b in regions], [n for n, (i, _) in enumerate(regions) if i in write], new_dependency)
    def __call__(self, input_uops:tuple[UOp, ...], var_vals:dict[str, int], wait:bool=False) -> float|None:
      lie, moved = [addresses_of(u.buffer) for u in input_uops], list[int]()
      elsewhere = {slot for slot, (now, before) in enumerate(zip(lie, self.lay)) if now != before}
      self.lay = lie
      self.updatable: list[int] = self.of_inputs if elsewhere else self.of_variables   # type: ignore[has-type]
      for node, i, slot, u in self.selected:
        if slot not in elsewhere: continue
        _, params, c_args, is_copy = self.nodes[node]
        found = resolved(u, input_uops).buffer
        buffer = (found.bufs[self.calls[node][0]] if isinstance(found, MultiBuffer) else found).ensure_allocated()
        if not is_copy: setattr(c_args, f"f{i}", buffer._buf)
        elif self.copied[node, i] != (address := address_of(buffer)):
          setattr(params, "srcDevice" if i == 1 else "dstDevice", buffer._buf)
          self.copied[node, i] = address
          moved.append(node)
      if moved: copy_anew(self, moved)
      return super().__call__(input_uops, var_vals, wait)
  return SelectedInputs

def input_of(u:UOp) -> int|None:
  """The number of the input of a TinyJit that an argument of a call is, or takes a region or one device's part of, or a region of that."""
  while u.op in (Ops.MSELECT, Ops.SHRINK, Ops.RESHAPE, Ops.BITCAST): u = u.src[0]
  return int(u.arg.slot) if u.op is Ops.PARAM else None

def holds(whole:Buffer, part:Buffer) -> bool:
  """Whether a buffer is more than a region of the same allocation, which lies in it."""
  ends = [(b.offset, b.offset + b.nbytes) for b in (whole, part)]
  return whole.base is part.base and ends[0] != ends[1] and ends[0][0] <= ends[1][0] and ends[1][1] <= ends[0][1]

def address_of(buffer:Any) -> Any:
  """What tells whether a buffer lies where another one did."""
  return getattr(buffer._buf, "value", buffer._buf)

def addresses_of(buffer:Any) -> list[Any]:
  """The same of a buffer on each of several devices."""
  return [address_of(b.ensure_allocated()) for b in (buffer.bufs if isinstance(buffer, MultiBuffer) else [buffer])]

def adapt_cuda(devices:str|tuple[str, ...]|None, renderers:dict[type[Renderer], type[Renderer]]) -> None:
  """From now on those of `devices` that are CUDA print with these `renderers` in place of tinygrad's, and launch kernels named by
  `dynamic_shared_name`."""
  for name in (devices,) if isinstance(devices, str) else devices or ():
    if name.split(":")[0] != "CUDA" or (dev := device_of(name)).runtime_t is dynamic_shared_program: continue
    dev.runtime_t, dev.cached_renderer = dynamic_shared_program, {}   # type: ignore[assignment]
    if isinstance(dev.graph, type): dev.graph = with_selected_inputs(dev.graph)
    dev.renderers = [renderers.get(r, r) for r in dev.renderers]
    dev._renderer_name = lambda r: r.__name__.upper().removesuffix("RENDERER").removeprefix("OPERATIONS").removeprefix("CUDA") or "CUDA"   # type: ignore[method-assign]

# **** machine code (attn/compilers, attn/isa) ****
# exp2 and log2 of doubles by tinygrad's own expansions: the hardware and LLVM have none (as in tinygrad's AMDLLVMRenderer)
double_transcendentals = PatternMatcher([(UPat(op, dtype=dtypes.double, src=(UPat.var("d"),)), expand)
                                         for op, expand in ((Ops.LOG2, xlog2), (Ops.EXP2, xexp2))])

def decode_instruction(data:bytes, tables:str) -> Any:
  """The instruction that `data` begins with, by tinygrad's own tables of AMD's instruction sets: "cdna" (cdna3 with cdna4), "rdna3" or "rdna4".
  Raises ValueError for one that is not in them."""
  from tinygrad.renderer.amd import decode_inst
  from tinygrad.runtime.autogen.amd.rdna3.ins import MUBUF
  from tinygrad.runtime.autogen.amd.rdna4.ins import VBUFFER
  try: return decode_inst(data, tables)
  except ValueError:
    # tinygrad's search leaves out the buffer instructions of RDNA, though it has their tables
    form = {"rdna3": MUBUF, "rdna4": VBUFFER}.get(tables)
    if form is None or int.from_bytes(data[:4], "little") >> 26 != {"rdna3": 0b111000, "rdna4": 0b110001}[tables]: raise
    return form.from_bytes(data)

def device_of(name:str) -> Compiled:
  """A device by name; within a function of tinygrad's `@function`, too, which may not run anything, but what it is called with is on a device."""
  with Context(ALLOW_DEVICE_USAGE=1): return Device[name]

def opened_devices(name:str) -> list[Compiled]:
  """The devices of kind `name` that this process has opened."""
  return [Device[d] for d in Device._opened_devices if d.split(":")[0] == name]

@contextlib.contextmanager
def without_comgr() -> Iterator[None]:
  """While a renderer of HIP is made that only prints: tinygrad's constructor imports its compilers, and with them loads ROCm's comgr. Its LLVM ends
  the process where another one of the system is loaded already, as Debian's does beside pocl's."""
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
  """tinygrad's compiler over ROCm's comgr. Raises AssertionError, saying so, where that library doesn't load."""
  from tinygrad.runtime.support.compiler_amd import HIPCompiler
  return HIPCompiler(arch)

def comgr_version() -> tuple[int, int]:
  """Of the interface of the comgr that is loaded, such as (3, 0)."""
  from tinygrad.runtime.autogen import comgr
  major, minor = ctypes.c_uint64(), ctypes.c_uint64()
  comgr.amd_comgr_get_version(ctypes.byref(major), ctypes.byref(minor))
  return major.value, minor.value

# **** timing (bench.py) ****
def compiled(*outputs:Tensor) -> UOp:
  """The schedule that computes `outputs` from tensors that are already there, lowered and compiled."""
  return compile_linear(outputs[0].schedule_linear(*outputs[1:]))

def make_current(device:str) -> None:
  """A CUDA device's context becomes the current one, where another library may have made its own so: what is launched in a foreign one takes longer.
  Other devices have none."""
  if device.split(":")[0] != "CUDA": return
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check
  check(cuda.cuCtxSetCurrent(Device[device].context))   # type: ignore[attr-defined]

def device_seconds(schedule:UOp) -> float:
  """Runs a compiled schedule; the time that the device says it took."""
  before = GlobalCounters.time_sum_s
  run_linear(schedule, jit=True, wait=True)
  return GlobalCounters.time_sum_s - before

def run_alone(call:UOp) -> None:
  """Runs one kernel or copy of a compiled schedule."""
  run_linear(UOp(Ops.LINEAR, src=(call,)), jit=True)

def cuda_seconds(schedule:UOp, count:int) -> float:
  """Seconds of one launch of the only kernel of a compiled schedule on a CUDA device, by events around `count` launches."""
  from tinygrad.runtime.ops_cuda import cu_time_execution
  call, = (u for u in schedule.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.PROGRAM)
  info, buffers = call.src[0].arg, [call.src[1 + i].buffer for i in call.src[0].arg.globals]
  program, raw = get_runtime(buffers[0].device, call.src[0]), [b.get_buf(b.device) for b in buffers]
  def launch() -> None:
    for _ in range(count): program(*raw, global_size=info.global_size, local_size=info.local_size)
  make_current(buffers[0].device)     # events belong to a context, and cu_time_execution takes any
  return (cu_time_execution(launch, True) or math.nan)/count

def cuda_graph_seconds(schedule:UOp, count:int) -> Callable[[], float]:
  """A graph in which the kernels of a compiled schedule run one after another, `count` times over on the same buffers. What is returned runs it, in
  the device's context: seconds of one time, by events."""
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check, cu_time_execution, encode_args
  calls, nodes = [u for u in schedule.src if u.op is Ops.CALL and u.src[0].op is Ops.PROGRAM], list[Any]()
  graph, instance, kept = cuda.CUgraph(), cuda.CUgraphExec(), list[Any](calls)      # whoever has the calls has their buffers
  output: Any = calls[0].src[1].buffer
  device = output.device
  make_current(device)
  check(cuda.cuGraphCreate(ctypes.byref(graph), 0))
  for call in calls*count:
    info = call.src[0].arg
    raw = [call.src[1 + i].buffer.get_buf(device) for i in info.globals]
    program: Any = get_runtime(device, call.src[0])
    c_args, vargs = encode_args(raw, (), program.signature)
    params = cuda.CUDA_KERNEL_NODE_PARAMS_v1(program.prg, *info.global_size, *info.local_size, program.smem,
                                             ctypes.cast(0, ctypes.POINTER(ctypes.c_void_p)), vargs)
    node, before = cuda.CUgraphNode(), (cuda.CUgraphNode*1)(*nodes[-1:])
    check(cuda.cuGraphAddKernelNode(ctypes.byref(node), graph, before if nodes else None, len(nodes[-1:]), ctypes.byref(params)))
    nodes.append(node)
    kept += [c_args, vargs]
  check(cuda.cuGraphInstantiate_v2(ctypes.byref(instance), graph, None, None, 0))
  def seconds() -> float:
    make_current(device)
    assert kept
    return (cu_time_execution(lambda: check(cuda.cuGraphLaunch(instance, None)), True) or math.nan)/count
  return seconds

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

# **** views and Variables (attn/calls/views.py) ****
def buffer_under(u:UOp) -> UOp|None:
  """The buffer that `u` is, or is a view of, with what is still to be written to it; None for a computed value."""
  while not u.has_buffer_identity() and u.op in GroupOp.Movement: u = u.src[0]
  inner = u
  while inner.op is Ops.CONTIGUOUS: inner = inner.src[0]
  return u if inner.has_buffer_identity(after_ok=True) and all(isinstance(n, int) for n in u.shape) else None

def _on_top(u:UOp, base:UOp, other:UOp) -> UOp|None:
  """The view of `other` that u is of `base`; None where it is none."""
  views = []
  while u is not base and u.op in GroupOp.Movement:
    views.append(u)
    u = u.src[0]
  if u is not base: return None
  for view in reversed(views): other = view.replace(src=(other, *view.src[1:]))
  return other

def linear_view(u:UOp, *indices:UOp, instead:dict[UOp, UOp]|None=None) -> tuple[UOp, UOp]|None:
  """(buffer, expression) of an element of a view of a buffer: where it lies in the buffer, as a function of the indices. None for what is no view of
  one. `instead` is what the view is cut out by instead of its Variables."""
  if (base := buffer_under(u)) is None: return None
  stand_in = UOp.placeholder((base.max_numel(),), dtypes.uchar, 0).reshape(base.shape)     # the rewrite takes apart what it finds
  view = _on_top(u, base, stand_in)
  assert view is not None
  found = graph_rewrite(view.substitute(instead or {}).index(*indices), pm_mops + symbolic, name="attn view")
  return (base, found.src[1]) if found.op is Ops.INDEX and found.src[0].op is Ops.PARAM and len(found.src) == 2 else None

def copy_call(to:UOp, source:UOp, *held:UOp) -> UOp:
  """The CALL that copies one buffer, or region of one, to another on any device. What is `held` besides, the buffers that they are regions of, is a
  source of it, no more."""
  srcs = (to, source, *held)
  params = [UOp.param(i, x.dtype, x.max_shape, x.device) for i, x in enumerate(srcs)]
  copy = UOp(Ops.COPY, src=(params[1],), arg=to.device).call(*params)
  return UOp(Ops.LINEAR, src=(copy,)).call(*srcs)

def resolved(u:UOp, inputs:tuple[UOp, ...]) -> UOp:
  """An argument of a call, or what it takes one device's part or a region of, in place of the PARAM that stands for it."""
  if u.op is Ops.PARAM: return inputs[u.arg.slot]
  if u.op is Ops.MSTACK: return u.replace(src=tuple(resolved(x, inputs) for x in u.src))
  return u.replace(src=(resolved(u.src[0], inputs), *u.src[1:])) if input_of(u) is not None else u

# tinygrad's own does so for a part or a region, but not for a region's part
realize._resolve = resolved   # type: ignore[assignment]

def written_to(buffer:UOp, kernel:UOp) -> None:
  """Every Tensor that is `buffer`, or a view of it, is from now on what it is after `kernel`, which writes to it. (Tensor.assign has it so for views,
  and for all that was computed from them and not yet realized as well.)"""
  after = buffer.after(kernel)
  for t in [t for ref in list(all_tensors) if (t := ref()) is not None]:
    if (view := _on_top(t.uop, buffer, after)) is not None: t.uop = view

# **** gradients (attn/calls/gradient.py, attn/calls/history.py) ****
def remembered(u:UOp) -> UOp:
  """A buffer after a kernel, which stays that in every expression. When anything that depends on it is computed, tinygrad 0.14.0 puts the bare buffer
  into its place in all expressions, and what another kernel has written to the buffer since is taken for what this one wrote. But not of what has a
  tag, an empty one too."""
  return u.rtag(())

def put_into_tensors(instead:dict[UOp, UOp]) -> None:
  """All Tensors have other UOps in the places of these."""
  _apply_map_to_tensors(instead, name="history")

def around_gradients(within:Callable[[UOp], contextlib.AbstractContextManager[None]]) -> None:
  """From now on, in this process, gradients of a Tensor are taken within `within(its UOp)`."""
  for name in ("gradient", "backward"): setattr(Tensor, name, _around(getattr(Tensor, name), within))

def _around(own:Callable[..., Any], within:Callable[[UOp], contextlib.AbstractContextManager[None]]) -> Callable[..., Any]:
  @functools.wraps(own)
  def taken(self:Tensor, *args:Any, **kwargs:Any) -> Any:
    with within(self.uop): return own(self, *args, **kwargs)
  return taken

def differentiated(outputs:UOp, sources:Sequence[UOp], gradients:Sequence[UOp|None], again:Callable[..., Any]) -> dict[int, UOp]:
  """For a TUPLE of `outputs`, a function of PARAMs of which `sources` are the values, and the gradients of the outputs (None for 0): the gradient of
  each source of floats that they depend on, by its number. Each is computed by itself; `again` is the grad_fxn of them all."""
  slot, given = len(sources), []
  for g in gradients:
    given.append(UOp(Ops.NOOP) if g is None else g.param_like(slot))
    slot += g is not None
  params = {u.arg.slot: u for u in outputs.toposort(enter_calls=False) if u.op is Ops.PARAM and dtypes.is_float(u.dtype)}
  found = compute_gradient(outputs, UOp.maketuple(*given), set(params.values()))
  reached = [i for i, u in params.items() if u in found]
  body = UOp.maketuple(*(found[params[i]] for i in reached))
  call = body.call(*sources, *(g for g in gradients if g is not None), grad_fxn=again)
  return {i: call.gettuple(n) for n, i in enumerate(reached)}

# **** where an operation comes from (attn/emulator) ****
def output_params(sink:UOp) -> tuple[UOp, ...]:
  """The PARAMs that a kernel's AST stores to, in the order of their slots."""
  found = {target for u in sink.toposort() if u.op is Ops.STORE and (target := u.src[0].buf_uop).op is Ops.PARAM}
  return tuple(sorted(found, key=lambda u: u.arg.slot))

def watch_kernels(device:str, built:Callable[[UOp, Callable[[], Any]], None]) -> None:
  """From now on `built(ast, again)` is told of each kernel that `Tensor.custom_kernel` is given for `device`: `again()` makes its AST anew. And the
  outputs of such a kernel are sources of its SINK, so that one whose stores are all simplified away is still a parameter of the program."""
  making: list[Callable[[], Any]] = []
  custom_kernel, call = UOp.custom_kernel, UOp.call
  @functools.wraps(custom_kernel)
  def watched_kernel(*srcs:UOp, fxn:Callable[..., Any], **kwargs:Any) -> list[UOp]:
    def again() -> Any: return fxn(*[UOp.placeholder_like(s, slot=i) for i, s in enumerate(srcs)])
    on = srcs[0].device or ""
    if (on if isinstance(on, str) else on[0]).split(":")[0] != device: return custom_kernel(*srcs, fxn=fxn, **kwargs)
    making.append(again)
    try: return custom_kernel(*srcs, fxn=fxn, **kwargs)
    finally: making.pop()
  @functools.wraps(call)
  def watched_call(self:UOp, *srcs:UOp, **kwargs:Any) -> UOp:
    if not making or self.op is not Ops.SINK: return call(self, *srcs, **kwargs)
    built(ast := with_outputs(self), making[-1])
    return call(ast, *srcs, **kwargs)
  UOp.custom_kernel, UOp.call = watched_kernel, watched_call   # type: ignore[method-assign, assignment]

def with_outputs(sink:UOp) -> UOp:
  """A kernel's AST with its outputs among the sources of its SINK."""
  return sink.replace(src=sink.src + tuple(p for p in output_params(sink) if p not in sink.src))

tinygrad_folder = os.path.dirname(os.path.abspath(tinygrad.__file__)) + os.sep

def with_params(sink:UOp, placeholders:Sequence[UOp]) -> UOp:
  """A kernel's AST that has these placeholders, which it does not use, among its parameters: tinygrad's CUDA graph gives a program every
  tensor of its call under TinyJit, whichever it takes."""
  params = tuple(u for x in placeholders for u in x.toposort() if u.op is Ops.PARAM)
  return sink.replace(src=sink.src + params) if params else sink

Places = dict[UOp, "tuple[str, int]|None"]   # the file and line that a UOp comes from

@contextlib.contextmanager
def _changed(owner:Any, **new:Any) -> Iterator[None]:
  """Within, attributes of tinygrad's are others."""
  old = {name: getattr(owner, name) for name in new}
  for name, value in new.items(): setattr(owner, name, value)
  try: yield
  finally:
    for name, value in old.items(): setattr(owner, name, value)

def made_with_places(make:Callable[[], Any], internal:Callable[[str], bool]) -> tuple[Any, Places]:
  """What `make` gives, and for each UOp made meanwhile the innermost line of Python that is in no `internal` file."""
  places, create = Places(), UOpMetaClass.__call__
  def here() -> tuple[str, int]|None:
    frame: Any = sys._getframe(2)
    while frame is not None and internal(frame.f_code.co_filename): frame = frame.f_back
    return (frame.f_code.co_filename, frame.f_lineno) if frame is not None else None
  def noted(cls:Any, *args:Any, **kwargs:Any) -> UOp:
    if (made := create(cls, *args, **kwargs)) not in places: places[made] = here()
    return made
  with _changed(UOpMetaClass, __call__=noted): return make(), places

def lowered_with_places(sink:UOp, renderer:Renderer, places:Places) -> list[UOp]:
  """`lower`, with the places of what each pass puts in the place of other UOps added."""
  unified, walk, replace = RewriteContext.unified_rewrite, RewriteContext.walk_rewrite, UOp.replace
  def inherit(new:UOp, old:UOp) -> UOp:
    if places.get(new) is None and (place := places.get(old)) is not None: places[new] = place
    return new
  def noted(rewrite:Callable[..., UOp]) -> Callable[..., UOp]:
    def run(self:RewriteContext, root:UOp) -> UOp:
      result = rewrite(self, root)
      for old, new in self.replace.items(): inherit(new, old)
      return result
    return run
  with (_changed(RewriteContext, unified_rewrite=noted(unified), walk_rewrite=noted(walk)),
        _changed(UOp, replace=lambda self, **kwargs: inherit(replace(self, **kwargs), self))):
    return lower(sink, renderer)

def statements(renderer:Any, uops:list[UOp]) -> tuple[str, dict[UOp, int]]:
  """The source that `renderer` prints for a program, and for each UOp the line of it (from 0) that it is printed in: its own statement, or the one of
  the first UOp that takes it as part of an expression."""
  printed: list[tuple[UOp, str]] = []
  rules = renderer.string_rewrite
  class Noted:
    def rewrite(self, u:UOp, ctx:Any=None) -> str|None:
      if (text := rules.rewrite(u, ctx)) is not None: printed.append((u, text))
      return text
  renderer.string_rewrite = Noted()
  try: name, kernel, buffers = renderer._render(uops)
  finally: renderer.string_rewrite = rules
  source, at, lines = renderer.render_kernel(name, kernel, buffers, uops), 0, dict[UOp, int]()
  line = source[:source.index("\n".join(kernel))].count("\n")
  for u, text in printed:
    if at == len(kernel): break
    statement = " ".join(kernel[at].split())     # long lines may have been broken since
    own = " ".join(text.split())
    if statement == own or re.fullmatch(rf"[\w ]+ \w+ = {re.escape(own)};?", statement):     # the UOp itself, or a declaration of its value
      lines[u] = line
      line, at = line + kernel[at].count("\n") + 1, at + 1
  stated = set(lines)
  for u in reversed(uops):                # what uses a value comes after it, and has its line by now
    if u in lines: lines |= {s: lines[u] for s in u.src if s not in stated}
  return source, lines
