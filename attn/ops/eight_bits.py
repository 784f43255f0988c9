"""Numbers of 8 bits, in numpy: their conversion to fp32, and the rounding of fp32 numbers to bytes."""
from __future__ import annotations
import functools
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.ops.formats import FORMATS

Array = NDArray[Any]

@functools.cache
def numbers_of_bytes(kind:str) -> Array:
  """Returns 256 fp32 numbers: element i is the number that byte i stands for in the format `kind`, such as "int8"."""
  of, byte = FORMATS[kind], np.arange(256)
  if not of.bias: return byte.astype(np.uint8).view(np.int8).astype(np.float32)
  exponent, mantissa = byte >> 3 & 15, (byte & 7)/8
  size = np.where(exponent == 0, mantissa*of.normal, (1 + mantissa)*2.0**(exponent - of.bias))
  return np.where(np.isin(byte, of.nans), np.nan, np.where(byte < 128, size, -size)).astype(np.float32)

def numbers(stored:Array, kind:str) -> Array:
  """Returns the fp32 numbers of bytes (uint8) in the format `kind`, such as "int8"."""
  return numbers_of_bytes(kind)[stored]

def bytes_of(words:Array) -> Array:
  """Returns the bytes (4*n, threads) of dwords (n, threads), the low byte of a dword first."""
  words = np.atleast_2d(words)
  return np.stack([(words >> np.uint32(8*i)).astype(np.uint8) for i in range(4)], axis=1).reshape(-1, words.shape[-1])

def rounded_bytes(x:Array, kind:str, saturates:bool) -> Array:
  """Returns fp32 numbers rounded to the nearest 8-bit float of the format `kind`, ties to even, as bytes."""
  # a number beyond the largest one becomes the largest one if the conversion `saturates`, otherwise NaN
  of, size = FORMATS[kind], np.abs(x).astype(np.float32)
  bits = size.view(np.uint32).astype(np.int64)
  normal = ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - ((127 - of.bias) << 3)
  with np.errstate(all="ignore"): small = np.rint(size/np.float32(of.normal/8))
  code = np.where(size < of.normal, np.nan_to_num(small, posinf=0), normal).astype(np.int64)
  most = int(np.nanargmax(np.where(np.arange(256) < 128, numbers_of_bytes(kind), np.nan)))
  code = np.where(code > most, most if saturates else of.nans[0], code)
  signed = np.where((x < 0) & (code > 0) & (code <= most), code | 0x80, code)      # fp8e4m3fnuz has no -0
  return np.where(np.isnan(x), of.nans[0], signed).astype(np.uint8)

def packed_bytes(x:Array, kind:str, saturates:bool) -> Array:
  """Returns n fp32 numbers rounded to 8-bit floats of the format `kind` and packed into n/4 dwords, the first number in the low byte."""
  code = rounded_bytes(x, kind, saturates).astype(np.uint32)
  return code[0::4] | code[1::4] << np.uint32(8) | code[2::4] << np.uint32(16) | code[3::4] << np.uint32(24)
