"""The gradient of a bias: one program for every AMD matrix unit.

A bias is a tensor that a term adds to scores: its gradient is dS = P * (dP - delta) of those, summed over the dimensions in which the bias is
broadcast. A workgroup owns a block of the bias, BLOCK_M queries by BLOCK_N keys or what is left of that where rows or keys are broadcast, and walks
over all that shares it: batches, heads, blocks of queries, tiles of keys, always in the same order. It computes S and dP anew, sums dS in fp32 in
registers, and no scores go to memory. Where nothing but perhaps keys is summed it walks over the keys of its queries instead, as `backward_dq` does.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.bias_share import BiasPart, BiasShare
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.lanes import Lane, element_sum, sum_over_groups
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.gradients import Exponent
from attn.kernels.parts.own_queries import KeysState, OwnQueries
from attn.kernels.parts.products import OwnRows, zeros
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Statements, store_all
from attn.kernels.parts.tensors import check_backward, dbias_arguments
from attn.kernels.parts.workgroup import Workgroup
from attn.kernels.tiles.amd import BackwardTile, row_layout
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.score.terms import summed_term
from attn.tinygrad_compat import AxisType, UOp, dtypes

def backward_dbias(p:Problem, arch:Chip, tile:BackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dbias, given the delta of `backward_dq`, as a function of its placeholders: those of `tensors.dbias_arguments(p, parts)`
  in that order. With `parts` > 0 what is summed is divided into so many parts, whose fp32 sums are left to be added. Of the tile, rows that
  `backward_dq` keeps in LDS are read from global memory in every trip.

  Raises NotImplementedError for what `tensors.check_backward` names, and ValueError for more parts than trips.
  """
  check_backward(p, tile)
  BiasShare(p, tile.block_m, tile.block_n).check_parts(parts)
  return lambda *args: BackwardDbias.of(p, arch, tile, args, parts).program()

@dataclass(frozen=True)
class DbiasState(KeysState):
  acc: UOp           # sums of dS^T, a column of C fragments

