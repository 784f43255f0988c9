"""How a kernel goes over tiles: the loop, and on AMD the way of a tile through registers to LDS."""
from __future__ import annotations
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, Self, TypeVar
from attn.kernels.parts.allocator import Allocator, InLds
from attn.kernels.parts.blocks import Blocks, trip_count
from attn.kernels.parts.statements import Carried, Statements, workgroup_barrier
from attn.ops import amd
from attn.tinygrad_compat import AxisType, UOp

Crossing = TypeVar("Crossing", bound=Carried)

def over_tiles(s:Crossing, tiles:Blocks, new:Allocator, trip:Callable[[Crossing, UOp, bool], UOp]) -> Crossing:
  """Runs `trip(state, tile, masked)` on one tile after another; it returns what the trip ends with. Tiles that no mask touches come without masks."""
  parts = [(tiles.begin, tiles.full_begin, True)]*tiles.masked_first + [(tiles.full_begin, tiles.full_end, False), (tiles.full_end, tiles.end, True)]
  for first, last, masked in parts:
    if (count := trip_count(last - first)) is None: continue
    r = new.range(count, AxisType.LOOP)
    s = s.after(trip(s.after(r), first + r, masked).end(r))
  return s

class TripState(Carried):
  """What crosses trips: tiles in LDS, and registers."""
  def lds_after(self, *deps:UOp) -> Self:
    """Makes the tiles in LDS alone come after `deps`: a barrier where these store to them."""
    self_: Any = self
    found = {f.name: getattr(self, f.name) for f in fields(self_)}
    return replace(self_, **{name: x.after(*deps) for name, x in found.items() if isinstance(x, InLds)})

S = TypeVar("S", bound=TripState)
TileWork = Callable[[S, UOp, bool], UOp]     # on a tile in LDS, given the state, the tile's number, and whether masks touch it

class StagedTripsTile(Protocol):
  """What a kernel's tile says about its trips."""
  @property
  def prefetch(self) -> int: """When a tile is loaded: 0 in its own trip, 1 in the trip before, 2 so, and stored to a second buffer in LDS."""
  @property
  def buffers(self) -> int: """Tiles of a kind in LDS."""
  @property
  def in_turn(self) -> bool: """Whether a trip that loads its own tile loads one tensor after another."""
  @property
  def by_item(self) -> bool: """Whether it loads one item of a thread after another, too."""
  @property
  def anew(self) -> bool: """Whether it computes the addresses of rows in pieces anew."""

@dataclass(frozen=True)
class StagedTrips(Generic[S]):
  """The trips of a kernel whose tiles come through registers to LDS: where a tile comes from, and when."""
  tile: StagedTripsTile
  new: Allocator
  statements: Statements
  start: S                      # the state before the first trip
  loaded: Mapping[str, Any]     # rows in global memory that go to LDS in each trip, by the name of their tile in the state

  def fetch(self, t:UOp) -> list[list[UOp]]:
    """Loads this thread's parts of tile t to registers."""
    return [getattr(self.start, name).fetch(rows, t) for name, rows in self.loaded.items()]

  def to_lds(self, s:S, t:UOp, parts:list[list[UOp]]) -> UOp:
    """Stores the parts of tile t to LDS."""
    tiles = [self.in_lds(s, t, name) for name in self.loaded]
    return UOp.group(*[x for tile, part in zip(tiles, parts, strict=True) for x in tile.store(part)])

  def in_turn(self, s:S, t:UOp) -> UOp:
    """Brings tile t to LDS, one of its tensors after another, which takes the registers of the largest alone, or of one item of a thread. Where
    rows come in pieces, each has an address of its own: a tile may have them computed anew."""
    stores: list[UOp] = []
    for name, rows in self.loaded.items():
      tile = self.in_lds(s, t, name) if rows.in_units or not self.tile.anew else self.in_lds(s, t, name).anew(t)
      for one in tile.single if self.tile.by_item else [tile]:
        if stores: rows = rows.after(self.statements.do(amd.sched_barrier(), *stores))
        stores += one.store(one.fetch(rows, t))
    return UOp.group(*stores)

  def in_lds(self, s:S, t:UOp, name:str) -> Any:
    """Returns the place of tile t."""
    return getattr(s, name).number(t%self.tile.buffers)

  def walk(self, s:S, tiles:Blocks, work:TileWork[S]) -> S:
    """Goes over the tiles and does the work on each."""
    if self.tile.prefetch: s = s.lds_after(self.to_lds(s, tiles.begin, self.fetch(tiles.begin)))
    return over_tiles(s, tiles, self.new, lambda s, t, masked: self.trip(s, t, masked, work))

  def trip(self, s:S, t:UOp, masked:bool, work:TileWork[S]) -> UOp:
    """Does the work on tile t while the next tile is on its way to registers, and then stores that one to LDS. With two buffers there no wave has
    to wait for others before it stores: the barrier at the end of the trip is the only one. Without prefetch a trip first takes its own tile
    to LDS."""
    if not self.tile.prefetch: return work(s.lds_after(self.in_turn(s, t) if self.tile.in_turn else self.to_lds(s, t, self.fetch(t))), t, masked)
    parts = self.fetch(t + 1)
    under_way = self.statements.do(amd.sched_barrier(*itertools.chain(*parts)))     # the compiler would put loads off
    worked = work(s.lds_after(under_way), t, masked)
    free = worked if self.tile.prefetch > 1 else workgroup_barrier(worked)
    return UOp.group(worked, self.to_lds(s.lds_after(free), t + 1, parts))
