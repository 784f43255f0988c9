"""Data of NVIDIA's chips: matrix instructions (mma.sync, and on Hopper also wgmma), tables of tile shapes, and cards."""
from __future__ import annotations
from attn.chips.family import Card, Chip, Family
from attn.chips.matrix import MMA
from attn.chips.shapes import (Burden, GradientsUpTo, MlaMmaShape, MlaWgmmaShape, MmaBackwardShape, MmaShape, RatedUpTo, UpTo,
                               WgmmaBackwardShape, WgmmaShape)

# the forward shapes, and the backward shapes for wgmma, were measured on an H200 (docs/nvidia.md)
NVIDIA = Family("nvidia", wave=32, vgprs=255, busy_waves=8, bf16_pack=True, mma=MMA, says_lds=True)

CHIPS_OF_NVIDIA = (
  Chip("sm_80", NVIDIA, 166912, (Card("A100", 108), Card("A30", 56))),
  Chip("sm_86", NVIDIA, 101376, (Card("RTX 30", 84), Card("A10", 72), Card("A40", 84))),
  Chip("sm_89", NVIDIA, 101376, (Card("RTX 40", 128), Card("L4", 58), Card("L40S", 142)), fp8="fp8e4m3", short_sums=True),
  Chip("sm_90", NVIDIA, 232448, (Card("H100", 132), Card("H200", 132), Card("GH200", 132)), wgmma=True, fp8="fp8e4m3", short_sums=True),
  Chip("sm_120", NVIDIA, 101376, (Card("RTX 50", 170),), fp8="fp8e4m3"),
)

# ***** forward *****

# The first row that fits is taken.
FORWARD_MMA = (
  UpTo(64, MmaShape(2, 64), burden=Burden.MASK, large=True),
  UpTo(64, MmaShape(2, 48, parts=3), large=True),
  UpTo(96, MmaShape(2, 64, q_in_lds=True, parts=4), burden=Burden.OPTIONS, large=True),
  UpTo(128, MmaShape(2, 64, q_in_lds=True, parts=4), burden=Burden.PLAIN, large=True),
  UpTo(128, MmaShape(2, 48, q_in_lds=True, parts=3), burden=Burden.MASK, large=True),
  UpTo(128, MmaShape(2, 32, q_in_lds=True), burden=Burden.ALIBI, large=True),
  UpTo(64, MmaShape(1, 64)),
  UpTo(128, MmaShape(1, 32)),
  UpTo(256, MmaShape(1, 32, q_in_lds=True), burden=Burden.ALIBI),
  UpTo(256, MmaShape(1, 16, q_in_lds=True, parts=1)),
)

# The first row that fits is taken. A kernel with few queries is limited by memory, so it has as many keys under way as shared memory has room for.
FEW_QUERIES = (
  UpTo(64, MmaShape(1, 128, stages=3)),
  UpTo(128, MmaShape(1, 64, stages=3)),
  UpTo(256, MmaShape(1, 64, q_in_lds=True, stages=3)),
  UpTo(256, MmaShape(1, 64, stages=2)),
)

# 8-bit rows take half of the shared memory. Times on an H100 at D = 128, of 64 sequences of 4096 keys: 184 us with five stages of 64 keys, for which
# two blocks fit on a multiprocessor; 203 us with three stages, three blocks. In pages of 16: 196 us with five stages, 192 us with two stages of 128
# keys. In pages of 256: 201 and 209 us. One sequence of 4096 keys has too few blocks to fill the chip: 6.2 us with five stages, 6.0 us with four.
FEW_QUERIES_OF_STORED = (
  UpTo(64, MmaShape(1, 128, stages=3)),
  UpTo(128, MmaShape(1, 128, stages=2), pages=64),
  UpTo(128, MmaShape(1, 64, stages=5), large=True),
  UpTo(128, MmaShape(1, 64, stages=4)),
  UpTo(256, MmaShape(1, 64, stages=2)),
)

# q, k and v of 8 bits: a step of a product takes 32 keys. Chosen by the registers that nvcc 13 needs; not measured.
FORWARD_OF_BYTES = (
  UpTo(64, MmaShape(2, 64, parts=1), large=True),
  UpTo(128, MmaShape(2, 64, q_in_lds=True, parts=2), burden=Burden.MASK, large=True, spills_on=("sm_89", "sm_90")),
  UpTo(128, MmaShape(2, 32, q_in_lds=True, parts=1), burden=Burden.MASK, large=True),
  UpTo(64, MmaShape(1, 64, parts=1)),
  UpTo(128, MmaShape(1, 64, parts=2)),
  UpTo(192, MmaShape(1, 32, q_in_lds=True, parts=1)),
  UpTo(256, MmaShape(1, 32, q_in_lds=True, parts=1), spills_on=("sm_89",)),
)
FEW_QUERIES_OF_BYTES = (
  UpTo(128, MmaShape(1, 128, stages=3)),
  UpTo(256, MmaShape(1, 128, stages=2)),
)

