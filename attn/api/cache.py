"""The key/value cache for decoding: buffers of a fixed capacity, in which each batch has filled some rows. `append_kv` writes new rows in place.
`attention_with_kv_cache` appends new rows and then attends over all filled rows. Rows beyond the filled length have no effect, even if they are
NaN."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from attn import values
from attn.api.attention import attend
from attn.api.checked_call import known, lengths, part_of_k, prepare
from attn.api.launch import check_devices
from attn.calls.checked_kernel import MATRIX_DEVICES, CheckedKernel, KernelFunction, region, whole_buffer
from attn.calls.gradient import no_gradient
from attn.calls.options import AttentionOptions, check_lengths, check_out_dtype, options_of
from attn.api.pages import check_pages, placement_in_pages
from attn.calls.placement import AXES, Placement, device_names, local_shape, place, placement_of
from attn.calls.plain import bhsd
from attn.calls.views import in_buffer, overlapping, whole_places
from attn.kernels.append import Append, append
from attn.problem import LAYOUTS, Pages, Strided
from attn.tinygrad_compat import Context, DType, Ops, Tensor, UOp, ast_of, buffer_under, device_of, dtypes, written_to
from attn.values import cache_of_kernels, static_shape

OVERLAP = "k_cache and v_cache overlap: they must be two buffers, or disjoint parts of one"
CACHE_LAYOUTS = ("bhsd", "bshd", "nsd")

def check_cache_layout(name:str, x:Any) -> str: return values.word(name, x, CACHE_LAYOUTS)

Length = int|UOp|Tensor   # rows filled: for all batches, as a number or a Variable, or int32 (B)

def one_or_several(names:tuple[str, ...]) -> str|tuple[str, ...]: return names if len(names) > 1 else names[0]

def empty_kv_cache(batch:int, heads:int, capacity:int, width:int, *, dtype:DType|str=dtypes.half, layout:str="bhsd",
                   device:str|tuple[str, ...]|None=None) -> tuple[Tensor, Tensor]:
  """Allocates a key/value cache. Returns (k_cache, v_cache), filled with zeros: `capacity` rows of `width` elements for each batch and key/value
  head.

    k_cache, v_cache = attn.empty_kv_cache(batch, heads, capacity, width)

  `layout` is "bhsd" for the shape (batch, heads, capacity, width), or "bshd" for (batch, capacity, heads, width). `heads` counts key/value heads.
  With several devices each device gets a copy. Raises ValueError for a size that is not a positive whole number."""
  layout = values.word("layout", layout, ("bhsd", "bshd"))
  batch, heads, capacity, width = (values.whole_number(name, n, 1, 2**31 - 1, "a whole number, at least 1 and less than 2**31")
                                   for name, n in (("batch", batch), ("heads", heads), ("capacity", capacity), ("width", width)))
  dtype = check_out_dtype("dtype", dtype)
  if device is not None: device = one_or_several(device_names("device", device))
  shape = (batch, heads, capacity, width) if layout == "bhsd" else (batch, capacity, heads, width)
  k, v = (Tensor.zeros(*shape, dtype=dtype, device=device).contiguous().realize() for _ in range(2))
  return k, v

def empty_paged_cache(num_pages:int, page_size:int, Hkv:int, D:int, Dv:int|None=None, *, dtype:DType|str=dtypes.half,
                      device:str|tuple[str, ...]|None=None) -> tuple[Tensor, Tensor]:
  """Allocates a key/value cache in pages. Returns (k_pages, v_pages), filled with zeros: (num_pages, page_size, Hkv, D) and (num_pages, page_size,
  Hkv, Dv). Dv is D by default. An allocator decides which pages a sequence gets and which pages are free: examples/serve.py has one. On several
  devices each page is sharded along its heads. Raises ValueError for a size that is not a positive whole number, or if the devices cannot share the
  heads evenly."""
  sizes = [values.whole_number(name, n, 1, 2**31 - 1, "a whole number, at least 1 and less than 2**31")
           for name, n in (("num_pages", num_pages), ("page_size", page_size), ("Hkv", Hkv), ("D", D), ("Dv", D if Dv is None else Dv))]
  dtype = check_out_dtype("dtype", dtype)
  if device is not None: device = one_or_several(device_names("device", device))
  if isinstance(device, tuple) and Hkv % len(device):
    raise ValueError(f"Hkv={Hkv} on device={device}: must be a multiple of the {len(device)} devices, each of which takes a part of the heads")
  def zeros(width:int) -> Tensor:
    if not isinstance(device, tuple): return Tensor.zeros(*sizes[:3], width, dtype=dtype, device=device).contiguous().realize()
    return Tensor.zeros(*sizes[:3], width, dtype=dtype, device=device[0]).contiguous().shard(device, AXES["bshd"].index("heads")).realize()
  return zeros(sizes[3]), zeros(sizes[4])

def _check(name:str, new:Tensor, cache:Tensor, layout:str) -> tuple[int, int]:
  """Checks that the new rows `new` have the shape, dtype and device of `cache`, apart from the number of rows. Returns (number of new rows, capacity
  of the cache). Raises ValueError if `new` doesn't fit."""
  rows = AXES[layout].index("rows")
  got, want = static_shape(f"{name}_new", new.shape), static_shape(f"{name}_cache", cache.shape)
  if len(want) != len(AXES[layout]): raise ValueError(f"{name}_cache has shape {want}; layout={layout!r} needs {LAYOUTS[layout]}")
  if len(got) != len(want) or got[:rows] + got[rows+1:] != want[:rows] + want[rows+1:]:
    raise ValueError(f"{name}_new has shape {got}: must be that of {name}_cache, {want}, but for the number of rows, axis {rows}")
  dtype = values.dtype_name(f"{name}_cache", cache.dtype, values.FLOATS)
  if new.dtype != cache.dtype: raise ValueError(f"{name}_new has dtype {values.dtype_text(new.dtype)}: must be that of {name}_cache, {dtype}")
  if new.device != cache.device or new.uop.axis != cache.uop.axis:
    raise ValueError(f"{name}_new is on {new.device}, sharded along axis {new.uop.axis}: must be as {name}_cache, on {cache.device}, along axis "
                     f"{cache.uop.axis}")
  if got[rows] > want[rows]: raise ValueError(f"{name}_new has {got[rows]} rows: {name}_cache holds {want[rows]}")
  return got[rows], want[rows]

