"""A caller's score_mod or mask_mod in tensor operations, for all pairs of queries and keys."""
from __future__ import annotations
import math
from collections.abc import Mapping
from attn.functions.derivative import derivative
from attn.functions.symbols import BATCH, QUERY_HEAD, KEY, QUERY, SCORE, elements_of, indices_of, is_element, number_of_tensor
from attn.score.places import Positions
from attn.tinygrad_compat import Ops, Tensor, UOp, dtypes

def parts_in_tensors(value:UOp, s:Tensor|None, at:Positions, given:Mapping[str, Tensor]) -> dict[UOp, Tensor]:
  """Computes a traced function in tensor operations. Returns {UOp inside `value`: tensor of this UOp, broadcastable to (B, Hkv, H/Hkv, Sq, Sk)}."""
  # `s` are the scores that the function gets; None for a mask_mod.
  places = {BATCH: at.counted[0], QUERY_HEAD: at.head, QUERY: at.place_of_query, KEY: at.place_of_key}
  made = {symbol: x.cast(dtypes.int) for symbol, x in places.items()} | ({} if s is None else {SCORE: s})
  for u in value.toposort():
    if u in made or u._shape != () or u.op is Ops.STACK: continue
    if is_element(u): made[u] = gathered(given[f"mod_tensor{number_of_tensor(u)}"], [made[x] for x in indices_of(u)])
    else: made[u] = Tensor(u.replace(src=tuple(made[x].uop for x in u.src)) if u.src else u)
  return made

def gathered(t:Tensor, indices:list[Tensor]) -> Tensor:
  """Returns the elements of a tensor at the given indices, one index tensor for each axis, clamped to the axis."""
  flat = Tensor(0, dtype=dtypes.int, device=t.device)
  for index, size in zip(indices, map(int, t.shape)): flat = flat*size + index.clamp(0, size - 1)
  return t.flatten()[flat]

def with_gradients(value:UOp, s:Tensor, at:Positions, given:Mapping[str, Tensor]) -> Tensor:
  """Computes the traced score_mod `value` of the scores s in tensor operations; its gradient is that of attn/functions/derivative.py."""
  made = parts_in_tensors(value, s, at, given)
  found = made[value].detach()
  for part in (SCORE, *[u for u in elements_of(value) if dtypes.is_float(u.dtype)]):
    # tinygrad's own derivatives give NaN where a branch that is not chosen has an infinite derivative.
    slope = parts_in_tensors(of_part := derivative(value, part), s, at, given)[of_part].detach()
    # Where the result is -inf, the weight P is 0, and all gradients are 0.
    finite = (x := made[part].float()).isfinite()
    x = finite.where(x, 0.0)
    found = found + ((found != -math.inf) & finite).where(slope, 0.0)*(x - x.detach())
  return found
