"""Kernels for `Tensor.custom_kernel`: `flash_attention` and `flash_attention_fn`."""
from __future__ import annotations
from attn import values
from attn.calls.checked_kernel import CheckedKernel, KernelFunction, check_means, device_arch, dtype_of, named_chip
from attn.calls.gradient import gradient_of
from attn.calls.options import KernelOptions
from attn.choose.dispatch import single_kernel
from attn.problem import EXTRAS, problem_of
from attn.tinygrad_compat import UOp
from attn.values import cache_of_kernels, static_shape

def flash_attention_fn(*, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd", window:tuple[int, int]=(-1, -1),
                       softcap:float=0.0, dropout_p:float=0.0, max_seqlen_q:int|None=None, max_seqlen_k:int|None=None, return_lse:bool=False,
                       arch:str|None=None, extras:tuple[str, ...]=()) -> KernelFunction:
  """A kernel function for `Tensor.custom_kernel(o, q, k, v, fxn=...)`, or `(o, lse, q, k, v)` when `return_lse`. One object per set of options.

  causal:        False; True or "bottom-right" (query i sees keys j <= i + Sk - Sq); "top-left" (query i sees keys j <= i)
  softmax_scale: factor of the scores, 1/sqrt(D) by default
  layout:        "bhsd", "bshd" or "nsd" (B*H, S, D), or "thd" (sequences one after another)
  window:        (left, right) keys seen on each side of the diagonal, itself included; -1 for no bound
  arch:          such as "gfx942"; by default that of tinygrad's default device
  return_lse:    also write the natural-log sum of exponentials, float32 (B, H, Sq)
  softcap:       scores become softcap*tanh(score/softcap)
  dropout_p:     elements of P become 0 with this probability, and the others P/(1 - dropout_p): takes dropout_seed, uint32 (2), among the extras
  extras:        names of the tensors that follow v, in this order: alibi_slopes, bias, sinks, kv_lengths, cu_seqlens_q, cu_seqlens_k, dropout_seed,
                 dropout_start (see Problem)
  max_seqlen_q, max_seqlen_k: the longest sequence, of layout "thd"

  q, k, v and o: float16, bfloat16 or float32, q, k and v the same. Rows that see no key give o = 0 and lse = -inf.
  Raises ValueError or NotImplementedError, naming the argument, its value and what is supported, before anything runs.
  """
  options = KernelOptions(**{name: x for name, x in locals().items() if name != "extras"})
  if not isinstance(extras, (tuple, list)) or list(extras) != [*(names := tuple(name for name in EXTRAS if name in extras))]:
    raise values.wrong("extras", extras, f"some of {', '.join(EXTRAS)}, in this order")
  if options.dropout_p and "dropout_seed" not in names:
    raise ValueError(f"dropout_p={options.dropout_p} with extras={values.shown(extras)}: must name dropout_seed, a tensor of uint32 (2)")
  return _kernel_of(options, names)

@cache_of_kernels
def _kernel_of(options:KernelOptions, extras:tuple[str, ...]) -> KernelFunction:
  outputs = ("o", "lse") if options.return_lse else ("o",)
  def kernel(*placeholders:UOp) -> CheckedKernel:
    names = (*outputs, "q", "k", "v", *extras)
    if len(placeholders) != len(names): raise ValueError(f"{len(placeholders)} tensors given: this kernel takes ({', '.join(names)})")
    t = dict(zip(names, placeholders))
    shapes = {name: static_shape(name, u.shape) for name, u in t.items()}
    found = named_chip(options.arch) if options.arch is not None else device_arch()
    p = problem_of(*[shapes[n] for n in ("o", "q", "k", "v")], dtypes=[dtype_of(n, t[n]) for n in ("o", "q", "k", "v", *outputs[1:])],
                   lse=shapes["lse"] if options.return_lse else None, extras={n: (shapes[n], dtype_of(n, t[n])) for n in extras}, **options.posed)
    sink = single_kernel(p, found)[0](*placeholders)
    check_means(sink, found)
    return CheckedKernel(sink, outputs, options.arch, gradient_of(p, found, names), kept=True)
  return kernel

def flash_attention(o:UOp, q:UOp, k:UOp, v:UOp) -> CheckedKernel:
  """Full attention of (B, H, S, D) tensors: `Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, fxn=flash_attention)[0]`."""
  return flash_attention_fn()(o, q, k, v)
