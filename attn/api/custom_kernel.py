"""Kernels for `Tensor.custom_kernel`: `flash_attention` for attention without options, `flash_attention_fn` for attention with options."""
from __future__ import annotations
from collections.abc import Callable
from attn import values
from attn.calls.checked_kernel import CheckedKernel, KernelFunction, checked_ast, device_arch, dtype_of, named_chip
from attn.calls.gradient import gradient_of
from attn.calls.options import KernelOptions
from attn.choose.dispatch import single_kernel
from attn.functions.trace import functions_of
from attn.problem import EXTRAS, MOD_TENSORS, GivenExtras, problem_of
from attn.tinygrad_compat import UOp
from attn.values import cache_of_kernels, static_shape

@values.names_itself
def flash_attention_fn(*, causal:bool|str=False, softmax_scale:float|None=None, layout:str="bhsd", window:tuple[int, int]=(-1, -1),
                       softcap:float=0.0, score_mod:Callable[..., UOp]|None=None, mask_mod:Callable[..., UOp]|None=None, dropout_p:float=0.0,
                       max_seqlen_q:int|None=None, max_seqlen_k:int|None=None, return_lse:bool=False, arch:str|None=None,
                       extras:tuple[str, ...]=()) -> KernelFunction:
  """Returns a kernel function for `Tensor.custom_kernel`. Equal options return the identical object.

    fn = attn.flash_attention_fn(causal=True)
    o = Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, fxn=fn)[0]

  The function takes the tensors (o, q, k, v), or (o, lse, q, k, v) with `return_lse`, and then the tensors that `extras` names. q, k, v and o are
  float16, bfloat16 or float32; q, k and v have the same dtype.

    layout         "bhsd", "bshd", "nsd" (B*H, S, D) or "thd" (total, H, D): packed sequences, one after another
    softmax_scale  factor of Q K^T, 1/sqrt(D) by default
    softcap        a score becomes softcap*tanh(score/softcap); 0: no cap
    causal         False; True or "bottom-right": query i sees keys j <= i + Sk - Sq; "top-left": keys j <= i
    window         (left, right): number of keys seen before and after the diagonal key, which is seen too; -1: no bound
    score_mod      your own function of a score; see attn.attention. `extras` names the tensors that score_mod reads: mod_tensor0, mod_tensor1, ...
    mask_mod       your own mask; see attn.attention. `extras` names the tensors that mask_mod reads
    dropout_p      probability that an element of P becomes 0; all other elements become P/(1 - dropout_p). `extras` must name dropout_seed
    max_seqlen_q   longest sequence of q, for "thd"
    max_seqlen_k   longest sequence of k, for "thd"
    return_lse     also write the natural-log sum of exponentials, float32 (B, H, Sq)
    arch           chip, for example "gfx942"; by default the chip of tinygrad's default device
    extras         names of the optional tensors after v, in this order: alibi_slopes, bias, sinks, kv_lengths, cu_seqlens_q, cu_seqlens_k,
                   dropout_seed, first_batch_and_head, mod_tensor0 to mod_tensor7. attn.problem.Problem says which shape and dtype each tensor has.
                   dropout_seed is uint32 (2). first_batch_and_head is for q, k and v that are a part of larger tensors: uint32 (2), the index of the
                   part's first batch and first head, from which dropout, score_mod and mask_mod count batches and heads

  A query that sees no key gives o = 0 and lse = -inf.
  Raises ValueError or NotImplementedError before anything runs. The error names the argument, its value and what is supported."""
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
    given: GivenExtras = {n: (shapes[n], dtype_of(n, t[n])) for n in extras}
    kinds = tuple((shapes[n], dtype_of(n, t[n])) for n in MOD_TENSORS if n in given)
    found = named_chip(options.arch) if options.arch is not None else device_arch()
    fields = options.problem_fields | functions_of(options.score_mod, options.mask_mod, kinds)
    p = problem_of(*[shapes[n] for n in ("o", "q", "k", "v")], dtypes=[dtype_of(n, t[n]) for n in ("o", "q", "k", "v", *outputs[1:])],
                   lse=shapes["lse"] if options.return_lse else None, extras=given, **fields)
    sink = checked_ast(single_kernel(p, found)[0], found, *placeholders)
    return CheckedKernel(sink, outputs, options.arch, gradient_of(p, found, names), kept=True)
  return kernel

def flash_attention(o:UOp, q:UOp, k:UOp, v:UOp) -> CheckedKernel:
  """Computes attention without any option, for tensors (B, H, S, D). `flash_attention` is a kernel function for `Tensor.custom_kernel`.

    o = Tensor.empty(*q.shape, dtype=q.dtype).custom_kernel(q, k, v, fxn=attn.flash_attention)[0]"""
  return flash_attention_fn()(o, q, k, v)