@dataclass(frozen=True)
class BackwardDbias(OwnQueries[DbiasState]):
  """The kernel of one problem, as a thread sees it in one of the trips over what is summed."""
  bias: BiasPart
  number: UOp        # of the trip over what is summed

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], parts:int) -> BackwardDbias:
    mat, new, share = tile.matrix, Allocator(), BiasShare(p, tile.block_m, tile.block_n)
    if share.owns_keys: tile = replace(tile, prefetch=0)       # no trip is to know the next one's tile
    bias = BiasPart.of(share, parts, mat.wave, tile.waves, new)
    at, statements = Lane(bias.grid.lane, bias.grid.wave, mat), Statements.of(new)
    lies = [LdsTile.of(new, row_layout(mat, tile.block_n, width), tile.buffers) for width in (p.D, p.Dv)]
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, x, None) for x in lies)
    state = DbiasState(k, v, new.registers(tile.block_n//mat.M, ops.f32(mat.accumulator)))
    group = Workgroup.of(p, arch, tile, args, bias.first_place, at, dbias_arguments(p, parts))
    q, do = own_rows(group, tile, at, statements)
    return BackwardDbias(tile, new, statements, state, group, at, q, do, bias, UOp.const(0))

  def trip_over(self, i:UOp) -> BackwardDbias:
    """The same in the i-th trip over what is summed."""
    group = self.group.moved(self.bias.place(i))
    q, do = own_rows(group, self.tile, self.at, self.statements)
    return replace(self, group=group, q=q, do=do, number=i)

  def trip_number(self, t:UOp) -> UOp:
    """Where keys are owned all trips have the same tile of them."""
    return self.number if self.bias.share.owns_keys else t

  @functools.cached_property
  def exponent(self) -> Exponent:
    """P is 0 beyond the last query too, for it is summed where rows are."""
    found: Exponent = super().exponent
    return found.where(self.row.there)

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, share, p = self.group, self.bias.share, self.group.p
    s = self.state.after(UOp.group(*store_all(self.state.acc, zeros(self.tile.matrix, 1, self.state.acc.max_numel())[0])))
    s = self.walk_keys(s) if self.bias.one_trip else self.over_trips(s)
    if share.stored_at_once: outputs = [*self.bias.outside(group.walked, self.nothing), self.statements.do(amd.sched_barrier(), s.k.rows.buffer)]
    else: outputs = self.sums(s)
    return group.gradient_kernel("backward_dbias", (), outputs, p.flops)

  def over_trips(self, s:DbiasState) -> DbiasState:
    """Those of its part."""
    first, count = self.bias.own_trips
    if (number := trip_count(count)) is None: return s
    r = self.new.range(number, AxisType.LOOP)
    done = self.trip_over((first + r).minimum(self.bias.share.trips - 1)).walk_keys(s.after(r))
    return s.after(self.statements.do(amd.sched_barrier(done.acc[0].load())).end(r))

  def walk_keys(self, s:DbiasState) -> DbiasState:
    if self.bias.share.owns_keys: return s.after(self.trips.trip(s, self.bias.key_tile, True, self.work))
    return self.trips.walk(s, self.bias.walked(self.group), self.work)

  def work(self, s:DbiasState, t:UOp, masked:bool) -> UOp:
    """dS of a tile of keys."""
    k, v = (self.trips.in_lds(s, t, name) for name in self.trips.loaded)
    ds = self.ds(k.rows, v.rows, t, masked, summed_term(self.group.p))
    if self.bias.share.stored_at_once: return UOp.group(*self.stores(t, ds))
    return UOp.group(*store_all(s.acc, [ops.add(s.acc[i].load(), x) for i, x in enumerate(ds)]))

  # ***** the stores *****
  def stores_of_row(self, column:UOp, values:UOp, there:UOp) -> list[UOp]:
    """Of consecutive elements of the lane's row, or of the one that all rows share."""
    return self.bias.stores(self.group, self.row, column, values, there)

  def stores(self, t:UOp, ds:list[UOp]) -> list[UOp]:
    """Those of the elements that a lane has of tile t: neighbouring keys at a time."""
    n = self.tile.matrix.block
    return [x for values, keys in zip(ds, self.group.scores.walked) for i in range(0, len(keys), n)
            for x in self.stores_of_row(t*self.tile.block_n + self.at.h*n + keys[i], ops.slice_(values, i, n), self.row.there)]

  def nothing(self, t:UOp) -> list[UOp]:
    """The stores of 0 to tile t."""
    return self.stores(t, zeros(self.tile.matrix, 1, self.tile.block_n//self.tile.matrix.M)[0])

  def sums(self, s:DbiasState) -> list[UOp]:
    """The stores of what was summed: over keys in registers, over rows in LDS."""
    share, ds = self.bias.share, [s.acc[i].load() for i in range(s.acc.max_numel())]
    if share.broadcast[3]: ds = [sum_over_groups(functools.reduce(ops.add, map(element_sum, ds)), self.tile.matrix)]
    if share.broadcast[2]: return self.sums_of_rows(ds)
    if not share.broadcast[3]: return self.stores(self.bias.key_tile, ds)
    return self.stores_of_row(UOp.const(0), ds[0], self.row.there & self.at.h.eq(0))

  def sums_of_rows(self, ds:list[UOp]) -> list[UOp]:
    """Four numbers a thread, each added up over the rows: those of as many keys of a lane group, or where keys are summed too of as many rows."""
    tile, mat, row, there = self.tile, self.tile.matrix, self.q.in_block[0], self.at.h.eq(0)
    one, held = self.bias.share.broadcast[3], tile.block_n//mat.groups//4              # by a lane, in vectors of four
    units = self.new.lds(tile.block_m//4 if one else tile.block_m*held*mat.groups, ops.f32(4))
    if one: stores = [units.bitcast(dtypes.float)[row.valid(there)].store(ds[0])]
    else:
      first, fours = (row*mat.groups + self.at.h)*held, [ops.slice_(x, i, 4) for x in ds for i in range(0, mat.accumulator, 4)]
      stores = [units[first + i].store(x) for i, x in enumerate(fours)]
    threads, trips = (1, tile.block_m//4) if one else (held*mat.groups, tile.block_m)
    thread, total = self.at.thread.minimum(threads - 1), self.new.registers(1, ops.f32(4))
    r = self.new.range(trips, AxisType.LOOP)
    so_far = total.after(total[0].store(ops.splat(0.0, 4)), r)
    four = units.after(UOp.group(*stores))[r*threads + thread].load()
    found, mine = total.after(so_far[0].store(ops.add(so_far[0].load(), four)).end(r))[0].load(), self.at.thread < threads
    if one: return self.stores_of_row(UOp.const(0), element_sum(found), mine)
    together, first = min(4, mat.block), self.bias.key_tile*tile.block_n
    return [x for i in range(0, 4, together)
            for x in self.stores_of_row(first + mat.key_of(thread//held, thread%held*4 + i), ops.slice_(found, i, together), mine)]

def own_rows(group:Workgroup, tile:BackwardTile, at:Lane, statements:Statements) -> tuple[OwnRows, OwnRows]:
  """Of q and dO."""
  q, do = (OwnRows.of(at, group.operand_rows(name), group.first_row, tile.block_m, group.grid.allocator, False, tile.sparing, statements)
           for name in ("q", "do"))
  return replace(q, anew=tile.own_in_lds[0]), replace(do, anew=tile.own_in_lds[1])
