"""Timers of kernels on a device."""
from __future__ import annotations
import contextlib, ctypes, math
from collections.abc import Callable, Iterator
from typing import Any
from tinygrad import Device, Tensor
from tinygrad.engine.realize import compile_linear, get_runtime, run_linear
from tinygrad.helpers import GlobalCounters
from tinygrad.uop.ops import Ops, UOp
from attn.tinygrad_compat.uops import new_uop

def compiled(*outputs:Tensor) -> UOp:
  """Returns the schedule that computes `outputs` from realized tensors, with its kernels compiled."""
  return compile_linear(outputs[0].schedule_linear(*outputs[1:]))

def make_current(device:str) -> None:
  """Makes a CUDA device's context the current one; does nothing for other devices."""
  # Another library may have made its own context current, and launches in a foreign context take longer.
  if device.split(":")[0] != "CUDA": return
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check
  check(cuda.cuCtxSetCurrent(Device[device].context))   # type: ignore[attr-defined]

def device_seconds(schedule:UOp) -> float:
  """Runs a compiled schedule and returns its time in seconds, as the device measured it."""
  before = GlobalCounters.time_sum_s
  run_linear(schedule, jit=True, wait=True)
  return GlobalCounters.time_sum_s - before

def run_alone(call:UOp) -> None:
  """Runs a single kernel or copy of a compiled schedule; `call` is its launch."""
  run_linear(new_uop(Ops.LINEAR, (call,)), jit=True)

def cuda_seconds(schedule:UOp, count:int) -> float:
  """Launches the only kernel of a compiled schedule `count` times, and returns the mean seconds of a launch, by CUDA events."""
  from tinygrad.runtime.ops_cuda import cu_time_execution
  call, = (u for u in schedule.toposort() if u.op is Ops.CALL and u.src[0].op is Ops.PROGRAM)
  info, buffers = call.src[0].arg, [call.src[1 + i].buffer for i in call.src[0].arg.globals]
  program, raw = get_runtime(buffers[0].device, call.src[0]), [b.get_buf(b.device) for b in buffers]
  def launch() -> None:
    for _ in range(count): program(*raw, global_size=info.global_size, local_size=info.local_size)
  make_current(buffers[0].device)     # events belong to a context, and cu_time_execution uses the current one
  return (cu_time_execution(launch, True) or math.nan)/count

def cuda_graph_seconds(schedule:UOp, count:int) -> Callable[[], float]:
  """Returns a function that launches a CUDA graph with `count` runs of a compiled schedule; the function returns the mean seconds of one run."""
  # All repetitions use the same buffers. The time is measured by events.
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check, cu_time_execution, encode_args
  calls, nodes = [u for u in schedule.src if u.op is Ops.CALL and u.src[0].op is Ops.PROGRAM], list[Any]()
  graph, instance, kept = cuda.CUgraph(), cuda.CUgraphExec(), list[Any](calls)      # the calls keep their buffers alive
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
  """Context that yields a wrapper of functions: a wrapped function runs in the CUDA context that was current at the beginning, such as PyTorch's."""
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
