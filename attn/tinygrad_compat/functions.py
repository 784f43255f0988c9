"""Kernels inside tinygrad's `@function`: buffers that belong to the function, and its gradients.

`@function` calls a Python function once, makes a FUNCTION of the resulting expression, and passes every buffer in the expression as an argument. A
buffer whose first content is Invalid is no argument: it belongs to the function, which only writes it."""
from __future__ import annotations
import functools, importlib, itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from tinygrad.dtype import DType
from tinygrad.function import _function, invalid_outputs
from tinygrad.mixin import gradient
from tinygrad.schedule import rangeify
from tinygrad.uop.ops import Ops, PatternMatcher, UOp, UPat

def inside_function() -> bool:
  """Returns whether `@function` is calling a Python function now, or differentiates one."""
  return _function.depth > 0

def new_buffer(shape:tuple[int, ...], dtype:DType, device:str|tuple[str, ...]) -> UOp:
  """Makes a buffer, one on each device, whose content a kernel is to write. Inside `@function` the buffer belongs to the function."""
  return (UOp.invalids if inside_function() else UOp.empty)(shape, dtype=dtype, device=device)

def copied(u:UOp) -> UOp:
  """Copies a value to a new buffer on the same devices."""
  buffer = new_buffer(u.max_shard_shape, u.dtype, u.device)
  if u.axis is not None: buffer = buffer.unshard(u.axis)
  return buffer.after(emptied(buffer).store(u))

def emptied(u:UOp) -> UOp:
  """Returns a new buffer without its first content. tinygrad treats the elements of a buffer whose first content is Invalid as Invalid, even after
  values have been stored to them."""
  return u.substitute({x: x.src[0] for x in u.toposort() if x.op is Ops.AFTER}, walk=True)

def with_own_buffers(body:UOp, slots:Iterator[int]) -> UOp:
  """Numbers the buffers that belong to a FUNCTION anew, all at once."""
  own = invalid_outputs(body)
  buffers = {u: u.replace(arg=replace(u.arg, slot=next(slots))) for u in body.toposort(enter_calls=False)
             if u.op is Ops.BUFFER and (u in own or u.arg.slot < 0)}
  return body.substitute(buffers, walk=True)

def with_shared_outputs(body:UOp) -> UOp:
  """Makes the body of a FUNCTION return a buffer that it fills anyway: if the body copies an output to a buffer, as an input of a kernel, the copy
  replaces the output. Otherwise tinygrad would compute both."""
  if body.op is not Ops.TUPLE: return body
  buffers = {u.src[0]: u for u in body.toposort(enter_calls=False) if u.op is Ops.CONTIGUOUS}
  return body.replace(src=tuple(buffers.get(u, u) for u in body.src))

def numbered(uret:UOp) -> UOp:
  """Gives the buffers inside a FUNCTION the numbers -1, -2 and so on, so that equal functions are the same UOp. tinygrad's own code gives the numbers
  0, 1 and so on, by one replacement after another. Then two buffers may become the same: if a new number is the old number of another buffer in the
  function, or the number of a tensor's buffer."""
  return with_shared_outputs(with_own_buffers(uret, itertools.count(-1, -1)))

for module in (importlib.import_module("tinygrad.function"), gradient): module.renumber_invalid_outputs = numbered   # type: ignore[attr-defined]

def compact_params(body:UOp, all_args:tuple[UOp, ...]) -> tuple[UOp, tuple[UOp, ...]]:
  """Numbers the PARAMs of a gradient's body anew, and returns the body with the arguments that it uses. tinygrad's own function also counts the
  PARAMs inside the body's kernels, which have nothing to do with the arguments: it raises an IndexError if a kernel has more PARAMs."""
  used = sorted((u for u in body.toposort(enter_calls=False) if u.op is Ops.PARAM), key=lambda u: u.arg.slot)
  return body.substitute({u: u.replace(arg=replace(u.arg, slot=i)) for i, u in enumerate(used)}, walk=True), tuple(all_args[u.arg.slot] for u in used)

gradient._compact_params = compact_params   # type: ignore[assignment]

def inside(own:Callable[..., Any]) -> Callable[..., Any]:
  """Wraps tinygrad's function that differentiates a call: the gradient of a FUNCTION is again the body of a FUNCTION."""
  @functools.wraps(own)
  def differentiate(ctx:UOp, call:UOp, needed:set[int]) -> tuple[UOp|None, ...]:
    of_function = call.op is Ops.FUNCTION and call.arg.grad_fxn is None
    _function.depth += of_function
    try: return own(ctx, call, needed)
    finally: _function.depth -= of_function
  return differentiate

gradient.call_gradient = inside(gradient.call_gradient)

def inlined_function(call:UOp) -> UOp|None:
  """Inlines a FUNCTION that is not compiled apart. Two functions in one schedule would write to the same buffers, because
  equal numbers mean equal buffers. Here each inlined function gets buffers of its own."""
  return rangeify.resolve_function(call.replace(src=(with_own_buffers(call.src[0], UOp.unique_num), *call.src[1:])))

rangeify.earliest_rewrites = PatternMatcher([(UPat(Ops.FUNCTION, name="call"), inlined_function)]) + rangeify.earliest_rewrites
