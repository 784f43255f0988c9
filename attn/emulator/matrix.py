"""Emulation of matrix instructions on the registers of waves, with the layouts of emulator/chips.py. Begin with `MatrixUnit`."""
from __future__ import annotations
import functools, operator
from dataclasses import dataclass, field
from typing import Any, Callable
import numpy as np
from numpy.typing import NDArray
from attn.emulator.alu import bf16_to_float, float_to_bf16
from attn.emulator.checks import BadOperand
from attn.emulator.chips import DOTS, FLUSHING, INSTRUCTIONS, SHORT_SUMS, WITHOUT_FP8, Layout, MatrixInstruction

# Arithmetic: products of 8-bit and of 16-bit floats are exact in fp32. The products are summed in fp32, and then C is added. The ISA does not
# specify the order in which hardware adds the products: a kernel must not depend on the last bit. NaN and inf propagate as in a dot product. On some
# chips (SHORT_SUMS) the sums of products of 8-bit floats have only 13 bits after the binary point. Matrix instructions of CDNA2 treat denormals as
# zero, in their 16-bit inputs, and in the fp32 accumulator that they read and write: "the FP16 and BF16 V_DOT2 and MFMA matrix instructions flush
# input and output denormal values to zero" (PyTorch, "Numerical accuracy", section on MI200, written by AMD; AMD's MIOpen says the same of MFMA_F16,
# MFMA_BF16, MFMA_BF16_1K).

Array = NDArray[Any]

# wgmma.mma_async (PTX ISA 9.7.15.5): warp w of a warpgroup has 16 rows from row 16w on, laid out as in m16n8k16
WARPGROUP = 128

