"""The key/value cache for decoding: buffers with room for a fixed number of rows of each sequence. `append_kv` writes new rows in place, and
`attention_with_kv_cache` then attends over all filled rows. Rows beyond the filled rows have no effect, even if they are NaN."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from attn import values
from attn.api.attention import attend
from attn.api.checked_call import known, lengths, part_of_k, prepare
from attn.api.launch import check_devices
from attn.calls.checked_kernel import MATRIX_DEVICES, CheckedKernel, KernelFunction, region, whole_buffer
from attn.calls.gradient import no_gradient
from attn.calls.options import AttentionOptions, check_lengths, check_out_dtype, options_of
from attn.calls.quantized import (Quantized, QuantizedLatent, QuantizedRows, GivenRows, check_pair, check_quantized, check_scale_dtype,
                                  eight_bits, stored_rows)
from attn.api.pages import check_pages, placement_in_pages
from attn.calls.placement import AXES, Placement, device_names, local_shape, place, placement_of
from attn.calls.plain import bhsd
from attn.calls.views import in_buffer, overlapping, whole_places
from attn.kernels.append import Append, Scales, append
from attn.problem import INPUT_SCALES, LAYOUTS, Pages, Strided
from attn.tinygrad_compat import Context, DType, Device, Ops, Tensor, UOp, ast_of, buffer_under, device_of, dtypes, written_to
from attn.values import FLOATS, cache_of_kernels, static_shape

OVERLAP = "k_cache and v_cache overlap: they must be two buffers, or disjoint parts of one"
CACHE_LAYOUTS = ("bhsd", "bshd", "nsd")

def check_cache_layout(name:str, x:Any) -> str: return values.word(name, x, CACHE_LAYOUTS)

Length = int|UOp|Tensor   # rows filled: for all batches, as a number or a Variable, or int32 (B)

def one_or_several(names:tuple[str, ...]) -> str|tuple[str, ...]: return names if len(names) > 1 else names[0]

def cache_maker(dtype:Any, scale_dtype:Any, device:Any, v_dim:int|None, rotary_dtype:Any, axis:int|None=None) -> Callable[..., Any]:
  """Checks dtypes and devices of a new cache, and returns a function that allocates such a cache, filled with zeros, for a given shape."""
  # The cache is a Tensor; for a `dtype` of 8 bits QuantizedRows, or QuantizedLatent if `v_dim` is given. On several devices it is sharded along
  # `axis`, or copied to each device if `axis` is None.
  on = Device.DEFAULT if device is None else one_or_several(device_names("device", device))
  format, of_scales = eight_bits("dtype", dtype, on), check_scale_dtype("scale_dtype", scale_dtype)
  of_rotary = check_out_dtype("rotary_dtype", rotary_dtype)
  try: of_rows = check_out_dtype("dtype", dtype) if format is None else format.dtype
  except (ValueError, NotImplementedError) as e: raise type(e)(f"{e}; or int8 or fp8e4m3, for rows of 8 bits") from None
  def zeros(*shape:int, dtype:DType=of_rows) -> Tensor:
    if axis is None or isinstance(on, str): return Tensor.zeros(*shape, dtype=dtype, device=on).contiguous().realize()
    return Tensor.zeros(*shape, dtype=dtype, device=on[0]).contiguous().shard(on, axis).realize()
  def quantized(*shape:int) -> QuantizedRows|QuantizedLatent:
    if v_dim is None: return QuantizedRows(zeros(*shape), zeros(*shape[:-1], dtype=of_scales))
    return QuantizedLatent(zeros(*shape[:-1], v_dim), zeros(*shape[:-1], dtype=of_scales), zeros(*shape[:-1], shape[-1] - v_dim, dtype=of_rotary))
  return zeros if format is None else quantized

def check_columns_of_v(v_dim:Any, width:int) -> int|None:
  """Returns the option `v_dim` of a new cache for latent attention; raises ValueError unless it is None or in 1..width - 1."""
  return None if v_dim is None else values.whole_number("v_dim", v_dim, 1, width - 1, f"None, or a whole number from 1 to {width - 1}: a latent row "
                                                        f"of {width} columns has at least one rotary column")

@values.names_itself
def empty_kv_cache(batch:int, heads:int, capacity:int, width:int, *, dtype:DType|str=dtypes.half, scale_dtype:DType|str=dtypes.float,
                   layout:str="bhsd", v_dim:int|None=None, rotary_dtype:DType|str=dtypes.half,
                   device:str|tuple[str, ...]|None=None) -> tuple[Any, Any]:
  """Allocates a key/value cache. Returns (k_cache, v_cache), filled with zeros: `capacity` rows of `width` elements for each batch and key/value
  head.

    k_cache, v_cache = attn.empty_kv_cache(batch, heads, capacity, width)

  `layout` is "bhsd" for the shape (batch, heads, capacity, width), or "bshd" for (batch, capacity, heads, width). `heads` counts key/value heads.
  With several devices each device gets a copy. Raises ValueError for a size that is not a positive whole number.

  `dtype` is float16, bfloat16 or float32, for Tensors; or "int8" or "fp8e4m3", for `QuantizedRows`: rows of 8-bit numbers, each row with a scale.
  "fp8e4m3" is the chip's own format: OCP's e4m3, or e4m3fnuz on gfx942. `scale_dtype` is the dtype of the scales: float32 (4 bytes for each row) or
  float16 (2 bytes). A cache of 8-bit numbers with rows of 128 elements holds 1.9 times as many tokens as a float16 cache in equal memory. With rows
  of 64 elements this factor is reached only with float16 scales.

  `v_dim` is for latent attention (MLA): V is the first v_dim columns of K, and v_cache is None. k_cache is then a Tensor or, in 8 bits,
  `QuantizedLatent`, whose columns after the first v_dim have the dtype `rotary_dtype`."""
  layout = values.word("layout", layout, ("bhsd", "bshd"))
  batch, heads, capacity, width = (values.whole_number(name, n, 1, 2**31 - 1, "a whole number, at least 1 and less than 2**31")
                                   for name, n in (("batch", batch), ("heads", heads), ("capacity", capacity), ("width", width)))
  made = cache_maker(dtype, scale_dtype, device, check_columns_of_v(v_dim, width), rotary_dtype)
  shape = (batch, heads, capacity, width) if layout == "bhsd" else (batch, capacity, heads, width)
  return made(*shape), made(*shape) if v_dim is None else None

@values.names_itself
def empty_paged_cache(num_pages:int, page_size:int, Hkv:int, D:int, Dv:int|None=None, *, dtype:DType|str=dtypes.half,
                      scale_dtype:DType|str=dtypes.float, v_dim:int|None=None, rotary_dtype:DType|str=dtypes.half,
                      device:str|tuple[str, ...]|None=None) -> tuple[Any, Any]:
  """Allocates a key/value cache in pages. Returns (k_pages, v_pages), filled with zeros: (num_pages, page_size, Hkv, D) and (num_pages, page_size,
  Hkv, Dv). Dv is D by default. An allocator decides which pages a sequence gets and which pages are free: examples/serve.py has one. On several
  devices each page is sharded along its heads. Raises ValueError for a size that is not a positive whole number, or if Hkv is not a multiple of the
  number of devices. The scales of pages of 8-bit numbers are (num_pages, page_size, Hkv). `dtype`, `scale_dtype`, `v_dim` and `rotary_dtype` are as
  in `empty_kv_cache`."""
  sizes = [values.whole_number(name, n, 1, 2**31 - 1, "a whole number, at least 1 and less than 2**31")
           for name, n in (("num_pages", num_pages), ("page_size", page_size), ("Hkv", Hkv), ("D", D), ("Dv", D if Dv is None else Dv))]
  if device is not None: device = one_or_several(device_names("device", device))
  if isinstance(device, tuple) and Hkv % len(device):
    raise ValueError(f"Hkv={Hkv} on device={device}: must be a multiple of the {len(device)} devices, each of which takes a part of the heads")
  if v_dim is not None and Dv is not None: raise ValueError(f"v_dim={v_dim} with Dv={Dv}: v_dim says that V is part of K, so Dv must be None")
  made = cache_maker(dtype, scale_dtype, device, check_columns_of_v(v_dim, sizes[3]), rotary_dtype, AXES["bshd"].index("heads"))
  return made(*sizes[:4]), made(*sizes[:3], sizes[4]) if v_dim is None else None

def _check_new_rows(x:OfCache, layout:str) -> tuple[int, int]:
  """Returns (number of new rows, number of rows that the cache can hold), or raises ValueError if the new rows do not fit."""
  rows, name, new, cache = AXES[layout].index("rows"), x.name, x.new, x.cache
  got, held = static_shape(f"{name}_new", new.shape), static_shape(f"{name}_cache", cache.shape)
  if len(held) != len(AXES[layout]): raise ValueError(f"{name}_cache has shape {held}; layout={layout!r} needs {LAYOUTS[layout]}")
  want = (*held[:-1], x.width)
  if len(got) != len(want) or got[:rows] + got[rows+1:] != want[:rows] + want[rows+1:]:
    raise ValueError(f"{name}_new has shape {got}: must be that of {name}_cache, {want}, but for the number of rows, axis {rows}")
  if x.quantized is not None: values.dtype_name(f"{name}_new", new.dtype, x.quantized.dtypes_of_new)
  else:
    dtype = values.dtype_name(f"{name}_cache", cache.dtype, FLOATS)
    if new.dtype != cache.dtype: raise ValueError(f"{name}_new has dtype {values.dtype_text(new.dtype)}: must be that of {name}_cache, {dtype}")
  if new.device != cache.device or new.uop.axis != cache.uop.axis:
    raise ValueError(f"{name}_new is on {new.device}, sharded along axis {new.uop.axis}: must be as {name}_cache, on {cache.device}, along axis "
                     f"{cache.uop.axis}")
  if got[rows] > want[rows]: raise ValueError(f"{name}_new has {got[rows]} rows: {name}_cache holds {want[rows]}")
  return got[rows], want[rows]

def check_caches(q:Tensor, k_cache:GivenRows, v_cache:GivenRows, layout:str) -> None:
  """Raises ValueError if the shapes, dtypes or devices of q, k_cache and v_cache don't fit together."""
  values.tensor("q", q)     # only a cache may be QuantizedRows
  shapes = []
  for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
    t = stored_rows(name, x)
    if t is x: values.dtype_name(name, values.tensor(name, x).dtype, FLOATS)
    if len(shape := static_shape(name, t.shape)) != len(AXES[layout]):
      raise ValueError(f"{name} has shape {shape}; layout={layout!r} needs {LAYOUTS[layout]}")
    if 0 in shape: raise ValueError(f"{name} has shape {shape}: every dimension must be at least 1")
    if t.device != q.device:
      raise ValueError(f"{name} is on {t.device} but q on {q.device}: all tensors must be on the same device, or the same devices")
    if t is x and t.dtype != q.dtype:
      raise ValueError(f"{name} has dtype {values.dtype_text(t.dtype)}: must be that of q, {values.dtype_text(q.dtype)}")
    shapes.append(dict(zip(AXES[layout], (*shape[:-1], shape[-1] + x.rotary.shape[-1]) if isinstance(x, QuantizedLatent) else shape)))
  of_q, of_k, of_v = shapes
  for name, axis, got, want, of in (("k_cache", "batch", of_k, of_q, "q"), ("k_cache", "width", of_k, of_q, "q"),
                                    *[("v_cache", axis, of_v, of_k, "k_cache") for axis in ("batch", "heads", "rows")]):
    if got.get(axis) != want.get(axis): raise ValueError(f"{name} has {axis} {got[axis]}: must be that of {of}, {want[axis]}")

