"""Data of the family CDNA2, the chips of the MI200 series: instructions, caches, LDS, tables of tile shapes, and cards."""
from __future__ import annotations
from dataclasses import replace
from attn.chips.cdna import COUNTERS_ON_CDNA, DKDV_ON_CDNA, DQ_ON_CDNA, LATENT_ON_CDNA, SUMS, mfma
from attn.chips.cdna3 import CDNA3_MACHINE
from attn.chips.family import Caches, Card, Chip, Family, Pipes
from attn.chips.machine import ASSUMED, Figure
from attn.chips.shapes import BackwardShape, ForwardShape, UpTo

CDNA2_MACHINE = replace(CDNA3_MACHINE, memory=Figure(650, ASSUMED), memory_bytes=Figure(64, ASSUMED), memory_queue=Figure(16, ASSUMED),
                        packed_alone=Figure(1, ASSUMED), packed_drain=Figure(8, ASSUMED), lds=Figure(48, ASSUMED))

# Best first: the first row that fits is taken. A search by predictions from machine code made this table (python -m attn.tune --write). No row was
# measured. Beside each row stand the worst figures over fp16 and bf16, full and causal: the predicted use of the matrix unit, bounds on that use
# (docs/isa.md), and waves per SIMD. A row with `llvm` is for compilers of that release and older ones: for them it replaces the rows without `llvm`
# that have the same head dimension.
FORWARD_ON_CDNA2: tuple[UpTo[ForwardShape], ...] = (
  UpTo(64, ForwardShape(4, 2, 32), fills=256),                                # serial 67.5%, issued 66.5%, overlap 100.0%, waves 2
  UpTo(64, ForwardShape(4, 1, 64)),                                           # serial 68.0%, issued 65.5%, overlap 100.0%, waves 2
  UpTo(64, ForwardShape(8, 1, 64), fills=256, llvm=21),                       # serial 68.0%, issued 66.0%, overlap 100.0%, waves 2
  UpTo(64, ForwardShape(4, 1, 64), llvm=21),                                  # serial 65.0%, issued 63.0%, overlap 100.0%, waves 2
  UpTo(128, ForwardShape(8, 1, 64, fenced=True), fills=256),                  # predicted 75.0%, serial 83.0%, issued 80.5%, overlap 100.0%, waves 2
  UpTo(128, ForwardShape(4, 1, 32)),                                          # serial 81.0%, issued 77.5%, overlap 100.0%, waves 2
  UpTo(128, ForwardShape(8, 1, 64), fills=256, llvm=21),                      # serial 81.0%, issued 78.5%, overlap 100.0%, waves 2
  UpTo(128, ForwardShape(4, 1, 32, prefetch=0), llvm=21),                     # serial 71.5%, issued 69.0%, overlap 100.0%, waves 2
  UpTo(192, ForwardShape(4, 1, 32)),                                          # serial 86.5%, issued 83.0%, overlap 100.0%, waves 2
  UpTo(256, ForwardShape(4, 1, 32, fenced=True)),                             # serial 88.0%, issued 84.5%, overlap 100.0%, waves 1
  UpTo(256, ForwardShape(4, 1, 32), llvm=21),                                 # serial 88.0%, issued 84.5%, overlap 100.0%, waves 1
)

# `tables` is not "cdna": a bf16 MFMA of CDNA2 has the machine code that on CDNA3 is a sparse MFMA
CDNA2 = Family("cdna2", wave=64, vgprs=512, busy_waves=4, descriptor=0x00027000, agprs=True, matrix={
    "float16": (mfma(32, 8, "f16", "half"), mfma(16, 16, "f16", "half")),
    "bfloat16": (mfma(32, 8, "bf16_1k", "short"), mfma(16, 16, "bf16_1k", "short"))}, dots=("float16",), sums=SUMS,
  pipes=Pipes(simds=4, valu=4, trans=16, lds_read=128, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, lds_granule=512, flops=1024,
              matrix={"32x32x8": 64, "16x16x16": 32, "4x4x4_16b": 8}),
  apart=("float16", "bfloat16"), forward=FORWARD_ON_CDNA2,
  plain_forward=(UpTo(192, ForwardShape(4, 1, 32, fenced=True), options=("window",)),), dq=DQ_ON_CDNA, dkdv=DKDV_ON_CDNA,
  plain_dq=(UpTo(64, BackwardShape(8, 64, fenced=8, prefetch=2)), UpTo(128, BackwardShape(8, 32, fenced=2)),
            UpTo(128, BackwardShape(4, 64, fenced=2), options=("alibi",)),
            UpTo(128, BackwardShape(4, 32, fenced=2, prefetch=0, read_ahead=3), options=("dropout_p",)),
            UpTo(192, BackwardShape(4, 32, sparing=True), options=("bias",)),
            UpTo(256, BackwardShape(4, 32, fenced=2, sparing=True, read_ahead=1), options=("",))), latent=LATENT_ON_CDNA,
  counters=COUNTERS_ON_CDNA, machine=CDNA2_MACHINE)

CHIPS_OF_CDNA2 = (
  Chip("gfx90a", CDNA2, 65536, (Card("MI250X", 110, 1.7, 1638, 4096), Card("MI250", 104, 1.7, 1638, 4096), Card("MI210", 104, 1.7, 1638, 4096)),
       machine=0x3f, searched=True, caches=Caches(1, 8 << 20)),)
