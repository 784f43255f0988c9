"""The gradient of q: one program for every AMD matrix unit, the mirror of forward.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dQ = softmax_scale * dS K (FlashAttention-2,
arXiv 2307.08691, algorithm 2). A workgroup owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N. A query is a lane: it
computes S^T = K Q^T and dP^T = V dO^T, and dS^T in registers is the B operand of dQ^T = K^T dS^T, as P^T is in forward. K lies in LDS both ways.
Nothing is summed across workgroups: the result is the same in every run.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.epilogue import place_of_row
from attn.kernels.parts.gradients import dp_start, exponent, gradients_of, scaled_delta, weights_of
from attn.kernels.parts.lanes import Lane, fragment_operands
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.pipeline import Pipeline, TripState
from attn.kernels.parts.products import OwnRows, Products, zeros
from attn.kernels.parts.rows import flat
from attn.kernels.parts.scores import Row
from attn.kernels.parts.staging import StagedTile, column_layout, row_layout
from attn.kernels.parts.statements import Statements, store_all
from attn.kernels.parts.tensors import check_backward, dq_arguments
from attn.kernels.parts.tiles import BackwardTile
from attn.kernels.parts.workgroup import Workgroup, head_fastest
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import UOp

def backward_dq(p:Problem, arch:Chip, tile:BackwardTile, dlse:bool=False) -> Callable[..., UOp]:
  """The kernel that computes dq, and delta for `backward_dkdv`, as a function of its placeholders: those of `tensors.dq_arguments(p, dlse)` in that
  order. A query that sees no key gets dq = 0, and so does a row of no sequence, with delta = 0.

  Raises NotImplementedError for what `tensors.check_backward` names.
  """
  check_backward(p, tile)
  return lambda *args: BackwardDq.of(p, arch, tile, args, dlse).program()

@dataclass(frozen=True)
class DqState(TripState):
  k: StagedTile
  v: StagedTile
  dq: UOp            # accumulators of dQ^T

@dataclass(frozen=True)
class BackwardDq(Pipeline[DqState]):
  """The kernel of one problem, as a thread sees it: what is the same in all trips."""
  group: Workgroup
  tile: BackwardTile
  at: Lane
  state: DqState     # at the start
  q: OwnRows
  do: OwnRows

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], dlse:bool) -> BackwardDq:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix)
    at, new = Lane(grid.lane, grid.wave, mat), grid.allocator
    k_rows, v_rows = (LdsTile.of(new, row_layout(mat, tile.block_n, width), tile.buffers) for width in (p.D, p.Dv))
    k_columns = LdsTile.of(new, column_layout(mat, tile.block_n, p.D), tile.buffers)
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, lies, turned) for lies, turned in ((k_rows, k_columns), (v_rows, None)))
    group = Workgroup.of(p, arch, tile, args, grid, at, dq_arguments(p, dlse))
    q, do = (OwnRows.of(at, group.operand_rows(name), group.first_row, tile.block_m, new, in_lds)
             for name, in_lds in zip(("q", "do"), tile.own_in_lds))
    dq = new.registers(round_up(p.D, mat.M)//mat.M, ops.f32(mat.accumulator))
    return BackwardDq(tile.prefetch, new, Statements.of(new), group, tile, at, DqState(k, v, dq), q, do)

  @functools.cached_property
  def row(self) -> Row: return self.group.row(self.q.in_block[0])
  @property
  def products(self) -> Products: return Products(self.at, self.tile.fenced, self.statements)

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, mat, p = self.group, self.tile.matrix, self.group.p
    dq, delta = self.state.dq, self.delta
    s = self.state.after(UOp.group(*store_all(dq, zeros(mat, 1, dq.max_numel())[0])))
    s = self.walk(s, group.walked, masked_first=p.window[0] >= 0)
    columns = [(dt*mat.M + self.at.h*mat.accumulator, ops.mul(s.dq[dt].load(), p.softmax_scale)) for dt in range(dq.max_numel())]
    number = place_of_row(p, group.sequence, self.row)[0]
    store_delta = flat(group.given["delta"])[number.valid(self.row.there & self.at.h.eq(0))].store(delta)
    return group.gradient_kernel("backward_dq", ("dq", "delta"), [store_delta, *group.gradient("dq", self.row, columns)],
                                 p.flops//(p.D + p.Dv)*(2*p.D + p.Dv))

  def work(self, s:DqState, t:UOp, masked:bool) -> UOp:
    """The part of dQ that a key tile has."""
    mat, n, to = self.tile.matrix, self.tile.block_n//self.tile.matrix.M, t%self.tile.buffers
    k, v = s.k.number(to), s.v.number(to)
    scores = self.products.with_rows(k.rows, n, self.q, t, zeros(mat, 1, n))[0]
    left, minus_delta = kept_scores(self.group.scores, [self.row], t), [ops.splat(scaled_delta(self.delta, self.group.p), mat.accumulator)]*n
    dp = self.products.with_rows(v.rows, n, self.do, t, [dp_start(minus_delta, left)])[0]
    exponents = [ops.splat(self.exponent, mat.accumulator)]*n
    p, slopes = weights_of(self.group.scores, scores, exponents, self.row, t, masked)
    ds = gradients_of(p, dp, slopes, left, minus_delta)
    weights = fragment_operands(self.at, [ops.pack(x, self.group.p.dtype) for x in ds])
    dq = self.products.with_columns(k.columns, self.tile.block_n, [weights], [[s.dq[i].load() for i in range(s.dq.max_numel())]])[0]
    return UOp.group(self.statements.do(amd.made_here(*dq)), *store_all(s.dq, dq))

  # ***** global -> registers -> LDS *****
  def fetch(self, t:UOp) -> tuple[list[UOp], ...]: return self.state.k.fetch(self.group.rows("k"), t), self.state.v.fetch(self.group.rows("v"), t)

  def to_lds(self, s:DqState, t:UOp, *parts:list[UOp]) -> UOp:
    to = t%self.tile.buffers
    return UOp.group(*s.k.number(to).store(parts[0]), *s.v.number(to).store(parts[1]))

  # ***** what a query has *****
  def number(self, name:str) -> UOp:
    """Of lse or its like."""
    rows = self.group.numbers(name, self.row.head)
    return rows.buffer[(rows.base + self.row.index).valid(self.row.there)].load()

  @functools.cached_property
  def exponent(self) -> UOp: return exponent(self.number("lse"), self.group.p)

  @functools.cached_property
  def delta(self) -> UOp:
    """rowsum(dO * O) - dLSE, over the lanes that share a query."""
    group, mat = self.group, self.tile.matrix
    def floats(name:str, unit:UOp) -> UOp:
      return group.rows(name).load_floats(group.first_row, self.tile.block_m, self.do.in_block[0], unit, mat.unit, group.p.out_dtype)
    total = ops.splat(0.0, mat.unit)
    for u in self.do.units: total = ops.add(total, ops.mul(floats("o", u), floats("do", u)))
    while (n := ops.length(total)) > 1: total = ops.add(ops.slice_(total, 0, n//2), ops.slice_(total, n//2, n//2))
    for step in () if mat.duplicated else mat.group_steps:
      pair = amd.pair(total, step, mat)
      total = ops.add(ops.extract(pair, 0), ops.extract(pair, 1))
    return ops.sub(total, self.number("dlse")) if "dlse" in group.given else total
