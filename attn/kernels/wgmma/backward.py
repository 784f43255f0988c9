"""Backward with Hopper's wgmma (sm_90): each tile's scores, P and dS, and the sums of dQ, dK and dV. Begin with `WgmmaTrip`."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.nvidia.gradient_sums import place_in_sums
from attn.kernels.nvidia.ring import Arrivals
from attn.kernels.nvidia.warp_gradients import Lse, OwnQueryValues, WarpRows, WarpTrip
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.gradients import WEIGHTED, Normaliser, gradients_of_passes, kinds_of_normalisers, scaled_delta
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.backward.turns import Turns
from attn.kernels.parts.grid.workgroup import Grid, Workgroup, kv_head_in_group_fastest
from attn.kernels.parts.memory.layouts import LINE, SwizzledPanels
from attn.kernels.parts.program.blocks import Blocks, TileList
from attn.kernels.parts.program.counts import below
from attn.kernels.parts.program.statements import Statements, store_all, workgroup_barrier
from attn.kernels.parts.program.trips import over_tiles
from attn.kernels.tiles.common import query_value_names
from attn.kernels.tiles.mma import fragments
from attn.kernels.tiles.wgmma import WgmmaBackwardTile
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.ops.common import flat
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, Ops, UOp, dtypes

# A block owns queries and loops over tiles of keys, or owns keys and loops over tiles of queries. Each warpgroup owns 64 of the block's rows. In each
# iteration a warpgroup starts the products S and dP of its own rows and a tile in shared memory. The warpgroup turns S and dP into P and dS in
# registers. Then it starts the products of P and dS with the tile, which wgmma reads transposed from the same part of shared memory. The warpgroup
# waits only for products that it needs: the last products of an iteration still run when S and dP of the next iteration start.
#
# The warpgroups wait for each other only when they change tiles. All warpgroups copy each tile together, by cp.async, into a ring buffer of three
# tiles. In each iteration a thread copies its part of the next iteration's tile, once its warpgroup no longer reads the previous tile. The thread
# arrives at an mbarrier when its part is complete. A warpgroup that has waited for the mbarrier of its tile knows two things: the tile is complete,
# and all warpgroups have finished with the tile of two iterations ago. The next copies overwrite that tile.

@dataclass(frozen=True)
class WgmmaBackwardState(Arrivals):
  """The values that the loop over tiles carries from iteration to iteration: contents of shared memory, sums of gradients, scores, P and dS."""
  shared: UOp
  acc: UOp      # accumulators of the gradients
  scores: UOp   # within an iteration, as dp, p, ds and dq
  dp: UOp       # as operand A
  p: UOp
  ds: UOp   # as operand A
  statements: Statements
  dq: UOp   # dQ of the tile

  @staticmethod
  def of(warps:Warps, tile:WgmmaBackwardTile, accs:int, shared:UOp) -> WgmmaBackwardState:
    new, mat, n = warps.group.grid.allocator, tile.matrix, tile.block_n
    of_dq = tile.dq_columns(warps.group.p)//mat.N if tile.adds_dq or tile.keeps_dq else 1
    return WgmmaBackwardState(shared, new.registers(accs, nv.F4), new.registers(n//mat.N, nv.F4), new.registers(n//mat.N, nv.F4),
                              new.registers(n//mat.K, nv.U4), new.registers(n//mat.K, nv.U4), Statements.of(new), new.registers(of_dq, nv.F4))

def shared_memory(grid:Grid, p:Problem, tile:WgmmaBackwardTile) -> UOp: return grid.allocator.lds(tile.lds_bytes(p)//UNIT_BYTES)

@dataclass(frozen=True)
class RingPlace:
  """Position of one iteration in the loops over tiles that a block makes: index of the tile, index of the loop, number of iterations before it."""
  # the block loops over the tiles of one head after another, and twice if it makes two passes
  tile: UOp       # index of the tile among the tiles of a head
  loop: UOp|int   # index of this loop over tiles, counted over heads and passes
  index: UOp      # number of tiles that the block has used before, over all loops

WgmmaWork = Callable[[WgmmaBackwardState, "WgmmaTrip"], WgmmaBackwardState]

@dataclass(frozen=True)
class WgmmaBackward:
  """Builder of a backward kernel with wgmma for one problem: its methods return the UOps of the kernel's steps, as one thread runs them."""
  # no field changes during the loop over the tiles of one head
  warp_rows: WarpRows[SwizzledPanels]
  tile: WgmmaBackwardTile
  state: WgmmaBackwardState      # before the first iteration
  known: OwnQueryValues|None = None      # lse and delta of the own queries; None if keys are owned
  pass_number: int = 0   # if the kernel loops over the tiles twice (two passes), there is one object for each pass

  @staticmethod
  def of_queries(p:Problem, arch:Chip, tile:WgmmaBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> WgmmaBackward:
    warps = Warps.of(p, arch, tile, tile.matrix, args, shapes, parts)
    state = WgmmaBackwardState.of(warps, tile, fragments(p.D, tile.matrix), shared_memory(warps.group.grid, p, tile))
    rows: WarpRows[SwizzledPanels] = WarpRows(warps, tile, ("dq",), warps.group.first_head)
    return WgmmaBackward(rows, tile, state, OwnQueryValues(rows.normalisers, rows.deltas))

  @staticmethod
  def of_keys(p:Problem, arch:Chip, tile:WgmmaBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> list[WgmmaBackward]:
    # Two passes use the same accumulators.
    if tile.adds_dq and (reason := tile.cannot_add_dq(p)) is not None: raise NotImplementedError(f"backward_all_wgmma: {reason}")
    grid, passes = kv_head_in_group_fastest(p, tile, tile.matrix, "dq_turns" in shapes), gradients_of_passes(tile.passes, tile.adds_dq)
    shared = shared_memory(grid, p, tile)
    warps = Warps.of_keys(p, arch, tile, tile.matrix, args, shapes, parts, grid, shared.bitcast(dtypes.int)[4*shared.max_numel() - 2])
    accs = {name: fragments(width, tile.matrix) for name, width in (("dk", p.D), ("dv", p.Dv))}
    state = WgmmaBackwardState.of(warps, tile, max(sum(accs.get(name, 0) for name in wanted) for wanted in passes), shared)
    return [WgmmaBackward(WarpRows(warps, tile, wanted, warps.group.first_head), tile, state, None, i) for i, wanted in enumerate(passes)]

  # ***** rows *****
  @property
  def group(self) -> Workgroup: return self.warp_rows.warps.group
  @property
  def wanted(self) -> tuple[str, ...]: return self.warp_rows.wanted
  @property
  def walked(self) -> Blocks: return self.group.walked
  @property
  def heads(self) -> int:
    """Number of query heads over whose rows the block loops, one head after another."""
    return self.group.walked_heads
  @property
  def loops(self) -> int:
    """Number of loops over tiles that the block makes: one for each head and pass."""
    return self.heads*self.tile.passes
  @functools.cached_property
  def turns(self) -> Turns|None: return Turns.of(self.group, self.warp_rows.warps.at.wave, self.warp_rows.warps.at.lane)

  # ***** shared memory *****
  def in_shared(self, name:str, place:RingPlace) -> SwizzledPanels:
    """Returns the layout in shared memory of the rows of tensor `name`: rows that stay there all the time, or rows of the tile in iteration
    `place`."""
    # rows that stay there, or the tile's rows in the ring buffer
    tile, p = self.tile, self.group.p
    if name in tile.stay: return self.warp_rows.layout_of(name, tile.stay_rows, 0)
    return self.warp_rows.layout_of(name, tile.passing_rows, place.index%tile.ring*tile.stage(p) + tile.stay_size(p))
  def place_of_query_values(self, place:RingPlace) -> UOp:
    """Returns the index of the 16-byte unit of shared memory at which lse and delta lie for the queries of the tile in iteration `place`."""
    p, stage = self.group.p, place.index%self.tile.stages_of_query_values
    return stage*self.tile.units_of_query_values(p) + (self.tile.after_ring(p) + self.tile.shared_dq(p))
  def ds_in_shared(self, place:RingPlace) -> SwizzledPanels:
    """Returns the layout in shared memory of dS in iteration `place`, for a kernel whose blocks add to dQ."""
    # there is room for dS of two tiles: while one warpgroup stores dS of a tile, another warpgroup may still read dS of the previous tile
    ds = self.tile.ds
    return ds.moved_to(place.index%2*ds.size + self.tile.after_ring(self.group.p))
  @property
  def sent(self) -> UOp:
    """Index of the 16-byte unit of shared memory at which this warp's part of dQ waits to be added to global memory."""
    p, tile = self.group.p, self.tile
    return self.warp_rows.warps.at.wave*tile.sent(p) + (tile.after_ring(p) + tile.ds_size)

  # ***** the loop over tiles *****
  def begin(self, s:WgmmaBackwardState|None=None, stores:list[UOp]|None=None) -> WgmmaBackwardState:
    if s is not None: s = s.after(UOp.group(*(stores or [])))
    else:      # starts the copies of the own rows and of the first tile
      s = self.state.store([self.state.statements.first])
      s = s.expected(self.warp_rows.warps.at, self.tile.threads)
      s = self.fetch(s.do(*self.warp_rows.copies(s.shared)), self.ring_at(self.walked.begin, 0))
    cleared = [s.acc] if self.tile.keys else [s.acc, s.scores, s.dp]     # a skipped product leaves what is there
    return s.store([x for to in cleared for x in store_all(to, [nv.zero(s.done)]*to.max_numel())])

  def ring_at(self, t:UOp, loop:UOp|int) -> RingPlace: return RingPlace(t, loop, loop*(self.walked.end - self.walked.begin) + t - self.walked.begin)
  def next(self, place:RingPlace) -> RingPlace:
    """Returns the iteration that follows iteration `place`, in the same loop over tiles or in the next one."""
    t, index = place.tile + 1, place.index + 1
    if self.loops == 1: return RingPlace(t, place.loop, index)
    same = t < self.walked.end
    return RingPlace(same.where(t, self.walked.begin), same.where(place.loop, place.loop + 1), index)

  def fetch(self, s:WgmmaBackwardState, place:RingPlace) -> WgmmaBackwardState:
    """Starts this thread's copies to shared memory for iteration `place`, if its tile exists, and returns the state."""
    # The thread arrives at the mbarrier when its copies are complete.
    s = s.do(*self.copies(s, place))
    return s.do(wgmma.arrive(s.arrivals, s.done))

  def copies(self, s:WgmmaBackwardState, place:RingPlace) -> list[UOp]:
    """Returns the statements that start this thread's copies to shared memory for iteration `place`, if its tile exists."""
    # If the block owns keys, lse and delta of the tile's queries are copied, too.
    group, n, i, floats = self.group, self.tile.block_n, self.warp_rows.warps.at.thread, s.shared.bitcast(dtypes.float)
    there, first_row = group.walked_end, group.scores.row(place.tile*n)
    if self.loops > 1: there = (place.index < self.loops*(self.walked.end - self.walked.begin)).where(there, 0)
    head = group.first_head + place.loop%self.heads
    copies = [x for name in self.warp_rows.walked
              for x in self.warp_rows.warps.copies(self.warp_rows.walked_rows(name, head, there), s.shared, first_row, self.in_shared(name, place))]
    if self.tile.keys:
      first, row = self.place_of_query_values(place)*4 + i, first_row + i
      rows = [group.query_value_rows(name, head) for name in query_value_names(group.p)]
      copies += [nv.copy_number(floats[first + kind*n], x.buffer[x.base + row], row < there, i < n) for kind, x in enumerate(rows)]
    return copies

  def walk(self, s:WgmmaBackwardState, work:WgmmaWork) -> WgmmaBackwardState:
    # At the end waits for all products that `work` has started.
    if self.heads == 1: s = self.over_head(s, self.warp_rows, self.pass_number, work)
    else:
      r = self.group.grid.allocator.range(self.heads, AxisType.LOOP)
      s = s.after(self.over_head(s.after(r), self.warp_rows.of_head(self.group.first_head + r), self.pass_number*self.heads + r, work).done.end(r))
    s = s.do(wgmma.wait_products(s.acc, s.done))
    return s.do(wgmma.sent(s.done)) if "dq" in self.wanted and self.tile.keys and self.turns is None else s

  def over_head(self, s:WgmmaBackwardState, rows:WarpRows[SwizzledPanels], loop:UOp|int, work:WgmmaWork) -> WgmmaBackwardState:
    def trip(s:WgmmaBackwardState, t:UOp, masked:bool) -> UOp:
      place = self.ring_at(t, loop)
      s = s.do(wgmma.arrived(s.arrivals, place.index, s.done))
      return work(s, WgmmaTrip(rows, rows.scores, t, masked, self, place)).done
    s = over_tiles(s, self.walked, self.group.grid.allocator, trip)
    return self.turn_ended(s, rows.head, self.walked.end - 1, True)

  def turn_ended(self, s:WgmmaBackwardState, head:UOp, t:UOp, last:bool=False) -> WgmmaBackwardState:
    """Ends the turn of this block to add to dQ, if blocks add in a fixed order and tile t is the last of the turn; returns the state."""
    if self.turns is None: return s
    # Waits until everything that this warp has sent to dQ in memory is added there, then adds 1 to the counter for which the next block waits. A turn
    # ends with its last tile, or with the block's last tile of the query head `head` (`last`).
    s = s.do(wgmma.sent(s.done))
    return s.do(self.turns.end(head, t, s.done, last))

  # ***** gradients, and the kernel *****
  def gradient(self, s:WgmmaBackwardState, name:str) -> list[UOp]:
    # A block that owns keys has added to dQ in each iteration already.
    return [] if name == "dq" and self.tile.keys else self.warp_rows.gradient(s.acc, name)
  def deltas(self, s:WgmmaBackwardState) -> list[UOp]: return self.warp_rows.kept_deltas()
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    return self.group.gradient_kernel(f"backward_{name}_wgmma", cleared, stores, count, self.tile.lds_bytes(self.group.p))

@dataclass(frozen=True)
class WgmmaTrip(WarpTrip[SwizzledPanels]):
  """The steps of one iteration of a backward kernel, on one tile."""
  # products run asynchronously: one statement starts a product, and a later statement waits for it
  of: WgmmaBackward
  ring_place: RingPlace

  @functools.cached_property
  def there(self) -> UOp:
    """Whether the mask leaves any score between the rows of this warpgroup and the tile visible; otherwise the warpgroup skips its products."""
    # The tensor cores are then free for the other warpgroups. In a block that owns keys, the predicate is always true if a score term (bias, softcap,
    # ALiBi) changes scores, because no registers are left for it.
    if not self.masked or self.of.tile.groups == 1 or (self.of.tile.keys and not self.score.raw): return wgmma.EVERYWHERE
    first = self.of.group.first_row + wgmma.group(self.warp_rows.warps.at.wave)*wgmma.M
    return self.score.seen_by(first, first + (wgmma.M - 1), self.tile_number)
  @property
  def needs_dp(self) -> bool: return any(WEIGHTED[name][1] == "ds" for name in self.of.wanted)
  def query_values(self, s:WgmmaBackwardState, kind:int|UOp) -> list[UOp]:
    """Loads one number (`kind` 0: lse, 1: delta, 2: lse_rest) for each of this lane's queries in the tile, as a vector of two for each C fragment of
    scores."""
    # from shared memory; lse_rest is the part of lse that rounding to fp32 lost
    pairs, n = s.shared.bitcast(nv.F2), self.of.tile.block_n
    first = self.of.place_of_query_values(self.ring_place)*2 + kind*n//2 + self.warp_rows.warps.at.h
    return [pairs[first + i*self.warp_rows.mat.N//2].load() for i in self.columns]

  def product(self, s:WgmmaBackwardState, acc:UOp, which:int, there:UOp) -> WgmmaBackwardState:
    """Starts the product S (`which` 0) or dP (`which` 1), whose result goes to the registers `acc`, and returns the state."""
    # A is the rows that the warpgroup owns, and B the rows of this iteration's tile, transposed. If `there` is false, the warpgroup starts an empty
    # group of products instead, so that later waits, which count groups, are the same in all warpgroups.
    a, b = (self.of.in_shared(names[which], self.ring_place) for names in (self.warp_rows.own, self.warp_rows.walked))
    first = s.shared[wgmma.group(self.warp_rows.warps.at.wave)*(wgmma.M*LINE) + a.base]
    panels = UNIT_BYTES*a.panel, UNIT_BYTES*b.panel
    return s.do(wgmma.scores(acc, first, s.shared[b.base], s.done, a.units*self.warp_rows.mat.unit//wgmma.K, panels, self.warp_rows.p.dtype, there))

  # ***** the steps that WarpTrip does not define *****
  def start(self, s:WgmmaBackwardState) -> WgmmaBackwardState:
    there = wgmma.EVERYWHERE if self.of.tile.keys else self.there     # with own keys, a predicate for all products would spill registers
    s = self.product(s, s.scores, 0, there)
    s = self.product(s, s.dp, 1, there) if self.needs_dp else s
    if (turns := self.of.turns) is None: return s
    s = s.do(turns.begin(self.warp_rows.head, self.tile_number, s.done))      # while S and dP are computed
    return s.do(wgmma.may_send(s.done))

  def lse(self, s:WgmmaBackwardState) -> Lse:
    if self.of.known is not None: return self.lse_of_own(self.of.known)
    return self.lse_of_walked(self.normalisers(list(zip(*[self.query_values(s, kind) for kind in kinds_of_normalisers(self.warp_rows.p)]))))
  def normalisers(self, numbers:list[tuple[UOp, ...]]) -> list[Normaliser]:
    """Converts lse of the queries in each C fragment's columns to a `Normaliser`, the form that exp2 needs; `numbers` has lse (and lse_rest) for each
    fragment."""
    return [Normaliser.joined([Normaliser.of(self.warp_rows.p, *[ops.extract(x, i) for x in xs]) for i in range(2)], ops.build) for xs in numbers]

  def scores(self, s:WgmmaBackwardState) -> tuple[WgmmaBackwardState, list[list[UOp]]]:
    # When S is done, the products of the previous iteration are done, too: the warpgroup no longer reads the previous tile, so the copies of the next
    # tile can start.
    s = s.do(wgmma.wait_products(s.scores, s.done, but=int(self.needs_dp)))
    s = self.of.fetch(s, self.of.next(self.ring_place))
    return s, [[s.scores[i].load() for i in self.columns]]

  def dp(self, s:WgmmaBackwardState) -> tuple[WgmmaBackwardState, list[list[UOp]]]:
    # Does not wait for the product with P that was started after dP.
    s = s.do(wgmma.wait_products(s.dp, s.done, but=int("dv" in self.of.wanted)))
    if self.of.known is not None: minus_delta = self.minus_delta_of_own(self.of.known)[0]
    else: minus_delta = self.minus_delta_of_walked([scaled_delta(x, self.warp_rows.p) for x in self.query_values(s, 1)])[0]
    dp, left = [s.dp[i].load() for i in self.columns], self.left[0]
    return s, [[ops.add(x, d) for x, d in zip(left.drop(dp), minus_delta)]]

  def add(self, s:WgmmaBackwardState, name:str, p_or_ds:list[list[UOp]]) -> WgmmaBackwardState:
    tensor, kind = WEIGHTED[name]
    b, rows = self.of.in_shared(tensor, self.ring_place), self.warp_rows
    s = s.store(store_all(getattr(s, kind), p_or_ds[0]))
    return s.do(wgmma.output(s.acc, getattr(s, kind), s.shared[b.base], s.done, UNIT_BYTES*b.panel, rows.p.dtype, rows.accumulators(name),
                             self.there, not self.of.tile.keeps_dq))

  # ***** dQ of a block that owns keys *****
  @property
  def dq_part(self) -> tuple[UOp, UOp]:
    """Returns where the part of dQ that this warpgroup computes begins: (index of a group of 64 queries in the tile, first column)."""
    group, tile = wgmma.group(self.warp_rows.warps.at.wave), self.of.tile
    together, columns = tile.groups//tile.dq_panels, tile.dq_columns(self.warp_rows.p)
    return (UOp.const(0), group*columns) if tile.dq_panels == 1 else (group//together, group%together*columns)

  def start_dq(self, s:WgmmaBackwardState, ds:list[list[UOp]]) -> WgmmaBackwardState:
    # All warpgroups must have stored dS of their keys before the product starts. A warpgroup computes some columns of dQ.
    at, lies, k = self.warp_rows.warps.at, self.of.ds_in_shared(self.ring_place), self.of.in_shared("k", self.ring_place)
    mat = self.warp_rows.mat
    row, unit, panel = at.wave*mat.M + at.lane%mat.M, at.lane//mat.M, LINE*mat.unit      # `panel`: columns of a panel
    s = s.do(*[nv.stmatrix(s.shared[lies.place(row, unit + 2*i)], words) for i, words in enumerate(self.zero_for_missing_keys(ds[0]))])
    s = s.do(wgmma.publish(s.done))
    s = s.after(workgroup_barrier(s.done))
    queries, column = self.dq_part
    x, y, within = lies.base + queries*lies.panel, k.base + column//panel*k.panel, column%panel//mat.unit
    return s.do(wgmma.sums(s.dq, s.shared[x], s.shared[y], within, s.done, self.of.tile.block_m, UNIT_BYTES*k.panel, self.warp_rows.p.dtype,
                             self.of.tile.keeps_dq))

  def zero_for_missing_keys(self, ds:list[UOp]) -> list[UOp]:
    """Returns `ds`, dS as C fragments, with 0 for keys beyond the last key."""
    # for a missing key P = exp(0 - lse) can be inf, and dS too, which would enter dQ, a sum over the keys
    there = [below(row.index, self.of.group.sequence.n_k) for row in self.warp_rows.of_lane[0]]
    if all(x.op is Ops.CONST and x.arg for x in there): return ds
    return [ops.build(*[there[i%nv.ROWS].where(ops.extract(words, i), 0) for i in range(4)]) for words in ds]

  def add_dq(self, s:WgmmaBackwardState) -> WgmmaBackwardState:
    # Does not wait for the product that was started after dQ.
    s = self.of.turn_ended(s, self.warp_rows.head, self.tile_number - 1)
    s = s.do(wgmma.wait_products(s.dq, s.done, but=1))
    (queries, column), at, group, mat = self.dq_part, self.warp_rows.warps.at, self.of.group, self.warp_rows.mat
    first = self.score.row(self.tile_number*self.score.block_n) + queries*wgmma.M
    to = place_in_sums(group, mat, self.warp_rows.head, first, at.wave%(wgmma.M//mat.M), column//mat.N)
    whole = self.of.tile.dq_panels == 1 and not isinstance(self.score.order, TileList)      # the last tile of a list may be longer than the sequence
    there = wgmma.EVERYWHERE if whole else below(first, group.sequence.n_q)
    sets = None if self.of.turns is None else self.of.turns.sets(self.tile_number)
    return s.do(wgmma.send(s.dq, s.shared[self.of.sent], flat(group.given["dq_sums"])[to + at.lane*4], at.lane, there, s.done, sets))
