"""Runs a checked call of `attention`: allocates the output buffers, launches the kernels, and attaches the gradient."""
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Iterable
from attn.api.checked_call import CheckedCall
from attn.api.dropout import drawn_seed, first_of_each
from attn.api.pages import plain_attention_of_pages
from attn.calls.checked_kernel import CheckedKernel, KernelFunction, check_device, checked_ast, region
from attn.calls.gradient import INPUTS, OUTPUTS, gradient_of, lse_axes, no_gradient
from attn.calls.history import keep_inputs
from attn.calls.kept_graphs import Graph, kept_graph
from attn.calls.placement import AXES, Placement, empty, place
from attn.calls.plain import plain_attention
from attn.calls.tile_lists import lists_made_last, tile_lists
from attn.calls.views import flat_buffer
from attn.choose.backward import can_differentiate, choose_backward
from attn.choose.dispatch import KERNELS, Choice, asked_for, combine_of, program_of, read_by
from attn.choose.tile_lists import listing, with_lists
from attn.kernels.combine import combine_arguments
from attn.kernels.parts.grid.tensors import arguments, of_backward, split_into
from attn.parallel.context import first_launch, in_buffers, run_shared_rows
from attn.parallel.context_gradient import with_context_gradient
from attn.problem import Problem, Shapes
from attn.tinygrad_compat import TRAINING, Tensor, UOp, forget_oldest_kernels
from attn.values import FLOATS, INTS, MOST_KERNELS, cache_of_kernels

OF_STORED_ROWS = "k and v are QuantizedRows: rows of 8 bits have no gradient; train with k and v of 16 bits or float32"
OF_A_CACHE = "attention over part of a cache has no gradient: train with attn.attention of whole k and v"
PREPARED = tuple(x for kernel in KERNELS.values() if kernel.before is not None for x in kernel.before.buffers.values())
WRITTEN = ("o", "lse", "lse_rest", "o_partial", "lse_partial", "lse_rest_partial", *PREPARED)

def seeded(c:CheckedCall) -> CheckedCall:
  """Returns the call with tensors added that dropout, score_mod or mask_mod need: a random seed, and the index of each device's first batch and
  head."""
  if not c.problem.dropout_p and not c.problem.first_batch_and_head: return c
  t = dict(c.tensors)
  if c.problem.dropout_p and "dropout_seed" not in t: t["dropout_seed"] = place("dropout_seed", drawn_seed(c.at), c.at)
  if c.problem.first_batch_and_head: t["first_batch_and_head"] = first_of_each(c.at, c.problem)
  return replace(c, tensors=t)

@cache_of_kernels
def kernels(p:Problem, choice:Choice) -> list[KernelFunction]:
  """Returns the kernel functions that compute the problem `p` with the chosen kernel, in the order of their launches."""
  # Equal arguments return identical objects, because tinygrad's schedule cache compares functions by identity.
  assert choice.arch is not None and choice.work.tile is not None
  forget_oldest_kernels("attn_", MOST_KERNELS)
  p, arch, tile = replace(p, num_splits=choice.work.splits), choice.arch, choice.work.tile
  def checked(program:Any, takes:Iterable[str], given:tuple[str, ...]) -> KernelFunction:
    takes, written = tuple(takes), tuple(name for name in takes if name in WRITTEN)
    # The last kernel function has the gradient function. tinygrad computes gradients only for this kernel's arguments, so they include all inputs
    # that need a gradient.
    if "o" not in given: gradient = None
    elif p.k_view is None: gradient = gradient_of(replace(p, tile_list=None), arch, given)
    else: gradient = no_gradient(OF_STORED_ROWS if p.stored else OF_A_CACHE)
    def kernel(*placeholders:UOp) -> CheckedKernel:
      sink = checked_ast(program, arch, *placeholders[:len(takes)])
      return CheckedKernel(sink, written, gradient=gradient, small=written[0] == "o" and p.num_splits > 1, takes=len(takes),
                           ahead=p.tile_list is not None)
    return kernel
  programs = [(program_of(choice, p), arguments(read_by(p, choice)))]
  if (before := KERNELS[choice.kernel].before) is not None: programs.insert(0, (before.program(p, arch, tile), before.arguments(p, tile)))
  if p.num_splits > 1: programs.append((combine_of(choice, p), combine_arguments(p)))
  return [checked(program, takes, given) for (program, takes), given in zip(programs, launched(p, choice))]

