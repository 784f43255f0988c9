"""The gradient of a bias on NVIDIA's mma.sync (sm_80 and later): the algorithm of attn/kernels/backward_dbias.py with the query on the rows.

dS = P * (dP - delta) of what the bias is added to, summed over the dimensions in which it is broadcast. A block owns a block of the bias and
walks over all that shares it, always in the same order. In each trip Q and dO of a block of queries of one head come to shared memory, and the owned
tile of K and V; or, where keys are summed or nothing is, all of them through a ring. The sums are fp32 in registers, and no scores go to memory.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.backward_mma import BackwardState, QueriesByMma
from attn.kernels.parts.bias_share import BiasPart, BiasShare
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.gradients import Exponent
from attn.kernels.parts.lanes import MmaLane, element_sum
from attn.kernels.parts.statements import workgroup_barrier
from attn.kernels.parts.tensors import check_backward, dbias_arguments
from attn.kernels.parts.warps import Warps, sum_over_quad
from attn.kernels.parts.workgroup import Workgroup
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.ops import common as ops, nvidia as nv
from attn.problem import Problem
from attn.score.term import Row
from attn.score.terms import summed_term
from attn.tinygrad_compat import AxisType, UOp, dtypes

def backward_dbias_mma(p:Problem, arch:Chip, tile:MmaBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dbias, given delta, as a function of its placeholders: called as `backward_dbias.backward_dbias`."""
  check_backward(p, tile)
  BiasShare(p, tile.block_m, tile.block_n).check_parts(parts)
  return lambda *args: BackwardDbiasMma.of(p, arch, tile, args, parts).program()

