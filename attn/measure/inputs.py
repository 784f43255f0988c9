"""Random inputs of a problem, as arrays and as tensors of tinygrad's default device."""
from __future__ import annotations
import math
from collections.abc import Mapping
import numpy as np
from attn.problem import Problem, Shapes
from attn.reference import arrange, rounded
from attn.tinygrad_compat import Tensor, dtypes
from attn.values import FLOATS, INTS

NUMBERS_DRAWN = 2**24 - 3     # most random numbers of a tensor. A prime: where they repeat, rows begin elsewhere, so no two heads are equal

def shapes(B:int, H:int, HKV:int, N:int, SK:int, D:int, DV:int, layout:str) -> list[tuple[int, ...]]:
  """Returns the shapes of q, k, v, o and lse in `layout`."""
  four = [(B, H, N, D), (B, HKV, SK, D), (B, HKV, SK, DV), (B, H, N, DV)]
  return [arrange(np.empty(x, np.bool_), layout).shape for x in four] + [(B*H, N) if layout == "nsd" else (B, H, N)]

def shapes_of(p:Problem) -> list[tuple[int, ...]]: return shapes(p.B, p.H, p.Hkv, p.Sq, p.Sk, p.D, p.Dv, p.layout)

def to_tensor(x:np.ndarray, dtype:str) -> Tensor:
  if dtype != "bfloat16": return Tensor(np.ascontiguousarray(x, np.float16 if dtype == "float16" else np.float32)).realize()
  return Tensor((np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)).bitcast(dtypes.bfloat16).realize()

def tensors_of_kernel(shapes:Shapes, have:Mapping[str, Tensor]) -> list[Tensor]:
  """Returns the tensors of a kernel in the order of `shapes`: those in `have`, and new empty tensors for all others, which the kernel writes."""
  return [have[name] if name in have else Tensor.empty(*shape, dtype=(FLOATS | INTS)[dtype]) for name, (shape, dtype) in shapes.items()]

def to_array(t:Tensor) -> np.ndarray:
  return t.numpy() if t.dtype != dtypes.bfloat16 else (t.bitcast(dtypes.ushort).numpy().astype(np.uint32) << 16).view(np.float32)

def normal_numbers(rng:np.random.Generator, shape:tuple[int, ...], dtype:str) -> np.ndarray:
  """Returns an array of normally distributed random numbers, rounded to `dtype` and held as float32."""
  # In a large tensor, NUMBERS_DRAWN numbers repeat.
  return np.resize(rounded(rng.standard_normal(min(math.prod(shape), NUMBERS_DRAWN), np.float32), dtype), shape)

def random_operands(p:Problem, seed:int) -> tuple[list[np.ndarray], list[Tensor], list[Tensor]]:
  """Returns (random q, k and v as arrays (B, H, S, D), the same as tensors, empty tensors for the outputs)."""
  rng = np.random.default_rng(seed)
  inputs = [normal_numbers(rng, (p.B, h, n, d), p.dtype) for h, n, d in ((p.H, p.Sq, p.D), (p.Hkv, p.Sk, p.D), (p.Hkv, p.Sk, p.Dv))]
  *_, o_shape, lse_shape = shapes_of(p)
  outs = [Tensor.empty(*o_shape, dtype=FLOATS[p.out_dtype])] + [Tensor.empty(*lse_shape, dtype=dtypes.float)]*p.return_lse
  return inputs, [to_tensor(arrange(x, p.layout), p.dtype) for x in inputs], outs