def has_threads(device:str|tuple[str, ...]|None) -> bool:
  """Returns whether a workgroup has several threads on the device; on a CPU core it has one."""
  return device is None or device_of(device if isinstance(device, str) else device[0]).renderer.has_local

def buffer_of(u:UOp) -> UOp:
  """Returns the buffer of which the UOp `u` is a view, even if writes to this buffer are pending."""
  while u.op is not Ops.BUFFER and u.src: u = u.src[0]
  return u

@cache_of_kernels
def _kernel(names:tuple[str, ...], a:Append) -> KernelFunction:
  program = append(a)
  refuse = no_gradient(f"{names[0]}: appending to a cache has no gradient; train with attn.attention of whole k and v")
  def kernel(*placeholders:UOp) -> CheckedKernel:
    *used, _ = placeholders     # the last one is the new lengths
    return CheckedKernel(ast_of(program, *used), names, gradient=refuse, takes=len(used))
  return kernel

@dataclass(frozen=True)
class NewRows:
  """Checked new rows of k and v, with the kernel launches that write them into the caches."""
  # An entry for k and, unless V is part of K, one for v: the tensors to write (the cache and, for rows of 8 bits, the scales), the new rows, and the
  # kernel that writes them.
  launches: tuple[tuple[list[Tensor], Tensor, KernelFunction], ...]
  start: Tensor      # int32 (batch): rows filled before the append
  filled: Tensor     # int32 (batch): rows filled after it
  table: tuple[Tensor, ...] = ()    # the block table, if the cache is pages
  def append(self) -> Tensor:
    """Launches the kernels that write the new rows into the caches, and returns the new lengths: rows filled in each batch."""
    # The lengths depend on the launches, so a function under TinyJit that returns only the lengths captures the launches, too.
    filled = self.filled
    for outputs, rows, fxn in self.launches:
      buffers = [buffer_under(t.uop) if isinstance(t.device, str) else None for t in outputs]
      given = [t if buffer is None else Tensor(buffer) for t, buffer in zip(outputs, buffers)]
      *written, filled = Tensor.custom_kernel(*given, rows.contiguous(), self.start, *(t.contiguous() for t in self.table), filled, fxn=fxn)
      # Every tensor that shares a buffer with a cache then contains the new rows.
      for t, buffer, after in zip(outputs, buffers, written):
        if buffer is None: t.replace(after)
        else: written_to(buffer, after.uop.src[1])
    return filled

