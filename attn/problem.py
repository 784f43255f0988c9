"""Class Problem: one attention problem, with all its fields checked. The fields of Problem are everything on which a kernel is specialised."""
from __future__ import annotations
import math
from dataclasses import dataclass, field, fields
from typing import Any, Sequence
from attn import values
from attn.functions.bounds import Bounds
from attn.functions.trace import MOST_TENSORS, TensorKinds, Traced

DTYPES = OUT_DTYPES = ("float16", "bfloat16", "float32")
LAYOUTS = {"bhsd": "(B, H, S, D)", "bshd": "(B, S, H, D)", "nsd": "(B*H, S, D)", "thd": "(total, H, D) with cu_seqlens"}
CAUSAL = {False: "full", True: "bottom-right: query i sees keys j <= i + Sk - Sq", "bottom-right": "as True",
          "top-left": "query i sees keys j <= i"}
ORDERS = {"contiguous": 1, "zigzag": 2}     # orders in which devices hold a sequence, and the number of its pieces that each device has
OF_8_BITS = ("fp8e4m3", "fp8e4m3fnuz")     # dtypes of q, k and v of 8 bits: OCP's, and that of gfx942. Kernels take their bytes, as uint8
BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1, **dict.fromkeys(OF_8_BITS, 1)}   # size of an element
STORED = {"int8": "int8", **dict.fromkeys(OF_8_BITS, "uint8")}   # formats of stored rows (attn/ops/formats.py), dtypes of their tensors
INPUT_SCALES = ("q_scale", "k_scale", "v_scale")     # scales of q, k and v of 8 bits
WIDENED = "widened"      # format of stored rows whose 8-bit numbers a kernel has converted to the dtype of q (attn/kernels/nvidia/widen.py)
KINDS_OF_SCALES = 4      # numbers that this kernel stores for each key
SCALE_DTYPES = ("float32", "float16")
MAX_SPLITS = 256
MOST_ROWS = 2**28        # most rows of one sequence, and of all packed sequences together
INVARIANT_KEYS = 512     # keys of a key range under batch_invariant
SCORE_AXES = {"batch": "B", "heads": "H", "rows": "Sq", "keys": "Sk"}     # axes of the scores, and the fields of Problem with their sizes

Shapes = dict[str, tuple[tuple[int, ...], str]]          # (shape, dtype) of tensors, by name
GivenExtras = dict[str, tuple[Sequence[int], str]]      # (shape, dtype) of the optional tensors that a caller gives, by name

SOFTCAP_MOST = 2.0**100   # with a larger cap, scores that fp32 loses as denormals would change the result

# ***** checks of the options *****

def check_causal(name:str, x:Any) -> bool|str:
  supported = f"one of {', '.join(map(repr, CAUSAL))}"
  if isinstance(x, str): return values.word(name, x, [c for c in CAUSAL if isinstance(c, str)], supported)
  try: return values.truth(name, x)
  except ValueError: raise values.wrong(name, x, supported) from None

def check_layout(name:str, x:Any) -> str:
  supported = ", ".join(f"{layout!r} {dimensions}" for layout, dimensions in LAYOUTS.items())
  return values.word(name, x, LAYOUTS, f"one of {supported}")

def check_order(name:str, x:object) -> str: return values.word(name, x, ORDERS, f"one of {', '.join(map(repr, ORDERS))}")

def check_window(name:str, x:Any) -> tuple[int, int]:
  supported = "(left, right), each -1 (no bound) or the number of further keys seen on that side"
  if not isinstance(x, (tuple, list)) or len(x) != 2: raise values.wrong(name, x, supported)
  try: left, right = (values.whole_number(name, n, -1, None, supported) for n in x)
  except ValueError: raise values.wrong(name, x, supported) from None
  return left, right

def check_softmax_scale(name:str, x:Any) -> float:
  most = values.FP32_MOST/math.log2(math.e)
  return values.real_number(name, x, values.FP32_LEAST, most, "a positive number that fp32 holds, 1.2e-38 to 2.3e+38")

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
  supported = f"0 (chosen by a heuristic), 1 (no split) or the number of splits, at most {MAX_SPLITS}"
  return values.whole_number(name, x, 0, MAX_SPLITS, supported)

def of_term(default:Any, check:values.Check|None=None) -> Any:
  """Makes a field of the class Problem for an option that adds a score term (an operation on scores, such as softcap)."""
  # The field's value says whether the problem has the term, or is the term's parameter, such as the cap of softcap. `check` checks the value.
  return field(default=default, metadata={"check": check, "of": "term"})

@dataclass(frozen=True)
class TensorOfTerm:
  """Optional tensor that a score term reads, such as a bias."""
  name: str
  axes: tuple[str, ...]  # axes of the scores along which the tensor has dimensions (keys of SCORE_AXES)
  # Names of the dtypes that the tensor may have. If there are several, a field of Problem has the tensor's dtype, such as bias_dtype.
  dtypes: tuple[str, ...] = DTYPES
  # Whether dimensions of the tensor may have size 1. If so, the tensor has a dimension for each of `axes`. If not, all dimensions have full size, and
  # the first ones may be missing, as in alibi_slopes (B, H) or (H).
  broadcasts: bool = False
  def dimensions(self, shape:Sequence[int], sizes:dict[str, int]) -> tuple[bool, ...]:
    """Returns for each dimension of a tensor of this `shape` whether it has its full size in `sizes` (True), or size 1 and is broadcast (False)."""
    # `sizes` has the full size of each axis, by the axis's name. Raises ValueError if `shape` does not broadcast to these sizes.
    if not self.broadcasts: return (True,)*min(max(len(shape), 1), len(self.axes))
    full = tuple(sizes[axis] for axis in self.axes)
    if len(shape) != len(full) or any(n not in (1, size) for n, size in zip(shape, full)):
      raise ValueError(f"{self.name} has shape {tuple(shape)}: must have {len(full)} dimensions that broadcast to "
                       f"({', '.join(SCORE_AXES[axis] for axis in self.axes)}) = {full}")
    return tuple(n == size for n, size in zip(shape, full))
  def check(self, name:str, x:Any) -> tuple[bool, ...]|None:
    """Returns `x`, the value of the field `name` of Problem, unchanged, or raises ValueError unless `x` is None or a tuple of bools."""
    # The value is None if the problem has no such tensor, otherwise a tuple with a bool for each dimension: True for full size, False for size 1.
    least, most = len(self.axes) if self.broadcasts else 1, len(self.axes)
    if x is None or (isinstance(x, tuple) and least <= len(x) <= most and all(isinstance(full, bool) for full in x)): return x
    raise values.wrong(name, x, f"None, or a tuple with True (full size) or False (size 1) for each dimension of {self.name}, {least} to {most}")
  def shape(self, dimensions:tuple[bool, ...], sizes:dict[str, int]) -> tuple[int, ...]:
    """Returns the shape of the tensor; `dimensions` has True for each dimension of the full size in `sizes`, False for size 1."""
    return tuple(sizes[axis] if full else 1 for axis, full in zip(self.axes[len(self.axes) - len(dimensions):], dimensions))