def check_caches(q:Tensor, k_cache:Tensor, v_cache:Tensor, layout:str) -> None:
  """Raises ValueError if the shapes, dtypes or devices of q, k_cache and v_cache don't fit together."""
  shapes = []
  for name, t in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
    values.dtype_name(name, values.tensor(name, t).dtype, values.FLOATS)
    if len(shape := static_shape(name, t.shape)) != len(AXES[layout]):
      raise ValueError(f"{name} has shape {shape}; layout={layout!r} needs {LAYOUTS[layout]}")
    if 0 in shape: raise ValueError(f"{name} has shape {shape}: every dimension must be at least 1")
    if t.device != q.device:
      raise ValueError(f"{name} is on {t.device} but q on {q.device}: all tensors must be on the same device, or the same devices")
    if t.dtype != q.dtype: raise ValueError(f"{name} has dtype {values.dtype_text(t.dtype)}: must be that of q, {values.dtype_text(q.dtype)}")
    shapes.append(dict(zip(AXES[layout], shape)))
  of_q, of_k, of_v = shapes
  for name, axis, got, want, of in (("k_cache", "batch", of_k, of_q, "q"), ("k_cache", "width", of_k, of_q, "q"),
                                    *[("v_cache", axis, of_v, of_k, "k_cache") for axis in ("batch", "heads", "rows")]):
    if got.get(axis) != want.get(axis): raise ValueError(f"{name} has {axis} {got[axis]}: must be that of {of}, {want[axis]}")

