"""What an instruction costs, as data: per architecture, the pipes of a compute unit and the cycles of each matrix instruction.

Sources
  [calc]  AMD Matrix Instruction Calculator (github.com/ROCm/amd_matrix_instruction_calculator): "execution cycles" and "co-execution cycles
          possible" of each MFMA and WMMA of CDNA3, RDNA3 and RDNA4.
  [llvm]  LLVM, lib/Target/AMDGPU/SISchedule.td: passes per MFMA (1 pass = 4 cycles) of gfx940, and of gfx950, which runs the older shapes at half
          rate; AMDGPUBaseInfo.cpp: sizes and granules of register files and LDS, wave slots.
  [isa]   AMD's documents of the instruction sets CDNA3, CDNA4, RDNA3, RDNA4: widths of waves and SIMDs, LDS banks, quarter-rate transcendentals.
  [cdna4] AMD CDNA 4 white paper: doubled transcendental rate, 160 KB LDS with 256 bytes per clock of reads.
"""
from __future__ import annotations
from dataclasses import dataclass
from collections.abc import Mapping

@dataclass(frozen=True)
class Pipes:
  """One compute unit. Cycles are of one SIMD; bytes per clock are of the LDS that its SIMDs share."""
  wave: int                  # lanes of a wave
  simds: int                 # SIMDs per compute unit
  valu: int                  # cycles of a full-rate vector instruction
  trans: int                 # cycles of a transcendental
  lds_read: int              # LDS bytes per clock, reads
  lds_write: int             # LDS bytes per clock, writes
  coissue: bool              # the matrix unit runs beside the vector ALU (CDNA) or on it (RDNA)
  matrix_issue: int          # cycles of vector issue that a matrix instruction takes where it runs beside
  max_waves: int             # wave slots of a SIMD
  registers: int             # vector registers per lane of a SIMD
  register_granule: int
  lds_bytes: int             # LDS that the waves of a compute unit may share; one workgroup may have all of it but for RDNA's 64 KB limit
  lds_granule: int
  flops: int                 # dense 16-bit operations per clock of a compute unit
  matrix: Mapping[str, int]  # shape MxNxK, "_2b" for blocks -> cycles

# the last two shapes of each CDNA are of 8-bit inputs
_CDNA3 = Pipes(wave=64, simds=4, valu=4, trans=16, lds_read=128, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, registers=512,
               register_granule=8, lds_bytes=65536, lds_granule=512, flops=2048, matrix={
                 "32x32x8": 32, "16x16x16": 16, "32x32x4_2b": 64, "16x16x4_4b": 32, "4x4x4_16b": 8, "32x32x16": 32, "16x16x32": 16})
_CDNA4 = Pipes(wave=64, simds=4, valu=4, trans=8, lds_read=256, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, registers=512,
               register_granule=8, lds_bytes=163840, lds_granule=1280, flops=4096, matrix={
                 "32x32x16": 32, "16x16x32": 16, "32x32x8": 32, "16x16x16": 16, "32x32x4_2b": 64, "16x16x4_4b": 32, "4x4x4_16b": 8,
                 "32x32x64": 64, "16x16x128": 32})
_RDNA3 = Pipes(wave=32, simds=2, valu=1, trans=4, lds_read=128, lds_write=128, coissue=False, matrix_issue=0, max_waves=16, registers=1536,
               register_granule=24, lds_bytes=65536, lds_granule=1024, flops=512, matrix={"16x16x16": 32})
_RDNA4 = Pipes(wave=32, simds=2, valu=1, trans=4, lds_read=128, lds_write=128, coissue=False, matrix_issue=0, max_waves=16, registers=1536,
               register_granule=24, lds_bytes=65536, lds_granule=1024, flops=1024, matrix={"16x16x16": 16})

MODEL: dict[str, Pipes] = {"gfx942": _CDNA3, "gfx950": _CDNA4, "gfx1100": _RDNA3, "gfx1101": _RDNA3, "gfx1151": _RDNA3,
                           "gfx1200": _RDNA4, "gfx1201": _RDNA4}

def pipes(arch:str) -> Pipes:
  if (found:=MODEL.get(arch)) is None: raise ValueError(f"no machine model for {arch!r}: known are {', '.join(MODEL)}")
  return found
