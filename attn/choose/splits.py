"""The number of key ranges into which a problem is divided: the occupancy model behind num_splits=0.

Where B*H heads of Sq queries make fewer workgroups than the chip has compute units, as in decoding, dividing the keys fills it (Flash-Decoding,
pytorch.org/blog/flash-decoding). The ranges' results are merged by attn/kernels/combine.py.
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

PROLOGUE = 1280     # what a workgroup does besides its trips (loads Q, waits for its first K and V, stores O): as long as it takes over so many keys
COMBINE = 320       # launching `combine`, likewise
COMBINE_BYTES = 2**14   # scratch that the whole chip writes and reads again while a workgroup gets over one key

AnyTile = Tile|MmaTile|WgmmaTile|MlaTile|MlaMmaTile|TiledTile

def key_tiles(p:Problem, tile:AnyTile) -> int: return ceildiv(p.Sk, tile.block_n)

def workgroups(p:Problem, tile:AnyTile) -> int:
  """Workgroups of the forward kernel without splits."""
  heads = heads_of(p, tile)
  return p.all_heads//heads*ceildiv(p.Sq*heads, tile.block_m)

def padding(p:Problem, tile:AnyTile) -> tuple[float, float]:
  """Which parts of the rows and of the keys that workgroups work on there are not, a mask left out of account."""
  rows = p.Sq*heads_of(p, tile)
  return 1 - rows/round_up(rows, tile.block_m), 1 - p.Sk/round_up(p.Sk, tile.block_n)

def split_heuristic(p:Problem, arch:Chip, tile:AnyTile) -> int:
  """The number of splits, a power of two, by an occupancy model.

  A chip of `arch.cus` compute units works on that many workgroups at a time, more only where a workgroup has fewer waves than keep a compute unit
  busy and its LDS has the room: the workgroups of a full unit share its matrix unit and memory bandwidth. G splits make G times the workgroups, each
  of 1/G of the trips, so in units of a key

    time(G) = ceil(workgroups*G / places) * (ceil(trips/G)*tile.block_n + PROLOGUE) + (COMBINE + scratch(G) / COMBINE_BYTES if G > 1)

  and the smallest G with the least time is taken, no larger than the number of key tiles. A grid that fills the chip many times over gets no split.
  """
  trips = max(1, ceildiv(p.flops//(2*p.all_heads*p.Sq*(p.D + p.Dv)), tile.block_n))    # of an average query's block
  choices = [2**i for i in range(MAX_SPLITS.bit_length()) if 2**i <= key_tiles(p, tile)]
  return quickest(choices or [1], workgroups(p, tile), trips, tile.block_n, places_of(p, arch, tile), p.rows*(p.Dv + 1))

def places_of(p:Problem, arch:Chip, tile:BlockTile) -> int:
  """How many workgroups a chip works on at a time."""
  return arch.cus*max(1, min(busy(p, arch, tile), arch.lds//tile.lds_bytes(p)))

def busy(p:Problem, arch:Chip, tile:BlockTile) -> int:
  """How many workgroups keep a compute unit busy. One whose warps share out the keys has enough on its way from memory by itself, but where it looks
  up in a table where every few of them are: then it waits for that, too, and there should be two."""
  if not isinstance(tile, MmaTile) or tile.key_waves == 1: return arch.busy_waves//tile.waves
  return 2 if p.pages is not None and p.pages.size % tile.block_n else 1

def quickest(choices:Iterable[int], workgroups:int, trips:int, block_n:int, places:int, numbers:int) -> int:
  """The one of `choices`, numbers of parts, that takes the least time by the model of `split_heuristic`; a part leaves `numbers` fp32 numbers."""
  def time(parts:int) -> float:
    merge = COMBINE + 4*parts*numbers/COMBINE_BYTES if parts > 1 else 0
    return ceildiv(workgroups*parts, places)*(ceildiv(trips, parts)*block_n + PROLOGUE) + merge
  return min(choices, key=lambda parts: (time(parts), parts))

def fixed_ranges(p:Problem, tile:AnyTile) -> int:
  """How many ranges of INVARIANT_KEYS keys a batch-invariant problem has: all where its queries fill no more than a tile, as in decoding, else one.
  Raises NotImplementedError beyond MAX_SPLITS."""
  if p.Sq*heads_of(p, tile) > tile.block_m: return 1
  ranges = ceildiv(key_tiles(p, tile), ceildiv(INVARIANT_KEYS, tile.block_n))
  if ranges > MAX_SPLITS:
    raise NotImplementedError(f"batch_invariant=True with room for {p.Sk} keys: {MAX_SPLITS} ranges of {INVARIANT_KEYS} keys are supported, or "
                              "num_splits=1")
  return ranges

def resolve(p:Problem, arch:Chip, tile:AnyTile) -> Problem:
  """`p` with the number of splits it is computed with: num_splits=0 is chosen by `split_heuristic`, a larger one held to the number of key tiles."""
  if p.batch_invariant: return replace(p, num_splits=fixed_ranges(p, tile) if p.num_splits != 1 else 1)
  return replace(p, num_splits=min(p.num_splits or split_heuristic(p, arch, tile), key_tiles(p, tile)))
