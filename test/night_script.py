"""Functions that the scripts of test/night_draw.py call: hard inputs, tensors that are views, caches, and reading of results."""
from __future__ import annotations
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
import numpy as np
import pytest
from tinygrad import TinyJit, Variable
import attn
from attn import flash_attn
from attn.reference import arrange, restore, rounded
from attn.tinygrad_compat import Context, Tensor, dtypes
from cases import DTYPES, array, tensor
from eight_bits import numbers_of
from guarded import guarded

__all__ = ["DTYPES", "Context", "Tensor", "TinyJit", "Variable", "arrange", "array", "attn", "base", "bools", "by_attn", "dtypes", "entries",
           "flash_attn", "held_in_8_bits", "in_8_bits", "indexed", "integers", "np", "on", "paged", "read", "restore", "rounded", "rows_of_steps",
           "tensor", "times_scales", "turned_back", "unseen", "until", "values", "view"]

@contextlib.contextmanager
def on(device:str, kernel:str="", guard:str="", **settings:int) -> Iterator[None]:
  # Context in which tinygrad computes on `device` with `settings`, ATTN_KERNEL is `kernel`, and tinygrad's generator starts with seed 0.
  # If `guard` is "end" or "begin", a protected page of memory follows or precedes each CPU buffer: a kernel that accesses it crashes.
  with Context(DEV=device, **settings), pytest.MonkeyPatch.context() as patch, guarded(guard) if guard else contextlib.nullcontext():
    patch.setenv("ATTN_KERNEL", kernel)
    Tensor.manual_seed(0)
    yield

# ***** inputs *****

