"""Which tile the kernel of plain UOps gets.

The rows for NVIDIA were measured on an H200, those of one thread on a CPU (docs/plain.md). Other chips take the first that their local memory has
room for.
"""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips import Chip
from attn.choose.splits import workgroups
from attn.kernels.parts.rectangle import MAX_WIDTH
from attn.kernels.tiled import TiledTile
from attn.problem import Problem

@dataclass(frozen=True)
class TiledCandidate:
  """A tile for head dimensions up to `up_to`, and for grids of at least `fills` workgroups per compute unit."""
  up_to: int
  tile: TiledTile
  fills: float = 0.0

# the first one that fits
TILED: tuple[TiledCandidate, ...] = (
  TiledCandidate(64, TiledTile(8, 16, 8, 8, 64, 64, ahead=True), fills=1),
  TiledCandidate(64, TiledTile(16, 16, 4, 4, 64, 64)),
  TiledCandidate(128, TiledTile(16, 16, 8, 8, 32, 32, ahead=True), fills=1),
  TiledCandidate(128, TiledTile(16, 16, 8, 4, 64, 32)),
  TiledCandidate(MAX_WIDTH, TiledTile(32, 16, 4, 4, 32, 16, ahead=True)),
  TiledCandidate(MAX_WIDTH, TiledTile(32, 16, 8, 4, 16, 16, keeps_own=False, ahead=True)),
  TiledCandidate(128, TiledTile(16, 16, 4, 4, 32, 32, keeps_own=False)),
  TiledCandidate(MAX_WIDTH, TiledTile(16, 16, 4, 4, 16, 16, keeps_own=False)),
  TiledCandidate(256, TiledTile(16, 16, 4, 4, 16, 8, keeps_own=False)),
  TiledCandidate(MAX_WIDTH, TiledTile(16, 8, 4, 4, 16, 8, keeps_own=False)))

ALONE = TiledTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # of one thread

def tiled_tile(p:Problem, arch:Chip) -> TiledTile:
  """The first candidate that fits. Raises NotImplementedError where local memory has no room for any."""
  if not arch.lds: return ALONE
  for c in TILED:
    if max(p.D, p.Dv) > c.up_to or c.tile.lds_bytes(p) > arch.lds: continue
    if c.fills and workgroups(p, c.tile) < c.fills*arch.cus: continue
    return c.tile
  raise NotImplementedError(f"no tile of tiled fits D={p.D}, Dv={p.Dv} in the {arch.lds} bytes of local memory of {arch}")
