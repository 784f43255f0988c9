"""What users call: `attention` takes Tensors and finds the kernel, `explain` says which and why; `flash_attention` and `flash_attention_fn` are
kernels for `Tensor.custom_kernel`."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Any, Iterable, Protocol
from attn.arch import Arch, get_arch
from attn.dispatch import PROGRAMS, Choice, choose, single_kernel
from attn.kernels.forward import arguments
from attn.kernels.split_kv import combine, combine_arguments
from attn.kernels.three_pass import three_pass
from attn.placement import AXES, Placement, empty, local_shape, merge_devices, on_device, place, placement_of
from attn.problem import EXTRAS, LAYOUTS, Problem, problem_of
from attn.tinygrad_compat import Device, DType, Ops, Tensor, UOp, allow_dynamic_shared, dtypes

DTYPE_NAMES = {dtypes.half: "float16", dtypes.bfloat16: "bfloat16", dtypes.float: "float32", dtypes.int: "int32"}
FLOATS = {"float16": dtypes.half, "bfloat16": dtypes.bfloat16, "float32": dtypes.float}
WRITTEN = ("o", "lse", "o_partial", "lse_partial")
BATCHED = ("bhsd", "bshd")               # layouts whose lse is (B, H, S)
MATRIX_DEVICES = ("AMD", "HIP", "EMU", "CUDA")   # devices that may have a matrix unit that the kernels know

# ***** kernels for Tensor.custom_kernel *****

class Kernel(Protocol):
  """A function for `Tensor.custom_kernel(..., fxn=...)`."""
  def __call__(self, *placeholders:UOp) -> CheckedKernel: ...

def whole_buffer(name:str, u:UOp) -> None:
  """Raises ValueError unless `u`, which a kernel is to write, is a buffer and not a view of one."""
  while u.op in (Ops.RESHAPE, Ops.AFTER, Ops.UNSHARD, Ops.CONTIGUOUS): u = u.src[0]
  if u.op not in (Ops.BUFFER, Ops.PARAM):
    raise ValueError(f"{name} is a view or a computed value ({u.op.name} of a buffer): an output must be a whole contiguous buffer, such as "
                     "Tensor.empty(...), or Tensor.empty_like of a sharded tensor; what a kernel writes to a view is lost")

@dataclass(frozen=True)
class CheckedKernel:
  """A kernel's AST that looks at the tensors it is called on: tinygrad would run it on a view of an output and drop what it wrote."""
  sink: UOp
  outputs: tuple[str, ...]   # the names of the leading arguments, which the kernel writes
  def call(self, *srcs:UOp, **kwargs:Any) -> UOp:
    for name, src in zip(self.outputs, srcs): whole_buffer(name, src)
    allow_dynamic_shared(srcs[0].device)
    return self.sink.call(*srcs, **kwargs)

def default_arch() -> str:
  """The architecture of tinygrad's default device. Raises ValueError where that has no matrix unit known to these kernels."""
  device = Device.DEFAULT
  target = Device[device].renderer.target
  if device.split(":")[0] not in MATRIX_DEVICES:
    raise ValueError(f"device {device} has no matrix unit that these kernels know: use DEV=AMD on an AMD GPU, or DEV=EMU::gfx942 without one")
  return target.arch

def chip_of(name:str, device:str) -> Arch:
  """The table row of the chip `name` that `device` is. A real one may have tiles that TUNE=1 found."""
  return replace(get_arch(name), tuned=device.split(":")[0] != "EMU")

def device_arch() -> Arch:
  """The table row of tinygrad's default device."""
  return chip_of(default_arch(), Device.DEFAULT)

def dtype_name(name:str, u:UOp|Tensor) -> str:
  if u.dtype not in DTYPE_NAMES: raise NotImplementedError(f"{name} has dtype {u.dtype}: supported are {', '.join(FLOATS)}")
  return DTYPE_NAMES[u.dtype]

def static_shape(name:str, shape:tuple[Any, ...]) -> tuple[int, ...]:
  if not all(isinstance(s, int) for s in shape):
    raise NotImplementedError(f"{name} has the symbolic shape {shape}: shapes must be integers, a variable number of keys is what kv_lengths is for")
  return tuple(map(int, shape))

