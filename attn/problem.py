"""Problem: what attention is to be computed, validated. Everything a kernel specialises on stands here and nowhere else."""
from __future__ import annotations
import math
from dataclasses import dataclass, field
from typing import Any, Sequence
from attn import values

DTYPES = OUT_DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = {"bhsd": "(B, H, S, D)", "bshd": "(B, S, H, D)", "nsd": "(B*H, S, D)", "thd": "(total, H, D) with cu_seqlens"}
CAUSAL = {False: "full", True: "bottom-right: query i sees keys j <= i + Sk - Sq", "bottom-right": "the same", "top-left": "query i sees keys j <= i"}
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}   # of an element
MAX_SPLITS = 256
INVARIANT_KEYS = 512     # of a key range, where ranges are the same in every batch
EXTRAS = ("alibi_slopes", "bias", "sinks", "kv_lengths", "kv_starts", "block_table", "cu_seqlens_q", "cu_seqlens_k",
          "dropout_seed", "dropout_start")   # optional input tensors, in the order a kernel takes them

SOFTCAP_MOST = 2.0**100   # beyond it a score that is lost as a denormal of fp32 would show

# ***** what the options may be *****

def check_causal(name:str, x:Any) -> bool|str:
  if isinstance(x, str): return values.word(name, x, [c for c in CAUSAL if isinstance(c, str)], f"one of {', '.join(map(repr, CAUSAL))}")
  try: return values.truth(name, x)
  except ValueError: raise values.wrong(name, x, f"one of {', '.join(map(repr, CAUSAL))}") from None

def check_layout(name:str, x:Any) -> str: return values.word(name, x, LAYOUTS, f"one of {', '.join(f'{k!r} {v}' for k, v in LAYOUTS.items())}")

def check_window(name:str, x:Any) -> tuple[int, int]:
  supported = "(left, right), each -1 (no bound) or the number of further keys seen on that side"
  if not isinstance(x, (tuple, list)) or len(x) != 2: raise values.wrong(name, x, supported)
  try: left, right = (values.whole_number(name, n, -1, None, supported) for n in x)
  except ValueError: raise values.wrong(name, x, supported) from None
  return left, right

def check_softmax_scale(name:str, x:Any) -> float:
  return values.real_number(name, x, values.FP32_LEAST, values.FP32_MOST/math.log2(math.e), "a positive number that fp32 holds, 1.2e-38 to 2.3e+38")

def check_softcap(name:str, x:Any) -> float:
  supported = f"0 for none, or a positive number, 1.2e-38 to {SOFTCAP_MOST:.1e}"
  value = values.real_number(name, x, 0.0, SOFTCAP_MOST, supported)
  if 0 < value < values.FP32_LEAST: raise values.wrong(name, x, supported)
  return value

def check_dropout_p(name:str, x:Any) -> float:
  supported = "a probability, at least 0 and less than 1"
  if (value := values.real_number(name, x, 0.0, 1.0, supported)) == 1: raise values.wrong(name, x, supported)
  return value

def check_splits(name:str, x:Any) -> int:
  return values.whole_number(name, x, 0, MAX_SPLITS, f"0 (chosen by a heuristic), 1 (no split) or the number of splits, at most {MAX_SPLITS}")

@dataclass(frozen=True)
class Count:
  """A number of rows that is known at run time: the sum of tinygrad Variables, each (name, min, max), and of a constant."""
  variables: tuple[tuple[str, int, int], ...]
  constant: int = 0
  @property
  def least(self) -> int: return self.constant + sum(low for _, low, _ in self.variables)
  @property
  def most(self) -> int: return self.constant + sum(high for _, _, high in self.variables)

@dataclass(frozen=True)
class Strided:
  """Where the rows of k or v lie in a larger buffer of `size` elements: row s of head h of batch b begins at start + b*batch + h*head + s*row."""
  size: int
  start: int
  batch: int
  head: int
  row: int
  def whole(self, unit:int) -> bool:
    """Whether every row begins at a multiple of `unit` elements."""
    return all(n % unit == 0 for n in (self.start, self.batch, self.head, self.row))

@dataclass(frozen=True)
class Pages:
  """Keys in `count` pages of `size` rows each: a sequence has up to `most` of them, in the order of its entries in a table."""
  size: int
  count: int
  most: int
  @property
  def rows(self) -> int:
    """That a sequence may have."""
    return self.size*self.most

