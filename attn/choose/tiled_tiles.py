"""Which tiles the kernels of plain UOps get.

The rows for NVIDIA were measured on an H200, those of one thread on a CPU (docs/plain.md). Other chips take the first that their local memory has
room for.
"""
from __future__ import annotations
import itertools
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.cache import tuned
from attn.choose.splits import workgroups
from attn.cache.tuned import AnyTiledTile
from attn.kernels.parts.rectangle import MAX_WIDTH
from attn.kernels.tiles.plain import LONG_SUM, TiledBackwardTile, TiledTile
from attn.problem import Problem

@dataclass(frozen=True)
class TiledCandidate:
  """A tile for head dimensions up to `up_to`, and for grids of at least `fills` workgroups per compute unit."""
  up_to: int
  tile: TiledTile
  fills: float = 0.0

STEPS_AT_ONCE = 4     # steps of a product: on an H200 D=128 takes 3.55 ms so, and 3.92 ms one by one

# the first one that fits
TILED: tuple[TiledCandidate, ...] = (
  TiledCandidate(64, TiledTile(8, 16, 8, 8, 64, 64, ahead=True, steps_at_once=STEPS_AT_ONCE), fills=1),
  TiledCandidate(64, TiledTile(16, 16, 4, 4, 64, 64)),
  TiledCandidate(128, TiledTile(16, 16, 8, 8, 32, 32, ahead=True, steps_at_once=STEPS_AT_ONCE), fills=1),
  TiledCandidate(128, TiledTile(16, 16, 8, 4, 64, 32)),
  TiledCandidate(128, TiledTile(32, 16, 4, 4, 32, 16, ahead=True)),
  TiledCandidate(256, TiledTile(16, 16, 8, 4, 32, 32, ahead=True, steps_at_once=STEPS_AT_ONCE)),
  TiledCandidate(MAX_WIDTH, TiledTile(32, 8, 8, 4, 32, 16, ahead=True, steps_at_once=STEPS_AT_ONCE)),
  TiledCandidate(MAX_WIDTH, TiledTile(32, 16, 8, 4, 16, 16, keeps_own=False, ahead=True)),
  TiledCandidate(128, TiledTile(16, 16, 4, 4, 32, 32, keeps_own=False)),
  TiledCandidate(MAX_WIDTH, TiledTile(16, 16, 4, 4, 16, 16, keeps_own=False)),
  TiledCandidate(256, TiledTile(16, 16, 4, 4, 16, 8, keeps_own=False)),
  TiledCandidate(MAX_WIDTH, TiledTile(16, 8, 4, 4, 16, 8, keeps_own=False)))

ALONE = TiledTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # of one thread

def tiled_tile(p:Problem, arch:Chip) -> TiledTile:
  """The one that TUNE=1 found, or the first candidate that fits. Raises NotImplementedError where local memory has no room for any."""
  if (found := tuned.tiled_winner(p, arch)) is not None and found.lds_bytes(p) <= arch.lds: return found
  if not arch.lds: return ALONE
  for c in TILED:
    if max(p.D, p.Dv) > c.up_to or c.tile.lds_bytes(p) > arch.lds: continue
    if c.fills and workgroups(p, c.tile) < c.fills*arch.cus: continue
    return c.tile
  raise NotImplementedError(f"no tile of tiled fits D={p.D}, Dv={p.Dv} in the {arch.lds} bytes of local memory of {arch}")

MOST_NUMBERS = 192     # fp32 registers for sums and scores that a thread may have; what else it needs comes to that

TUNED_THREADS = ((8, 16), (16, 8), (16, 16), (32, 8), (32, 16))      # of the tiles that TUNE=1 times: down and across
TUNED_ROWS = tuple(itertools.product((4, 8), repeat=2))               # walked and own, of a thread
TUNED_DEPTHS = (16, 32, 64)

def space_alone(kind:type[AnyTiledTile]) -> list[AnyTiledTile]:
  """The tiles of one thread that TUNE=1 times."""
  return [kind(1, 1, walked, own, 0, 0, parts=parts, columns=columns)
          for (walked, own), parts, columns in itertools.product(TUNED_ROWS, (2, 4, 8, 16), (4, 8, 16))]