@functools.cache
def flash_attention_fn(*, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd", window:tuple[int, int]=(-1, -1),
                       arch:str|None=None, return_lse:bool=False, softcap:float=0.0, extras:tuple[str, ...]=(), max_seqlen_q:int|None=None,
                       max_seqlen_k:int|None=None) -> Kernel:
  """A kernel function for `Tensor.custom_kernel(o, q, k, v, fxn=...)`, or `(o, lse, q, k, v)` when `return_lse`. One object per set of options.

  causal:        False; True or "bottom-right" (query i sees keys j <= i + Sk - Sq); "top-left" (query i sees keys j <= i)
  softmax_scale: factor of the scores, 1/sqrt(D) by default
  layout:        "bhsd", "bshd" or "nsd" (B*H, S, D), or "thd" (sequences one after another)
  window:        (left, right) keys seen on each side of the diagonal, itself included; -1 for no bound
  arch:          such as "gfx942"; by default that of tinygrad's default device
  return_lse:    also write the natural-log sum of exponentials, float32 (B, H, Sq)
  softcap:       scores become softcap*tanh(score/softcap)
  extras:        names of the tensors that follow v, in this order: alibi_slopes, bias, sinks, kv_lengths, cu_seqlens_q, cu_seqlens_k (see Problem)
  max_seqlen_q, max_seqlen_k: the longest sequence, of layout "thd"

  q, k, v: float16 or bfloat16; o: float16, bfloat16 or float32. Rows that see no key give o = 0 and lse = -inf.
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  if arch is not None: get_arch(arch)
  if extras != tuple(name for name in EXTRAS if name in extras):
    raise ValueError(f"extras={extras!r}: must be some of {', '.join(EXTRAS)}, in this order")
  outputs = ("o", "lse") if return_lse else ("o",)

  def kernel(*placeholders:UOp) -> CheckedKernel:
    names = (*outputs, "q", "k", "v", *extras)
    if len(placeholders) != len(names): raise ValueError(f"{len(placeholders)} tensors given: this kernel takes ({', '.join(names)})")
    t = dict(zip(names, placeholders))
    shapes = {name: static_shape(name, u.shape) for name, u in t.items()}
    found = get_arch(arch) if arch is not None else device_arch()
    p = problem_of(*[shapes[n] for n in ("o", "q", "k", "v")], dtypes=[dtype_name(n, t[n]) for n in ("o", "q", "k", "v", *outputs[1:])],
                   lse=shapes["lse"] if return_lse else None, causal=causal, window=window, softmax_scale=softmax_scale, layout=layout,
                   softcap=softcap, extras={n: (shapes[n], dtype_name(n, t[n])) for n in extras}, max_seqlen_q=max_seqlen_q,
                   max_seqlen_k=max_seqlen_k)
    return CheckedKernel(single_kernel(p, found)[0](*placeholders), outputs)
  return kernel

def flash_attention(o:UOp, q:UOp, k:UOp, v:UOp) -> CheckedKernel:
  """Full attention of (B, H, S, D) tensors: `Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, fxn=flash_attention)[0]`."""
  return flash_attention_fn()(o, q, k, v)

# ***** attention of Tensors *****

@dataclass(frozen=True)
class Call:
  """A problem with its tensors: q, k, v and the extras, by name. `problem` is what one device has to do, or all of them where `at` shares out the
  keys."""
  problem: Problem
  tensors: dict[str, Tensor]
  arch: Arch|None
  at: Placement
  out: Tensor|None
  def choice(self) -> Choice: return choose(self.problem if self.at.shared != "keys" else self.on(0).problem, self.arch)
  def on(self, i:int) -> Call:
    """The part of the i-th device, over its shard of the keys."""
    p, rows = self.problem, self.problem.Sk//self.at.count
    t = {name: on_device(x, i) for name, x in self.tensors.items() if name != "sinks" or i == 0}   # a sink counts once
    if p.bias is not None and p.bias[3]: t["bias"] = t["bias"][..., i*rows:(i + 1)*rows]
    part = replace(p, Sk=rows, offset=p.offset - i*rows, sinks="sinks" in t, out_dtype="float32", return_lse=True)
    return Call(part, t, self.arch, Placement(self.at.device[i]), None)

def arch_of(device:str) -> Arch|None:
  """The table row of a device's chip; None where it has no matrix unit that the kernels know."""
  if device.split(":")[0] not in MATRIX_DEVICES: return None
  try: return chip_of(Device[device].renderer.target.arch, device)
  except ValueError: return None

