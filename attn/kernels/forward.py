"""Flash attention forward: one program for every AMD matrix unit.

A workgroup owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N, with the online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). It computes S^T = K Q^T and O^T = V^T P^T: a query is a lane, see
attn/chips/matrix.py.
K and V tiles come through registers to LDS, V transposed on the way; by default the loads of the next tile start before this one's matrix work.
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.attending import Attending, ForwardState
from attn.kernels.parts.dropout import Kept, kept_scores
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.softmax import Softmax
from attn.kernels.parts.statements import store_all
from attn.kernels.parts.tensors import check_problem
from attn.kernels.tiles.amd import Tile
from attn.ops import amd
from attn.problem import Problem
from attn.tinygrad_compat import UOp

def forward(p:Problem, arch:Chip, tile:Tile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders, which are those of `tensors.arguments(p)` in that order: (o, q, k, v),
  (o, lse, q, k, v) when p.return_lse, (o_partial, lse_partial, q, k, v) when p.num_splits > 1; then the optional tensors there are, in the order of
  `problem.EXTRAS`.

  With p.num_splits = G > 1 each workgroup takes one of G key ranges and writes the O and LSE of those keys alone, which `combine.combine` merges.
  With p.sk_variable the kernel has that Variable as a further parameter: `kernel(*placeholders).call(*tensors, variable.bind(n))`.
  Raises ValueError where p.num_splits is still 0, and NotImplementedError for tensors beyond what a buffer descriptor addresses.
  """
  check_problem(p, tile)
  return lambda *args: Forward.of(p, arch, tile, args).program()

@dataclass(frozen=True)
class Forward(Attending):
  """The kernel of one problem: a tile's work in one piece."""
  def program(self) -> UOp:
    group, s = self.group, self.state.after(self.state.softmax.start(self.group.scores), *[self.statements.do(amd.fp32_apart())]*self.apart)
    s = self.walk(s, group.walked, masked_first=group.p.window[0] >= 0)
    return group.kernel("forward", [x for qt, row in enumerate(self.queries) for x in self.outputs(s.softmax, qt, row)])

  def work(self, s:ForwardState, t:UOp, masked:bool) -> UOp:
    """S of a key tile, its softmax, and its part of O."""
    tiles = [self.group.scores.finished(x, [row], t, masked) for x, row in zip(self.raw_scores(s, t), self.queries)]
    softmax = self.weigh(s.softmax, tiles)
    left = [kept_scores(self.group.scores, [row], t) for row in self.queries]
    return self.add_to_o(softmax, self.in_lds(s, t, "v").columns, left, renewed=not masked)

  def add_to_o(self, softmax:Softmax, v_tile:LdsTile, left:list[Kept], renewed:bool) -> UOp:
    """O^T += V^T P^T, of the P that dropout keeps. `renewed`: see `fragment_operands`. (In masked trips it would take registers.)"""
    q_tiles = range(self.tile.q_tiles)
    weights = [softmax.operands(self.at, qt, self.k_tiles, left[qt], renewed) for qt in q_tiles]
    accs = [[softmax.acc[qt*self.d_tiles + dt].load() for dt in range(self.d_tiles)] for qt in q_tiles]
    o_tiles = [acc for column in self.products.with_columns(v_tile, self.tile.block_n, weights, accs) for acc in column]
    return UOp.group(self.statements.do(amd.made_here(*o_tiles)), *store_all(softmax.acc, o_tiles))