def rows_in(name:str, cache:Tensor, layout:str) -> Strided|None:
  """Returns the start and strides of a cache's rows in the buffer of which the cache is a view, or None if the cache is a whole buffer."""
  # A cache on several devices counts as a whole buffer.
  found = in_buffer(bhsd(cache, layout)) if isinstance(cache.device, str) else None
  if found is None:
    # What is appended to a computed value, or to a view in which two rows have one address, would be lost.
    try: whole_buffer(name, cache.uop)
    except ValueError:
      raise ValueError(f"{name} is a computed value, or a view whose rows don't lie in a buffer a constant stride apart, each in one piece: what is "
                       "appended to it would be lost; must be a buffer, or slices of one along its axes in any order, but for the last") from None
    return None
  sizes, places = dict(zip(AXES[layout], static_shape(name, cache.shape))), found.places
  for axis, step in (("batch", places.batch), ("heads", places.head), ("rows", places.row)):
    if step == 0 and sizes.get(axis, 1) > 1:
      raise ValueError(f"{name} is expanded along its {axis} axis: {sizes[axis]} entries are the same memory; must be a buffer of its own "
                       "(.contiguous().realize())")
  return places

@dataclass(frozen=True)
class Output:
  """A tensor that `append_kv` writes: a cache, or the scales of a cache of 8-bit numbers."""
  name: str
  tensor: Tensor
  layout: str
  @property
  def rows(self) -> Tensor:
    """The tensor with one axis for each letter of the layout: a tensor of scales gets a last axis of size 1."""
    return self.tensor if self.tensor.ndim == len(AXES[self.layout]) else self.tensor.unsqueeze(-1)
  @functools.cached_property
  def view(self) -> Strided|None:
    """Start and strides of the rows in a larger buffer; None if the tensor is a whole buffer, or lies on several devices."""
    return rows_in(self.name, self.rows, self.layout)
  @property
  def places(self) -> Strided: return self.view or whole_places(local_shape(self.rows), self.layout)
  def overlaps(self, other:Output) -> bool:
    if self.view is not None and other.view is not None:
      sizes = dict(zip(AXES[self.layout], local_shape(self.rows)))
      counts = (sizes.get("batch", 1), sizes["heads"], sizes["rows"], sizes["width"])
      return buffer_of(self.tensor.uop) is buffer_of(other.tensor.uop) and overlapping(self.view, other.view, counts)
    a, b = region(self.tensor.uop), region(other.tensor.uop)
    return a is not None and b is not None and a[0] is b[0] and max(a[1], b[1]) < min(a[1] + a[2], b[1] + b[2])

