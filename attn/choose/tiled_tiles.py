"""Which tile the kernel of plain UOps gets.

The rows for NVIDIA were measured on an H200, those of one thread on a CPU (docs/plain.md). Other chips take the first that their local memory has
room for.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.choose.splits import workgroups
from attn.kernels.tiled import LONG_SUM, MAX_WIDTH, TiledTile
from attn.problem import Problem

@dataclass(frozen=True)
class TiledCandidate:
  """A tile for head dimensions up to `up_to`, and for grids of at least `fills` workgroups per compute unit."""
  up_to: int
  tile: TiledTile
  fills: float = 0.0

SHORTEST_PART = 16     # of a sum in parts, which would take longer

def threads(down:int, across:int, keys:int, queries:int, depth:int, values:int, keeps_q:bool=True, ahead:bool=False) -> TiledTile:
  return TiledTile(down, across, keys, queries, depth, values, keeps_q, ahead)

# the first one that fits
TILED: tuple[TiledCandidate, ...] = (
  TiledCandidate(64, threads(8, 16, 8, 8, 64, 64, ahead=True), fills=1),
  TiledCandidate(64, threads(16, 16, 4, 4, 64, 64)),
  TiledCandidate(128, threads(16, 16, 8, 8, 32, 32, ahead=True), fills=1),
  TiledCandidate(128, threads(16, 16, 8, 4, 64, 32)),
  TiledCandidate(MAX_WIDTH, threads(32, 16, 4, 4, 32, 16, ahead=True)),
  TiledCandidate(MAX_WIDTH, threads(32, 16, 8, 4, 16, 16, keeps_q=False, ahead=True)),
  TiledCandidate(128, threads(16, 16, 4, 4, 32, 32, keeps_q=False)),
  TiledCandidate(MAX_WIDTH, threads(16, 16, 4, 4, 16, 16, keeps_q=False)),
  TiledCandidate(256, threads(16, 16, 4, 4, 16, 8, keeps_q=False)),
  TiledCandidate(MAX_WIDTH, threads(16, 8, 4, 4, 16, 8, keeps_q=False)))

ALONE = TiledTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # of one thread: the whole of Q^T is its own

def summed_together(D:int) -> int:
  """The elements of a row whose products one thread sums before it adds that to a score: all, or of a long row a part that divides it."""
  part = max(n for n in range(1, LONG_SUM + 1) if D % n == 0)
  return D if D <= LONG_SUM or part < SHORTEST_PART else part

def tiled_tile(p:Problem, arch:Chip) -> TiledTile:
  """The first candidate that fits. Raises NotImplementedError where local memory has no room for any."""
  if not arch.lds: return replace(ALONE, depth=summed_together(p.D))
  for c in TILED:
    if max(p.D, p.Dv) > c.up_to or c.tile.lds_bytes(p) > arch.lds: continue
    if c.fills and workgroups(p, c.tile) < c.fills*arch.cus: continue
    return c.tile
  raise NotImplementedError(f"no tile of tiled fits D={p.D}, Dv={p.Dv} in the {arch.lds} bytes of local memory of {arch}")
