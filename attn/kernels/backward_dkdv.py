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
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.gradients import RowNumbers, weights_and_gradients
from attn.kernels.parts.lanes import Lane, fragment_operands
from attn.kernels.parts.pipeline import Pipeline, TripState
from attn.kernels.parts.products import OwnRows, Products, zeros
from attn.kernels.parts.scores import Row, Scores
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Statements, store_all
from attn.kernels.parts.tensors import check_backward, dkdv_arguments
from attn.kernels.parts.tiles import BackwardTile
from attn.kernels.parts.workgroup import Workgroup, kv_head_fastest
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp

def backward_dkdv(p:Problem, arch:Chip, tile:BackwardTile) -> Callable[..., UOp]:
  """The kernel that computes dk and dv, given the delta of `backward_dq`, as a function of its placeholders: those of `tensors.dkdv_arguments(p)` in
  that order. A key that no query sees gets 0, and so does one beyond kv_lengths, or of no sequence.

  Raises NotImplementedError for what `tensors.check_backward` names.
  """
  check_backward(p, tile)
  return lambda *args: BackwardDkdv.of(p, arch, tile, args).program()

@dataclass(frozen=True)
class DkdvState(TripState):
  q: StagedTile
  do: StagedTile
  numbers: RowNumbers
  dk: UOp            # accumulators of dK^T
  dv: UOp

@dataclass(frozen=True)
class BackwardDkdv(Pipeline[DkdvState]):
  """The kernel of one problem, as a thread sees it: what is the same in all trips over the queries of `head`."""
  group: Workgroup
  tile: BackwardTile
  at: Lane
  state: DkdvState   # at the start
  k: OwnRows
  v: OwnRows
  head: UOp

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...]) -> BackwardDkdv:
    mat, grid = tile.matrix, kv_head_fastest(p, tile, tile.matrix)
    at, new = Lane(grid.lane, grid.wave, mat), grid.allocator
    q, do = (StagedTile.of(mat, tile.block_n, width, tile.threads, at.thread, new, True, turned, tile.buffers)
             for width, turned in zip((p.D, p.Dv), tile.turned))
    numbers = RowNumbers.of(mat, tile.block_n, new, tile.buffers)
    group = Workgroup.of_keys(p, arch, tile, args, grid, at, dkdv_arguments(p))
    k, v = (OwnRows.of(at, group.rows(name), group.first_row, tile.block_m, new, in_lds) for name, in_lds in zip(("k", "v"), tile.own_in_lds))
    dk, dv = (new.registers(round_up(width, mat.M)//mat.M, ops.f32(mat.accumulator)) for width in (p.D, p.Dv))
    state = DkdvState(q, do, numbers, dk, dv)
    return BackwardDkdv(tile.prefetch, new, Statements.of(new), group, tile, at, state, k, v, group.first_head)

  @functools.cached_property
  def row(self) -> Row:
    """The lane's key."""
    key, x = self.group.first_row + self.k.in_block[0], self.group.sequence
    return Row(self.group.batch, self.head, key, key < (x.n_k if self.group.p.varlen else self.group.p.Sk))
  @property
  def products(self) -> Products: return Products(self.at, self.tile.fenced, self.statements)
  @property
  def scores(self) -> Scores: return replace(self.group.scores, first=replace(self.group.scores.first, head=self.head))

  # ***** the algorithm *****
  def program(self) -> UOp:
    p, mat, dk, dv = self.group.p, self.tile.matrix, self.state.dk, self.state.dv
    start = [x for to in (dk, dv) for x in store_all(to, zeros(mat, 1, to.max_numel())[0])]
    s = self.over_heads(self.state.after(UOp.group(*start)))
    stores = self.gradient("dk", s.dk, p.softmax_scale) + self.gradient("dv", s.dv, 1.0)
    return self.group.gradient_kernel("backward_dkdv", ("dk", "dv"), stores, 2*p.flops)

  def over_heads(self, s:DkdvState) -> DkdvState:
    """All queries of all heads that share the keys."""
    ratio, group = self.group.p.H//self.group.p.Hkv, self.group
    def over_queries(one:BackwardDkdv, s:DkdvState) -> DkdvState: return one.walk(s, group.walked, masked_first=group.scores.walk.back >= 0)
    if ratio == 1: return over_queries(self, s)
    r = self.new.range(ratio, AxisType.LOOP)
    done = over_queries(replace(self, head=group.first_head + r), s.after(r))
    return s.after(self.statements.do(amd.sched_barrier(done.dk[0].load())).end(r))

  def work(self, s:DkdvState, t:UOp, masked:bool) -> UOp:
    """The parts of dK and dV that a tile of queries has."""
    mat, n, to = self.tile.matrix, self.tile.block_n//self.tile.matrix.M, t%self.tile.buffers
    q, do, (exponents, minus_delta) = s.q.number(to), s.do.number(to), s.numbers.number(to).load(self.at)
    scores = self.products.with_rows(q.rows, n, self.k, t, zeros(mat, 1, n))[0]
    dp = self.products.with_rows(do.rows, n, self.v, t, [minus_delta])[0]
    weights = weights_and_gradients(self.scores, scores, dp, exponents, self.row, t, masked)
    p, ds = ([fragment_operands(self.at, [ops.pack(x, self.group.p.dtype) for x in xs])] for xs in weights)
    dv = self.products.with_columns(do.columns, self.tile.block_n, p, [[s.dv[i].load() for i in range(s.dv.max_numel())]])[0]
    dk = self.products.with_columns(q.columns, self.tile.block_n, ds, [[s.dk[i].load() for i in range(s.dk.max_numel())]])[0]
    made = [self.statements.do(amd.made_here(*x)) for x in (dv, dk)]
    return UOp.group(*made, *store_all(s.dv, dv), *store_all(s.dk, dk))

  def gradient(self, name:str, found:UOp, factor:float) -> list[UOp]:
    """The stores of dk or dv: 0 beyond the keys that there are."""
    mat, known = self.tile.matrix, self.row.index < self.group.sequence.n_k
    factor_ = known.where(UOp.const(factor, ops.f32(1)), UOp.const(0.0, ops.f32(1)))
    columns = [(dt*mat.M + self.at.h*mat.accumulator, ops.mul(found[dt].load(), factor_)) for dt in range(found.max_numel())]
    return self.group.gradient(name, self.row, columns)

  # ***** global -> registers -> LDS *****
  def fetch(self, t:UOp) -> tuple[list[UOp], ...]:
    group, head = self.group, self.head
    numbers = self.state.numbers.fetch(group.numbers("lse", head), group.numbers("delta", head), t, self.at.thread)
    return self.state.q.fetch(group.rows("q", head), t), self.state.do.fetch(group.rows("do", head), t), numbers

  def to_lds(self, s:DkdvState, t:UOp, *parts:list[UOp]) -> UOp:
    to, (q, do, numbers) = t%self.tile.buffers, parts
    return UOp.group(*s.q.number(to).store(q), *s.do.number(to).store(do), *s.numbers.number(to).store(numbers, self.at.thread))
