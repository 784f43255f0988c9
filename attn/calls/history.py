"""Where the outputs of attention came from, for gradients that are asked for once these have been computed.

When anything that depends on a custom kernel is computed, `loss.item()` say, tinygrad 0.14.0 puts the buffer of each output into its place in all
expressions, and gradients end there: they would be zeros, without an error. So the inputs of each call are kept for as long as its outputs are there,
and while gradients are taken its outputs are again what they were: an expression of these inputs.
"""
from __future__ import annotations
import contextlib, itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref
from attn.tinygrad_compat import Ops, Tensor, UOp, around_gradients, capturing, put_into_tensors

@dataclass(frozen=True, eq=False)
class Input:
  """What a call was given, or given a copy of, which is forgotten once it is there."""
  tensor: Tensor
  copied: bool
  @staticmethod
  def of(u:UOp) -> Input: return Input(Tensor(u.src[0]), True) if u.op is Ops.CONTIGUOUS else Input(Tensor(u), False)
  def among(self, there:dict[UOp, UOp]) -> UOp:
    u = self.tensor.uop.substitute(there, walk=True)
    return u.contiguous() if self.copied else u

@dataclass(frozen=True, eq=False)
class Origin:
  """A call: its outputs, each by the buffer that it lies in and with its shape, its inputs, of which one may be an output, by its number, and its
  gradient."""
  outputs: tuple[tuple[ref[UOp], tuple[int|UOp, ...]], ...]
  inputs: tuple[Input|int, ...]
  gradient: Callable[..., Any]
  captured: bool
  number: int = field(default_factory=itertools.count().__next__)    # a call depends on none that was made after it
  @property
  def tensors(self) -> list[Tensor]: return [x.tensor for x in self.inputs if isinstance(x, Input)]
  def those_there(self) -> tuple[list[UOp], Callable[..., Any]]:
    """The outputs that somebody still has, and the gradient of a call of these. Raises RuntimeError where it needs one that nobody has."""
    found = [(of(), shape) for of, shape in self.outputs]
    outputs = [buffer.reshape(shape) if buffer.shape != shape else buffer for buffer, shape in found if buffer is not None]
    if len(outputs) == len(found): return outputs, self.gradient
    if not hasattr(self.gradient, "without"): raise RuntimeError("a gradient through lse, which was computed before, needs o, which nobody has kept")
    return outputs, self.gradient.without([i for i, (buffer, _) in enumerate(found) if buffer is None])

@dataclass(frozen=True, eq=False)
class Made:
  """The origin of an output, and what of its other outputs has to be there for the gradient."""
  of: Origin
  needs: tuple[UOp, ...]

made: WeakKeyDictionary[UOp, Made] = WeakKeyDictionary()    # by the buffer that an output lies in

def lies_in(u:UOp) -> UOp:
  """The buffer of an output, or of one on several devices what it is of their buffers."""
  while u.op in (Ops.RESHAPE, Ops.AFTER): u = u.src[0]
  return u

def keep_inputs(outputs:Sequence[UOp], inputs:Sequence[UOp], gradient:Callable[..., Any]) -> None:
  """Keeps the inputs of a call for as long as the first of its outputs is there. Under TinyJit none are kept: the next call has others."""
  buffers = [lies_in(u) for u in outputs]
  def kept(u:UOp) -> Input|int: return buffers.index(lies_in(u)) if lies_in(u) in buffers else Input.of(u)
  origin = Origin(tuple((ref(buffer), u.shape) for buffer, u in zip(buffers, outputs)), () if capturing else tuple(map(kept, inputs)),
                  gradient, bool(capturing))
  for i, buffer in enumerate(buffers): made[buffer] = Made(origin, tuple(buffers[1:]) if i == 0 else ())

def depends_on(u:UOp) -> Iterable[UOp]:
  """What the value of a UOp and its gradient depend on. What a call of attention writes to is no such thing."""
  if u.op is Ops.DETACH: return ()
  if is_after_a_call(u): return u.src[1:]
  if u.op not in (Ops.CALL, Ops.FUNCTION): return u.src
  here = made.get(lies_in(u.src[1])) if len(u.src) > 1 else None
  return u.src[1:] if here is None else u.src[1 + len(here.of.outputs):]

def is_after_a_call(u:UOp) -> bool: return u.op is Ops.AFTER and u.src[1].op is Ops.CALL

def forgotten(root:UOp) -> tuple[list[Origin], list[UOp]]:
  """The calls of which an output that `root` depends on is nothing but a buffer any more, in the order in which they were made; and what else `root`
  depends on that says of a buffer which call it comes after."""
  origins, seen, todo = dict[Origin, None](), set[UOp](), [root]
  while todo:
    there = dict[UOp, Origin]()
    while todo:
      if (u := todo.pop()) in seen: continue
      seen.add(u)
      if (here := made.get(u)) is not None: there[u] = here.of
      todo += depends_on(u)
    pending = {lies_in(u) for u in seen if is_after_a_call(u)}
    new = dict.fromkeys(origin for buffer, origin in there.items() if buffer not in pending and origin not in origins)
    origins |= new
    todo = [t.uop for origin in new for t in origin.tensors]
  return sorted(origins, key=lambda origin: origin.number), [u for u in seen if is_after_a_call(u)]

@contextlib.contextmanager
def recalled(root:UOp) -> Iterator[None]:
  """Within, the outputs that `root` depends on are expressions of what they came from, in all tensors. Raises RuntimeError where that was not
  kept."""
  origins, afters = forgotten(root) if made else ([], [])
  if not origins:
    yield
    return
  if any(origin.captured for origin in origins):
    raise RuntimeError("a gradient through an output of attention that TinyJit has captured and that was computed before: take gradients first, or "
                       "take what needs none by .detach()")
  there, back = dict[UOp, UOp](), dict[UOp, UOp]()
  for origin in origins:
    outputs, gradient = origin.those_there()
    inputs = [outputs[x] if isinstance(x, int) else x.among(there) for x in origin.inputs]
    call = UOp.sink().call(*outputs, *inputs, grad_fxn=gradient)
    for u in outputs:
      buffer, written = lies_in(u), u.after(call)
      there |= {buffer: written.reshape(buffer.shape), **{x: written for x in afters if lies_in(x) is buffer}}
      back |= {written: u, there[buffer]: buffer}
  put_into_tensors(there)
  try: yield
  finally:
    put_into_tensors(back)
    for origin in origins:
      for t in origin.tensors: t.grad = None     # `backward` gave one to every tensor there is

def keep_history() -> None: around_gradients(recalled)
