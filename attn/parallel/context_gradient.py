"""Gradient of attention over rows that are sharded over devices."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from attn.calls.gradient import INPUTS, OUTPUTS, kernels_with_tiles, lse_axes, of_outputs, plain_gradients, sink_gradient, written_by
from attn.calls.history import keep_inputs
from attn.calls.kept_graphs import Graph, kept_graph
from attn.calls.placement import AXES, rows_dimension
from attn.calls.plain import bhsd, from_bhs
from attn.choose.backward import can_differentiate, choose_parts, tiles_of
from attn.choose.dispatch import asked_for
from attn.kernels.parts.grid.tensors import log_sums
from attn.parallel.context import SharedRows, filled_with_rows, in_buffers, launch_problem, launch_tensors, passed, rows_in_buffer, shards_of
from attn.parallel.sequence import in_order, shard_sequence
from attn.parallel.shards import ContextLaunch, PieceRun
from attn.score.masks import fixed_in_sequence
from attn.score.terms import TERM_TENSORS, check_differentiable
from attn.tinygrad_compat import Tensor, UOp, dtypes
from attn.values import FLOATS, cache_of_kernels

# The parts of k and v come to each device one after another, its own first. From these keys, and from o and lse computed over all keys, the device
# computes a part of dq, which it keeps, and parts of dk and dv in float32, which it sends back to the device that holds those keys. Every sum is in
# float32 and in a fixed order, so results are equal in every run.

def all_launches(c:SharedRows) -> list[ContextLaunch]:
  return [launch for device in range(c.shards.count) for _, some in c.shards.plan(c.problem, device) for launch in some]

def by_kernels(c:SharedRows) -> bool:
  """Returns whether the backward kernels can compute the gradients of every launch."""
  # A launch over the keys of one device counts keys from the first key of this device, but a score term or mask needs their positions in the whole
  # sequence.
  if fixed_in_sequence(c.problem): return False
  return not any(isinstance(can_differentiate(replace(launch_problem(c.problem, x), num_splits=1), c.arch), str) for x in all_launches(c))

def rows_axis(c:SharedRows, name:str) -> int:
  """Returns the index of the axis that counts rows in q, k, v, o, lse, lse_rest, or the gradient of one of these."""
  return (lse_axes if "lse" in name else AXES.__getitem__)(c.problem.layout).index("rows")

def lying_as(g:UOp, out:UOp) -> UOp:
  """Returns the gradient `g` with the dtype, devices and sharding of `out`, the output whose gradient it is."""
  g = g.cast(out.dtype)
  if g.axis == out.axis: return g
  if out.axis is None and out.device is not None: return g.copy_to_device(out.device)
  # the gradient of a sum is one number, and every device has it
  if isinstance(g.device, tuple) and g.axis is None: return (Tensor(out).zeros_like() + Tensor(g)).uop
  return Tensor(g).shard_like(Tensor(out)).uop

# ***** gradients that the backward kernels compute *****

@dataclass(frozen=True)
class RowGradient:
  """Gradient of some rows in float32: `found` is added to the gradient of the rows `run` of a device's tensor."""
  run: PieceRun
  found: Tensor

def added_up(parts:list[RowGradient], shape:tuple[int, ...], axis:int, device:str) -> Tensor:
  """Adds up `parts`, gradients of some rows each. Returns the gradient of the whole tensor on one device; `shape` is that tensor's shape."""
  # A part is padded with zeros to all rows. The additions run one after another, so that at most two padded parts are in memory at a time.
  total = None
  for part in parts:
    rows = (part.run.first, shape[axis] - part.run.first - part.run.count)
    x = part.found.to(device).pad(tuple(rows if i == axis else (0, 0) for i in range(len(shape))))
    total = x if total is None else total + x
    total = total.contiguous()
  return Tensor.zeros(*shape, dtype=dtypes.float, device=device).contiguous() if total is None else total

def launch_gradients(c:SharedRows, launch:ContextLaunch, held:dict[str, UOp]) -> dict[str, Tensor]:
  """Computes dq, dk and dv of a launch, in float32, from the tensors on its device."""
  p = replace(launch_problem(c.problem, launch), num_splits=1)
  runs = dict.fromkeys(("q", "o", "lse", "lse_rest", "do", "dlse"), launch.queries) | dict.fromkeys(("k", "v"), launch.keys)
  t = {name: rows_in_buffer(u, rows_axis(c, name), runs[name].first, runs[name].count) if name in runs else u for name, u in held.items()}
  t |= launch_tensors(c, t, launch)
  parts = choose_parts(p, c.arch)
  parts = replace(parts, dq=max(1, parts.dq), dkdv=max(1, parts.dkdv))
  kernels = kernels_with_tiles(p, c.arch, "dlse" in t, parts, (None, None), *tiles_of(p, c.arch), None)
  for name in ("dq", "dkdv"): t = written_by(kernels[name], t, p.layout)
  return {name: Tensor(t[name]).sum(0).contiguous() for name in ("dq", "dk", "dv")}

