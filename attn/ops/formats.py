"""Formats of 8 bits in which a cache stores keys and values, and the conversion of fp32 numbers to them and back."""
from __future__ import annotations
import math
from dataclasses import dataclass
from typing import TypeVar
from attn.tinygrad_compat import DType, Tensor, UOp, dtypes
from attn.values import FP32_LEAST, FP32_MOST

# A row is stored as 8-bit numbers and one scale. An element of the row is its 8-bit number times the scale. The scale is chosen so that the largest
# element of the row is stored as the largest number of the format. The functions are written once, for Tensors and for the UOps of a kernel.

Floats = TypeVar("Floats", Tensor, UOp)

SCALES = {dtypes.float: FP32_MOST, dtypes.half: 65504.0}     # dtypes of scales, and their largest numbers

def pattern(x:float) -> int:
  """Returns the fp32 bit pattern of x, which is a power of two."""
  return (127 + int(math.log2(x))) << 23

@dataclass(frozen=True)
class Format:
  """A format of 8 bits: whole numbers (int8), or floats with a sign, four bits of exponent and three bits of mantissa (e4m3)."""
  # tinygrad stores whole numbers as int8, and floats as bytes
  name: str
  most: float        # the largest number
  bias: int = 0      # bias of the exponent of a float; 0: whole numbers
  nans: tuple[int, ...] = ()     # bytes that stand for NaN
  @property
  def dtype(self) -> DType: return dtypes.uchar if self.bias else dtypes.char
  @property
  def normal(self) -> float:
    """Smallest normal number of the float format. Smaller numbers (denormals) are multiples of normal/8."""
    return 2.0**(1 - self.bias)

  def encode(self, x:Floats) -> Floats:
    """Returns fp32 numbers x, none of them NaN, rounded to the nearest number of the format, ties to even."""
    # a number beyond the format's largest number becomes the largest one
    x = x.maximum(-self.most).minimum(self.most)
    if not self.bias: return rounded_steps(x, 1.0).bitcast(dtypes.int).cast(dtypes.char)
    sign, size = (x.bitcast(dtypes.uint) >> 24) & 0x80, x.maximum(-x)
    bits = size.bitcast(dtypes.uint)
    normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - ((127 - self.bias) << 3)
    number = (size < self.normal).where(rounded_steps(size, self.normal/8), normal)
    return number.eq(0).where(number, number | sign).cast(dtypes.uchar)      # no -0, which is the NaN of fp8e4m3fnuz

  def decode(self, stored:Floats) -> Floats:
    """Returns numbers of the format, converted to fp32."""
    if not self.bias: return stored.cast(dtypes.float)
    bits = stored.cast(dtypes.uint)
    size, sign = bits & 0x7f, (bits >> 7).cast(dtypes.float)*-2 + 1
    normal = ((size << 20) + ((127 - self.bias) << 23)).bitcast(dtypes.float)
    number = (size < 8).where(size.cast(dtypes.float)*(self.normal/8), normal)*sign
    for nan in self.nans: number = bits.eq(nan).where(math.nan, number)
    return number

  def scale_of(self, largest:Floats, dtype:DType) -> Floats:
    """Returns the scale by which a row is divided so that its largest absolute value `largest` fits the format: an fp32 number, rounded to
    `dtype`."""
    # 0 for a row of zeros, or of numbers so small that the scale would be a denormal of fp32; NaN if `largest` is infinite, or if the scale is
    # beyond the range of `dtype`
    scale = (largest < self.most*FP32_LEAST).where(0.0, largest*(1/self.most))
    if dtype == dtypes.half: scale = as_fp16(scale)
    return (scale > SCALES[dtype]).where(math.nan, scale)

  def stored(self, x:Floats, scale:Floats) -> Floats:
    """Returns a row's fp32 elements x as 8-bit numbers of this format: x/scale, rounded; 0 if the scale is 0 or NaN."""
    there = scale > 0
    return self.encode(there.where(x*there.where(scale, 1.0).reciprocal(), 0.0))

def rounded_steps(x:Floats, step:float) -> Floats:
  """Returns x/step rounded to the nearest whole number, ties to even, as uint32; a negative number as its two's complement."""
  # the addition of 1.5 * 2^23 * step rounds: the last bit of the fp32 sum stands for one step, so the whole number lies in the low bits of the sum
  return (x + 1.5*2.0**23*step).bitcast(dtypes.uint) - (pattern(2.0**23*step) + (1 << 22))

def as_fp16(x:Floats) -> Floats:
  """Returns the positive fp32 number x rounded to the nearest fp16 number, still as fp32."""
  # To 11 significant bits, or to a multiple of 2^-24, ties to even. tinygrad 0.14.0 would remove a cast to fp16 and back.
  bits = x.bitcast(dtypes.uint)
  normal = ((bits + 0xfff + ((bits >> 13) & 1)) & 0xffffe000).bitcast(dtypes.float)
  return (x < 2.0**-14).where(rounded_steps(x, 2.0**-24).cast(dtypes.float)*2.0**-24, normal)

FORMATS = {x.name: x for x in (Format("int8", 127.0), Format("fp8e4m3", 448.0, 7, (0x7f, 0xff)), Format("fp8e4m3fnuz", 240.0, 8, (0x80,)))}

def sizes_of(x:Floats) -> Floats:
  """Returns the absolute values of fp32 numbers, and infinity for NaN."""
  # so the largest one tells whether all numbers are finite
  size = x.maximum(-x)
  return (size < math.inf).where(size, math.inf)
