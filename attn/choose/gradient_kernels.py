"""The table GRADIENT_KERNELS has a row for each kind of matrix unit: which problems its backward kernels refuse, which tile descriptions the kernels
use, and which functions build the kernels."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.choose.backward_tiles import (AnyBackwardTile, AtOnceTile, amd_at_once, amd_backward_tile, amd_bias_tile, mma_backward_tile, mma_bias_tile,
                                        wgmma_at_once, wgmma_backward_refuses, wgmma_backward_tile, wgmma_few_queries)
from attn.choose.refusals import amd_refuses, lacks_nothing, mma_refuses, no_mma, no_tiles, no_wgmma, too_many_parts
from attn.choose.tiled_tiles import tiled_backward_tile
from attn.kernels.amd.backward import AmdBackward
from attn.kernels.amd.dbias import AmdBias
from attn.kernels.amd.gradient_sums import amd_delta_kernel, amd_finish_kernel
from attn.kernels.backward import backward_all, backward_dbias, backward_dkdv, backward_dkdv_in_halves, backward_dq, backward_few
from attn.kernels.mma.backward import MmaBackward
from attn.kernels.mma.dbias import MmaBias
from attn.kernels.nvidia.gradient_sums import delta_kernel, finish_kernel
from attn.kernels.parts.grid.tensors import check_backward
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.plain.backward import PlainBackward
from attn.kernels.plain.rectangle import beyond_registers, for_rectangles
from attn.kernels.tiles.amd import BackwardTile
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.kernels.tiles.plain import TiledBackwardTile
from attn.kernels.tiles.wgmma import WgmmaHalvesTile, WgmmaBackwardTile, WgmmaFewQueriesTile
from attn.kernels.wgmma.backward import WgmmaBackward
from attn.kernels.wgmma.gradients_of_few import WgmmaFewQueries
from attn.kernels.wgmma.gradients_in_halves import WgmmaHalves
from attn.problem import Problem
from attn.score.sums import has_sum, sum_over_scores
from attn.tinygrad_compat import UOp

BACKWARD_KERNELS = ("backward_dq", "backward_dkdv")
AT_ONCE_KERNELS = ("backward_delta", "backward_all", "backward_finish")      # in place of BACKWARD_KERNELS
FEW_KERNEL = "backward_few"             # in place of BACKWARD_KERNELS, for few queries
BIAS_KERNEL = "backward_dbias"           # runs beside BACKWARD_KERNELS where the gradient of a bias is wanted

Tiles = tuple[AnyBackwardTile, AnyBackwardTile]     # tiles of the kernel of dq, and of the kernel of dk and dv

LEAST_KEPT = 2.0**-14     # least probability with which dropout may keep an element, if P is rounded to float16

def beyond_float16(p:Problem) -> str|None:
  """Returns why weights after dropout, P/(1 - dropout_p), can be too large for float16, or None if they cannot."""
  if p.kept >= LEAST_KEPT: return None
  return f"dropout_p={p.dropout_p}: P/(1 - dropout_p) may be too large for float16 if dropout_p is above {1 - LEAST_KEPT}"

def tiled_backward_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := beyond_registers(p)) is not None: return reason
  return f"{sum_over_scores(p).name}: there is no kernel of plain UOps for its gradient" if has_sum(p) else None

@dataclass(frozen=True)
class BiasKernel:
  """The kernel that computes dbias, after the kernels of dq, dk and dv of the same matrix unit."""
  suffix: str                                                       # ending of its name
  tile: Callable[[Problem, Chip], BackwardTile|MmaBackwardTile]     # raises NotImplementedError
  program: Callable[..., Callable[..., UOp]]

@dataclass(frozen=True)
class AtOnce:
  """Three kernels that together compute dq, dk and dv, with an fp32 sum of dQ in memory, instead of one kernel for dq and one for dk and dv."""
  # `delta` computes delta and clears the sum of dQ. `all` computes dk and dv, and adds dQ to the sum. `finish` turns the sum into dq.
  tile: Callable[[Problem, Chip], AtOnceTile|str]            # the tile of the second one, or the reason why two kernels compute the gradients
  delta: Callable[..., Callable[..., UOp]]
  all: Callable[..., Callable[..., UOp]]
  finish: Callable[..., Callable[..., UOp]]

@dataclass(frozen=True)
class FewQueries:
  """The kernel that computes dq, dk and dv of a problem with few queries, in place of two kernels."""
  tile: Callable[[Problem, Chip], WgmmaFewQueriesTile|str]      # its tile, or the reason why other kernels compute the gradients
  program: Callable[..., Callable[..., UOp]]

@dataclass(frozen=True)
class GradientKernels:
  """The kernels that compute gradients on one kind of matrix unit: a row of the table GRADIENT_KERNELS."""
  refuses: Callable[[Problem, Chip], str|None]                      # why they cannot differentiate a problem on a chip that has their unit, or None
  tile: Callable[[Problem, Chip, bool], AnyBackwardTile]            # tile of the kernel that owns queries, or keys (True); raises NotImplementedError
  dq: Callable[..., Callable[..., UOp]]
  dkdv: Callable[..., Callable[..., UOp]]
  bias: BiasKernel|None = None
  at_once: AtOnce|None = None
  few: FewQueries|None = None
  lacks: Callable[[Chip], str|None] = lacks_nothing                 # why a chip lacks their unit, or None
  general: bool = False                                             # as in `dispatch.ForwardKernel`

  def tiles(self, p:Problem, arch:Chip) -> Tiles|str:
    """Returns (tile description of the kernel for dq, tile description of the kernel for dk and dv), or the reason why these kernels cannot compute
    the gradients."""
    if (reason := self.lacks(arch) or self.refuses(p, arch)) is not None: return reason
    try:
      tiles = self.tile(p, arch, False), self.tile(p, arch, True)
      used = (*tiles, *([self.bias.tile(p, arch)] if has_sum(p) and self.bias is not None else []))
      for tile in used: check_backward(p, tile)
    except NotImplementedError as e: return str(e)
    if (need := max(tile.lds_bytes(p) for tile in used)) > arch.lds: return f"{need} bytes of LDS: a workgroup of {arch.name} has {arch.lds}"
    for tile, rows, heads in zip(tiles, (p.Sq, p.Sk), (p.B*p.H, p.B*p.Hkv)):
      if arch.serial and (reason := too_many_parts(p, arch, ceildiv(rows, tile.block_m), heads)) is not None: return reason
    return tiles

def wgmma_dkdv(p:Problem, arch:Chip, tile:WgmmaBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """Returns the kernel on wgmma that computes dk and dv, with the tile description `tile`. See `backward_dkdv`."""
  of_tile = backward_dkdv_in_halves(WgmmaHalves.of_block) if isinstance(tile, WgmmaHalvesTile) else backward_dkdv(WgmmaBackward.of_keys)
  return of_tile(p, arch, tile, parts)

BIAS_BY_MMA = BiasKernel(MmaBackwardTile.suffix, mma_bias_tile, backward_dbias(MmaBias.of_block))

# by the ending of the names of a unit's kernels, best first
GRADIENT_KERNELS: dict[str, GradientKernels] = {
  BackwardTile.suffix: GradientKernels(
    lambda p, arch: amd_refuses(p, arch) or beyond_float16(p), amd_backward_tile, backward_dq(AmdBackward.of_queries),
    backward_dkdv(AmdBackward.of_keys), BiasKernel(BackwardTile.suffix, amd_bias_tile, backward_dbias(AmdBias.of_block)),
    AtOnce(amd_at_once, amd_delta_kernel, backward_all(AmdBackward.of_keys), lambda p, arch, _: amd_finish_kernel(p, arch)), None, no_tiles, True),
  WgmmaBackwardTile.suffix: GradientKernels(
    lambda p, arch: wgmma_backward_refuses(p, arch) or beyond_float16(p), wgmma_backward_tile, backward_dq(WgmmaBackward.of_queries),
    wgmma_dkdv, BIAS_BY_MMA,
    AtOnce(wgmma_at_once, delta_kernel, backward_all(WgmmaBackward.of_keys), finish_kernel),
    FewQueries(wgmma_few_queries, backward_few(WgmmaFewQueries.of_block)), no_wgmma),
  MmaBackwardTile.suffix: GradientKernels(
    lambda p, arch: mma_refuses(p, arch) or beyond_float16(p), mma_backward_tile, backward_dq(MmaBackward.of_queries),
    backward_dkdv(MmaBackward.of_keys), BIAS_BY_MMA, lacks=no_mma, general=True),
  TiledBackwardTile.suffix: GradientKernels(
    tiled_backward_refuses, tiled_backward_tile, for_rectangles(backward_dq(PlainBackward.of_queries)),
    for_rectangles(backward_dkdv(PlainBackward.of_keys)))}
