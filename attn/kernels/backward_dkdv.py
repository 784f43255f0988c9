"""The gradients of k and v: one program for every AMD matrix unit.

With P = exp(S - lse), dP = dO V^T and dS = P * (dP - delta): dV = P^T dO, dK = softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691,
algorithm 2). A workgroup owns one key/value head and BLOCK_M keys, and walks over the queries in tiles of BLOCK_N, of one after another of the heads
that share the keys. A key is a lane: it computes S = Q K^T and dP = dO V^T, and P and dS in registers are the B operands of dV^T = dO^T P and
dK^T = Q^T dS. Q and dO lie in LDS both ways, and lse and delta, which belong to a lane's elements. Nothing is summed across workgroups: the result is
the same in every run.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.counts import below, round_up
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import PASSES, NumbersOfRows, RowNumbers, dp_start, gradients_of, weights_of, where_known
from attn.kernels.parts.lanes import Lane, fragment_operands
from attn.kernels.parts.layouts import LdsTile, SharedLayout
from attn.kernels.parts.products import OwnRows, Products, zeros
from attn.kernels.parts.scores import Scores
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Statements, store_all, workgroup_barrier
from attn.kernels.parts.tensors import check_backward, dkdv_arguments
from attn.kernels.parts.trips import StagedTrips, TripState
from attn.kernels.parts.workgroup import Workgroup, kv_head_fastest
from attn.kernels.tiles.amd import BackwardTile, both_ways_layout, column_layout
from attn.kernels.tiles.common import numbers_of_queries
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, UOp

def backward_dkdv(p:Problem, arch:Chip, tile:BackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dk and dv, given the delta of `backward_dq`, as a function of its placeholders: those of
  `tensors.dkdv_arguments(p, parts)` in that order. A key that no query sees gets 0, and so does one beyond kv_lengths, or of no sequence. With
  `parts` > 0 the query heads that share keys, and their queries, are divided into so many parts, whose fp32 dk and dv are left to be added.

  Raises NotImplementedError for what `tensors.check_backward` names.
  """
  check_backward(p, tile)
  return lambda *args: program(BackwardDkdv.of(p, arch, tile, args, parts))

def program(passes:list[BackwardDkdv]) -> UOp:
  """One pass after another: the next one stores to LDS when all waves have done with it."""
  first, *rest = passes
  stores = first.stores()
  for one in rest: stores += one.stores(workgroup_barrier(UOp.group(*stores)))
  return first.group.gradient_kernel("backward_dkdv", ("dk", "dv"), stores, 2*first.group.p.flops)

def _columns(new:Allocator, tile:BackwardTile, *layouts:SharedLayout) -> list[LdsTile]:
  """Tiles in LDS, of which those of several passes take turns in one place."""
  if tile.passes == 1: return [LdsTile.of(new, x, tile.buffers) for x in layouts]
  place = LdsTile.of(new, max(layouts, key=lambda x: x.size), tile.buffers)
  return [replace(place, layout=x) for x in layouts]

@dataclass(frozen=True)
class DkdvState(TripState):
  q: StagedTile
  do: StagedTile
  numbers: RowNumbers
  acc: UOp           # accumulators of what the pass computes: dV^T, dK^T

