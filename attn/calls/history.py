"""Record of the calls of attention and their inputs, so that gradients can be taken after the outputs were computed."""
from __future__ import annotations
import contextlib, itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref
from attn.tinygrad_compat import Ops, Tensor, UOp, around_gradients, capturing, put_into_tensors

# As soon as something that depends on a custom kernel is computed, for example by `loss.item()`, tinygrad 0.14.0 replaces each output by the output's
# buffer in all expressions. A gradient would stop at such a buffer and be 0, without an error message. Therefore this module keeps the inputs of each
# call as long as the outputs of the call exist. While gradients are taken, the outputs become expressions of these inputs again.

@dataclass(frozen=True, eq=False)
class Input:
  """Input of a call of attention, kept as long as a gradient of the call may be needed."""
  tensor: Tensor
  copied: bool  # whether the kernel got a copy of `tensor`; the copy itself is not kept
  @staticmethod
  def of(u:UOp) -> Input: return Input(Tensor(u.src[0]), True) if u.op is Ops.CONTIGUOUS else Input(Tensor(u), False)
  def among(self, there:dict[UOp, UOp]) -> UOp:
    u = self.tensor.uop.substitute(there, walk=True)
    return u.contiguous() if self.copied else u

@dataclass(frozen=True, eq=False)
class Origin:
  """Record of one call of attention (inputs, outputs, gradient function), from which its gradient can be computed later."""
  outputs: tuple[tuple[ref[UOp], tuple[int|UOp, ...]], ...]  # (weak reference to the buffer, shape) of each output
  inputs: tuple[Input|int, ...]  # a number n stands for the call's own output n
  gradient: Callable[..., Any]
  captured: bool  # TinyJit captured the call: its inputs are not kept
  number: int = field(default_factory=itertools.count().__next__)    # order of calls: a call depends on earlier ones only
  @property
  def tensors(self) -> list[Tensor]: return [x.tensor for x in self.inputs if isinstance(x, Input)]
  def existing_outputs(self) -> tuple[list[UOp], Callable[..., Any]]:
    """Returns (outputs of the call that still exist, gradient function that needs only these outputs)."""
    found = [(of(), shape) for of, shape in self.outputs]
    outputs = [buffer.reshape(shape) if buffer.shape != shape else buffer for buffer, shape in found if buffer is not None]
    if len(outputs) == len(found): return outputs, self.gradient
    # Only `AttentionGradient` can do without some outputs.
    if not hasattr(self.gradient, "without"):
      raise RuntimeError("the gradient through lse, which was computed before, needs o, which no longer exists: keep a reference to o")
    return outputs, self.gradient.without([i for i, (buffer, _) in enumerate(found) if buffer is None])

@dataclass(frozen=True, eq=False)
class Made:
  """Record of one output buffer of attention: the call that wrote the buffer, and the other outputs of the call that must stay in memory with the
  buffer."""
  origin: Origin
  needs: tuple[UOp, ...]  # kept alive by this record

made: WeakKeyDictionary[UOp, Made] = WeakKeyDictionary()    # keys: the buffers of outputs

def lies_in(u:UOp) -> UOp:
  """Returns the buffer that holds an output of attention, without the reshapes and launches around the buffer in the graph."""
  while u.op in (Ops.RESHAPE, Ops.AFTER): u = u.src[0]
  return u

def keep_inputs(outputs:Sequence[UOp], inputs:Sequence[UOp], gradient:Callable[..., Any]) -> None:
  """Records a call of attention, so that the call's inputs stay in memory as long as its first output does."""
  buffers = [lies_in(u) for u in outputs]
  def kept(u:UOp) -> Input|int: return buffers.index(lies_in(u)) if lies_in(u) in buffers else Input.of(u)
  # Under TinyJit no inputs are kept, because each replay of the captured call has other inputs.
  origin = Origin(tuple((ref(buffer), u.shape) for buffer, u in zip(buffers, outputs)), () if capturing else tuple(map(kept, inputs)),
                  gradient, bool(capturing))
  for i, buffer in enumerate(buffers): made[buffer] = Made(origin, tuple(buffers[1:]) if i == 0 else ())

def depends_on(u:UOp) -> Iterable[UOp]:
  """Returns the UOps from which `u` and its gradient are computed, except buffers that a call of attention writes."""
  if u.op is Ops.DETACH: return ()
  if is_after_a_call(u): return u.src[1:]
  if u.op not in (Ops.CALL, Ops.FUNCTION): return u.src
  here = made.get(lies_in(u.src[1])) if u.op is Ops.CALL and len(u.src) > 1 else None
  return u.src[1:] if here is None else u.src[1 + len(here.origin.outputs):]

def is_after_a_call(u:UOp) -> bool: return u.op is Ops.AFTER and u.src[1].op is Ops.CALL

def forgotten(root:UOp) -> tuple[list[Origin], list[UOp]]:
  """Returns two lists for the graph `root`: calls of attention of which tinygrad has kept only the output buffers, oldest first; and all AFTER
  UOps."""
  # An AFTER is a buffer after a call has written it.
  origins, seen, todo = dict[Origin, None](), set[UOp](), [root]
  while todo:
    there = dict[UOp, Origin]()
    while todo:
      if (u := todo.pop()) in seen: continue
      seen.add(u)
      if (here := made.get(u)) is not None: there[u] = here.origin
      todo += depends_on(u)
    pending = {lies_in(u) for u in seen if is_after_a_call(u)}
    new = dict.fromkeys(origin for buffer, origin in there.items() if buffer not in pending and origin not in origins)
    origins |= new
    todo = [t.uop for origin in new for t in origin.tensors]
  return sorted(origins, key=lambda origin: origin.number), [u for u in seen if is_after_a_call(u)]

@contextlib.contextmanager
def recalled(root:UOp) -> Iterator[None]:
  """Context in which tinygrad can differentiate `root`: Tensors that hold outputs of attention show the calls that computed them, and not only
  buffers."""
  # When an output of attention is computed, tinygrad drops the output's expression and keeps only the buffer.
  origins, afters = forgotten(root) if made else ([], [])
  if not origins:
    yield
    return
  if any(origin.captured for origin in origins):
    raise RuntimeError("a gradient through an output of attention that TinyJit has captured and that was computed before: take gradients before "
                       "anything else computes the output, or use output.detach() where no gradient is needed")
  there, back = dict[UOp, UOp](), dict[UOp, UOp]()
  for origin in origins:
    outputs, gradient = origin.existing_outputs()
    inputs = [outputs[x] if isinstance(x, int) else x.among(there) for x in origin.inputs]
    call = UOp.sink().call(*outputs, *inputs, grad_fxn=gradient)
    for u in outputs:
      buffer, written = lies_in(u), u.after(call)
      there |= {buffer: written.reshape(buffer.shape), **{x: written.reshape(x.shape) for x in afters if lies_in(x) is buffer}}
      back |= {written: u, there[buffer]: buffer}
  put_into_tensors(there)
  try: yield
  finally:
    put_into_tensors(back)
    for origin in origins:
      for t in origin.tensors: t.grad = None     # Tensor.backward has set .grad of every tensor, these included

def keep_history() -> None: around_gradients(recalled)