def bhsd(x:Tensor, layout:str) -> Tensor:
  """A tensor in `layout` as (B, H, S, D)."""
  if layout == "thd": return x.transpose(0, 1).unsqueeze(0)
  return x.transpose(1, 2) if layout == "bshd" else x.unsqueeze(0) if layout == "nsd" else x

def bhs(lse:Tensor, layout:str) -> Tensor: return lse if layout in BATCHED else lse.unsqueeze(0)

def from_bhsd(x:Tensor, layout:str) -> Tensor:
  if layout == "thd": return x.squeeze(0).transpose(0, 1)
  return x.transpose(1, 2) if layout == "bshd" else x.squeeze(0) if layout == "nsd" else x

def known(n:int|UOp|Tensor) -> int|None:
  """The number of rows where the host knows it: an int, or the value that a Variable is bound to."""
  return n if isinstance(n, int) else int(n.unbind()[1]) if isinstance(n, UOp) and n.is_bound_var else None

def lengths(n:int|UOp|Tensor, batch:int, capacity:int, at:Placement, name:str) -> Tensor:
  """A number of rows as an int32 tensor (batch): given so, or the same for all as an int or a tinygrad Variable. Raises ValueError beyond
  0..capacity."""
  if isinstance(n, Tensor):
    if n.dtype != dtypes.int: raise ValueError(f"{name} has dtype {n.dtype}: must be int32")
    placed = place(name, n, at)
    if local_shape(placed) != (batch,):
      raise ValueError(f"{name} has shape {n.shape}: must be ({batch if at.shared != 'batch' else batch*at.count},)")
    return placed
  if not isinstance(n, (int, UOp)): raise ValueError(f"{name}={n!r}: must be an int, a Variable or an int32 Tensor")
  if (value := known(n)) is not None and not 0 <= value <= capacity:
    raise ValueError(f"{name}={value}: must lie in 0..{capacity}, the rows there are")
  return Tensor.full((batch,), n, dtype=dtypes.int, device=at.device).contiguous()

