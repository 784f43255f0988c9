"""A workgroup's way over tiles: the loads of the next one are under way while this one's work is done."""
from __future__ import annotations
import itertools
from dataclasses import dataclass, fields, replace
from typing import Any, Generic, Self, TypeVar
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.blocks import Blocks, trip_count
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.gradients import RowNumbers
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Carried, Statements, workgroup_barrier
from attn.ops import amd
from attn.tinygrad_compat import AxisType, UOp

class TripState(Carried):
  """What crosses trips: tiles in LDS, and registers."""
  def lds_after(self, *deps:UOp) -> Self:
    """The tiles in LDS alone: a barrier where `deps` store to them."""
    self_: Any = self
    found = {f.name: getattr(self, f.name) for f in fields(self_)}
    return replace(self_, **{name: x.after(*deps) for name, x in found.items() if isinstance(x, LdsTile|StagedTile|RowNumbers)})

S = TypeVar("S", bound=TripState)

@dataclass(frozen=True)
class Pipeline(Generic[S]):
  """The trips of a kernel over tiles, of which it says how one is fetched, stored to LDS and worked on. Tiles are loaded `prefetch` = 0: for their
  own trip, 1: during the one before, 2: so, and stored to a second buffer in LDS."""
  prefetch: int
  new: Allocator
  statements: Statements

  def fetch(self, t:UOp) -> tuple[list[UOp], ...]:
    """This thread's parts of tile t, in registers."""
    raise NotImplementedError
  def to_lds(self, s:S, t:UOp, *parts:list[UOp]) -> UOp:
    """Their stores."""
    raise NotImplementedError
  def work(self, s:S, t:UOp, masked:bool) -> UOp:
    """What is done on tile t in LDS."""
    raise NotImplementedError

  def walk(self, s:S, tiles:Blocks, masked_first:bool) -> S:
    """Over the tiles, those that no mask touches without masks. `masked_first`: there may be some before these."""
    if self.prefetch: s = s.lds_after(self.to_lds(s, tiles.begin, *self.fetch(tiles.begin)))
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
    if not self.prefetch: return self.work(s.lds_after(self.to_lds(s, t, *self.fetch(t))), t, masked)
    parts = self.fetch(t + 1)
    under_way = self.statements.do(amd.sched_barrier(*itertools.chain(*parts)))     # the compiler would put loads off
    worked = self.work(s.lds_after(under_way), t, masked)
    free = worked if self.prefetch > 1 else workgroup_barrier(worked)
    return UOp.group(worked, self.to_lds(s.lds_after(free), t + 1, *parts))
