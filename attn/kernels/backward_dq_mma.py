"""The gradient of q on NVIDIA's mma.sync (sm_80 and later): the algorithm of attn/kernels/backward_dq.py with the query on the rows.

With P = exp(S - lse), dP = dO V^T, delta = rowsum(dO * O) - dLSE and dS = P * (dP - delta): dQ = softmax_scale * dS K (FlashAttention-2,
arXiv 2307.08691, algorithm 2). A block owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N, which come by cp.async into a
ring in shared memory, with one barrier a trip. dS in registers is operand A of dQ = dS K, for which K is read transposed. Nothing is summed across
blocks: the result is the same in every run.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.backward_mma import BackwardState, MmaBackward, MmaBackwardTile
from attn.kernels.parts.backward_warps import QueriesOfWarps
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import dp_start, gradients_of, weights_of_rows
from attn.kernels.parts.layouts import SwizzledRows
from attn.kernels.parts.tensors import check_backward
from attn.ops import common as ops, nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import UOp

def backward_dq_mma(p:Problem, arch:Chip, tile:MmaBackwardTile, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dq, and delta for `backward_dkdv_mma`, as a function of its placeholders: those of
  `tensors.dq_arguments(p, dlse, parts)` in that order. A query that sees no key gets dq = 0, and so does a row of no sequence, with delta = 0.
  `parts` as in `backward_dq.backward_dq`.

  Raises NotImplementedError for what `tensors.check_backward` names.
  """
  check_backward(p, tile)
  return lambda *args: BackwardDqMma.of_dq(p, arch, tile, args, dlse, parts).program()

@dataclass(frozen=True)
class BackwardDqMma(MmaBackward, QueriesOfWarps[SwizzledRows]):
  """The kernel of one problem, as a thread sees it."""
  # ***** the algorithm *****
  def program(self) -> UOp:
    s = self.cleared(self.state)
    s = self.walk(s.started(self.copies_of_own(s)), self.warps.group.walked, masked_first=self.p.window[0] >= 0)
    return self.dq_kernel("backward_dq_mma", s.acc)

  def fetch(self, s:BackwardState, t:UOp) -> BackwardState:
    return s.started(self.warps.copies_of_keys(s.shared, t, self.walked("k", t), self.walked("v", t)))

  def work(self, s:BackwardState, t:UOp, part:int, masked:bool) -> BackwardState:
    """The part of dQ that some keys of a tile have."""
    scores, columns, number = self.of_part(self.warps.group.scores), self.tile.part_n//self.mat.N, t*self.parts + part
    left = [kept_scores(scores, rows, number) for rows in self.queries]
    minus_deltas = [self.minus_deltas(i, columns) for i in range(len(self.queries))]
    raw = self.with_rows(s, self.own("q"), self.walked("k", t), part, [[nv.zero(s.done)]*columns for _ in self.queries])
    dp = self.with_rows(s, self.own("do"), self.walked("v", t), part, [dp_start(x, kept) for x, kept in zip(minus_deltas, left)])
    ds = []
    for i, rows in enumerate(self.queries):
      p, slopes = weights_of_rows(scores, raw[i], [[ops.splat(e, 2)]*columns for e in self.exponents[i]], rows, number, masked)
      ds.append(self.packed(gradients_of(p, dp[i], slopes, left[i], minus_deltas[i])))
    return self.add_product(s, "dq", ds, self.walked("k", t), part)
