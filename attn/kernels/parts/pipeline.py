"""A workgroup's way over tiles: the loads of the next one are under way while this one's work is done."""
from __future__ import annotations
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Protocol, Self, TypeVar
from attn.kernels.parts.allocator import Allocator, InLds
from attn.kernels.parts.blocks import Blocks, trip_count
from attn.kernels.parts.statements import Carried, Statements, workgroup_barrier
from attn.ops import amd
from attn.tinygrad_compat import AxisType, UOp

class TripState(Carried):
  """What crosses trips: tiles in LDS, and registers."""
  def lds_after(self, *deps:UOp) -> Self:
    """The tiles in LDS alone: a barrier where `deps` store to them."""
    self_: Any = self
    found = {f.name: getattr(self, f.name) for f in fields(self_)}
    return replace(self_, **{name: x.after(*deps) for name, x in found.items() if isinstance(x, InLds)})

S = TypeVar("S", bound=TripState)

class PipelinedTile(Protocol):
  """What the tile of such a kernel says of its trips."""
  @property
  def prefetch(self) -> int: ...
  @property
  def buffers(self) -> int: """Tiles of a kind in LDS."""
  @property
  def in_turn(self) -> bool: """Whether of the tensors that a trip loads for itself one comes after another."""
  @property
  def by_item(self) -> bool: """Whether of those a thread's items do, too."""
  @property
  def anew(self) -> bool: """Whether the addresses of their rows in pieces are computed anew."""

@dataclass(frozen=True)
class Pipeline(Generic[S]):
  """The trips of a kernel over tiles, of which it says where one comes from and what work is done on it. Tiles are loaded `tile.prefetch` = 0: for
  their own trip, 1: during the one before, 2: so, and stored to a second buffer in LDS."""
  tile: PipelinedTile
  new: Allocator
  statements: Statements
  state: S           # at the start

  @property
  def loaded(self) -> dict[str, Any]:
    """The rows in global memory that go to LDS in each trip, by the name of their tile in the state."""
    raise NotImplementedError
  def work(self, s:S, t:UOp, masked:bool) -> UOp:
    """What is done on tile t in LDS."""
    raise NotImplementedError

  def fetch(self, t:UOp) -> list[list[UOp]]:
    """This thread's parts of tile t, in registers."""
    return [getattr(self.state, name).fetch(rows, t) for name, rows in self.loaded.items()]

  def to_lds(self, s:S, t:UOp, parts:list[list[UOp]]) -> UOp:
    """Their stores."""
    tiles = [self.in_lds(s, t, name) for name in self.loaded]
    return UOp.group(*[x for tile, part in zip(tiles, parts, strict=True) for x in tile.store(part)])

  def in_turn(self, s:S, t:UOp) -> UOp:
    """The way of tile t to LDS, one of its tensors after another, which takes the registers of the largest alone, or of one item of a thread. Where
    rows come in pieces, each has an address of its own: a tile may have them computed anew."""
    stores: list[UOp] = []
    for name, rows in self.loaded.items():
      tile = self.in_lds(s, t, name) if rows.in_units or not self.tile.anew else self.in_lds(s, t, name).anew(t)
      for one in tile.single if self.tile.by_item else [tile]:
        if stores: rows = rows.after(self.statements.do(amd.sched_barrier(), *stores))
        stores += one.store(one.fetch(rows, t))
    return UOp.group(*stores)

  def in_lds(self, s:S, t:UOp, name:str) -> Any:
    """Where tile t lies."""
    return getattr(s, name).number(t%self.tile.buffers)

  def walk(self, s:S, tiles:Blocks, masked_first:bool) -> S:
    """Over the tiles, those that no mask touches without masks. `masked_first`: there may be some before these."""
    if self.tile.prefetch: s = s.lds_after(self.to_lds(s, tiles.begin, self.fetch(tiles.begin)))
    if masked_first: s = self.trips(s, tiles.begin, tiles.full_begin, masked=True)
    s = self.trips(s, tiles.full_begin, tiles.full_end, masked=False)
    return self.trips(s, tiles.full_end, tiles.end, masked=True)

  def trips(self, s:S, first:UOp, last:UOp, masked:bool) -> S:
    if (count := trip_count(last - first)) is None: return s
    r = self.new.range(count, AxisType.LOOP)
    return s.after(self.trip(s.after(r), first + r, masked).end(r))

  def trip(self, s:S, t:UOp, masked:bool) -> UOp:
    """The work on tile t while the next one is on its way to registers, and then that one's way to LDS. With two buffers there no wave has to wait
    for others before it stores: the barrier at the end of the trip is the only one. Without prefetch a trip takes its own tile to LDS first."""
    if not self.tile.prefetch: return self.work(s.lds_after(self.in_turn(s, t) if self.tile.in_turn else self.to_lds(s, t, self.fetch(t))), t, masked)
    parts = self.fetch(t + 1)
    under_way = self.statements.do(amd.sched_barrier(*itertools.chain(*parts)))     # the compiler would put loads off
    worked = self.work(s.lds_after(under_way), t, masked)
    free = worked if self.tile.prefetch > 1 else workgroup_barrier(worked)
    return UOp.group(worked, self.to_lds(s.lds_after(free), t + 1, parts))
