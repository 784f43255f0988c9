"""Which tiles the backward kernels get for a problem on a chip: the first row that fits, of a table for each family of matrix units.

Chosen by the registers that clang 22 needs; nothing of it was measured.
"""
from __future__ import annotations
from attn.chips import Chip
from attn.choose import tuned
from attn.choose.candidates import BackwardCandidate
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import Problem

BOTH = (True, True)

DQ_ON_CDNA = (BackwardCandidate(128, 4, 32), BackwardCandidate(256, 4, 32, fenced=8, sparing=True))
DKDV_ON_CDNA = (BackwardCandidate(64, 4, 32), BackwardCandidate(128, 4, 32, fenced=4),
                BackwardCandidate(256, 4, 32, fenced=8, sparing=True, passes=2))

DQ: dict[str, tuple[BackwardCandidate, ...]] = {
  "cdna2": DQ_ON_CDNA, "cdna3": DQ_ON_CDNA, "cdna4": DQ_ON_CDNA,
  "rdna3": (
    BackwardCandidate(64, 4, 16),
    BackwardCandidate(128, 4, 16, (True, False), fenced=2),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0, sparing=True)),
  "rdna4": (
    BackwardCandidate(64, 4, 32, fenced=8),
    BackwardCandidate(128, 4, 16, fenced=8),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0, sparing=True)),
}
DKDV: dict[str, tuple[BackwardCandidate, ...]] = {
  "cdna2": DKDV_ON_CDNA, "cdna3": DKDV_ON_CDNA, "cdna4": (BackwardCandidate(128, 4, 32), DKDV_ON_CDNA[-1]),
  "rdna3": (
    BackwardCandidate(64, 4, 16),
    BackwardCandidate(128, 4, 16, BOTH, fenced=2),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0, sparing=True, passes=2)),
  "rdna4": (
    BackwardCandidate(64, 4, 32, fenced=8),
    BackwardCandidate(128, 4, 16, BOTH, fenced=2),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0, sparing=True, passes=2)),
}

def choose_backward_tiles(p:Problem, arch:Chip) -> tuple[BackwardTile, BackwardTile]:
  """The tiles of backward_dq and of backward_dkdv. Raises NotImplementedError where there is none."""
  return _chosen("backward_dq", p, arch, DQ, False), _chosen("backward_dkdv", p, arch, DKDV, True)

def backward_tile(p:Problem, arch:Chip, c:BackwardCandidate, keys:bool) -> BackwardTile:
  """The tile that a candidate makes of a problem: with no more waves than its own rows fill, queries or `keys`."""
  mat = arch.matrix[p.dtype][c.matrix]
  waves = max(1, min(c.waves, ceildiv(p.Sk if keys else p.Sq, mat.N)))
  prefetch = 0 if p.dropout_p and c.own_in_lds == BOTH else c.prefetch     # dropout takes the registers of a tile that would be on its way
  return BackwardTile(mat, waves, c.block_n, c.own_in_lds, c.fenced, prefetch, c.sparing, keys, c.passes)

def backward_fits(p:Problem, arch:Chip, tile:BackwardTile, c:BackwardCandidate) -> str|None:
  """None if `tile` is for this problem on `arch`, else why not."""
  if max(p.D, p.Dv) > c.up_to: return f"tile {tile} has the registers for D and Dv up to {c.up_to}"
  if (need := tile.lds_bytes(p)) > arch.lds: return f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}"
  return None

def _chosen(kernel:str, p:Problem, arch:Chip, table:dict[str, tuple[BackwardCandidate, ...]], keys:bool) -> BackwardTile:
  if arch.family not in table: raise NotImplementedError(f"{kernel}: {arch} has none of the matrix units {', '.join(table)}")
  reasons, found = [], tuned.backward_winner(p, arch, kernel)
  for c in (*([found] if found is not None else []), *table[arch.family]):
    if (reason := backward_fits(p, arch, tile := backward_tile(p, arch, c, keys), c)) is None: return tile
    reasons.append(reason)
  raise NotImplementedError(f"no tile of {kernel} fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")