def launched(p:Problem, choice:Choice) -> list[tuple[str, ...]]:
  """Returns, for each kernel launch, the names of its tensors, such as ("o", "lse", "q", "k", "v")."""
  if (before := KERNELS[choice.kernel].before) is not None:
    return [tuple(before.arguments(p, choice.work.tile)), tuple(before.buffers.get(name, name) for name in arguments(read_by(p, choice)))]
  if p.num_splits == 1: return [tuple(arguments(p))]
  # The kernel `combine`, which merges the results of key ranges, also gets the inputs that need a gradient.
  merging = tuple(combine_arguments(p))
  return [tuple(arguments(p)), merging + tuple(name for name in p.shapes if name in INPUTS and name not in merging)]

def deliver(c:CheckedCall, o:Tensor, *log_sums:Tensor) -> list[Tensor]:
  """Returns [o], copied into the buffer `out` if the call gives one, and after it lse and lse_rest if the call asks for them."""
  # lse_rest is what rounding to float32 removed from lse.
  return [o if c.out is None else c.out.assign(o), *log_sums[:len(c.log_sums)]]

def tensors_of(p:Problem, choice:Choice) -> Shapes:
  """Returns (shape, dtype) of all tensors that the kernels of `choice` take, by name."""
  before = KERNELS[choice.kernel].before
  return arguments(p) | combine_arguments(p) | (before.arguments(p, choice.work.tile) if before is not None else {})

def output_buffer(c:CheckedCall, name:str, p:Problem, choice:Choice) -> Tensor:
  """Returns the buffer into which a kernel writes the output `name`, such as "lse": the caller's buffer, such as `out`, or a new buffer."""
  if name == "o":
    if c.out is not None: return c.out
    axes: tuple[str|None, ...] = AXES[p.layout]
  elif name in PREPARED: axes = AXES["bhsd"]
  elif c.into and name in c.log_sums: return c.into[c.log_sums.index(name)]
  else: axes = (*[None]*name.endswith("partial"), *lse_axes(p.layout))
  shape, dtype = tensors_of(p, choice)[name]
  return empty(shape, (FLOATS | INTS)[dtype], c.at.device, c.at.axis(axes))

def in_a_buffer(c:CheckedCall, x:Tensor) -> Tensor:
  """Returns the input `x` if it is a whole buffer, otherwise a copy of it in a new buffer."""
  return x if x.uop.has_buffer_identity(after_ok=True) or (c.into and region(x.uop)) else x.contiguous()

@lists_made_last()
def launch_kernels(c:CheckedCall, choice:Choice) -> list[Tensor]:
  """Launches the chosen kernel, and the kernel that merges key ranges if there are several. Returns [o], and after it lse and lse_rest if the call
  asks for them."""
  p = split_into(c.problem, choice.work.splits)
  in_place = () if p.k_view is None else ("k", "v", "k_rotary", *p.scale_views)
  t = {name: flat_buffer(x) if name in in_place else in_a_buffer(c, x) for name, x in c.tensors.items()}
  if choice.kernel == "tiled": choose_backward(p, c.arch, choice.kernel)      # raises if ATTN_KERNEL asks for backward kernels that can't be
  if TRAINING and not isinstance(can_differentiate(p, c.arch), str): p = of_backward(p)
  if c.arch is not None and (lists := listing(p, c.arch, choice.work.tile)) is not None:
    p, t["tile_list"] = with_lists(p, lists), tile_lists(lists, c.at.device, t)
  inputs = {name: x.uop for name, x in t.items()} | {f"variable {i}": u for i, u in enumerate(c.variables)}
  if c.out is not None: inputs["out"] = c.out.uop
  def graph(_:Graph) -> dict[str, UOp]: return kernels_launched(c, p, choice, t)
  if c.part: found = graph(inputs)      # the larger call keeps its graph and its inputs
  else:
    found = kept_graph((p, choice, c.at), inputs, graph)
    *_, last = launched(p, choice)
    outputs, others = ([(found | inputs)[name] for name in last if (name in p.outputs) == is_output] for is_output in (True, False))
    keep_inputs(outputs, others, found["o"].src[1].arg.grad_fxn)
  o = Tensor(found["o"])
  return [o if c.out is None else c.out.replace(o), *[Tensor(found[name]) for name in c.log_sums]]

