"""Gradient of attention, as a grad_fxn: the function by which tinygrad differentiates a custom kernel. The kernels compute the gradients where they
can, and tinygrad computes all others by differentiating `three_pass` (attention in plain tensor operations). Begin with `AttentionGradient`."""
from __future__ import annotations
import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Callable
from attn.calls.checked_kernel import CheckedKernel, checked_ast
from attn.calls.kept_graphs import Graph, kept_graph
from attn.calls.placement import AXES, empty
from attn.calls.plain import plain_attention
from attn.calls.sums import gradient_of_element
from attn.calls.tile_lists import Tables, lists_made_last, tile_lists
from attn.chips import Chip
from attn.choose.backward import (KernelSum, Parts, all_of, can_differentiate, dbias_of, delta_of, dkdv_of, dq_of, few_of, finish_of, instead_of_two,
                                  kernel_sums, parts_of_chosen, tensors_by_tinygrad, tiles_of)
from attn.choose.backward_tiles import AnyBackwardTile, AtOnceTile
from attn.choose.dispatch import asked_for, single_kernel
from attn.choose.tile_lists import listing, with_lists
from attn.kernels.tile_lists import ListedBlocks, sharing_a_table
from attn.kernels.tiles.wgmma import WgmmaFewQueriesTile
from attn.kernels.parts.grid.tensors import (Shapes, all_arguments, dbias_arguments, delta_arguments, dkdv_arguments, dq_arguments, dq_turns,
                                             few_arguments, finish_arguments, log_sums, of_backward, set_by_first, split_into)
from attn.problem import EXTRAS, Problem
from attn.score.sums import sum_over_scores
from attn.score.terms import TERM_TENSORS, check_differentiable
from attn.tinygrad_compat import Tensor, UOp, differentiated, wanted_of
from attn.values import FLOATS, INTS, cache_of_kernels

# With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dV = P^T dO, dQ = scale * dS K, dK = scale * dS^T Q
# (FlashAttention-2, arXiv 2307.08691, algorithm 2). The gradients of q, k and v are computed in one of three ways:
# - by two kernels. `backward_dq` computes dQ and delta, and then `backward_dkdv` computes dK and dV;
# - by one kernel for all three gradients, `backward_all`, between two small kernels: `backward_delta` computes delta, and `backward_finish` turns
# fp32 sums into dQ;
# - with few queries and many keys, by one kernel alone, `backward_few`.
# `backward_dbias` computes the gradient of a bias, and of a tensor that the caller's score_mod reads (a mod_tensor) by the indices of batch, head,
# query i and key j, or by i - j. tinygrad computes the gradients of ALiBi slopes and of other mod_tensors, and all gradients of a problem that the
# kernels don't support (attn/choose/backward.py says why). Each gradient is a separate expression, so a gradient that is not used is never computed.

OUTPUTS, INPUTS = ("o", "lse"), ("q", "k", "v", *EXTRAS)
GRADIENTS_OF_INPUTS = ("dq", "dkdv", "delta", "all", "finish", "few")     # launches that lead to the gradients of q, k and v
SHARDED_LIKE = {"o": "q", **{f"d{name}": name for name in ("q", "k", "v", *TERM_TENSORS)}}     # the tensor like which a buffer is sharded

def no_second_derivative(*args:UOp, **kwargs:Any) -> Any:
  raise NotImplementedError("attention has no second derivative: its gradient cannot be differentiated again. ATTN_KERNEL=three_pass has one")

@functools.cache
def no_gradient(what:str) -> Any:
  """Returns a grad_fxn that raises NotImplementedError with the message `what`."""
  def refuse(*args:UOp, **kwargs:Any) -> Any: raise NotImplementedError(what)
  return refuse

def of_outputs(gradients:tuple[UOp, ...], outputs:dict[str, UOp]) -> dict[str, UOp]:
  """Returns {"o": gradient, "lse": gradient} from the gradients that tinygrad passed without names; an output without a gradient has no entry."""
  # tinygrad passes only gradients that exist, without names. The shape of a gradient tells its output, because o and lse have different shapes.
  of_shape = {u.shape: name for name, u in outputs.items()}
  found = {of_shape.get(g.shape, ""): g for g in gradients}
  if len(found) < len(gradients) or "" in found:
    raise NotImplementedError("a gradient through an input that custom_kernel returned: use the tensor that was given to custom_kernel; only "
                              f"{' and '.join(outputs)} {'have' if len(outputs) > 1 else 'has'} a gradient function")
  return found