@dataclass(frozen=True)
class BackwardDkdv:
  """One pass of the kernel of one problem, as a thread sees it: what is the same in all trips over the queries of `head`."""
  tile: BackwardTile
  new: Allocator
  statements: Statements
  state: DkdvState      # at the start
  group: Workgroup
  at: Lane
  k: OwnRows
  v: OwnRows
  wanted: tuple[str, ...]
  head: UOp

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], parts:int) -> list[BackwardDkdv]:
    """The passes, which share what they have in LDS."""
    mat, n, grid = tile.matrix, tile.block_n, kv_head_fastest(p, tile, tile.matrix)
    at, new = Lane(grid.lane, grid.wave, mat), grid.allocator
    q_rows, do_rows = (LdsTile.of(new, both_ways_layout(mat, n, width), tile.buffers) for width in (p.D, p.Dv))
    q_columns, do_columns = _columns(new, tile, *[column_layout(mat, n, width) for width in (p.D, p.Dv)])
    numbers, statements = RowNumbers.of(p, mat, n, new, tile.buffers, at.thread), Statements.of(new)
    group = Workgroup.of_keys(p, arch, tile, args, grid, at, dkdv_arguments(p, parts), parts)
    k, v = (OwnRows.of(at, group.rows(name), group.first_row, tile.block_m, new, in_lds, tile.sparing, statements)
            for name, in_lds in zip(("k", "v"), tile.own_in_lds))
    def one(wanted:tuple[str, ...]) -> BackwardDkdv:
      q = StagedTile.of(mat, n, tile.threads, at.thread, q_rows, q_columns if "dk" in wanted else None)
      do = StagedTile.of(mat, n, tile.threads, at.thread, do_rows if "dk" in wanted else None, do_columns if "dv" in wanted else None)
      acc = new.registers(sum(round_up(group.rows(name).width, mat.M)//mat.M for name in wanted), ops.f32(mat.accumulator))
      return BackwardDkdv(tile, new, statements, DkdvState(q, do, numbers, acc), group, at, k, v, wanted, group.first_head)
    return [one(wanted) for wanted in PASSES[tile.passes]]

  @functools.cached_property
  def row(self) -> Row:
    """The lane's key."""
    key, x = self.group.first_row + self.k.in_block[0], self.group.sequence
    return Row(self.group.batch, self.head, key, below(key, x.n_k if self.group.p.varlen else self.group.p.Sk))
  @property
  def products(self) -> Products: return Products(self.at, self.tile.fenced, self.statements, self.tile.read_ahead)
  @property
  def scores(self) -> Scores: return self.group.scores.of_head(self.head)

  def part(self, name:str) -> range:
    """Which accumulators dK^T or dV^T has."""
    tiles = [round_up(self.group.rows(x).width, self.tile.matrix.M)//self.tile.matrix.M for x in self.wanted]
    first = sum(tiles[:self.wanted.index(name)])
    return range(first, first + tiles[self.wanted.index(name)])

  # ***** the algorithm *****
  def stores(self, *before:UOp) -> list[UOp]:
    """A pass, and the stores of what it computes."""
    acc = self.state.acc
    s = self.state.after(*before)
    s = self.over_heads(s.after(UOp.group(*store_all(s.acc, zeros(self.tile.matrix, 1, acc.max_numel())[0]))))
    return [x for name in self.wanted for x in self.gradient(name, [s.acc[i].load() for i in self.part(name)])]

  def over_heads(self, s:DkdvState) -> DkdvState:
    """All queries of all heads that share the keys."""
    ratio, group = self.group.walked_heads, self.group
    def over_queries(one:BackwardDkdv, s:DkdvState) -> DkdvState: return one.trips.walk(s, group.walked, one.work)
    if ratio == 1: return over_queries(self, s)
    r = self.new.range(ratio, AxisType.LOOP)
    done = over_queries(replace(self, head=group.first_head + r), s.after(r))
    return s.after(self.statements.do(amd.sched_barrier(done.acc[0].load())).end(r))

  def work(self, s:DkdvState, t:UOp, masked:bool) -> UOp:
    """The parts of dK and dV that a tile of queries has."""
    n, (q, do, numbers) = self.tile.block_n//self.tile.matrix.M, (self.trips.in_lds(s, t, name) for name in self.trips.loaded)
    exponents, minus_delta = numbers.load(self.at)
    left = kept_scores(self.scores, [self.row], t)
    scores = self.products.with_rows(q.rows, n, self.k, t, zeros(self.tile.matrix, 1, n))[0]
    weights = weights_of(self.scores, scores, exponents, self.row, t, masked)
    found = {}
    if "dv" in self.wanted:
      p = [left.packed(ops.pack_weights(x, self.group.p.dtype), i) for i, x in enumerate(weights.p)]
      found["dv"] = self.product(s, do.columns, p, "dv")
    if "dk" in self.wanted:
      dp = self.products.with_rows(do.rows, n, self.v, t, [dp_start(minus_delta, left)])[0]
      ds = gradients_of(weights, dp, left, minus_delta)
      found["dk"] = self.product(s, q.columns, [ops.pack(x, self.group.p.dtype) for x in ds], "dk")
    made = [self.statements.do(amd.made_here(*found[name])) for name in self.wanted]
    return UOp.group(*made, *store_all(s.acc, [x for name in self.wanted for x in found[name]]))

  def product(self, s:DkdvState, columns:LdsTile, weights:list[UOp], name:str) -> list[UOp]:
    """dV^T + dO^T P, or dK^T + Q^T dS."""
    operands = fragment_operands(self.at, weights)
    return self.products.with_columns(columns, self.tile.block_n, [operands], [[s.acc[i].load() for i in self.part(name)]])[0]

  def gradient(self, name:str, found:list[UOp]) -> list[UOp]:
    """The stores of dk or dv: 0 of keys beyond kv_lengths."""
    mat, known = self.tile.matrix, self.row.index < self.group.sequence.n_k if self.group.p.kv_lengths else None
    factor = self.group.p.softmax_scale if name == "dk" else 1.0
    columns = [(self.at.h*mat.accumulator + i*mat.M, where_known(known, x, factor)) for i, x in enumerate(found)]
    return self.group.gradient(name, self.row, columns)

  @functools.cached_property
  def trips(self) -> StagedTrips[DkdvState]:
    group, head = self.group, self.head
    numbers = NumbersOfRows(tuple(group.numbers(name, head) for name in numbers_of_queries(group.p)))
    loaded = {"q": group.rows("q", head), "do": group.operand_rows("do", head), "numbers": numbers}
    return StagedTrips(self.tile, self.new, self.statements, self.state, loaded)
