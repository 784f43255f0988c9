"""The options of attention, each declared once: its default, its check and what it means. The signatures of `attention`, `flash_attention_fn` and
`attention_with_kv_cache` and the tables of README.md are held to these records by test/calls/test_options.py."""
from __future__ import annotations
from dataclasses import dataclass, fields
from typing import Any
from attn import values
from attn.chips import get_chip
from attn.problem import (DTYPES, check_causal, check_dropout_p, check_layout, check_order, check_softcap, check_softmax_scale, check_splits,
                          check_window)
from attn.tinygrad_compat import DType, Tensor, UOp, dtypes
from attn.values import FLOATS, option

FLOAT_WORDS = {**FLOATS, "half": dtypes.half, "float": dtypes.float}     # and tinygrad's own names

def unless_none(check:values.Check) -> values.Check: return lambda name, x: None if x is None else check(name, x)

def check_arch(name:str, x:Any) -> str:
  if not isinstance(x, str): raise values.wrong(name, x, "the name of a chip, such as 'gfx942'")
  get_chip(x)
  return x

def check_v_dim(name:str, x:Any) -> int: return values.whole_number(name, x, 1, None, "the first columns of k that are v, at least 1")

def check_longest(name:str, x:Any) -> int: return values.whole_number(name, x, 1, None, "the rows of the longest sequence, at least 1")

def check_out_dtype(name:str, x:Any) -> DType:
  dtype = FLOAT_WORDS.get(x) if isinstance(x, str) else x
  if not isinstance(dtype, DType): raise values.wrong(name, x, f"one of {', '.join(FLOATS)}, a dtype of tinygrad or its name")
  if dtype not in FLOATS.values(): raise NotImplementedError(f"{name}={values.dtype_text(dtype)}: must be one of {', '.join(DTYPES)}")
  return dtype

def check_lengths(name:str, x:Any) -> int|UOp|Tensor:
  """What can be said of a number of rows without the tensors."""
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

@dataclass(frozen=True)
class KernelOptions:
  """The options of `flash_attention_fn`, checked: what a kernel is specialised on, apart from shapes and dtypes."""
  causal: bool|str = option(False, check_causal, 'False; True or "bottom-right": query i sees keys j <= i + Sk - Sq; "top-left": keys j <= i')
  softmax_scale: float|None = option(None, unless_none(check_softmax_scale), "factor of the scores, any positive number; 1/sqrt(D) by default")
  layout: str = option("bhsd", check_layout, '"bhsd" (B, H, S, D), "bshd" (B, S, H, D), "nsd" (B*H, S, D), "thd" (total, H, D): sequences in a row')
  window: tuple[int, int] = option((-1, -1), check_window, "(left, right): keys seen on each side of the diagonal, itself included; -1 for no bound")
  softcap: float = option(0.0, check_softcap, "scores become softcap * tanh(score / softcap); 0 for none")
  dropout_p: float = option(0.0, check_dropout_p, "probability with which an element of P becomes 0, the others P / (1 - dropout_p); below 1")
  max_seqlen_q: int|None = option(None, unless_none(check_longest), 'the most queries of a sequence, of layout "thd"; rows beyond are 0')
  max_seqlen_k: int|None = option(None, unless_none(check_longest), 'the most keys of a sequence, of layout "thd"; keys beyond do not exist')
  return_lse: bool = option(False, values.truth, "also the natural-log sum of exponentials, float32 (B, H, Sq)")
  arch: str|None = option(None, unless_none(check_arch), 'the chip, such as "gfx942"; by default that of the device')

  def __post_init__(self) -> None:
    for f in fields(self): object.__setattr__(self, f.name, f.metadata["check"](f.name, getattr(self, f.name)))

  @property
  def posed(self) -> dict[str, Any]:
    """Options that `problem_of` takes, by name."""
    return {f.name: getattr(self, f.name) for f in fields(KernelOptions) if f.name not in ("return_lse", "arch")}

@dataclass(frozen=True, eq=False)
class AttentionOptions(KernelOptions):
  """The options of `attention`, checked as far as they can be without q, k and v."""
  v_dim: int|None = option(None, unless_none(check_v_dim), "V is k[..., :v_dim], and v None: keys and values of MLA, which are read once")
  alibi_slopes: Tensor|None = option(None, values.tensor_or_none, "(H) or (B, H): adds -slope * abs(i + offset - j)")
  bias: Tensor|None = option(None, values.tensor_or_none, "added to the scores, broadcast to (B, H, Sq, Sk); -inf masks")
  sinks: Tensor|None = option(None, values.tensor_or_none, "(H): one more logit per head, in the denominator alone")
  kv_lengths: int|UOp|Tensor|None = option(None, unless_none(check_lengths),
                                           "int, Variable or int32 (B): keys beyond a length do not exist, whatever lies there")
  kv_starts: Tensor|None = option(None, values.tensor_or_none, "int32 (B): keys before it do not exist either; they are counted from there")
  block_table: Tensor|None = option(None, values.tensor_or_none,
                                    "int32 (B, max_blocks): the pages of each sequence; k and v are pages (pages, page_size, Hkv, D)")
  cu_seqlens_q: Tensor|None = option(None, values.tensor_or_none, 'int32 (sequences + 1): the row of q that each begins at, of layout "thd"')
  cu_seqlens_k: Tensor|None = option(None, values.tensor_or_none, "the same of k and v")
  dropout_seed: Tensor|None = option(None, values.tensor_or_none, "uint32 (2): what dropout draws by; by default from tinygrad's generator")
  num_splits: int = option(0, check_splits, "0: as many key ranges as fill the chip; 1: none; 2 and more: so many")
  batch_invariant: bool = option(False, values.truth, "a row is bit by bit the same alone and in any batch; slower")
  sequence_order: str = option("contiguous", check_order, 'how devices that share rows hold them: "contiguous" or "zigzag", as shard_sequence')
  sequence_lengths: tuple[int, int]|None = option(None, unless_none(check_sequence_lengths),
                                                     "(Sq, Sk) of rows that devices share: those beyond are padding")
  out: Tensor|None = option(None, values.tensor_or_none, "a whole buffer to write o to; it is also what is returned")
  out_dtype: DType|str|None = option(None, unless_none(check_out_dtype), "float16, bfloat16 or float32; that of out or of q by default")

DEFAULTS = {f.name: f.default for f in fields(AttentionOptions)}

def options_of(function:str, given:dict[str, Any]) -> AttentionOptions:
  """The record of the options `given` to `function` by name. Raises ValueError for one that there is not."""
  if unknown := sorted(given.keys() - DEFAULTS.keys()):
    raise ValueError(f"{unknown[0]}={values.shown(given[unknown[0]])}: {function} has no such option; it has {', '.join(DEFAULTS)}")
  return AttentionOptions(**given)
