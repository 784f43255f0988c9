"""How the gradient of a problem is computed on a chip: by the backward kernels, or by tinygrad from `three_pass`. Every no carries its reason."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.choose.backward_tiles import choose_backward_tiles
from attn.choose.dispatch import NO_UNIT, amd_refuses, asked
from attn.choose.forced import BACKWARD_KERNELS, BY_TINYGRAD
from attn.kernels.backward_dbias import BiasShare
from attn.kernels.parts.tensors import check_backward
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import Problem

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
    return f"gradient on {where}: " + ", ".join(f"{name} tile {tile} {tile.options}".rstrip() for name, tile in zip(self.kernels, self.tiles))

def can_differentiate(p:Problem, arch:Chip|None) -> tuple[BackwardTile, BackwardTile]|str:
  """The tiles of the backward kernels for `p` on `arch`, or why they don't compute its gradient: they cannot, or ATTN_KERNEL asks for another way.
  Raises NotImplementedError where it asks for them and they cannot."""
  if asked().backward == BY_TINYGRAD: return f"ATTN_KERNEL={BY_TINYGRAD} forces another"
  if isinstance(found := kernel_tiles(p, arch), str): check_not_forced(found)
  return found

def check_not_forced(reason:str) -> None:
  """Raises NotImplementedError, with the reason, where ATTN_KERNEL asks for the backward kernels, which don't compute a gradient."""
  if (wanted := asked().backward) in BACKWARD_KERNELS: raise NotImplementedError(f"ATTN_KERNEL={wanted}: {reason}")

@functools.cache
def kernel_tiles(p:Problem, arch:Chip|None) -> tuple[BackwardTile, BackwardTile]|str:
  """The tiles of the backward kernels for `p` on `arch`, or why they cannot compute its gradient."""
  if arch is None: return NO_UNIT
  if arch.family == "nvidia": return f"{arch.name}: they are written for AMD's matrix units"
  if (reason := amd_refuses(p, arch)) is not None: return reason
  p = replace(p, num_splits=1)
  try:
    tiles = choose_backward_tiles(p, arch)
    for tile in tiles: check_backward(p, tile)
  except NotImplementedError as e: return str(e)
  if (need := max(tile.lds_bytes(p) for tile in tiles)) > arch.lds: return f"{need} bytes of LDS: a workgroup of {arch.name} has {arch.lds}"
  return tiles

def choose_bias_parts(p:Problem, arch:Chip) -> tuple[BackwardTile, int]:
  """The tile of backward_dbias, that of backward_dq, and into how many parts what it sums is divided, 0 for none: as many as fill the chip."""
  tiles = can_differentiate(p, arch)
  assert not isinstance(tiles, str)
  share = BiasShare(p, tiles[0].block_m, tiles[0].block_n)
  parts = min(share.trips, arch.cus//share.workgroups)
  return tiles[0], parts if parts > 1 else 0

def by_tinygrad(arch:Chip|None, reason:str) -> BackwardChoice:
  """For a reason that ATTN_KERNEL cannot overcome."""
  check_not_forced(reason)
  return BackwardChoice(None, arch, reason)

def choose_backward(p:Problem, arch:Chip|None, forward:str) -> BackwardChoice:
  """What differentiates `p` where the kernel `forward` computed it."""
  if forward == "three_pass": return by_tinygrad(arch, "forward is three_pass, which tinygrad differentiates")
  found = can_differentiate(p, arch)
  return BackwardChoice(None, arch, found) if isinstance(found, str) else BackwardChoice(found, arch)
