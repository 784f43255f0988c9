"""Checks of a call of `attention` before anything runs: `prepare` finds on which devices and with which strides the tensors lie, and makes the
`Problem` that describes the call."""
from __future__ import annotations
import math
from dataclasses import dataclass, field, replace
from typing import Any
from attn import values
from attn.api.dropout import check_seed
from attn.api.pages import check_pages, in_a_cache, placement_in_pages
from attn.calls.checked_kernel import arch_of, check_output, dtype_of, numbers_at_hand
from attn.calls.options import AttentionOptions
from attn.calls.placement import AXES, Placement, local_shape, of_each_device, place, placement_of
from attn.calls.quantized import GivenRows, Quantized, QuantizedLatent, QuantizedRows, check_pair, check_quantized
from attn.calls.views import places_in_cache
from attn.chips import Chip, get_chip
from attn.choose.dispatch import Choice, choose
from attn.compilers.choice import compiled_on
from attn.functions.symbols import FUNCTION_TENSOR_DTYPES
from attn.functions.trace import TensorKind, functions_of
from attn.parallel.context import SharedRows, extra_shape, first_launch, sequence_shards, with_rows
from attn.parallel.shards import SequenceShards
from attn.problem import EXTRAS, INPUT_SCALES, INVARIANT_KEYS, LAYOUTS, MOD_TENSORS, OF_8_BITS, Pages, Problem, Strided, problem_of
from attn.score.masks import check_moves, fixed_in_sequence
from attn.score.terms import TERM_TENSORS
from attn.tinygrad_compat import Tensor, UOp, bits_under_views, dtypes
from attn.values import FLOATS, static_shape

@dataclass(frozen=True)
class CheckedCall:
  """A checked call of `attention`: its tensors by name, and the `Problem` that each device computes."""
  # If several devices divide the rows of a sequence, `problem` is the whole call, and `shards` says which rows each device has.
  problem: Problem
  tensors: dict[str, Tensor]
  arch: Chip|None
  at: Placement
  out: Tensor|None
  variables: tuple[UOp, ...] = ()     # bound Variables, whose sums are the problem's numbers of rows
  shards: SequenceShards|None = None
  part: bool = False              # this call is one device's part of a call whose rows devices share
  into: tuple[Tensor, ...] = ()   # buffers for lse and lse_rest (`out` is for o), then the whole buffers that these lie in
  @property
  def log_sums(self) -> tuple[str, ...]:
    """Names of the outputs besides o: (), ("lse",) or ("lse", "lse_rest"); lse_rest is what rounding to float32 removed from lse."""
    return self.problem.outputs[1:]
  def choice(self) -> Choice:
    if self.shards is None: return choose(self.problem, self.arch)
    return choose(self.shared_rows.first_gathering if self.shared_rows.gathers else first_launch(self.problem, self.shards), self.arch)
  @property
  def shared_rows(self) -> SharedRows:
    assert self.shards is not None and self.arch is not None
    return SharedRows(self.problem, self.arch, self.at, self.shards)

def known(n:int|UOp|Tensor) -> int|None:
  """Returns the number of rows `n` as an int if the host knows the number, otherwise None."""
  return n if isinstance(n, int) else int(n.unbind()[1]) if isinstance(n, UOp) and n.is_bound_var else None

def lengths(n:int|UOp|Tensor, batch:int, capacity:int, at:Placement, name:str) -> Tensor:
  """Returns the number of rows of each batch as an int32 tensor (batch) on the devices of q."""
  # `n` is an int32 tensor (batch), or a number for all batches: an int or a Variable. Error messages call `n` by `name`.
  if isinstance(n, Tensor):
    values.dtype_name(name, n.dtype, ("int32",))
    placed = place(name, n, at)
    if local_shape(placed) != (batch,):
      raise ValueError(f"{name} has shape {values.shown_shape(n.shape)}: must be ({batch if at.shared != 'batch' else batch*at.count},)")
    return placed
  # The host knows this number, so it can be checked.
  if (value := known(n)) is not None and not 0 <= value <= capacity:
    raise ValueError(f"{name}={values.shown(value)}: must lie in 0..{capacity}, where {capacity} is the number of rows")
  return of_each_device(Tensor.full((batch,), n, dtype=dtypes.int, device=at.device).contiguous(), at.axis(("batch",)))