def has_threads(device:str|tuple[str, ...]|None) -> bool:
  """Returns whether a workgroup has several threads on the device. On a CPU core it has one."""
  return device is None or device_of(device if isinstance(device, str) else device[0]).renderer.has_local

def overlap(parts:list[OfCache], places:list[Strided|None], sizes:dict[str, int]) -> bool:
  """Returns whether the caches of k and v share memory. `places` says where the rows of each cache lie in a buffer, or has None for a cache where
  that is not known. `sizes` are the lengths of a cache's axes."""
  if len(parts) == 1: return False
  x, y = (part.cache for part in parts)
  if places[0] is not None and places[1] is not None:
    counts = (sizes.get("batch", 1), sizes["heads"], sizes["rows"], sizes["width"])
    return buffer_of(x.uop) is buffer_of(y.uop) and overlapping(places[0], places[1], counts)
  a, b = region(x.uop), region(y.uop)
  return a is not None and b is not None and a[0] is b[0] and max(a[1], b[1]) < min(a[1] + a[2], b[1] + b[2])

def buffer_of(u:UOp) -> UOp:
  """Returns the buffer that the view `u` reads, even if writes to this buffer are pending."""
  while u.op is not Ops.BUFFER and u.src: u = u.src[0]
  return u

@cache_of_kernels
def _kernel(name:str, a:Append) -> KernelFunction:
  program = append(a)
  refuse = no_gradient(f"{name}: appending to a cache has no gradient; train with attn.attention of whole k and v")
  return lambda *placeholders: CheckedKernel(ast_of(program, *placeholders), (name,), gradient=refuse)

@dataclass(frozen=True)
class NewRows:
  """Checked new rows, ready to be written into caches. `launches` has one entry for each cache (k and v, or only k): the cache, its new rows, and the
  kernel that writes these rows."""
  launches: tuple[tuple[Tensor, Tensor, KernelFunction], ...]
  start: Tensor      # int32 (batch): rows filled before the append
  filled: Tensor     # int32 (batch): rows filled after it
  table: tuple[Tensor, ...] = ()    # the block table, if the cache is pages
  def append(self) -> None:
    """Launches the kernels that write the new rows into the caches. Every tensor that shares a buffer with a cache then contains these rows."""
    for cache, rows, fxn in self.launches:
      tensors = rows.contiguous(), self.start, *(t.contiguous() for t in self.table)
      if (buffer := buffer_under(cache.uop)) is None or not isinstance(cache.device, str):
        cache.replace(Tensor.custom_kernel(cache, *tensors, fxn=fxn)[0])
      else: written_to(buffer, Tensor.custom_kernel(Tensor(buffer), *tensors, fxn=fxn)[0].uop.src[1])

def rows_in(name:str, cache:Tensor, layout:str) -> Strided|None:
  """Returns where the rows of a cache lie in the buffer that the cache is a view of: the steps between rows, heads and batches. Returns None if the
  cache is a whole buffer, or lies on several devices. Raises ValueError if the cache is a computed value, or a view in which two rows lie in the same
  memory."""
  found = in_buffer(bhsd(cache, layout)) if isinstance(cache.device, str) else None
  if found is None:
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
class OfCache:
  """New rows of k or of v, and the cache to which they are appended."""
  name: str
  new: Tensor
  cache: Tensor