# Rates and prologues are fitted to measured times in fp16 with 16 heads: batch 4 with 8192 queries and batch 32 with 1024. Table rows with few_keys
# are fitted to batch 2 with 4096 queries and 77 keys. At D = 64 the rates are fitted to rounds of 0.25 s, with 4096 and 16384 queries: the chip slows
# down in such rounds, and larger tiles lose less.
FORWARD_WGMMA = (
  RatedUpTo(64, WgmmaShape(1, 64), 3, 457, 456, 123),
  RatedUpTo(64, WgmmaShape(1, 80), 3, 457, 456, 100, few_keys=True),
  RatedUpTo(64, WgmmaShape(1, 128), 3, 469, 457, 228),
  RatedUpTo(64, WgmmaShape(2, 64), 2, 502, 494, 127),
  RatedUpTo(64, WgmmaShape(3, 128), 1, 557, 524, 260),
  RatedUpTo(64, WgmmaShape(4, 64), 1, 520, 512, 180),
  RatedUpTo(96, WgmmaShape(1, 64), 3, 472, 452, 199),
  RatedUpTo(96, WgmmaShape(1, 128), 2, 307, 335, 173),
  RatedUpTo(96, WgmmaShape(2, 128), 1, 543, 575, 226),
  RatedUpTo(96, WgmmaShape(3, 112), 1, 707, 707, 367),
  RatedUpTo(128, WgmmaShape(1, 64), 3, 531, 551, 178),
  RatedUpTo(128, WgmmaShape(1, 80), 3, 531, 551, 100, few_keys=True),
  RatedUpTo(128, WgmmaShape(1, 128), 2, 389, 401, 203),
  RatedUpTo(128, WgmmaShape(2, 128), 1, 632, 610, 227),
  RatedUpTo(128, WgmmaShape(3, 64), 1, 696, 627, 261),
  RatedUpTo(128, WgmmaShape(3, 96), 1, 722, 686, 257),
  RatedUpTo(192, WgmmaShape(1, 64), 2, 250, 246, 102),
  RatedUpTo(192, WgmmaShape(2, 64), 1, 738, 716, 259),
  RatedUpTo(192, WgmmaShape(2, 80), 1, 738, 732, 259),     # D=192 with Dv=128: on an H200 up to 1.2 % faster than 64 keys; full not measured
  RatedUpTo(256, WgmmaShape(1, 48), 2, 402, 383, 140),
  RatedUpTo(256, WgmmaShape(1, 80), 2, 402, 383, 100, few_keys=True),
  RatedUpTo(256, WgmmaShape(2, 48), 1, 693, 717, 218),
)

# Rates are those of an H100 in rounds of 0.25 s, with 16 heads of 12288 queries and keys. Not measured: prologues, and rates of tiles with 64 keys at
# D up to 128, which are for terms that take registers.
FORWARD_WGMMA_OF_BYTES = (
  RatedUpTo(64, WgmmaShape(2, 64), 1, 540, 540, 250),
  RatedUpTo(64, WgmmaShape(2, 128), 1, 505, 520, 250),
  RatedUpTo(64, WgmmaShape(3, 96), 1, 616, 601, 250),
  RatedUpTo(64, WgmmaShape(3, 128), 1, 633, 605, 250),
  RatedUpTo(128, WgmmaShape(2, 64, True), 1, 690, 690, 250),
  RatedUpTo(128, WgmmaShape(2, 128, True), 1, 823, 791, 250),
  RatedUpTo(128, WgmmaShape(3, 96), 1, 933, 924, 250),
  RatedUpTo(192, WgmmaShape(2, 64, True), 1, 756, 740, 250),
  RatedUpTo(256, WgmmaShape(2, 64, True), 1, 866, 842, 250),
)

# The first row for which shared memory has room is taken. On an H200, 64 sequences of 4096 keys and 16 heads take 77.3 us with 32 keys and three
# stages, 80.0 with two stages, and 86.9 with 64 keys, each with the fastest number of splits.
LATENT_MMA = (
  UpTo(576, MlaMmaShape(4, 64, 2), beyond=32),
  UpTo(576, MlaMmaShape(4, 32, 2), beyond=32),
  UpTo(576, MlaMmaShape(2, 64, 4), beyond=16),
  UpTo(576, MlaMmaShape(2, 32, 2), beyond=16),
  UpTo(576, MlaMmaShape(1, 32, 2, 3)),
  UpTo(576, MlaMmaShape(1, 64, 4)),
  UpTo(576, MlaMmaShape(1, 32, 2)))

# With 48 keys, 64 sequences of 4096 keys and 128 heads take 181 us on an H100, and 173 us with 64 keys in the same run.
LATENT_WGMMA = (UpTo(576, MlaWgmmaShape(64)),)

# Tiles of latent attention over a cache of 8 bits. With 64 rows and 64 keys, nvcc 13 spills 48 bytes. With 32 rows, 64 sequences of 4096 keys take
# 104 us on an H100, and 115 us with 64 keys and 8 warps.
LATENT_STORED_MMA = (
  UpTo(576, MlaMmaShape(4, 32, 2), beyond=32),
  UpTo(576, MlaMmaShape(2, 32, 2), beyond=16),
  UpTo(576, MlaMmaShape(1, 64, 4)),
  UpTo(576, MlaMmaShape(1, 32, 2)))