def of_tensor(name:str, *axes:str, **more:Any) -> Any:
  """Makes a field of the class Problem for a score term that reads the tensor `name`, such as a bias; the field's value says which dimensions have
  full size."""
  # The field is None if the problem has no such tensor. Otherwise it has a bool for each dimension of the tensor: True for full size, False for size
  # 1.
  tensor = TensorOfTerm(name, axes, **more)
  return field(default=None, metadata={"check": tensor.check, "of": "term", "tensor": tensor})

def of_mask(default:Any, check:values.Check) -> Any:
  """Makes a field of the class Problem for an option of a mask, such as the window."""
  return field(default=default, metadata={"check": check, "of": "mask"})

def check_function(name:str, x:Any) -> Traced|None:
  if x is None or isinstance(x, Traced): return x
  raise values.wrong(name, x, "None or a function that attn.functions.trace has traced")

@dataclass(frozen=True)
class Count:
  """Number of rows that is known only at run time: the sum of tinygrad Variables and a constant."""
  variables: tuple[tuple[str, int, int], ...]  # (name, min, max) of each
  constant: int = 0
  @property
  def least(self) -> int: return self.constant + sum(low for _, low, _ in self.variables)
  @property
  def most(self) -> int: return self.constant + sum(high for _, _, high in self.variables)

@dataclass(frozen=True)
class Strided:
  """Where the rows of k or v are in a one-dimensional buffer of `size` elements: start and strides, in elements."""
  # Row s of head h of batch b begins at element start + b*batch + h*head + s*row. `batch`, `head` and `row` are distances in elements: from one
  # batch, head or row to the next.
  size: int
  start: int
  batch: int
  head: int
  row: int
  def whole(self, unit:int) -> bool:
    """Returns whether every row begins at a multiple of `unit` elements of the buffer."""
    return all(n % unit == 0 for n in (self.start, self.batch, self.head, self.row))

@dataclass(frozen=True)
class Pages:
  """Pages of a cache of keys and values: there are `count` pages of `size` rows each, and a sequence has up to `most` pages."""
  # The sequence's row of the block table lists its pages in order.
  size: int
  count: int
  most: int
  @property
  def rows(self) -> int:
    """Largest number of rows in one sequence."""
    return self.size*self.most

@dataclass(frozen=True)
class DealtRows:
  """What one launch computes if the rows of a sequence are divided among devices: the queries of one device, for some of the heads, over all keys."""
  # See attn/parallel/shards.py. A device holds one piece of the sequence, or two pieces, one from the front half of the sequence and one from the
  # back half. Pieces are equally long on all devices. q, o, lse and a bias have the rows that the device holds, in the order in which the device
  # holds them. K and V have the rows of the whole sequence, in the sequence's order; k_view and v_view of the Problem say where these rows lie in the
  # tensors k and v. lse has only the query heads that the launch computes. q and o have only these heads, too, but in the layout "bshd" q and o have
  # all heads.
  start: int  # position in the sequence of row 0 of q
  # Row i of q has the position start + i if i < front, and start + i + jump otherwise.
  front: int
  jump: int
  queries: int  # rows of q that are real; behind them is padding, for which o is 0 and lse is -inf
  heads: tuple[int, int]  # (first, count) of the key/value heads that the launch computes, counted over all batches
  def place(self, row:Any) -> Any:
    """Returns the position in the sequence of row `row` of q, as an int, or in a kernel as a UOp."""
    if not self.jump: return row + self.start
    further = self.jump*(row >= self.front) if isinstance(row, int) else (row >= self.front).where(self.jump, 0)
    return row + self.start + further