# ***** gradients that tinygrad computes *****

def plain_gradients(p:Problem, inputs:dict[str, UOp], given:dict[str, UOp]) -> dict[str, UOp]:
  """Returns {input name: gradient} for all float inputs, computed by tinygrad's differentiation of `three_pass`; `given` has the gradients of o and
  lse."""
  # Inputs on which neither o nor lse depends are left out.
  params = {name: Tensor(u.param_like(slot)) for slot, (name, u) in enumerate(inputs.items())}
  o, lse, _ = plain_attention(p, params)
  found = differentiated(UOp.maketuple(o.uop, lse.uop), list(inputs.values()), [given.get(name) for name in OUTPUTS], no_second_derivative)
  return {list(inputs)[slot]: g for slot, g in found.items()}

def gradients_by_tinygrad(p:Problem, arch:Chip) -> list[str]:
  """Returns the names of the inputs, such as alibi_slopes, whose gradients tinygrad computes because no kernel does."""
  return [*(name for name, tensor in TERM_TENSORS.items() if not tensor.summed), *tensors_by_tinygrad(p, arch)]

# ***** gradients that kernels compute *****

@dataclass(frozen=True)
class BackwardLaunch:
  """Launch of a backward kernel: the kernel function, (shape, dtype) of each argument by name, and the names of the outputs."""
  kernel: Callable[..., Any]
  shapes: Shapes
  outputs: tuple[str, ...]

Lists = tuple[ListedBlocks|None, ListedBlocks|None]     # lists of tiles that the kernels "dq" and "dkdv" get, or None and the lists of "all"

def lists_of_backward(p:Problem, arch:Chip) -> Lists:
  """Returns which lists of visible tiles the kernels "dq" and "dkdv" read, in this order; None for a kernel that needs no list."""
  # The kernel "all" takes the place of "dkdv". Without a list, a kernel loops over all tiles between a first and a last one.
  if (one := instead_of_two(p, arch)) is not None: return None, listing(p, arch, one, "queries", p.deterministic)
  dq, dkdv = tiles_of(p, arch)
  of_dq, of_dkdv = listing(p, arch, dq), listing(p, arch, dkdv, "queries")
  return (of_dq, of_dkdv) if of_dq is None or of_dkdv is None else sharing_a_table(of_dq, of_dkdv)

def lists_of_forward(p:Problem, arch:Chip) -> ListedBlocks|None:
  """Returns which list of visible tiles the kernel "forward" loops over, or None if it needs no list."""
  return listing(p, arch, single_kernel(p, arch)[1])

def backward_kernels(p:Problem, arch:Chip, dlse:bool, parts:Parts, lists:Lists=(None, None)) -> dict[str, BackwardLaunch]:
  """Returns the launches of backward by name, such as "dq" and "dkdv", in the order in which they run."""
  # One kernel for all gradients has the launches "delta", "all" and "finish" in place of "dq" and "dkdv", or with few queries "few". "dbias0",
  # "dbias1", ... compute sums of dS. "forward" computes o and lse again, for a call whose forward kernel wrote no lse. `dlse` says whether lse has a
  # gradient, `parts` how many fp32 partial results a kernel stores of each gradient (tinygrad adds them), and `lists` are those of
  # `lists_of_backward`. Equal arguments return identical objects, because tinygrad's schedule cache compares by identity.
  return kernels_with_tiles(p, arch, dlse, parts, lists, *tiles_of(p, arch), instead_of_two(p, arch))

