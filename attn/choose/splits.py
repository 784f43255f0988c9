"""The number of key ranges into which a problem is divided: the occupancy model behind num_splits=0.

In decoding, B*H heads of Sq queries make fewer workgroups than the chip has compute units. Dividing the keys then gives all compute units work
(Flash-Decoding, pytorch.org/blog/flash-decoding). attn/kernels/combine.py merges the results of the key ranges.
"""
from __future__ import annotations
from collections.abc import Iterable
from dataclasses import replace
from attn.chips import Chip
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.amd import MlaTile, Tile
from attn.kernels.tiles.common import BlockTile, heads_of
from attn.kernels.tiles.mma import MlaMmaTile, MmaTile
from attn.kernels.tiles.plain import TiledTile
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.problem import INVARIANT_KEYS, MAX_SPLITS, Problem

# Times are in the time that a workgroup takes for one key.
PROLOGUE = 1280     # time of a workgroup's work besides its trips: loading Q, waiting for its first K and V, storing O
COMBINE = 320       # time of launching `combine`
COMBINE_BYTES = 2**14   # bytes of scratch that the whole chip writes and reads again in the time for one key

AnyTile = Tile|MmaTile|WgmmaTile|MlaTile|MlaMmaTile|TiledTile

def key_tiles(p:Problem, tile:AnyTile) -> int: return ceildiv(p.Sk, tile.block_n)

def workgroups(p:Problem, tile:AnyTile) -> int:
  """Returns the number of workgroups of the forward kernel without splits."""
  heads = heads_of(p, tile)
  return p.all_heads//heads*ceildiv(p.Sq*heads, tile.block_m)

def padding(p:Problem, tile:AnyTile) -> tuple[float, float]:
  """Returns which share of the rows and of the keys that workgroups work on is padding. Masks are ignored."""
  rows = p.Sq*heads_of(p, tile)
  return 1 - rows/round_up(rows, tile.block_m), 1 - p.Sk/round_up(p.Sk, tile.block_n)

def split_heuristic(p:Problem, arch:Chip, tile:AnyTile) -> int:
  """Returns the number of splits, a power of two, by an occupancy model.

  A chip with `arch.cus` compute units works on that many workgroups at a time. It works on more only if a workgroup has fewer waves than keep a
  compute unit busy, and if LDS has room for several: the workgroups of a busy compute unit share its matrix unit and its memory bandwidth. G splits
  make G times the workgroups, each with 1/G of the trips. In the time for one key this takes

    time(G) = ceil(workgroups*G / places) * (ceil(trips/G)*tile.block_n + PROLOGUE) + (COMBINE + scratch(G) / COMBINE_BYTES if G > 1)

  The smallest G with the least time is chosen. It is at most the number of key tiles. A grid that fills the chip many times over gets no split.
  """
  trips = max(1, ceildiv(p.flops//(2*p.all_heads*p.Sq*(p.D + p.Dv)), tile.block_n))    # of an average block of queries
  choices = [2**i for i in range(MAX_SPLITS.bit_length()) if 2**i <= key_tiles(p, tile)]
  return quickest(choices or [1], workgroups(p, tile), trips, tile.block_n, places_of(p, arch, tile), p.rows*(p.Dv + 1))

def places_of(p:Problem, arch:Chip, tile:BlockTile) -> int:
  """Returns how many workgroups a chip works on at a time."""
  return arch.cus*max(1, min(busy(p, arch, tile), arch.lds//tile.lds_bytes(p)))

def busy(p:Problem, arch:Chip, tile:BlockTile) -> int:
  """Returns how many workgroups keep a compute unit busy. A workgroup whose warps divide the keys among them is enough by itself, because it has many
  loads on their way. If it must also wait for a block table, because pages are smaller than its tiles or do not line up with them, there should be
  two workgroups."""
  if not isinstance(tile, MmaTile) or tile.key_waves == 1: return arch.busy_waves//tile.waves
  return 2 if p.pages is not None and p.pages.size % tile.block_n else 1

def quickest(choices:Iterable[int], workgroups:int, trips:int, block_n:int, places:int, numbers:int) -> int:
  """Returns the number of parts, one of `choices`, that takes the least time by the model of `split_heuristic`. Each part writes `numbers` fp32
  numbers."""
  def time(parts:int) -> float:
    merge = COMBINE + 4*parts*numbers/COMBINE_BYTES if parts > 1 else 0
    return ceildiv(workgroups*parts, places)*(ceildiv(trips, parts)*block_n + PROLOGUE) + merge
  return min(choices, key=lambda parts: (time(parts), parts))

def fixed_ranges(p:Problem, tile:AnyTile) -> int:
  """Returns the number of key ranges of a batch-invariant problem. If its queries fill no more than one tile, as in decoding, there is a range for
  every INVARIANT_KEYS keys, else there is one range. Raises NotImplementedError for more than MAX_SPLITS ranges."""
  if p.Sq*heads_of(p, tile) > tile.block_m: return 1
  ranges = ceildiv(key_tiles(p, tile), ceildiv(INVARIANT_KEYS, tile.block_n))
  if ranges > MAX_SPLITS:
    raise NotImplementedError(f"batch_invariant=True with room for {p.Sk} keys: {MAX_SPLITS} ranges of {INVARIANT_KEYS} keys are supported, or "
                              "num_splits=1")
  return ranges

def resolve(p:Problem, arch:Chip, tile:AnyTile) -> Problem:
  """Returns `p` with the number of splits with which it is computed. For num_splits=0 `split_heuristic` chooses it. A larger number is limited to the
  number of key tiles."""
  if p.batch_invariant: return replace(p, num_splits=fixed_ranges(p, tile) if p.num_splits != 1 else 1)
  return replace(p, num_splits=min(p.num_splits or split_heuristic(p, arch, tile), key_tiles(p, tile)))
