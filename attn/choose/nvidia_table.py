"""The tiles that the NVIDIA kernels may have, measured on an H200: docs/nvidia.md."""
from attn.chips.candidates import Burden, FewQueries, MmaCandidate, WgmmaCandidate

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