def warpgroup_operand(a:Array, size:int) -> Array:
  """Returns operand A of a wgmma, (warpgroups, 64, columns), made from registers `a` (registers, threads): unsigned integers of `size` bytes."""
  layout = Layout("scrp wgt -> wrg sctp", s=a.shape[0]//4, c=2, r=2, p=4//size, w=4, g=8, t=4)
  return layout.to_matrices(a, lambda x: _parts(x, f"u{size}")).swapaxes(1, 2)

def warpgroup_product(a:Array, b:Array, c:Array, depth:int=0, bits:int=0) -> Array:
  """Returns c + A B^T in fp32, for each warpgroup: `c` is (registers, threads), `a` (warpgroups, 64, k), `b` (warpgroups, n, k)."""
  layout, (groups, n, k) = Layout("irp gt -> rg itp", i=c.shape[0]//4, r=2, p=2, g=8, t=4), b.shape
  rows, columns = a.reshape(groups, 4, 16, k), b[:, None].swapaxes(2, 3)
  # `bits` is above 0 for chips whose matrix unit keeps only so many bits after the binary point (SHORT_SUMS): `depth` products are added at a time,
  # as one wgmma does, and what is below these bits is cut off
  if not bits: return layout.add_matrices(c, (rows @ columns).reshape(groups*4, 16, n))
  total = layout.to_matrices(c, lambda x: x).swapaxes(1, 2)
  for first in range(0, k, depth):
    here = slice(first, first + depth)
    total = short_sum(rows[..., here].reshape(-1, 16, depth), np.repeat(columns[:, 0, here], 4, axis=0), total, bits)
  return layout.add_matrices(np.zeros_like(c), total)

_SIGN_AND_REST, _REBIAS, _BEYOND_FP16 = np.int32(0x8fffe000 - 2**32), np.float32(2.0**112), np.float32(65536)

def _from_high_half(x:Array) -> Array:
  # Sign, exponent and mantissa of the fp16 in the upper half move to their places in an fp32. This fp32 is exactly the value times 2^-112, also for a
  # denormal. inf and NaN become numbers of 2^16 or more, and are replaced by inf and NaN at the end.
  x >>= 3
  x &= _SIGN_AND_REST
  found = x.view(np.float32)
  found *= _REBIAS
  if found.size and (found.max() >= _BEYOND_FP16 or found.min() <= -_BEYOND_FP16):
    size = np.abs(found)
    found[size > _BEYOND_FP16] = np.nan
    found[size == _BEYOND_FP16] *= np.float32(np.inf)
  return found

def _halves(x:Array) -> Array:
  """Returns the 16-bit numbers of dwords (n, ...), the low one first, each in the upper half of an int32 (2n, ...)."""
  halves = np.empty((len(x), 2, *x.shape[1:]), np.int32)
  np.left_shift(x.view(np.int32), 16, out=halves[:, 0])
  np.bitwise_and(x.view(np.int32), np.int32(-65536), out=halves[:, 1])
  return halves.reshape(-1, *x.shape[1:])

def _parts(x:Array, kind:str) -> Array:
  """Returns the numbers, of numpy type `kind`, that are packed in the dwords x (n, threads), low bits first, as an array (numbers, threads)."""
  parts = np.ascontiguousarray(x).view(kind).reshape(*x.shape, -1)
  return np.ascontiguousarray(parts.transpose(0, 2, 1)).reshape(-1, x.shape[-1])

def _fp8(bias:int, nans:tuple[int, ...]) -> Array:
  """Returns 256 numbers: element i is the value of byte i in a float format with 4 bits of exponent, biased by `bias`; NaN for bytes in `nans`."""
  # a sign, 4 bits of exponent and 3 of mantissa; there is no infinity
  bits = np.arange(256)
  exponent, mantissa = bits >> 3 & 15, bits & 7
  value = np.where(exponent == 0, mantissa/8*2.0**(1 - bias), (1 + mantissa/8)*2.0**(exponent - float(bias)))*np.where(bits < 128, 1, -1)
  return np.where(np.isin(bits, nans), np.nan, value).astype(np.float32)

# LLVM, APFloat.h: Float8E4M3FN (OCP), and Float8E4M3FNUZ of CDNA3, in which the bits of -0 are the only NaN
_FP8 = {"fp8e4m3": _fp8(7, (0x7f, 0xff)), "fp8e4m3fnuz": _fp8(8, (0x80,))}

_WIDEN: dict[str, Callable[[Array], Array]] = {
  "float16": lambda x: _from_high_half(np.ascontiguousarray(x).view(np.uint16).astype(np.int32) << 16),
  "bfloat16": bf16_to_float,
  "fp8e4m3": lambda x: _FP8["fp8e4m3"].take(x.view(np.uint8)), "fp8e4m3fnuz": lambda x: _FP8["fp8e4m3fnuz"].take(x.view(np.uint8)),
  "int8": lambda x: x.view(np.int8).astype(np.float64),                              # sums are exact: 16 products of at most 2^14
  "tfloat32": lambda x: (x.view(np.uint32) & np.uint32(0xffffe000)).view(np.float32),  # mma.tf32 reads the upper 19 bits
}

_UNPACK: dict[str, Callable[[Array], Array]] = {   # type -> function from dwords of packed numbers to fp32
  "float16": lambda x: _from_high_half(_halves(x)), "bfloat16": lambda x: _halves(x).view(np.float32),
  "fp8e4m3": lambda x: _WIDEN["fp8e4m3"](_parts(x, "u1")), "fp8e4m3fnuz": lambda x: _WIDEN["fp8e4m3fnuz"](_parts(x, "u1")),
  "tfloat32": _WIDEN["tfloat32"],
}

_BYTES = {"float16": 2, "bfloat16": 2, "fp8e4m3": 1, "fp8e4m3fnuz": 1, "int8": 1, "tfloat32": 4}   # bytes of an element

def to_float32(bits:Array, dtype:str) -> Array:
  return _WIDEN[dtype](bits)

_ACCUMULATOR: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {   # type of C and D -> conversions
  "float32": (lambda x: x, lambda x: x), "float16": (lambda x: x.astype(np.float32), lambda x: x.astype(np.float16)),
  "bfloat16": (bf16_to_float, float_to_bf16), "int32": (lambda x: x.astype(np.float64), lambda x: x.astype(np.int64).astype(np.int32)),
}

_SMALLEST = {"float16": np.float32(2.0**-14), "bfloat16": np.float32(2.0**-126), "float32": np.float32(2.0**-126)}   # smallest normal number

def flushed(x:Array, dtype:str) -> Array:
  """Returns the fp32 numbers x, with 0 in place of numbers that are denormal in `dtype`."""
  return np.where(np.abs(x) < _SMALLEST[dtype], np.float32(0), x)

def truncated_at(x:Array, size:Array, bits:int) -> Array:
  """Returns x rounded towards zero to `bits` binary places below the highest bit of `size`, e.g. to multiples of 1/8 for size 1 and 3 bits."""
  places = np.ldexp(np.float32(1), bits + 1 - np.frexp(size)[1])     # frexp counts the power of two from 1/2
  return np.trunc(x*places)/places

def short_sum(a:Array, b:Array, c:Array, bits:int) -> Array:
  """Returns c + A B for A (waves, M, K), B (waves, K, N), c (waves, M, N), where sums keep only `bits` bits of mantissa."""
  # An element of the result is a sum of products and an element of c. Let 2^e be the largest power of two that is not above the largest of these
  # addends. Each addend is rounded towards zero to a multiple of 2^(e - bits). Then they are added, and the sum is cut off to `bits` bits of
  # mantissa.
  addends = np.concatenate([a[:, :, None] * b.swapaxes(1, 2)[:, None], c[..., None]], axis=-1, dtype=np.float32)
  size = np.abs(addends).max(-1)
  usual = (size > 2.0**-80) & (size < np.inf)      # neither zero, nor so small that fp32 loses bits, nor NaN or inf
  scale = np.where(usual, size, np.float32(1))
  total = truncated_at(addends, scale[..., None], bits).sum(-1)
  total = truncated_at(total, np.where(total == 0, np.float32(1), np.abs(total)), bits)
  return np.where(usual, total, addends.sum(-1))

def element_size(dtype:str) -> int: return _BYTES[dtype]
def depth_of_wgmma(dtype:str) -> int:
  """Returns the number of products that one wgmma adds for each element of its result."""
  # PTX ISA 9.7.15.2: 32 bytes of a row of A
  return 32//_BYTES[dtype]
def bits_of_sums(arch:str, dtype:str) -> int:
  """Returns how many bits of mantissa a chip's matrix unit keeps when it sums products of `dtype`, or 0 if it sums in fp32."""
  return SHORT_SUMS.get(arch, 0) if dtype in _FP8 else 0

@dataclass
class MatrixUnit:
  """Emulates the matrix unit of one family of chips."""
  family: str
  arch: str
  # operands converted to fp32, for an operand that is used repeatedly (Q in a loop over keys, P for each slice of V)
  _recent: dict[tuple[int, int], tuple[Array, Array]] = field(default_factory=dict)

  def _operand(self, x:Array, layout:Layout, dtype:str, packed:bool) -> Array:
    if (hit := self._recent.get(key := (id(x), id(layout)))) is not None: return hit[1]
    if (held := x.shape[0]*(4//_BYTES[dtype] if packed else 1)) != layout.elements:
      raise BadOperand(f"a matrix operand has {held} elements a lane, the instruction wants {layout.elements}")
    m = layout.to_matrices(x, (_UNPACK if packed else _WIDEN)[dtype])
    if self.family in FLUSHING: m = flushed(m, dtype)
    while len(self._recent) >= 64: self._recent.pop(next(iter(self._recent)))
    self._recent[key] = x, m
    return m

  def _run(self, i:MatrixInstruction, a:Array, b:Array, c:Array, packed:bool) -> Array:
    if c.shape[0] != i.c.elements: raise BadOperand(f"a matrix accumulator has {c.shape[0]} elements a lane, the instruction wants {i.c.elements}")
    # (waves, K, M) and (waves, K, N) -> the product, (waves, M, N)
    rows, columns = self._operand(a, i.a, i.dtype, packed).transpose(0, 2, 1), self._operand(b, i.b, i.dtype, packed)
    if i.dtype in _FP8 and self.arch in SHORT_SUMS:
      old = i.c.to_matrices(c, lambda x: x).transpose(0, 2, 1)
      return i.c.add_matrices(np.zeros_like(c), short_sum(rows, columns, old, SHORT_SUMS[self.arch]))
    product = rows @ columns
    if self.family not in FLUSHING: return i.c.add_matrices(c, product)
    return flushed(i.c.add_matrices(flushed(c, "float32"), product), "float32")

  def instruction(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """Returns c + A B of the matrix instruction `name`: a and b are packed, uint32 (registers, threads); c is fp32 (registers, threads)."""
    i = INSTRUCTIONS.get(name)
    if i is None or self.family not in i.families or (i.dtype in _FP8 and self.arch in WITHOUT_FP8):
      have = ", ".join(n for n, x in INSTRUCTIONS.items() if self.family in x.families)
      raise BadOperand(f"{self.arch} has no matrix instruction {name!r}; it has {have}")
    return self._run(i, a, b, c, True)

  def dot(self, a:Array, b:Array, c:Array, dtype:str) -> Array:
    """Returns c plus the dot product of the numbers of `dtype` in the dwords a and b (threads,), as v_dot2 and v_dot4 compute it."""
    if self.family not in DOTS[dtype]: raise BadOperand(f"{self.arch} has no dot product of dwords of {dtype}")
    pairs = [_UNPACK[dtype](np.atleast_2d(x)) for x in (a, b)]
    if self.family in FLUSHING: pairs = [flushed(x, dtype) for x in pairs]
    return flushed(functools.reduce(operator.add, pairs[0]*pairs[1], flushed(c, "float32")), "float32")

  def wmma(self, dims:tuple[int, int, int], dtype:str, a:Array, b:Array, c:Array, out:str) -> Array:
    """Returns c + A B of tinygrad's UOp WMMA, in the type `out`. `dims` is (N, M, K); operands are (elements of a lane, threads)."""
    i = next((x for x in INSTRUCTIONS.values() if self.family in x.families and x.dims == tuple(dims) and x.dtype == dtype), None)
    if i is None: raise BadOperand(f"{self.arch} has no matrix instruction for (N, M, K) = {dims} on {dtype}")
    widen, narrow = _ACCUMULATOR[out]
    return narrow(self._run(i, a, b, widen(c), False))
