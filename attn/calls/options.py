"""Options of attention: each record declares an option once, with default, check and meaning."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from attn import values
from attn.chips import get_chip
from attn.problem import (DTYPES, check_causal, check_dropout_p, check_layout, check_order, check_softcap, check_softmax_scale, check_splits,
                          check_window)
from attn.tinygrad_compat import DType, Tensor, UOp, dtypes
from attn.values import FLOATS, option

# test/calls/test_options.py compares the records with the signatures of `attention`, `flash_attention_fn` and `attention_with_kv_cache`, and with the
# tables of README.md and docs/options.md.

FLOAT_WORDS = {**FLOATS, "half": dtypes.half, "float": dtypes.float}     # numpy's names of dtypes, and tinygrad's

def unless_none(check:values.Check) -> values.Check: return lambda name, x: None if x is None else check(name, x)

def check_arch(name:str, x:Any) -> str:
  if not isinstance(x, str): raise values.wrong(name, x, "the name of a chip, such as 'gfx942'")
  get_chip(x)
  return x

def check_v_dim(name:str, x:Any) -> int: return values.whole_number(name, x, 1, None, "the number of first columns of k that are V, at least 1")

def check_longest(name:str, x:Any) -> int: return values.whole_number(name, x, 1, None, "the rows of the longest sequence, at least 1")

def check_out_dtype(name:str, x:Any) -> DType:
  dtype = FLOAT_WORDS.get(x) if isinstance(x, str) else x
  if not isinstance(dtype, DType): raise values.wrong(name, x, f"one of {', '.join(FLOATS)}, a dtype of tinygrad or its name")
  if dtype not in FLOATS.values(): raise NotImplementedError(f"{name}={values.dtype_text(dtype)}: must be one of {', '.join(DTYPES)}")
  return dtype

def check_lengths(name:str, x:Any) -> int|UOp|Tensor:
  """Returns an option that is a number of rows: an int, a Variable with a value (`bind`), or a Tensor. Raises ValueError for anything else."""
  # Whether the number lies within the limits is checked when q, k and v are known.
  if isinstance(x, UOp) and x.is_variable: raise values.wrong(name, x, "bound to a number: variable.bind(n)")
  if isinstance(x, (UOp, Tensor)): return x
  if not values.is_whole(x): raise values.wrong(name, x, "an int, a Variable or an int32 Tensor")
  return int(x)

def check_sequence_lengths(name:str, x:Any) -> tuple[int, int]:
  supported = "(Sq, Sk), rows of q and of k without the padding, each at least 1"
  if not isinstance(x, (tuple, list)) or len(x) != 2: raise values.wrong(name, x, supported)
  try: queries, keys = (values.whole_number(name, n, 1, None, supported) for n in x)
  except ValueError: raise values.wrong(name, x, supported) from None
  return queries, keys

def check_mod(name:str, x:Any) -> Any:
  if not callable(x): raise values.wrong(name, x, "a function of UOps")
  return x

def check_tensors(name:str, x:Any) -> tuple[Tensor, ...]:
  if not isinstance(x, (tuple, list)): raise values.wrong(name, x, "a tuple of Tensors")
  return tuple(values.tensor(f"{name}[{n}]", t) for n, t in enumerate(x))

@dataclass(frozen=True)
class KernelOptions:
  """Checked options of `flash_attention_fn`: the options that change a kernel's code."""
  causal: bool|str = option(False, check_causal, 'False; True or "bottom-right": query i sees keys j <= i + Sk - Sq; "top-left": keys j <= i')
  softmax_scale: float|None = option(None, unless_none(check_softmax_scale), "factor of the scores, any positive number; 1/sqrt(D) by default")
  layout: str = option("bhsd", check_layout, '"bhsd" (B, H, S, D), "bshd" (B, S, H, D), "nsd" (B*H, S, D), "thd" (total, H, D): sequences in a row')
  window: tuple[int, int] = option((-1, -1), check_window, "(left, right): keys seen before and after the diagonal key, itself seen; -1: no bound")
  softcap: float = option(0.0, check_softcap, "a score becomes softcap * tanh(score / softcap); 0: no cap")
  score_mod: Callable[..., UOp]|None = option(None, unless_none(check_mod),
                                              "function of UOps (score, b, h, i, j, *tensors) that returns the score to use instead")
  mask_mod: Callable[..., UOp]|None = option(None, unless_none(check_mod),
                                             "function of UOps (b, h, i, j, *tensors): whether the query at i sees the key at j")
  dropout_p: float = option(0.0, check_dropout_p, "probability that an element of P becomes 0, below 1; the others become P / (1 - dropout_p)")
  max_seqlen_q: int|None = option(None, unless_none(check_longest), 'longest sequence of q, for layout "thd"; rows beyond are 0')
  max_seqlen_k: int|None = option(None, unless_none(check_longest), 'longest sequence of k, for layout "thd"; keys beyond do not exist')
  return_lse: bool = option(False, values.truth, "also return the natural-log sum of exponentials, float32 (B, H, Sq)")
  arch: str|None = option(None, unless_none(check_arch), 'chip, for example "gfx942"; by default the chip of the device')

  def __post_init__(self) -> None:
    for f in fields(self): object.__setattr__(self, f.name, f.metadata["check"](f.name, getattr(self, f.name)))

  @property
  def problem_fields(self) -> dict[str, Any]:
    """Options that describe the problem, by name: keyword arguments of `problem_of`."""
    return {f.name: getattr(self, f.name) for f in fields(KernelOptions) if f.name not in ("return_lse", "arch", "score_mod", "mask_mod")}

