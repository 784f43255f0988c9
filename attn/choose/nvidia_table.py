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

# Their rates are those of B = 4, H = 16, S = 8192 in fp16.
WGMMA_CANDIDATES = (
  WgmmaCandidate(64, 1, 64, 3, 439, 424),
  WgmmaCandidate(64, 1, 128, 2, 438, 415),
  WgmmaCandidate(64, 2, 64, 2, 494, 474),
  WgmmaCandidate(64, 3, 128, 1, 532, 483),
  WgmmaCandidate(64, 4, 64, 1, 508, 475),
  WgmmaCandidate(96, 1, 64, 2, 421, 403),
  WgmmaCandidate(96, 2, 128, 1, 495, 483),
  WgmmaCandidate(96, 3, 80, 1, 560, 509),
  WgmmaCandidate(96, 3, 96, 1, 547, 531),
  WgmmaCandidate(128, 1, 64, 2, 508, 490),
  WgmmaCandidate(128, 1, 128, 1, 441, 403),
  WgmmaCandidate(128, 2, 128, 1, 560, 542),
  WgmmaCandidate(128, 3, 64, 1, 593, 577),
  WgmmaCandidate(128, 3, 80, 1, 645, 583),
  WgmmaCandidate(192, 1, 64, 1, 386, 348),
  WgmmaCandidate(192, 2, 64, 1, 584, 555),
  WgmmaCandidate(256, 1, 48, 1, 405, 391),
  WgmmaCandidate(256, 2, 48, 1, 613, 592),
)
