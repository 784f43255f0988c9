"""The families of chips: what all chips with the same matrix unit have in common, one row each.

Sources
  [calc]  AMD Matrix Instruction Calculator (github.com/ROCm/amd_matrix_instruction_calculator): "execution cycles" and "co-execution cycles
          possible" of each MFMA and WMMA of CDNA2, CDNA3, RDNA3 and RDNA4.
  [llvm]  LLVM, lib/Target/AMDGPU/SISchedule.td: passes per MFMA (1 pass = 4 cycles) of gfx940, and of gfx950, which runs the older shapes at half
          rate; AMDGPUBaseInfo.cpp: sizes and granules of register files and LDS, wave slots.
  [isa]   AMD's documents of the instruction sets CDNA2, CDNA3, CDNA4, RDNA3, RDNA4: widths of waves and SIMDs, LDS banks, quarter-rate
          transcendentals; the last word of a buffer's resource descriptor (MI300 ISA 9.1.5, RDNA3 ISA 8.1.5, RDNA4 ISA 9.1.5).
  [cdna4] AMD CDNA 4 white paper: doubled transcendental rate, 160 KB LDS with 256 bytes per clock of reads.
"""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from attn.chips.matrix import LaneSums, Matrix, mfma, wmma

@dataclass(frozen=True)
class Pipes:
  """What instructions cost on one compute unit. Cycles are of one SIMD; bytes per clock are of the LDS that its SIMDs share."""
  simds: int                 # SIMDs per compute unit
  valu: int                  # cycles of a full-rate vector instruction
  trans: int                 # cycles of a transcendental
  lds_read: int              # LDS bytes per clock, reads
  lds_write: int             # LDS bytes per clock, writes
  coissue: bool              # the matrix unit runs beside the vector ALU (CDNA) or on it (RDNA)
  matrix_issue: int          # cycles of vector issue that a matrix instruction takes where it runs beside
  max_waves: int             # wave slots of a SIMD
  lds_granule: int           # bytes
  flops: int                 # dense 16-bit operations per clock of a compute unit
  matrix: Mapping[str, int]  # shape MxNxK, "_2b" for blocks -> cycles

@dataclass(frozen=True, eq=False)   # a family is its row
class Family:
  """A generation of matrix units, with what goes with it in each chip that has one."""
  name: str
  wave: int               # lanes of a wave
  vgprs: int              # vector registers (of one lane) a wave may have
  busy_waves: int         # waves that keep a compute unit busy, beyond which they share it: one for each SIMD (of RDNA, those of one CU), on NVIDIA
                          # two, measured on an H200 (docs/nvidia.md)
  bf16_pack: bool = False # converts two fp32 to bf16 in one instruction
  dual_issue: bool = False   # issues two vector instructions of a wave at once that find their registers in different banks: VOPD, RDNA3 ISA 7.6
  dual_dots: tuple[str, ...] = ()   # input dtypes whose dot products are among them
  matrix: Mapping[str, tuple[Matrix, ...]] = field(default_factory=dict)   # input dtype -> AMD's matrix instructions, the preferred one first
  sums: Mapping[str, LaneSums] = field(default_factory=dict)     # input dtype -> what sums a lane's packed P, or begins to; else dot products do
  descriptor: int = 0     # last word of a buffer's resource descriptor: a raw buffer of 32-bit data whose range check counts bytes
  tables: str = ""        # tinygrad's tables that decode its machine code; "": it has none
  agprs: bool = False     # accumulation registers lie behind a wave's vector registers, in one file
  pipes: Pipes|None = None   # None: there are no bounds from machine code

# CDNA2 and CDNA3 have no dot product of bf16
SUMS = {"float16": LaneSums("mfma_f32_4x4x4f16", "half", dots=True), "bfloat16": LaneSums("mfma_f32_4x4x4bf16_1k", "short")}
SUMS_ON_CDNA4 = {dtype: replace(sums, dots=True) for dtype, sums in SUMS.items()}

