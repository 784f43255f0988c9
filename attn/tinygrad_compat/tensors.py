"""Tensors that change with what is written to their buffers, and gradients (attn/calls/gradient.py, attn/calls/history.py)."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from typing import Any
from tinygrad.dtype import dtypes
from tinygrad.mixin.gradient import compute_gradient
from tinygrad.tensor import _apply_map_to_tensors, all_tensors
from tinygrad.uop.ops import Ops, UOp
from attn.tinygrad_compat.uops import new_uop, on_top

def written_to(buffer:UOp, kernel:UOp) -> None:
  """Every Tensor that is `buffer`, or a view of it, is from now on what it is after `kernel`, which writes to it. (Tensor.assign has it so for views,
  and for all that was computed from them and not yet realized as well.)"""
  after = buffer.after(kernel)
  for t in [t for ref in list(all_tensors) if (t := ref()) is not None]:
    if (view := on_top(t.uop, buffer, after)) is not None: t.uop = view

def put_into_tensors(instead:dict[UOp, UOp]) -> None:
  """All Tensors have other UOps in the places of these."""
  _apply_map_to_tensors(instead, name="history")

def differentiated(outputs:UOp, sources:Sequence[UOp], gradients:Sequence[UOp|None], again:Callable[..., Any]) -> dict[int, UOp]:
  """For a TUPLE of `outputs`, a function of PARAMs of which `sources` are the values, and the gradients of the outputs (None for 0): the gradient of
  each source of floats that they depend on, by its number. Each is computed by itself; `again` is the grad_fxn of them all."""
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