@dataclass(frozen=True)
class OfCache:
  """New rows of k or of v, and the cache to which they are appended."""
  name: str
  new: Tensor
  cache: Tensor  # of rows of 8 bits: the tensor of 8-bit numbers
  quantized: Quantized|None = None  # of rows of 8 bits: numbers and scales
  @property
  def width(self) -> int: return int(self.cache.shape[-1]) if self.quantized is None else self.quantized.width
  def outputs(self, layout:str) -> list[Output]:
    """Returns the tensors that appending rows to this cache writes: the cache, and in 8 bits also its scales and rotary columns."""
    # Rows of 8 bits have scales, too, and a latent cache of 8 bits also has rotary columns of 16 bits.
    x = self.quantized
    further = {} if x is None else {"scales": x.scales, **({} if x.rotary is None else {"rotary": x.rotary})}
    return [Output(f"{self.name}_cache", self.cache, layout), *[Output(f"{self.name}_cache.{part}", t, layout) for part, t in further.items()]]

def _into_pages(parts:list[OfCache], cache_seqlens:Length, layout:str, block_table:Tensor) -> NewRows:
  """Checks the new rows of `append_kv` for caches in pages (blocks of rows), and returns them with the launches that write them."""
  options = AttentionOptions(layout=layout, block_table=block_table, kv_lengths=cache_seqlens)
  k_new, k_cache = parts[0].new, parts[0].cache
  pages = check_pages(k_new, k_cache, parts[-1].cache, options, "cache_seqlens", ("k_new", "k_cache", f"{parts[-1].name}_cache"))
  for x in parts:
    if x.new.ndim != k_new.ndim: raise ValueError(f"{x.name}_new has shape {values.shown_shape(x.new.shape)}: must be {LAYOUTS[layout]}, as k_new")
  B, heads, capacity = int(block_table.shape[0]), int(k_cache.shape[2]), pages.rows
  sizes = [dict(zip(AXES[layout], static_shape(f"{x.name}_new", x.new.shape))) for x in parts]
  for size, x in zip(sizes, parts):
    name, new, cache = x.name, x.new, x.cache
    of_heads = size["heads"]//B if layout == "nsd" else size["heads"]
    if (len(new.shape), of_heads, size["width"]) != (len(AXES[layout]), heads, x.width) or size["rows"] != sizes[0]["rows"]:
      raise ValueError(f"{name}_new has shape {values.shown_shape(new.shape)}: must be {LAYOUTS[layout]} of {B} sequences with {heads} heads of "
                       f"{x.width} elements, and as many rows as k_new, {sizes[0]['rows']}")
    if x.quantized is not None: values.dtype_name(f"{name}_new", new.dtype, x.quantized.dtypes_of_new)
    if (x.quantized is None and new.dtype != cache.dtype) or new.device != cache.device:
      raise ValueError(f"{name}_new is {values.dtype_text(new.dtype)} on {new.device}: must be as {name}_cache, "
                       f"{values.dtype_text(cache.dtype)} on {cache.device}")
    if new.uop.axis != k_new.uop.axis:
      raise ValueError(f"{name}_new is sharded along axis {new.uop.axis}: must be as k_new, along {k_new.uop.axis}")
  new_rows = sizes[0]["rows"]
  if (n := known(cache_seqlens)) is not None and n + new_rows > capacity:
    raise ValueError(f"cache_seqlens={n}: with {new_rows} new rows that is more than the {capacity} that block_table has pages for")
  at = placement_in_pages(k_new, k_cache, parts[-1].cache, layout, ("k_new", "k_cache", f"{parts[-1].name}_cache"))
  return _launches(parts, at, cache_seqlens, (B, new_rows, capacity), layout, "bshd", pages, (place("block_table", block_table, at),))