def prepare(q:Tensor, k:Tensor, v:Tensor, *, causal:bool|str, softmax_scale:float|None, layout:str, window:tuple[int, int], softcap:float,
            alibi_slopes:Tensor|None, bias:Tensor|None, sinks:Tensor|None, kv_lengths:int|UOp|Tensor|None, cu_seqlens_q:Tensor|None,
            cu_seqlens_k:Tensor|None, max_seqlen_q:int|None, max_seqlen_k:int|None, num_splits:int, return_lse:bool, out:Tensor|None,
            out_dtype:DType|None, arch:str|None) -> Call:
  """The arguments of `attention`, checked."""
  for name, t in (("q", q), ("k", k), ("v", v)):
    if not isinstance(t, Tensor): raise ValueError(f"{name} is a {type(t).__name__}: must be a Tensor")
    if t.dtype not in FLOATS.values(): raise NotImplementedError(f"{name} has dtype {t.dtype}: supported are {', '.join(FLOATS)}")
  optional = {"alibi_slopes": alibi_slopes, "bias": bias, "sinks": sinks, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "out": out}
  for name, given in optional.items():
    if given is not None and not isinstance(given, Tensor): raise ValueError(f"{name}={given!r}: must be a Tensor or None")
  if layout not in LAYOUTS: raise ValueError(f"layout={layout!r}: must be one of {', '.join(f'{name!r} {axes}' for name, axes in LAYOUTS.items())}")
  shape = {name: static_shape(name, t.shape) for name, t in (("q", q), ("k", k), ("v", v))}
  rank = len(AXES[layout])
  for name, s in shape.items():
    if len(s) != rank: raise ValueError(f"{name} has shape {s}; layout={layout!r} needs {LAYOUTS[layout]}")
  at = placement_of(q, k, v, layout)
  if at.shared != "keys": shape = {name: local_shape(t) for name, t in (("q", q), ("k", k), ("v", v))}
  batch, capacity = (shape["k"][AXES[layout].index(axis)] if axis in AXES[layout] else 1 for axis in ("batch", "rows"))

  # ***** optional tensors *****
  extras: dict[str, Tensor] = {}
  for name in ("alibi_slopes", "sinks"):
    if (given := optional[name]) is not None: extras[name] = place(name, given.cast(dtypes.float), at)
  if bias is not None:
    if bias.dtype not in FLOATS.values():
      raise ValueError(f"bias has dtype {bias.dtype}: must be one of {', '.join(FLOATS)}; scaled_dot_product_attention takes a mask of bools")
    if bias.ndim > 4: raise ValueError(f"bias has shape {bias.shape}: must broadcast to (B, H, Sq, Sk)")
    extras["bias"] = place("bias", bias.reshape(*[1]*(4 - bias.ndim), *bias.shape), at)
  if kv_lengths is not None: extras["kv_lengths"] = lengths(kv_lengths, batch, capacity, at, "kv_lengths")
  for name in ("cu_seqlens_q", "cu_seqlens_k"):
    if (given := optional[name]) is not None: extras[name] = place(name, given, at)
  extras = {name: extras[name] for name in EXTRAS if name in extras}
  if at.shared == "keys":
    for name in ("kv_lengths", "cu_seqlens_k"):
      if name in extras: raise NotImplementedError(f"{name} with k and v sharded along their rows: shard along batch or heads instead")

  # ***** the output *****
  o_shape = (*shape["q"][:-1], shape["v"][-1])
  if out is not None:
    whole_buffer("out", out.uop)
    want = (*q.shape[:-1], v.shape[-1])
    if out.shape != want: raise ValueError(f"out has shape {out.shape}: must be {want}")
    if out_dtype not in (None, out.dtype): raise ValueError(f"out_dtype={out_dtype} but out has dtype {out.dtype}")
    if (out.device, out.uop.axis) != (q.device, q.uop.axis):
      raise ValueError(f"out lies on {out.device}, sharded along axis {out.uop.axis}: must be as q, on {q.device}, along axis {q.uop.axis}")
  out_dtype = out_dtype or (out.dtype if out is not None else q.dtype)
  if out_dtype not in FLOATS.values(): raise NotImplementedError(f"out_dtype={out_dtype}: must be one of {', '.join(FLOATS)}")
  if num_splits < 0: raise ValueError(f"num_splits={num_splits}: must be 0 (chosen by a heuristic), 1 (no split) or the number of splits")
  p = problem_of(o_shape, shape["q"], shape["k"], shape["v"], dtypes=[DTYPE_NAMES[t] for t in (out_dtype, q.dtype, k.dtype, v.dtype)],
                 causal=causal, window=window, softmax_scale=softmax_scale, layout=layout, softcap=softcap, max_seqlen_q=max_seqlen_q,
                 max_seqlen_k=max_seqlen_k, num_splits=num_splits, extras={name: (local_shape(t), dtype_name(name, t)) for name, t in extras.items()})
  found = get_arch(arch) if arch is not None else arch_of(at.device if isinstance(at.device, str) else at.device[0])
  return Call(replace(p, return_lse=return_lse), {"q": q, "k": k, "v": v, **extras}, found, at, out)

@functools.cache
def kernels(p:Problem, choice:Choice) -> list[Kernel]:
  """What `choice` launches, in order: as single objects, for tinygrad's schedule cache goes by identity."""
  assert choice.arch is not None and choice.work.tile is not None
  p, arch = replace(p, num_splits=choice.work.splits), choice.arch
  def checked(program:Any, names:Iterable[str]) -> Kernel:
    written = tuple(name for name in names if name in WRITTEN)
    return lambda *placeholders: CheckedKernel(program(*placeholders), written)
  found = [checked(PROGRAMS[choice.kernel](p, arch, choice.work.tile), arguments(p))]
  return found + ([checked(combine(p, arch, p.num_splits), combine_arguments(p))] if p.num_splits > 1 else [])

def deliver(c:Call, o:Tensor, lse:Tensor) -> list[Tensor]:
  """o and, where wanted, lse as the call wants them, from o (B, H, S, D) and lse (B, H, S)."""
  o = from_bhsd(o, c.problem.layout).cast(FLOATS[c.problem.out_dtype])
  return [o if c.out is None else c.out.assign(o), lse if c.problem.layout in BATCHED else lse.squeeze(0)][:2 if c.problem.return_lse else 1]

def output(c:Call, name:str, p:Problem) -> Tensor:
  """A buffer for what a kernel of `p` writes."""
  if name == "o":
    if c.out is not None: return c.out
    axes: tuple[str|None, ...] = AXES[p.layout]
  else: axes = ((None,) if name.endswith("partial") else ()) + (("heads", "rows") if p.layout in ("nsd", "thd") else ("batch", "heads", "rows"))
  shape, dtype = (arguments(p) | combine_arguments(p))[name]
  return empty(shape, FLOATS[dtype], c.at.device, c.at.axis(axes))

