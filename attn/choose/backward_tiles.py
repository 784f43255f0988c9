"""Which tiles the backward kernels get for a problem on a chip: the first row that fits, of a table for each family of matrix units.

Chosen by the registers that clang 22 needs; nothing of it was measured.
"""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips import Chip
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import Problem

@dataclass(frozen=True)
class BackwardCandidate:
  """A tile of a backward kernel for head dimensions up to `up_to`; the fields are those of BackwardTile."""
  up_to: int
  waves: int
  block_n: int
  own_in_lds: tuple[bool, bool] = (False, False)
  fenced: int = 0
  prefetch: int = 1
  matrix: int = 0        # index into Chip.matrix of the dtype
  passes: int = 1

BOTH = (True, True)

DQ_ON_CDNA = (BackwardCandidate(128, 4, 32), BackwardCandidate(256, 4, 32, fenced=8))
DKDV_ON_CDNA = (BackwardCandidate(128, 4, 32), BackwardCandidate(256, 4, 32, fenced=8, passes=2))

DQ: dict[str, tuple[BackwardCandidate, ...]] = {
  "cdna2": DQ_ON_CDNA, "cdna3": DQ_ON_CDNA, "cdna4": DQ_ON_CDNA,
  "rdna3": (
    BackwardCandidate(64, 4, 16),
    BackwardCandidate(128, 4, 16, (True, False), fenced=2),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0)),
  "rdna4": (
    BackwardCandidate(64, 4, 32, fenced=8),
    BackwardCandidate(128, 4, 16, fenced=8),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0)),
}
DKDV: dict[str, tuple[BackwardCandidate, ...]] = {
  "cdna2": DKDV_ON_CDNA, "cdna3": DKDV_ON_CDNA, "cdna4": DKDV_ON_CDNA,
  "rdna3": (
    BackwardCandidate(64, 4, 16),
    BackwardCandidate(128, 4, 16, BOTH, fenced=2),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0, passes=2)),
  "rdna4": (
    BackwardCandidate(64, 4, 32, fenced=8),
    BackwardCandidate(128, 4, 16, BOTH, fenced=2),
    BackwardCandidate(256, 2, 16, BOTH, fenced=2, prefetch=0, passes=2)),
}

def choose_backward_tiles(p:Problem, arch:Chip) -> tuple[BackwardTile, BackwardTile]:
  """The tiles of backward_dq and of backward_dkdv. Raises NotImplementedError where there is none."""
  return _chosen("backward_dq", p, arch, DQ, p.Sq, False), _chosen("backward_dkdv", p, arch, DKDV, p.Sk, True)

def _chosen(kernel:str, p:Problem, arch:Chip, table:dict[str, tuple[BackwardCandidate, ...]], rows:int, keys:bool) -> BackwardTile:
  """`rows`: how many of its own a workgroup may have at most, for which it has no more waves than they fill."""
  if arch.family not in table: raise NotImplementedError(f"{kernel}: {arch} has none of the matrix units {', '.join(table)}")
  reasons = []
  for c in table[arch.family]:
    mat = arch.matrix[p.dtype][c.matrix]
    prefetch = 0 if p.dropout_p and c.own_in_lds == BOTH else c.prefetch     # dropout takes the registers of a tile that would be on its way
    tile = BackwardTile(mat, max(1, min(c.waves, ceildiv(rows, mat.N))), c.block_n, c.own_in_lds, c.fenced, prefetch, keys, c.passes)
    if max(p.D, p.Dv) > c.up_to: reasons.append(f"tile {tile} has the registers for D and Dv up to {c.up_to}")
    elif (need := tile.lds_bytes(p)) > arch.lds: reasons.append(f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}")
    else: return tile
  raise NotImplementedError(f"no tile of {kernel} fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")