def _launches(parts:list[OfCache], at:Placement, cache_seqlens:Length, sizes:tuple[int, int, int], layout_of_new:str,
              layout_of_cache:str, pages:Pages|None=None, table:tuple[Tensor, ...]=()) -> NewRows:
  """Prepares the kernel launches that write the new rows of k and v into their caches; `sizes` is (batches, new rows, rows that a cache can hold)."""
  # `sizes` are for one device: batches, new rows of each batch, and rows of each batch for which a cache has room. `table` is the block table of
  # caches in `pages`.
  B, new, capacity = sizes
  outputs = [x.outputs(layout_of_cache) for x in parts]
  if len(outputs) > 1 and any([x.overlaps(y) for x, y in zip(*outputs)]): raise ValueError(OVERLAP)
  start = lengths(cache_seqlens, B, capacity, at, "cache_seqlens")
  device = at.device if isinstance(at.device, str) else at.device[0]
  def launch(x:OfCache, column:int, to:Output, *scales:Output) -> tuple[list[Tensor], Tensor, KernelFunction]:
    size = dict(zip(AXES[layout_of_cache], local_shape(to.tensor)))
    of_scales = None if x.quantized is None or not scales else \
                Scales(x.quantized.format.name, values.dtype_text(x.quantized.scales.dtype), scales[0].places)
    a = Append(B, size["heads"], new, capacity, size["width"], layout_of_new, to.places, pages, of_scales,
               x.width if x.width > size["width"] else None, column, has_threads(device), device.split(":")[0] in MATRIX_DEVICES)
    return [output.tensor for output in (to, *scales)], x.new, _kernel(tuple(output.name for output in (to, *scales)), a)
  launches = [launch(x, 0, *to[:2]) for x, to in zip(parts, outputs)]
  launches += [launch(x, int(x.cache.shape[-1]), rotary) for x, to in zip(parts, outputs) for rotary in to[2:]]
  return NewRows(tuple(launches), start, filled(start, new, capacity), table)