def kernels_launched(c:CheckedCall, p:Problem, choice:Choice, given:dict[str, Tensor]) -> dict[str, UOp]:
  """Launches the kernels that compute the problem `p` on the tensors `given`, and returns their outputs by name, such as "o" and "lse"."""
  t = {name: x.uop for name, x in given.items()}
  for names, fxn in zip(launched(p, choice), kernels(p, choice)):
    srcs = [t[name] if name in t else output_buffer(c, name, p, choice).uop for name in names]
    srcs += [x.uop for x in c.into[len(c.log_sums):]]     # whole buffers behind the regions: the kernel takes no argument for them
    written = UOp.custom_kernel(*srcs, fxn=with_variables(fxn, c.variables))
    t = dict(zip(names, written)) | t      # inputs keep their own UOps, because gradients go there
  return {name: t[name] for name in WRITTEN if name in t}

def with_variables(fxn:KernelFunction, variables:tuple[UOp, ...]) -> KernelFunction:
  """Returns a kernel function that does what `fxn` does, and also passes the values of Variables to the kernel."""
  return (lambda *placeholders: replace(fxn(*placeholders), variables=variables)) if variables else fxn

def run_three_pass(c:CheckedCall, choice:Choice) -> list[Tensor]:
  choose_backward(c.problem, c.arch, choice.kernel)      # raises if ATTN_KERNEL asks for backward kernels that can't be
  return deliver(c, *(plain_attention if c.problem.pages is None else plain_attention_of_pages)(c.problem, c.tensors))

def run_across(c:CheckedCall) -> list[Tensor]:
  """Runs a checked call whose q, k or v are sharded along the rows of a sequence. Returns [o], and after it lse and lse_rest if the call asks for
  them."""
  def attend_part(p:Problem, tensors:dict[str, Tensor], device:str, into:Sequence[Tensor]) -> list[Tensor]:
    return run(CheckedCall(p, tensors, c.arch, Placement(device), into[0] if into else None, into=tuple(into[1:]), part=True))
  def graph(inputs:Graph) -> dict[str, UOp]:
    choose_backward(first_launch(c.problem, shared.shards), c.arch, c.choice().kernel)     # raises as in run_three_pass
    return run_shared_rows(shared, inputs, attend_part)
  shared, inputs = c.shared_rows, {name: in_buffers(t.uop) for name, t in c.tensors.items()}
  found = kept_graph((shared, asked_for(), bool(TRAINING)), inputs, graph)
  outputs = {name: found.pop(name) for name in OUTPUTS}
  return deliver(c, *with_context_gradient(shared, outputs, found | inputs))

def check_devices(c:CheckedCall) -> None:
  """Raises ValueError if the call asks for kernels of another chip than the chip of the call's devices."""
  for device in (c.at.device,) if isinstance(c.at.device, str) else c.at.device:
    if c.arch is not None: check_device(c.arch.name, device)

def run(c:CheckedCall) -> list[Tensor]:
  """Runs a checked call of `attention`. Returns [o], and after it lse and lse_rest (what rounding removed from lse) if the call asks for them."""
  if c.shards is not None: return run_across(c)
  choice = c.choice()
  return (run_three_pass if choice.kernel == "three_pass" else launch_kernels)(c, choice)
