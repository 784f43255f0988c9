"""The matrix instructions: how each lays its tiles out over (element, lane), written down from the vendors' documents and not from attn/chips.

Sources: AMD Instinct MI300 ISA and CDNA4 ISA chapter 7 (MFMA, register layouts, FP8), RDNA3 ISA section 7.9 and RDNA4 ISA chapter 7 (WMMA), PTX ISA
chapter "Warp level matrix multiply-accumulate instructions" (mma.m16n8k8, mma.m16n8k16), AMD Matrix Instruction Calculator.

A layout is data: the element index of a lane and the lane index are each split into named factors, the major one first, and the row and column of
the matrix are concatenations of such factors. The layout of C in MFMA 32x32 is "ab hn -> ahb n": element 4a+b of lane 32h+n is row 8a+4h+b, column
n.

Arithmetic: products of 8-bit and of 16-bit floats are exact in fp32; they are summed in fp32 and then C is added. Hardware sums in an order that the
ISA does not promise: a kernel must not depend on the last bit. NaN and inf go where a dot product takes them. CDNA2 takes denormals for zero, in its
16-bit inputs and in the fp32 accumulator that goes in and comes out: "the FP16 and BF16 V_DOT2 and MFMA matrix instructions flush input and output
denormal values to zero" (PyTorch, "Numerical accuracy", section on MI200, written by AMD; AMD's MIOpen says the same of MFMA_F16, MFMA_BF16,
MFMA_BF16_1K).
"""
from __future__ import annotations
from dataclasses import dataclass, field
from typing import Any, Callable
import math, re
import numpy as np
from numpy.typing import NDArray
from attn.emulator.alu import bf16_to_float, float_to_bf16
from attn.emulator.checks import BadOperand

Array = NDArray[Any]

class Layout:
  """`spec` = "element-factors lane-factors -> row-factors column-factors"; a lane factor that is named neither in row nor column is a duplicate."""
  def __init__(self, spec:str, **size:int):
    e, l, rows, cols = re.fullmatch(r"(\w*) (\w*) -> (\w*) (\w*)", spec).groups()   # type: ignore[union-attr]
    self.elements, self.rows, self.columns = [math.prod(size[x] for x in factors) for factors in (e, rows, cols)]
    self.split = [size[x] for x in e], [size[x] for x in l]     # registers as an array: these factors of the element, the wave, those of the lane
    self.matrix_split = [size[x] for x in rows + cols]
    duplicate = "".join(x for x in l if x not in rows + cols)
    self.duplicated = len(e) + 1 + l.index(duplicate) if duplicate else None          # the axis of what is there twice
    kept = l.replace(duplicate, "") if duplicate else l
    place = {x: i for i, x in enumerate(e)} | {x: len(e)+1+i for i, x in enumerate(kept)}
    self.by_rows, self.by_columns = ([len(e), *[place[x] for x in order]] for order in (rows + cols, cols + rows))

  def to_matrices(self, x:Array, unpack:Callable[[Array], Array]) -> Array:
    """Registers (registers, T) -> (waves, columns, rows). `unpack` makes of them the elements (elements, T), as the numbers to compute with.
    Duplicates must agree (RDNA3: lanes 16-31 of A and B repeat lanes 0-15)."""
    e, l = self.split
    if self.duplicated is not None:
      axis = self.duplicated - len(e) + 1
      each = np.ascontiguousarray(x).reshape(len(x), -1, *l)
      first, second = each.take(0, axis), each.take(1, axis)
      if (differ := first.view(np.uint64) != second.view(np.uint64)).any():        # fewer to compare
        raise BadOperand("WMMA on RDNA3 wants lanes 16-31 of A and B to repeat lanes 0-15 (RDNA3 ISA section 7.9): they have other values in wave "
                         f"{int(np.argwhere(differ)[0][1])} of those that run")
      x, l = first, [n for i, n in enumerate(l) if len(e) + 1 + i != self.duplicated]
    m = unpack(x).reshape(*e, -1, *l).transpose(self.by_columns)
    return np.ascontiguousarray(m).reshape(-1, self.columns, self.rows)

  def add_matrices(self, c:Array, m:Array) -> Array:
    """c (elements, T) + the elements of m (waves, rows, columns)."""
    order = np.argsort(self.by_rows)
    found = np.ascontiguousarray(m.reshape(-1, *self.matrix_split).transpose(order)).reshape(self.elements, -1)
    return np.add(found, c, out=found)

