"""How the gradient of a problem is computed on a chip: by the backward kernels, or by tinygrad from `three_pass`. Every no carries its reason."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.choose.backward_tiles import AnyBackwardTile, choose_backward_tiles
from attn.choose.dispatch import NO_UNIT, amd_refuses, mma_refuses
from attn.kernels.backward_dkdv import backward_dkdv
from attn.kernels.backward_dkdv_mma import backward_dkdv_mma
from attn.kernels.backward_dkdv_wgmma import backward_dkdv_wgmma
from attn.kernels.backward_dq import backward_dq
from attn.kernels.backward_dq_mma import backward_dq_mma
from attn.kernels.backward_dq_wgmma import backward_dq_wgmma
from attn.kernels.parts.backward_mma import MmaBackwardTile
from attn.kernels.parts.backward_wgmma import WgmmaBackwardTile
from attn.kernels.parts.tensors import check_backward
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import Problem
from attn.tinygrad_compat import UOp

BACKWARD_KERNELS = ("backward_dq", "backward_dkdv")

SUFFIXES = {BackwardTile: "", MmaBackwardTile: "_mma", WgmmaBackwardTile: "_wgmma"}      # of the kernel that a tile is for

def dq_of(p:Problem, arch:Chip, tile:AnyBackwardTile, dlse:bool=False) -> Callable[..., UOp]:
  """The kernel of dq and delta that a tile is for."""
  if isinstance(tile, WgmmaBackwardTile): return backward_dq_wgmma(p, arch, tile, dlse)
  return backward_dq_mma(p, arch, tile, dlse) if isinstance(tile, MmaBackwardTile) else backward_dq(p, arch, tile, dlse)

def dkdv_of(p:Problem, arch:Chip, tile:AnyBackwardTile) -> Callable[..., UOp]:
  """The kernel of dk and dv that a tile is for."""
  if isinstance(tile, WgmmaBackwardTile): return backward_dkdv_wgmma(p, arch, tile)
  return backward_dkdv_mma(p, arch, tile) if isinstance(tile, MmaBackwardTile) else backward_dkdv(p, arch, tile)

LEAST_KEPT = 2.0**-14     # of P, by dropout

@dataclass(frozen=True)
class BackwardChoice:
  """What computes the gradients: the BACKWARD_KERNELS with these tiles, or `three_pass`, and then why the kernels don't."""
  tiles: tuple[AnyBackwardTile, AnyBackwardTile]|None
  arch: Chip|None
  refused: str|None = None
  @property
  def kernels(self) -> tuple[str, ...]:
    if self.tiles is None: return ()
    return tuple(name + SUFFIXES[type(tile)] for name, tile in zip(BACKWARD_KERNELS, self.tiles))
  def __str__(self) -> str:
    where = "any device" if self.arch is None else str(self.arch)
    if self.tiles is None:
      return (f"gradient on {where}: three_pass, computed again and differentiated by tinygrad, with its score matrix in memory\n"
              f"  not {' and '.join(BACKWARD_KERNELS)}: {self.refused}")
    return f"gradient on {where}: " + ", ".join(f"{name} tile {tile}" for name, tile in zip(self.kernels, self.tiles))

@functools.cache
def can_differentiate(p:Problem, arch:Chip|None) -> tuple[AnyBackwardTile, AnyBackwardTile]|str:
  """The tiles of the backward kernels for `p` on `arch`, or why they cannot compute its gradient."""
  if arch is None: return NO_UNIT
  if (reason := (mma_refuses if arch.family == "nvidia" else amd_refuses)(p, arch)) is not None: return reason
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