def check_sequences(name:str, cu:Tensor, rows:int, longest:int, longest_name:str) -> None:
  """Raises ValueError if packed sequences are out of order, end beyond `rows`, or are longer than `longest`."""
  # `cu` has the row where each sequence begins, then the end of the last one. The host reads these numbers only on the emulator, where reading costs
  # nothing. Elsewhere wrong sequences raise no error.
  if (ends := numbers_at_hand(cu)) is None: return
  found = int((ends[1:] - ends[:-1]).max())
  if ends[0] < 0 or ends[-1] > rows or (ends[1:] < ends[:-1]).any():
    raise ValueError(f"{name}={values.shown(ends.tolist())}: must not decrease, and must lie in 0..{rows}, where {rows} is the number of rows")
  if found > longest: raise ValueError(f"{longest_name}={longest}: {name} has a sequence of {found} rows; must be at least that")

def part_of_k(v:GivenRows|None, v_dim:int|None) -> bool:
  """Returns whether V is the first v_dim columns of K; raises ValueError unless exactly one of `v` and `v_dim` is given."""
  if v is None and v_dim is None: raise ValueError("v=None with v_dim=None: give v as a Tensor, or v_dim, the number of columns of k that are V")
  if v is not None and v_dim is not None: raise ValueError(f"v_dim={v_dim} with v: v_dim says that V is k[..., :v_dim], so v must be None")
  return v is None

def columns_of(shape:tuple[int, ...], v_dim:int) -> tuple[int, ...]:
  """Returns the shape of k[..., :v_dim], for a k of this `shape`. Raises ValueError if k has fewer columns."""
  if v_dim > shape[-1]: raise ValueError(f"v_dim={v_dim}: must lie in 1..{shape[-1]}, the columns of k, which has shape {shape}")
  return (*shape[:-1], v_dim)

@dataclass(frozen=True)
class PlacedInputs:
  """Checked q, k and v, and where their rows lie in memory."""
  tensors: dict[str, Tensor]  # without v if V is part of K
  shapes: dict[str, tuple[int, ...]]  # on one device: q in `layout`, k and v in `layout_of_keys`
  types: list[str]  # dtype names of q, k and v
  at: Placement
  layout: str
  pages: Pages|None = None
  views: tuple[Strided, Strided]|None = None
  stored: dict[str, Any] = field(default_factory=dict)     # fields of the Problem that describe rows of 8 bits
  shards: SequenceShards|None = None
  @property
  def layout_of_keys(self) -> str: return self.layout if self.pages is None else "bhsd"
  def keys(self, axis:str) -> int:
    """Returns the size of k's axis "batch" or "rows", or 1 if k has no such axis; "rows" of a cache is its capacity."""
    axes = AXES[self.layout_of_keys]
    return self.shapes["k"][axes.index(axis)] if axis in axes else 1

def as_bytes(dtype:str, tensors:dict[str, Tensor], options:AttentionOptions, in_place:bool) -> dict[str, Tensor]:
  """Returns q, k and v; those of 8-bit floats are reinterpreted as bytes, the form that kernels take."""
  # `dtype` is the dtype of q, for messages. With `in_place` k and v are a cache, which 8-bit floats do not support.
  for name, there in (("block_table", options.block_table is not None), ("v_dim", options.v_dim is not None), ("a cache", in_place)):
    if there: raise NotImplementedError(f"{name} with q of {dtype}: a cache of 8 bits is QuantizedRows, and its queries have 16 bits")
  return {name: Tensor(bits_under_views(t.uop, dtypes.uchar)) if values.dtype_text(t.dtype) in OF_8_BITS else t for name, t in tensors.items()}

def input_scale(name:str, t:Tensor, x:PlacedInputs, sequences:int) -> Tensor:
  """Returns `t`, the scale of q, k or v of 8-bit floats, as (1, 1), or as (B, Hkv) if each key/value head has its own."""
  values.dtype_name(name, t.dtype, ("float32",))
  if x.types[0] not in OF_8_BITS: raise ValueError(f"{name} with q of {x.types[0]}: it is for {' and '.join(OF_8_BITS)} only")
  sizes = dict(zip(AXES[x.layout], static_shape("k", x.tensors["k"].shape)))
  # Packed sequences count as batches: there are `sequences`, or 0 if nothing is packed.
  batches = (sizes["batch"],) if "batch" in sizes else (sequences,)*bool(sequences)
  given, each = static_shape(name, t.shape), (*batches, heads := sizes["heads"])
  if math.prod(given) == 1: return place(name, t.reshape(1, 1), x.at)
  if given != each: raise ValueError(f"{name} has shape {given}: must be one number, or {each}, one for each batch and key/value head")
  return place(name, t.reshape(-1, heads), x.at)