@dataclass(frozen=True)
class Problem:
  """One attention problem: O = softmax(score) V, where score is, for the keys that a query sees, -inf for the others,

    score = cap(softmax_scale * Q K^T) - alibi_slopes * |i + offset - j| + bias       cap(x) = softcap * tanh(x / softcap), or x where softcap is 0

  (the options of FlashAttention, github.com/Dao-AILab/flash-attention; softcap: Gemma 2, arXiv 2408.00118; ALiBi: arXiv 2108.12409; sinks:
  arXiv 2309.17453).

  q is (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o (B, H, Sq, Dv), lse (B, H, Sq) float32, in the order of `layout`. Query head h
  reads key/value head h // (H // Hkv). `window` = (left, right): query i sees keys j with i + offset - left <= j <= i + offset + right, -1 for no
  bound; causal is (-1, 0). `offset` is Sk - Sq (bottom-right alignment) or 0 (`top_left`).

  Options, all off by default:
    softcap      > 0, in the units of scaled scores
    alibi        tensor alibi_slopes float32 (H), or (B, H) where alibi_batched
    bias         tensor bias, of bias_dtype, added to the scores: per dimension of (B, H, Sq, Sk) whether it has that size (True) or 1
    sinks        tensor sinks float32 (H): one more logit of a head, in the softmax's denominator only (and so in lse)
    kv_lengths   tensor kv_lengths int32 (B): batch b has the keys j < kv_lengths[b] and no others; Sk is the length of the buffer
    sk_variable  the number of keys there are, in all batches, as tinygrad Variables say; Sk is the length of the buffer
    sq_variable  the number of queries there are likewise, beside sk_variable: the alignment is to them. Sq are computed, those beyond mean nothing
    kv_starts    tensor kv_starts int32 (B), beside kv_lengths: batch b has the keys kv_starts[b] <= j < kv_lengths[b], counted from the first of them
    k_view, v_view   k and v are parts of larger buffers, which are the tensors k and v, of one dimension: where the rows of each lie in it
    pages        beside k_view and v_view, whose batches are pages here: tensor block_table int32 (B, pages.most) says in which page the rows
                 n*pages.size to (n + 1)*pages.size - 1 of batch b are, for those that are there. Sk is pages.rows
    v_in_k       V is the first Dv columns of K: there is no tensor v, and no v_view
    varlen       layout "thd": q (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), o (total_q, H, Dv), lse (H, total_q); tensors
                 cu_seqlens_q and cu_seqlens_k int32 (B+1): sequence b has the rows cu_seqlens[b] <= i < cu_seqlens[b+1]; Sq and Sk are the lengths
                 of the longest ones
    dropout_p    > 0: each element of P becomes 0 with this probability (in steps of 2^-16), the others P/(1 - dropout_p); lse is without. Tensor
                 dropout_seed uint32 (2). Which ones is a function of the seed and of (batch, head, query, key), of layout "thd" (sequence, head, and
                 query and key within it): attn/ops/dropout.py
    dropout_start   tensor dropout_start uint32 (2): the batch and the head that the first ones here count as, for a part of a tensor
    batch_invariant   a row is computed in the same way whatever else there is: tile and key ranges, these of INVARIANT_KEYS keys each, depend
                 neither on B nor on the length of another sequence nor on the room that there is for keys
    num_splits   key ranges that workgroups of their own take (attn/kernels/combine.py): 1 is no split; 0 is for `splits.resolve` to choose
  Where the number of keys is known at run time only, n_k keys (and n_q queries), the alignment is to them: offset is n_k - n_q (0 where `top_left`).
  """
  B: int
  H: int
  Hkv: int
  Sq: int
  Sk: int
  D: int
  Dv: int
  dtype: str = "float16"
  out_dtype: str = "float16"
  layout: str = "bhsd"
  window: tuple[int, int] = (-1, -1)
  offset: int = 0
  softmax_scale: float = field(default=0.0)
  return_lse: bool = False
  top_left: bool = False
  softcap: float = 0.0
  alibi: bool = False
  alibi_batched: bool = False
  bias: tuple[bool, bool, bool, bool]|None = None
  bias_dtype: str = "float32"
  sinks: bool = False
  kv_lengths: bool = False
  sk_variable: Count|None = None
  sq_variable: Count|None = None
  k_view: Strided|None = None
  v_view: Strided|None = None
  pages: Pages|None = None
  v_in_k: bool = False
  kv_starts: bool = False
  total_q: int = 0
  total_k: int = 0
  num_splits: int = 1
  batch_invariant: bool = False
  dropout_p: float = 0.0
  dropout_start: bool = False

  def __post_init__(self) -> None:
    def put(name:str, value:Any) -> None: object.__setattr__(self, name, value)
    for name in ("B", "H", "Hkv", "Sq", "Sk", "D", "Dv"):
      put(name, values.whole_number(name, getattr(self, name), 1, None, "a whole number: every dimension is at least 1"))
    for name in ("total_q", "total_k"): put(name, values.whole_number(name, getattr(self, name), 0, None, "a number of rows"))
    for name in ("return_lse", "top_left", "alibi", "alibi_batched", "sinks", "kv_lengths", "kv_starts", "dropout_start", "batch_invariant",
                 "v_in_k"):
      put(name, values.truth(name, getattr(self, name)))
    for name, check in (("layout", check_layout), ("window", check_window), ("softmax_scale", check_softmax_scale), ("softcap", check_softcap),
                        ("num_splits", check_splits), ("dropout_p", check_dropout_p)):
      put(name, check(name, getattr(self, name)))
    if not values.is_whole(self.offset): raise values.wrong("offset", self.offset, "a whole number")
    put("offset", int(self.offset))
    if self.H % self.Hkv: raise ValueError(f"H={self.H} query heads are not a multiple of Hkv={self.Hkv} key/value heads")
    if self.dtype not in DTYPES: raise NotImplementedError(f"dtype={self.dtype!r}: q, k and v must be one of {', '.join(DTYPES)}")
    if self.out_dtype not in OUT_DTYPES: raise NotImplementedError(f"out_dtype={self.out_dtype!r}: must be one of {', '.join(OUT_DTYPES)}")
    if self.softcap and not values.FP32_LEAST <= self.softmax_scale/self.softcap <= values.FP32_MOST:
      raise ValueError(f"softmax_scale={self.softmax_scale} with softcap={self.softcap}: their quotient must be a number that fp32 holds, "
                       "1.2e-38 to 3.4e+38")
    # bounds beyond the first and the last key are none: a kernel never sees them
    left, right = self.window
    put("window", (left if left < self.Sq - 1 + self.offset else -1, right if right < self.Sk - 1 - self.offset else -1))
    if self.alibi_batched and not self.alibi: raise ValueError("alibi_batched=True without alibi: there are no slopes to have a batch dimension")
    if self.dropout_start and not self.dropout_p: raise ValueError("dropout_start=True with dropout_p=0.0: there is nothing to count for")
    if self.bias is not None and self.bias_dtype not in OUT_DTYPES:
      raise NotImplementedError(f"bias_dtype={self.bias_dtype!r}: must be one of {', '.join(OUT_DTYPES)}")
    if self.varlen:
      if self.bias is not None: raise NotImplementedError("bias with layout='thd': packed sequences have no (B, H, Sq, Sk) to add it to")
      for name in ("kv_lengths", "kv_starts", "sk_variable") if self.pages is None else ("kv_starts", "sk_variable"):
        if getattr(self, name): raise NotImplementedError(f"{name} with layout='thd': packed sequences take their lengths from cu_seqlens_k")
      for name in ("total_q", "total_k") if self.pages is None else ("total_q",):
        if (value := getattr(self, name)) < 1: raise ValueError(f"{name}={value}: layout='thd' needs the number of rows of all sequences")
    elif self.total_q or self.total_k:
      raise ValueError(f"total_q={self.total_q}, total_k={self.total_k} are for layout='thd' only, not {self.layout!r}")
    if self.sk_variable is not None:
      if self.kv_lengths: raise ValueError(f"sk_variable={self.sk_variable} with kv_lengths: one or the other says how many keys there are")
      if self.sk_variable.least < 0: raise ValueError(f"sk_variable={self.sk_variable}: must be at least 0")
    if self.sq_variable is not None and (self.sk_variable is None or self.top_left):
      raise ValueError(f"sq_variable={self.sq_variable}: the alignment to the last query is of a number of keys that is a Variable, too")
    if self.v_in_k and (self.Dv > self.D or self.v_view is not None):
      raise ValueError(f"v_in_k with D={self.D}, Dv={self.Dv}, v_view={self.v_view}: rows of V are the first columns of those of K")
    one = not self.v_in_k and (self.k_view is None) != (self.v_view is None)
    if one or (self.k_view is not None and self.varlen and self.pages is None):
      raise ValueError(f"k_view={self.k_view}, v_view={self.v_view}: k and v are both parts of larger buffers or neither, and not with layout='thd'")
    if self.kv_starts and not self.kv_lengths: raise ValueError("kv_starts without kv_lengths: they say where the keys begin that end there")
    if self.pages is not None:
      if not self.kv_lengths or self.k_view is None: raise ValueError(f"pages={self.pages}: needs kv_lengths, k_view and v_view")
      if self.Sk != self.pages.rows: raise ValueError(f"Sk={self.Sk} with pages={self.pages}: must be the {self.pages.rows} rows that they hold")

  @property
  def itemsize(self) -> int: return BYTES[self.dtype]            # of q, k and v
  @property
  def out_itemsize(self) -> int: return BYTES[self.out_dtype]
  @property
  def varlen(self) -> bool: return self.layout == "thd"
  @property
  def options(self) -> tuple[str, ...]:
    """Those of the options that a kernel has to be written for which are in use, by name."""
    names = ("softcap", "alibi", "bias", "sinks", "kv_lengths", "sk_variable", "k_view", "pages", "v_in_k", "kv_starts", "varlen", "dropout_p")
    return tuple(x for x in names if getattr(self, x))
  @property
  def kept(self) -> float:
    """The probability with which dropout keeps an element of P."""
    return 1 - self.dropout_p
  @property
  def writes_lse(self) -> bool:
    """Whether a kernel writes an LSE: of the rows, or of a part of their keys."""
    return self.return_lse or self.num_splits > 1
  @property
  def rows(self) -> int:
    """Rows of the output, over batches and heads: the elements of lse."""
    return self.H*(self.total_q if self.varlen else self.B*self.Sq)
  @property
  def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of every tensor of the problem, in the order in which a kernel takes them: o, lse where wanted, q, k, v, the extras present."""
    def of(heads:int, length:int, total:int, width:int) -> tuple[int, ...]:
      return {"bhsd": (self.B, heads, length, width), "bshd": (self.B, length, heads, width), "nsd": (self.B*heads, length, width),
              "thd": (total, heads, width)}[self.layout]
    tensors: dict[str, tuple[tuple[int, ...], str]] = {"o": (of(self.H, self.Sq, self.total_q, self.Dv), self.out_dtype)}
    if self.return_lse:
      tensors["lse"] = {"nsd": (self.B*self.H, self.Sq), "thd": (self.H, self.total_q)}.get(self.layout, (self.B, self.H, self.Sq)), "float32"
    tensors["q"] = of(self.H, self.Sq, self.total_q, self.D), self.dtype
    for name, view, width in (("k", self.k_view, self.D), ("v", self.v_view, self.Dv))[:1 if self.v_in_k else 2]:
      tensors[name] = (of(self.Hkv, self.Sk, self.total_k, width) if view is None else (view.size,)), self.dtype
    if self.alibi: tensors["alibi_slopes"] = (self.B, self.H) if self.alibi_batched else (self.H,), "float32"
    if self.bias is not None:
      b, h, i, j = (n if there else 1 for n, there in zip((self.B, self.H, self.Sq, self.Sk), self.bias))
      tensors["bias"] = (b, h, i, j), self.bias_dtype
    if self.sinks: tensors["sinks"] = (self.H,), "float32"
    if self.kv_lengths: tensors["kv_lengths"] = (self.B,), "int32"
    if self.kv_starts: tensors["kv_starts"] = (self.B,), "int32"
    if self.pages is not None: tensors["block_table"] = (self.B, self.pages.most), "int32"
    if self.varlen: tensors["cu_seqlens_q"] = (self.B + 1,), "int32"
    if self.varlen and self.pages is None: tensors["cu_seqlens_k"] = (self.B + 1,), "int32"
    if self.dropout_p: tensors["dropout_seed"] = (2,), "uint32"
    if self.dropout_start: tensors["dropout_start"] = (2,), "uint32"
    return tensors

  @property
  def flops(self) -> int:
    """Floating-point operations of the two matrix products on visible scores, the usual way of counting (FlashAttention's benchmark)."""
    left, right = self.window
    def seen(i:int) -> int:
      last = min(self.Sk - 1, i + self.offset + right if right >= 0 else self.Sk)
      return max(0, last - max(0, i + self.offset - left if left >= 0 else 0) + 1)
    visible = sum(map(seen, range(self.Sq))) if self.window != (-1, -1) else self.Sq*self.Sk
    return 2*self.B*self.H*visible*(self.D + self.Dv)

def _dims(name:str, shape:Sequence[int], layout:str) -> tuple[int, int, int, int]:
  """(B, H, S, D) of a tensor given in `layout`; (B*H, S, D) and (total, H, D) are taken as B=1."""
  if len(shape) != (3 if layout in ("nsd", "thd") else 4):
    raise ValueError(f"{name} has shape {tuple(shape)}; layout={layout!r} needs {LAYOUTS[layout]}")
  if layout == "nsd": return 1, shape[0], shape[1], shape[2]
  if layout == "thd": return 1, shape[1], shape[0], shape[2]
  b, x, y, d = shape
  return (b, x, y, d) if layout == "bhsd" else (b, y, x, d)

def problem_of(o:Sequence[int], q:Sequence[int], k:Sequence[int], v:Sequence[int], *, dtypes:Sequence[str], lse:Sequence[int]|None=None,
               causal:bool|str=False, window:tuple[int, int]=(-1, -1), softmax_scale:float|None=None, layout:str="bhsd", softcap:float=0.0,
               extras:dict[str, tuple[Sequence[int], str]]|None=None, sk_variable:Count|None=None, max_seqlen_q:int|None=None,
               max_seqlen_k:int|None=None, num_splits:int=1, dropout_p:float=0.0,
               views:tuple[Strided, Strided]|None=None, pages:Pages|None=None, v_in_k:bool=False) -> Problem:
  """The Problem that the shapes of o, q, k, v (and lse) pose; `dtypes` are the dtype names of (o, q, k, v[, lse]).

  `extras`: (shape, dtype name) of each optional tensor there is, by its name in `EXTRAS`. `max_seqlen_q` and `max_seqlen_k`: the longest sequence of
  layout "thd" (by default as long as all of them together: right, but with workgroups that find nothing to do). `views` are Problem's k_view and
  v_view; with `pages` k and v have the shapes (B, Hkv, pages.rows, D) and (B, Hkv, pages.rows, Dv), whatever the layout; with `v_in_k` v is the
  shape that the first columns of k have. The other options are Problem's.

  Raises ValueError for shapes, dtypes or options that contradict each other and NotImplementedError for what is not supported.
  """
  layout, causal, window = check_layout("layout", layout), check_causal("causal", causal), check_window("window", window)
  varlen, extras = layout == "thd", extras or {}
  B, H, Sq, D = _dims("q", q, layout)
  Bk, Hkv, Sk, Dk = _dims("k", k, layout if pages is None else "bhsd")
  Bv, Hv, Sv, Dv = _dims("v", v, layout if pages is None else "bhsd")
  if layout == "nsd" and pages is not None: B, H = Bk, H//Bk
  if varlen and pages is not None: B = _sequences(extras, ("cu_seqlens_q",))
  for name, got, want, why in (("k", Bk, B, "batch of q"), ("v", Bv, B, "batch of q"), ("v", Hv, Hkv, "heads of k"),
                               ("v", Sv, Sk, "sequence length of k"), ("k", Dk, D, "head dimension of q")):
    if got != want:
      raise ValueError(f"{name} has shape {tuple(k if name == 'k' else v)}: its {why.split(' of ')[0]} is {got} but the {why} is {want}")
  in_o = (1, B*H) if layout == "nsd" else (1, H) if varlen else (B, H)
  if _dims("o", o, layout) != (*in_o, Sq, Dv): raise ValueError(f"o has shape {tuple(o)}: q {tuple(q)} and v {tuple(v)} give an output of "
                                                              f"B={B}, H={H}, Sq={Sq}, Dv={Dv} in layout {layout!r}")
  if lse is not None and tuple(lse) != (want_lse := {"nsd": (H, Sq), "thd": (H, Sq)}.get(layout, (B, H, Sq))):
    raise ValueError(f"lse has shape {tuple(lse)}: must be {want_lse}, whatever the layout")
  if lse is not None and dtypes[4] != "float32": raise ValueError(f"lse has dtype {dtypes[4]}: must be float32")
  if len(set(dtypes[1:4])) != 1: raise ValueError(f"q, k and v have dtypes {', '.join(dtypes[1:4])}: all three must be the same")
  if causal and (window[1] > 0): raise ValueError(f"causal={causal!r} with window={window!r}: causal allows no key on the right")
  scale = softmax_scale if softmax_scale is not None else 1/math.sqrt(max(D, 1))
  options: dict[str, Any] = {"softcap": softcap, "sk_variable": sk_variable, "num_splits": num_splits, "dropout_p": dropout_p,
                             "top_left": causal == "top-left"}
  if varlen:
    options |= {"total_q": Sq, "total_k": 0 if pages is not None else Sk}
    Sq = _longest("max_seqlen_q", max_seqlen_q, Sq)
    if pages is None: B, Sk = _sequences(extras), _longest("max_seqlen_k", max_seqlen_k, Sk)
    elif max_seqlen_k is not None: raise ValueError(f"max_seqlen_k={max_seqlen_k} with block_table: kv_lengths says how long sequences are")
  elif max_seqlen_q is not None or max_seqlen_k is not None:
    raise ValueError(f"max_seqlen_q={max_seqlen_q}, max_seqlen_k={max_seqlen_k} are for layout='thd' only, not {layout!r}")
  p = Problem(B, H, Hkv, Sq, Sk, D, Dv, dtypes[1], dtypes[0], layout, (window[0], 0) if causal else window,
              0 if causal == "top-left" else Sk - Sq, scale, lse is not None, k_view=views[0] if views else None,
              v_view=views[1] if views and not v_in_k else None, pages=pages, v_in_k=v_in_k, **options, **_extras(extras, B, H, Sq, Sk))
  for name, given in extras.items():
    if name not in p.shapes:
      raise ValueError(f"{name} with " + (f"dropout_p={dropout_p}: there is no dropout" if name.startswith("dropout") else
                                          f"layout={layout!r}: it belongs to layout='thd'"))
    if (tuple(given[0]), given[1]) != p.shapes[name]:
      raise ValueError(f"{name} has shape {tuple(given[0])} and dtype {given[1]}: must be {p.shapes[name][0]} and {p.shapes[name][1]}")
  return p

def _sequences(extras:dict[str, tuple[Sequence[int], str]], names:Sequence[str]=("cu_seqlens_q", "cu_seqlens_k")) -> int:
  for name in names:
    if name not in extras: raise ValueError(f"layout='thd' needs {name}, int32 of shape (sequences + 1,)")
    if len(shape := tuple(extras[name][0])) != 1 or shape[0] < 2:
      raise ValueError(f"{name} has shape {shape}: must be (sequences + 1,), of one at least")
  return extras["cu_seqlens_q"][0][0] - 1

def _longest(name:str, value:int|None, total:int) -> int:
  return total if value is None else min(total, values.whole_number(name, value, 1, None, "the rows of the longest sequence, at least 1"))

def _extras(extras:dict[str, tuple[Sequence[int], str]], B:int, H:int, Sq:int, Sk:int) -> dict[str, Any]:
  """The fields of Problem that say which optional tensors there are."""
  if unknown := [name for name in extras if name not in EXTRAS]: raise ValueError(f"{unknown[0]}: no such tensor; there are {', '.join(EXTRAS)}")
  fields: dict[str, Any] = {"alibi": "alibi_slopes" in extras, "sinks": "sinks" in extras, "kv_lengths": "kv_lengths" in extras,
                            "kv_starts": "kv_starts" in extras,
                            "dropout_start": "dropout_start" in extras}
  if "alibi_slopes" in extras: fields["alibi_batched"] = len(extras["alibi_slopes"][0]) == 2
  if "bias" in extras:
    shape, dtype = extras["bias"]
    if len(shape) != 4 or any(n not in (1, full) for n, full in zip(shape, (B, H, Sq, Sk))):
      raise ValueError(f"bias has shape {tuple(shape)}: must be four dimensions that broadcast to (B, H, Sq, Sk) = {(B, H, Sq, Sk)}")
    fields |= {"bias": tuple(n == full for n, full in zip(shape, (B, H, Sq, Sk))), "bias_dtype": dtype}
  return fields