def filled(start:Tensor, new:int, capacity:int) -> Tensor: return (start.minimum(capacity) + new).maximum(0).minimum(capacity).contiguous()

def _parts(k_new:Tensor, v_new:Tensor|None, k_cache:GivenRows, v_cache:GivenRows|None) -> list[OfCache]:
  """Pairs the new rows of k and of v with their caches; raises ValueError if k and v don't fit together."""
  # Without v_new and v_cache there is one pair, of k: latent attention, where V is the first columns of K.
  for one, other, a, b in (("v_new", "v_cache", v_new, v_cache), ("v_cache", "v_new", v_cache, v_new)):
    if a is None and b is not None: raise ValueError(f"{one}=None with {other}: both must be Tensors, or both None if V is part of K")
  check_pair(("k_cache", "v_cache"), k_cache, v_cache)
  def part(name:str, new:Any, cache:Any) -> OfCache:
    x = check_quantized(f"{name}_cache", cache) if isinstance(cache, (QuantizedRows, QuantizedLatent)) else None
    return OfCache(name, values.tensor(f"{name}_new", new), values.tensor(f"{name}_cache", cache) if x is None else x.stored, x)
  found = [part("k", k_new, k_cache), *([] if v_new is None else [part("v", v_new, v_cache)])]
  for x in found:
    if x.quantized is not None and x.quantized.shared:
      raise NotImplementedError(f"{x.name}_cache.scales has fewer numbers than the cache has rows: a new row may be too large for a scale that rows "
                                "share, and would be cut off without a sign; to append rows, each needs a scale of its own")
    if 0 in static_shape(f"{x.name}_new", x.new.shape):
      raise ValueError(f"{x.name}_new has shape {values.shown_shape(x.new.shape)}: every dimension must be at least 1")
  return found