def placed(q:Tensor, k:GivenRows, v:GivenRows|None, options:AttentionOptions, lengths_name:str, in_place:bool) -> PlacedInputs:
  """Checks q, k and v, and finds on which devices they lie and with which strides kernels read k and v."""
  layout = options.layout
  check_pair(("k", "v"), k, v)
  quantized, tensors = dict[str, Quantized](), dict[str, Tensor]()
  for name, t in (("q", q), ("k", k), ("v", v)):
    if name == "v" and part_of_k(v, options.v_dim): continue
    if isinstance(t, (QuantizedRows, QuantizedLatent)): quantized[name] = check_quantized(name, t)
    tensors[name] = quantized[name].stored if name in quantized else values.tensor(name, t)
  def type_of(name:str) -> str:
    dtype = tensors.get(name, tensors["k"]).dtype
    return values.dtype_text(dtype) if quantized and name != "q" else values.dtype_name(name, dtype, (*FLOATS, *OF_8_BITS))
  types = [type_of(name) for name in ("q", "k", "v")]
  if types[0] in OF_8_BITS: tensors = as_bytes(types[0], tensors, options, in_place)
  of_k, rows_of_v = tensors["k"], tensors.get("v", tensors["k"])
  if options.block_table is not None: return with_places_of_scales(placed_in_pages(tensors, types, options, lengths_name), quantized)
  for name, t in tensors.items():
    if len(shape := static_shape(name, t.shape)) != len(AXES[layout]):
      raise ValueError(f"{name} has shape {shape}; layout={layout!r} needs {LAYOUTS[layout]}")
  whole = {name: static_shape(name, t.shape) for name, t in tensors.items()}
  at, shards, (queries, keys) = sequence_shards(whole, options, placement_of(q, of_k, rows_of_v, layout))
  def shape_of(name:str, t:Tensor) -> tuple[int, ...]:
    return local_shape(t) if shards is None else with_rows(whole[name], layout, queries if name == "q" else keys)
  if shards is not None and types[0] in OF_8_BITS:
    raise NotImplementedError(f"q, k and v of {types[0]} sharded along their rows: shard them along batch or heads")
  shapes = {name: shape_of(name, t) for name, t in tensors.items()}
  if options.v_dim is not None: shapes["v"] = columns_of(shapes["k"], options.v_dim)
  # Kernels read in place: pages (blocks of cache rows), rows of 8-bit numbers, and with `in_place` all views of a larger buffer.
  views = places_in_cache(of_k, rows_of_v, layout) if in_place and not quantized and isinstance(at.device, str) else None
  return with_places_of_scales(PlacedInputs(tensors, shapes, types, at, layout, views=views, shards=shards), quantized)

def with_places_of_scales(x:PlacedInputs, quantized:dict[str, Quantized]) -> PlacedInputs:
  """Adds to the inputs `x` the scales of 8-bit k and v, and the start and strides of k, v and scales in memory."""
  # `quantized` has the records of k and v by name, and is empty if k and v have no 8-bit numbers.
  if not quantized: return x
  if x.shards is not None:
    raise NotImplementedError("k and v are QuantizedRows sharded along their rows: devices that share rows send each other keys without scales; "
                              "shard them along batch or heads")
  if x.layout == "thd" and x.pages is None:
    raise NotImplementedError("k and v are QuantizedRows with layout='thd': packed keys are not a cache; give pages and a block_table")
  layout, k = "bshd" if x.pages is not None else x.layout, quantized["k"]
  found = {name: t for key, rows in quantized.items() for name, t in ((key, rows.stored), (f"{key}_scales", rows.scales))}
  if (rotary := k.rotary) is not None:
    check_latent_cache(x, k)
    found["k_rotary"] = rotary
    x = replace(x, shapes=x.shapes | {"k": (*x.shapes["k"][:-1], k.width)})
  lies = {name: in_a_cache(t, layout) for name, t in found.items()}
  tensors, places = x.tensors | {name: t for name, (t, _) in lies.items()}, {name: place for name, (_, place) in lies.items()}
  stored = {"stored": k.format.name, "scale_dtype": values.dtype_text(k.scales.dtype), "k_scale_view": places["k_scales"],
            "v_scale_view": places.get("v_scales"), "k_rotary_view": places.get("k_rotary")}
  return replace(x, tensors=tensors, views=(places["k"], places.get("v", places["k"])), stored=stored)

