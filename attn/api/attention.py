"""`attention` takes Tensors and finds the kernel; `explain` says which, and why not the others."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Any, Iterable
from attn import values
from attn.api.dropout import check_seed, drawn_seed, first_of_each
from attn.api.checked_kernel import (CheckedKernel, KernelFunction, arch_of, check_device, check_means, dtype_of, static_shape,
                                     whole_buffer)
from attn.api.gradient import INPUTS, gradient_of, lse_axes, no_gradient, with_gradient
from attn.api.options import AttentionOptions, options_of
from attn.api.placement import AXES, Placement, empty, local_shape, merge_devices, on_device, place, placement_of
from attn.api.pages import check_pages, placement_in_pages, places_in_pages, plain_attention_of_pages
from attn.api.plain import bhs, bhsd, from_bhs, from_bhsd, plain_attention
from attn.api.views import flat_buffer, places_in_cache
from attn.chips import Chip, get_chip
from attn.choose.backward import BackwardChoice, by_tinygrad, can_differentiate, choose_backward
from attn.choose.dispatch import Choice, choose, combine_of, program_of
from attn.compilers.choice import compiled_on, in_use
from attn.kernels.combine import combine_arguments
from attn.kernels.parts.tensors import arguments
from attn.problem import EXTRAS, INVARIANT_KEYS, LAYOUTS, Problem, problem_of
from attn.tinygrad_compat import TRAINING, DType, Tensor, UOp, capturing, dtypes, with_params
from attn.values import FLOATS

OF_A_CACHE = "the gradient of attention over part of a cache: train with attn.attention of whole k and v"
SHARDED_ROWS = "k and v are sharded along their rows"
WRITTEN = ("o", "lse", "o_partial", "lse_partial")

@dataclass(frozen=True)
class CheckedCall:
  """A problem with its tensors: q, k, v and the extras, by name. `problem` is what one device has to do, or all of them where `at` shares out the
  keys."""
  problem: Problem
  tensors: dict[str, Tensor]
  arch: Chip|None
  at: Placement
  out: Tensor|None
  variables: tuple[UOp, ...] = ()     # bound, that the problem's numbers of rows are made of
  def choice(self) -> Choice: return choose(self.problem if self.at.shared != "keys" else self.on(0).problem, self.arch)
  def on(self, i:int) -> CheckedCall:
    """The part of the i-th device, over its shard of the keys."""
    p, rows = self.problem, self.problem.Sk//self.at.count
    t = {name: on_device(x, i) for name, x in self.tensors.items() if name != "sinks" or i == 0}   # a sink counts once
    if p.bias is not None and p.bias[3]: t["bias"] = t["bias"][..., i*rows:(i + 1)*rows]
    part = replace(p, Sk=rows, offset=p.offset - i*rows, sinks="sinks" in t, out_dtype="float32", return_lse=True)
    return CheckedCall(part, t, self.arch, Placement(self.at.device[i]), None)

def known(n:int|UOp|Tensor) -> int|None:
  """The number of rows where the host knows it: an int, or the value that a Variable is bound to."""
  return n if isinstance(n, int) else int(n.unbind()[1]) if isinstance(n, UOp) and n.is_bound_var else None

def lengths(n:int|UOp|Tensor, batch:int, capacity:int, at:Placement, name:str) -> Tensor:
  """A number of rows as an int32 tensor (batch): given so, or the same for all as an int or a tinygrad Variable. Raises ValueError beyond
  0..capacity."""
  if isinstance(n, Tensor):
    values.dtype_name(name, n.dtype, ("int32",))
    placed = place(name, n, at)
    if local_shape(placed) != (batch,):
      raise ValueError(f"{name} has shape {values.shown_shape(n.shape)}: must be ({batch if at.shared != 'batch' else batch*at.count},)")
    return placed
  if (value := known(n)) is not None and not 0 <= value <= capacity:
    raise ValueError(f"{name}={values.shown(value)}: must lie in 0..{capacity}, the rows there are")
  return Tensor.full((batch,), n, dtype=dtypes.int, device=at.device).contiguous()

def check_sequences(name:str, cu:Tensor, rows:int, longest:int, longest_name:str) -> None:
  """Raises ValueError for sequences that don't lie in order within `rows` rows, or are longer than `longest`: where the host can read the numbers at
  no cost, on the emulator. Elsewhere rows beyond are 0."""
  if not isinstance(cu.device, str) or cu.device.split(":")[0] != "EMU" or not cu.uop.is_realized or capturing: return
  ends = cu.numpy()
  found = int((ends[1:] - ends[:-1]).max())
  if ends[0] < 0 or ends[-1] > rows or (ends[1:] < ends[:-1]).any():
    raise ValueError(f"{name}={values.shown(ends.tolist())}: must not fall, and lie in 0..{rows}, the rows there are")
  if found > longest: raise ValueError(f"{longest_name}={longest}: {name} has a sequence of {found} rows")

def part_of_k(v:Tensor|None, v_dim:int|None) -> bool:
  """Whether V is part of K. Raises ValueError where neither v nor v_dim says what it is, or both do."""
  if v is None and v_dim is None: raise ValueError("v=None with v_dim=None: must be a Tensor, or v_dim say how many columns of k it is")
  if v is not None and v_dim is not None: raise ValueError(f"v_dim={v_dim} with v: must be None where V is k[..., :v_dim]")
  return v is None

def columns_of(shape:tuple[int, ...], v_dim:int) -> tuple[int, ...]:
  """The shape of so many first columns of k."""
  if v_dim > shape[-1]: raise ValueError(f"v_dim={v_dim}: must lie in 1..{shape[-1]}, the columns of k, which has shape {shape}")
  return (*shape[:-1], v_dim)

def prepare(q:Tensor, k:Tensor, v:Tensor|None, options:AttentionOptions, lengths_name:str="kv_lengths", in_place:bool=False) -> CheckedCall:
  """A call of `attention`, checked. `lengths_name` is what its caller calls kv_lengths; `in_place`: k and v that are views of a buffer are read where
  they lie in it."""
  layout, bias, out = options.layout, options.bias, options.out
  if options.batch_invariant and options.num_splits > 1:
    raise ValueError(f"num_splits={options.num_splits} with batch_invariant=True: must be 0 (ranges of {INVARIANT_KEYS} keys) or 1 (no split)")
  inputs = {name: values.tensor(name, t) for name, t in (("q", q), ("k", k), ("v", v)) if name != "v" or not part_of_k(v, options.v_dim)}
  v = inputs.get("v", k)       # where its rows lie
  types = [dtype_of(name, t) for name, t in (inputs | {"v": v}).items()]
  shape = {name: static_shape(name, t.shape) for name, t in inputs.items()}
  rank = len(AXES[layout])
  pages = check_pages(q, k, v, options, lengths_name) if options.block_table is not None else None
  for name, s in shape.items():
    if len(s) != rank and (pages is None or name == "q"): raise ValueError(f"{name} has shape {s}; layout={layout!r} needs {LAYOUTS[layout]}")
  at = (placement_of if pages is None else placement_in_pages)(q, k, v, layout)
  views = None
  if pages is not None:
    views, of_k = (places_in_pages(k), places_in_pages(v)), local_shape(k)
    sequences = int(options.block_table.shape[0]) if options.block_table is not None else 0
    shape |= {name: (sequences, of_k[2], pages.rows, width[3]) for name, width in (("k", of_k), ("v", shape.get("v", of_k)))}
    shape["q"] = local_shape(q)
  elif in_place and isinstance(at.device, str): views = places_in_cache(k, v, layout)
  if at.shared != "keys" and pages is None: shape = {name: local_shape(t) for name, t in inputs.items()}
  if options.v_dim is not None: shape["v"] = columns_of(shape["k"], options.v_dim)
  of_keys = layout if pages is None else "bhsd"
  batch, capacity = (shape["k"][AXES[of_keys].index(axis)] if axis in AXES[of_keys] else 1 for axis in ("batch", "rows"))

  # ***** optional tensors *****
  extras: dict[str, Tensor] = {}
  for name in ("alibi_slopes", "sinks"):
    if (given := getattr(options, name)) is not None:
      values.dtype_name(name, given.dtype, FLOATS)
      extras[name] = place(name, given.cast(dtypes.float), at)
  if bias is not None:
    if bias.dtype == dtypes.bool: raise ValueError("bias has dtype bool: must be added to scores; scaled_dot_product_attention takes a mask of bools")
    values.dtype_name("bias", bias.dtype, FLOATS)
    if bias.ndim > 4: raise ValueError(f"bias has shape {values.shown_shape(bias.shape)}: must broadcast to (B, H, Sq, Sk)")
    extras["bias"] = place("bias", bias.reshape(*[1]*(4 - bias.ndim), *static_shape("bias", bias.shape)), at)
  if options.kv_lengths is not None:
    if layout == "thd" and pages is None:
      raise NotImplementedError(f"{lengths_name}={values.shown(options.kv_lengths)} with layout='thd': packed sequences take their lengths from "
                                "cu_seqlens_k")
    extras["kv_lengths"] = lengths(options.kv_lengths, batch, capacity, at, lengths_name)
  if options.kv_starts is not None:
    if options.kv_lengths is None: raise ValueError("kv_starts without kv_lengths: they say where the keys begin that end there")
    if bias is not None: raise NotImplementedError("kv_starts with bias: keys are counted from their start, so a bias has no place for them")
    extras["kv_starts"] = lengths(options.kv_starts, batch, capacity, at, "kv_starts")
  for name in ("block_table", "cu_seqlens_q", "cu_seqlens_k"):
    if (given := getattr(options, name)) is not None:
      dtype_of(name, given)
      extras[name] = place(name, given, at)
  if options.dropout_p and options.dropout_seed is not None:
    extras["dropout_seed"] = place("dropout_seed", check_seed("dropout_seed", options.dropout_seed), at)
  extras = {name: extras[name] for name in EXTRAS if name in extras}
  if at.shared == "keys":
    if options.dropout_p:
      raise NotImplementedError(f"dropout_p={options.dropout_p} with k and v sharded along their rows: shard along batch or heads instead")
    for name in ("kv_lengths", "kv_starts", "cu_seqlens_k"):
      if name in extras: raise NotImplementedError(f"{name} with k and v sharded along their rows: shard along batch or heads instead")

  # ***** the output *****
  o_shape = (*shape["q"][:-1], shape["v"][-1])
  if out is not None:
    whole_buffer("out", out.uop)
    want = (*q.shape[:-1], shape["v"][-1])
    if out.shape != want: raise ValueError(f"out has shape {out.shape}: must be {want}")
    if options.out_dtype not in (None, out.dtype):
      raise ValueError(f"out_dtype={values.dtype_text(options.out_dtype)} but out has dtype {values.dtype_text(out.dtype)}")
    if (out.device, out.uop.axis) != (q.device, q.uop.axis):
      raise ValueError(f"out lies on {out.device}, sharded along axis {out.uop.axis}: must be as q, on {q.device}, along axis {q.uop.axis}")
  out_dtype = values.dtype_text(options.out_dtype) if options.out_dtype is not None else dtype_of("out", out) if out is not None else types[0]
  p = problem_of(o_shape, shape["q"], shape["k"], shape["v"], dtypes=[out_dtype, *types], causal=options.causal, window=options.window,
                 softmax_scale=options.softmax_scale, layout=layout, softcap=options.softcap, max_seqlen_q=options.max_seqlen_q,
                 max_seqlen_k=options.max_seqlen_k, num_splits=options.num_splits, dropout_p=options.dropout_p, views=views, pages=pages,
                 v_in_k="v" not in inputs,
                 extras={name: (local_shape(t), dtype_of(name, t)) for name, t in extras.items()})
  if p.varlen: check_sequences("cu_seqlens_q", extras["cu_seqlens_q"], p.total_q, p.Sq, "max_seqlen_q")
  if p.varlen and pages is None:
    check_sequences("cu_seqlens_k", extras["cu_seqlens_k"], p.total_k, p.Sk, "max_seqlen_k")
  device = at.device if isinstance(at.device, str) else at.device[0]
  found = compiled_on(get_chip(options.arch), device) if options.arch is not None else arch_of(device)
  p = replace(p, return_lse=options.return_lse, dropout_start=bool(p.dropout_p) and at.shared is not None,
              batch_invariant=options.batch_invariant)
  return CheckedCall(p, {**inputs, **extras}, found, at, out)

def seeded(c:CheckedCall) -> CheckedCall:
  """With the tensors that dropout takes: a seed, drawn where none is given, and where devices share out batches or heads the first ones of each."""
  if not c.problem.dropout_p: return c
  t = dict(c.tensors)
  if "dropout_seed" not in t: t["dropout_seed"] = place("dropout_seed", drawn_seed(c.at), c.at)
  if c.problem.dropout_start: t["dropout_start"] = first_of_each(c.at, c.problem)
  return replace(c, tensors=t)

@functools.cache
def kernels(p:Problem, choice:Choice) -> list[KernelFunction]:
  """What `choice` launches, in order: as single objects, for tinygrad's schedule cache goes by identity. The last one has the gradient, and so takes
  the tensors of `launched(p)`."""
  assert choice.arch is not None and choice.work.tile is not None
  p, arch = replace(p, num_splits=choice.work.splits), choice.arch
  def checked(program:Any, takes:Iterable[str], given:tuple[str, ...]) -> KernelFunction:
    takes, written = tuple(takes), tuple(name for name in takes if name in WRITTEN)
    gradient = None if "o" not in given else gradient_of(p, arch, given) if p.k_view is None else no_gradient(OF_A_CACHE)
    def kernel(*placeholders:UOp) -> CheckedKernel:
      check_means(sink := program(*placeholders[:len(takes)]), arch)
      return CheckedKernel(with_params(sink, placeholders[len(takes):]), written, gradient=gradient, small=written[0] == "o" and p.num_splits > 1)
    return kernel
  programs = [(program_of(choice, p), arguments(p))]
  if p.num_splits > 1: programs.append((combine_of(choice, p), combine_arguments(p)))
  return [checked(program, takes, given) for (program, takes), given in zip(programs, launched(p))]

def launched(p:Problem) -> list[tuple[str, ...]]:
  """The names of the tensors that each launch is given: what its kernel takes, and for `combine` what the gradient goes to besides."""
  if p.num_splits == 1: return [tuple(arguments(p))]
  merging = tuple(combine_arguments(p))
  return [tuple(arguments(p)), merging + tuple(name for name in p.shapes if name in INPUTS and name not in merging)]

def deliver(c:CheckedCall, o:Tensor, lse:Tensor) -> list[Tensor]:
  """o, in the buffer that the call gives for it, and lse where it wants that."""
  return [o if c.out is None else c.out.assign(o), *([lse] if c.problem.return_lse else [])]

def output_buffer(c:CheckedCall, name:str, p:Problem) -> Tensor:
  """A buffer for what a kernel of `p` writes."""
  if name == "o":
    if c.out is not None: return c.out
    axes: tuple[str|None, ...] = AXES[p.layout]
  else: axes = (*[None]*name.endswith("partial"), *lse_axes(p.layout))
  shape, dtype = (arguments(p) | combine_arguments(p))[name]
  return empty(shape, FLOATS[dtype], c.at.device, c.at.axis(axes))

def run_matrix(c:CheckedCall, choice:Choice) -> list[Tensor]:
  """forward, or for split_kv the same into partial results and then combine."""
  p = replace(c.problem, num_splits=choice.work.splits)
  t = {name: flat_buffer(x) if p.k_view is not None and name in ("k", "v") else x.contiguous() for name, x in c.tensors.items()}
  if choice.kernel == "tiled": choose_backward(p, c.arch, choice.kernel)      # as in run_three_pass
  if TRAINING and not isinstance(can_differentiate(p, c.arch), str): p = replace(p, return_lse=True)      # for backward
  for names, fxn in zip(launched(p), kernels(p, choice)):
    given = [t[name] if name in t else output_buffer(c, name, p) for name in names]
    written = Tensor.custom_kernel(*given, fxn=with_variables(fxn, c.variables))
    t = dict(zip(names, written)) | t      # the inputs stay what they were: their gradients go there
  return [t["o"] if c.out is None else c.out.replace(t["o"]), *([t["lse"]] if c.problem.return_lse else [])]

def with_variables(fxn:KernelFunction, variables:tuple[UOp, ...]) -> KernelFunction:
  """A kernel function whose kernel is called with these Variables, which it has besides its tensors."""
  return (lambda *placeholders: replace(fxn(*placeholders), variables=variables)) if variables else fxn

def run_three_pass(c:CheckedCall, choice:Choice) -> list[Tensor]:
  choose_backward(c.problem, c.arch, choice.kernel)      # where ATTN_KERNEL asks for backward kernels: why there can be none
  return deliver(c, *(plain_attention if c.problem.pages is None else plain_attention_of_pages)(c.problem, c.tensors))

def run_sharded_keys(c:CheckedCall) -> list[Tensor]:
  """Each device its own keys, and the merge. The devices' parts are realized, so the gradient is that of the whole."""
  by_tinygrad(c.arch, SHARDED_ROWS)
  layout = c.problem.layout
  parts = [run(c.on(i)) for i in range(c.at.count)]
  o, lse = merge_devices([(bhsd(o, layout), bhs(lse, layout)) for o, lse in parts])
  o, lse = from_bhsd(o, layout).cast(FLOATS[c.problem.out_dtype]), from_bhs(lse, layout)
  return deliver(c, *with_gradient(c.problem, o, lse, c.tensors))