@cache_of_kernels
def kernels_with_tiles(p:Problem, arch:Chip, dlse:bool, parts:Parts, lists:Lists, dq:AnyBackwardTile,
                       dkdv:AnyBackwardTile, one:AtOnceTile|None) -> dict[str, BackwardLaunch]:
  """Returns the launches of backward by name, as `backward_kernels` does, for kernels with the given tile descriptions."""
  # `one` is the tile description of the kernel that computes all gradients in place of the other two, or None.
  def launch(shapes:Shapes, program:Callable[..., UOp], *outputs:str) -> BackwardLaunch:
    def kernel(*placeholders:UOp) -> CheckedKernel:
      return CheckedKernel(checked_ast(program, arch, *placeholders), outputs, gradient=no_second_derivative, ahead="tile_list" in shapes)
    return BackwardLaunch(kernel, shapes, outputs)
  for_q, for_kv = (with_lists(p, x) for x in lists)
  for_o = with_lists(p, lists_of_forward(p, arch))
  found = {"forward": launch(for_o.shapes, single_kernel(for_o, arch)[0], *p.outputs)}
  if isinstance(one, WgmmaFewQueriesTile):
    few = few_arguments(p, dlse, parts.dq, parts.dkdv), few_of(p, arch, one, dlse, parts.dq, parts.dkdv)
    return found | {"few": launch(*few, "dq", "dk", "dv", "delta")}
  if one is not None:
    sums = () if set_by_first(for_kv) else ("dq_sums",)
    return found | {"delta": launch(delta_arguments(for_kv, dlse), delta_of(for_kv, arch, one, dlse), *sums, *dq_turns(p), "delta"),
                    "all": launch(all_arguments(for_kv, parts.dkdv), all_of(for_kv, arch, one, parts.dkdv), "dq_sums", *dq_turns(p), "dk", "dv"),
                    "finish": launch(finish_arguments(for_kv), finish_of(for_kv, arch, one), "dq")}
  found |= {"dq": launch(dq_arguments(for_q, dlse, parts.dq), dq_of(for_q, arch, dq, dlse, parts.dq), "dq", "delta"),
            "dkdv": launch(dkdv_arguments(for_kv, parts.dkdv), dkdv_of(for_kv, arch, dkdv, parts.dkdv), "dk", "dv")}
  for n, (x, number) in enumerate(zip(kernel_sums(p, arch), parts.sums)):
    found[f"dbias{n}"] = launch(dbias_arguments(x.p, number, x.tile), dbias_of(x.p, arch, x.tile, number), f"d{x.tensor}")
  return found

def written_by(launch:BackwardLaunch, t:dict[str, UOp], layout:str) -> dict[str, UOp]:
  """Runs a launch on the tensors `t` (by name; `layout` is that of q), and returns `t` with the launch's outputs added."""
  # An output that is not in `t` gets a new buffer. `layout` is the layout of q.
  def buffer(name:str) -> UOp:
    shape, dtype = launch.shapes[name]
    lies = t[SHARDED_LIKE.get(name, "q")]
    axis = lies.axis
    if name in ("lse", "lse_rest", "delta") and axis is not None: axis = lse_axes(layout).index(AXES[layout][axis])
    if name in ("dq_sums", "dq_turns"): axis = None if axis is None else 0
    elif len(shape) > len(lies.shape):      # axis 0 counts parts
      if axis is not None: axis += 1
      elif t["q"].axis is not None: axis = 0
    return empty(shape, (FLOATS | INTS)[dtype], t["q"].device, axis).uop
  srcs = [t[name] if name in t else buffer(name) for name in launch.shapes]
  after = dict(zip(launch.shapes, UOp.custom_kernel(*srcs, fxn=launch.kernel)))
  written = {name: after[name] for name in launch.outputs}
  def after_others(x:UOp) -> UOp: return x.after(*[y for y in written.values() if y is not x])
  # The launch adds to an output that is in `t`, so it must run only once, and tinygrad must realize all its outputs together: each returned output
  # depends on all others.
  if any(name in t for name in written): return after | t | {name: after_others(x) for name, x in written.items()}
  return after | t | written

def lse_axes(layout:str) -> tuple[str, ...]: return ("heads", "rows") if layout in ("nsd", "thd") else ("batch", "heads", "rows")

def like(g:UOp, out:UOp) -> UOp:
  """Returns the gradient `g` of the output `out` in a new buffer, cast and sharded like `out`."""
  g = g.cast(out.dtype)
  return (g if g.axis == out.axis or out.axis is None else g.shard(out.device, out.axis)).contiguous()

def of_list(kernel:str) -> str: return f"tile_list of {kernel}"

def lists_by_kernel(p:Problem, arch:Chip, inputs:dict[str, UOp], written:Container[str]) -> dict[str, UOp]:
  """Returns {name: tensor with a list of visible tiles} for the kernels that compute a gradient; `written` names the outputs of forward that
  exist."""
  p = split_into(of_backward(p), 1)
  dq, keys = lists_of_backward(p, arch)
  wanted = {"dq": dq, "dkdv" if instead_of_two(p, arch) is None else "all": keys}
  # `written` has the names of the outputs that forward wrote. If one is missing, the kernel "forward" runs again.
  if not all(name in written for name in p.outputs): wanted["forward"] = lists_of_forward(p, arch)
  tensors, tables = {name: Tensor(u) for name, u in inputs.items()}, Tables()
  return {of_list(name): tile_lists(x, inputs["q"].device, tensors, tables).uop for name, x in wanted.items() if x is not None}

