"""The tiles that the forward kernel may have on each family of matrix units, best first: the first one that fits is taken.

Made by a search by predictions from machine code; none of it was measured. Rewritten by: python -m attn.tune --write
Beside each row the worst over fp16 and bf16, full and causal: the use of the matrix unit as predicted, bounds on it, and waves per SIMD.
Rows with `llvm` are for compilers of that release and older ones, and take the place of those of their class without.
"""
from attn.chips.candidates import Candidate

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
  "cdna2": (
    Candidate(64, 4, 2, 32, fills=256),                                 # serial 67.5%, issued 66.5%, overlap 100.0%, waves 2
    Candidate(64, 4, 1, 64),                                            # serial 68.0%, issued 65.5%, overlap 100.0%, waves 2
    Candidate(64, 8, 1, 64, fills=256, llvm=21),                        # serial 68.0%, issued 66.0%, overlap 100.0%, waves 2
    Candidate(64, 4, 1, 64, llvm=21),                                   # serial 65.0%, issued 63.0%, overlap 100.0%, waves 2
    Candidate(128, 8, 1, 64, fills=256),                                # serial 81.0%, issued 78.5%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32),                                           # serial 81.0%, issued 77.5%, overlap 100.0%, waves 2
    Candidate(128, 8, 1, 64, fills=256, llvm=21),                       # serial 81.0%, issued 78.5%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32, prefetch=0, llvm=21),                      # serial 71.5%, issued 69.0%, overlap 100.0%, waves 2
    Candidate(192, 4, 1, 32),                                           # serial 86.5%, issued 83.0%, overlap 100.0%, waves 2
    Candidate(256, 4, 1, 32, fenced=True),                              # serial 88.0%, issued 84.5%, overlap 100.0%, waves 1
    Candidate(256, 4, 1, 32, llvm=21),                                  # serial 88.0%, issued 84.5%, overlap 100.0%, waves 1
  ),
  "cdna3": (
    Candidate(64, 4, 1, 64, fenced=True),                               # predicted 56.5%, serial 51.0%, issued 48.5%, overlap 94.0%, waves 3
    Candidate(64, 8, 1, 64, fills=256, llvm=21),                        # serial 51.5%, issued 49.0%, overlap 93.5%, waves 2
    Candidate(64, 4, 1, 64, llvm=21),                                   # serial 48.0%, issued 46.0%, overlap 83.0%, waves 2
    Candidate(128, 8, 1, 64, fenced=True, fills=256),                   # predicted 62.0%, serial 67.5%, issued 64.0%, overlap 97.0%, waves 2
    Candidate(128, 4, 1, 32, fenced=True),                              # predicted 57.5%, serial 67.5%, issued 63.5%, overlap 97.0%, waves 2
    Candidate(128, 8, 1, 64, fills=256, llvm=21),                       # serial 68.0%, issued 64.5%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32, prefetch=0, llvm=21),                      # serial 55.5%, issued 53.0%, overlap 100.0%, waves 2
    Candidate(192, 4, 1, 32, fenced=True),                              # predicted 67.0%, serial 76.0%, issued 71.0%, overlap 98.0%, waves 2
    Candidate(256, 4, 1, 32, fenced=True),                              # serial 78.5%, issued 73.0%, overlap 100.0%, waves 1
    Candidate(256, 4, 1, 32, llvm=21),                                  # serial 78.5%, issued 73.0%, overlap 100.0%, waves 1
  ),
  "cdna4": (
    Candidate(64, 4, 1, 64, prefetch=2),                                # predicted 55.5%, serial 52.0%, issued 47.5%, overlap 97.0%, waves 3
    Candidate(64, 8, 1, 64, fills=256, llvm=21),                        # serial 53.0%, issued 48.0%, overlap 98.5%, waves 2
    Candidate(64, 4, 1, 64, llvm=21),                                   # serial 46.5%, issued 42.5%, overlap 78.0%, waves 2
    Candidate(128, 8, 1, 64, fills=256),                                # serial 68.5%, issued 61.5%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32),                                           # serial 69.0%, issued 60.5%, overlap 100.0%, waves 2
    Candidate(128, 8, 1, 64, fills=256, llvm=21),                       # serial 69.0%, issued 62.0%, overlap 100.0%, waves 2
    Candidate(128, 4, 1, 32, prefetch=0, llvm=21),                      # serial 47.5%, issued 44.0%, overlap 81.0%, waves 2
    Candidate(192, 4, 1, 32, fenced=True, prefetch=2),                  # predicted 59.5%, serial 75.5%, issued 66.5%, overlap 99.0%, waves 2
    Candidate(256, 8, 1, 32, fenced=True, prefetch=0, fills=256),       # serial 81.5%, issued 72.5%, overlap 100.0%, waves 2
    Candidate(256, 4, 1, 32, fenced=True, prefetch=0),                  # serial 77.0%, issued 67.0%, overlap 100.0%, waves 2
  ),
  "rdna3": (
    Candidate(64, 8, 1, 32, fenced=True),                               # predicted 78.5%, serial 80.5%, issued 75.5%, overlap 87.0%, waves 8
    Candidate(128, 8, 1, 32, fenced=True),                              # serial 86.5%, issued 81.5%, overlap 90.0%, waves 4
    Candidate(192, 4, 1, 16, q_in_lds=True, fenced=True),               # serial 90.0%, issued 82.0%, overlap 93.0%, waves 2
    Candidate(256, 4, 1, 16, q_in_lds=True, fenced=True, prefetch=0),   # predicted 63.0%, serial 91.5%, issued 83.0%, overlap 93.5%, waves 2
  ),
  "rdna4": (
    Candidate(64, 8, 1, 64, fenced=True),                               # predicted 71.5%, serial 69.5%, issued 65.5%, overlap 80.0%, waves 8
    Candidate(128, 8, 1, 16, fenced=True),                              # predicted 75.5%, serial 79.5%, issued 73.5%, overlap 86.0%, waves 8
    Candidate(192, 8, 1, 32, fenced=True),                              # serial 85.0%, issued 80.0%, overlap 90.0%, waves 4
    Candidate(256, 8, 1, 16),                                           # serial 88.5%, issued 82.0%, overlap 92.0%, waves 4
  ),
}
