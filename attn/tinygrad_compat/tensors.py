"""Changes the UOps of existing Tensors, for example after a kernel has written to their buffers; and differentiates expressions."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from typing import Any
from tinygrad.dtype import dtypes
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.tensor import _apply_map_to_tensors, all_tensors
from tinygrad.uop.ops import Ops, UOp
from attn.tinygrad_compat.uops import new_uop, on_top

def written_to(buffer:UOp, kernel:UOp) -> None:
  """Makes every Tensor that is a view of `buffer` see what `kernel` writes to the buffer."""
  # A Tensor that is computed from such a view, but not realized yet, keeps the old content. (Tensor.assign would change such a Tensor too.)
  after = buffer.after(kernel)
  for t in [t for ref in list(all_tensors) if (t := ref()) is not None]:
    if (view := on_top(t.uop, buffer, after)) is not None: t.uop = view

def put_into_tensors(instead:dict[UOp, UOp]) -> None:
  """Replaces UOps in all existing Tensors: each key of `instead` by its value."""
  _apply_map_to_tensors(instead, name="history")

def differentiated(outputs:UOp, sources:Sequence[UOp], gradients:Sequence[UOp|None], again:Callable[..., Any]) -> dict[int, UOp]:
  """Returns the gradients of the float `sources`, {index of the source: gradient}, given the gradients of the `outputs` that are computed from
  them."""
  # `outputs` is a tuple computed from placeholders (PARAMs) whose values are `sources`. `gradients` has the gradients of the outputs; None stands for
  # 0. Each result can be computed separately. `again` is the function by which tinygrad would differentiate these gradients once more.
  slot, given = len(sources), []
  for g in gradients:
    given.append(new_uop(Ops.NOOP) if g is None else g.param_like(slot))
    slot += g is not None
  params = {u.arg.slot: u for u in outputs.toposort(enter_calls=False) if u.op is Ops.PARAM and dtypes.is_float(u.dtype)}
  found = compute_gradient(outputs, UOp.maketuple(*given), set(params.values()))
  reached = [i for i, u in params.items() if u in found]
  body = UOp.maketuple(*(found[params[i]] for i in reached))
  call = body.call(*sources, *(g for g in gradients if g is not None), grad_fxn=again)
  return {i: call.gettuple(n) for n, i in enumerate(reached)}
