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
from attn.kernels.parts.backward_mma import BackwardState, QueriesByMma
from attn.kernels.parts.tensors import check_backward
from attn.kernels.tiles.mma import MmaBackwardTile
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
class BackwardDqMma(QueriesByMma):
  """The kernel of one problem, as a thread sees it."""
  # ***** the algorithm *****
  def program(self) -> UOp:
    s = self.cleared(self.state)
    s = self.walk(s.started(self.copies_of_own(s)), self.warps.group.walked)
    return self.dq_kernel("backward_dq_mma", s.acc)

  def work(self, s:BackwardState, t:UOp, part:int, masked:bool) -> BackwardState:
    """The part of dQ that some keys of a tile have."""
    weights = [self.packed(x) for x in self.ds(s, t, part, masked)]
    return self.add_product(s, "dq", weights, self.walked("k", t), part)