def check_devices(c:CheckedCall) -> None:
  """Raises ValueError where the call is for another chip than one of its devices is."""
  for device in (c.at.device,) if isinstance(c.at.device, str) else c.at.device:
    if c.arch is not None: check_device(c.arch.name, device)

def run(c:CheckedCall) -> list[Tensor]:
  """o and, where wanted, lse."""
  if c.at.shared == "keys": return run_sharded_keys(c)
  choice = c.choice()
  return (run_three_pass if choice.kernel == "three_pass" else run_matrix)(c, choice)

def attention(q:Tensor, k:Tensor, v:Tensor|None, *, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd",
              window:tuple[int, int]=(-1, -1), softcap:float=0.0, v_dim:int|None=None, alibi_slopes:Tensor|None=None, bias:Tensor|None=None,
              sinks:Tensor|None=None, kv_lengths:int|UOp|Tensor|None=None, kv_starts:Tensor|None=None, block_table:Tensor|None=None,
              cu_seqlens_q:Tensor|None=None, cu_seqlens_k:Tensor|None=None, max_seqlen_q:int|None=None, max_seqlen_k:int|None=None,
              dropout_p:float=0.0, dropout_seed:Tensor|None=None, num_splits:int=0, batch_invariant:bool=False, return_lse:bool=False,
              out:Tensor|None=None, out_dtype:DType|str|None=None, arch:str|None=None) -> Any:
  """softmax(score) V of Tensors, by the kernel that `explain` tells: o in the layout of q, or (o, lse) with `return_lse`. Nothing runs until it is
  realized.

  q (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv): float16, bfloat16 or float32, views of tensors included (they are copied). H is a multiple
  of Hkv: query head h reads key/value head h // (H // Hkv). Score: softmax_scale * Q K^T, then softcap, ALiBi, bias and the masks, in this order.

  causal:        False; True or "bottom-right" (query i sees keys j <= i + Sk - Sq); "top-left" (query i sees keys j <= i, as PyTorch has it)
  softmax_scale: 1/sqrt(D) by default
  layout:        "bhsd"; "bshd" (B, S, H, D); "nsd" (B*H, S, D); "thd" (total, H, D), sequences one after another, with cu_seqlens_q and cu_seqlens_k,
                 int32 (sequences + 1), the row each begins at, and perhaps max_seqlen_q and max_seqlen_k, the longest
  window:        (left, right) keys seen on each side of the diagonal, itself included; -1 for no bound
  softcap:       scores become softcap*tanh(score/softcap); 0 for none
  v_dim:         V is k[..., :v_dim], and v None: multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) as it decodes, with D=576 and
                 v_dim=512, and 16 to 128 query heads on one. K is read once, and no V is copied out of it. The default of softmax_scale stays
                 1/sqrt(D); DeepSeek's models take (128 + 64)**-0.5, of the head before its projections are absorbed, and with YaRN times
                 mscale**2, mscale = 0.1*mscale_all_dim*ln(factor) + 1 by their configuration's rope_scaling. The gradient is by tinygrad
  alibi_slopes:  (H) or (B, H): slope*|i + Sk - Sq - j| is subtracted
  bias:          added, broadcastable to (B, H, Sq, Sk); -inf masks
  sinks:         (H): scores of one more key per head, which has no value; lse counts it
  kv_lengths:    keys there are, the alignment of `causal` being to them: int32 Tensor (B), or an int or a Variable for all; what lies beyond, NaN
                 included, has no effect
  kv_starts:     int32 (B), beside kv_lengths: the keys before it do not exist either, and are not counted
  block_table:   int32 (B, max_blocks): k and v are pages, (pages, page_size, Hkv, D) and (pages, page_size, Hkv, Dv) whatever the layout, and the
                 rows of sequence b are in the pages block_table[b, 0], block_table[b, 1], ... kv_lengths says how many rows, at most
                 max_blocks*page_size. Entries beyond are not read. Any page_size; fastest is a multiple of the tile's keys, which `explain` tells
  dropout_p:     each element of P becomes 0 with this probability (0 <= dropout_p < 1, in steps of 2^-16) and the others P/(1 - dropout_p), in
                 training or not; lse is that without dropout. attn.dropout_mask tells which
  dropout_seed:  uint32 (2), whole on every device: what decides which. By default it is drawn from tinygrad's generator (Tensor.manual_seed), in each
                 call anew, of a TinyJit too
  num_splits:    key ranges computed apart: 0 as a heuristic finds, 1 never, more: so many
  batch_invariant: a row comes out the same, bit by bit, alone and in any batch of as many queries, whatever the lengths of the others and the pages
                 are: the tile and the key ranges don't go by what else there is. Costs speed: docs/serving.md
  return_lse:    also the natural-log sum of exponentials, float32 (B, H, Sq); (B*H, Sq) in layout "nsd", (H, total) in "thd"
  out:           where to put o, a whole buffer; it is also what is returned
  out_dtype:     that of out or of q by default
  arch:          such as "gfx942"; by default that of q's device

  A row that sees no key gives 0, and -inf in lse. Tensors sharded over devices: along batch or heads nothing is communicated; k and v along their
  rows, with q on every device, are merged over the devices by their LSE.
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  options = AttentionOptions(causal=causal, softmax_scale=softmax_scale, layout=layout, window=window, softcap=softcap, v_dim=v_dim,
                             max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k, return_lse=return_lse, arch=arch, alibi_slopes=alibi_slopes,
                             bias=bias, sinks=sinks, kv_lengths=kv_lengths, kv_starts=kv_starts, block_table=block_table, cu_seqlens_q=cu_seqlens_q,
                             cu_seqlens_k=cu_seqlens_k, dropout_p=dropout_p, dropout_seed=dropout_seed, num_splits=num_splits,
                             batch_invariant=batch_invariant, out=out, out_dtype=out_dtype)
  return attend(prepare(q, k, v, options))

def attend(c:CheckedCall) -> Any:
  """o, or (o, lse)."""
  check_devices(c)
  o, *lse = run(seeded(c))
  return (o, *lse) if lse else o

def choice_of(q:Tensor, k:Tensor, v:Tensor|None, **options:Any) -> Choice:
  """The kernel, tile and split that `attention` takes with these arguments, and why not the others; `arch` may be any chip."""
  return prepare(q, k, v, options_of("attention", options)).choice()

def backward_choice_of(q:Tensor, k:Tensor, v:Tensor|None, **options:Any) -> BackwardChoice:
  """What computes the gradients of `attention` with these arguments, and why not the backward kernels."""
  call = prepare(q, k, v, options_of("attention", options))
  if call.at.shared == "keys": return by_tinygrad(call.arch, SHARDED_ROWS)
  return choose_backward(call.problem, call.arch, call.choice().kernel)

def explain(q:Tensor, k:Tensor, v:Tensor|None, *, backward:bool=False, **options:Any) -> Choice|BackwardChoice:
  """Prints and returns `choice_of(...)`; on an AMD GPU also prints which compiler the kernel gets (docs/compilers.md). With `backward` it also
  prints what computes the gradients, `backward_choice_of(...)`, and returns that."""
  choice, backward = choice_of(q, k, v, **options), values.truth("backward", backward)
  print(choice)
  if p := options_of("attention", options).dropout_p: print(f"  dropout_p={p}: each element of P is kept with probability {1 - p:g}")
  device = q.device if isinstance(q.device, str) else (q.device or ("",))[0]
  if choice.arch is not None and device.split(":")[0] == "AMD": print(f"  compiler: {in_use(choice.arch.name)}")
  if not backward: return choice
  print(gradients := backward_choice_of(q, k, v, **options))
  return gradients