def check_latent_cache(x:PlacedInputs, k:Quantized) -> None:
  """Raises ValueError if the 8-bit cache `k` for latent attention does not fit the inputs."""
  # The columns that are stored in 8 bits are V.
  if (v_dim := x.shapes["v"][-1]) != (width := int(k.stored.shape[-1])):
    raise ValueError(f"v_dim={v_dim} with k.values of {width} columns: must be {width}, because the stored columns of a latent cache are the values")
  assert k.rotary is not None
  if (of_rotary := values.dtype_text(k.rotary.dtype)) != x.types[0]:
    raise ValueError(f"k.rotary has dtype {of_rotary}: must be that of q, {x.types[0]}")

def placed_in_pages(tensors:dict[str, Tensor], types:list[str], options:AttentionOptions, lengths_name:str) -> PlacedInputs:
  """Checks q, and k and v in pages (blocks of cache rows), and finds on which devices and with which strides they lie."""
  q, k, v, table = tensors["q"], tensors["k"], tensors.get("v", tensors["k"]), options.block_table
  assert table is not None
  pages = check_pages(q, k, v, options, lengths_name)
  at = placement_in_pages(q, k, v, options.layout)
  # The shapes of k and v don't show the pages: they are (sequences, heads of one device, largest number of rows of a sequence, width).
  shapes = {"q": local_shape(q)}
  for name, t in (("k", k), ("v", v)):
    _, _, heads, width = local_shape(t)
    shapes[name] = (int(table.shape[0]), heads, pages.rows, width)
  if options.v_dim is not None: shapes["v"] = columns_of(shapes["k"], options.v_dim)
  (k, in_k), (v, in_v) = in_a_cache(k, "bshd"), in_a_cache(v, "bshd")
  given = {"q": q, "k": k, "v": v}
  return PlacedInputs({name: given[name] for name in tensors}, shapes, types, at, options.layout, pages, (in_k, in_v))

def optional_tensors(x:PlacedInputs, options:AttentionOptions, lengths_name:str) -> dict[str, Tensor]:
  """Returns the optional tensors of a call, such as a bias, checked and on the devices of q, in the order of `EXTRAS`."""
  # Error messages call kv_lengths `lengths_name`, the name that the caller's own argument has.
  extras: dict[str, Tensor] = {}
  def per_batch(name:str, n:int|UOp|Tensor, called:str) -> Tensor: return lengths(n, x.keys("batch"), x.keys("rows"), x.at, called)
  for name, tensor in TERM_TENSORS.items():
    if (given := getattr(options, name)) is not None: extras[name] = place(name, tensor.taken(name, given), x.at)
  if options.sinks is not None:
    values.dtype_name("sinks", options.sinks.dtype, FLOATS)
    extras["sinks"] = place("sinks", options.sinks.cast(dtypes.float), x.at)
  if options.kv_lengths is not None:
    if x.layout == "thd" and x.pages is None:
      raise NotImplementedError(f"{lengths_name}={values.shown(options.kv_lengths)} with layout='thd': packed sequences take their lengths from "
                                "cu_seqlens_k")
    extras["kv_lengths"] = per_batch("kv_lengths", options.kv_lengths, lengths_name)
  if options.kv_starts is not None:
    if options.kv_lengths is None: raise ValueError("kv_starts without kv_lengths: give both, keys kv_starts[b] <= j < kv_lengths[b] exist")
    for name in extras:
      if name in TERM_TENSORS and "keys" in TERM_TENSORS[name].axes:
        raise NotImplementedError(f"kv_starts with {name}: kv_starts makes key numbers begin at a row that only the device knows, so the columns of "
                                  f"{name} cannot be matched to keys; give one of the two")
    extras["kv_starts"] = per_batch("kv_starts", options.kv_starts, "kv_starts")
  for n, t in enumerate(options.mod_tensors): extras[MOD_TENSORS[n]] = place(f"mod_tensors[{n}]", t, x.at).contiguous()
  for name in ("block_table", "cu_seqlens_q", "cu_seqlens_k"):
    if (given := getattr(options, name)) is not None:
      dtype_of(name, given)
      extras[name] = place(name, given, x.at)
  for name in INPUT_SCALES:
    if (given := getattr(options, name)) is not None:
      extras[name] = input_scale(name, given, x, 0 if options.cu_seqlens_q is None else int(options.cu_seqlens_q.shape[0]) - 1)
  if options.dropout_p and options.dropout_seed is not None:
    extras["dropout_seed"] = place("dropout_seed", check_seed("dropout_seed", options.dropout_seed), x.at)
  return {name: extras[name] for name in EXTRAS if name in extras}