def tiled_space(p:Problem, arch:Chip) -> list[TiledTile]:
  """The tiles that TUNE=1 times on a device: all that local memory and registers have room for."""
  if not arch.lds: return space_alone(TiledTile)
  found = []
  for (down, across), (walked, own), depth, ahead in itertools.product(TUNED_THREADS, TUNED_ROWS, TUNED_DEPTHS, (True, False)):
    tile = TiledTile(down, across, walked, own, depth, depth, True, ahead, steps_at_once=STEPS_AT_ONCE)
    if tile.lds_bytes(p) > arch.lds: tile = replace(tile, keeps_own=False)
    carried = depth*max(tile.block_n, tile.width(p.Dv))//tile.threads*2 if ahead else 0
    numbers = tile.own*(tile.walked*(2 if p.D > LONG_SUM else 1) + tile.width(p.Dv)//tile.down) + carried
    if tile.lds_bytes(p) <= arch.lds and numbers <= MOST_NUMBERS and tile.block_n % depth == 0: found.append(tile)
  return found

# ***** backward *****

@dataclass(frozen=True)
class TiledBackwardCandidate:
  """A tile of a backward kernel for head dimensions up to `up_to`."""
  up_to: int
  tile: TiledBackwardTile

def tile_of_sums(down:int, across:int, walked:int, own:int, depth:int, values:int, keeps_own:bool=True) -> TiledBackwardTile:
  return TiledBackwardTile(down, across, walked, own, depth, values, keeps_own, steps_at_once=STEPS_AT_ONCE if keeps_own else 1)

# the first one that fits; those that keep their own rows were measured on an H200, but for 256
DQ_TILED = (
  TiledBackwardCandidate(64, tile_of_sums(8, 16, 8, 4, 64, 64)),
  TiledBackwardCandidate(128, tile_of_sums(16, 16, 8, 8, 32, 32)),
  TiledBackwardCandidate(128, tile_of_sums(8, 16, 8, 4, 32, 32)),
  TiledBackwardCandidate(256, tile_of_sums(16, 8, 8, 4, 32, 16)),
  TiledBackwardCandidate(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 32, 16)),
  TiledBackwardCandidate(256, tile_of_sums(16, 16, 4, 4, 16, 16, keeps_own=False)),
  TiledBackwardCandidate(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 16, 8, keeps_own=False)),
  TiledBackwardCandidate(MAX_WIDTH, tile_of_sums(16, 8, 4, 4, 16, 8, keeps_own=False)))
DKDV_TILED = (
  TiledBackwardCandidate(64, tile_of_sums(8, 16, 8, 4, 64, 64)),
  TiledBackwardCandidate(128, tile_of_sums(16, 16, 4, 8, 32, 32)),
  TiledBackwardCandidate(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 32, 16)),
  TiledBackwardCandidate(128, tile_of_sums(16, 16, 4, 4, 16, 16, keeps_own=False)),
  TiledBackwardCandidate(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 16, 8, keeps_own=False)),
  TiledBackwardCandidate(MAX_WIDTH, tile_of_sums(16, 8, 4, 4, 16, 8, keeps_own=False)))

BACKWARD_ALONE = TiledBackwardTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # of one thread

def tiled_backward_tile(p:Problem, arch:Chip, keys:bool) -> TiledBackwardTile:
  """The tile of the kernel of dq, which owns queries, or of that of dk and dv, which owns `keys`, as changes what lies in local memory: the one that
  TUNE=1 found, or the first candidate that fits. Raises NotImplementedError where local memory has no room for any."""
  kernel, table = ("backward_dkdv_tiled", DKDV_TILED) if keys else ("backward_dq_tiled", DQ_TILED)
  kept = tuned.tiled_backward_winner(p, arch, kernel)
  by_table = [c.tile for c in table if max(p.D, p.Dv) <= c.up_to] if arch.lds else [BACKWARD_ALONE]
  for found in [kept, *by_table] if kept is not None else by_table:
    if (tile := replace(found, keys=keys)).lds_bytes(p) <= arch.lds: return tile
  raise NotImplementedError(f"no tile of {kernel} fits D={p.D}, Dv={p.Dv} in the {arch.lds} bytes of local memory of {arch}")

def tiled_backward_space(p:Problem, arch:Chip, keys:bool) -> list[TiledBackwardTile]:
  """As `tiled_space`, of a kernel that owns queries, or `keys`: a thread has S, dP and its part of each gradient in registers."""
  if not arch.lds: return [replace(tile, keys=keys) for tile in space_alone(TiledBackwardTile)]
  found, products = [], 3 if max(p.D, p.Dv) > LONG_SUM else 2
  for (down, across), (walked, own), depth, parts in itertools.product(TUNED_THREADS, TUNED_ROWS, TUNED_DEPTHS, (1, 2)):
    tile = TiledBackwardTile(down, across, walked, own, depth, depth//parts, steps_at_once=STEPS_AT_ONCE, keys=keys)
    if tile.lds_bytes(p) > arch.lds: tile = replace(tile, keeps_own=False)
    columns = sum(tile.width(x)//down for x in ((p.D, p.Dv) if keys else (p.D,)))
    numbers = own*(walked*products + columns)
    if tile.lds_bytes(p) <= arch.lds and numbers <= MOST_NUMBERS and tile.block_n % tile.values == 0: found.append(tile)
  return found
