"""Which kernel and tile a problem gets on a chip, by predicates that carry the reason for a no."""
from __future__ import annotations
from dataclasses import dataclass
from attn.arch import Arch
from attn.fragment import MATRIX
from attn.kernels import forward
from attn.kernels.tiles import Tile, ceildiv
from attn.problem import Problem

@dataclass(frozen=True)
class Candidate:
  """A tile shape worth trying for head dimensions up to `up_to`, beyond which it spills registers (measured: docs/costs.txt has them all)."""
  up_to: int
  waves: int
  q_tiles: int
  block_n: int
  q_in_lds: bool = False
  fenced: bool = False
  matrix: int = 0        # index into fragment.MATRIX of the family and dtype
  fills: int = 0         # workgroups there must be at least, lest a large tile leave compute units idle

# best first; the first one that fits is taken
CANDIDATES: dict[str, tuple[Candidate, ...]] = {
  "cdna3": (Candidate(128, 8, 1, 64, fills=256), Candidate(192, 4, 1, 64), Candidate(256, 4, 1, 32)),
  "cdna4": (Candidate(128, 8, 1, 64, fills=256), Candidate(256, 4, 1, 64)),
  "rdna3": (Candidate(64, 4, 1, 64, fenced=True), Candidate(128, 8, 1, 32, fenced=True), Candidate(192, 4, 1, 16, fenced=True),
            Candidate(256, 4, 1, 16, q_in_lds=True, fenced=True)),
  "rdna4": (Candidate(64, 4, 2, 32, fenced=True), Candidate(128, 4, 1, 64, fenced=True), Candidate(192, 4, 1, 32, fenced=True),
            Candidate(256, 4, 1, 16, fenced=True)),
}

def fits(p:Problem, arch:Arch, tile:Tile, c:Candidate) -> str|None:
  """None if `tile` is for this problem on `arch`, else why not."""
  if max(p.D, p.Dv) > c.up_to: return f"tile {tile} has the registers for D and Dv up to {c.up_to}"
  if (blocks := p.B*p.H*ceildiv(p.Sq, tile.block_m)) < c.fills: return f"tile {tile} makes {blocks} workgroups, {c.fills} are wanted to fill the chip"
  if (need := forward.lds_bytes(p, tile)) > arch.lds: return f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}"
  return None

def choose_tile(p:Problem, arch:Arch) -> Tile:
  """The first candidate tile that fits. Raises NotImplementedError, with every reason, when none does."""
  reasons = []
  for c in CANDIDATES[arch.family]:
    mat = MATRIX[arch.family, p.dtype][c.matrix]
    q_tiles = c.q_tiles if p.Sq > mat.N else 1
    waves = min(c.waves, ceildiv(p.Sq, mat.N*q_tiles))      # no wave without a query
    tile = Tile(mat, waves, q_tiles, c.block_n, c.q_in_lds, c.fenced)
    if (reason := fits(p, arch, tile, c)) is None: return tile
    reasons.append(reason)
  raise NotImplementedError(f"no tile of the forward kernel fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")
