"""The gradients of k and v on NVIDIA's mma.sync (sm_80 and later): the algorithm of attn/kernels/backward_dkdv.py with the key on the rows.

With P = exp(S - lse), dP = dO V^T and dS = P * (dP - delta): dV = P^T dO, dK = softmax_scale * dS^T Q (FlashAttention-2, arXiv 2307.08691,
algorithm 2). A block owns one key/value head and BLOCK_M keys, and walks over the queries in tiles of BLOCK_N, of one after another of the heads that
share the keys: S^T = K Q^T and dP^T = V dO^T, and P^T and dS^T in registers are operand A of dV and dK, for which dO and Q are read transposed. lse
and delta, which belong to the columns, come to shared memory with them. Nothing is summed across blocks: the result is the same in every run.
"""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.backward_mma import BackwardState, MmaBackward
from attn.kernels.parts.backward_warps import KeysOfWarps
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import Exponent, dp_start, gradients_of, kinds_of_exponents, shared_numbers, weights_of_rows
from attn.kernels.parts.layouts import SwizzledRows
from attn.kernels.parts.rows import Rows
from attn.kernels.parts.statements import store_all
from attn.kernels.parts.tensors import check_backward
from attn.kernels.tiles.common import numbers_of_queries
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.ops import common as ops, nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp, dtypes

def backward_dkdv_mma(p:Problem, arch:Chip, tile:MmaBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel that computes dk and dv, given the delta of `backward_dq_mma`, as a function of its placeholders: those of
  `tensors.dkdv_arguments(p, parts)` in that order. A key that no query sees gets 0, and so does one beyond kv_lengths, or of no sequence. `parts` as
  in `backward_dkdv.backward_dkdv`.

  Raises NotImplementedError for what `tensors.check_backward` names.
  """
  check_backward(p, tile)
  def program(*args:UOp) -> UOp:
    first, *rest = BackwardDkdvMma.passes(p, arch, tile, args, parts)
    s, stores = first.computed(first.cleared(first.state).started(first.copies_of_own(first.state)))
    for one in rest:
      s, more = one.computed(one.cleared(s.after(UOp.group(*stores))))
      stores += more
    return first.warps.group.gradient_kernel("backward_dkdv_mma", ("dk", "dv"), stores, 2*p.flops, tile.lds_bytes(p))
  return program

@dataclass(frozen=True)
class BackwardDkdvMma(MmaBackward, KeysOfWarps[SwizzledRows]):
  """One pass of the kernel of one problem, as a thread sees it."""
  # ***** the algorithm *****
  def computed(self, s:BackwardState) -> tuple[BackwardState, list[UOp]]:
    """A pass, and the stores of what it computes."""
    s = self.over_heads(s)
    return s, self.gradients(s.acc)

  def over_heads(self, s:BackwardState) -> BackwardState:
    """All queries of all heads that share the keys. When a head is done, so is all that was read and copied of it."""
    group = self.warps.group
    def over_queries(one:BackwardDkdvMma, s:BackwardState) -> BackwardState:
      return one.walk(s, group.walked).arrived(0)
    if (ratio := group.walked_heads) == 1: return over_queries(self, s)
    r = group.grid.allocator.range(ratio, AxisType.LOOP)
    return s.after(over_queries(replace(self, head=group.first_head + r), s.after(r)).done.end(r))

  @property
  def carried(self) -> list[UOp]:
    """The queries of a tile whose numbers this thread carries."""
    return [self.warps.at.thread + i*self.tile.threads for i in range(self.tile.carried)]

  def fetch(self, s:BackwardState, t:UOp) -> BackwardState:
    group, n = self.warps.group, self.tile.block_n
    numbers = [[group.numbers(name, self.head).load_number(t*n, n, i, i < n) for i in self.carried] for name in numbers_of_queries(self.p)]
    found = zip(*[shared_numbers(self.p, *of_query) for of_query in zip(*numbers)])
    s = s.store(store_all(s.numbers, [x for kind in found for x in kind]))
    there = (group.walked.end*n).minimum(group.sequence.n_q)
    rows:list[Rows] = [group.rows("q", self.head), group.operand_rows("do", self.head)]
    copies = [self.warps.copies(source.up_to(there), s.shared, t*n, self.walked(name, t)) for source, name in zip(rows, ("q", "do"))]
    return s.started([x for xs in copies for x in xs])

  def settle(self, s:BackwardState, t:UOp) -> BackwardState:
    to, n = s.shared.bitcast(dtypes.float), self.tile.block_n
    places = [(kind*n + i, i < n) for kind in range(len(numbers_of_queries(self.p))) for i in self.carried]
    return s.do(*[nv.put(to[self.numbers(t)*4 + place], s.numbers[j].load(), there) for j, (place, there) in enumerate(places)])

  def columns(self, s:BackwardState, t:UOp, part:int, kind:int) -> list[UOp]:
    """The `shared_numbers` of this kind of the queries that a lane's columns are."""
    pairs = s.shared.bitcast(nv.F2)
    first = self.numbers(t)*2 + (kind*self.tile.block_n + part*self.tile.part_n)//2 + self.warps.at.h
    return [pairs[first + n*self.mat.N//2].load() for n in range(self.tile.part_n//self.mat.N)]

  def exponents(self, s:BackwardState, t:UOp, part:int) -> list[Exponent]:
    return [Exponent(*xs) for xs in zip(*[self.columns(s, t, part, kind) for kind in kinds_of_exponents(self.p)])]

  def work(self, s:BackwardState, t:UOp, part:int, masked:bool) -> BackwardState:
    """The parts of dK and dV that some queries of a tile have."""
    scores, number, exponents = self.of_part(self.scores), t*self.parts + part, self.exponents(s, t, part)
    left = [kept_scores(scores, rows, number) for rows in self.keys]
    raw = self.with_rows(s, self.own("k"), self.walked("q", t), part, [[nv.zero(s.done)]*len(exponents) for _ in self.keys])
    weights = [weights_of_rows(scores, x, [exponents]*nv.ROWS, rows, number, masked) for rows, x in zip(self.keys, raw)]
    if "dv" in self.wanted:
      kept = [[one.packed(x, 2*i) for i, x in enumerate(self.packed(w.p))] for one, w in zip(left, weights)]
      s = self.add_product(s, "dv", kept, self.walked("do", t), part)
    if "dk" not in self.wanted: return s
    minus_delta = [ops.concat(x, x) for x in self.columns(s, t, part, 1)]
    dp = self.with_rows(s, self.own("v"), self.walked("do", t), part, [dp_start(minus_delta, kept) for kept in left])
    ds = [self.packed(gradients_of(w, y, one, minus_delta)) for w, y, one in zip(weights, dp, left)]
    return self.add_product(s, "dk", ds, self.walked("q", t), part)
