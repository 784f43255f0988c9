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
from attn.kernels.parts.epilogue import place_of_row
from attn.kernels.parts.lanes import Lane, element_sum, fragment_operands, sum_over_groups
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.own_queries import KeysState, OwnQueries
from attn.kernels.parts.products import OwnRows, zeros
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Statements, store_all
from attn.kernels.parts.tensors import check_backward, dq_arguments
from attn.kernels.parts.workgroup import Workgroup, head_fastest
from attn.kernels.tiles.amd import BackwardTile, both_ways_layout, column_layout
from attn.ops import amd, common as ops
from attn.ops.common import flat
from attn.problem import Problem
from attn.tinygrad_compat import UOp

def backward_dq(p:Problem, arch:Chip, tile:BackwardTile, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dq, and delta for `backward_dkdv`, as a function of its placeholders: those of `tensors.dq_arguments(p, dlse, parts)` in
  that order. A query that sees no key gets dq = 0, and so does a row of no sequence, with delta = 0. With `parts` > 0 the keys are divided into so
  many parts, whose fp32 dq is left to be added.

  Raises NotImplementedError for what `tensors.check_backward` names.
  """
  check_backward(p, tile)
  return lambda *args: BackwardDq.of(p, arch, tile, args, dlse, parts).program()

@dataclass(frozen=True)
class DqState(KeysState):
  dq: UOp            # accumulators of dQ^T

@dataclass(frozen=True)
class BackwardDq(OwnQueries[DqState]):
  """The kernel of one problem: what is the same in all trips."""
  @staticmethod
  def of(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], dlse:bool, parts:int) -> BackwardDq:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix)
    at, new = Lane(grid.lane, grid.wave, mat), grid.allocator
    k_rows, v_rows = (LdsTile.of(new, both_ways_layout(mat, tile.block_n, width), tile.buffers) for width in (p.D, p.Dv))
    k_columns = LdsTile.of(new, column_layout(mat, tile.block_n, p.D), tile.buffers)
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, lies, turned) for lies, turned in ((k_rows, k_columns), (v_rows, None)))
    group = Workgroup.of(p, arch, tile, args, grid, at, dq_arguments(p, dlse, parts), parts)
    statements = Statements.of(new)
    q, do = (OwnRows.of(at, group.operand_rows(name), group.first_row, tile.block_m, new, in_lds, tile.sparing, statements)
             for name, in_lds in zip(("q", "do"), tile.own_in_lds))
    dq = new.registers(round_up(p.D, mat.M)//mat.M, ops.f32(mat.accumulator))
    return BackwardDq(tile, new, statements, DqState(k, v, dq), group, at, q, do)

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, mat, p = self.group, self.tile.matrix, self.group.p
    dq, delta = self.state.dq, self.delta
    s = self.state.after(UOp.group(*store_all(dq, zeros(mat, 1, dq.max_numel())[0])))
    s = self.trips.walk(s, group.walked, self.work)
    columns = [(self.at.h*mat.accumulator + dt*mat.M, ops.mul(s.dq[dt].load(), p.softmax_scale)) for dt in range(dq.max_numel())]
    number = place_of_row(p, group.sequence, self.row)[0]
    store_delta = flat(group.given["delta"])[number.valid(self.row.there & self.at.h.eq(0) & group.is_first_part)].store(delta)
    return group.gradient_kernel("backward_dq", ("dq", "delta"), [store_delta, *group.gradient("dq", self.row, columns)],
                                 p.flops//(p.D + p.Dv)*(2*p.D + p.Dv))

  def work(self, s:DqState, t:UOp, masked:bool) -> UOp:
    """The part of dQ that a key tile has."""
    k, v = (self.trips.in_lds(s, t, name) for name in self.trips.loaded)
    ds = self.ds(k.rows, v.rows, t, masked)
    weights = fragment_operands(self.at, [ops.pack(x, self.group.p.dtype) for x in ds])
    dq = self.products.with_columns(k.columns, self.tile.block_n, [weights], [[s.dq[i].load() for i in range(s.dq.max_numel())]])[0]
    return UOp.group(self.statements.do(amd.made_here(*dq)), *store_all(s.dq, dq))

  @functools.cached_property
  def delta(self) -> UOp:
    """rowsum(dO * O) - dLSE, over the lanes that share a query; of dO as dP is made of it, rounded to the inputs' dtype."""
    group, mat = self.group, self.tile.matrix
    rows, total = ((group.rows("o"), group.p.out_dtype), (group.operand_rows("do"), group.p.dtype)), ops.splat(0.0, mat.unit)
    kept = [x.kept.buffer for x in (self.q, self.do) if x.lds is not None]
    for some in self.do.together:
      fence = [self.statements.do(amd.sched_barrier(total), *kept)] if self.tile.fenced else []
      for u in some:
        o, do = (x.after(*fence).load_floats(group.first_row, self.tile.block_m, self.do.in_block[0], u, mat.unit, dtype) for x, dtype in rows)
        total = ops.add(total, ops.mul(o, do))
    total = element_sum(total)
    if not mat.duplicated: total = sum_over_groups(total, mat)
    return ops.sub(total, group.number("dlse", self.row)) if "dlse" in group.given else total
