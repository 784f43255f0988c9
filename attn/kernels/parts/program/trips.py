"""Loops of a kernel over tiles; and, for AMD, how a tile comes from global memory through registers to LDS."""
from __future__ import annotations
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, Self, TypeVar
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.program.blocks import Blocks, trip_count
from attn.kernels.parts.program.statements import Carried, Statements, workgroup_barrier
from attn.ops import amd
from attn.tinygrad_compat import AxisType, UOp

Crossing = TypeVar("Crossing", bound=Carried)

class TileLoop(Generic[Crossing]):
  """A loop over consecutive tiles, one in each iteration."""
  before: Crossing
  trip: UOp

  def __init__(self, first:UOp, count:UOp, masked:bool, new:Allocator) -> None:   # `masked`: whether a mask may hide scores of these tiles
    self.first, self.count, self.masked, self.new = first, count, masked, new
  def begin(self, s:Crossing) -> tuple[Crossing, UOp]:
    """Begins the loop's body: returns (state inside the loop, index of the tile that the iteration computes)."""
    self.before, self.trip = s, self.new.range(self.count, AxisType.LOOP)
    return s.after(self.trip), self.first + self.trip
  def end(self, done:UOp) -> Crossing:
    """Ends the loop's body after its last operation, `done`, and returns the state after the loop."""
    return self.before.after(done.end(self.trip))

def tile_loops(tiles:Blocks, new:Allocator, loop:Callable[..., TileLoop[Crossing]]=TileLoop, together:bool=False) -> Iterator[TileLoop[Crossing]]:
  """Yields up to three loops over consecutive `tiles`: with masks, without masks, and again with masks; `loop` makes each of them."""
  # up to three loops: over the first tiles, where a mask may hide scores; over the tiles where no mask hides scores; and over the last tiles, where a
  # mask may hide scores. With `together` one loop over all tiles. A loop that never runs is left out.
  parts = [(tiles.begin, tiles.full_begin, True)]*tiles.masked_first + [(tiles.full_begin, tiles.full_end, False), (tiles.full_end, tiles.end, True)]
  for first, last, masked in [(tiles.begin, tiles.end, True)] if together else parts:
    if (count := trip_count(last - first)) is not None: yield loop(first, count, masked, new)

def over_tiles(s:Crossing, tiles:Blocks, new:Allocator, trip:Callable[[Crossing, UOp, bool], UOp]) -> Crossing:
  """Makes loops over `tiles` with the body `trip(state, tile, masked)`, and returns the state after them."""
  # `trip` returns the last operation of the body; `masked` is False for tiles in which no mask hides scores
  loops:Iterator[TileLoop[Crossing]] = tile_loops(tiles, new)
  for loop in loops: s = loop.end(trip(*loop.begin(s), loop.masked))
  return s

class TripState(Carried):
  """Base class of an AMD kernel's state between two iterations over tiles: tiles in LDS, and registers."""
  def lds_after(self, *deps:UOp) -> Self:
    """Returns this state where the tiles in LDS, but no other values, may be used only after the operations `deps`."""
    # if `deps` store to these tiles, tinygrad adds a barrier
    self_: Any = self
    found = {f.name: getattr(self, f.name) for f in fields(self_)}
    return replace(self_, **{name: x.after(*deps) for name, x in found.items() if isinstance(x, InLds)})

S = TypeVar("S", bound=TripState)
TileWork = Callable[[S, UOp, bool], UOp]     # the work on a tile in LDS, given the state, the tile's number, and whether masks touch the tile

class StagedTripsTile(Protocol):
  """What a tile description says about when and how a loop loads its rows of keys or queries."""
  @property
  def prefetch(self) -> int:
    """How tiles are loaded: 0 in the iteration that uses them, 1 one iteration earlier, 2 one iteration earlier and to a second LDS buffer."""
  @property
  def buffers(self) -> int: """Number of LDS buffers for the tiles of each tensor: 1, or 2 that iterations use alternately."""
  @property
  def by_tensor(self) -> bool:
    """Whether an iteration loads its tensors (such as K and V) one after another. Only for prefetch 0, i.e. without loads ahead."""
  @property
  def by_item(self) -> bool: """Whether a thread loads its 16-byte items of a tensor one after another, to save registers. Only for prefetch 0."""
  @property
  def new_addresses(self) -> bool: """Whether each iteration computes the addresses of its loads, to save registers."""