def check_out(q:Tensor, width:int, options:AttentionOptions) -> None:
  """Raises ValueError if the buffer `out` differs from the output o, of `width` columns, in shape, dtype, device or sharding."""
  if (out := options.out) is None: return
  check_output("out", out.uop)
  want = (*q.shape[:-1], width)
  if out.shape != want: raise ValueError(f"out has shape {out.shape}: must be {want}")
  if options.out_dtype not in (None, out.dtype):
    raise ValueError(f"out_dtype={values.dtype_text(options.out_dtype)} but out has dtype {values.dtype_text(out.dtype)}: must be the same")
  if (out.device, out.uop.axis) != (q.device, q.uop.axis):
    raise ValueError(f"out lies on {out.device}, sharded along axis {out.uop.axis}: must be as q, on {q.device}, along axis {q.uop.axis}")

def out_dtype_of(x:PlacedInputs, options:AttentionOptions) -> str:
  """Returns the dtype name of the output o."""
  if options.out_dtype is not None: return values.dtype_text(options.out_dtype)
  if options.out is not None: return dtype_of("out", options.out)
  return "bfloat16" if x.types[0] in OF_8_BITS else x.types[0]

def tensor_kind(name:str, t:Tensor) -> TensorKind:
  """Checks a tensor that score_mod or mask_mod reads, and returns its shape and dtype name."""
  return static_shape(name, t.shape), values.dtype_name(name, t.dtype, FUNCTION_TENSOR_DTYPES)

def prepare(q:Tensor, k:GivenRows, v:GivenRows|None, options:AttentionOptions, lengths_name:str="kv_lengths", in_place:bool=False) -> CheckedCall:
  """Checks the arguments of a call of `attention` and returns the checked call."""
  # Error messages call kv_lengths `lengths_name`, the name that the caller's own argument has. With `in_place`, kernels read views of a larger buffer
  # without a copy.
  if options.batch_invariant and options.num_splits > 1:
    raise ValueError(f"num_splits={options.num_splits} with batch_invariant=True: must be 0 (ranges of {INVARIANT_KEYS} keys) or 1 (no split)")
  x = placed(q, k, v, options, lengths_name, in_place)
  functions = functions_of(options.score_mod, options.mask_mod, tuple(tensor_kind(f"mod_tensors[{n}]", t) for n, t in enumerate(options.mod_tensors)))
  extras = optional_tensors(x, options, lengths_name)
  check_out(q, x.shapes["v"][-1], options)
  p = problem_of((*x.shapes["q"][:-1], x.shapes["v"][-1]), x.shapes["q"], x.shapes["k"], x.shapes["v"],
                 dtypes=[out_dtype_of(x, options), *x.types], num_splits=options.num_splits, views=x.views, pages=x.pages,
                 v_in_k="v" not in x.tensors, fast_accumulate=options.fast_accumulate, **x.stored, **options.problem_fields, **functions,
                 extras={name: (extra_shape(name, t, x.shards, x.shapes["q"][AXES[x.layout].index("rows")]), dtype_of(name, t))
                         for name, t in extras.items()})
  if p.varlen: check_sequences("cu_seqlens_q", extras["cu_seqlens_q"], p.total_q, p.Sq, "max_seqlen_q")
  if p.varlen and x.pages is None: check_sequences("cu_seqlens_k", extras["cu_seqlens_k"], p.total_k, p.Sk, "max_seqlen_k")
  p = replace(p, return_lse=options.return_lse, first_batch_and_head=bool(p.dropout_p or p.functions) and x.at.shared in ("batch", "heads"),
              batch_invariant=options.batch_invariant, deterministic=options.deterministic)
  device = x.at.device if isinstance(x.at.device, str) else x.at.device[0]
  arch = compiled_on(get_chip(options.arch), device) if options.arch is not None else arch_of(device)
  if x.shards is not None and arch is None:
    raise NotImplementedError(f"q, k or v sharded along rows: no kernel merges results on {device}; shard along batch or heads")
  call = CheckedCall(p, {**x.tensors, **extras}, arch, x.at, options.out, shards=x.shards)
  if x.shards is not None and not (fixed_in_sequence(p) and call.shared_rows.gathers): check_moves(p)
  return call