def on_every(c:SharedRows, each:list[Tensor], axis:int|None) -> UOp:
  """Joins the tensors `each`, one per device, to one tensor that is sharded along `axis`; if `axis` is None, `each` has equal copies."""
  first, *rest = [x.contiguous().uop for x in each]
  if isinstance(c.at.device, str): return first
  return first.mstack(*rest) if axis is None else first.mstack(*rest).unshard(axis)

def summed(c:SharedRows, each:list[Tensor]) -> list[Tensor]:
  """Returns the sum of the tensors `each`, one per device, as a copy on every device; adds in the order of the devices."""
  return [functools.reduce(Tensor.add, [x.to(device) for x in each]) for device in c.devices]

def passed_gradients(c:SharedRows, inputs:dict[str, UOp], merged:dict[str, UOp], given:dict[str, UOp]) -> dict[str, UOp]:
  """Computes the gradients of q, k, v and sinks by the backward kernels; shards of k and v are passed from device to device."""
  p, held = c.problem, {name: shards_of(u) for name, u in (inputs | merged).items()}
  for name, g in given.items(): held[f"d{name}"] = shards_of(g)
  if "do" not in held: held["do"] = [filled_with_rows(Tensor.zeros(*u.shape, dtype=u.dtype, device=u.device).uop) for u in held["o"]]
  keys = {name: held[name] for name in ("k", "v")}
  dq: list[list[RowGradient]] = [[] for _ in c.devices]
  back: dict[str, list[list[tuple[int, RowGradient]]]] = {name: [[] for _ in c.devices] for name in ("dk", "dv")}
  for device, name in enumerate(c.devices):
    plan, own = c.shards.plan(p, device), {x: shards[device] for x, shards in held.items() if x not in ("k", "v", "sinks")}
    for step, ((owner, some), of_owner) in enumerate(zip(plan, passed(keys, device, name, [owner for owner, _ in plan]))):
      for launch in some:
        found = launch_gradients(c, launch, own | of_owner)
        dq[device].append(RowGradient(launch.queries, found["dq"]))
        for x in back: back[x][owner].append((step, RowGradient(launch.keys, found[x])))
  def total(x:str, parts:list[RowGradient], device:int) -> Tensor:
    return added_up(parts, held[x][device].max_shape, rows_axis(c, x), c.devices[device])
  all_dq = [total("q", parts, i) for i, parts in enumerate(dq)]
  if c.shards.queries is None: all_dq = summed(c, all_dq)
  gradients = {"q": all_dq}
  for x in ("k", "v"):
    of_owners = [[part for _, part in sorted(parts, key=lambda of: of[0])] for parts in back[f"d{x}"]]
    gradients[x] = [total(x, parts, i) for i, parts in enumerate(of_owners)]
  result = {x: on_every(c, [g.cast(inputs[x].dtype) for g in each], inputs[x].axis) for x, each in gradients.items()}
  if "sinks" in inputs: result["sinks"] = sinks_gradient(c, held)
  return result

def sinks_gradient(c:SharedRows, held:dict[str, list[UOp]]) -> UOp:
  """Computes the gradient of the sinks: -exp(sink - lse) * delta, summed over the rows of all devices."""
  p, each = c.problem, []
  for i in range(len(c.devices)):
    of = {name: Tensor(shards[i]) for name, shards in held.items()}
    do, o = (bhsd(x.float(), p.layout) for x in (of["do"].cast(FLOATS[p.dtype]), of["o"]))
    delta = from_bhs((do*o).sum(-1), p.layout)
    each.append(sink_gradient(of["sinks"], delta - of["dlse"] if "dlse" in of else delta, *log_sums(of).values()))
  return on_every(c, each if c.shards.queries is None else summed(c, each), None)

# ***** gradients that tinygrad computes *****

