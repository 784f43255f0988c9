"""The tiles that the forward kernel may have on each family of matrix units, best first: the first one that fits is taken.

Made by a search over bounds from machine code; none of it was measured. Rewritten by: python -m attn.tune --write
Beside each row the worst over fp16 and bf16, full and causal: bounds on the use of the matrix unit, and waves per SIMD.
"""
from attn.kernels.tiles import Candidate

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
  "cdna3": (
    Candidate(64, 8, 1, 128, fills=256),                        # serial 49.5%, issued 47.5%, overlap 87.0%, waves 2
    Candidate(64, 4, 1, 64),                                    # serial 49.0%, issued 46.5%, overlap 86.0%, waves 3
    Candidate(128, 8, 1, 64, fills=256),                        # serial 65.5%, issued 62.5%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32, fenced=True),                      # serial 65.5%, issued 61.0%, overlap 100.0%, waves 3
    Candidate(192, 8, 1, 64, fenced=True, fills=256),           # serial 74.0%, issued 70.0%, overlap 100.0%, waves 2
    Candidate(192, 4, 1, 32, fenced=True),                      # serial 74.0%, issued 69.0%, overlap 100.0%, waves 2
    Candidate(256, 8, 1, 32, fenced=True, fills=256),           # serial 79.0%, issued 74.0%, overlap 100.0%, waves 2
    Candidate(256, 4, 1, 32),                                   # serial 77.0%, issued 72.0%, overlap 100.0%, waves 1
  ),
  "cdna4": (
    Candidate(64, 8, 1, 128, fills=256),                        # serial 48.0%, issued 44.5%, overlap 83.5%, waves 2
    Candidate(64, 4, 1, 64),                                    # serial 48.0%, issued 43.5%, overlap 82.5%, waves 2
    Candidate(128, 8, 1, 64, fills=256),                        # serial 64.5%, issued 58.5%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32, fenced=True),                      # serial 64.5%, issued 57.0%, overlap 100.0%, waves 3
    Candidate(192, 8, 1, 64, fenced=True, fills=256),           # serial 73.0%, issued 65.5%, overlap 100.0%, waves 2
    Candidate(192, 4, 1, 32, fenced=True),                      # serial 72.5%, issued 64.0%, overlap 100.0%, waves 2
    Candidate(256, 8, 1, 32, fenced=True, fills=256),           # serial 78.5%, issued 69.5%, overlap 100.0%, waves 2
    Candidate(256, 4, 1, 32, fenced=True),                      # serial 75.0%, issued 65.5%, overlap 100.0%, waves 2
  ),
  "rdna3": (
    Candidate(64, 8, 1, 64, fenced=True),                       # serial 74.5%, issued 71.0%, overlap 80.5%, waves 4
    Candidate(128, 8, 1, 32, fenced=True),                      # serial 85.0%, issued 80.5%, overlap 88.5%, waves 4
    Candidate(192, 4, 1, 16, q_in_lds=True, fenced=True),       # serial 89.5%, issued 81.5%, overlap 92.0%, waves 2
    Candidate(256, 4, 1, 16, q_in_lds=True, fenced=True),       # serial 90.5%, issued 82.0%, overlap 92.5%, waves 2
  ),
  "rdna4": (
    Candidate(64, 4, 2, 32, fenced=True),                       # serial 64.0%, issued 62.0%, overlap 72.5%, waves 6
    Candidate(128, 8, 1, 32, fenced=True),                      # serial 78.0%, issued 73.0%, overlap 84.0%, waves 8
    Candidate(192, 8, 1, 32, fenced=True),                      # serial 84.5%, issued 79.0%, overlap 89.0%, waves 4
    Candidate(256, 8, 1, 16, fenced=True),                      # serial 87.5%, issued 81.5%, overlap 91.5%, waves 4
  ),
}
