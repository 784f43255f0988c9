"""Choice of the number of key ranges (KV splits) of a problem: the occupancy model for num_splits=0 (`split_heuristic`)."""
from __future__ import annotations
from collections.abc import Iterable
from dataclasses import replace
from attn.chips import Chip
from attn.kernels.combine import PARTS_AT_ONCE
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.tiles.amd import MlaTile, Tile
from attn.kernels.tiles.common import BlockTile, heads_of
from attn.kernels.tiles.mma import MlaMmaTile, MmaTile
from attn.kernels.tiles.plain import TiledTile
from attn.kernels.tiles.wgmma import MlaWgmmaTile, WgmmaTile
from attn.problem import INVARIANT_KEYS, MAX_SPLITS, Problem

# In decoding, B*H heads of Sq queries make fewer workgroups than the chip has compute units. If the keys are divided, all compute units have work
# (Flash-Decoding, pytorch.org/blog/flash-decoding). attn/kernels/combine.py merges the results of the key ranges.

# The unit of these times is the time that a workgroup takes for one key.
PROLOGUE = 1280     # time of a workgroup's work besides its trips: loading Q, waiting for its first K and V, storing O
COMBINE = 320       # time of launching `combine`
PAGED_KEYS = 2048       # keys of a compute unit from which more key ranges than `combine` loads at once pay, if tiles of keys cross pages
COMBINE_BYTES = 2**14   # bytes of scratch that the whole chip writes and reads again in the time for one key

AnyTile = Tile|MmaTile|WgmmaTile|MlaTile|MlaMmaTile|MlaWgmmaTile|TiledTile

def key_tiles(p:Problem, tile:AnyTile) -> int: return ceildiv(p.Sk, tile.block_n)

def workgroups(p:Problem, tile:AnyTile) -> int:
  """Returns how many workgroups the forward kernel has if the keys are not divided."""
  heads = heads_of(p, tile)
  return p.all_heads//heads*ceildiv(p.Sq*heads, tile.block_m)

def padding(p:Problem, tile:AnyTile) -> tuple[float, float]:
  """Returns which part of the query rows and of the keys is padding, because the last tile is not full: numbers from 0 to 1."""
  # Masks are ignored.
  rows = p.Sq*heads_of(p, tile)
  return 1 - rows/round_up(rows, tile.block_m), 1 - p.Sk/round_up(p.Sk, tile.block_n)

def split_heuristic(p:Problem, arch:Chip, tile:AnyTile) -> int:
  """Returns the number of key ranges (a power of two) with which the forward kernel is fastest by an occupancy model."""
  # A chip with `arch.cus` compute units works on `arch.cus` workgroups at a time. The chip works on more workgroups only if a workgroup has too few
  # waves to keep a compute unit busy, and if LDS has room for several workgroups. `places` is the number of workgroups at a time. The workgroups of a
  # busy compute unit share its matrix unit and its memory bandwidth. With G splits there are G times as many workgroups, each with 1/G of the tiles
  # of keys (`trips` is the number of these tiles). All workgroups together take this time, in units of a workgroup's time for one key:
  #   time(G) = ceil(workgroups*G / places) * (ceil(trips/G)*tile.block_n + PROLOGUE) + (COMBINE + scratch(G) / COMBINE_BYTES if G > 1)
  # scratch(G) is the size of the results to merge, in bytes. The smallest G with the least time is chosen. G is at most the number of key tiles. A
  # grid that fills the chip many times over gets no split.
  trips = max(1, ceildiv(p.visible_scores//p.Sq, tile.block_n))    # of an average block of queries
  choices = [2**i for i in range(MAX_SPLITS.bit_length()) if 2**i <= key_tiles(p, tile)]
  return quickest(choices or [1], workgroups(p, tile), trips, tile.block_n, places_of(p, arch, tile), p.rows*(p.Dv + 1))

def places_of(p:Problem, arch:Chip, tile:BlockTile) -> int:
  """Returns how many workgroups of a kernel run on the chip at the same time."""
  return arch.cus*max(1, min(busy(p, arch, tile), arch.lds//tile.lds_bytes(p)))

def busy(p:Problem, arch:Chip, tile:BlockTile) -> int:
  """Returns how many workgroups a compute unit must run at the same time to be busy."""
  # Usually these workgroups have `Chip.busy_waves` waves together. If the warps of a workgroup divide the keys among them, one workgroup is enough,
  # because it has many loads in flight. But two are needed if tiles of keys cross the borders of pages, so that the warps also wait for entries of
  # the block table. This does not pay if there are few keys and more ranges than `combine` loads at once.
  if not isinstance(tile, MmaTile) or tile.key_waves == 1: return arch.busy_waves//tile.waves
  if p.pages is None or p.pages.size % tile.block_n == 0: return 1
  number, keys = 2*arch.cus//workgroups(p, tile), workgroups(p, tile)*p.Sk//arch.cus     # key ranges, and keys of a compute unit
  return 2 if number <= PARTS_AT_ONCE or keys > PAGED_KEYS else 1

def quickest(choices:Iterable[int], workgroups:int, trips:int, block_n:int, places:int, numbers:int, longest:int=0) -> int:
  """Returns one of `choices`: into how many parts to divide each workgroup's loop so that, by an occupancy model, the kernel ends earliest."""
  # Undivided, there are `workgroups` workgroups with `trips` iterations each (with a mask: on average) of `block_n` rows. The chip works on `places`
  # workgroups at a time. For one part of all loops the workgroups write `numbers` fp32 numbers, whose merging takes time.
  def one(trips:int, parts:int) -> int: return ceildiv(trips, parts)*block_n + PROLOGUE
  def time(parts:int) -> float:
    merge = COMBINE + 4*parts*numbers/COMBINE_BYTES if parts > 1 else 0
    # A mask makes the loops unequal; the longest has `longest` iterations. Workgroups with short loops start last. So the chip is busy until the end,
    # and the time is at least that of the longest loop.
    if longest > trips: return max(one(longest, parts), workgroups*parts/places*one(trips, parts)) + merge
    return ceildiv(workgroups*parts, places)*one(trips, parts) + merge
  return min(choices, key=lambda parts: (time(parts), parts))

def fixed_ranges(p:Problem, tile:AnyTile) -> int:
  """Returns the number of key ranges with batch_invariant=True: one for every INVARIANT_KEYS keys in decoding, otherwise one."""
  # In decoding the queries fill at most one tile.
  if p.Sq*heads_of(p, tile) > tile.block_m: return 1
  ranges = ceildiv(key_tiles(p, tile), ceildiv(INVARIANT_KEYS, tile.block_n))
  if ranges > MAX_SPLITS:
    raise NotImplementedError(f"batch_invariant=True with room for {p.Sk} keys: at most {MAX_SPLITS*INVARIANT_KEYS} keys are supported, or "
                              "num_splits=1")
  return ranges

def resolve(p:Problem, arch:Chip, tile:AnyTile) -> Problem:
  """Returns a copy of `p` in which num_splits is the final number of key ranges, at most the number of tiles of keys."""
  if p.batch_invariant: return replace(p, num_splits=fixed_ranges(p, tile) if p.num_splits != 1 else 1)
  return replace(p, num_splits=min(p.num_splits or split_heuristic(p, arch, tile), key_tiles(p, tile)))