def _into_pages(parts:list[OfCache], cache_seqlens:Length, layout:str, block_table:Tensor) -> NewRows:
  """Checks the arguments of `append_kv` for caches that are pages, and prepares the write. Returns the new rows, ready to be written."""
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
    if (len(new.shape), of_heads, size["width"]) != (len(AXES[layout]), heads, cache.shape[3]) or size["rows"] != sizes[0]["rows"]:
      raise ValueError(f"{name}_new has shape {values.shown_shape(new.shape)}: must be {LAYOUTS[layout]} of {B} sequences with {heads} heads of "
                       f"{cache.shape[3]} elements, and as many rows as k_new, {sizes[0]['rows']}")
    if new.dtype != cache.dtype or new.device != cache.device:
      raise ValueError(f"{name}_new is {values.dtype_text(new.dtype)} on {new.device}: must be as {name}_cache, "
                       f"{values.dtype_text(cache.dtype)} on {cache.device}")
    if new.uop.axis != k_new.uop.axis:
      raise ValueError(f"{name}_new is sharded along axis {new.uop.axis}: must be as k_new, along {k_new.uop.axis}")
  new_rows = sizes[0]["rows"]
  if (n := known(cache_seqlens)) is not None and n + new_rows > capacity:
    raise ValueError(f"cache_seqlens={n}: with {new_rows} new rows that is more than the {capacity} that block_table has pages for")
  at = placement_in_pages(k_new, k_cache, parts[-1].cache, layout, ("k_new", "k_cache", f"{parts[-1].name}_cache"))
  return _launches(parts, at, cache_seqlens, (B, new_rows, capacity), layout, "bshd", pages, (place("block_table", block_table, at),))

def _launches(parts:list[OfCache], at:Placement, cache_seqlens:Length, sizes:tuple[int, int, int], layout:str, layout_of_cache:str,
              pages:Pages|None=None, table:tuple[Tensor, ...]=()) -> NewRows:
  """Prepares the kernel launches that append the new rows to each cache, and returns them. `sizes` are, for one device, the number of batches, of new
  rows per batch, and of rows that a cache can hold per batch."""
  B, new, capacity = sizes
  places = [rows_in(f"{x.name}_cache", x.cache, layout_of_cache) for x in parts]
  if overlap(parts, places, dict(zip(AXES[layout_of_cache], local_shape(parts[0].cache)))): raise ValueError(OVERLAP)
  start = lengths(cache_seqlens, B, capacity, at, "cache_seqlens")
  device = at.device if isinstance(at.device, str) else at.device[0]
  def launch(x:OfCache, lies:Strided|None) -> tuple[Tensor, Tensor, KernelFunction]:
    shape = local_shape(x.cache)
    size = dict(zip(AXES[layout_of_cache], shape))
    a = Append(B, size["heads"], new, capacity, size["width"], layout, lies or whole_places(shape, layout_of_cache), pages,
               threads=has_threads(device), checked=device.split(":")[0] in MATRIX_DEVICES)
    return x.cache, x.new, _kernel(f"{x.name}_cache", a)
  return NewRows(tuple(map(launch, parts, places)), start, filled(start, new, capacity), table)

def filled(start:Tensor, new:int, capacity:int) -> Tensor: return (start.minimum(capacity) + new).maximum(0).minimum(capacity).contiguous()

def _parts(k_new:Tensor, v_new:Tensor|None, k_cache:Tensor, v_cache:Tensor|None) -> list[OfCache]:
  """Pairs the new rows of k and v with their caches. If V is part of K, returns only the pair of k. Raises ValueError if only one of v_new and
  v_cache is given, or if a tensor of new rows is empty."""
  for one, other, x, y in (("v_new", "v_cache", v_new, v_cache), ("v_cache", "v_new", v_cache, v_new)):
    if x is None and y is not None: raise ValueError(f"{one}=None with {other}: both must be Tensors, or both None if V is part of K")
  given = [("k", k_new, k_cache), ("v", v_new, v_cache)][:1 if v_new is None else 2]
  found = [OfCache(name, values.tensor(f"{name}_new", new), values.tensor(f"{name}_cache", cache)) for name, new, cache in given]
  for part in found:
    if 0 in static_shape(f"{part.name}_new", part.new.shape):
      raise ValueError(f"{part.name}_new has shape {values.shown_shape(part.new.shape)}: every dimension must be at least 1")
  return found

