"""How the gradient of a problem is computed on a chip: by the backward kernels, or by tinygrad from `three_pass`. Every no carries its reason."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.choose.backward_tiles import choose_backward_tiles
from attn.choose.dispatch import NO_UNIT, amd_refuses
from attn.kernels.parts.tensors import check_backward
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import Problem

BACKWARD_KERNELS = ("backward_dq", "backward_dkdv")

LEAST_KEPT = 2.0**-14     # of P, by dropout

@dataclass(frozen=True)
class BackwardChoice:
  """What computes the gradients: the BACKWARD_KERNELS with these tiles, or `three_pass`, and then why the kernels don't."""
  tiles: tuple[BackwardTile, BackwardTile]|None
  arch: Chip|None
  refused: str|None = None
  @property
  def kernels(self) -> tuple[str, ...]: return () if self.tiles is None else BACKWARD_KERNELS
  def __str__(self) -> str:
    where = "any device" if self.arch is None else str(self.arch)
    if self.tiles is None:
      return (f"gradient on {where}: three_pass, computed again and differentiated by tinygrad, with its score matrix in memory\n"
              f"  not {' and '.join(BACKWARD_KERNELS)}: {self.refused}")
    return f"gradient on {where}: " + ", ".join(f"{name} tile {tile}" for name, tile in zip(self.kernels, self.tiles))

@functools.cache
def can_differentiate(p:Problem, arch:Chip|None) -> tuple[BackwardTile, BackwardTile]|str:
  """The tiles of the backward kernels for `p` on `arch`, or why they cannot compute its gradient."""
  if arch is None: return NO_UNIT
  if arch.family == "nvidia": return f"{arch.name}: they are written for AMD's matrix units"
  if (reason := amd_refuses(p, arch)) is not None: return reason
  if p.kept < LEAST_KEPT: return f"dropout_p={p.dropout_p}: P/(1 - dropout_p) may be more than float16 holds, beyond {1 - LEAST_KEPT}"
  p = replace(p, num_splits=1)
  try:
    tiles = choose_backward_tiles(p, arch)
    for tile in tiles: check_backward(p, tile)
  except NotImplementedError as e: return str(e)
  if (need := max(tile.lds_bytes(p) for tile in tiles)) > arch.lds: return f"{need} bytes of LDS: a workgroup of {arch.name} has {arch.lds}"
  return tiles

def choose_backward(p:Problem, arch:Chip|None, forward:str) -> BackwardChoice:
  """What differentiates `p` where the kernel `forward` computed it."""
  if forward == "three_pass": return BackwardChoice(None, arch, "forward is three_pass, which tinygrad differentiates")
  found = can_differentiate(p, arch)
  return BackwardChoice(None, arch, found) if isinstance(found, str) else BackwardChoice(found, arch)
