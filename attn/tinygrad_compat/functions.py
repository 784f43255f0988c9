"""Kernels inside tinygrad's `@function`: buffers that exist once for each call of the function, and corrections of its gradients."""
from __future__ import annotations
import functools, importlib, itertools, math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakSet
from tinygrad.device import canonicalize_device
from tinygrad.dtype import DType
from tinygrad.function import _function, invalid_outputs as of_tinygrad
from tinygrad.mixin import gradient
from tinygrad.schedule import rangeify
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat, shape_to_shape_arg
from attn.tinygrad_compat.uops import new_uop

# `@function` calls a Python function once, makes a UOp (FUNCTION) of the resulting expression, and makes every buffer in the expression an argument.
# The buffers of `new_buffer` are no arguments: they belong to the function, which fills them before it reads them.

def inside_function() -> bool:
  """Returns whether the running code is inside a `@function` of tinygrad, or inside the differentiation of one."""
  return _function.depth > 0

own_buffers: WeakSet[UOp] = WeakSet()     # made inside `@function`, before they have their final numbers

MOST_SHAPES = 1024     # shapes that are kept

@functools.lru_cache(MOST_SHAPES)
def kept_shape(shape:tuple[int, ...]) -> UOp:
  """Returns a shape as the UOp that tinygrad's operation RESHAPE takes; the same shape gives the same UOp."""
  return UOp.sink(shape_to_shape_arg(shape)).simplify().src[0]

def in_shape(buffer:UOp, shape:tuple[int, ...]) -> UOp:
  """Reshapes a flat buffer like UOp.reshape, but in less time."""
  # UOp.reshape simplifies the shape again in each call, which takes 0.1 ms.
  return buffer if len(shape) == 1 else new_uop(Ops.RESHAPE, (buffer, kept_shape(shape)))

def new_buffer(shape:tuple[int, ...], dtype:DType, device:str|tuple[str, ...]) -> UOp:
  """Makes an unfilled buffer on each device; inside `@function`, each call of the decorated function gets another buffer."""
  made = in_shape(UOp.new_buffer(canonicalize_device(device), math.prod(shape), dtype), shape)
  if inside_function(): own_buffers.add(made.buf_uop)
  return made

def copied(u:UOp) -> UOp:
  """Copies a tensor to a new buffer on the same devices."""
  buffer = new_buffer(u.max_shard_shape, u.dtype, u.device)
  if u.axis is not None: buffer = buffer.unshard(u.axis)
  return buffer.after(buffer.store(u))

def buffers_of_function(uret:UOp) -> set[UOp]:
  """Returns the buffers that were made inside a `@function`: each call replaces these buffers by new ones. `uret` is tinygrad's UOp of the call."""
  # These are the buffers that `new_buffer` made, and those without initial content that tinygrad's own code makes inside the function
  # (`Tensor.invalids`).
  return of_tinygrad(uret) | {u for u in uret.backward_slice_with_self if u in own_buffers}

def with_own_buffers(body:UOp, slots:Iterator[int]) -> UOp:
  """Gives the buffers that were made inside a `@function` the numbers from `slots`; `body` is the function's expression."""
  own = buffers_of_function(body)
  buffers = {u: u.replace(arg=replace(u.arg, slot=next(slots))) for u in body.toposort(enter_calls=False)
             if u.op is Ops.BUFFER and (u in own or u.arg.slot < 0)}
  # All numbers change at the same time, so that no buffer gets a number that another one still has.
  return body.substitute(buffers, walk=True)

def with_shared_outputs(body:UOp) -> UOp:
  """Returns the expression `body` of a `@function`, changed so that tinygrad computes each output only once."""
  if body.op is not Ops.TUPLE: return body
  inside = body.toposort(enter_calls=False)
  buffers = {u.src[0]: u for u in inside if u.op is Ops.CONTIGUOUS}
  filled_apart = {u.src[0] for u in inside if u.op is Ops.MSELECT}
  # An output may be copied to a buffer inside the function, for a kernel that reads it. Then the function returns this copy. An output that several
  # devices fill, each its own part, is returned as a copy in a new buffer: tinygrad replaces a returned buffer by the caller's buffer, but misses
  # places where one device fills its part.
  def shared(u:UOp) -> UOp:
    base = u
    while base.op in (Ops.AFTER, Ops.UNSHARD): base = base.src[0]
    return u.contiguous() if base in filled_apart else buffers.get(u, u)
  return body.replace(src=tuple(map(shared, body.src)))