def _rows(k_new:Tensor, v_new:Tensor|None, k_cache:Tensor, v_cache:Tensor|None, cache_seqlens:Length, layout:str,
          block_table:Tensor|None=None) -> NewRows:
  """Checks the arguments of `append_kv` and prepares the write. Returns the new rows, ready to be written."""
  layout, parts = check_cache_layout("layout", layout), _parts(k_new, v_new, k_cache, v_cache)
  cache_seqlens = check_lengths("cache_seqlens", cache_seqlens)
  if values.tensor_or_none("block_table", block_table) is not None:
    assert block_table is not None
    return _into_pages(parts, cache_seqlens, layout, block_table)
  (new, capacity), *of_v = [_check(x.name, x.new, x.cache, layout) for x in parts]
  for new_v, capacity_v in of_v:
    if (new, capacity) != (new_v, capacity_v):
      raise ValueError(f"v_new and v_cache have {new_v} and {capacity_v} rows: must be as many as k_new and k_cache, {new} and {capacity}")
  if (n := known(cache_seqlens)) is not None and n + new > capacity:
    raise ValueError(f"cache_seqlens={n}: with {new} new rows that is more than the {capacity} that the cache holds")
  at, size = placement_of(k_cache, k_cache, parts[-1].cache, layout), dict(zip(AXES[layout], local_shape(k_cache)))
  if at.shared == "rows": raise ValueError("k_cache is sharded along its rows: must be sharded along batch or heads, or whole")
  return _launches(parts, at, cache_seqlens, (size.get("batch", 1), new, size["rows"]), layout, layout)

def append_kv(k_new:Tensor, v_new:Tensor|None, k_cache:Tensor, v_cache:Tensor|None, cache_seqlens:Length, *, layout:str="bhsd",
              block_table:Tensor|None=None) -> Tensor:
  """Writes new rows of every batch into the caches, in place, from row cache_seqlens on. Returns the new lengths, int32 (B).

    lengths = attn.append_kv(k_new, v_new, k_cache, v_cache, lengths)

    k_new, v_new      (B, Hkv, new, D). v_new and v_cache are None if V is part of K, as in multi-head latent attention (MLA).
    k_cache, v_cache  (B, Hkv, capacity, D), in memory that does not overlap. Both may be views of larger buffers with constant strides, such as
    slices of one tensor for K and V and all layers. Other views of that tensor then show the new rows, too.
    cache_seqlens     number of rows already filled: an int or a Variable for all batches, or int32 (B)
    layout            "bhsd", "bshd" or "nsd" (B*Hkv, rows, D): the axes of new rows and caches
    block_table       int32 (B, max_blocks). With it the caches are pages (pages, page_size, Hkv, D) in every layout, as in `attention`, and new rows
    go to the pages that the table names. Never append to a page that sequences share: the emulator stops if two rows go to one place.

  If the host knows cache_seqlens (an int, or the value that a Variable is bound to), cache_seqlens + new > capacity raises ValueError. If
  cache_seqlens is a Tensor, only the device knows the lengths: rows that don't fit are dropped, and the returned length is the capacity."""
  rows = _rows(k_new, v_new, k_cache, v_cache, cache_seqlens, layout, block_table)
  rows.append()
  return rows.filled

def attention_with_kv_cache(q:Tensor, k_new:Tensor, v_new:Tensor|None, k_cache:Tensor, v_cache:Tensor|None, cache_seqlens:Length, *,
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
    options           other options of `attention`, except dropout, kv_lengths, the cu_seqlens and max_seqlen arguments, and those for rows sharded
    over devices

  Returns o, or (o, lse) with return_lse, as `attention` does. A wrong argument raises an error before any row is appended.
  Under TinyJit one compiled kernel serves every length: give cache_seqlens as a bound Variable or as a Tensor.
  MLA: with v_dim, v_new and v_cache are None, and V is k_cache[..., :v_dim]. For D=576 and v_dim=512 one cache holds keys and values.
  Pages: with block_table the caches are pages, as in `append_kv`."""
  for name in ("kv_lengths", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
    if name in options: raise ValueError(f"{name} with a cache: give cache_seqlens instead, the rows filled before the new ones")
  for name in ("sequence_order", "sequence_lengths"):
    if name in options: raise ValueError(f"{name} with a cache: caches are not sharded along rows; shard batch or heads")
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