# its machine code differs from CDNA3's: what is a bf16 MFMA here is a sparse one there
CDNA2 = Family("cdna2", wave=64, vgprs=512, busy_waves=4, descriptor=0x00027000, agprs=True, matrix={
    "float16": (mfma(32, 8, "f16", "half"), mfma(16, 16, "f16", "half")),
    "bfloat16": (mfma(32, 8, "bf16_1k", "short"), mfma(16, 16, "bf16_1k", "short"))}, sums=SUMS,
  pipes=Pipes(simds=4, valu=4, trans=16, lds_read=128, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, lds_granule=512, flops=1024,
              matrix={"32x32x8": 64, "16x16x16": 32, "4x4x4_16b": 8}))

# the last two shapes of CDNA3 and of CDNA4 are of 8-bit inputs
CDNA3 = Family("cdna3", wave=64, vgprs=512, busy_waves=4, descriptor=0x00027000, tables="cdna", agprs=True, matrix={
    "float16": (mfma(32, 8, "f16", "half"), mfma(16, 16, "f16", "half")),
    "bfloat16": (mfma(32, 8, "bf16_1k", "short"), mfma(16, 16, "bf16_1k", "short"))}, sums=SUMS,
  pipes=Pipes(simds=4, valu=4, trans=16, lds_read=128, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, lds_granule=512, flops=2048, matrix={
    "32x32x8": 32, "16x16x16": 16, "32x32x4_2b": 64, "16x16x4_4b": 32, "4x4x4_16b": 8, "32x32x16": 32, "16x16x32": 16}))

CDNA4 = Family("cdna4", wave=64, vgprs=512, busy_waves=4, bf16_pack=True, descriptor=0x00027000, tables="cdna", agprs=True, matrix={
    "float16": (mfma(32, 16, "_f16", "half", "permlane_swap"), mfma(16, 32, "_f16", "half", "permlane_swap")),
    "bfloat16": (mfma(32, 16, "_bf16", "bfloat", "permlane_swap"), mfma(16, 32, "_bf16", "bfloat", "permlane_swap"))}, sums=SUMS_ON_CDNA4,
  pipes=Pipes(simds=4, valu=4, trans=8, lds_read=256, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, lds_granule=1280, flops=4096, matrix={
    "32x32x16": 32, "16x16x32": 16, "32x32x8": 32, "16x16x16": 16, "32x32x4_2b": 64, "16x16x4_4b": 32, "4x4x4_16b": 8,
    "32x32x64": 64, "16x16x128": 32}))

RDNA3 = Family("rdna3", wave=32, vgprs=256, busy_waves=2, dual_issue=True, dual_dots=("float16",), descriptor=0x31004000, tables="rdna3", matrix={
    "float16": (wmma("f16_w32", "half", 16, 1),), "bfloat16": (wmma("bf16_w32", "short", 16, 1),)},
  pipes=Pipes(simds=2, valu=1, trans=4, lds_read=128, lds_write=128, coissue=False, matrix_issue=0, max_waves=16, lds_granule=1024, flops=512,
              matrix={"16x16x16": 32}))

RDNA4 = Family("rdna4", wave=32, vgprs=256, busy_waves=2, dual_issue=True, descriptor=0x31004000, tables="rdna4", matrix={
    "float16": (wmma("f16_w32_gfx12", "half", 8, 8),), "bfloat16": (wmma("bf16_w32_gfx12", "short", 8, 8),)},
  pipes=Pipes(simds=2, valu=1, trans=4, lds_read=128, lds_write=128, coissue=False, matrix_issue=0, max_waves=16, lds_granule=1024, flops=1024,
              matrix={"16x16x16": 16}))

# no matrix unit: the kernel of plain UOps alone runs on them
OTHER = Family("other", wave=32, vgprs=255, busy_waves=8)
RDNA1 = Family("rdna1", wave=32, vgprs=256, busy_waves=2)
RDNA2 = Family("rdna2", wave=32, vgprs=256, busy_waves=2)

NVIDIA = Family("nvidia", wave=32, vgprs=255, busy_waves=8, bf16_pack=True)   # its instructions: matrix.MMA

FAMILIES: dict[str, Family] = {f.name: f for f in (CDNA2, CDNA3, CDNA4, RDNA1, RDNA2, RDNA3, RDNA4, NVIDIA)}
