"""Compiles kernels for CUDA in threads: while NVRTC compiles one kernel, Python builds and lowers the next one."""
from __future__ import annotations
import functools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from tinygrad import codegen
from tinygrad.codegen import to_program, to_program_key
from tinygrad.device import Compiler
from tinygrad.engine import realize, worker
from tinygrad.helpers import DEBUG, Context, diskcache_get, diskcache_put
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops, UOp
from attn.tinygrad_compat.devices import device_of
from attn.tinygrad_compat.lowering import with_attributes
from attn.tinygrad_compat.patches import ToProgram, programs_through
from attn.tinygrad_compat.uops import new_uop

IN_THREADS = ("CUDA",)     # devices whose compiler runs while Python runs
SHOWS_MACHINE_CODE = 7     # value of DEBUG from which tinygrad prints machine code as it compiles
COMPILER_THREADS = 4
OF_ATTN = "attn_"          # beginning of the names of attn's kernels
# Most kernels of a schedule that are lowered in this process. tinygrad's worker processes lower kernels at the same time, but need a second to start.
MOST_LOWERED_HERE = 12

@functools.cache
def threads() -> ThreadPoolExecutor: return ThreadPoolExecutor(COMPILER_THREADS, "attn_compile")

class InThread(Compiler):
  """Compiler for tinygrad that hands the source to the compiler `own` in another thread, and at once returns empty machine code."""
  def __init__(self, own:Compiler) -> None:
    super().__init__()
    self.own, self.code = own, Future[bytes]()
  def compile_cached(self, src:str) -> bytes:
    found = None if self.own.cachekey is None else diskcache_get(self.own.cachekey, src)
    if found is None: self.code = threads().submit(self.own.compile, src)
    else: self.code.set_result(found)
    return b""

@dataclass(frozen=True)
class Begun:
  """A kernel whose compilation has begun in a thread; `program` is its PROGRAM, still without machine code."""
  program: UOp
  compiler: InThread
  def finished(self) -> UOp:
    """Waits for the thread; returns the PROGRAM with machine code, and stores the machine code in tinygrad's cache on disk."""
    *rest, source, _ = self.program.src
    code, table = self.compiler.code.result(), self.compiler.own.cachekey
    if table is not None: diskcache_put(table, source.arg, code)
    return self.program.replace(src=(*rest, source, new_uop(Ops.BINARY, arg=code)))

begun = dict[tuple[Any, ...], Begun]()     # kernels that are being compiled, by tinygrad's key of a PROGRAM

def in_threads(renderer:Renderer) -> bool:
  """Returns whether kernels of this renderer (those for CUDA) are compiled in threads."""
  return renderer.target.device in IN_THREADS and DEBUG < SHOWS_MACHINE_CODE

def begin(ast:UOp, renderer:Renderer) -> None:
  """Lowers a kernel's AST and begins to compile it in a thread. `finished_program` returns the result."""
  if (key := to_program_key(ast, renderer)) in codegen.to_program_cache or key in begun: return
  compiler = InThread(renderer.compiler)
  with with_attributes(renderer, compiler=compiler): begun[key] = Begun(codegen.do_to_program(ast, renderer), compiler)

def finished_program(ast:UOp, renderer:Renderer) -> UOp|None:
  """Waits until a kernel that `begin` has started is compiled, and returns its PROGRAM; None if `begin` was not called for it."""
  return None if (found := begun.pop(to_program_key(ast, renderer), None)) is None else found.finished()

def compile_at_once(launch:UOp, device:str) -> None:
  """Lowers the kernel of a launch in this process, without worker processes, and compiles it, for CUDA in a thread."""
  # `launch` is tinygrad's CALL. Without this, tinygrad would start worker processes for a schedule with several kernels, which takes longer than
  # compiling a small kernel.
  (begin if in_threads(renderer := device_of(device).renderer) else to_program)(launch.src[0], renderer)

def is_of_attn(ast:UOp) -> bool:
  """Returns whether an AST, or a PROGRAM without machine code, is a kernel of attn."""
  return getattr((ast if ast.op is Ops.SINK else ast.src[0]).arg, "name", "").startswith(OF_ATTN)

Task = tuple[int, tuple[UOp, Renderer], dict[str, Any]]      # number of a kernel in its schedule, what to compile, and tinygrad's settings

class LoweredHere:
  """Replaces tinygrad's pool of worker processes: lowers a schedule of a few CUDA kernels, one of them attn's, in this process instead."""
  # `pool` starts tinygrad's processes. If a schedule has only a few kernels, all for CUDA, and one of them is of attn, its kernels are lowered one
  # after another in this process instead, and compiled in threads.
  def __init__(self, pool:Callable[[], Any]) -> None: self.pool = pool
  def imap_unordered(self, compile_kernel:Callable[[Task], tuple[int, UOp]], tasks:Iterable[Task]) -> Iterator[tuple[int, UOp]]:
    few = (tasks := list(tasks))[:MOST_LOWERED_HERE + 1]
    here = (len(few) <= MOST_LOWERED_HERE and worker.worker_pool is None and all(in_threads(renderer) for _, (_, renderer), _ in few) and
            any(is_of_attn(ast) for _, (ast, _), _ in few))
    if not here: return iter((map if (pool := self.pool()) is None else pool.imap_unordered)(compile_kernel, tasks))
    for _, what, settings in sorted(tasks, key=lambda task: -len(task[1][0].toposort())):     # the largest kernel takes longest to compile
      with Context(**settings): begin(*what)
    return map(compile_kernel, tasks)

@functools.cache
def lower_few_kernels_here() -> None:
  """Makes tinygrad lower schedules of a few CUDA kernels, one of them attn's, in this process instead of worker processes, from now on."""
  pool = realize.get_worker_pool
  def through(make_program:ToProgram, ast:UOp, renderer:Renderer) -> UOp:
    return make_program(ast, renderer) if (program := finished_program(ast, renderer)) is None else program
  programs_through(through)
  realize.get_worker_pool = lambda: LoweredHere(pool)
