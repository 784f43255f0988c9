"""Backward for few queries with Hopper's wgmma (sm_90): one kernel for dQ, dK and dV. Begin with `WgmmaFewQueries.walk`."""
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass, replace
from attn.chips import Chip
from attn.kernels.nvidia.warp_gradients import WarpRows
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.gradients import gradients_of_passes
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import Workgroup, cut_off
from attn.kernels.parts.memory.layouts import SwizzledPanels
from attn.kernels.parts.program.blocks import Blocks, blocks_seen, over_keys, over_queries
from attn.kernels.parts.program.counts import bounded, ceildiv
from attn.kernels.parts.program.statements import store_all, workgroup_barrier
from attn.kernels.parts.program.trips import over_tiles
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.common import OF_KEYS, OF_QUERIES, query_value_names
from attn.kernels.tiles.mma import fragments
from attn.kernels.tiles.wgmma import WgmmaFewQueriesTile
from attn.kernels.wgmma.backward import RingPlace, WgmmaBackward, WgmmaBackwardState, WgmmaTrip, WgmmaWork, shared_memory
from attn.ops import hopper as wgmma, nvidia as nv
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# All queries of a head fit into one tile of 64 queries. A block has one warpgroup. It copies q, dO, lse and delta of this tile to shared memory,
# where they stay. It loops over a part of the keys: tiles of 64 keys pass through a ring buffer of two tiles. A lane owns keys, as in the kernel of
# attn/kernels/wgmma/backward.py that computes all gradients at once, and the operations on a tile are the same. But these keys change with each
# iteration. An iteration has all scores of its keys, so it finishes their dK and dV and stores them. dQ stays in registers. Blocks with different
# keys of the same head store a part of dQ each, so that no block waits for another one, and all sums have a fixed order.
#
# The warps wait for each other once in an iteration, when dS is in shared memory. Then no warp reads the tile of the previous iteration any longer,
# and the copies of the next iteration's tile may overwrite it.

QUERIES = UOp.const(0)     # the only tile of queries

def every_tile(group:Workgroup, parts:int) -> Blocks:
  """Returns the indices of the tiles of keys over which the workgroup loops: all tiles, or its share if `parts` workgroups divide them."""
  # tiles that no query sees are among those in which a mask may hide scores; their dK and dV are 0
  p, size, queries = group.p, group.tile.block_m, group.tile.block_n
  seen = blocks_seen(over_keys(p, group.sequence), group.first_row, group.first_row + (queries - 1), size)
  full_end = seen.full_begin if p.Sq % queries else seen.full_end      # masks also hide queries that do not exist
  tiles = Blocks(UOp.const(0), seen.full_begin, full_end, UOp.const(ceildiv(p.Sk, size)), seen.masked_first)
  return tiles.share(group.split[0], parts) if group.split else tiles

def as_owner_of_keys(group:Workgroup, tiles:Blocks, in_parts:bool) -> Workgroup:
  """Returns `group`, which owns queries, as a workgroup that owns the keys of the first tile instead, for code that sums dK and dV."""
  # `tiles` are all tiles over which it loops; `in_parts`: whether dk and dv are fp32 sums
  p, own = group.p, Row(group.batch, group.first_head, UOp.const(0), UOp.const(True))
  walk = over_queries(p, group.sequence)
  scores = Scores(p, group.scores.at, group.tile.block_n, walk, own, group.given, natural=p.wide_scores, cut=cut_off(walk, group.tile))
  return replace(group, first_row=own.index, end_row=group.sequence.n_k, scores=scores, walked=tiles, part=UOp.const(0) if in_parts else None)

