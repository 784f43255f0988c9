"""The tiles that the NVIDIA kernels may have, measured on an H200: docs/nvidia.md."""
from attn.choose.candidates import Burden, FewQueries, MmaCandidate, WgmmaCandidate

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

# Of shorter and of longer rows of 16 heads, in bf16: what `python -m` ... gives
WGMMA_CANDIDATES = (
  WgmmaCandidate(64, 1, 64, 4, 489, 478, 160),
  WgmmaCandidate(64, 1, 128, 3, 460, 430, 160),
  WgmmaCandidate(64, 2, 64, 2, 552, 546, 166),
  WgmmaCandidate(64, 3, 128, 1, 613, 575, 544),
  WgmmaCandidate(64, 4, 64, 1, 559, 542, 284),
  WgmmaCandidate(96, 1, 64, 3, 421, 403, 160),
  WgmmaCandidate(96, 1, 128, 2, 400, 380, 200),
  WgmmaCandidate(96, 2, 128, 1, 540, 520, 200),
  WgmmaCandidate(96, 3, 112, 1, 640, 600, 200),
  WgmmaCandidate(128, 1, 64, 3, 520, 500, 160),
  WgmmaCandidate(128, 1, 128, 2, 455, 420, 180),
  WgmmaCandidate(128, 2, 128, 1, 636, 618, 180),
  WgmmaCandidate(128, 3, 64, 1, 669, 630, 180),
  WgmmaCandidate(128, 3, 96, 1, 704, 680, 180),
  WgmmaCandidate(192, 1, 64, 2, 396, 360, 180),
  WgmmaCandidate(192, 1, 128, 2, 396, 360, 180),
  WgmmaCandidate(192, 2, 64, 1, 600, 575, 180),
  WgmmaCandidate(256, 1, 48, 2, 415, 400, 180),
  WgmmaCandidate(256, 1, 80, 2, 415, 400, 180),
  WgmmaCandidate(256, 2, 48, 1, 630, 610, 180),
)
