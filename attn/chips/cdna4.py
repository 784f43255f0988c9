"""Data of the family CDNA4, the chips of the MI350 series: instructions, caches, LDS, tables of tile shapes, and cards."""
from __future__ import annotations
from dataclasses import replace
from attn.chips.cdna import COUNTERS_ON_CDNA, DKDV_OF_256_ON_CDNA, DKDV_ON_CDNA, DQ_ON_CDNA, LATENT_ON_CDNA, PLAIN_DQ_128, SUMS, mfma, mfma_of_bytes
from attn.chips.cdna3 import CACHES_OF_CDNA3, CDNA3_MACHINE
from attn.chips.family import Card, Chip, Family, Pipes
from attn.chips.machine import ASSUMED, Figure
from attn.chips.shapes import AT_MOST_ONE, NO_BIAS, NO_OPTION, ONE_OF_ALL, BackwardShape, ForwardShape, ShapeAtOnce, UpTo

CDNA4_MACHINE = replace(CDNA3_MACHINE, transcendental=Figure(12, "cdna4"), matrix=Figure(20, "hazard"), memory=Figure(650, ASSUMED),
                        memory_bytes=Figure(64, ASSUMED), memory_queue=Figure(16, ASSUMED), lds=Figure(48, ASSUMED))

# Best first: the first row that fits is taken. A search by predictions from machine code made this table (python -m attn.tune --write). No row was
# measured. Beside each row stand the worst figures over fp16 and bf16, full and causal: the predicted use of the matrix unit, bounds on that use
# (docs/isa.md), and waves per SIMD. A row with `llvm` is for compilers of that release and older ones: for them it replaces the rows without `llvm`
# that have the same head dimension.
FORWARD_ON_CDNA4: tuple[UpTo[ForwardShape], ...] = (
  UpTo(64, ForwardShape(4, 1, 64, prefetch=2)),                               # predicted 55.5%, serial 52.0%, issued 47.5%, overlap 97.0%, waves 3
  UpTo(64, ForwardShape(8, 1, 64), fills=256, llvm=21),                       # serial 53.0%, issued 48.0%, overlap 98.5%, waves 2
  UpTo(64, ForwardShape(4, 1, 64), llvm=21),                                  # serial 46.5%, issued 42.5%, overlap 78.0%, waves 2
  UpTo(128, ForwardShape(8, 1, 64, fenced=True, prefetch=2), fills=256),      # predicted 53.5%, serial 67.5%, issued 61.0%, overlap 99.0%, waves 2
  UpTo(128, ForwardShape(4, 1, 32, fenced=True, prefetch=2)),                 # predicted 51.0%, serial 67.5%, issued 60.0%, overlap 98.5%, waves 2
  UpTo(128, ForwardShape(8, 1, 64), fills=256, llvm=21),                      # serial 69.0%, issued 62.0%, overlap 100.0%, waves 2
  UpTo(128, ForwardShape(4, 1, 32, prefetch=0), llvm=21),                     # serial 47.5%, issued 44.0%, overlap 81.0%, waves 2
  UpTo(192, ForwardShape(4, 1, 32, fenced=True, prefetch=2)),                 # predicted 59.5%, serial 75.5%, issued 66.5%, overlap 99.0%, waves 2
  UpTo(256, ForwardShape(8, 1, 32, fenced=True, prefetch=0), fills=256),      # serial 81.5%, issued 72.5%, overlap 100.0%, waves 2
  UpTo(256, ForwardShape(4, 1, 32, fenced=True, prefetch=0)),                 # serial 77.0%, issued 67.0%, overlap 100.0%, waves 2
)

# Tiles for q, k and v of 8-bit floats: the best of about 30 by the time that is predicted from machine code of clang 22, with scales and a causal
# mask. None was measured.
BYTES_ON_CDNA4 = (
  UpTo(128, ForwardShape(4, 1, 64, prefetch=2)),
  UpTo(192, ForwardShape(4, 1, 64, fenced=True, prefetch=2)),
  UpTo(256, ForwardShape(4, 1, 64, fenced=True, prefetch=2)),
)

# Tiles of the kernel that computes all gradients at once, chosen as on CDNA3. MI355X, the same problems: D = 64 full 0.75 (1.30), causal 0.40 (0.69),
# and D = 128 full 1.64 (2.49), causal 0.89 (1.33).
AT_ONCE_ON_CDNA4 = {64: (ShapeAtOnce(BackwardShape(4, 32, ahead=8, turning=True)),),
                    128: (ShapeAtOnce(BackwardShape(4, 64, ahead=12, turning=True), ("sinks", "kv_lengths", "softcap")),
                          ShapeAtOnce(BackwardShape(4, 32, ahead=12, turning=True)))}

