"""The gradients of k and v for long rows, with Hopper's wgmma (sm_90): of two warpgroups with the same keys, one computes dV and the other dK."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.nvidia.warp_gradients import WarpRows
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.gradients import Weights, scaled_delta
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import kv_head_in_group_fastest
from attn.kernels.parts.memory.layouts import SwizzledPanels
from attn.kernels.parts.program.statements import store_all, workgroup_barrier
from attn.kernels.parts.program.trips import over_tiles
from attn.kernels.tiles.mma import fragments
from attn.kernels.tiles.wgmma import WgmmaHalvesTile
from attn.kernels.wgmma.backward import RingPlace, WgmmaBackward, WgmmaBackwardState, WgmmaTrip, WgmmaWork, shared_memory
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# Both warpgroups of a block own the same 64 keys, and divide the products. The first one computes S and dV, the second one dP and dK:
#
#   first warpgroup     S = Q K^T     P = exp(S - lse)           dV += P^T dO
#   second warpgroup    dP = dO V^T   dS = P * (dP - delta)      dK += dS^T Q
#
# The registers of one warpgroup hold only one of the two gradients. P goes through shared memory, in fp32, from each thread of the first warpgroup to
# the thread of the second one that holds dP of the same scores. So all warps run the same instructions. Only addresses depend on the warpgroup, and a
# factor: P is multiplied by 1 or by dP - delta.
#
# An iteration starts S and dP of its tile, and after them dV and dK of the previous tile. So the tensor cores compute dV and dK of a tile while P and
# dS of the next tile are computed. An iteration has two barriers. After the first one nobody reads P of the previous iteration, or the tile before
# the previous one: the copies (cp.async) of the next tile overwrite that tile. After the second one P and the next tile are in shared memory.

@dataclass(frozen=True)
class HalfRows(WarpRows[SwizzledPanels]):
  """The keys that a warp owns, where both warpgroups of the block own the same 64 keys."""
  # A warp of the first warpgroup computes dV of its keys, and a warp of the second one dK.
  @property
  def half(self) -> UOp:
    """Index of this warp's warpgroup: 0 computes dV, 1 computes dK."""
    return wgmma.group(self.warps.at.wave)
  @functools.cached_property
  def in_block(self) -> list[UOp]: return [self.warps.at.wave%(wgmma.M//self.mat.M)*self.mat.M]
  def accumulators(self, name:str, i:int=0) -> range: return range(self.accs(name))
  def stores(self, accs:list[UOp], name:str, own:list[Row], known:list[UOp|None]) -> list[UOp]:
    mine = self.half.eq(("dv", "dk").index(name))
    return super().stores(accs, name, [replace(row, there=row.there & mine) for row in own], known)

@dataclass(frozen=True)
class WgmmaHalves(WgmmaBackward):
  """Builder of a kernel of dk and dv in which two warpgroups share the same keys: its methods return the kernel's UOps, for one thread."""
  warp_rows: HalfRows
  tile: WgmmaHalvesTile

  @staticmethod
  def of_block(p:Problem, arch:Chip, tile:WgmmaHalvesTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> WgmmaHalves:
    grid = kv_head_in_group_fastest(p, tile, tile.matrix)
    warps = Warps.of_keys(p, arch, tile, tile.matrix, args, shapes, parts, grid)
    state = WgmmaBackwardState.of(warps, tile, fragments(p.D, tile.matrix), shared_memory(grid, p, tile))
    return WgmmaHalves(HalfRows(warps, tile, ("dv", "dk"), warps.group.first_head), tile, state)

  def begin(self, s:WgmmaBackwardState|None=None, stores:list[UOp]|None=None) -> WgmmaBackwardState:
    first = self.ring_at(self.walked.begin, 0)
    s = self.state.store([self.state.statements.first])
    s = self.arrived(self.fetch(s.do(*self.warp_rows.copies(s.shared)), first))
    return s.store(store_all(s.acc, [nv.zero(s.done)]*s.acc.max_numel()))

  def of_half(self, names:tuple[str, str], half:UOp, place:RingPlace) -> SwizzledPanels:
    """Returns the layout, in shared memory, of the tensor names[half] in iteration `place`."""
    first = self.in_shared(names[0], place)
    return first.moved_to(first.base + half*first.size)
  def started(self, s:WgmmaBackwardState, place:RingPlace) -> WgmmaBackwardState:
    """Starts the product S of iteration `place` in the first warpgroup, and dP in the second; returns the state."""
    a, b = (self.of_half(names, self.warp_rows.half, place) for names in (self.warp_rows.own, self.warp_rows.walked))
    steps, panels = a.units*self.tile.matrix.unit//wgmma.K, (UNIT_BYTES*a.panel, UNIT_BYTES*b.panel)
    return s.do(wgmma.scores(s.scores, s.shared[a.base], s.shared[b.base], s.done, steps, panels, self.group.p.dtype))
  def added_before(self, s:WgmmaBackwardState, index:UOp) -> WgmmaBackwardState:
    """Starts dV += P^T dO in the first warpgroup, or dK += dS^T Q in the second, for tile `index` - 1, if there is one; returns the state."""
    before = RingPlace(index, 0, index + (self.tile.ring - 1))      # the place in the ring buffer of tile index - 1
    rows = self.of_half(self.warp_rows.walked, 1 - self.warp_rows.half, before)
    return s.do(wgmma.output(s.acc, s.p, s.shared[rows.base], s.done, UNIT_BYTES*rows.panel, self.group.p.dtype, there=index > 0))

  def fetch(self, s:WgmmaBackwardState, place:RingPlace) -> WgmmaBackwardState:
    """Starts this thread's copies to shared memory for iteration `place`, if its tile exists, and returns the state."""
    s = s.do(*self.copies(s, place))
    return s.do(nv.commit(s.done))
  def arrived(self, s:WgmmaBackwardState) -> WgmmaBackwardState:
    """Waits at a barrier until all tiles whose copies have started are in shared memory, and returns the state."""
    s = s.do(nv.wait_copies(s.done, 0))
    s = s.do(wgmma.publish(s.done))
    return s.after(workgroup_barrier(s.done))

  def over_head(self, s:WgmmaBackwardState, rows:WarpRows[SwizzledPanels], loop:UOp|int, work:WgmmaWork) -> WgmmaBackwardState:
    assert isinstance(rows, HalfRows)
    def trip(s:WgmmaBackwardState, t:UOp, masked:bool) -> UOp:
      return work(s, WgmmaHalvesTrip(rows, rows.scores, t, masked, self, self.ring_at(t, loop))).done
    return over_tiles(s, self.walked, self.group.grid.allocator, trip)
  def walk(self, s:WgmmaBackwardState, work:WgmmaWork) -> WgmmaBackwardState:
    s = self.added_before(super().walk(s, work), self.loops*(self.walked.end - self.walked.begin))
    return s.do(wgmma.wait_products(s.acc, s.done))

@dataclass(frozen=True)
class WgmmaHalvesTrip(WgmmaTrip):
  """The steps of one iteration of the kernel that `WgmmaHalves` builds, on one tile of queries."""
  # `products` are S in the first warpgroup and dP in the second one. `numbers` are lse in the first warpgroup and delta in the second one.
  warp_rows: HalfRows
  of: WgmmaHalves

  def start(self, s:WgmmaBackwardState) -> WgmmaBackwardState:
    # After the barrier nobody reads P of the previous iteration, or the tile before that of the previous iteration.
    s = self.of.started(s.after(workgroup_barrier(s.done)), self.ring_place)
    return self.of.fetch(self.of.added_before(s, self.ring_place.index), self.of.next(self.ring_place))

  def numbers(self, s:WgmmaBackwardState) -> list[UOp]: return self.query_values(s, self.warp_rows.half)
  def products(self, s:WgmmaBackwardState) -> tuple[WgmmaBackwardState, list[UOp]]:
    s = s.do(wgmma.wait_products(s.scores, s.done, but=1))      # does not wait for the products of the previous iteration
    return s, [s.scores[i].load() for i in self.columns]
  def weights_of_half(self, products:list[UOp], numbers:list[UOp]) -> Weights:
    return self.weights([products], self.lse_of_walked(self.normalisers([(x,) for x in numbers])))[0]

  def share(self, s:WgmmaBackwardState, weights:Weights) -> tuple[WgmmaBackwardState, Weights]:
    half, first = self.warp_rows.half, self.of.tile.weights_at(self.warp_rows.p) + self.warp_rows.warps.at.thread%wgmma.GROUP
    places = [first + i*wgmma.GROUP for i in self.columns]
    s = self.of.arrived(s.do(*[nv.put(s.shared[i], x, half.eq(0)) for i, x in zip(places, weights.p)]))
    return s, replace(weights, p=[ops.as_float(s.shared[i].load()) for i in places])

  def operand(self, weights:Weights, products:list[UOp], numbers:list[UOp]) -> list[UOp]:
    deltas = self.minus_delta_of_walked([scaled_delta(x, self.warp_rows.p) for x in numbers])[0]
    is_p = [self.warp_rows.half.eq(0)]*4
    factors = [ops.select_each(is_p, 1.0, ops.add(x, delta)) for x, delta in zip(products, deltas)]
    return self.packed(weights.visible([ops.mul(x, factor) for x, factor in zip(weights.p, factors)]))

  def add_half(self, s:WgmmaBackwardState, operand:list[UOp]) -> WgmmaBackwardState:
    s = s.do(wgmma.wait_products(s.acc, s.done))      # the product before reads the operand's registers
    return s.store(store_all(s.p, operand))           # the next iteration starts the product