def no_gradient(*args:UOp, **kwargs:Any) -> Any:
  raise NotImplementedError("the matrix kernels of attention have no gradient; with ATTN_KERNEL=three_pass there is one")

def run_matrix(c:Call, choice:Choice) -> list[Tensor]:
  """forward, or for split_kv the same into partial results and then combine."""
  p, t = replace(c.problem, num_splits=choice.work.splits), {name: x.contiguous() for name, x in c.tensors.items()}
  launches = [arguments(p), combine_arguments(p)][:1 if p.num_splits == 1 else 2]
  for names, fxn in zip(launches, kernels(c.problem, choice)):
    given = [t[name] if name in t else output(c, name, p) for name in names]
    t |= zip(names, Tensor.custom_kernel(*given, fxn=fxn, grad_fxn=no_gradient))
  return [t["o"] if c.out is None else c.out.replace(t["o"]), *([t["lse"]] if p.return_lse else [])]

def run_three_pass(c:Call, _:Choice) -> list[Tensor]:
  p, t = c.problem, c.tensors
  o, lse = three_pass(*(bhsd(t[name], p.layout) for name in ("q", "k", "v")), softmax_scale=p.softmax_scale, window=p.window, top_left=p.top_left,
                      offset=p.offset, softcap=p.softcap, **{name: t[name] for name in EXTRAS if name in t})
  return deliver(c, o, lse)

def run(c:Call) -> list[Tensor]:
  """o and, where wanted, lse."""
  if c.at.shared == "keys":
    parts = [run(c.on(i)) for i in range(c.at.count)]
    return deliver(c, *merge_devices([(bhsd(o, c.problem.layout), bhs(lse, c.problem.layout)) for o, lse in parts]))
  choice = c.choice()
  return (run_three_pass if choice.kernel == "three_pass" else run_matrix)(c, choice)

def attention(q:Tensor, k:Tensor, v:Tensor, *, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd",
              window:tuple[int, int]=(-1, -1), softcap:float=0.0, alibi_slopes:Tensor|None=None, bias:Tensor|None=None, sinks:Tensor|None=None,
              kv_lengths:int|UOp|Tensor|None=None, cu_seqlens_q:Tensor|None=None, cu_seqlens_k:Tensor|None=None, max_seqlen_q:int|None=None,
              max_seqlen_k:int|None=None, num_splits:int=0, return_lse:bool=False, out:Tensor|None=None, out_dtype:DType|None=None,
              arch:str|None=None) -> Any:
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
  alibi_slopes:  (H) or (B, H): slope*|i + Sk - Sq - j| is subtracted
  bias:          added, broadcastable to (B, H, Sq, Sk); -inf masks
  sinks:         (H): scores of one more key per head, which has no value; lse counts it
  kv_lengths:    keys there are, the alignment of `causal` being to them: int32 Tensor (B), or an int or a Variable for all; what lies beyond, NaN
                 included, has no effect
  num_splits:    key ranges computed apart: 0 as a heuristic finds, 1 never, more: so many
  return_lse:    also the natural-log sum of exponentials, float32 (B, H, Sq); (B*H, Sq) in layout "nsd", (H, total) in "thd"
  out:           where to put o, a whole buffer; it is also what is returned
  out_dtype:     that of out or of q by default
  arch:          such as "gfx942"; by default that of q's device

  A row that sees no key gives 0, and -inf in lse. Tensors sharded over devices: along batch or heads nothing is communicated; k and v along their
  rows, with q on every device, are merged over the devices by their LSE.
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  o, *lse = run(prepare(**locals()))
  return (o, *lse) if lse else o

def choice_of(q:Tensor, k:Tensor, v:Tensor, **options:Any) -> Choice:
  """The kernel, tile and split that `attention` takes with these arguments, and why not the others."""
  defaults = attention.__kwdefaults__ or {}
  if unknown := sorted(options.keys() - defaults.keys()):
    raise ValueError(f"{unknown[0]}={options[unknown[0]]!r}: attention has no such option; it has {', '.join(defaults)}")
  return prepare(q, k, v, **defaults | options).choice()

def explain(q:Tensor, k:Tensor, v:Tensor, **options:Any) -> Choice:
  """Prints and returns `choice_of(...)`."""
  choice = choice_of(q, k, v, **options)
  print(choice)
  return choice