def lowest(dtype:str) -> float:
  # Returns the lowest finite number of a dtype. Models write it into masks instead of -inf.
  return {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": -3.4028234663852886e38}[dtype]

def values(kind:str, shape:Sequence[int], dtype:str, seed:int, same:int|None=None) -> np.ndarray:
  # Returns a float32 array of random numbers of a kind, rounded to `dtype`.
  # A row is a vector along the last axis. If `same` is the number of an axis, all slices along this axis are copies of the first slice. The kinds
  # are: normal; positive; constant (all elements are one number); zero; small (a thousandth of normal); falling, rising: for K, if q is positive: the
  # numbers shrink (grow) from the first row to the last, so that the largest score falls (rises); large: some rows are 100 times as large; huge: all
  # elements of one row are 512; nan, inf, -inf: all elements of one row are this value; masked: for a bias: some elements are -inf; blind: for a
  # bias: whole rows are -inf; lowest, -10000: for a bias: some elements are the lowest number of `dtype`, or -10000, as models write into masks.
  rng = np.random.default_rng(seed)
  x = rng.standard_normal(shape, dtype=np.float32)
  rows = x.shape[-2] if x.ndim > 1 else 1
  at = np.arange(rows)[:, None] if x.ndim > 1 else np.zeros(1, int)
  chosen, few = int(rng.integers(rows)), rng.random(x.shape) < .2
  match kind:
    case "positive": x = np.abs(x)
    case "constant": x[...] = rng.choice((1.0, -2.0, 0.3))
    case "zero": x[...] = 0
    case "small": x *= 1e-3
    case "falling": x *= 3 - 2.99*at/rows
    case "rising": x = x*.1 + at//16*.5
    case "large": x *= np.where(rng.random((rows, 1)) < .15, 100, 1)
    case "huge": x[..., chosen, :] = 512
    case "nan"|"inf"|"-inf": x[..., chosen, :] = float(kind)
    case "masked": x[few] = -np.inf
    case "blind": x[rng.random(x.shape[:-1]) < .3] = -np.inf
    case "lowest": x = np.where(few, lowest(dtype), x)
    case "-10000": x[few] = -10000
    case "normal": pass
    case _: raise KeyError(kind)
  if same is not None: x = np.broadcast_to(np.take(x, [0], same), x.shape)
  return rounded(np.ascontiguousarray(x, np.float32), dtype)

def integers(kind:type, *of:int) -> np.ndarray: return np.array(of, kind)

def bools(x:np.ndarray) -> np.ndarray:
  # Converts a mask of bools to an equivalent bias of 0 and -inf.
  return np.where(x > -.5, np.float32(0), np.float32(-np.inf))

def unseen(a:np.ndarray, x:dict[str, np.ndarray]) -> np.ndarray:
  # Writes NaN to the rows of keys or values `a` that kv_lengths and kv_starts hide.
  found = until(a, x["kv_lengths"])
  for b, n in enumerate(x.get("kv_starts", ())): found[b, :, :n] = np.nan
  return found

# ***** tensors that are views *****

Step = tuple[Any, ...]

def base(a:np.ndarray, *steps:Step) -> np.ndarray:
  # Builds the array from which the movement operations `steps` make `a`, with NaN in elements that they leave out.
  for name, *at in reversed(steps):
    match name, *at:
      case "permute", *axes: a = a.transpose(np.argsort(axes))
      case "flip", axis: a = np.flip(a, axis)
      case "reshape", shape, _: a = a.reshape(shape)
      case "expand", axis, _: a = np.take(a, [0], axis)
      case "shrink", axis, before, after:
        a = np.pad(a, [(before, after) if i == axis else (0, 0) for i in range(a.ndim)], constant_values=np.nan)
      case "stride", axis, n:
        wide = np.full([size*n if i == axis else size for i, size in enumerate(a.shape)], np.nan, a.dtype)
        wide[tuple(slice(None, None, n if i == axis else None) for i in range(a.ndim))] = a
        a = wide
      case _: assert name in ("computed", "cast"), name
  return np.ascontiguousarray(a)

def view(t:Tensor, *steps:Step) -> Tensor:
  for name, *at in steps:
    match name, *at:
      case "permute", *axes: t = t.permute(*axes)
      case "flip", axis: t = t.flip(axis)
      case "reshape", _, shape: t = t.reshape(*shape)
      case "expand", axis, n: t = t.expand(*[n if i == axis else -1 for i in range(t.ndim)])
      case "shrink", axis, before, after: t = t.shrink(tuple((before, size - after) if i == axis else None for i, size in enumerate(t.shape)))
      case "stride", axis, n: t = t[tuple(slice(None, None, n if i == axis else None) for i in range(t.ndim))]
      case "computed",: t = t*1
      case "cast", dtype: t = t.float().cast(DTYPES[dtype])
  return t

# ***** caches *****

def paged(a:np.ndarray, table:np.ndarray, size:int, pages:int) -> np.ndarray:
  # Stores rows (B, Hkv, S, D) in pages of `size` rows as the block table says, with NaN in all other elements.
  B, heads, rows, width = a.shape
  found = np.full((pages, size, heads, width), np.nan, np.float32)
  for b in range(B):
    for j in range(rows):
      if table[b, j//size] < pages: found[table[b, j//size], j % size] = a[b, :, j]
  return found

def entries(table:np.ndarray, lengths:Sequence[int], size:int) -> np.ndarray:
  # Copies a block table, and writes invalid page numbers beyond the last page of each length, where a page has `size` rows.
  found = table.copy()
  for b, n in enumerate(lengths): found[b, -(-n//size):] = 10**9
  return found

def until(a:np.ndarray, ends:Sequence[int]) -> np.ndarray:
  # Replaces the rows of each batch b from row ends[b] on by NaN.
  found = a.copy()
  for b, n in enumerate(ends): found[b, :, n:] = np.nan
  return found

def in_8_bits(cache:Tensor, format:str, scale_dtype:str) -> attn.QuantizedRows:
  # Converts a cache to the 8-bit format `format`.
  return attn.QuantizedRows(*(t.contiguous().realize() for t in attn.quantize_kv(cache, format, scale_dtype=scale_dtype)))

def held_in_8_bits(caches:Sequence[attn.QuantizedRows], format:str, rows:dict[str, np.ndarray], ends:Sequence[int], layout:str,
                   table:np.ndarray|None=None, size:int=0) -> dict[str, np.ndarray]:
  # Returns k and v in float64 as 8-bit caches hold them (numbers times scales), and the scales of v.
  # The error limit of attention depends on the scales of v. With `table`, the block table, the caches are in pages. The rows of each batch before its
  # end must equal `rows` up to the rounding to 8 bits.
  found, scales = {}, np.zeros(0)
  for (name, a), cache in zip(rows.items(), caches):
    stored, scales = numbers_of(format)[cache.values.numpy().view(np.uint8)], array(cache.scales).astype(np.float64)[..., None]
    if table is not None: stored, scales = (x[table].reshape(len(table), -1, *x.shape[2:]) for x in (stored, scales))
    if table is not None or layout == "bshd": stored, scales = (x.swapaxes(1, 2) for x in (stored, scales))
    found[name] = stored*scales
    most = (np.abs(stored)/1024 + 0.501 if format == "int8" else np.abs(stored)/15 + 2.0**-9)*scales
    for b, n in enumerate(ends):
      off = np.abs(found[name] - a)[b, :, :n]
      assert (off <= most[b, :, :n] + 1e-7).all(), f"{name}_cache is off by {off.max()}"
  return found | {"v_scales": scales[..., 0]}

def times_scales(x:dict[str, np.ndarray], B:int, Hkv:int) -> dict[str, np.ndarray]:
  # Returns q, k and v of 8-bit floats times their scales, in float64.
  # Some of the scales q_scale, k_scale and v_scale are in x; they broadcast to (B, Hkv).
  def scale(name:str) -> np.ndarray: return np.broadcast_to(x.get(f"{name}_scale", np.float64(1)), (B, Hkv)).astype(np.float64)
  return {name: x[name]*np.repeat(scale(name), x[name].shape[1]//Hkv, 1)[..., None, None] for name in "qkv"}

def rows_of_steps(a:np.ndarray, start:Sequence[int], count:int) -> np.ndarray:
  # Selects `count` rows of each batch b, from row start[b] on.
  return np.stack([a[b, :, at:at + count] for b, at in enumerate(start)])

def indexed(a:np.ndarray, batches:np.ndarray, count:int) -> np.ndarray:
  # Makes a cache of `count` batches: those with the indices `batches` contain `a`, all others NaN.
  found = np.full((count, *a.shape[1:]), np.nan, np.float32)
  found[batches] = a
  return found

def turned_back(a:np.ndarray, quarters:np.ndarray, at:Sequence[int], interleaved:bool, moving:bool) -> np.ndarray:
  # Returns rows (B, H, S, D) that a rotary embedding by quarter turns changes into `a`.
  # The embedding rotates pairs of columns by quarters of a circle: pair i of row j of batch b by quarters[at[b] + j, i] quarters, or by
  # quarters[at[b], i] if not `moving`. A pair is two neighbouring columns if `interleaved`; otherwise its columns are half of the rotated width
  # apart.
  found, half = a.copy(), quarters.shape[1]
  first, second = (slice(0, 2*half, 2), slice(1, 2*half, 2)) if interleaved else (slice(0, half), slice(half, 2*half))
  for b, start in enumerate(at):
    for j in range(a.shape[2]):
      angle = quarters[start + j*moving]
      x, y = a[b, :, j, first], a[b, :, j, second]
      found[b, :, j, first] = np.choose(angle, (x, y, -x, -y))
      found[b, :, j, second] = np.choose(angle, (y, -x, -y, x))
  return found

# ***** calls and results *****

def by_attn(q:Tensor, *args:Any, **options:Any) -> Tensor:
  # Calls Tensor.scaled_dot_product_attention with attn installed, or raises NotImplementedError if attn leaves the call to tinygrad.
  with attn.installed() as decisions: o = q.scaled_dot_product_attention(*args, **options)
  if decisions[-1].kernel is None: raise NotImplementedError(f"left to tinygrad's own: {decisions[-1].reason}")
  return o


def whole(t:Tensor) -> Tensor:
  # Gathers a tensor that may be divided over devices onto the first device.
  # Reading a divided tensor directly would make tinygrad move it to the CPU.
  return t.to(t.device[0]).contiguous() if isinstance(t.device, tuple) else t

def read(results:dict[str, Tensor], order:Sequence[str], together:bool) -> dict[str, np.ndarray]:
  # Reads results as arrays: one after another in this order, or all at once if `together`.
  if together and (computed := [results[name] for name in order if results[name].device is not None]): Tensor.realize(*computed)
  # The gradient of an input without effect is an array of zeros.
  return {name: array(whole(t)) if (t := results[name]).device is not None else np.zeros(t.shape, np.float32) for name in order}