@dataclass(frozen=True)
class BackwardDbiasMma(QueriesByMma):
  """The kernel of one problem, as a thread sees it in one of the trips over what is summed."""
  bias: BiasPart

  @staticmethod
  def of(p:Problem, arch:Chip, tile:MmaBackwardTile, args:tuple[UOp, ...], parts:int) -> BackwardDbiasMma:
    mat = tile.matrix
    bias = BiasPart.of(BiasShare(p, tile.block_m, tile.block_n), parts, mat.wave, tile.waves, Allocator())
    at = MmaLane(bias.grid.lane, bias.grid.wave, mat)
    warps = Warps(Workgroup.of(p, arch, tile, args, bias.first_place, at, dbias_arguments(p, parts)), at)
    return BackwardDbiasMma(warps, tile, BackwardState.of(warps, tile, tile.block_n//mat.N), (), bias)

  def trip_over(self, i:UOp) -> BackwardDbiasMma:
    """The same in trip i."""
    return replace(self, warps=replace(self.warps, group=self.warps.group.moved(self.bias.place(i))))

  @property
  def share(self) -> BiasShare: return self.bias.share
  @functools.cached_property
  def exponents(self) -> list[list[Exponent]]:
    """P is 0 beyond the last query too, for it is summed where rows are."""
    found: list[list[Exponent]] = super().exponents
    return [[x.where(row.there) for x, row in zip(own, rows)] for own, rows in zip(found, self.queries)]
  @functools.cached_property
  def deltas(self) -> list[list[UOp]]: return [[self.warps.group.number("delta", row) for row in rows] for rows in self.queries]

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, s = self.warps.group, self.cleared(self.state)
    s = self.one_trip(s) if self.bias.one_trip else self.over_trips(s)
    outputs = [*self.bias.outside(group.walked, self.nothing), s.statements.do(s.done)] if self.share.stored_at_once else self.sums(s)
    return group.gradient_kernel("backward_dbias_mma", (), outputs, self.p.flops, self.tile.lds_bytes(self.p))

  def over_trips(self, s:BackwardState) -> BackwardState:
    """Those of its part. When one begins, all has been read of the one before."""
    first, count = self.bias.own_trips
    if (number := trip_count(count)) is None: return s
    r = self.warps.group.grid.allocator.range(number, AxisType.LOOP)
    trip = self.trip_over((first + r).minimum(self.share.trips - 1))
    return s.after(trip.one_trip(s.after(r).arrived(0)).done.end(r))

  def one_trip(self, s:BackwardState) -> BackwardState:
    s = s.started(self.copies_of_own(s))
    if not self.share.owns_keys: return self.walk(s, self.bias.walked(self.warps.group))
    s = self.fetch(s, self.bias.key_tile).arrived(0)
    for part in range(self.parts): s = self.work(s, self.bias.key_tile, part, masked=True)
    return s

  def work(self, s:BackwardState, t:UOp, part:int, masked:bool) -> BackwardState:
    """dS of some keys of a tile."""
    ds = self.ds(s, t, part, masked, summed_term(self.p))
    if self.share.stored_at_once: return s.after(UOp.group(*self.stores(t, ds, part)))
    places = [self.fragments(i)[part*len(x):(part + 1)*len(x)] for i, x in enumerate(ds)]
    return s.store([s.acc[at].store(ops.add(s.acc[at].load(), y)) for own, x in zip(places, ds) for at, y in zip(own, x)])

  def fragments(self, i:int) -> range:
    """Where the sums of the i-th tile of queries are."""
    n = self.tile.block_n//self.mat.N
    return range(i*n, (i + 1)*n)

  # ***** the stores *****
  def of_rows(self, tiles:list[list[UOp]]) -> list[tuple[Row, list[UOp]]]:
    """C fragments of each tile of queries as the lane's rows and what it has of each: neighbouring keys at a time."""
    return [(row, [ops.slice_(x, 2*r, 2) for x in own]) for rows, own in zip(self.queries, tiles) for r, row in enumerate(rows)]

  def stores(self, t:UOp, tiles:list[list[UOp]], part:int=0) -> list[UOp]:
    """Those of dS of tile t, from some part of it on."""
    first, group = t*self.tile.block_n + part*self.tile.part_n + self.warps.at.h*self.mat.block, self.warps.group
    return [x for row, columns in self.of_rows(tiles) for n, values in enumerate(columns)
            for x in self.bias.stores(group, row, first + n*self.mat.N, values, row.there)]

  def nothing(self, t:UOp) -> list[UOp]:
    """The stores of 0 to tile t."""
    return self.stores(t, [[ops.splat(0.0, 4)]*(self.tile.block_n//self.mat.N)]*self.tile.row_tiles)

  def sums(self, s:BackwardState) -> list[UOp]:
    """The stores of what was summed: over keys in registers and over the lanes of a row, over rows by way of shared memory."""
    tiles = [[s.acc[j].load() for j in self.fragments(i)] for i in range(self.tile.row_tiles)]
    rows = self.of_rows(tiles)
    if self.share.broadcast[3]: rows = [(row, [sum_over_quad(element_sum(functools.reduce(ops.add, columns)))]) for row, columns in rows]
    if self.share.broadcast[2]: return self.sums_of_rows(s, [columns for _, columns in rows])
    if not self.share.broadcast[3]: return self.stores(self.bias.key_tile, tiles)
    group, first = self.warps.group, self.warps.at.h.eq(0)
    return [x for row, (total,) in rows for x in self.bias.stores(group, row, UOp.const(0), total, row.there & first)]

  def sums_of_rows(self, s:BackwardState, rows:list[list[UOp]]) -> list[UOp]:
    """Each number summed over the lane's rows, over the lanes that have its other rows, and then, a pair of them for each thread, over the warps."""
    at, one, n = self.warps.at, self.share.broadcast[3], self.mat.block
    columns = [functools.reduce(ops.add, column) for column in zip(*rows)]
    numbers = columns if one else [ops.extract(x, i) for x in columns for i in range(n)]
    for step in at.neighbours[0]: numbers = [x + nv.xor_lane(x, step) for x in numbers]
    places = [at.h*n + (i//n*self.mat.N + i%n) for i in range(len(numbers))]
    pairs = 1 if one else self.tile.block_n//n                   # of each warp
    s = s.arrived(0)
    to = s.shared.bitcast(dtypes.float)
    s = s.do(*[nv.put(to[at.wave*(pairs*n) + place], x, at.in_octet.eq(0) & (place < pairs*n)) for place, x in zip(places, numbers)])
    s = s.after(workgroup_barrier(s.done))
    of_warps, stores, row = s.shared.bitcast(nv.F2), list[UOp](), self.queries[0][0]
    for begin in range(0, pairs, self.tile.threads):
      pair = at.thread + begin
      total = functools.reduce(ops.add, [of_warps[pair.minimum(pairs - 1) + warp*pairs].load() for warp in range(self.tile.waves)])
      column, values = (pair, ops.extract(total, 0)) if one else ((self.bias.key_tile*pairs + pair)*n, total)
      stores += self.bias.stores(self.warps.group, row, column, values, pair < pairs)
    return stores
