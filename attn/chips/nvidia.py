"""NVIDIA's chips, whose matrix instructions are mma.sync and, on Hopper, wgmma. The tiles were measured on an H200: docs/nvidia.md."""
from __future__ import annotations
from attn.chips.candidates import (Burden, FewQueries, MlaMmaCandidate, MmaBackwardCandidate, MmaCandidate, WgmmaBackwardCandidate,
                                   WgmmaCandidate)
from attn.chips.family import Card, Chip, Family
from attn.chips.matrix import MMA

NVIDIA = Family("nvidia", wave=32, vgprs=255, busy_waves=8, bf16_pack=True, mma=MMA, says_lds=True)

CHIPS_OF_NVIDIA = (
  Chip("sm_80", NVIDIA, 166912, (Card("A100", 108), Card("A30", 56))),
  Chip("sm_86", NVIDIA, 101376, (Card("RTX 30", 84), Card("A10", 72), Card("A40", 84))),
  Chip("sm_89", NVIDIA, 101376, (Card("RTX 40", 128), Card("L4", 58), Card("L40S", 142))),
  Chip("sm_90", NVIDIA, 232448, (Card("H100", 132), Card("H200", 132), Card("GH200", 132)), wgmma=True),
  Chip("sm_120", NVIDIA, 101376, (Card("RTX 50", 170),)),
)

# ***** forward *****

# The first one that fits is taken.
MMA_CANDIDATES = (
  MmaCandidate(64, 2, 64, False, Burden.MASK, large=True),
  MmaCandidate(64, 2, 48, False, large=True, parts=3),
  MmaCandidate(96, 2, 64, True, Burden.OPTIONS, large=True),
  MmaCandidate(128, 2, 64, True, Burden.PLAIN, large=True, parts=4),
  MmaCandidate(128, 2, 48, True, Burden.MASK, large=True, parts=3),
  MmaCandidate(128, 2, 32, True, Burden.ALIBI, large=True),
  MmaCandidate(64, 1, 64, False),
  MmaCandidate(128, 1, 32, False),
  MmaCandidate(256, 1, 32, True, Burden.ALIBI),
  MmaCandidate(256, 1, 16, True, parts=1),
)

# The first one that fits is taken: it waits for memory, so as much as there is room for is on its way.
FEW_QUERIES = (
  FewQueries(64, 128, 3),
  FewQueries(128, 64, 3),
  FewQueries(256, 64, 3),
  FewQueries(256, 64, 2),
)

# Rates and prologues are fitted to the times of 4 x 8192 and 32 x 1024 rows of 16 heads in fp16, those of few keys to 2 x 4096 queries and 77 keys;
# at D = 64 rates to rounds of 0.25 s, of 4096 and 16384 rows, in which the chip slows down and larger tiles lose less.
WGMMA_CANDIDATES = (
  WgmmaCandidate(64, 1, 64, 3, 457, 456, 123),
  WgmmaCandidate(64, 1, 80, 3, 457, 456, 100, few=True),
  WgmmaCandidate(64, 1, 128, 3, 469, 457, 228),
  WgmmaCandidate(64, 2, 64, 2, 502, 494, 127),
  WgmmaCandidate(64, 3, 128, 1, 557, 524, 260),
  WgmmaCandidate(64, 4, 64, 1, 520, 512, 180),
  WgmmaCandidate(96, 1, 64, 3, 472, 452, 199),
  WgmmaCandidate(96, 1, 128, 2, 307, 335, 173),
  WgmmaCandidate(96, 2, 128, 1, 543, 575, 226),
  WgmmaCandidate(96, 3, 112, 1, 707, 707, 367),
  WgmmaCandidate(128, 1, 64, 3, 531, 551, 178),
  WgmmaCandidate(128, 1, 80, 3, 531, 551, 100, few=True),
  WgmmaCandidate(128, 1, 128, 2, 389, 401, 203),
  WgmmaCandidate(128, 2, 128, 1, 632, 610, 227),
  WgmmaCandidate(128, 3, 64, 1, 696, 627, 261),
  WgmmaCandidate(128, 3, 96, 1, 722, 686, 257),
  WgmmaCandidate(192, 1, 64, 2, 250, 246, 102),
  WgmmaCandidate(192, 2, 64, 1, 738, 716, 259),
  WgmmaCandidate(256, 1, 48, 2, 402, 383, 140),
  WgmmaCandidate(256, 1, 80, 2, 402, 383, 100, few=True),
  WgmmaCandidate(256, 2, 48, 1, 693, 717, 218),
)

# the first that shared memory has room for
MLA_MMA_CANDIDATES = (MlaMmaCandidate(32, 4, 64, 2), MlaMmaCandidate(32, 4, 32, 2), MlaMmaCandidate(16, 2, 64, 4), MlaMmaCandidate(16, 2, 32, 2),
                      MlaMmaCandidate(0, 1, 64, 4), MlaMmaCandidate(0, 1, 32, 2))

# ***** backward: of mma.sync chosen by the registers that nvcc 13 needs, and not measured *****

DQ_MMA = (
  MmaBackwardCandidate(64, 2, 32, 32),
  MmaBackwardCandidate(128, 1, 32, 32),
  MmaBackwardCandidate(256, 1, 16, 16))
DKDV_MMA = (
  MmaBackwardCandidate(64, 2, 32, 16, burden=Burden.OPTIONS, spills_on=("sm_120",)),
  MmaBackwardCandidate(64, 1, 32, 32, waves=8),
  MmaBackwardCandidate(128, 1, 32, 16),
  MmaBackwardCandidate(256, 1, 16, 16, passes=2))
DBIAS_MMA = (
  MmaBackwardCandidate(128, 1, 64, 32),
  MmaBackwardCandidate(256, 1, 16, 16))

DQ_WGMMA = (WgmmaBackwardCandidate(64, 3, 80, varied=False), WgmmaBackwardCandidate(64, 3, 64),
            WgmmaBackwardCandidate(128, 1, 96, few=64), WgmmaBackwardCandidate(128, 2, 64),
            WgmmaBackwardCandidate(192, 2, 48), WgmmaBackwardCandidate(256, 2, 32))
DKDV_WGMMA = (WgmmaBackwardCandidate(64, 2, 96), WgmmaBackwardCandidate(128, 1, 32, few=64), WgmmaBackwardCandidate(128, 2, 64),
              WgmmaBackwardCandidate(192, 2, 48, passes=2), WgmmaBackwardCandidate(256, 2, 32, passes=2))
