"""Arithmetic of the chips, in numpy: rounding to 16 bits, and instructions whose results differ from plain fp32."""
from __future__ import annotations
from typing import Any
import numpy as np
from numpy.typing import NDArray

# A value of a kernel is an array with one column per thread: (threads,) for a scalar, (n, threads) for a vector of n elements.
Array = NDArray[Any]
# largest relative error of rounding to nearest
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "fp8e4m3": 2.0**-4, "fp8e4m3fnuz": 2.0**-4}
# dword of which each element is 1.0
ONES_OF = {"float16": 0x3c003c00, "bfloat16": 0x3f803f80, "fp8e4m3": 0x38383838, "fp8e4m3fnuz": 0x40404040}
IN_A_DWORD = {"float16": 2, "bfloat16": 2, "fp8e4m3": 4, "fp8e4m3fnuz": 4}     # elements of a dword

def bits_as(x:Array, dtype:str) -> Array:
  """Returns the bits of an array as numbers of another type of the same size."""
  return np.ascontiguousarray(x).view(dtype)

def words_of(raw:Array) -> Array:
  """Returns bytes (n, threads) joined to dwords (n/4, threads), or to one dword (threads,) if n is at most 4."""
  if len(raw) < 4: return np.asarray(sum(byte.astype(np.uint32) << np.uint32(8*i) for i, byte in enumerate(raw)), np.uint32)
  words = np.ascontiguousarray(np.ascontiguousarray(raw.T).view(np.uint32).T)
  return words if len(words) > 1 else words[0]

def round_bf16(x:Array) -> Array:
  """Returns fp32 numbers rounded to the nearest bf16, ties to even, as bits in the low half of uint32."""
  u = bits_as(x.astype(np.float32), "uint32")
  r = (u + np.uint32(0x7fff) + (u >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)     # only a NaN can overflow 32 bits here
  return np.where(np.isnan(x), np.uint32(0x7fc0), r)

def round_fp16(x:Array) -> Array:
  """Returns fp32 numbers rounded to the nearest fp16, ties to even, as bits in the low half of uint32."""
  with np.errstate(over="ignore", invalid="ignore"): return bits_as(x.astype(np.float16), "uint16").astype(np.uint32)

def widen(bits:Array, dtype:str) -> Array:
  """Returns 16-bit floats of `dtype`, given as bits in the low half of uint32, converted to fp32."""
  if dtype == "float16": return bits_as((bits & 0xffff).astype(np.uint16), "float16").astype(np.float32)
  return bits_as((bits & 0xffff).astype(np.uint32) << np.uint32(16), "float32")

def pack_pairs(x:Array, dtype:str) -> Array:
  """Returns n fp32 numbers rounded to 16-bit floats and packed into n/2 dwords, the first of a pair in the low half."""
  r = round_fp16(x) if dtype == "float16" else round_bf16(x)
  return r[0::2] | (r[1::2] << np.uint32(16))

SPLITTING = 2.0**16        # x*SPLITTING - (x*SPLITTING - x) is x rounded to 8 bits, to nearest even, if fp32 rounds the difference in parentheses
LARGEST_WEIGHT = 2.0**111  # largest x for SPLITTING: x*SPLITTING stays finite

def fused_multiply_add(x:Array, y:Array, z:Array) -> Array:
  """Returns x*y + z in fp32, without rounding the product."""
  # the product of two fp32 numbers is exact in fp64
  return np.asarray(np.asarray(x).astype(np.float64)*y + z).astype(np.float32)

def power_of_two(x:Array) -> Array:
  """Returns 2^x as v_exp_f32 and ex2.approx.ftz compute it: 0 in place of a denormal result."""
  r = np.exp2(x.astype(np.float64)).astype(np.float32)
  return np.where(np.abs(r) < np.finfo(np.float32).tiny, np.float32(0), r)

def logarithm(x:Array) -> Array: return np.log2(x.astype(np.float64)).astype(np.float32)
def reciprocal(x:Array) -> Array: return (1/x.astype(np.float64)).astype(np.float32)

def from_lane(x:Array, source:Array, wave:int) -> Array:
  """Returns, for each lane, the x of the lane with index `source` in the same wave of `wave` lanes."""
  base = np.arange(x.shape[-1])//wave*wave
  return x[..., base + source % wave]

def from_xor_lane(x:Array, mask:int, wave:int) -> Array: return from_lane(x, np.arange(x.shape[-1]) ^ mask, wave)