@dataclass(frozen=True)
class Problem:
  """One attention problem: its sizes, dtypes, layout and options, which are everything on which a kernel is specialised."""
  # O = softmax(score) V. The score of a key that the query sees is
  #
  #   score = cap(softmax_scale * Q K^T) - alibi_slopes * |i + offset - j| + bias
  #   cap(x) = softcap * tanh(x / softcap), or x where softcap is 0
  #
  # and -inf for any other key. (The options are those of FlashAttention, github.com/Dao-AILab/flash-attention; softcap: Gemma 2, arXiv 2408.00118;
  # ALiBi: arXiv 2108.12409; sinks: arXiv 2309.17453.)
  #
  # q is (B, H, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), o (B, H, Sq, Dv), lse (B, H, Sq) float32, in the order of `layout`. Query head h reads
  # key/value head h // (H // Hkv). All options but `deterministic` are off by default.
  B: int
  H: int
  Hkv: int
  Sq: int
  Sk: int
  D: int
  Dv: int
  dtype: str = "float16"
  out_dtype: str = "float16"
  # In layout "thd" (`varlen`) q is (total_q, H, D), k (total_k, Hkv, D), v (total_k, Hkv, Dv), o (total_q, H, Dv), lse (H, total_q). Tensors
  # cu_seqlens_q and cu_seqlens_k int32 (B+1): sequence b has the rows cu_seqlens[b] <= i < cu_seqlens[b+1]. Sq and Sk are the lengths of the longest
  # sequences.
  layout: str = "bhsd"
  # (left, right): query i sees keys j with i + offset - left <= j <= i + offset + right, -1 for no bound; causal is (-1, 0)
  window: tuple[int, int] = of_mask((-1, -1), check_window)
  # Sk - Sq (bottom-right alignment), or 0 with `top_left`. If the number of keys n_k (and of queries n_q) is known at run time only, offset is n_k -
  # n_q, or 0 with `top_left`.
  offset: int = 0
  softmax_scale: float = field(default=0.0)
  return_lse: bool = False
  # Only with return_lse and `wide_scores`: the kernel also writes the tensor lse_rest, of the shape of lse, which has the parts of lse that rounding
  # to fp32 loses.
  lse_rest: bool = False
  top_left: bool = False
  softcap: float = of_term(0.0, check_softcap)     # in the units of scaled scores; 0: no cap
  # Tensor alibi_slopes float32, (H) or (B, H): a True for each dimension.
  alibi: tuple[bool, ...]|None = of_tensor("alibi_slopes", "batch", "heads", dtypes=("float32",))
  # Tensor bias of bias_dtype, added to the scores: for each dimension of (B, H, Sq, Sk) whether the tensor has that size (True) or 1 (False).
  bias: tuple[bool, ...]|None = of_tensor("bias", *SCORE_AXES, broadcasts=True)
  bias_dtype: str = "float32"
  score_mod: Traced|None = of_term(None, check_function)     # the caller's own function of a score, applied after the score terms above
  # The caller's own mask. A query sees a key if the key lies in the query's interval (mask_bounds) and the function mask_mod holds for the pair. If
  # one of these two fields is None, the other field is the whole mask.
  mask_mod: Traced|None = of_mask(None, check_function)
  mask_bounds: Bounds|None = None
  # Shape of the tensor tile_list int32, with a list of tiles for each block of rows (attn/kernels/tile_lists.py).
  tile_list: tuple[int, int, int, int]|None = None
  mod_tensors: TensorKinds = ()     # shape and dtype of the tensors that score_mod and mask_mod read: mod_tensor0, mod_tensor1, ...
  # Only for the kernel backward_dbias, which computes the gradient of one expression such as table[h, i - j] by which score_mod reads a tensor of
  # floats: the number of this expression among all such expressions in score_mod, counted from 0.
  by_element: int|None = None
  # Tensor sinks float32 (H): one more logit per head, which adds only to the softmax's denominator, and therefore to lse.
  sinks: bool = False
  # Tensor kv_lengths int32 (B): batch b has only the keys j < kv_lengths[b]; Sk is the length of the buffer.
  kv_lengths: bool = False
  # Number of keys in all batches, as tinygrad Variables that are bound at run time; Sk is the length of the buffer.
  sk_variable: Count|None = None
  # Number of queries, as Variables; only with sk_variable. offset depends on this number. The kernel computes Sq rows; rows beyond the number of
  # queries have no meaning.
  sq_variable: Count|None = None
  # The tensors k and v are larger buffers of one dimension; k_view and v_view say where the rows of K and V lie in these buffers.
  k_view: Strided|None = None
  v_view: Strided|None = None
  # Only with k_view and v_view, whose batches are then pages. Tensor block_table int32 (B, pages.most): entry n of batch b is the index of the page
  # with rows n*pages.size to (n + 1)*pages.size - 1 of that batch. Sk is pages.rows.
  pages: Pages|None = None
  v_in_k: bool = False     # V is the first Dv columns of K: no tensor v and no v_view
  # Format in which k and v are stored in 8 bits (a key of STORED), or "" if k and v have the dtype of q. Each stored row has a scale: row s of K is
  # row s of the tensor k times one number of the tensor k_scales. V likewise follows from v and v_scales. Only with k_view and v_view. WIDENED: k and
  # v are such rows, but converted to the dtype of q; the tensor k_scales has KINDS_OF_SCALES numbers for each key, and there is no v_scales.
  stored: str = ""
  scale_dtype: str = "float32"     # dtype of k_scales and v_scales, "float32" or "float16"
  # Where the scales of the rows of k and v lie in k_scales and v_scales, tensors of one dimension.
  k_scale_view: Strided|None = None
  v_scale_view: Strided|None = None
  # Only with stored and v_in_k, if D > Dv: the tensor k has the first Dv columns of K, in 8 bits. The last D - Dv columns of K are in the tensor
  # k_rotary, which has the dtype of q and one dimension. k_rotary_view says where the rows lie in k_rotary.
  k_rotary_view: Strided|None = None
  # Only with q, k and v of 8 bits. The fields belong to float32 tensors with the fields' names, which hold the factors by which q, k and v are
  # multiplied. A field is the number of factors: 1 (for all heads), B*Hkv (one for each batch and key/value head), or 0 if there is no such tensor.
  q_scale: int = 0
  k_scale: int = 0
  v_scale: int = 0
  # Only with q, k and v of 8 bits: leave all sums of products to the matrix unit, even if the matrix unit adds coarsely.
  fast_accumulate: bool = False
  # Only with q, k and v of 8 bits, and above 0: another kernel has transposed V (attn/kernels/nvidia/turn.py). The tensor v is (B, Hkv, number of
  # tiles, Dv, turned): a tile has `turned` keys, and a row for each column of V.
  turned: int = 0
  # Tensor kv_starts int32 (B), only with kv_lengths: batch b has only the keys kv_starts[b] <= j < kv_lengths[b]. For masks and score terms, key
  # kv_starts[b] has the position 0.
  kv_starts: bool = False
  total_q: int = 0
  total_k: int = 0
  # Number of key ranges, each computed by its own workgroups (attn/kernels/combine.py). 1: no split. 0: attn/choose/splits.py chooses the number.
  num_splits: int = 1
  # A row is computed in the same way in every batch: the tile and the key ranges, of INVARIANT_KEYS keys each, depend neither on B nor on the length
  # of another sequence nor on the capacity for keys.
  batch_invariant: bool = False
  deterministic: bool = True     # gradients have the same bits in every run; if False, kernels may add to dq in any order
  # Each element of P becomes 0 with this probability (in steps of 2^-16). The other elements are divided by 1 - dropout_p. lse is computed without
  # dropout. Tensor dropout_seed uint32 (2). A function of the seed and of (batch, head, query, key) decides which elements become 0
  # (attn/ops/dropout.py); for layout "thd" a batch is a sequence, with its own rows.
  dropout_p: float = 0.0
  # Tensor first_batch_and_head uint32 (2), for tensors that are a part of larger tensors: the batch and the head of the larger tensors with which
  # this part begins. Dropout and the caller's functions count batches and heads from these two numbers.
  first_batch_and_head: bool = False
  # One device of several that share the rows of q, k and v, for some heads: Sq is the number of rows that the device holds, with padding, and Sk the
  # number of keys of the sequence, without padding.
  dealt: DealtRows|None = None

  def __post_init__(self) -> None:
    def put(name:str, value:Any) -> None: object.__setattr__(self, name, value)
    for name, check in FIELD_CHECKS.items(): put(name, check(name, getattr(self, name)))
    # a window bound beyond the first or last key hides nothing: drop it, so that kernels never see it
    left, right = self.window
    first, last = (self.place(row) + self.offset for row in (0, self.Sq - 1))
    put("window", (left if left < last else -1, right if right < self.Sk - 1 - first else -1))
    for check_together in (check_heads_and_types, check_scores, check_packed, check_numbers_of_rows, check_places, check_stored,
                           check_8_bits):
      check_together(self)

  @property
  def itemsize(self) -> int: return BYTES[self.dtype]            # bytes of an element of q
  @property
  def key_dtype(self) -> str:
    """Dtype in which a kernel takes k and v: int8, or uint8 for fp8, if they are stored in 8 bits, otherwise the dtype of q."""
    return STORED.get(self.stored, self.bits_dtype)
  @property
  def of_8_bits(self) -> bool: return self.dtype in OF_8_BITS
  @property
  def bits_dtype(self) -> str:
    """Dtype in which a kernel takes q: uint8 if q has 8-bit floats, otherwise the problem's dtype."""
    return STORED[self.dtype] if self.of_8_bits else self.dtype
  @property
  def key_itemsize(self) -> int: return BYTES[self.key_dtype]    # bytes of an element of k and v
  @property
  def key_bytes(self) -> int:
    """Bytes that one key takes in memory: its rows of k and v, and their scales if they have any."""
    return (self.D + self.Dv)*self.key_itemsize + (2*BYTES[self.scale_dtype] if self.stored else 0)
  @property
  def k_width(self) -> int:
    """Number of columns of the tensor k: Dv if K is stored in 8 bits and V is the first Dv columns of K, otherwise D."""
    return self.Dv if self.stored and self.v_in_k else self.D
  @property
  def out_itemsize(self) -> int: return BYTES[self.out_dtype]
  @property
  def varlen(self) -> bool: return self.layout == "thd"
  @property
  def options(self) -> tuple[str, ...]:
    """Names of the active options that change a kernel's code."""
    # The scales of 8-bit floats take no registers in the loop, and are left out.
    names = ("sinks", "kv_lengths", "sk_variable", "stored", "k_view", "pages", "v_in_k", "kv_starts", "varlen", "dropout_p", "dealt", "mask_mod")
    return tuple(x for x in (*OF_TERMS, *names) if getattr(self, x))
  @property
  def functions(self) -> tuple[Traced, ...]:
    """The caller's own functions that a kernel computes for each score: score_mod, mask_mod, both or none."""
    return tuple(x for x in (self.score_mod, self.mask_mod) if x is not None)
  @property
  def kept(self) -> float:
    """Probability with which dropout keeps an element of P."""
    return 1 - self.dropout_p
  @property
  def alibi_batched(self) -> bool:
    """Whether alibi_slopes has different slopes for each batch."""
    return self.alibi is not None and len(self.alibi) > 1
  @property
  def wide_scores(self) -> bool:
    """Whether a score, with its bias or after score_mod, may be as large as the largest numbers of fp32."""
    # This is so if the bias has a dtype with the range of fp32, or if a score_mod may return such a score. lse is then stored as two numbers: it is a
    # large score plus a small logarithm, which rounding to one fp32 number would lose.
    return (self.bias is not None and self.bias_dtype != "float16") or (self.score_mod is not None and self.score_mod.huge)
  @property
  def writes_lse(self) -> bool:
    """Whether the forward kernel writes an lse: because the caller asks for it, or because partial results of key ranges need it."""
    return self.return_lse or self.num_splits > 1
  @property
  def outputs(self) -> tuple[str, ...]:
    """Names of the tensors that the forward kernel writes, if the keys are not split."""
    return ("o", *["lse"]*self.return_lse, *["lse_rest"]*self.lse_rest)
  @property
  def has_rows_of_none(self) -> bool:
    """Whether q may have rows outside all sequences, such as padding; their o is 0, and their lse -inf."""
    return self.varlen or (self.dealt is not None and self.dealt.queries < self.Sq)
  def place(self, row:Any) -> Any:
    """Returns the position of row `row` of q in the row's sequence, as an int, or as a UOp in a kernel."""
    return row if self.dealt is None else self.dealt.place(row)
  @property
  def queries(self) -> int:
    """Number of rows of q per head, without padding."""
    return self.Sq if self.dealt is None else self.dealt.queries
  @property
  def all_heads(self) -> int:
    """Number of query heads that the problem computes, over all batches."""
    return self.B*self.H if self.dealt is None else self.dealt.heads[1]*(self.H//self.Hkv)
  @property
  def first_head(self) -> int:
    """Index of the first query head that the problem computes, counted over all batches."""
    return 0 if self.dealt is None else self.dealt.heads[0]*(self.H//self.Hkv)
  @property
  def rows_before(self) -> int:
    """Number of output rows that belong to heads before `first_head`."""
    # lse does not have these rows. q and o have these rows only in the layout "bshd".
    return self.first_head*self.Sq
  @property
  def rows(self) -> int:
    """Number of rows of the output over all batches and heads."""
    # lse has one element for each of these rows, unless the launch computes only some heads (`dealt`).
    return self.H*(self.total_q if self.varlen else self.B*self.Sq)
  @property
  def extras(self) -> Shapes:
    """Optional input tensors that the problem has, as {name: (shape, dtype)}."""
    B, H, sizes = self.B, self.H, {axis: getattr(self, size) for axis, size in SCORE_AXES.items()}
    of_terms = {x.name: (x.shape(dimensions, sizes), getattr(self, f"{term}_dtype", x.dtypes[0]))
                for term, x in TENSORS_OF_TERMS.items() if (dimensions := getattr(self, term)) is not None}
    tensors: tuple[tuple[str, bool, tuple[int, ...], str], ...] = (
      ("sinks", self.sinks, (H,), "float32"),
      ("kv_lengths", self.kv_lengths, (B,), "int32"),
      ("kv_starts", self.kv_starts, (B,), "int32"),
      ("block_table", self.pages is not None, (B, self.pages.most if self.pages else 0), "int32"),
      ("cu_seqlens_q", self.varlen, (B + 1,), "int32"),
      ("cu_seqlens_k", self.varlen and self.pages is None, (B + 1,), "int32"),
      ("dropout_seed", self.dropout_p > 0, (2,), "uint32"),
      ("first_batch_and_head", self.first_batch_and_head, (2,), "uint32"),
      *[(name, (number := getattr(self, name)) > 0, (B, self.Hkv) if number > 1 else (1, 1), "float32") for name in INPUT_SCALES],
      *[(name, True, shape, dtype) for name, (shape, dtype) in zip(MOD_TENSORS, self.mod_tensors)],
      ("tile_list", self.tile_list is not None, self.tile_list or (), "int32"))
    return of_terms | {name: (shape, dtype) for name, there, shape, dtype in tensors if there}

  @property
  def shapes(self) -> Shapes:
    """Tensors of the problem, as {name: (shape, dtype)}, in the order in which a kernel takes them."""
    def of(heads:int, length:int, total:int, width:int) -> tuple[int, ...]:
      return {"bhsd": (self.B, heads, length, width), "bshd": (self.B, length, heads, width),
              "nsd": (self.B*heads, length, width), "thd": (total, heads, width)}[self.layout]
    def of_keys(width:int, view:Strided|None) -> tuple[int, ...]:
      return of(self.Hkv, self.Sk, self.total_k, width) if view is None else (view.size,)
    of_lse = {"nsd": (self.B*self.H, self.Sq), "thd": (self.H, self.total_q)}.get(self.layout, (self.B, self.H, self.Sq))
    of_o, of_q = (of(self.H, self.Sq, self.total_q, width) for width in (self.Dv, self.D))
    if self.dealt is not None:
      of_lse = (self.all_heads, self.Sq)
      if self.layout != "bshd": of_o, of_q = (*of_lse, self.Dv), (*of_lse, self.D)
    tensors: tuple[tuple[str, bool, tuple[int, ...], str], ...] = (
      ("o", True, of_o, self.out_dtype),
      ("lse", self.return_lse, of_lse, "float32"),
      ("lse_rest", self.lse_rest, of_lse, "float32"),
      ("q", True, of_q, self.bits_dtype),
      ("k", True, of_keys(self.D, self.k_view), self.key_dtype),
      ("v", not self.v_in_k, of_keys(self.Dv, self.v_view) if not self.turned else self.turned_shape(self.turned), self.key_dtype),
      *[(name, view is not None, (view.size if view else 0,), self.scale_dtype) for name, view in self.scale_views.items()],
      ("k_rotary", (of_rotary := self.k_rotary_view) is not None, (of_rotary.size if of_rotary else 0,), self.dtype))
    return {name: (shape, dtype) for name, there, shape, dtype in tensors if there} | self.extras

  def turned_shape(self, keys:int) -> tuple[int, ...]:
    """Returns the shape of a copy of V that is transposed tile by tile, with `keys` keys in a tile."""
    return self.B, self.Hkv, -(-self.Sk//keys), self.Dv, keys

  @property
  def scale_views(self) -> dict[str, Strided|None]:
    """Start and strides of the tensors k_scales and v_scales in their buffers, by name; None for a scale tensor that is absent or a whole buffer."""
    # The tensors may be large buffers, of which the scales are only a part.
    return {"k_scales": self.k_scale_view, "v_scales": self.v_scale_view}

  @property
  def flops(self) -> int:
    """Floating-point operations of the two matrix products on visible scores, counted as FlashAttention's benchmark does."""
    return 2*self.all_heads*self.visible_scores*(self.D + self.Dv)
  @property
  def visible_scores(self) -> int:
    """Number of scores of one head, in one batch, that the window leaves visible, if all sequences are as long as the longest one."""
    left, right = self.window
    def keys_before(further:int) -> int:
      # Returns the number of pairs of a query i and a key j with j < i + offset + `further`.
      ends = [self.place(row) + self.offset + further for row in self.ends_of_pieces]
      return sum(held_sum(end + 1, self.Sk) - held_sum(begin, self.Sk) for begin, end in zip(ends[0::2], ends[1::2]))
    return (keys_before(right + 1) if right >= 0 else self.queries*self.Sk) - (keys_before(-left) if left >= 0 else 0)
  @property
  def ends_of_pieces(self) -> list[int]:
    """Rows of q where runs of consecutive positions begin and end: [first, last], or [first, last, first, last] for two runs."""
    front = 0 if self.dealt is None or not self.dealt.jump else min(self.dealt.front, self.queries)
    return [row for begin, end in ((0, front), (front, self.queries)) if begin < end for row in (begin, end - 1)]

# fields that belong to terms, and to masks
OF_TERMS, OF_MASKS = (tuple(f.name for f in fields(Problem) if f.metadata.get("of") == row) for row in ("term", "mask"))
TENSORS_OF_TERMS: dict[str, TensorOfTerm] = {f.name: f.metadata["tensor"] for f in fields(Problem) if "tensor" in f.metadata}   # by term
MOD_TENSORS = tuple(f"mod_tensor{n}" for n in range(MOST_TENSORS))
EXTRAS = (*(x.name for x in TENSORS_OF_TERMS.values()), "sinks", "kv_lengths", "kv_starts", "block_table", "cu_seqlens_q", "cu_seqlens_k",
          "dropout_seed", "first_batch_and_head", *INPUT_SCALES, *MOD_TENSORS)   # optional input tensors, in the order a kernel takes them

def held_sum(end:int, most:int) -> int:
  """Returns the sum of clamp(n, 0, most) over all whole numbers n < end."""
  rising, more = max(0, min(end, most + 1)), max(0, end - most - 1)
  return rising*(rising - 1)//2 + more*most

# ***** checks of single fields, and of fields together *****

def check_size(name:str, x:Any) -> int:
  return values.whole_number(name, x, 1, None, "a whole number: every dimension is at least 1")

def check_rows(name:str, x:Any) -> int: return counted_rows(name, check_size(name, x))

def check_total(name:str, x:Any) -> int: return counted_rows(name, values.whole_number(name, x, 0, None, "a number of rows"))

def counted_rows(name:str, rows:int) -> int:
  if rows <= MOST_ROWS: return rows
  raise NotImplementedError(f"{name}={rows}: kernels support at most {MOST_ROWS} rows")

def check_offset(name:str, x:Any) -> int:
  if not values.is_whole(x): raise values.wrong(name, x, "a whole number")
  return int(x)

FIELD_CHECKS: dict[str, values.Check] = {
  **dict.fromkeys(("B", "H", "Hkv", "D", "Dv"), check_size), **dict.fromkeys(("Sq", "Sk"), check_rows),
  **dict.fromkeys(("total_q", "total_k"), check_total),
  **dict.fromkeys(("return_lse", "lse_rest", "top_left", "sinks", "kv_lengths", "kv_starts"), values.truth),
  **dict.fromkeys(("first_batch_and_head", "batch_invariant", "v_in_k", "fast_accumulate"), values.truth),
  "layout": check_layout, "softmax_scale": check_softmax_scale,
  "num_splits": check_splits, "dropout_p": check_dropout_p, "offset": check_offset,
  **{f.name: check for f in fields(Problem) if (check := f.metadata.get("check")) is not None}}

def check_heads_and_types(p:Problem) -> None:
  if p.H % p.Hkv: raise ValueError(f"H={p.H} query heads are not a multiple of Hkv={p.Hkv} key/value heads")
  if p.dtype not in (*DTYPES, *OF_8_BITS):
    raise NotImplementedError(f"dtype={p.dtype!r}: q, k and v must be one of {', '.join((*DTYPES, *OF_8_BITS))}")
  if p.out_dtype not in OUT_DTYPES:
    raise NotImplementedError(f"out_dtype={p.out_dtype!r}: must be one of {', '.join(OUT_DTYPES)}")
  for name, x in TENSORS_OF_TERMS.items():
    if getattr(p, name) is not None and (dtype := getattr(p, f"{name}_dtype", x.dtypes[0])) not in x.dtypes:
      raise NotImplementedError(f"{name}_dtype={dtype!r}: must be one of {', '.join(x.dtypes)}")

def check_scores(p:Problem) -> None:
  if p.softcap and not values.FP32_LEAST <= p.softmax_scale/p.softcap <= values.FP32_MOST:
    raise ValueError(f"softmax_scale={p.softmax_scale} with softcap={p.softcap}: softmax_scale/softcap must be a number that fp32 "
                     "holds, 1.2e-38 to 3.4e+38")
  if p.first_batch_and_head and not (p.dropout_p or p.functions):
    raise ValueError("first_batch_and_head=True with dropout_p=0.0: dropout_p must be positive, or score_mod or mask_mod be given")

def check_packed(p:Problem) -> None:
  """Raises an error if options contradict packed sequences (layout "thd"), or if an option needs packed sequences and there are none."""
  if not p.varlen:
    if p.total_q or p.total_k:
      raise ValueError(f"total_q={p.total_q}, total_k={p.total_k} are for layout='thd' only, not {p.layout!r}")
    return
  for name, x in TENSORS_OF_TERMS.items():
    if getattr(p, name) is not None and {"rows", "keys"}.intersection(x.axes):
      raise NotImplementedError(f"{x.name} with layout='thd': packed sequences have no (B, H, Sq, Sk) to add it to")
  for name in ("kv_lengths", "kv_starts", "sk_variable") if p.pages is None else ("kv_starts", "sk_variable"):
    if getattr(p, name):
      raise NotImplementedError(f"{name} with layout='thd': packed sequences take their lengths from cu_seqlens_k")
  for name in ("total_q", "total_k") if p.pages is None else ("total_q",):
    if (value := getattr(p, name)) < 1:
      raise ValueError(f"{name}={value}: layout='thd' needs the number of rows of all sequences")

def check_numbers_of_rows(p:Problem) -> None:
  """Raises ValueError if the options that say how many keys or queries there are contradict each other."""
  if p.sk_variable is not None:
    if p.kv_lengths:
      raise ValueError(f"sk_variable={p.sk_variable} with kv_lengths: only one of them may say how many keys there are")
    if p.sk_variable.least < 0: raise ValueError(f"sk_variable={p.sk_variable}: must be at least 0")
  if p.sq_variable is not None and (p.sk_variable is None or p.top_left):
    raise ValueError(f"sq_variable={p.sq_variable}: needs sk_variable, the number of keys as a Variable, and top_left=False")
  if p.kv_starts and not p.kv_lengths:
    raise ValueError("kv_starts without kv_lengths: give both, keys kv_starts[b] <= j < kv_lengths[b] exist")

def check_places(p:Problem) -> None:
  """Raises ValueError if the fields that say where k and v lie in memory (k_view, v_view, pages, v_in_k) contradict each other."""
  # k and v lie in tensors of their own, in larger buffers (k_view, v_view) or in pages, or V is columns of K (v_in_k).
  if p.v_in_k and (p.Dv > p.D or p.v_view is not None):
    raise ValueError(f"v_in_k with D={p.D}, Dv={p.Dv}, v_view={p.v_view}: V is the first Dv columns of K, so Dv must be at most D and v_view None")
  one_alone = not p.v_in_k and (p.k_view is None) != (p.v_view is None)
  if one_alone or (p.k_view is not None and p.varlen and p.pages is None):
    raise ValueError(f"k_view={p.k_view}, v_view={p.v_view}: must be both given or both None, and None with layout='thd' unless "
                     "with pages")
  if p.dealt is not None and (p.k_view is None or p.varlen or p.kv_lengths or p.sk_variable is not None or p.dropout_p):
    raise ValueError(f"dealt={p.dealt}: needs k_view and v_view, and excludes layout='thd', kv_lengths, sk_variable and "
                     "dropout_p")
  if p.pages is None: return
  if not p.kv_lengths or p.k_view is None: raise ValueError(f"pages={p.pages}: needs kv_lengths, k_view and v_view")
  if p.Sk != p.pages.rows: raise ValueError(f"Sk={p.Sk} with pages={p.pages}: must be the {p.pages.rows} rows that they hold")

def check_stored(p:Problem) -> None:
  """Raises an error if the fields that describe rows of k and v stored in 8 bits contradict each other."""
  if p.stored not in ("", *STORED, WIDENED): raise NotImplementedError(f"stored={p.stored!r}: must be '' or one of {', '.join(STORED)}")
  if p.scale_dtype not in SCALE_DTYPES: raise NotImplementedError(f"scale_dtype={p.scale_dtype!r}: must be one of {', '.join(SCALE_DTYPES)}")
  views = ("k_view", "v_view", "k_scale_view", "v_scale_view", "k_rotary_view")
  needed = {"": (), **dict.fromkeys(STORED, views[:4]), WIDENED: views[:3]}[p.stored]
  if p.stored and p.v_in_k: needed = ("k_view", "k_scale_view", *["k_rotary_view"]*(p.Dv < p.D))
  for name in views:
    if name in needed and getattr(p, name) is None:
      raise ValueError(f"stored={p.stored!r} with {name}=None: must say where the rows, their scales, and columns of 16 bits lie")
    if name not in needed and getattr(p, name) is not None and (p.stored or name not in views[:2]):
      raise ValueError(f"stored={p.stored!r}, v_in_k={p.v_in_k}, D={p.D}, Dv={p.Dv} with {name}={getattr(p, name)}: there are no such rows")

def check_8_bits(p:Problem) -> None:
  """Raises an error for options that kernels do not support with q, k and v of 8 bits, or for a wrong number of scales."""
  for name in INPUT_SCALES:
    if (number := getattr(p, name)) not in (0, 1, p.B*p.Hkv): raise ValueError(f"{name}={number}: must be 0, 1 or B*Hkv={p.B*p.Hkv} numbers")
  if not p.of_8_bits:
    for name, shown in (*((name, name) for name in INPUT_SCALES), ("fast_accumulate", "fast_accumulate=True")):
      if getattr(p, name): raise ValueError(f"{shown} with q, k and v of {p.dtype}: it is for {' and '.join(OF_8_BITS)} only")
    return
  if p.dropout_p: raise NotImplementedError(f"dropout_p={p.dropout_p} with {p.dtype}: q, k and v of 8 bits have no gradient, so nothing to train")
  for name in ("stored", "v_in_k", "k_view", "dealt"):
    if (value := getattr(p, name)):
      raise NotImplementedError(f"{name}={value} with {p.dtype}: q, k and v of 8 bits must be whole tensors of their own, on one device or sharded "
                                "along batch or heads")

# ***** from shapes to a Problem *****

def _dims(name:str, shape:Sequence[int], layout:str) -> tuple[int, int, int, int]:
  """Returns (B, H, S, D) of a tensor in `layout` from its shape; a tensor (B*H, S, D) or (total, H, D) counts as one batch."""
  if len(shape) != (3 if layout in ("nsd", "thd") else 4):
    raise ValueError(f"{name} has shape {tuple(shape)}; layout={layout!r} needs {LAYOUTS[layout]}")
  if layout == "nsd": return 1, shape[0], shape[1], shape[2]
  if layout == "thd": return 1, shape[1], shape[0], shape[2]
  b, x, y, d = shape
  return (b, x, y, d) if layout == "bhsd" else (b, y, x, d)

def problem_of(o:Sequence[int], q:Sequence[int], k:Sequence[int], v:Sequence[int], *, dtypes:Sequence[str],
               lse:Sequence[int]|None=None, causal:bool|str=False, window:tuple[int, int]=(-1, -1), softmax_scale:float|None=None,
               layout:str="bhsd", extras:GivenExtras|None=None, max_seqlen_q:int|None=None, max_seqlen_k:int|None=None,
               views:tuple[Strided, Strided]|None=None, pages:Pages|None=None, v_in_k:bool=False, **others:Any) -> Problem:
  """Makes a checked Problem from the shapes and dtypes of o, q, k, v (and lse) and the options of a call."""
  # `dtypes` are dtype names of (o, q, k, v[, lse]). `causal` is False, True, "bottom-right" (as True: query i sees keys j <= i + Sk - Sq) or
  # "top-left" (query i sees keys j <= i). `window` is (left, right): query i sees `left` keys before key i + offset and `right` keys after this key;
  # -1 for no bound. `softmax_scale` None stands for 1/sqrt(D). `extras` has (shape, dtype name) of each optional tensor that is given, by its name in
  # EXTRAS. `views` are the fields k_view and v_view of the Problem, and `others` its further fields, such as softcap. Raises ValueError for shapes,
  # dtypes or options that contradict each other, and NotImplementedError for a problem that kernels do not support.
  layout, causal, window = check_layout("layout", layout), check_causal("causal", causal), check_window("window", window)
  varlen, top_left, paged, extras = layout == "thd", causal == "top-left", pages is not None, extras or {}
  if causal and window[1] > 0: raise ValueError(f"causal={causal!r} with window={window!r}: right must be -1 or 0, causal hides keys there")
  if not varlen and (max_seqlen_q is not None or max_seqlen_k is not None):
    raise ValueError(f"max_seqlen_q={max_seqlen_q}, max_seqlen_k={max_seqlen_k} are for layout='thd' only, not {layout!r}")
  if varlen and paged and max_seqlen_k is not None:
    raise ValueError(f"max_seqlen_k={max_seqlen_k} with block_table: kv_lengths says how long sequences are")

  # With `pages`, k and v have the shapes (B, Hkv, pages.rows, D) and (B, Hkv, pages.rows, Dv), whatever the layout. With `v_in_k`, `v` is the shape
  # of the first columns of K that are V.
  B, H, Hkv, Sq, Sk, D, Dv = _sizes(q, k, v, layout, paged, _sequences(extras, paged) if varlen else None)
  _check_outputs(o, lse, (B, H, Sq, Dv), layout, f"q {tuple(q)} and v {tuple(v)}")
  if lse is not None and dtypes[4] != "float32": raise ValueError(f"lse has dtype {dtypes[4]}: must be float32")
  of_keys = STORED.get(stored := others.get("stored", ""), dtypes[1])
  if stored and {*dtypes[2:4]} != {of_keys}: raise ValueError(f"k and v have dtypes {', '.join(dtypes[2:4])}: stored={stored!r} needs {of_keys}")
  if not stored and len(set(dtypes[1:4])) != 1:
    raise ValueError(f"q, k and v have dtypes {', '.join(dtypes[1:4])}: all three must be the same")

  options = _extras(extras, B, H, Sq, Sk)
  if varlen:
    options |= {"total_q": Sq, "total_k": 0 if paged else Sk}
    # max_seqlen_q and max_seqlen_k are the rows of the longest sequence. The default is the number of rows of all sequences together: the result is
    # then the same, but some workgroups find nothing to do.
    Sq = _longest("max_seqlen_q", max_seqlen_q, Sq)
    if not paged: Sk = _longest("max_seqlen_k", max_seqlen_k, Sk)
  if views is not None: options |= {"k_view": views[0], "v_view": None if v_in_k else views[1]}
  p = Problem(B, H, Hkv, Sq, Sk, D, Dv, dtypes[1], dtypes[0], layout,
              window=(window[0], 0) if causal else window, top_left=top_left, offset=0 if top_left else Sk - Sq,
              softmax_scale=1/math.sqrt(max(D, 1)) if softmax_scale is None else softmax_scale,
              return_lse=lse is not None, pages=pages, v_in_k=v_in_k, **options, **others)
  for name, (shape, dtype) in extras.items(): _check_extra(p, name, tuple(shape), dtype)
  return p

def _sizes(q:Sequence[int], k:Sequence[int], v:Sequence[int], layout:str, paged:bool, sequences:int|None) -> tuple[int, ...]:
  """Returns B, H, Hkv, Sq, Sk, D and Dv from the shapes of q, k and v, or raises ValueError if the shapes do not agree."""
  # With `paged` k and v lie in pages, and have the layout "bhsd". For packed sequences, of which there are `sequences`, Sq and Sk are the numbers of
  # rows of all sequences together.
  of_keys = "bhsd" if paged else layout
  B, H, Sq, D = _dims("q", q, layout)
  Bk, Hkv, Sk, Dk = _dims("k", k, of_keys)
  Bv, Hv, Sv, Dv = _dims("v", v, of_keys)
  if paged and layout == "nsd": B, H = Bk, H//Bk
  if paged and sequences is not None: B = sequences
  for name, shape, size, got, other, want in (
      ("k", k, "batch", Bk, "q", B), ("v", v, "batch", Bv, "q", B), ("v", v, "heads", Hv, "k", Hkv),
      ("v", v, "sequence length", Sv, "k", Sk), ("k", k, "head dimension", Dk, "q", D)):
    if got != want: raise ValueError(f"{name} has shape {tuple(shape)}: its {size} is {got} but the {size} of {other} is {want}")
  return sequences or B, H, Hkv, Sq, Sk, D, Dv

def _check_outputs(o:Sequence[int], lse:Sequence[int]|None, sizes:tuple[int, int, int, int], layout:str, inputs:str) -> None:
  """Raises ValueError if the shape of o or lse does not fit the sizes (B, H, Sq, Dv)."""
  B, H, Sq, Dv = sizes
  of_o = {"nsd": (1, B*H, Sq, Dv), "thd": (1, H, Sq, Dv)}.get(layout, sizes)
  if _dims("o", o, layout) != of_o:
    raise ValueError(f"o has shape {tuple(o)}: {inputs} give an output of B={of_o[0]}, H={H}, Sq={Sq}, Dv={Dv} "
                     f"in layout {layout!r}")
  of_lse = {"nsd": (B*H, Sq), "thd": (H, Sq)}.get(layout, (B, H, Sq))
  if lse is not None and tuple(lse) != of_lse:
    raise ValueError(f"lse has shape {tuple(lse)}: must be {of_lse}, whatever the layout")

def _sequences(extras:GivenExtras, paged:bool) -> int:
  """Returns the number of packed sequences, or raises ValueError if cu_seqlens_q or cu_seqlens_k is missing or has a wrong shape."""
  for name in ("cu_seqlens_q",) if paged else ("cu_seqlens_q", "cu_seqlens_k"):
    if name not in extras: raise ValueError(f"layout='thd' needs {name}, int32 of shape (sequences + 1,)")
    if len(shape := tuple(extras[name][0])) != 1 or shape[0] < 2:
      raise ValueError(f"{name} has shape {shape}: must be (sequences + 1,), of at least one sequence")
  return extras["cu_seqlens_q"][0][0] - 1

def _longest(name:str, value:int|None, total:int) -> int:
  if value is None: return total
  return min(total, values.whole_number(name, value, 1, None, "the rows of the longest sequence, at least 1"))

def _extras(extras:GivenExtras, B:int, H:int, Sq:int, Sk:int) -> dict[str, Any]:
  """Returns {field of Problem: value} for the fields that say which optional tensors are given."""
  if unknown := [name for name in extras if name not in EXTRAS]:
    raise ValueError(f"{unknown[0]} is not an optional tensor of attention: must be one of {', '.join(EXTRAS)}")
  there: dict[str, Any] = {name: name in extras for name in ("sinks", "kv_lengths", "kv_starts", "first_batch_and_head")}
  there |= {name: math.prod(extras[name][0]) for name in INPUT_SCALES if name in extras}
  there["mod_tensors"] = tuple((tuple(extras[name][0]), extras[name][1]) for name in MOD_TENSORS if name in extras)
  for name, x in TENSORS_OF_TERMS.items():
    if x.name not in extras: continue
    shape, dtype = extras[x.name]
    there[name] = x.dimensions(shape, dict(zip(SCORE_AXES, (B, H, Sq, Sk))))
    if len(x.dtypes) > 1: there[f"{name}_dtype"] = dtype
  return there

def _check_extra(p:Problem, name:str, shape:tuple[int, ...], dtype:str) -> None:
  """Raises ValueError if the problem has no optional tensor `name`, or needs another shape or dtype for it."""
  if name not in p.extras:
    of_packed = f"layout={p.layout!r}: it is for layout='thd' only"
    why = f"dropout_p={p.dropout_p}: it is for dropout only" if name.startswith("dropout") else of_packed
    raise ValueError(f"{name} with {why}")
  want_shape, want_dtype = p.extras[name]
  if (shape, dtype) != (want_shape, want_dtype):
    raise ValueError(f"{name} has shape {shape} and dtype {dtype}: must be {want_shape} and {want_dtype}")