# Tiles for k and v of 8 bits, measured on an H100 (docs/tried.md). At D = 192 the tile has the registers that nvcc 13 needs, and was not measured.
# With few queries, a block has one warpgroup, and shared memory has room for two blocks.
FORWARD_WGMMA_STORED = (
  UpTo(64, WgmmaShape(2, 128, keeps_q=True), burden=Burden.MASK),
  UpTo(64, WgmmaShape(2, 128)),
  UpTo(128, WgmmaShape(2, 96, True, keeps_q=True), burden=Burden.MASK),
  UpTo(128, WgmmaShape(2, 96, True)),
  UpTo(192, WgmmaShape(2, 48)),
  UpTo(256, WgmmaShape(2, 48)))
FEW_QUERIES_WGMMA_STORED = (
  UpTo(64, WgmmaShape(1, 128)),
  UpTo(128, WgmmaShape(1, 48, keeps_q=True)),
  UpTo(256, WgmmaShape(1, 48)))

# Tiles for k and v of 8 bits that another kernel has converted, measured on an H200 (docs/tried.md). At D = 192 the tile was not measured.
FORWARD_WGMMA_WIDENED = (
  UpTo(64, WgmmaShape(2, 64)),
  UpTo(128, WgmmaShape(2, 96)),
  UpTo(192, WgmmaShape(2, 64)),
  UpTo(256, WgmmaShape(2, 48)))

# Tiles for q, k and v of 8-bit floats if another kernel has transposed V, measured on an H200 (docs/tried.md).
# With an LSE and a mask, nvcc 13 spills 4 bytes with 3x128.
FORWARD_WGMMA_TURNED = (
  UpTo(64, WgmmaShape(3, 128), burden=Burden.OPTIONS),
  UpTo(128, WgmmaShape(3, 128), burden=Burden.MASK),
  UpTo(128, WgmmaShape(3, 96), burden=Burden.OPTIONS),
  UpTo(192, WgmmaShape(2, 128, True), burden=Burden.OPTIONS),
  UpTo(256, WgmmaShape(2, 96, True), burden=Burden.OPTIONS))

# ***** backward: tiles of mma.sync are chosen by the registers that nvcc 13 needs, and were not measured *****

DQ_MMA = (
  UpTo(64, MmaBackwardShape(2, 32, 32)),
  UpTo(128, MmaBackwardShape(1, 32, 32)),
  UpTo(256, MmaBackwardShape(1, 16, 16)))
DKDV_MMA = (
  UpTo(64, MmaBackwardShape(2, 32, 16), burden=Burden.PLAIN, spills_on=("sm_90",)),
  UpTo(64, MmaBackwardShape(2, 16, 16), burden=Burden.OPTIONS),
  UpTo(64, MmaBackwardShape(1, 32, 32, waves=8)),
  UpTo(128, MmaBackwardShape(1, 32, 16, waves=8), spills_on=("sm_90", "sm_120")),
  UpTo(128, MmaBackwardShape(1, 16, 16, waves=8)),
  UpTo(256, MmaBackwardShape(1, 16, 16, passes=2)))
DBIAS_MMA = (
  UpTo(128, MmaBackwardShape(1, 64, 32)),
  UpTo(256, MmaBackwardShape(1, 16, 16)))

DQ_WGMMA = (
  GradientsUpTo(64, WgmmaBackwardShape(3, 80), varied=False),
  GradientsUpTo(64, WgmmaBackwardShape(3, 64)),
  GradientsUpTo(128, WgmmaBackwardShape(1, 96), few_queries=64),
  GradientsUpTo(128, WgmmaBackwardShape(2, 64)),
  GradientsUpTo(192, WgmmaBackwardShape(2, 48)),
  GradientsUpTo(256, WgmmaBackwardShape(2, 32)))
# Tile shapes of the kernel that computes all gradients at once. Registers suffice for the longer tiles of queries only with D up to 64.
AT_ONCE_WGMMA, LONG_AT_ONCE_WGMMA = WgmmaBackwardShape(2, 64), WgmmaBackwardShape(2, 128)
FEW_QUERIES_WGMMA = WgmmaBackwardShape(1, 64)      # of the kernel for few queries: two blocks share a multiprocessor
# Tile shapes of the kernel of dk and dv whose two warpgroups own the same keys, for head dimensions above 128
HALVES_WGMMA = (GradientsUpTo(192, WgmmaBackwardShape(2, 64)), GradientsUpTo(256, WgmmaBackwardShape(2, 48)))
DKDV_WGMMA = (
  GradientsUpTo(64, WgmmaBackwardShape(2, 96)),
  GradientsUpTo(128, WgmmaBackwardShape(1, 32), few_queries=64),
  GradientsUpTo(128, WgmmaBackwardShape(2, 64)),
  GradientsUpTo(192, WgmmaBackwardShape(2, 48, passes=2)),
  GradientsUpTo(256, WgmmaBackwardShape(2, 32, passes=2)))