def _rows(k_new:Tensor, v_new:Tensor|None, k_cache:GivenRows, v_cache:GivenRows|None, cache_seqlens:Length, layout:str,
          block_table:Tensor|None=None) -> NewRows:
  """Returns the new rows of `append_kv`, checked and ready to be written."""
  layout, parts = check_cache_layout("layout", layout), _parts(k_new, v_new, k_cache, v_cache)
  cache_seqlens = check_lengths("cache_seqlens", cache_seqlens)
  if values.tensor_or_none("block_table", block_table) is not None:
    assert block_table is not None
    return _into_pages(parts, cache_seqlens, layout, block_table)
  (new, capacity), *of_v = [_check_new_rows(x, layout) for x in parts]
  for new_v, capacity_v in of_v:
    if (new, capacity) != (new_v, capacity_v):
      raise ValueError(f"v_new and v_cache have {new_v} and {capacity_v} rows: must be as many as k_new and k_cache, {new} and {capacity}")
  if (n := known(cache_seqlens)) is not None and n + new > capacity:
    raise ValueError(f"cache_seqlens={n}: with {new} new rows that is more than the {capacity} that the cache holds")
  of_k = parts[0].cache
  at, size = placement_of(of_k, of_k, parts[-1].cache, layout), dict(zip(AXES[layout], local_shape(of_k)))
  if at.shared == "rows": raise ValueError("k_cache is sharded along its rows: must be sharded along batch or heads, or whole")
  return _launches(parts, at, cache_seqlens, (size.get("batch", 1), new, size["rows"]), layout, layout)

@values.names_itself
def append_kv(k_new:Tensor, v_new:Tensor|None, k_cache:GivenRows, v_cache:GivenRows|None, cache_seqlens:Length, *, layout:str="bhsd",
              block_table:Tensor|None=None) -> Tensor:
  """Writes new rows of every batch into the caches, in place, from row cache_seqlens on. Returns the new lengths, int32 (B).

    lengths = attn.append_kv(k_new, v_new, k_cache, v_cache, lengths)

    k_new, v_new      (B, Hkv, new, D). For multi-head latent attention (MLA), where V is part of K, v_new and v_cache are None.
    k_cache, v_cache  (B, Hkv, capacity, D), in memory that does not overlap. Both may be views of larger buffers with constant strides, such as
                      slices of one tensor for K and V and all layers. Every tensor that shares a buffer with a cache then contains the new rows.
                      QuantizedRows: new rows, of any float dtype, are rounded to 8 bits, and each row gets a scale. QuantizedLatent (MLA): the
                      first columns of k_new are rounded to 8 bits. The last columns (the rotary columns) are copied to k_cache.rotary, so k_new
                      must have the dtype of k_cache.rotary.
    cache_seqlens     number of rows already filled: an int or a Variable for all batches, or int32 (B)
    layout            "bhsd", "bshd" or "nsd" (B*Hkv, rows, D): the axes of new rows and caches
    block_table       int32 (B, max_blocks). With block_table the caches are pages (pages, page_size, Hkv, D) in every layout, as in `attention`, and
                      new rows go to the pages that the table names. Never append to a page that two sequences have in common: rows of one sequence
                      overwrite rows of the other. Only the emulator (the tinygrad device EMU) raises an error then.

  If the host knows cache_seqlens (an int, or the value that a Variable is bound to), cache_seqlens + new > capacity raises ValueError. If
  cache_seqlens is a Tensor, only the device knows the lengths: rows that don't fit are dropped, and the returned length is the capacity."""
  rows = _rows(k_new, v_new, k_cache, v_cache, cache_seqlens, layout, block_table)
  return rows.append()

