"""Changes to tinygrad's CUDA devices: kernels with more than 48 KB of shared memory, kernels given as machine code, and graphs under TinyJit that
read the inputs of the current call."""
from __future__ import annotations
import contextlib, ctypes, functools, re
from collections.abc import Callable, Iterator
from typing import Any
from tinygrad.device import Buffer, MultiBuffer, Program, TinyELF
from tinygrad.dtype import AddrSpace
from tinygrad.engine.realize import get_call_arg_uops, resolve_params, unwrap_multi
from tinygrad.helpers import DEBUG, Context
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops, ProgramInfo, UOp
from attn.tinygrad_compat.devices import device_of
from attn.tinygrad_compat.patches import input_of, resolved

# A kernel with more than 48 KB of shared memory needs dynamic shared memory: declared `extern`, and requested by the function's attribute and at each
# launch. tinygrad's CUDAProgram does the last two if it gets `smem`, but nothing in tinygrad passes it: so attn writes the number into the kernel's
# name. With DEBUG=5 CUDAProgram would print the machine code that it loads, because it expects PTX text.
STATIC_SHARED = 49152

def dynamic_shared_name(name:str, nbytes:int) -> str:
  """Returns the name under which a kernel is compiled; it contains `nbytes` if the kernel needs more shared memory than a static declaration may
  have."""
  # Static shared memory is limited to STATIC_SHARED bytes. A kernel with more uses dynamic shared memory, and `nbytes` becomes a part of its name.
  return name if nbytes <= STATIC_SHARED else f"{name}_smem{nbytes}"

def shared_memory_text(x:UOp, text:str) -> str:
  """Returns the CUDA declaration of a buffer: tinygrad's `text`, or, for more shared memory than a static array may have, an extern array."""
  if x.addrspace is not AddrSpace.LOCAL or x.max_numel()*x.dtype.itemsize <= STATIC_SHARED: return text
  return f"extern {text[:text.rindex('[')]}[];".replace("__align__(16)", "__align__(1024)")    # wgmma's swizzle depends on the address

def dynamic_shared_program(dev:Any, obj:TinyELF) -> Program[Any]:
  from tinygrad.runtime.ops_cuda import CUDAProgram
  with Context(DEBUG=min(DEBUG.value, 4) if obj.lib.startswith(b"\x7fELF") else DEBUG.value):
    return CUDAProgram(dev, obj, smem=int(found[1]) if (found := re.search(r"_smem(\d+)", obj.name)) else 0)

# **** graphs under TinyJit ****
@contextlib.contextmanager
def at_least_one_block() -> Iterator[None]:
  """Context in which a grid whose size depends on Variables has at least one block, as CUDA requires when tinygrad makes a graph."""
  # tinygrad sets every Variable to 0 then, and CUDA refuses a grid without blocks ("CUDA Error 1, invalid argument"). Here such a grid gets one
  # block. The graph gets the real sizes before each launch.
  sizes = ProgramInfo.launch_dims
  def launch_dims(self:ProgramInfo, var_vals:dict[str, int]) -> Any:
    blocks, threads = sizes(self, var_vals)
    return tuple(max(n, 1) for n in blocks), threads if threads is None else tuple(max(n, 1) for n in threads)
  ProgramInfo.launch_dims = launch_dims   # type: ignore[method-assign]
  try: yield
  finally: ProgramInfo.launch_dims = sizes   # type: ignore[method-assign]

def renew_copies(graph:Any, moved:list[int]) -> None:
  """Updates the addresses in copy nodes of a CUDA graph; `moved` has the numbers of these nodes."""
  # The whole graph is instantiated again. Changing a copy in the existing instance would be slower: the copy would then run on multiprocessors
  # instead of the copy engine, and wait until a kernel leaves some of them free (measured on H200s, driver 580).
  from tinygrad.runtime.autogen import cuda
  from tinygrad.runtime.ops_cuda import check
  for node, params, _, _ in (graph.nodes[i] for i in moved): check(cuda.cuGraphMemcpyNodeSetParams(node, ctypes.byref(params)))
  check(cuda.cuGraphExecDestroy(graph.instance))      # an instance that is still running is freed when it ends
  check(cuda.cuGraphInstantiate_v2(ctypes.byref(graph.instance), graph.graph, None, None, 0))

@functools.cache
def with_selected_inputs(graph:type, renew:Callable[[Any, list[int]], None]=renew_copies) -> type:
  """Returns a subclass of tinygrad's class `graph`, in which nodes that use a slice or shard of an input also get the current call's input."""
  # tinygrad itself renews only a node that uses an input as a whole: a node that uses one device's part of an input, or a region of it, would keep
  # the buffer of the first call. A node stays unchanged if its input has the same address as in the call before, because finding the region takes the
  # host a tenth of a millisecond, and changing the graph takes time too.
  class SelectedInputs(graph):   # type: ignore[misc, valid-type]
    def __init__(self, linear:UOp, input_uops:tuple[UOp, ...]=()):
      with at_least_one_block(): super().__init__(linear, input_uops)
      self.selected = list[tuple[int, int, int, UOp]]()     # (node, argument, input, part of the input that it takes)
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
      self.lay = [list[Any]() for _ in input_uops]      # addresses of the inputs in the call before, on each device
    def _access_resources(self, bufs:list[Buffer], write:list[int], new_dependency:Any) -> Any:
      # Returns the earlier graph nodes for which a new node must wait, by the parts of buffers that it reads and writes.
      # tinygrad's own method looks at whole buffers, and at only two buffers of a copy. A node that writes a region may also have the whole buffer as
      # an argument, which tells the memory planner that the buffer is used. It does not read the whole buffer, so this argument is ignored.
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
      if moved: renew(self, moved)
      return super().__call__(input_uops, var_vals, wait)
  return SelectedInputs

def holds(whole:Buffer, part:Buffer) -> bool:
  """Returns whether `part` is a region of the buffer `whole` and smaller than `whole`."""
  ends = [(b.offset, b.offset + b.nbytes) for b in (whole, part)]
  return whole.base is part.base and ends[0] != ends[1] and ends[0][0] <= ends[1][0] and ends[1][1] <= ends[0][1]

def address_of(buffer:Any) -> Any:
  """Returns a buffer's address; on a device without addresses, an object that differs after the buffer has moved."""
  return getattr(buffer._buf, "value", buffer._buf)

def addresses_of(buffer:Any) -> list[Any]:
  """Returns the addresses of a buffer, one for each device on which the buffer lies."""
  return [address_of(b.ensure_allocated()) for b in (buffer.bufs if isinstance(buffer, MultiBuffer) else [buffer])]

# **** installation of both changes ****
def adapt_cuda(devices:str|tuple[str, ...]|None, renderers:dict[type[Renderer], type[Renderer]]) -> None:
  """Changes tinygrad's CUDA devices among `devices`, for the rest of the process: renderers, large shared memory, and graphs under TinyJit."""
  for name in (devices,) if isinstance(devices, str) else devices or ():
    if name.split(":")[0] != "CUDA" or (dev := device_of(name)).runtime_t is dynamic_shared_program: continue
    dev.runtime_t, dev.cached_renderer = dynamic_shared_program, {}   # type: ignore[assignment]
    if isinstance(dev.graph, type): dev.graph = with_selected_inputs(dev.graph)
    dev.renderers = [renderers.get(r, r) for r in dev.renderers]
    dev._renderer_name = lambda r: r.__name__.upper().removesuffix("RENDERER").removeprefix("OPERATIONS").removeprefix("CUDA") or "CUDA"   # type: ignore[method-assign]