@dataclass(frozen=True)
class WgmmaFewQueries(WgmmaBackward):
  """Builder of a kernel that computes all gradients of few queries: a block holds all queries of a head and loops over tiles of keys."""
  _: KW_ONLY
  queries: WarpRows[SwizzledPanels]   # the queries that the block holds

  @staticmethod
  def of_block(p:Problem, arch:Chip, tile:WgmmaFewQueriesTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> WgmmaFewQueries:
    """Makes the object for a block that holds all queries of a head; `args` are the tensors that `shapes` names."""
    # `shapes` has the names, shapes and dtypes of `args`, in the same order; if `parts` is above 0, the keys are divided into `parts` parts, and each
    # block loops over one part
    if (reason := tile.cannot_add_dq(p)) is not None: raise NotImplementedError(f"backward_few_wgmma: {reason}")
    warps = Warps.of(p, arch, tile, tile.matrix, args, shapes, parts)
    group, accs = warps.group, sum(fragments(width, tile.matrix) for width in (p.D, p.Dv))
    of_keys = replace(warps, group=as_owner_of_keys(group, every_tile(group, parts), shapes["dk"] != p.shapes["k"]))
    state = WgmmaBackwardState.of(of_keys, tile, accs, shared_memory(group.grid, p, tile))
    return WgmmaFewQueries(WarpRows(of_keys, tile, gradients_of_passes(1, True)[0], group.first_head), tile, state,
                           queries=WarpRows(warps, replace(tile, keys=False), ("dq",), group.first_head))

  # ***** the loop over tiles of keys *****
  def begin(self, s:WgmmaBackwardState|None=None, stores:list[UOp]|None=None) -> WgmmaBackwardState:
    rows, first = self.queries, self.ring_at(self.walked.begin, 0)
    group, warps = rows.warps.group, rows.warps
    s = self.state.store([self.state.statements.first]).expected(warps.at, self.tile.threads)
    s = s.do(*[x for name in OF_QUERIES for x in warps.copies(group.operand_rows(name), s.shared, group.first_row, self.in_shared(name, first))],
             *self.copies_of_query_values(s.shared, first))
    s = self.fetch(s, first)
    s = s.store(rows.kept_deltas(), store_all(s.dq, [nv.zero(s.done)]*s.dq.max_numel()))
    return s.after(workgroup_barrier(s.done))

  def copies_of_query_values(self, shared:UOp, place:RingPlace) -> list[UOp]:
    """Returns the statements by which lse and delta of all queries come to shared memory: copies, or stores of values in registers."""
    # lse is copied, and delta is stored as soon as it is computed
    rows, group, n, at = self.queries, self.queries.warps.group, self.tile.block_n, self.queries.warps.at
    floats, first = shared.bitcast(dtypes.float), self.place_of_query_values(place)*4
    tensors = {name: group.query_value_rows(name, group.first_head) for name in query_value_names(self.group.p) if name != "delta"}
    kinds = {name: first + kind*n for kind, name in enumerate(query_value_names(self.group.p))}
    copies = [nv.copy_number(floats[kinds[name] + at.thread], x.buffer[x.base + at.thread], at.thread < x.count, at.thread < n)
              for name, x in tensors.items()]
    return copies + [nv.put(floats[kinds["delta"] + begin + rows.mat.c_row(at.lane, r)], delta, at.h.eq(0))
                     for begin, deltas in zip(rows.in_block, rows.deltas) for r, delta in enumerate(deltas)]

  def fetch(self, s:WgmmaBackwardState, place:RingPlace) -> WgmmaBackwardState:
    """Starts this thread's copies of K and V for iteration `place`, if its tile of keys exists, and returns the state."""
    # the thread arrives at the mbarrier when its copies are complete
    group, size = self.group, self.tile.block_m
    there = (self.walked.end*size).minimum(group.sequence.n_k)
    s = s.do(*[x for name in OF_KEYS
               for x in self.warp_rows.warps.copies(group.operand_rows(name).up_to(there), s.shared, place.tile*size, self.in_shared(name, place))])
    return s.do(wgmma.arrive(s.arrivals, s.done))

  def walk(self, s:WgmmaBackwardState, work:WgmmaWork) -> WgmmaBackwardState:
    def trip(s:WgmmaBackwardState, t:UOp, masked:bool) -> UOp:
      place, rows = self.ring_at(t, 0), self.keys_of_tile(t, masked)
      s = s.do(wgmma.arrived(s.arrivals, place.index, s.done))
      return work(s, WgmmaFewQueriesTrip(rows, rows.scores, QUERIES, masked, self, place)).done
    s = over_tiles(s, self.walked, self.group.grid.allocator, trip)
    return s.do(wgmma.wait_products(s.dq, s.done))

  def keys_of_tile(self, t:UOp, masked:bool) -> WarpRows[SwizzledPanels]:
    """Returns `WarpRows` of the keys in tile `t`: the rows for which this block's warps sum dK and dV."""
    # without a mask (`masked` is false) all of them exist
    group, size = self.group, self.tile.block_m
    first = (t if masked else bounded(t, 0, group.p.Sk//size - 1))*size
    scores = replace(group.scores, first=replace(group.scores.first, index=first))
    return replace(self.warp_rows, warps=replace(self.warp_rows.warps, group=replace(group, first_row=first, scores=scores)))

  def gradient(self, s:WgmmaBackwardState, name:str) -> list[UOp]: return self.queries.gradient(s.dq, name)

@dataclass(frozen=True)
class WgmmaFewQueriesTrip(WgmmaTrip):
  """The steps of one iteration, on one tile of keys and all queries."""
  # the first product of dV, and of dK, does not add to the accumulators
  of: WgmmaFewQueries

  def scores(self, s:WgmmaBackwardState) -> tuple[WgmmaBackwardState, list[list[UOp]]]:
    s = s.do(wgmma.wait_products(s.scores, s.done, but=1))
    return s, [[s.scores[i].load() for i in self.columns]]

  def start_dq(self, s:WgmmaBackwardState, ds:list[list[UOp]]) -> WgmmaBackwardState:
    """Stores dS to shared memory, starts the product dQ += dS K and the copies of the next tile, and returns the state."""
    s = super().start_dq(s, ds)
    # no warp reads the tile of the previous iteration any longer: the next tile takes its place
    return self.of.fetch(s, self.of.next(self.ring_place))

  def finish_keys(self, s:WgmmaBackwardState) -> WgmmaBackwardState:
    """Stores dV and dK of the tile's keys to memory, once their products are complete, and returns the state."""
    own, = self.warp_rows.of_lane
    known = [self.seen(key) if self.masked else None for key in own]
    # dV while dQ and dK are computed
    for name, but in (("dv", 2), ("dk", 0)):
      place = self.warp_rows.accumulators(name)
      s = s.do(wgmma.wait_products(s.acc, s.done, but, place))
      s = s.store(self.warp_rows.stores([s.acc[i].load() for i in place], name, own, known))
    return s

  def seen(self, key:Row) -> UOp:
    """Returns whether the row `key` exists and any query sees it. If not, its dK and dV are stored as 0."""
    return self.score.seen_by(key.index, key.index, QUERIES) & (key.index < self.of.group.sequence.n_k)
