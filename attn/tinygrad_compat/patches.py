"""Changes that attn makes to tinygrad within a process, except the changes to CUDA devices (cuda.py)."""
from __future__ import annotations
import contextlib, functools, inspect, numbers, sqlite3, sys, warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any
import numpy as np
from tinygrad import Tensor, codegen, helpers
from tinygrad.dtype import AddrSpace
from tinygrad.engine import jit, realize
from tinygrad.renderer import Renderer
from tinygrad.uop.ops import Ops, UOp
from attn.tinygrad_compat.lowering import without_collections
from attn.tinygrad_compat.uops import with_outputs

ToProgram = Callable[[UOp, Renderer], UOp]   # (AST, or PROGRAM with a source; renderer) -> PROGRAM with machine code

def programs_through(through:Callable[[ToProgram, UOp, Renderer], UOp]) -> None:
  """Makes tinygrad compile each kernel by `through(own, ast, renderer)` from now on, where `own` is the function that tinygrad has used before."""
  own = codegen.do_to_program
  @functools.wraps(own)
  def asked(ast:UOp, renderer:Renderer) -> UOp:
    with without_collections(): return through(own, ast, renderer)
  codegen.do_to_program = asked   # type: ignore[assignment]

def survive_a_damaged_cache() -> None:
  """Makes tinygrad work without its cache file of compiled kernels if the file is damaged or cannot be written."""
  # tinygrad then treats the cache as empty, with a warning, for the rest of the process. Without this change every kernel, including tinygrad's own,
  # would end in an error of sqlite.
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

def method_of_tinygrad(name:str) -> FunctionType|None:
  """Returns the function behind a method of Tensor, or None if another library has replaced tinygrad's method."""
  # With the setting TRACEMETA tinygrad wraps each method; a wrapped method still counts as tinygrad's own.
  method, own = getattr(Tensor, name), next(vars(of)[name] for of in Tensor.__mro__[1:] if name in vars(of))
  return own if method is own or (method.__module__ == own.__module__ and inspect.unwrap(method) is own) else None

def maker_of_latent_cache() -> FunctionType|None:
  """Returns the method by which tinygrad's language models make the KV cache of latent attention, or None without tinygrad.llm."""
  try: from tinygrad.llm.model import MLATransformerBlock
  # The wheel of release 0.14.0 lacks tinygrad.llm.
  except ImportError: return None
  return MLATransformerBlock._init_state     # type: ignore[return-value]

TINYGRAD = str(Path(helpers.__file__).parent)
INSIDE = (str(Path(__file__).parents[1]), TINYGRAD)     # folders of attn and of tinygrad

def levels_to_caller() -> int:
  """Returns the `stacklevel` with which warnings.warn names the user's line: the first line on the stack that is outside attn and tinygrad."""
  frame, level = sys._getframe(1), 1
  while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE): frame, level = frame.f_back, level + 1
  return level

class Rerouted:
  """Redirection of every call of a function to the function `to`, until `end` is called."""
  # Calls through names that were bound earlier are redirected too. `before` is a copy of the original function.
  def __init__(self, function:FunctionType, to:Callable[..., Any]) -> None:
    self.function, self.before = function, FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    self.before.__kwdefaults__ = function.__kwdefaults__
    def called(*args:Any, _to:Callable[..., Any], **kwargs:Any) -> Any: return _to(*args, **kwargs)
    function.__code__, function.__defaults__, function.__kwdefaults__ = called.__code__, None, {"_to": to}
  def end(self) -> None:
    own = self.before
    self.function.__code__, self.function.__defaults__, self.function.__kwdefaults__ = own.__code__, own.__defaults__, own.__kwdefaults__

def input_of(u:UOp) -> int|None:
  """Returns the number of the TinyJit input that a launch's argument `u` is, or is a part of; None if there is no such input."""
  # The argument may be the whole input, a region of it, or one device's part.
  while u.op in (Ops.MSELECT, Ops.SHRINK, Ops.RESHAPE, Ops.BITCAST): u = u.src[0]
  return int(u.arg.slot) if u.op is Ops.PARAM else None

def resolved(u:UOp, inputs:tuple[UOp, ...]) -> UOp:
  """Returns a launch's argument `u` with the TinyJit input in place of its placeholder (PARAM)."""
  # The argument may be the placeholder itself, a region of it, or one device's part. Without a placeholder it is returned unchanged.
  if u.op is Ops.PARAM: return inputs[u.arg.slot]
  if u.op is Ops.MSTACK: return u.replace(src=tuple(resolved(x, inputs) for x in u.src))
  return u.replace(src=(resolved(u.src[0], inputs), *u.src[1:])) if input_of(u) is not None else u