@dataclass(frozen=True)
class MatrixInstruction:
  """D = A B + C on one wave; a is M x K, b is given transposed (N x K) so that both put the contraction last."""
  a: Layout
  b: Layout
  c: Layout
  dtype: str                       # of A and B: a key of _WIDEN
  families: tuple[str, ...]
  @property
  def dims(self) -> tuple[int, int, int]:   # (N, M, K), as in the arg of Ops.WMMA
    return self.c.columns, self.c.rows, self.a.columns

def _mfma(M:int, E:int, dtype:str, *families:str) -> MatrixInstruction:
  """Lane (h, i) holds row i of A, k = E*h + e; D: blocks of 4 rows dealt to the lane groups in turn."""
  groups = 64//M
  ab = Layout("e hi -> i he", e=E, h=groups, i=M)
  return MatrixInstruction(ab, ab, Layout("ab hn -> ahb n", a=M*M//64//4, b=4, h=groups, n=M), dtype, families)

def _blocks(dtype:str, *families:str) -> MatrixInstruction:
  """MFMA 4x4x4 of 16 blocks. Block b, which is here like a wave by itself, lies in lanes 4b to 4b + 3, of which lane i has row i of A with all four
  k, and column i of B and D."""
  ab = Layout("k i -> i k", k=4, i=4)
  return MatrixInstruction(ab, ab, Layout("r n -> r n", r=4, n=4), dtype, families)

def _wmma3(dtype:str) -> MatrixInstruction:
  """A lane holds all 16 k of a row of A, lanes 16-31 repeat it; D: even rows in lanes 0-15, odd rows in lanes 16-31."""
  ab = Layout("k di -> i k", k=16, d=2, i=16)
  return MatrixInstruction(ab, ab, Layout("r hn -> rh n", r=8, h=2, n=16), dtype, ("rdna3",))

def _wmma4(dtype:str) -> MatrixInstruction:
  """Lane half h holds k = 8h + e (e < 8) of A and B, and rows 8h + r of D."""
  ab = Layout("e hi -> i he", e=8, h=2, i=16)
  return MatrixInstruction(ab, ab, Layout("r hn -> hr n", r=8, h=2, n=16), dtype, ("rdna4",))

def _mma(K:int, pack:int, dtype:str) -> MatrixInstruction:
  """PTX fragments of m16n8: groupID g = lane/4, t = lane%4; element (c, r, p) of A: row 8r+g, k = (c, t, p); B: column g; C: (8r+g, 2t+p)."""
  c = K//(4*pack)
  return MatrixInstruction(Layout("crp gt -> rg ctp", c=c, r=2, p=pack, g=8, t=4), Layout("cp gt -> g ctp", c=c, p=pack, g=8, t=4),
                     Layout("rp gt -> rg tp", r=2, p=2, g=8, t=4), dtype, ("nvidia",))

INSTRUCTIONS: dict[str, MatrixInstruction] = {
  "mfma_f32_32x32x8f16": _mfma(32, 4, "float16", "cdna2", "cdna3", "cdna4"),
  "mfma_f32_32x32x8bf16_1k": _mfma(32, 4, "bfloat16", "cdna2", "cdna3", "cdna4"),
  "mfma_f32_16x16x16f16": _mfma(16, 4, "float16", "cdna2", "cdna3", "cdna4"),
  "mfma_f32_16x16x16bf16_1k": _mfma(16, 4, "bfloat16", "cdna2", "cdna3", "cdna4"),
  "mfma_f32_4x4x4f16": _blocks("float16", "cdna2", "cdna3", "cdna4"), "mfma_f32_4x4x4bf16_1k": _blocks("bfloat16", "cdna2", "cdna3", "cdna4"),
  "mfma_f32_32x32x16_fp8_fp8": _mfma(32, 8, "fp8e4m3fnuz", "cdna3"), "mfma_f32_16x16x32_fp8_fp8": _mfma(16, 8, "fp8e4m3fnuz", "cdna3"),
  "mfma_f32_32x32x16_f16": _mfma(32, 8, "float16", "cdna4"), "mfma_f32_32x32x16_bf16": _mfma(32, 8, "bfloat16", "cdna4"),
  "mfma_f32_16x16x32_f16": _mfma(16, 8, "float16", "cdna4"), "mfma_f32_16x16x32_bf16": _mfma(16, 8, "bfloat16", "cdna4"),
  "wmma_f32_16x16x16_f16_w32": _wmma3("float16"), "wmma_f32_16x16x16_bf16_w32": _wmma3("bfloat16"), "wmma_i32_16x16x16_iu8_w32": _wmma3("int8"),
  "wmma_f32_16x16x16_f16_w32_gfx12": _wmma4("float16"), "wmma_f32_16x16x16_bf16_w32_gfx12": _wmma4("bfloat16"),
  "mma_m16n8k16_f16": _mma(16, 2, "float16"), "mma_m16n8k16_bf16": _mma(16, 2, "bfloat16"), "mma_m16n8k8_f16": _mma(8, 2, "float16"),
  "mma_m16n8k8_tf32": _mma(8, 1, "tfloat32"),
}

# wgmma.mma_async (PTX ISA 9.7.15.5): warp w of a warpgroup has rows 16w on, as in m16n8k16
WARPGROUP = 128

def warpgroup_operand(a:Array) -> Array:
  """The fragments of A of some 16 columns each, uint32 (registers, T) -> bits, uint16 (warpgroups, 64, columns)."""
  layout = Layout("scrp wgt -> wrg sctp", s=a.shape[0]//4, c=2, r=2, p=2, w=4, g=8, t=4)
  return layout.to_matrices(a, lambda x: _parts(x, "u2")).swapaxes(1, 2)

def warpgroup_product(a:Array, b:Array, c:Array) -> Array:
  """c (registers, T) + A B^T in fp32, of fp32 (warpgroups, 64, k) and (warpgroups, n, k). A product for each warp: a BLAS library shares out
  larger ones over threads, which cost more than they save, above all where other processes have the cores."""
  layout, (groups, n, k) = Layout("irp gt -> rg itp", i=c.shape[0]//4, r=2, p=2, g=8, t=4), b.shape
  products = a.reshape(groups, 4, 16, k) @ b[:, None].swapaxes(2, 3)
  return layout.add_matrices(c, products.reshape(groups*4, 16, n))

_SIGN_AND_REST, _REBIAS, _BEYOND_FP16 = np.int32(0x8fffe000 - 2**32), np.float32(2.0**112), np.float32(65536)

def _from_high_half(x:Array) -> Array:
  """The fp32 values of fp16 bits that are the upper halves of the int32 x, which changes. A sign, an exponent and a mantissa, moved to their places
  in an fp32, make 2^-112 of the value, exactly, denormals too; inf and NaN come out as 2^16 and more."""
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
  """The numbers packed in dwords (n, ...), the low one first, each as the upper half of an int32 (2n, ...)."""
  halves = np.empty((len(x), 2, *x.shape[1:]), np.int32)
  np.left_shift(x.view(np.int32), 16, out=halves[:, 0])
  np.bitwise_and(x.view(np.int32), np.int32(-65536), out=halves[:, 1])
  return halves.reshape(-1, *x.shape[1:])

def _parts(x:Array, kind:str) -> Array:
  """The numbers packed in dwords (n, T), the low end first."""
  parts = np.ascontiguousarray(x).view(kind).reshape(*x.shape, -1)
  return np.ascontiguousarray(parts.transpose(0, 2, 1)).reshape(-1, x.shape[-1])

def _fp8() -> Array:
  """The values of CDNA3's FP8 (E4M3FNUZ; LLVM, APFloat.h, Float8E4M3FNUZ): a sign, 4 bits of exponent with bias 8, 3 of mantissa; no infinity, and
  what would be -0 is the only NaN."""
  bits = np.arange(256)
  exponent, mantissa = bits >> 3 & 15, bits & 7
  value = np.where(exponent == 0, mantissa/8*2.0**-7, (1 + mantissa/8)*2.0**(exponent - 8.0))*np.where(bits < 128, 1, -1)
  return np.where(bits == 128, np.nan, value).astype(np.float32)

_FP8 = _fp8()

_WIDEN: dict[str, Callable[[Array], Array]] = {
  "float16": lambda x: _from_high_half(np.ascontiguousarray(x).view(np.uint16).astype(np.int32) << 16),
  "bfloat16": bf16_to_float,
  "fp8e4m3fnuz": lambda x: _FP8.take(x.view(np.uint8)),
  "int8": lambda x: x.view(np.int8).astype(np.float64),                              # exact: 16 products below 2^14
  "tfloat32": lambda x: (x.view(np.uint32) & np.uint32(0xffffe000)).view(np.float32),  # mma.tf32 reads the upper 19 bits
}

_UNPACK: dict[str, Callable[[Array], Array]] = {   # dwords of packed ones -> the same
  "float16": lambda x: _from_high_half(_halves(x)), "bfloat16": lambda x: _halves(x).view(np.float32),
  "fp8e4m3fnuz": lambda x: _WIDEN["fp8e4m3fnuz"](_parts(x, "u1")), "tfloat32": _WIDEN["tfloat32"],
}

_BYTES = {"float16": 2, "bfloat16": 2, "fp8e4m3fnuz": 1, "int8": 1, "tfloat32": 4}   # of an element

def to_float32(bits:Array, dtype:str) -> Array:
  """The fp32 values of bits of `dtype`."""
  return _WIDEN[dtype](bits)

_ACCUMULATOR: dict[str, tuple[Callable[[Array], Array], Callable[[Array], Array]]] = {   # the type of C and D -> to and from what is computed with
  "float32": (lambda x: x, lambda x: x), "float16": (lambda x: x.astype(np.float32), lambda x: x.astype(np.float16)),
  "bfloat16": (bf16_to_float, float_to_bf16), "int32": (lambda x: x.astype(np.float64), lambda x: x.astype(np.int64).astype(np.int32)),
}

FLUSHING = ("cdna2",)                                                                          # families that take denormals for zero
_SMALLEST = {"float16": np.float32(2.0**-14), "bfloat16": np.float32(2.0**-126), "float32": np.float32(2.0**-126)}   # normal number

def flushed(x:Array, dtype:str) -> Array:
  """fp32 values with those that are denormal in `dtype` set to zero."""
  return np.where(np.abs(x) < _SMALLEST[dtype], np.float32(0), x)

# The families that have v_dot2_f32_f16 and v_dot2_f32_bf16 (LLVM, AMDGPU.td: features dot10-insts and dot12-insts). All of them take a denormal fp32
# accumulator for zero, and a denormal result likewise, whatever the mode of the wave (LLVM, SIISelLowering.cpp, performFMACombine).
DOTS = {"float16": ("cdna2", "cdna3", "cdna4", "rdna3", "rdna4"), "bfloat16": ("cdna4", "rdna3", "rdna4")}

@dataclass
class MatrixUnit:
  """The matrix unit of one architecture family. Operands that come again (Q in a loop over keys, P for each slice of V) are widened only once."""
  family: str
  arch: str
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
    product = self._operand(a, i.a, i.dtype, packed).transpose(0, 2, 1) @ self._operand(b, i.b, i.dtype, packed)
    if self.family not in FLUSHING: return i.c.add_matrices(c, product)
    return flushed(i.c.add_matrices(flushed(c, "float32"), product), "float32")

  def instruction(self, name:str, a:Array, b:Array, c:Array) -> Array:
    """The instruction by its builtin's stem, on packed register images: a and b uint32 (registers, T), c fp32 (registers, T)."""
    i = INSTRUCTIONS.get(name)
    if i is None or self.family not in i.families:
      have = ", ".join(n for n, x in INSTRUCTIONS.items() if self.family in x.families)
      raise BadOperand(f"{self.arch} has no matrix instruction {name!r}; it has {have}")
    return self._run(i, a, b, c, True)

  def dot(self, a:Array, b:Array, c:Array, dtype:str) -> Array:
    """v_dot2_f32_f16 and v_dot2_f32_bf16 on dwords a and b (T,) and fp32 c (T,)."""
    if self.family not in DOTS[dtype]: raise BadOperand(f"{self.arch} has no dot product of pairs of {dtype}")
    pairs = [_UNPACK[dtype](np.atleast_2d(x)) for x in (a, b)]
    if self.family in FLUSHING: pairs = [flushed(x, dtype) for x in pairs]
    low, high = pairs[0]*pairs[1]
    return flushed(flushed(c, "float32") + low + high, "float32")

  def wmma(self, dims:tuple[int, int, int], dtype:str, a:Array, b:Array, c:Array, out:str) -> Array:
    """Ops.WMMA: dims (N, M, K), operands with one array row per element; `out` is the type of C and D."""
    i = next((x for x in INSTRUCTIONS.values() if self.family in x.families and x.dims == tuple(dims) and x.dtype == dtype), None)
    if i is None: raise BadOperand(f"{self.arch} has no matrix instruction for (N, M, K) = {dims} on {dtype}")
    widen, narrow = _ACCUMULATOR[out]
    return narrow(self._run(i, a, b, widen(c), False))