def kernel_gradients(p:Problem, arch:Chip, t:Mapping[str, UOp]) -> dict[str, UOp]:
  """Returns {input name: gradient} for all gradients that kernels compute: of q, k, v, sinks, a bias, and tensors that score_mod reads."""
  # `t` has the tensors that forward read and wrote, the gradients do and dlse of o and lse if they exist, and the lists of tiles (`lists_by_kernel`).
  # lse_rest is what rounding to fp32 lost of lse.
  p, inputs = split_into(of_backward(p), 1), {name: t[name] for name in INPUTS if name in t}
  kernels = backward_kernels(p, arch, "dlse" in t, over_devices(parts_of_chosen(p, arch), kernel_sums(p, arch), inputs), lists_of_backward(p, arch))
  def with_list(t:dict[str, UOp], name:str) -> dict[str, UOp]: return t | ({"tile_list": t[of_list(name)]} if of_list(name) in t else {})
  t = dict(t)
  # Forward runs again for an output that is missing.
  if missing := [name for name in p.outputs if name not in t]:
    again = written_by(kernels["forward"], with_list(t, "forward"), p.layout)
    t |= {name: again[name] for name in missing} | log_sums(again)
  if "do" not in t: t["do"] = t["o"].const_like(0.0).clone(device=t["o"].device)
  for name in [x for x in kernels if x in GRADIENTS_OF_INPUTS]: t = written_by(kernels[name], with_list(t, name), p.layout)
  found: dict[str, UOp] = {name: added(t[f"d{name}"], inputs[name]) for name in ("q", "k", "v")}
  found |= gradients_of_tensors(p, arch, kernels, inputs, t)
  if "sinks" in t: found["sinks"] = sink_gradient(*(Tensor(t[name]) for name in ("sinks", "delta", *log_sums(t)))).uop
  return found

def gradients_of_tensors(p:Problem, arch:Chip, kernels:dict[str, BackwardLaunch], inputs:dict[str, UOp], t:dict[str, UOp]) -> dict[str, UOp]:
  """Returns by name the gradients of a bias and of the tensors that score_mod reads, as far as a kernel computes them."""
  found = dict[str, UOp]()
  # A gradient is a sum of dS over the scores that one element of the tensor changes. If score_mod reads a tensor in several expressions, as in
  # table[i - j] + table[h], a kernel computes the sums for each expression, and the results are added.
  for n, x in enumerate(kernel_sums(p, arch)):
    name, sums = x.tensor, written_by(kernels[f"dbias{n}"], t, p.layout)[f"d{x.tensor}"]
    if x.p.by_element is None: found[name] = added(sums, inputs[name])
    else:
      whole = Tensor(sums).sum(0) if len(sums.shape) > len(sum_over_scores(x.p).sizes) else Tensor(sums)
      gradient = gradient_of_element(x.p, whole, x.tile.block_m, x.tile.block_n)
      found[name] = (gradient if name not in found else Tensor(found[name]) + gradient).uop
  return {name: g.cast(inputs[name].dtype) for name, g in found.items()}

def over_devices(parts:Parts, sums:tuple[KernelSum, ...], inputs:dict[str, UOp]) -> Parts:
  """Returns `parts` with at least one partial result for the gradient of each tensor that is copied to all devices while q is sharded."""
  # If q is sharded but another tensor, such as k, is copied to each device, each device computes a part of this tensor's gradient. The parts are
  # added in fp32, so the number is at least 1. `parts` has the numbers for one device.
  def least(name:str, chosen:int) -> int:
    return max(chosen, 1) if name in inputs and inputs["q"].axis is not None and inputs[name].axis is None else chosen
  return replace(parts, dkdv=least("k", parts.dkdv), sums=tuple(least(x.tensor, number) for x, number in zip(sums, parts.sums)))

def added(gradient:UOp, of:UOp) -> UOp:
  """Returns the gradient of the tensor `of`: adds the partial results on axis 0 of `gradient`, if a kernel stored several."""
  return gradient if len(gradient.shape) == len(of.shape) else Tensor(gradient).sum(0).cast(of.dtype).uop

def sink_gradient(sinks:Tensor, delta:Tensor, lse:Tensor, rest:Tensor|None=None) -> Tensor:
  """Returns the gradient of sinks (H): -exp(sink - lse) * delta, summed over all rows of a head; `rest` is what rounding removed from lse."""
  # lse, delta and `rest` (what rounding lost of lse) have the shape (..., H, S). A row that belongs to no sequence adds 0.
  further = sinks.unsqueeze(-1) - lse
  weight = lse.isinf().where(0.0, (further if rest is None else further - rest).exp())
  return -(weight*delta).sum([axis for axis in range(lse.ndim) if axis != lse.ndim - 2])

