"""Tile descriptions that bench.py times with TUNE=1 for the kernels without matrix instructions: all that fit into local memory and registers."""
from __future__ import annotations
import itertools
from dataclasses import replace
from typing import Any, TypeVar
from attn.chips import Chip
from attn.choose.tiled_tiles import STEPS_AT_ONCE, copies_asynchronously
from attn.kernels.tiles.plain import LONG_SUM, TiledBackwardTile, TiledTile
from attn.problem import Problem

MOST_NUMBERS = 192     # most fp32 registers of a thread for sums and scores; a thread also needs other registers

THREADS_OF_TILED = ((8, 16), (16, 8), (16, 16), (32, 8), (32, 16))      # threads down and across
ROWS_OF_TILED = tuple(itertools.product((4, 8), repeat=2))               # rows of a thread: walked and own
DEPTHS_OF_TILED = (16, 32, 64)

AnyTiledTile = TypeVar("AnyTiledTile", TiledTile, TiledBackwardTile)

def space_alone(kind:type[AnyTiledTile]) -> list[AnyTiledTile]:
  """Returns the tiles (objects of the class `kind`) to time on a device without local memory, where a workgroup is one thread."""
  return [kind(1, 1, walked, own, 0, 0, parts=parts, columns=columns)
          for (walked, own), parts, columns in itertools.product(ROWS_OF_TILED, (2, 4, 8, 16), (4, 8, 16))]

def tiled_space(p:Problem, arch:Chip) -> list[TiledTile]:
  """Returns the tile descriptions to time for `tiled`, the forward kernel without matrix instructions."""
  if not arch.lds: return space_alone(TiledTile)
  found = []
  ways: list[dict[str, Any]] = [{"ahead": True}, {}]
  if copies_asynchronously(p, arch): ways += [{"asynchronous": True, "steps_at_once": n*STEPS_AT_ONCE} for n in (2, 4)]
  for (down, across), (walked, own), depth, way in itertools.product(THREADS_OF_TILED, ROWS_OF_TILED, DEPTHS_OF_TILED, ways):
    tile = TiledTile(down, across, walked, own, depth, depth, **{"steps_at_once": STEPS_AT_ONCE, **way})
    if tile.asynchronous and tile.lds_bytes(p) > arch.lds: continue
    if tile.lds_bytes(p) > arch.lds: tile = replace(tile, keeps_own=False)
    carried = depth*max(tile.block_n, tile.width(p.Dv))//tile.threads*2 if tile.ahead else 0
    numbers = tile.own*(tile.walked*(2 if p.D > LONG_SUM else 1) + tile.width(p.Dv)//tile.down) + carried
    if tile.lds_bytes(p) <= arch.lds and numbers <= MOST_NUMBERS and tile.block_n % depth == 0: found.append(tile)
  return found

def tiled_backward_space(p:Problem, arch:Chip, keys:bool) -> list[TiledBackwardTile]:
  """Returns the tile descriptions to time for a backward kernel without matrix instructions: the kernel of dk and dv if `keys`, otherwise of dq."""
  if not arch.lds: return [replace(tile, keys=keys) for tile in space_alone(TiledBackwardTile)]
  found, products = [], 3 if max(p.D, p.Dv) > LONG_SUM else 2
  for (down, across), (walked, own), depth, parts in itertools.product(THREADS_OF_TILED, ROWS_OF_TILED, DEPTHS_OF_TILED, (1, 2)):
    tile = TiledBackwardTile(down, across, walked, own, depth, depth//parts, steps_at_once=STEPS_AT_ONCE, keys=keys)
    if tile.lds_bytes(p) > arch.lds: tile = replace(tile, keeps_own=False)
    columns = sum(tile.width(x)//down for x in ((p.D, p.Dv) if keys else (p.D,)))
    # a thread holds S, dP and its part of each gradient in registers
    numbers = own*(walked*products + columns)
    if tile.lds_bytes(p) <= arch.lds and numbers <= MOST_NUMBERS and tile.block_n % tile.values == 0: found.append(tile)
  return found