def with_inlined_functions(body:UOp) -> UOp:
  """Marks the calls of `@function`s inside `body`, the expression of another `@function`, so that tinygrad inlines them."""
  # tinygrad compiles only the outermost function separately, and fails at an inner one with the option `precompile`.
  apart = [u for u in body.toposort(enter_calls=False) if u.op is Ops.FUNCTION and u.arg.precompile]
  return body.substitute({u: u.replace(arg=replace(u.arg, precompile=False)) for u in apart})

def prepared_body(uret:UOp) -> UOp:
  """Returns the expression of a `@function` with numbered buffers, with each output computed once, and with inner functions inlined."""
  # The buffers inside get the numbers -1, -2 and so on, so that equal functions become the same UOp. tinygrad's function gives the numbers 0, 1 and
  # so on, one buffer after another: if another buffer still has such a number, the two buffers become one UOp.
  return with_shared_outputs(with_own_buffers(with_inlined_functions(uret), itertools.count(-1, -1)))

tinygrad_function = importlib.import_module("tinygrad.function")     # the package has the decorator under this name
tinygrad_function.invalid_outputs = buffers_of_function     # type: ignore[attr-defined]
for module in (tinygrad_function, gradient): module.renumber_invalid_outputs = prepared_body   # type: ignore[attr-defined]

def compact_params(body:UOp, all_args:tuple[UOp, ...]) -> tuple[UOp, tuple[UOp, ...]]:
  """Renumbers the PARAMs in an expression as 0, 1, ...; returns (expression, arguments that these PARAMs stand for, in the same order)."""
  # tinygrad's own function also counts the PARAMs inside kernels, which have nothing to do with these arguments, and raises an IndexError if a kernel
  # has more PARAMs than there are arguments.
  used = sorted((u for u in body.toposort(enter_calls=False) if u.op is Ops.PARAM), key=lambda u: u.arg.slot)
  return body.substitute({u: u.replace(arg=replace(u.arg, slot=i)) for i, u in enumerate(used)}, walk=True), tuple(all_args[u.arg.slot] for u in used)

gradient._compact_params = compact_params   # type: ignore[assignment]

_wanted: list[set[int]] = []     # for each call being differentiated: indices of the sources whose gradients are wanted. The innermost is last

def wanted_of(names:Iterable[str]) -> set[str]:
  """Returns those of the inputs `names` whose gradients tinygrad needs from the call that is being differentiated; all `names` at other times."""
  # tinygrad knows which gradients are needed, but does not tell the grad_fxn. Outside of a grad_fxn all names are returned, because every input may
  # need a gradient.
  return {name for i, name in enumerate(names) if not _wanted or i in _wanted[-1]}

def inside(own:Callable[..., Any]) -> Callable[..., Any]:
  """Wraps `own`, tinygrad's function that differentiates a call. `inside_function` and `wanted_of` then know the call that is being
  differentiated."""
  @functools.wraps(own)
  def differentiate(ctx:UOp, call:UOp, needed:set[int]) -> tuple[UOp|None, ...]:
    # The gradient of a `@function` becomes a `@function`, too.
    of_function = call.op is Ops.FUNCTION and call.arg.grad_fxn is None
    _function.depth += of_function
    _wanted.append(needed)
    try: return own(ctx, call, needed)
    finally:
      _function.depth -= of_function
      _wanted.pop()
  return differentiate

gradient.call_gradient = inside(gradient.call_gradient)

def path_to_targets(root:UOp, targets:set[UOp]) -> tuple[list[UOp], dict[UOp, bool]]:
  """Returns the UOps through which `root` depends on the tensors `targets`, and {UOp under root: whether the UOp depends on a target}."""
  # tinygrad's own function also walks through the AST of every kernel, which takes half of the time of a gradient.
  on_path: dict[UOp, bool] = {}
  for u in root.toposort(enter_calls=False): on_path[u] = any(x in targets or on_path.get(x, False) for x in u.src)
  return [u for u, is_on in on_path.items() if is_on and u.op is not Ops.DETACH], on_path

gradient._deepwalk = path_to_targets

def inlined_function(call:UOp) -> UOp|None:
  """Replaces a call of a `@function` by the function's expression, with new buffers; returns None if tinygrad compiles the function separately."""
  # Otherwise two such calls in one schedule would write to the same buffers, because equal numbers mean equal buffers.
  return rangeify.resolve_function(call.replace(src=(with_own_buffers(call.src[0], UOp.unique_num), *call.src[1:])))

rangeify.earliest_rewrites = PatternMatcher([(UPat(Ops.FUNCTION, name="call"), inlined_function)]) + rangeify.earliest_rewrites
