"""The gradient of q on Hopper's wgmma (sm_90): the algorithm of attn/kernels/backward_dq_mma.py, with warpgroups that overlap by themselves.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dQ = softmax_scale * dS K (FlashAttention-2,
arXiv 2307.08691, algorithm 2). A block owns one head and 64 queries for each of its warpgroups, and walks over the keys: S = Q K^T and dP = dO V^T
from shared memory, dS in registers is operand A of dQ. Nothing is summed across blocks: the result is the same in every run.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.backward_warps import QueriesOfWarps
from attn.kernels.parts.backward_wgmma import Trip, WgmmaBackward, WgmmaBackwardState
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import weights_of_rows
from attn.kernels.parts.layouts import SwizzledPanels
from attn.kernels.parts.statements import store_all
from attn.kernels.parts.tensors import check_backward
from attn.kernels.tiles.wgmma import WgmmaBackwardTile
from attn.ops import common as ops, hopper as wgmma
from attn.problem import Problem
from attn.tinygrad_compat import UOp

def backward_dq_wgmma(p:Problem, arch:Chip, tile:WgmmaBackwardTile, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dq and delta, as a function of its placeholders: called as `backward_dq_mma.backward_dq_mma`."""
  check_backward(p, tile)
  return lambda *args: BackwardDqWgmma.of_dq(p, arch, tile, args, dlse, parts).program()

@dataclass(frozen=True)
class BackwardDqWgmma(WgmmaBackward, QueriesOfWarps[SwizzledPanels]):
  """The kernel of one problem, as a thread sees it."""
  # ***** the algorithm *****
  def program(self) -> UOp:
    return self.dq_kernel("backward_dq_wgmma", self.accumulated(self.begun(self.state)).acc)

  def work(self, s:WgmmaBackwardState, trip:Trip, masked:bool) -> WgmmaBackwardState:
    columns = range(self.tile.block_n//self.mat.N)
    s = self.start(s, s.scores, "q", "k", trip)                             # S = Q K^T
    s = self.start(s, s.dp, "do", "v", trip)                                # dP = dO V^T
    s = s.do(wgmma.wait_products(s.scores, s.done, but=1))
    s = self.fetch(s, self.next(trip))                                      # the product of the trip before is done, too
    left = kept_scores(self.warps.group.scores, self.queries[0], trip.tile)
    exponents = [[e.each(lambda x: ops.splat(x, 2))]*len(columns) for e in self.exponents[0]]
    weights = weights_of_rows(self.warps.group.scores, [s.scores[i].load() for i in columns], exponents, self.queries[0], trip.tile, masked)
    s = s.do(wgmma.wait_products(s.dp, s.done))
    s = s.store(store_all(s.ds, self.ds(s, weights, left, self.minus_deltas(0, len(columns)))))
    return self.add(s, "dq", s.ds, "k", trip)                               # dQ += dS K

  # ***** global -> shared memory *****
  def copies_of(self, s:WgmmaBackwardState, trip:Trip, there:UOp) -> list[UOp]:
    group, first = self.warps.group, trip.tile*self.tile.block_n
    return [x for name in ("k", "v") for x in self.warps.copies(group.rows(name).up_to(there), s.shared, first, self.ring(name, trip))]