def gathered_gradients(c:SharedRows, inputs:dict[str, UOp], given:dict[str, UOp]) -> dict[str, UOp]:
  """Computes the gradients of all float inputs by tinygrad's differentiation, on the first device, where all shards are gathered."""
  # All inputs are gathered in the order of the sequence, and tinygrad differentiates `three_pass` (attention in plain tensor operations). The
  # gradients are then sharded like the inputs.
  p, order, first = c.problem, c.shards.order, c.devices[0]
  lengths = {"q": p.Sq, "o": p.Sq, "lse": p.Sq, "k": p.Sk, "v": p.Sk} | dict.fromkeys(c.shards.as_q, p.Sq)
  if c.shards.queries is None: lengths = {name: n for name, n in lengths.items() if name in ("k", "v")}
  def axis(name:str) -> int: return rows_axis(c, name) if (found := rows_dimension(name)) is None else found
  def gathered(name:str, u:UOp) -> UOp:
    each = [Tensor(shard) for shard in shards_of(u)]
    if name not in lengths: return each[0].contiguous().uop
    whole = each[0].cat(*[x.to(first) for x in each[1:]], dim=axis(name))
    return in_order(whole, axis(name), lengths[name], c.shards.count, order).contiguous().uop
  def dealt(name:str, u:UOp) -> UOp:
    if name in lengths: return shard_sequence(Tensor(u), c.devices, axis(name), order).uop
    return Tensor(u).shard(c.devices).uop
  found = plain_gradients(p, {name: gathered(name, u) for name, u in inputs.items()},
                          {name: gathered(name, u) for name, u in given.items()})
  return {name: dealt(name, u) for name, u in found.items()}

# ***** the grad_fxn *****

@dataclass(frozen=True)
class ContextGradient:
  """Gradient function (tinygrad's `grad_fxn`) of a call of attention whose rows are sharded over devices."""
  shared: SharedRows
  names: tuple[str, ...]  # of the call's inputs, in order
  def __call__(self, *args:UOp, call:UOp|None=None) -> tuple[UOp|None, ...]:
    """Returns the gradient of each input of the call, or None for an input that has no gradient."""
    # `args` are the gradients of the outputs, as far as they exist. The call is the last element of `args`, unless `call` is given.
    check_differentiable(self.shared.problem)
    gradients, call = (args[:-1], args[-1]) if call is None else (args, call)
    t = dict(zip(self.names, call.src[1:]))
    given = {name: lying_as(g, t[name]) for name, g in of_outputs(gradients, {name: t[name] for name in OUTPUTS}).items()}
    of_call = {name: u for name, u in t.items() if name not in OUTPUTS}
    found = kept_graph((self, asked_for()), of_call | {f"d{name}": in_buffers(g) for name, g in given.items()}, self.graph)
    return tuple(found.get(name) for name in self.names)
  def graph(self, t:Graph) -> dict[str, UOp]:
    """Returns {input name: gradient}; `t` has the inputs, the outputs, and the gradients of the outputs, as UOps by name."""
    # `t` has the inputs, the filled outputs of the call, and the gradients `do` and `dlse` of its outputs, if they exist.
    c, given = self.shared, {name: t[f"d{name}"] for name in OUTPUTS if f"d{name}" in t}
    inputs, merged = {name: t[name] for name in INPUTS if name in t}, {name: t[f"merged_{name}"] for name in c.own.outputs}
    found: dict[str, UOp] = {}
    if not (kernels := by_kernels(c)) or any(name in inputs for name in TERM_TENSORS): found |= gathered_gradients(c, inputs, given)
    if kernels: found |= passed_gradients(c, inputs, merged, given)
    return found

@cache_of_kernels
def context_gradient(c:SharedRows, names:tuple[str, ...]) -> ContextGradient:
  """Returns the gradient function of a call of attention whose rows are divided among devices."""
  # Equal arguments return the identical object, because tinygrad's caches compare by identity.
  return ContextGradient(c, names)

def with_context_gradient(c:SharedRows, outputs:dict[str, UOp], sources:dict[str, UOp]) -> tuple[Tensor, Tensor]:
  """Returns o and lse as Tensors that tinygrad differentiates by `context_gradient`; `sources` are the tensors that the gradient needs."""
  gradient = context_gradient(c, (*outputs, *sources))
  # o and lse become results of an empty launch, which has this function as tinygrad's `grad_fxn`. `sources` are the tensors on which the gradient
  # depends.
  call = UOp.sink().call(*outputs.values(), *sources.values(), grad_fxn=gradient)
  keep_inputs(list(outputs.values()), list(sources.values()), gradient)
  return Tensor(outputs["o"].after(call)), Tensor(outputs["lse"].after(call))