# tinygrad's own function handles a region of an input or one device's part, but not one device's part of a region
realize._resolve = resolved   # type: ignore[assignment]

def with_used_tensors(graph:UOp) -> UOp:
  """Removes from the launches in a graph under TinyJit the tensors that their compiled kernels do not use."""
  # A kernel lacks the parameter for a tensor if tinygrad's simplification has removed all loads of the tensor.
  def used(call:UOp) -> UOp:
    program, tensors = call.src[0], realize.get_call_arg_uops(call)
    if program.op is not Ops.PROGRAM or len(kept := program.arg.globals) == len(tensors): return call
    outs, ins = (tuple(kept.index(n) for n in some) for some in (program.arg.outs, program.arg.ins))
    program = program.replace(arg=replace(program.arg, globals=tuple(range(len(kept))), outs=outs, ins=ins))
    return call.replace(src=(program, *(tensors[n] for n in kept), *(u for u in call.src[1:] if u.is_bound_var)))
  return graph.replace(src=(graph.src[0].replace(src=tuple(map(used, graph.src[0].src))), *graph.src[1:]))

def of_used_tensors(own:Callable[..., None]) -> Callable[..., None]:
  @functools.wraps(own)
  def made(self:jit.GraphRunner, linear:UOp, input_uops:tuple[UOp, ...]=()) -> None: own(self, with_used_tensors(linear), input_uops)
  return made

# tinygrad's graphs pass all tensors of a call in order. If a program lacks one, the programs of an AMD GPU would read the wrong tensors, and CUDA
# refuses the graph: "invalid argument"
jit.GraphRunner.__init__ = of_used_tensors(jit.GraphRunner.__init__)   # type: ignore[method-assign]

def around_gradients(within:Callable[[UOp], contextlib.AbstractContextManager[None]]) -> None:
  """Makes tinygrad compute the gradients of a Tensor inside the context `within(uop of the Tensor)`, from now on."""
  for name in ("gradient", "backward"): setattr(Tensor, name, _around(getattr(Tensor, name), within))

def _around(own:Callable[..., Any], within:Callable[[UOp], contextlib.AbstractContextManager[None]]) -> Callable[..., Any]:
  @functools.wraps(own)
  def taken(self:Tensor, *args:Any, **kwargs:Any) -> Any:
    with within(self.uop): return own(self, *args, **kwargs)
  return taken

def watch_kernels(device:str, built:Callable[[UOp, Callable[[], Any]], None]) -> None:
  """Makes tinygrad call `built(ast, again)` for each kernel of `Tensor.custom_kernel` on `device`, from now on; `again()` makes the kernel once
  more."""
  # `again()` makes the kernel a second time. The outputs of each such kernel become sources of the AST's root, so an output stays a parameter of the
  # program even if simplification removes all its stores.
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

MOST_PLACEHOLDERS = 1024

@functools.lru_cache(MOST_PLACEHOLDERS)
def kept_placeholder(*args:Any) -> UOp: return UOp.placeholder(*args)

def placeholder_like(self:UOp, slot:int, addrspace:AddrSpace=AddrSpace.GLOBAL) -> UOp:
  """Makes a placeholder like tinygrad's method of this name, but returns the identical UOp for equal arguments."""
  # Making them took half of the time of a call of attention.
  assert helpers.all_int(self.shape), "no placeholder-like on symbolic shape"
  return kept_placeholder(self.max_shard_shape, self.dtype, slot, addrspace)

UOp.placeholder_like = placeholder_like   # type: ignore[method-assign]

COMPARED: Any = (UOp, numbers.Number, np.generic)

def _in_tinygrad(frame:FrameType) -> bool: return frame.f_code.co_filename.startswith(TINYGRAD)

@contextlib.contextmanager
def equality_as_uops() -> Iterator[None]:
  """Context in which `x == y` of UOps, in code outside tinygrad, is the UOp x.eq(y), as for Tensors."""
  # Without this context `==` says whether x and y are the same UOp, so `i == j` in a caller's mask would be False without a warning.
  own = UOp.__eq__
  def equal(self:UOp, other:Any) -> Any:
    if _in_tinygrad(sys._getframe(1)): return self is other
    return self.eq(other) if isinstance(other, COMPARED) else NotImplemented
  UOp.__eq__ = equal   # type: ignore[method-assign, assignment]
  try: yield
  finally: UOp.__eq__ = own   # type: ignore[method-assign]