@dataclass(frozen=True)
class StagedTrips(Generic[S]):
  """A loop over tiles that are loaded from global memory to registers and then stored to LDS."""
  tile: StagedTripsTile   # says when each tile is loaded
  new: Allocator
  statements: Statements
  start: S                      # the state before the first iteration
  loaded: Mapping[str, Any]     # rows in global memory that each iteration brings to LDS, by the name of their tile in the state
  tile_of: Callable[[UOp], UOp]=lambda t: t      # which tile of these rows iteration t brings

  def fetch(self, t:UOp) -> list[list[UOp]]:
    """Loads this thread's part of tile t from global memory, and returns one list of registers for each tensor."""
    return [getattr(self.start, name).fetch(rows, self.tile_of(t)) for name, rows in self.loaded.items()]

  def to_lds(self, s:S, t:UOp, parts:list[list[UOp]]) -> UOp:
    """Returns the stores of `parts`, the registers that `fetch` loaded of tile t, to LDS."""
    tiles = [self.in_lds(s, t, name) for name in self.loaded]
    return UOp.group(*[x for tile, part in zip(tiles, parts, strict=True) for x in tile.store(part)])

  def load_by_tensor(self, s:S, t:UOp) -> UOp:
    """Returns the stores of tile t to LDS, one tensor after another."""
    # Each tensor is loaded only after the tensor before it has been stored. Registers then hold one tensor at a time, or with `by_item` one 16-byte
    # item of each thread.
    stores: list[UOp] = []
    for name, rows in self.loaded.items():
      # if rows are loaded element by element, `new_addresses` makes each iteration compute the addresses again, so that no register holds addresses
      # during the loop
      tile = self.in_lds(s, t, name) if rows.in_units or not self.tile.new_addresses else self.in_lds(s, t, name).with_new_addresses(t)
      for one in tile.single if self.tile.by_item else [tile]:
        if stores: rows = rows.after(self.statements.do(amd.sched_barrier(), *stores))
        stores += one.store(one.fetch(rows, self.tile_of(t)))
    return UOp.group(*stores)

  def in_lds(self, s:S, t:UOp, name:str) -> Any:
    """Returns tile t of the tensor `name`, a field of the state, in the LDS buffer that holds the tile."""
    return getattr(s, name).nth(t%self.tile.buffers)

  def first(self, s:S, tiles:Blocks) -> S:
    """Brings the first of `tiles` to LDS before the loop, if tiles are loaded an iteration ahead, and returns the state."""
    return s.lds_after(self.to_lds(s, tiles.begin, self.fetch(tiles.begin))) if self.tile.prefetch else s

  def arrive(self, s:S, t:UOp) -> tuple[S, list[list[UOp]]]:
    """Begins iteration t, whose tile is in LDS: returns (state, registers into which the next tile is being loaded)."""
    # without prefetch, tile t itself is loaded and stored to LDS here
    if not self.tile.prefetch: return s.lds_after(self.load_by_tensor(s, t) if self.tile.by_tensor else self.to_lds(s, t, self.fetch(t))), []
    parts = self.fetch(t + 1)
    return s.lds_after(self.statements.do(amd.sched_barrier(*itertools.chain(*parts)))), parts     # else the compiler delays the loads

  def leave(self, s:S, t:UOp, worked:UOp, parts:list[list[UOp]]) -> UOp:
    """Ends iteration t after the operation `worked`: stores the next tile from the registers `parts` to LDS, and returns the last operation."""
    if not self.tile.prefetch: return worked
    # With a single LDS buffer, a barrier before the stores waits until all waves have finished their work. With two buffers, the only barrier is the
    # one at the end of the iteration.
    free = worked if self.tile.prefetch > 1 else workgroup_barrier(worked)
    return UOp.group(worked, self.to_lds(s.lds_after(free), t + 1, parts))

  def walk(self, s:S, tiles:Blocks, work:TileWork[S]) -> S:
    """Makes loops over `tiles` with the body `work(state, tile, masked)`, and returns the state after them."""
    return over_tiles(self.first(s, tiles), tiles, self.new, lambda s, t, masked: self.trip(s, t, masked, work))

  def trip(self, s:S, t:UOp, masked:bool, work:TileWork[S]) -> UOp:
    """Makes the body of one iteration, `work(state, t, masked)`, and returns its last operation."""
    there, parts = self.arrive(s, t)
    return self.leave(s, t, work(there, t, masked), parts)

  def loops(self, tiles:Blocks) -> Iterator[TileLoop[S]]:
    """Yields the loops over `tiles`, for a kernel that makes the bodies itself instead of calling `walk`."""
    return tile_loops(tiles, self.new, lambda *which: StagedLoop(self, *which))

class StagedLoop(TileLoop[S]):
  """A loop that `StagedTrips.loops` yields: the iteration's tile is in LDS when the body begins."""
  def __init__(self, trips:StagedTrips[S], first:UOp, count:UOp, masked:bool, new:Allocator) -> None:
    super().__init__(first, count, masked, new)
    self.trips = trips
  def begin(self, s:S) -> tuple[S, UOp]:
    # the next tile is stored to LDS when the body ends
    self.inside, self.tile = super().begin(s)
    there, self.parts = self.trips.arrive(self.inside, self.tile)
    return there, self.tile
  def end(self, done:UOp) -> S: return super().end(self.trips.leave(self.inside, self.tile, done, self.parts))
