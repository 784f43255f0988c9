"""The gradient of a bias on AMD's matrix units: the block of the bias that a workgroup owns, the loop over its scores, the stores of the sums."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from attn.chips import Chip
from attn.kernels.amd.backward import AmdBackward, AmdTrip, KeysState, TripStores, own_rows
from attn.kernels.amd.products import zeros
from attn.kernels.amd.staging import StagedTile
from attn.kernels.parts.backward.bias_share import BiasPart, BiasShare
from attn.kernels.parts.backward.gradients import normaliser_of
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.lanes import Lane, element_sum, sum_over_groups
from attn.kernels.parts.memory.layouts import LdsTile
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import trip_count
from attn.kernels.parts.program.statements import Statements, load_all, store_all
from attn.kernels.tiles.amd import BackwardTile, row_layout
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp, dtypes

# A workgroup has an outer loop over blocks of queries (of one head after another). For each block of queries an inner loop computes P and dS of tiles
# of keys, as attn/kernels/amd/backward.py does in a workgroup that owns queries. If the workgroup owns a tile of keys, the inner loop has this tile
# alone. Otherwise it has all keys that the queries see.

def _queries_of(of:AmdBackward, group:Workgroup, number:UOp|None) -> AmdBackward:
  """Returns a copy of `of` for the queries that `group` owns in one iteration of the loop over blocks of queries."""
  # `number` is the iteration's index if every iteration reads the same tile of keys, and None otherwise. P is 0 for queries beyond the last query,
  # because dS may be summed over queries. Rows of q and dO that other kernels keep in LDS are loaded from global memory for each tile.
  own = own_rows(group, of.tile, of.at, of.statements, (False, False))
  first, second = (replace(x, reloaded=reloaded) for x, reloaded in zip(own, of.tile.own_in_lds))
  there = replace(of, group=group, own=(first, second), outer_trip=number)
  return replace(there, known=(normaliser_of(group, there.row).where(there.row.there), group.query_value("delta", there.row)))

@dataclass(frozen=True)
class AmdBias:
  """Builder of the kernel for the gradient of a bias on AMD: its methods return the UOps of the steps of `BiasUnit`, for one thread."""
  of: AmdBackward      # the queries of the first iteration
  bias: BiasPart

  @staticmethod
  def of_block(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> AmdBias:
    mat, new, share = tile.matrix, Allocator(), BiasShare(p, tile.block_m, tile.block_n)
    if share.owns_keys: tile = replace(tile, prefetch=0)       # no prefetch of a next tile: all iterations read one tile
    bias = BiasPart.of(share, parts, mat.wave, tile.waves, new)
    at, statements = Lane(bias.grid.lane, bias.grid.wave, mat), Statements.of(new)
    lies = [LdsTile.of(new, row_layout(mat, tile.block_n, width), tile.buffers) for width in (p.D, p.Dv)]
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, x, None) for x in lies)
    state = KeysState(k, v, new.registers(tile.block_n//mat.M, ops.f32(mat.accumulator)), TripStores())
    group = Workgroup.of(p, arch, tile, args, bias.first_place, at, shapes)
    first = AmdBackward(tile, new, statements, state, group, at, own_rows(group, tile, at, statements, (False, False)), (), group.first_head)
    return AmdBias(_queries_of(first, group, UOp.const(0) if share.owns_keys else None), bias)

  @property
  def group(self) -> Workgroup: return self.of.group
  def kernel(self, *how:Any) -> UOp: return self.of.kernel(*how)

  # ***** the iterations *****
  def begin(self) -> Any: return self.of.begin()

  def walk(self, s:Any, work:Callable[[Any, AmdTrip], Any]) -> Any:
    if self.bias.one_trip: return self.over_keys(self.of, s, self.bias.first_trip, work)
    first, count = self.bias.own_trips
    if (number := trip_count(count)) is None: return s
    r = self.of.new.range(number, AxisType.LOOP)
    i = (first + r).minimum(self.bias.share.trips - 1)
    there = _queries_of(self.of, self.group.moved(self.bias.grid_of_trip(i)), i if self.bias.share.owns_keys else None)
    done = self.over_keys(there, s.after(r), i, work)
    return s.after(self.of.statements.do(amd.sched_barrier(done.acc[0].load())).end(r))

  def over_keys(self, of:AmdBackward, s:Any, i:UOp, work:Callable[[Any, AmdTrip], Any]) -> Any:
    if self.bias.share.owns_keys: return s.after(of.trips.trip(s, self.bias.key_tile_of(i), True, of.trip(work)))
    return of.trips.walk(s, self.bias.walked(of.group), of.trip(work))

  def sum(self, s:Any, ds:list[UOp], tile:AmdTrip) -> Any:
    if self.bias.share.stored_at_once: stores = self.stores(tile.of, tile.t, ds)
    else: stores = store_all(s.acc, [ops.add(s.acc[i].load(), x) for i, x in enumerate(ds)])
    return replace(s, stores=TripStores(tuple(stores)))

  # ***** the stores *****
  def stores_of_row(self, of:AmdBackward, column:UOp, values:UOp, there:UOp) -> list[UOp]:
    """Returns the stores of `values` to the gradient of the bias: in the row of this lane's query, from column `column` on."""
    # the only row if all queries share one row of the bias; where `there` is false, nothing is stored
    return self.bias.stores(of.group, of.row, column, values, there)

  def stores(self, of:AmdBackward, t:UOp, ds:list[UOp]) -> list[UOp]:
    """Returns the stores of dS, C fragments, to the gradient of the bias, for this lane's query and the keys of tile t."""
    # one store writes the elements of several neighbouring keys
    n = of.tile.matrix.block
    return [x for values, keys in zip(ds, of.group.scores.walked) for i in range(0, len(keys), n)
            for x in self.stores_of_row(of, t*of.tile.block_n + of.at.h*n + keys[i], ops.slice_(values, i, n), self.bias.stored(of.row))]

  def zero_stores(self, t:UOp) -> list[UOp]:
    return self.stores(self.of, t, zeros(self.of.tile.matrix, 1, self.of.tile.block_n//self.of.tile.matrix.M)[0])

  def sums(self, s:Any) -> list[UOp]:
    # If all keys share one element of the bias, first sums dS over the keys, in registers. If all queries share one row of the bias, first sums dS
    # over the queries, in LDS. If each score has an element of the bias to itself, each iteration has already stored its tile of dS: only the tiles
    # of keys that no query sees get stores, of 0.
    of, share = self.of, self.bias.share
    if share.stored_at_once:
      return [*self.bias.outside(of.group.walked, self.zero_stores), of.statements.do(amd.sched_barrier(), s.k.row_tile.buffer)]
    ds = load_all(s.acc)
    if share.broadcast[3]: ds = [sum_over_groups(functools.reduce(ops.add, map(element_sum, ds)), of.tile.matrix)]
    if share.broadcast[2]: return self.sums_of_rows(ds)
    if not share.broadcast[3]: return self.stores(of, self.bias.key_tile, ds)
    return self.stores_of_row(of, UOp.const(0), ds[0], of.row.there & of.at.h.eq(0))

  def sums_of_rows(self, ds:list[UOp]) -> list[UOp]:
    """Adds up `ds` over all queries that the workgroup owns, through LDS, and returns the stores of the sums to the gradient of the bias."""
    # Each thread adds vectors of four numbers. The four numbers belong to four keys, or to four queries if `ds` is already summed over keys.
    of, tile, mat, new = self.of, self.of.tile, self.of.tile.matrix, self.of.new
    row, there = of.own[0].in_block[0], of.at.h.eq(0)
    one, held = self.bias.share.broadcast[3], tile.block_n//mat.groups//4              # vectors of four that a lane holds
    units = new.lds(tile.block_m//4 if one else tile.block_m*held*mat.groups, ops.f32(4))
    if one: stores = [units.bitcast(dtypes.float)[row.valid(there)].store(ds[0])]
    else:
      first, fours = (row*mat.groups + of.at.h)*held, [ops.slice_(x, i, 4) for x in ds for i in range(0, mat.accumulator, 4)]
      stores = [units[first + i].store(x) for i, x in enumerate(fours)]
    threads, trips = (1, tile.block_m//4) if one else (held*mat.groups, tile.block_m)
    thread, total = of.at.thread.minimum(threads - 1), new.registers(1, ops.f32(4))
    r = new.range(trips, AxisType.LOOP)
    so_far = total.after(total[0].store(ops.splat(0.0, 4)), r)
    four = units.after(UOp.group(*stores))[r*threads + thread].load()
    found, mine = total.after(so_far[0].store(ops.add(so_far[0].load(), four)).end(r))[0].load(), of.at.thread < threads
    if one: return self.stores_of_row(of, UOp.const(0), element_sum(found), mine)
    together, first = min(4, mat.block), self.bias.key_tile*tile.block_n
    return [x for i in range(0, 4, together)
            for x in self.stores_of_row(of, first + mat.key_of(thread//held, thread%held*4 + i), ops.slice_(found, i, together), mine)]
