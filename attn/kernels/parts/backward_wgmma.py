"""What the backward kernels on Hopper's wgmma share: the ring of tiles in shared memory and the way over it.

A block owns 64 rows, queries or keys, for each of its warpgroups, and walks over the others in tiles. Per trip a warpgroup starts S and dP, both of
its own rows and of a tile in shared memory, turns them into P and dS in registers, and starts the products of those with the tile, which is read
across its rows where it lies. It waits for no product that is not needed: the last ones of a trip run on while the next trip's S and dP are started.
Nothing holds the groups together but the tiles that they all copy, by cp.async, into a ring of three: all threads arrive at an mbarrier when their
part of a tile is there, one trip ahead and when the trip before is no longer read. Who waits for it knows that of every group.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Self
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.backward_warps import WarpsBackward
from attn.kernels.parts.blocks import Blocks
from attn.kernels.parts.dropout import Kept
from attn.kernels.parts.gradients import Weights, gradients_of
from attn.kernels.parts.layouts import LINE, SwizzledPanels
from attn.kernels.parts.ring import Arrivals
from attn.kernels.parts.statements import Statements, store_all
from attn.kernels.parts.trips import over_tiles
from attn.kernels.parts.warps import Warps
from attn.kernels.tiles.wgmma import RING, WgmmaBackwardTile
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.tinygrad_compat import AxisType, UOp

@dataclass(frozen=True)
class WgmmaBackwardState(Arrivals):
  """What crosses trips: the accumulators. Within a trip: scores and dP, and P and dS as operand A. Shared memory, and where statements are stored."""
  shared: UOp
  acc: UOp
  scores: UOp
  dp: UOp
  p: UOp
  ds: UOp
  statements: Statements

  @staticmethod
  def of(warps:Warps, tile:WgmmaBackwardTile, accs:int) -> WgmmaBackwardState:
    """With so many accumulators."""
    new, mat, n = warps.group.grid.allocator, tile.matrix, tile.block_n
    return WgmmaBackwardState(new.lds(tile.lds_bytes(warps.group.p)//UNIT_BYTES), new.registers(accs, nv.F4), new.registers(n//mat.N, nv.F4),
                              new.registers(n//mat.N, nv.F4), new.registers(n//mat.K, nv.U4), new.registers(n//mat.K, nv.U4), Statements.of(new))

@dataclass(frozen=True)
class Trip:
  """A tile on the way over those of one head after another, in each pass: its number, the turn of its head, and how many came before it."""
  tile: UOp
  turn: UOp|int
  index: UOp

@dataclass(frozen=True)
class WgmmaBackward(WarpsBackward[SwizzledPanels]):
  """A backward kernel by wgmma."""
  tile: WgmmaBackwardTile
  state: WgmmaBackwardState
  new_state = staticmethod(WgmmaBackwardState.of)

  @property
  def walked(self) -> Blocks: return self.warps.group.walked
  @property
  def heads(self) -> int:
    """How many heads the block walks over, one after another."""
    return 1
  @property
  def turns(self) -> int:
    """Walks over the tiles of a head, in all passes."""
    return self.heads*self.tile.passes

  # ***** shared memory *****
  def ring(self, name:str, trip:Trip) -> SwizzledPanels:
    """The trip's tile of this tensor."""
    return self.lies(name, self.tile.block_n, trip.index%RING*self.tile.stage(self.p) + self.own_size)
  def numbers(self, trip:Trip) -> UOp:
    """The unit where those of its tile begin."""
    return trip.index%RING*self.tile.numbers(self.p) + (self.own_size + RING*self.tile.stage(self.p))

  # ***** the way over tiles *****
  def copies_of(self, s:WgmmaBackwardState, trip:Trip, there:UOp) -> list[UOp]:
    """Of the trip's tile, of whose tensors so many rows are wanted."""
    raise NotImplementedError
  def work(self, s:WgmmaBackwardState, trip:Trip, masked:bool) -> WgmmaBackwardState:
    """A trip, when its tile is there."""
    raise NotImplementedError

  def begun(self, s:WgmmaBackwardState) -> WgmmaBackwardState:
    """The own rows and the first tile are on their way."""
    s = s.store([s.statements.first])
    s = s.expected(self.warps.at, self.tile.threads)
    return self.fetch(s.do(*self.copies_of_own(s)), self.trip_of(self.walked.begin, 0))

  def trip_of(self, t:UOp, turn:UOp|int) -> Trip: return Trip(t, turn, turn*(self.walked.end - self.walked.begin) + t - self.walked.begin)
  def next(self, trip:Trip) -> Trip:
    """The trip after this one."""
    t, index = trip.tile + 1, trip.index + 1
    if self.turns == 1: return Trip(t, trip.turn, index)
    same = t < self.walked.end
    return Trip(same.where(t, self.walked.begin), same.where(trip.turn, trip.turn + 1), index)

  def fetch(self, s:WgmmaBackwardState, trip:Trip) -> WgmmaBackwardState:
    """Its tile, if there is one, is on its way; this thread arrives when its part is there."""
    there = (self.walked.end*self.tile.block_n).minimum(self.warps.group.scores.walk.count)
    if self.turns > 1: there = (trip.index < self.turns*(self.walked.end - self.walked.begin)).where(there, 0)
    s = s.do(*self.copies_of(s, trip, there))
    return s.do(wgmma.arrive(s.arrivals, s.done))

  def accumulated(self, s:WgmmaBackwardState, number:int=0) -> WgmmaBackwardState:
    """All trips of pass `number`, over one head after another, and what they have started is done."""
    s = s.store(store_all(s.acc, [nv.zero(s.done)]*s.acc.max_numel()))
    if self.heads == 1: s = self.walk(s, number)
    else:
      r = self.warps.group.grid.allocator.range(self.heads, AxisType.LOOP)
      s = s.after(self.of_head(r).walk(s.after(r), number*self.heads + r).done.end(r))
    return s.do(wgmma.wait_products(s.acc, s.done))
  def of_head(self, r:UOp) -> Self:
    """The same in the r-th head's trips."""
    raise NotImplementedError

  def walk(self, s:WgmmaBackwardState, turn:UOp|int) -> WgmmaBackwardState:
    """Goes over the tiles of a head."""
    def trip(s:WgmmaBackwardState, t:UOp, masked:bool) -> UOp:
      trip = self.trip_of(t, turn)
      s = s.do(wgmma.arrived(s.arrivals, trip.index, s.done))
      return self.work(s, trip, masked).done
    return over_tiles(s, self.walked, self.warps.group.grid.allocator, trip)

  # ***** products *****
  def start(self, s:WgmmaBackwardState, acc:UOp, own:str, walked:str, trip:Trip) -> WgmmaBackwardState:
    """The group's own rows times those of a tile, the contraction over their elements, are on their way to `acc`."""
    a, b = self.own(own), self.ring(walked, trip)
    first = s.shared[wgmma.group(self.warps.at.wave)*(wgmma.M*LINE) + a.base]
    panels = UNIT_BYTES*a.panel, UNIT_BYTES*b.panel
    return s.do(wgmma.scores(acc, first, s.shared[b.base], s.done, a.units*self.mat.unit//wgmma.K, panels, self.p.dtype))

  def add(self, s:WgmmaBackwardState, name:str, weights:UOp, walked:str, trip:Trip) -> WgmmaBackwardState:
    """Weights, in registers, times the rows of a tile are being added to the gradient `name`."""
    b = self.ring(walked, trip)
    return s.do(wgmma.output(s.acc, weights, s.shared[b.base], s.done, UNIT_BYTES*b.panel, self.p.dtype, self.place(name)))

  def packed(self, tiles:list[UOp]) -> list[UOp]:
    """C fragments as operand A."""
    return [nv.pack_a(x, y, self.p.dtype) for x, y in zip(tiles[0::2], tiles[1::2])]

  def ds(self, s:WgmmaBackwardState, weights:Weights, left:Kept, minus_delta:list[UOp]) -> list[UOp]:
    """dS as operand A, given dP, which began with 0."""
    dp = [s.dp[i].load() for i in range(len(weights.p))]
    if not left.words: dp = [ops.add(x, d) for x, d in zip(dp, minus_delta)]
    return self.packed(gradients_of(weights, dp, left, minus_delta))
