"""Which tiles the backward kernels get for a problem on a chip."""
from __future__ import annotations
from attn.chips import Chip
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import Problem

def choose_backward_tiles(p:Problem, arch:Chip) -> tuple[BackwardTile, BackwardTile]:
  mat=arch.matrix[p.dtype][0]
  return BackwardTile(mat, 4, 32), BackwardTile(mat, 4, 32, turned=(True,True))
