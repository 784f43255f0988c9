"""The chips that the emulator can emulate: their properties and matrix instructions. The data come from the vendors' documents and not from
attn/chips; a test compares the two."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import math, re
import numpy as np
from numpy.typing import NDArray
from attn.emulator.checks import BadOperand

# Sources: AMD Instinct MI300 ISA and CDNA4 ISA chapter 7 (MFMA, register layouts, FP8), RDNA3 ISA section 7.9 and RDNA4 ISA chapter 7 (WMMA), PTX
# ISA chapter "Warp level matrix multiply-accumulate instructions" (mma.m16n8k8, mma.m16n8k16, mma.m16n8k32), AMD Matrix Instruction Calculator.
#
# A layout is a text such as "ab hn -> ahb n", that of C in MFMA 32x32. It says where each element of a lane lies in the matrix. A letter stands for
# a digit of an index, and the highest digit comes first. b has 4 values, h has 2, and n has 32. So element 4a+b of lane 32h+n lies in row 8a+4h+b,
# column n.

Array = NDArray[Any]

# ***** the targets *****

@dataclass(frozen=True)
class EmulatedChip:
  family: str   # family of the chip, by which its matrix instructions are found
  wave: int     # lanes of a wave
  lds: int      # most bytes of LDS that a workgroup may have
  multiplies: bool = True    # has a matrix unit

EMULATED: dict[str, EmulatedChip] = {
  "gfx90a": EmulatedChip("cdna2", 64, 65536),
  "gfx942": EmulatedChip("cdna3", 64, 65536),
  "gfx950": EmulatedChip("cdna4", 64, 163840),
  **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152"), EmulatedChip("rdna3", 32, 65536)),
  **dict.fromkeys(("gfx1200", "gfx1201"), EmulatedChip("rdna4", 32, 65536)),
  "gfx1010": EmulatedChip("rdna1", 32, 65536, multiplies=False),
  "gfx1030": EmulatedChip("rdna2", 32, 65536, multiplies=False),
  "sm_80": EmulatedChip("nvidia", 32, 166912),
  **dict.fromkeys(("sm_86", "sm_89"), EmulatedChip("nvidia", 32, 101376)),
  "sm_90": EmulatedChip("nvidia", 32, 232448),
  "sm_120": EmulatedChip("nvidia", 32, 101376),
}

def emulated_chip(arch:str) -> EmulatedChip:
  if arch not in EMULATED: raise ValueError(f"EMU does not emulate {arch!r}; DEV=EMU::<arch> with arch one of {', '.join(EMULATED)}")
  return EMULATED[arch]

# Sums of products of 8-bit floats on Ada and Hopper have 13 bits after the binary point: let 2^e be the largest power of two that is not above the
# largest of the products and C. Each product, and C, is cut off at 2^(e - 13), they are added, and the sum is cut off to 13 bits of mantissa
# (MMA-Sim, arXiv 2511.10909; SageAttention2, arXiv 2411.10958, section 3.2). Other chips add products of 8-bit floats as exactly as products of
# 16-bit floats.
SHORT_SUMS = {"sm_89": 13, "sm_90": 13}
# Chips without mma.sync of 8-bit floats (PTX ISA, mma: ".e4m3 requires sm_89 or higher")
WITHOUT_FP8 = ("sm_80", "sm_86")

FLUSHING = ("cdna2",)                                                                          # families whose matrix unit treats denormals as zero
# Families that have v_dot2_f32_f16 and v_dot2_f32_bf16 (LLVM, AMDGPU.td: features dot10-insts and dot12-insts). All of them treat a denormal fp32
# accumulator, and a denormal result, as zero in every mode of the wave (LLVM, SIISelLowering.cpp, performFMACombine). Of 8-bit floats there is
# v_dot4_f32_fp8_fp8 (RDNA4 ISA section 16.10).
DOTS = {"float16": ("cdna2", "cdna3", "cdna4", "rdna3", "rdna4"), "bfloat16": ("cdna4", "rdna3", "rdna4"), "fp8e4m3": ("rdna4",)}

# Families whose conversion of fp32 to 8-bit floats saturates (PTX ISA, cvt: .satfinite). On other chips a number beyond the range becomes NaN, as
# long as the wave's mode has FP16_OVFL = 0 (MI300 ISA and RDNA4 ISA, V_CVT_PK_FP8_F32).
SATURATING = ("nvidia",)

# ***** the layouts *****

class Layout:
  """Layout of a matrix in registers: which row and column of the matrix each element of each lane has."""
  # `spec` is a text like those of einops: "digits of the element's index, digits of the lane -> digits of the row, digits of the column", without
  # the comma. A letter stands for a digit, and the highest digit comes first. The keyword argument with this letter as its name gives the number of
  # values of the digit. For example, with "rp gt -> rg tp" and r=2, p=2, g=8, t=4, element 2r + p of lane 4g + t lies in row 8r + g and column 2t +
  # p. If a digit of the lane is in neither the row nor the column, several lanes hold the same elements.
  def __init__(self, spec:str, **size:int):
    e, l, rows, cols = re.fullmatch(r"(\w*) (\w*) -> (\w*) (\w*)", spec).groups()   # type: ignore[union-attr]
    self.elements, self.rows, self.columns = [math.prod(size[x] for x in factors) for factors in (e, rows, cols)]
    self.split = [size[x] for x in e], [size[x] for x in l]     # sizes of the axes of the register array, before and after the axis of waves
    self.matrix_split = [size[x] for x in rows + cols]
    duplicate = "".join(x for x in l if x not in rows + cols)
    self.duplicated = len(e) + 1 + l.index(duplicate) if duplicate else None          # axis of the duplicates
    kept = l.replace(duplicate, "") if duplicate else l
    place = {x: i for i, x in enumerate(e)} | {x: len(e)+1+i for i, x in enumerate(kept)}
    self.by_rows, self.by_columns = ([len(e), *[place[x] for x in order]] for order in (rows + cols, cols + rows))

  def to_matrices(self, x:Array, unpack:Callable[[Array], Array]) -> Array:
    """Returns each wave's matrix, transposed, (waves, columns, rows), from its registers `x` (registers, threads); `unpack` converts registers to
    matrix elements."""
    e, l = self.split
    # On RDNA3, lanes 16-31 must hold the same elements of A and B as lanes 0-15.
    if self.duplicated is not None:
      axis = self.duplicated - len(e) + 1
      each = np.ascontiguousarray(x).reshape(len(x), -1, *l)
      first, second = each.take(0, axis), each.take(1, axis)
      if (differ := first.view(np.uint64) != second.view(np.uint64)).any():        # as uint64: fewer comparisons
        raise BadOperand("WMMA on RDNA3 needs lanes 16-31 of A and B to repeat lanes 0-15 (RDNA3 ISA section 7.9): they have other values in wave "
                         f"{int(np.argwhere(differ)[0][1])} of the running range of workgroups")
      x, l = first, [n for i, n in enumerate(l) if len(e) + 1 + i != self.duplicated]
    m = unpack(x).reshape(*e, -1, *l).transpose(self.by_columns)
    return np.ascontiguousarray(m).reshape(-1, self.columns, self.rows)

  def add_matrices(self, c:Array, m:Array) -> Array:
    """Returns c + m: c (elements, threads) has this register layout, and m (waves, rows, columns) is one matrix for each wave."""
    order = np.argsort(self.by_rows)
    found = np.ascontiguousarray(m.reshape(-1, *self.matrix_split).transpose(order)).reshape(self.elements, -1)
    return np.add(found, c, out=found)

@dataclass(frozen=True)
class MatrixInstruction:
  """A matrix instruction D = A B + C of one wave."""
  # a is M x K; b is transposed, N x K, so that the product sums over the last axis of both
  a: Layout
  b: Layout
  c: Layout
  dtype: str                       # type of A and B: a key of matrix._WIDEN
  families: tuple[str, ...]
  @property
  def dims(self) -> tuple[int, int, int]:   # (N, M, K), as in the arg of Ops.WMMA
    return self.c.columns, self.c.rows, self.a.columns

def _mfma(M:int, E:int, dtype:str, *families:str) -> MatrixInstruction:
  # Lane h*M + i holds elements E*h to E*h + E - 1 of row i of A (and of column i of B). Groups of four rows of D lie in the groups of M lanes in
  # turn: rows 0 to 3 in the first one, rows 4 to 7 in the second one, and so on.
  groups = 64//M
  ab = Layout("e hi -> i he", e=E, h=groups, i=M)
  return MatrixInstruction(ab, ab, Layout("ab hn -> ahb n", a=M*M//64//4, b=4, h=groups, n=M), dtype, families)

def _blocks(dtype:str, *families:str) -> MatrixInstruction:
  # 16 products of 4 x 4 matrices. Block b lies in lanes 4b to 4b + 3, which the layouts treat like a wave of 4 lanes. Lane i of a block holds row i
  # of A, and column i of B and of D.
  ab = Layout("k i -> i k", k=4, i=4)
  return MatrixInstruction(ab, ab, Layout("r n -> r n", r=4, n=4), dtype, families)

def _wmma3(dtype:str) -> MatrixInstruction:
  # A lane holds all 16 elements of a row of A, and lanes 16-31 repeat lanes 0-15. D has its even rows in lanes 0-15 and its odd rows in lanes 16-31.
  ab = Layout("k di -> i k", k=16, d=2, i=16)
  return MatrixInstruction(ab, ab, Layout("r hn -> rh n", r=8, h=2, n=16), dtype, ("rdna3",))

def _wmma4(dtype:str) -> MatrixInstruction:
  # Lanes 0-15 (h = 0) and lanes 16-31 (h = 1) divide each row of A, each column of B and the rows of D: elements, or rows, 8h to 8h + 7 are in half
  # h.
  ab = Layout("e hi -> i he", e=8, h=2, i=16)
  return MatrixInstruction(ab, ab, Layout("r hn -> hr n", r=8, h=2, n=16), dtype, ("rdna4",))

def _mma(K:int, pack:int, dtype:str) -> MatrixInstruction:
  # The fragments of the PTX ISA, with K elements to sum over and `pack` elements in a register. The lane is 4*g + t. An element of a lane has the
  # index (c, r, p): p counts elements within a register, r the rows g and g + 8, c groups of 4*pack columns. Element (c, r, p) of A lies in row 8*r +
  # g and column (4*c + t)*pack + p. Element (c, p) of B lies in column g and row (4*c + t)*pack + p. Element (r, p) of C lies in row 8*r + g and
  # column 2*t + p.
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
  "mfma_scale_f32_32x32x64_f8f6f4": _mfma(32, 32, "fp8e4m3", "cdna4"),
  "mfma_f32_32x32x16_f16": _mfma(32, 8, "float16", "cdna4"), "mfma_f32_32x32x16_bf16": _mfma(32, 8, "bfloat16", "cdna4"),
  "mfma_f32_16x16x32_f16": _mfma(16, 8, "float16", "cdna4"), "mfma_f32_16x16x32_bf16": _mfma(16, 8, "bfloat16", "cdna4"),
  "wmma_f32_16x16x16_f16_w32": _wmma3("float16"), "wmma_f32_16x16x16_bf16_w32": _wmma3("bfloat16"), "wmma_i32_16x16x16_iu8_w32": _wmma3("int8"),
  "wmma_f32_16x16x16_f16_w32_gfx12": _wmma4("float16"), "wmma_f32_16x16x16_bf16_w32_gfx12": _wmma4("bfloat16"),
  "wmma_f32_16x16x16_fp8_fp8_w32_gfx12": _wmma4("fp8e4m3"),
  "mma_m16n8k16_f16": _mma(16, 2, "float16"), "mma_m16n8k16_bf16": _mma(16, 2, "bfloat16"), "mma_m16n8k8_f16": _mma(8, 2, "float16"),
  "mma_m16n8k8_tf32": _mma(8, 1, "tfloat32"), "mma_m16n8k32_e4m3": _mma(32, 4, "fp8e4m3"),
}
