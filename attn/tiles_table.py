from attn.kernels.tiles import Candidate

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
  "cdna3": (Candidate(64, 8, 1, 128, fills=256), Candidate(128, 8, 1, 64, fills=256), Candidate(192, 4, 1, 64), Candidate(256, 4, 1, 32)),
  "cdna4": (Candidate(64, 8, 1, 128, fills=256), Candidate(128, 8, 1, 64, fills=256), Candidate(256, 4, 1, 64)),
  "rdna3": (Candidate(64, 4, 1, 64, fenced=True), Candidate(128, 8, 1, 32, fenced=True), Candidate(192, 4, 1, 16, fenced=True),
            Candidate(256, 4, 1, 16, q_in_lds=True, fenced=True)),
  "rdna4": (Candidate(64, 4, 2, 32, fenced=True), Candidate(128, 4, 1, 64, fenced=True), Candidate(192, 4, 1, 32, fenced=True),
            Candidate(256, 4, 1, 16, fenced=True)),
}