@dataclass(frozen=True, eq=False)
class AttentionOptions(KernelOptions):
  """Checked options of `attention`, before the checks that need q, k and v."""
  v_dim: int|None = option(None, unless_none(check_v_dim), "V is k[..., :v_dim] and v is None: latent attention (MLA), which reads K once")
  alibi_slopes: Tensor|None = option(None, values.tensor_or_none, "(H) or (B, H): adds -slope * abs(i + offset - j)")
  bias: Tensor|None = option(None, values.tensor_or_none, "added to the scores, broadcastable to (B, H, Sq, Sk); -inf masks")
  mod_tensors: Sequence[Tensor] = option((), check_tensors, "tensors that score_mod and mask_mod read, after their other arguments")
  sinks: Tensor|None = option(None, values.tensor_or_none, "(H): score of one extra key per head that has no value")
  kv_lengths: int|UOp|Tensor|None = option(None, unless_none(check_lengths),
                                           "number of keys that exist, int, Variable or int32 (B); rows beyond have no effect")
  kv_starts: Tensor|None = option(None, values.tensor_or_none, "int32 (B), with kv_lengths: earlier keys do not exist either; keys count from here")
  block_table: Tensor|None = option(None, values.tensor_or_none,
                                    "int32 (B, max_blocks): the pages of each sequence; k and v are pages (pages, page_size, Hkv, D)")
  cu_seqlens_q: Tensor|None = option(None, values.tensor_or_none,
                                     'int32 (sequences + 1), for layout "thd": first row of each sequence in q, then the total')
  cu_seqlens_k: Tensor|None = option(None, values.tensor_or_none,
                                     'int32 (sequences + 1), for layout "thd": first row of each sequence in k and v, then the total')
  dropout_seed: Tensor|None = option(None, values.tensor_or_none, "uint32 (2): decides which elements drop; by default from tinygrad's generator")
  q_scale: Tensor|None = option(None, values.tensor_or_none, "float32, factor of q of 8 bits: one number, or (B, Hkv)")
  k_scale: Tensor|None = option(None, values.tensor_or_none, "float32, factor of k of 8 bits: one number, or (B, Hkv)")
  v_scale: Tensor|None = option(None, values.tensor_or_none, "float32, factor of v of 8 bits: one number, or (B, Hkv)")
  fast_accumulate: bool = option(False, values.truth, "q, k and v of 8 bits: leave sums to a matrix unit that adds with 14 bits; faster, coarser")
  num_splits: int = option(0, check_splits, "number of key ranges computed in parallel; 0: as many as fill the chip, 1: no split")
  batch_invariant: bool = option(False, values.truth, "a row has the same bits alone and in any batch; slower")
  deterministic: bool = option(True, values.truth, "gradients have the same bits in every run; False lets faster kernels add to dq in no order")
  sequence_order: str = option("contiguous", check_order, 'order of rows sharded over devices: "contiguous" or "zigzag", as shard_sequence')
  sequence_lengths: tuple[int, int]|None = option(None, unless_none(check_sequence_lengths),
                                                     "(Sq, Sk) without padding, of rows sharded over devices")
  out: Tensor|None = option(None, values.tensor_or_none, "whole buffer to write o to; the call returns it as o")
  out_dtype: DType|str|None = option(None, unless_none(check_out_dtype),
                                     "float16, bfloat16 or float32; by default the dtype of out, or of q; bfloat16 for q of 8 bits")

DEFAULTS = {f.name: f.default for f in fields(AttentionOptions)}

def options_of(function:str, given:dict[str, Any]) -> AttentionOptions:
  """Returns the checked options that a caller passed to the function named `function`, or raises ValueError for an unknown or wrong option."""
  if unknown := sorted(given.keys() - DEFAULTS.keys()):
    raise ValueError(f"{unknown[0]}={values.shown(given[unknown[0]])}: {function} has no such option; it has {', '.join(DEFAULTS)}")
  return AttentionOptions(**given)
