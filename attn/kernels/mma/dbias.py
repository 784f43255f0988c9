"""The gradient of a bias, with NVIDIA's mma.sync: the elements of the bias that a thread block owns, the loop over all scores to which these elements
are added, and the stores of the sums."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Any
from attn.chips import Chip
from attn.kernels.mma.backward import MmaBackward, MmaBackwardState, MmaTrip, MmaWork
from attn.kernels.nvidia.warp_gradients import OwnQueryValues, WarpRows
from attn.kernels.nvidia.warps import Warps, sum_over_quad
from attn.kernels.parts.backward.bias_share import BiasPart, BiasShare
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.lanes import MmaLane, element_sum
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import trip_count
from attn.kernels.parts.program.statements import add_all
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.ops import common as ops, nvidia as nv
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, UOp, dtypes

# A thread block has an outer loop over groups of queries (of one head after another). For each group Q and dO are copied to shared memory, and an
# inner loop computes P and dS of tiles of keys, as attn/kernels/mma/backward.py does in a thread block that owns queries. If the thread block owns a
# tile of keys, the inner loop has this tile alone, which is copied again each time. Otherwise the inner loop has all keys that the queries see, whose
# tiles pass through a ring buffer. The sums are fp32 numbers in registers.

def _queries_of(group:Workgroup, at:MmaLane, tile:MmaBackwardTile, state:MmaBackwardState) -> MmaBackward:
  """Returns the object with the steps of backward for the queries that `group` owns in one iteration of the loop."""
  # P is 0 for queries beyond the last query, because dS may be summed over queries
  queries: WarpRows[SwizzledRows] = WarpRows(Warps(group, at), tile, (), group.first_head)
  normalisers = [[x.where(row.there) for x, row in zip(own, rows)] for own, rows in zip(queries.normalisers, queries.of_lane)]
  deltas = [[group.query_value("delta", row) for row in rows] for rows in queries.of_lane]
  return MmaBackward(queries, tile, state, OwnQueryValues(normalisers, deltas))

@dataclass(frozen=True)
class MmaBias:
  """Builder of the kernel for the gradient of a bias with mma.sync: its methods return the UOps of the steps of `BiasUnit`, for one thread."""
  of: MmaBackward      # the queries of the first iteration
  bias: BiasPart

  @staticmethod
  def of_block(p:Problem, arch:Chip, tile:MmaBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> MmaBias:
    mat = tile.matrix
    bias = BiasPart.of(BiasShare(p, tile.block_m, tile.block_n), parts, mat.wave, tile.waves, Allocator())
    at = MmaLane(bias.grid.lane, bias.grid.wave, mat)
    group = Workgroup.of(p, arch, tile, args, bias.first_place, at, shapes)
    state = MmaBackwardState.of(Warps(group, at), tile, tile.block_n//mat.N)
    return MmaBias(_queries_of(group, at, tile, state), bias)

  @property
  def group(self) -> Workgroup: return self.of.group
  def kernel(self, *how:Any) -> UOp: return self.of.kernel(*how)
  @property
  def share(self) -> BiasShare: return self.bias.share
  @property
  def at(self) -> MmaLane: return self.of.warp_rows.warps.at

  # ***** the iterations *****
  def begin(self) -> MmaBackwardState: return self.of.cleared(self.of.state)

  def walk(self, s:MmaBackwardState, work:MmaWork) -> MmaBackwardState:
    # `work` gets one part of a tile at a time. An iteration of the outer loop, over groups of queries, begins when all reads of the iteration before
    # are done.
    if self.bias.one_trip: return self.over_keys(self.of, s, self.bias.first_trip, work)
    first, count = self.bias.own_trips
    if (number := trip_count(count)) is None: return s
    r = self.group.grid.allocator.range(number, AxisType.LOOP)
    i = (first + r).minimum(self.share.trips - 1)
    there = _queries_of(self.group.moved(self.bias.grid_of_trip(i)), self.at, self.of.tile, self.of.state)
    return s.after(self.over_keys(there, s.after(r).arrived(0), i, work).done.end(r))

  def over_keys(self, of:MmaBackward, s:MmaBackwardState, i:UOp, work:MmaWork) -> MmaBackwardState:
    s = s.started(of.warp_rows.copies(s.shared))
    if not self.share.owns_keys: return of.over_tiles(s, self.bias.walked(of.group), work)
    key_tile = self.bias.key_tile_of(i)
    return of.over_parts(of.fetch(s, key_tile).arrived(0), key_tile, True, work)

  def sum(self, s:MmaBackwardState, ds:list[list[UOp]], tile:MmaTrip) -> MmaBackwardState:
    if self.share.stored_at_once: return s.after(UOp.group(*self.stores(tile.of, tile.t, ds, tile.part)))
    places = [self.fragments(i)[tile.part*len(x):(tile.part + 1)*len(x)] for i, x in enumerate(ds)]
    return s.store(*[add_all(s.acc, x, own) for own, x in zip(places, ds)])

  def fragments(self, i:int) -> range:
    """Returns which accumulators hold the sums of dS of the i-th matrix tile of queries, as a range of indices."""
    n = self.of.tile.block_n//self.of.tile.matrix.N
    return range(i*n, (i + 1)*n)

  # ***** the stores *****
  def of_rows(self, of:MmaBackward, ds:list[list[UOp]]) -> list[tuple[Row, list[UOp]]]:
    """Splits C fragments of dS into rows: returns a list of (row, its elements as vectors of two neighbouring keys) for this lane's rows."""
    # `ds` has a list of C fragments for each matrix tile of queries
    return [(row, [ops.slice_(x, 2*r, 2) for x in own]) for rows, own in zip(of.warp_rows.of_lane, ds) for r, row in enumerate(rows)]

  def stores(self, of:MmaBackward, t:UOp, ds:list[list[UOp]], part:int=0) -> list[UOp]:
    """Returns the stores of dS, C fragments, to the gradient of the bias, for the keys of part number `part` of tile t."""
    # `ds` has a list of C fragments for each matrix tile of queries
    first = t*of.tile.block_n + part*of.tile.part_n + self.at.h*of.tile.matrix.block
    return [x for row, columns in self.of_rows(of, ds) for n, values in enumerate(columns)
            for x in self.bias.stores(of.group, row, first + n*of.tile.matrix.N, values, self.bias.stored(row))]

  def zero_stores(self, t:UOp) -> list[UOp]:
    return self.stores(self.of, t, [[ops.splat(0.0, 4)]*len(self.fragments(0))]*self.of.tile.row_tiles)

  def sums(self, s:MmaBackwardState) -> list[UOp]:
    # If all keys share one element of the bias, first sums dS over the keys, in registers and over the lanes of a row. If all queries share one row
    # of the bias, first sums dS over the queries, through shared memory. If each score has an element of the bias to itself, each iteration has
    # already stored its tile of dS: only the tiles of keys that no query sees get stores, of 0.
    if self.share.stored_at_once: return [*self.bias.outside(self.group.walked, self.zero_stores), s.statements.do(s.done)]
    tiles = [[s.acc[j].load() for j in self.fragments(i)] for i in range(self.of.tile.row_tiles)]
    rows = self.of_rows(self.of, tiles)
    if self.share.broadcast[3]: rows = [(row, [sum_over_quad(element_sum(functools.reduce(ops.add, columns)))]) for row, columns in rows]
    if self.share.broadcast[2]: return self.sums_of_rows(s, [columns for _, columns in rows])
    if not self.share.broadcast[3]: return self.stores(self.of, self.bias.key_tile, tiles)
    first = self.at.h.eq(0)
    return [x for row, (total,) in rows for x in self.bias.stores(self.group, row, UOp.const(0), total, row.there & first)]

  def sums_of_rows(self, s:MmaBackwardState, rows:list[list[UOp]]) -> list[UOp]:
    """Sums dS over all queries of the block, and returns the stores of the sums. `rows` lists dS of each row that this lane holds."""
    # First over the rows of a lane, then over the lanes of a warp, then, through shared memory, over the warps. `rows` has for each of the lane's
    # rows a list of vectors of neighbouring keys.
    at, tile, mat, one = self.at, self.of.tile, self.of.tile.matrix, self.share.broadcast[3]
    columns, n = [functools.reduce(ops.add, column) for column in zip(*rows)], mat.block
    numbers = columns if one else [ops.extract(x, i) for x in columns for i in range(n)]
    for step in at.neighbours[0]: numbers = [x + nv.xor_lane(x, step) for x in numbers]
    places = [at.h*n + (i//n*mat.N + i%n) for i in range(len(numbers))]
    pairs = 1 if one else tile.block_n//n                   # number of pairs of numbers of each warp
    s = s.arrived(0)
    to = s.shared.bitcast(dtypes.float)
    s = s.do(*[nv.put(to[at.wave*(pairs*n) + place], x, at.in_octet.eq(0) & (place < pairs*n)) for place, x in zip(places, numbers)])
    s = s.after_barrier()
    of_warps, stores, row = s.shared.bitcast(nv.F2), list[UOp](), self.of.warp_rows.of_lane[0][0]
    for begin in range(0, pairs, tile.threads):
      pair = at.thread + begin
      total = functools.reduce(ops.add, [of_warps[pair.minimum(pairs - 1) + warp*pairs].load() for warp in range(tile.waves)])
      column, values = (pair, ops.extract(total, 0)) if one else ((self.bias.key_tile*pairs + pair)*n, total)
      stores += self.bias.stores(self.group, row, column, values, pair < pairs)
    return stores
