"""Data of the family RDNA4, the chips of RX 9000: instructions, caches, LDS, tables of tile shapes, and cards."""
from __future__ import annotations
from dataclasses import replace
from attn.chips.family import Card, Chip, Counters, Family, Pipes
from attn.chips.machine import ASSUMED, Figure
from attn.chips.rdna import DBIAS_IN_PIECES, LATENT_ON_RDNA, PLAIN_DKDV_192_ON_RDNA, caches_of_one_die, wmma
from attn.chips.rdna3 import RDNA3_MACHINE
from attn.chips.shapes import AT_MOST_ONE, BOTH, NO_BIAS, NO_OPTION, BackwardShape, ForwardShape, UpTo

RDNA4_MACHINE = replace(RDNA3_MACHINE, memory=Figure(446, ASSUMED))     # RDNA3's latency in time, in cycles of 2.97 GHz

# Best first: the first row that fits is taken. A search by predictions from machine code made this table (python -m attn.tune --write). No row was
# measured. Beside each row stand the worst figures over fp16 and bf16, full and causal: the predicted use of the matrix unit, bounds on that use
# (docs/isa.md), and waves per SIMD. A row with `llvm` is for compilers of that release and older ones: for them it replaces the rows without `llvm`
# that have the same head dimension.
FORWARD_ON_RDNA4: tuple[UpTo[ForwardShape], ...] = (
  UpTo(64, ForwardShape(8, 1, 64, fenced=True)),                              # predicted 71.5%, serial 69.5%, issued 65.5%, overlap 80.0%, waves 8
  UpTo(128, ForwardShape(8, 1, 16, fenced=True)),                             # predicted 75.5%, serial 79.5%, issued 73.5%, overlap 86.0%, waves 8
  UpTo(192, ForwardShape(8, 1, 32, fenced=True)),                             # serial 85.0%, issued 80.0%, overlap 90.0%, waves 4
  UpTo(256, ForwardShape(8, 1, 16)),                                          # serial 88.5%, issued 82.0%, overlap 92.0%, waves 4
)

# chosen by the registers that clang 22 needs; none of them was measured
DQ_ON_RDNA4 = (
  UpTo(64, BackwardShape(4, 32, fenced=8)),
  UpTo(128, BackwardShape(4, 16, fenced=2), whole=True), UpTo(128, BackwardShape(4, 16, fenced=2, prefetch=0, sparing=True)),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, by_item=True)))
DBIAS_ON_RDNA4 = (*DQ_ON_RDNA4[:2], DBIAS_IN_PIECES, DQ_ON_RDNA4[3])
DKDV_ON_RDNA4 = (
  UpTo(64, BackwardShape(4, 16, fenced=2)),
  UpTo(128, BackwardShape(4, 16, BOTH, fenced=2), whole=True), UpTo(128, BackwardShape(4, 16, BOTH, fenced=2, prefetch=0, sparing=True)),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, passes=2, read_ahead=3), whole=True),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=1, prefetch=0, sparing=True, passes=2)))
PLAIN_DQ_ON_RDNA4 = (
  UpTo(64, BackwardShape(8, 32, prefetch=2)), UpTo(64, BackwardShape(4, 32), options=("bias",)),
  UpTo(128, BackwardShape(4, 32, fenced=2, read_ahead=1), options=NO_BIAS),
  UpTo(128, BackwardShape(4, 16, fenced=2, sparing=True, read_ahead=3), options=("bias",)),
  UpTo(192, BackwardShape(2, 16, BOTH, fenced=2, sparing=True, read_ahead=3), options=(*NO_OPTION, "softcap", "alibi")),
  UpTo(192, BackwardShape(2, 16, BOTH, fenced=4, prefetch=0, read_ahead=3, by_item=True), options=("bias",)),
  UpTo(192, BackwardShape(2, 16, BOTH, fenced=4, prefetch=0, read_ahead=3), options=("dropout_p",)),
  UpTo(256, BackwardShape(2, 16, BOTH, fenced=2, prefetch=0, sparing=True, read_ahead=3), options=AT_MOST_ONE))
PLAIN_DKDV_ON_RDNA4 = (UpTo(64, BackwardShape(4, 16, fenced=2, prefetch=0, read_ahead=1), options=("window",)), PLAIN_DKDV_192_ON_RDNA)

# Tiles for q, k and v of 8-bit floats: the best of about 30 by the time that is predicted from machine code of clang 22, with scales and a causal
# mask. None was measured.
BYTES_ON_RDNA4 = (
  UpTo(64, ForwardShape(8, 1, 32)),
  UpTo(192, ForwardShape(8, 1, 32, fenced=True, prefetch=2)),
  UpTo(256, ForwardShape(4, 1, 32, fenced=True, prefetch=0)),
)

RDNA4 = Family("rdna4", wave=32, vgprs=256, busy_waves=2, dual_issue=True, descriptor=0x31004000, tables="rdna4", matrix={
    "float16": (wmma("f16_w32_gfx12", "half", 8),), "bfloat16": (wmma("bf16_w32_gfx12", "short", 8),),
    "fp8e4m3": (wmma("fp8_fp8_w32_gfx12", "int", 8, size=1),)},
  dots=("float16", "bfloat16", "fp8e4m3"),
  pipes=Pipes(simds=2, valu=1, trans=4, lds_read=128, lds_write=128, coissue=False, matrix_issue=0, max_waves=16, lds_granule=1024, flops=1024,
              matrix={"16x16x16": 16, "16x16x16_fp8": 8}),
  packs_again=True, forward=FORWARD_ON_RDNA4, forward_of_bytes=BYTES_ON_RDNA4, dq=DQ_ON_RDNA4, dkdv=DKDV_ON_RDNA4, dbias=DBIAS_ON_RDNA4,
  plain_forward=(UpTo(192, ForwardShape(8, 1, 32, fenced=True, prefetch=2), options=("bias",)),
                 UpTo(256, ForwardShape(8, 1, 16, prefetch=0), options=("dropout_p",))),
  plain_dq=PLAIN_DQ_ON_RDNA4, plain_dkdv=PLAIN_DKDV_ON_RDNA4, latent=LATENT_ON_RDNA,
  counters=Counters("loadcnt", "storecnt", "dscnt", "kmcnt"), machine=RDNA4_MACHINE)

CHIPS_OF_RDNA4 = (
  Chip("gfx1200", RDNA4, 65536, (Card("RX 9060 XT", 32, 3.13, 320, 512, 66.1),), registers=1536, granule=24, machine=0x48,
       fp8="fp8e4m3", caches=caches_of_one_die(4, 32, 1165)),
  Chip("gfx1201", RDNA4, 65536, (Card("RX 9070 XT", 64, 2.97, 645, 1024, 133.4), Card("RX 9070", 56)), registers=1536, granule=24, machine=0x4e,
       searched=True, fp8="fp8e4m3", caches=caches_of_one_die(8, 64, 2330)),)