@values.names_itself
def attention_with_kv_cache(q:Tensor, k_new:Tensor, v_new:Tensor|None, k_cache:GivenRows, v_cache:GivenRows|None, cache_seqlens:Length, *,
                            causal:bool|str=True, layout:str="bhsd", **options:Any) -> Any:
  """Appends k_new and v_new to the caches in place, as `append_kv` does, and then attends over all cache_seqlens + new rows of each batch.

    k_cache, v_cache = attn.empty_kv_cache(B, Hkv, 4096, D)
    o = attn.attention_with_kv_cache(q, k_new, v_new, k_cache, v_cache, lengths)

    q                 (B, H, Sq, D)
    k_new, v_new      (B, Hkv, new, D), as in `append_kv`
    k_cache, v_cache  (B, Hkv, capacity, D), as in `append_kv`. Views of larger buffers are read in place.
    cache_seqlens     number of rows filled before the call, as in `append_kv`
    causal            True (default) is bottom-right: the last query sees every row
    layout            axes of q, new rows and caches: "bhsd", "bshd" or "nsd", as in `append_kv`
    options           other options of `attention`. Refused: dropout; kv_lengths, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; the options
                      for 8-bit floats (q_scale, k_scale, v_scale, fast_accumulate); the options for rows sharded over devices

  Returns o, or (o, lse) with return_lse, as `attention` does. A wrong argument raises an error before any row is appended. Under TinyJit one compiled
  kernel serves every length: give cache_seqlens as a Variable with a value (`bind`) or as a Tensor.

  MLA: with v_dim, v_new and v_cache are None, and V is k_cache[..., :v_dim]. For D=576 and v_dim=512 one cache holds keys and values.

  Pages: with block_table the caches are pages, as in `append_kv`."""
  for name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
    if name in options: raise ValueError(f"{name} with a cache: give cache_seqlens instead, the rows filled before the new ones")
  for name in ("sequence_order", "sequence_lengths"):
    if name in options: raise ValueError(f"{name} with a cache: caches are not sharded along rows; shard batch or heads")
  for name in (*INPUT_SCALES, "fast_accumulate"):
    if name in options: raise ValueError(f"{name} with a cache: it is for whole q, k and v of 8-bit floats; a cache of 8 bits is QuantizedRows")
  for name in ("dropout_p", "dropout_seed"):
    if name in options: raise ValueError(f"{name} with a cache: attention over a cache has no dropout; train with attn.attention")
  rows = _rows(k_new, v_new, k_cache, v_cache, cache_seqlens, layout, options.get("block_table"))
  checked = options_of("attention_with_kv_cache", {**options, "causal": causal, "layout": layout, "kv_lengths": rows.filled})
  part_of_k(v_cache, checked.v_dim)
  if checked.block_table is None: check_caches(q, k_cache, v_cache if v_cache is not None else k_cache, checked.layout)
  call = prepare(q, k_cache, v_cache, checked, "cache_seqlens", in_place=True)
  call.choice()
  check_devices(call)
  rows.append()
  with Context(TRAINING=0): return attend(call)      # attention over a cache has no gradient