CDNA4 = Family("cdna4", wave=64, vgprs=512, busy_waves=4, bf16_pack=True, descriptor=0x00027000, llvm=20, tables="cdna", agprs=True, matrix={
    "float16": (mfma(32, 16, "_f16", "half", "permlane_swap", 64), mfma(16, 32, "_f16", "half", "permlane_swap", 64)),
    "bfloat16": (mfma(32, 16, "_bf16", "bfloat", "permlane_swap", 64), mfma(16, 32, "_bf16", "bfloat", "permlane_swap", 64)),
    # scales of 0 select the instruction without scales
    "fp8e4m3": (mfma_of_bytes("mfma_scale_f32_32x32x64_f8f6f4", 64, "int", "0, 0, 0, 0, 0, 0", "permlane_swap", 64),)},
  dots=("float16", "bfloat16"), sums=SUMS,
  pipes=Pipes(simds=4, valu=4, trans=8, lds_read=256, lds_write=128, coissue=True, matrix_issue=4, max_waves=8, lds_granule=1280, flops=4096, matrix={
    "32x32x16": 32, "16x16x32": 16, "32x32x8": 32, "16x16x16": 16, "32x32x4_2b": 64, "16x16x4_4b": 32, "4x4x4_16b": 8,
    "32x32x64": 64, "16x16x128": 32, "32x32x16_fp8": 32, "16x16x32_fp8": 16}),
  apart=("float16", "bfloat16"), loads_to_lds=True, forward=FORWARD_ON_CDNA4, forward_of_bytes=BYTES_ON_CDNA4,
  plain_forward=(UpTo(64, ForwardShape(4, 1, 32, prefetch=2), options=("",)),
                 UpTo(128, ForwardShape(4, 1, 64, fenced=True), options=("dropout_p",)),
                 UpTo(128, ForwardShape(4, 1, 32, prefetch=2), options=("bias",)),
                 UpTo(128, ForwardShape(4, 1, 64, fenced=True, prefetch=2), options=("window", "softcap")),
                 UpTo(256, ForwardShape(4, 1, 64, q_in_lds=True, fenced=True, prefetch=0), options=("window", "dropout_p")),
                 UpTo(256, ForwardShape(4, 1, 64, prefetch=2), options=("softcap",)),
                 UpTo(256, ForwardShape(4, 1, 32, q_in_lds=True, fenced=True, prefetch=2), options=("alibi",))),
  dq=DQ_ON_CDNA, dkdv=(DKDV_ON_CDNA[0], UpTo(128, BackwardShape(4, 32)), *DKDV_OF_256_ON_CDNA),
  plain_dq=(UpTo(64, BackwardShape(4, 64, prefetch=2), options=AT_MOST_ONE), PLAIN_DQ_128,
            UpTo(128, BackwardShape(4, 64, prefetch=2), options=ONE_OF_ALL),
            UpTo(192, BackwardShape(4, 32, fenced=8, prefetch=2, read_ahead=3), options=(*NO_OPTION, "softcap", "alibi")),
            UpTo(192, BackwardShape(4, 32, prefetch=2, read_ahead=3), options=("bias", "dropout_p")),
            UpTo(256, BackwardShape(4, 32, fenced=8, prefetch=2, read_ahead=3), options=(*NO_OPTION, *NO_BIAS)),
            UpTo(256, BackwardShape(4, 32, fenced=8, sparing=True, read_ahead=1), options=("bias",))),
  plain_dkdv=(UpTo(64, BackwardShape(4, 32, fenced=4, prefetch=2), options=("alibi",)),
              UpTo(128, BackwardShape(4, 64, fenced=8, prefetch=2), options=(*NO_OPTION, *NO_BIAS)),
              UpTo(192, BackwardShape(4, 32, fenced=8, prefetch=2, sparing=True, read_ahead=3), options=("",)),
              UpTo(192, BackwardShape(4, 32, fenced=4, sparing=True, read_ahead=1), options=("window",))),
  latent=LATENT_ON_CDNA, at_once=AT_ONCE_ON_CDNA4,
  counters=COUNTERS_ON_CDNA, machine=CDNA4_MACHINE)

CHIPS_OF_CDNA4 = (
  Chip("gfx950", CDNA4, 163840, (Card("MI350X", 256, 2.2, 8000, 16384, 1473), Card("MI355X", 256, 2.4, 8000, 16384, 1610)),
       machine=0x4f, searched=True, fp8="fp8e4m3", caches=CACHES_OF_CDNA3),)
