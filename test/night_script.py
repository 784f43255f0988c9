"""Words of the scripts that test/night_draw.py writes: inputs that are hard on purpose, tensors that are views, caches, and results read back."""
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
from guarded import guarded

__all__ = ["DTYPES", "Context", "Tensor", "TinyJit", "Variable", "arrange", "array", "attn", "base", "bools", "by_attn", "dtypes", "entries",
           "flash_attn", "indexed", "integers", "np", "on", "paged", "read", "restore", "rounded", "rows_of_steps", "tensor", "turned_back", "unseen",
           "until", "values", "view"]

@contextlib.contextmanager
def on(device:str, kernel:str="", guard:str="", **settings:int) -> Iterator[None]:
  """DEV is `device`, ATTN_KERNEL is `kernel`, and tinygrad's settings are these; buffers of a CPU are guarded at this side, if any."""
  with Context(DEV=device, **settings), pytest.MonkeyPatch.context() as patch, guarded(guard) if guard else contextlib.nullcontext():
    patch.setenv("ATTN_KERNEL", kernel)
    Tensor.manual_seed(0)
    yield

# ***** inputs *****

def lowest(dtype:str) -> float:
  """The lowest finite number, which masks are made of where -inf is not."""
  return {"float16": -65504.0, "bfloat16": -3.3895313892515355e38, "float32": -3.4028234663852886e38}[dtype]

def values(kind:str, shape:Sequence[int], dtype:str, seed:int, same:int|None=None) -> np.ndarray:
  """Numbers of this kind, rounded to `dtype`, as float32; along the axis `same`, if any, the first ones again and again. The last axis but one has
  the rows.

  normal; positive; constant; zero; small;
  falling, rising: rows that make the maxima of scores fall, or rise, over the tiles;
  large: some rows 100 times as large; huge: one row of 512;
  nan, inf, -inf: one row of it;
  masked, blind, lowest, -10000: of a bias: some elements -inf, whole rows of them, some of the lowest number, or of the one that models mask with"""
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
  """The bias that a mask of bools is: 0 or -inf."""
  return np.where(x > -.5, np.float32(0), np.float32(-np.inf))

def unseen(a:np.ndarray, x:dict[str, np.ndarray]) -> np.ndarray:
  """Rows of keys or values, with NaN for those that kv_lengths and kv_starts say are none."""
  found = until(a, x["kv_lengths"])
  for b, n in enumerate(x.get("kv_starts", ())): found[b, :, :n] = np.nan
  return found

# ***** tensors that are views *****

Step = tuple[Any, ...]

def base(a:np.ndarray, *steps:Step) -> np.ndarray:
  """The array of which `view` with these steps makes `a`; what no step leaves is NaN."""
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
  """What these steps make of a tensor."""
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
  """Rows (B, Hkv, S, D) in so many pages of this size, where a table says; what is in no row is NaN."""
  B, heads, rows, width = a.shape
  found = np.full((pages, size, heads, width), np.nan, np.float32)
  for b in range(B):
    for j in range(rows):
      if table[b, j//size] < pages: found[table[b, j//size], j % size] = a[b, :, j]
  return found

def entries(table:np.ndarray, lengths:Sequence[int], size:int) -> np.ndarray:
  """A table whose entries beyond a length are no pages."""
  found = table.copy()
  for b, n in enumerate(lengths): found[b, -(-n//size):] = 10**9
  return found

def until(a:np.ndarray, ends:Sequence[int]) -> np.ndarray:
  """The rows of each batch up to its end, and NaN for those beyond."""
  found = a.copy()
  for b, n in enumerate(ends): found[b, :, n:] = np.nan
  return found

def rows_of_steps(a:np.ndarray, start:Sequence[int], count:int) -> np.ndarray:
  """So many rows of each batch, from where it is on."""
  return np.stack([a[b, :, at:at + count] for b, at in enumerate(start)])

def indexed(a:np.ndarray, batches:np.ndarray, count:int) -> np.ndarray:
  """A cache of so many batches, of which these are the ones of an array in turn, and the others NaN."""
  found = np.full((count, *a.shape[1:]), np.nan, np.float32)
  found[batches] = a
  return found

def turned_back(a:np.ndarray, quarters:np.ndarray, at:Sequence[int], interleaved:bool, moving:bool) -> np.ndarray:
  """The rows (B, H, S, D) that a rotary embedding makes `a` of: pair i of row j of batch b is turned by quarters[at[b] + j, i] quarters of a circle,
  or by quarters[at[b], i] where rows are not `moving`. Pairs are neighbours where they are interleaved, else half of the turned columns apart."""
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
  """Tensor.scaled_dot_product_attention while attn is installed. Raises NotImplementedError where it left the call to tinygrad's own."""
  with attn.installed() as decisions: o = q.scaled_dot_product_attention(*args, **options)
  if decisions[-1].kernel is None: raise NotImplementedError(f"left to tinygrad's own: {decisions[-1].reason}")
  return o


def whole(t:Tensor) -> Tensor:
  """A tensor, from however many devices, on the first: tinygrad would take several to the CPU."""
  return t.to(t.device[0]).contiguous() if isinstance(t.device, tuple) else t

def read(results:dict[str, Tensor], order:Sequence[str], together:bool) -> dict[str, np.ndarray]:
  """The numbers of these results, asked for in this order, or computed all at once before. A gradient that nothing depends on is a constant 0."""
  if together: Tensor.realize(*[results[name] for name in order if results[name].device is not None])
  return {name: array(whole(t)) if (t := results[name]).device is not None else np.zeros(t.shape, np.float32) for name in order}
