"""The gradients of k and v on Hopper's wgmma (sm_90): the algorithm of attn/kernels/backward_dkdv_mma.py, with warpgroups that overlap by themselves.

With P = exp(S - lse), dP = dO V^T and dS = P * (dP - delta): dV = P^T dO, dK = softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691,
algorithm 2). A block owns one key/value head and 64 keys for each of its warpgroups, and walks over the queries of one after another of the heads
that share the keys: S^T = K Q^T and dP^T = V dO^T from shared memory, P^T and dS^T in registers are operand A of dV and dK. Nothing is summed across
blocks: the result is the same in every run.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Callable, Self
from attn.chips import Chip
from attn.kernels.parts.backward_warps import KeysOfWarps
from attn.kernels.parts.backward_wgmma import Trip, WgmmaBackward, WgmmaBackwardState
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import Exponent, kinds_of_exponents, scaled_delta, weights_of_rows
from attn.kernels.parts.layouts import SwizzledPanels
from attn.kernels.parts.statements import store_all
from attn.kernels.parts.tensors import check_backward
from attn.kernels.tiles.common import numbers_of_queries
from attn.kernels.tiles.wgmma import WgmmaBackwardTile
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import UOp, dtypes

def backward_dkdv_wgmma(p:Problem, arch:Chip, tile:WgmmaBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dk and dv, given delta, as a function of its placeholders: called as `backward_dkdv_mma.backward_dkdv_mma`."""
  check_backward(p, tile)
  def program(*args:UOp) -> UOp:
    passes = BackwardDkdvWgmma.passes(p, arch, tile, args, parts)
    s, stores = passes[0].begun(passes[0].state), list[UOp]()
    for number, one in enumerate(passes):
      s = one.accumulated(s, number)
      stores += (found := one.gradients(s.acc))
      s = s.after(UOp.group(*found))
    return passes[0].warps.group.gradient_kernel("backward_dkdv_wgmma", ("dk", "dv"), stores, 2*p.flops, tile.lds_bytes(p))
  return program

@dataclass(frozen=True)
class BackwardDkdvWgmma(WgmmaBackward, KeysOfWarps[SwizzledPanels]):
  """One pass of the kernel of one problem, as a thread sees it."""
  @property
  def heads(self) -> int: return self.warps.group.walked_heads
  def of_head(self, r:UOp) -> Self: return replace(self, head=self.warps.group.first_head + r)

  # ***** the algorithm *****
  def work(self, s:WgmmaBackwardState, trip:Trip, masked:bool) -> WgmmaBackwardState:
    of_v, of_k = [name in self.wanted for name in ("dv", "dk")]
    s = self.start(s, s.scores, "k", "q", trip)                             # S^T = K Q^T
    if of_k: s = self.start(s, s.dp, "v", "do", trip)                       # dP^T = V dO^T
    exponents = self.exponents(s, trip)
    s = s.do(wgmma.wait_products(s.scores, s.done, but=int(of_k)))
    s = self.fetch(s, self.next(trip))                                      # the products of the trip before are done, too
    left = kept_scores(self.scores, self.keys[0], trip.tile)
    raw = [s.scores[i].load() for i in range(len(exponents))]
    weights = weights_of_rows(self.scores, raw, [exponents]*nv.ROWS, self.keys[0], trip.tile, masked)
    if of_v:                                                                # dV += P^T dO
      s = s.store(store_all(s.p, [left.packed(x, 2*i) for i, x in enumerate(self.packed(weights.p))]))
      s = self.add(s, "dv", s.p, "do", trip)
    if not of_k: return s
    s = s.do(wgmma.wait_products(s.dp, s.done, but=int(of_v)))
    minus_delta = [ops.concat(x, x) for x in [scaled_delta(x, self.p) for x in self.columns(s, trip, 1)]]
    s = s.store(store_all(s.ds, self.ds(s, weights, left, minus_delta)))
    return self.add(s, "dk", s.ds, "q", trip)                               # dK += dS^T Q

  # ***** global -> shared memory *****
  def copies_of(self, s:WgmmaBackwardState, trip:Trip, there:UOp) -> list[UOp]:
    group, n, i, floats = self.warps.group, self.tile.block_n, self.warps.at.thread, s.shared.bitcast(dtypes.float)
    head = group.first_head + trip.turn%self.heads
    copies = [self.warps.copies(group.rows(name, head).up_to(there), s.shared, trip.tile*n, self.ring(name, trip)) for name in ("q", "do")]
    first, row = self.numbers(trip)*4 + i, trip.tile*n + i
    rows = [group.numbers(name, head) for name in numbers_of_queries(self.p)]
    numbers = [nv.copy_number(floats[first + kind*n], x.buffer[x.base + row], row < there, i < n) for kind, x in enumerate(rows)]
    return [*copies[0], *copies[1], *numbers]

  def exponents(self, s:WgmmaBackwardState, trip:Trip) -> list[Exponent]:
    numbers = zip(*[self.columns(s, trip, kind) for kind in kinds_of_exponents(self.p)])
    return [Exponent.joined([Exponent.of(self.p, *[ops.extract(x, i) for x in xs]) for i in range(2)], ops.build) for xs in numbers]

  def columns(self, s:WgmmaBackwardState, trip:Trip, kind:int) -> list[UOp]:
    """The numbers of this kind (see `numbers_of_queries`) of the queries that a lane's columns are."""
    pairs, n = s.shared.bitcast(nv.F2), self.tile.block_n
    first = self.numbers(trip)*2 + kind*n//2 + self.warps.at.h
    return [pairs[first + i*self.mat.N//2].load() for i in range(n//self.mat.N)]