# ***** the grad_fxn: with the kernels or with tinygrad *****

def after(u:UOp, call:UOp) -> UOp:
  """Returns the UOp of the buffer `u` with the values that it has after the kernel launch `call`."""
  # If `call` has already run, attn/calls/history.py has replaced it by an empty call, and `u` itself has the value.
  return u.after(call) if call.src[0].src else u

def in_this_shape(u:UOp, shape:tuple[Any, ...]) -> UOp: return u if u.shape == shape else u.reshape(shape)

def output_shapes(p:Problem, q:UOp) -> dict[str, tuple[Any, ...]]:
  """Returns {name: shape} for o, lse and lse_rest (what rounding removed from lse), each as one tensor over all devices."""
  # The buffers that the kernel wrote may have other shapes, because a caller may have provided them.
  sizes = dict(zip(AXES[p.layout], q.shape))
  log_sum = tuple(sizes[axis] for axis in lse_axes(p.layout))
  return {"o": (*q.shape[:-1], p.Dv), "lse": log_sum, "lse_rest": log_sum}

@dataclass(frozen=True)
class AttentionGradient:
  """Gradient function (grad_fxn) of the kernel that computes `problem`, or of the last kernel if several kernels compute it."""
  problem: Problem
  arch: Chip|None
  names: tuple[str, ...]  # of the tensors on which the kernel was called
  def without(self, missing:Sequence[int]) -> AttentionGradient:
    """Returns the gradient function for the same kernel, called without the tensors at the argument positions `missing`."""
    return gradient_of(self.problem, self.arch, tuple(name for i, name in enumerate(self.names) if i not in missing))
  @lists_made_last()
  def __call__(self, *args:UOp, call:UOp|None=None) -> tuple[UOp|None, ...]:
    """Returns the gradient of each argument of the kernel call: None for an output and for an argument that is no float tensor."""
    # `args` are the gradients of the outputs, as far as they exist. The call is the last element of `args`, unless `call` is given.
    check_differentiable(self.problem)
    gradients, call = (args[:-1], args[-1]) if call is None else (args, call)
    tensors = dict(zip(self.names, call.src[1:]))
    inputs, outputs = ({name: tensors[name] for name in names if name in tensors} for names in (INPUTS, (*OUTPUTS, "lse_rest")))
    given = of_outputs(gradients, {name: u for name, u in outputs.items() if name in OUTPUTS})
    shapes = output_shapes(self.problem, inputs["q"])
    given = {name: in_this_shape(g, shapes[name]) for name, g in given.items()}
    if self.arch is None or isinstance(tiles := can_differentiate(self.problem, self.arch), str):
      found = plain_gradients(self.problem, inputs, given)
    else:
      t = inputs | {name: in_this_shape(after(u, call), shapes[name]) for name, u in outputs.items()}
      t |= {f"d{name}": like(g, t[name]) for name, g in given.items()} | lists_by_kernel(self.problem, self.arch, inputs, outputs)
      plain = bool(wanted_of(self.names).intersection(gradients_by_tinygrad(self.problem, self.arch)))
      found = kept_graph((self, tiles, asked_for(), plain), t, functools.partial(self.graph, plain=plain))
    return tuple(found.get(name) for name in self.names)
  def graph(self, t:Graph, plain:bool) -> dict[str, UOp]:
    """Returns {input name: gradient} for the gradients that kernels compute from the tensors `t`. With `plain`, tinygrad computes the gradients of
    all other inputs."""
    # `t` has the tensors for `kernel_gradients`.
    assert self.arch is not None
    found = kernel_gradients(self.problem, self.arch, t)
    if not plain: return found
    inputs, given = {name: t[name] for name in INPUTS if name in t}, {name: t[f"d{name}"] for name in OUTPUTS if f"d{name}" in t}
    return plain_gradients(self.problem, inputs, given) | found

@cache_of_kernels
def gradient_of(p:Problem, arch:Chip|None, names:Iterable[str]) -> AttentionGradient:
  """Returns the grad_fxn of a kernel that computes the problem `p` and is called on tensors with these `names`."""
  # Equal arguments return the identical object, because tinygrad's caches compare by identity.
  return AttentionGradient(p, arch, tuple(names))
