"""How the gradient of a problem is computed on a chip: by the backward kernels, or by tinygrad from `three_pass`. Every no carries its reason."""
from __future__ import annotations
import math
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.choose import splits
from attn.choose.backward_tiles import AnyBackwardTile, choose_backward_tiles, choose_bias_tile, wgmma_backward_refuses
from attn.choose.dispatch import NO_UNIT, amd_refuses, asked_for, mma_refuses, too_many_parts
from attn.choose.forced import BACKWARD_KERNELS, BIAS_KERNEL, BY_TINYGRAD, MATRIX_UNITS, ON_AMD, ON_ANY, ON_MMA, ON_WGMMA, UNITS, WAYS
from attn.choose.tiled_tiles import tiled_backward_tiles
from attn.kernels.parts.bias_share import BiasShare
from attn.kernels.backward_dbias import backward_dbias
from attn.kernels.backward_dbias_mma import backward_dbias_mma
from attn.kernels.backward_dkdv import backward_dkdv
from attn.kernels.backward_dkdv_mma import backward_dkdv_mma
from attn.kernels.backward_dkdv_wgmma import backward_dkdv_wgmma
from attn.kernels.backward_dq import backward_dq
from attn.kernels.backward_dq_mma import backward_dq_mma
from attn.kernels.backward_dq_wgmma import backward_dq_wgmma
from attn.kernels.backward_tiled import TiledBackwardTile, backward_dkdv_tiled, backward_dq_tiled
from attn.kernels.parts.backward_mma import MmaBackwardTile
from attn.kernels.parts.backward_wgmma import WgmmaBackwardTile
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.rectangle import beyond_registers
from attn.kernels.parts.tensors import check_backward, dbias_arguments, dkdv_arguments, dq_arguments
from attn.kernels.parts.tiles import BackwardTile
from attn.problem import MAX_SPLITS, Problem
from attn.tinygrad_compat import UOp
from attn.values import cache_of_kernels

# of the kernel that a tile is for
SUFFIXES = {BackwardTile: ON_AMD, MmaBackwardTile: ON_MMA, WgmmaBackwardTile: ON_WGMMA, TiledBackwardTile: ON_ANY}

def dq_of(p:Problem, arch:Chip, tile:AnyBackwardTile, dlse:bool=False, parts:int=0) -> Callable[..., UOp]:
  """The kernel of dq and delta that a tile is for."""
  if isinstance(tile, TiledBackwardTile): return backward_dq_tiled(p, arch, tile, dlse, parts)
  if isinstance(tile, WgmmaBackwardTile): return backward_dq_wgmma(p, arch, tile, dlse, parts)
  return backward_dq_mma(p, arch, tile, dlse, parts) if isinstance(tile, MmaBackwardTile) else backward_dq(p, arch, tile, dlse, parts)

def dkdv_of(p:Problem, arch:Chip, tile:AnyBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel of dk and dv that a tile is for."""
  if isinstance(tile, TiledBackwardTile): return backward_dkdv_tiled(p, arch, tile, parts)
  if isinstance(tile, WgmmaBackwardTile): return backward_dkdv_wgmma(p, arch, tile, parts)
  return backward_dkdv_mma(p, arch, tile, parts) if isinstance(tile, MmaBackwardTile) else backward_dkdv(p, arch, tile, parts)

def dbias_of(p:Problem, arch:Chip, tile:BackwardTile|MmaBackwardTile, parts:int=0) -> Callable[..., UOp]:
  """The kernel of dbias that a tile is for."""
  return backward_dbias_mma(p, arch, tile, parts) if isinstance(tile, MmaBackwardTile) else backward_dbias(p, arch, tile, parts)

LEAST_KEPT = 2.0**-14     # of P, by dropout

@dataclass(frozen=True)
class BackwardChoice:
  """What computes the gradients: the kernels with these tiles, and into how many parts each divides what it sums (0: none); or `three_pass`, and then
  why the kernels don't. `memory`: bytes beside inputs and outputs. `others`: (kernels, reason) of the units that were asked before the chosen one."""
  tiles: tuple[AnyBackwardTile, ...]|None
  arch: Chip|None
  refused: str|None = None
  parts: tuple[int, ...] = ()
  memory: int = 0
  others: tuple[tuple[str, str], ...] = ()
  def why_not(self, kernel:str) -> str|None:
    """The reason for which a backward kernel, such as "backward_dq_mma", was not chosen; None where it was, or where a better one was."""
    return next((reason for names, reason in self.others if kernel in names.split(", ")), None)
  @property
  def kernels(self) -> tuple[str, ...]:
    if self.tiles is None: return ()
    return tuple(name + SUFFIXES[type(tile)] for name, tile in zip((*BACKWARD_KERNELS, BIAS_KERNEL), self.tiles))
  def __str__(self) -> str:
    where = "any device" if self.arch is None else str(self.arch)
    if self.tiles is None:
      return (f"gradient on {where}: three_pass, computed again and differentiated by tinygrad, with its score matrix in memory\n"
              f"  not {' and '.join(BACKWARD_KERNELS)}: {self.refused}")
    each = [" ".join([f"{name} tile {tile}", *[tile.options]*bool(tile.options), *[f"in {parts} parts"]*(parts > 1)])
            for name, tile, parts in zip(self.kernels, self.tiles, self.parts, strict=True)]
    lines = [f"gradient on {where}: {', '.join(each)}", *(f"  not {names}: {reason}" for names, reason in self.others)]
    return "\n".join([*lines, f"  memory beside inputs and outputs: {self.memory} bytes"])

FULL_GRIDS = 4

@dataclass(frozen=True)
class Parts:
  """Into how many parts the backward kernels divide what they sum, 0 for none: fp32, added by one more kernel each, always in the same order."""
  dq: int
  dkdv: int
  dbias: int

def choose_parts(p:Problem, arch:Chip) -> Parts:
  """As many as make up for a grid that leaves compute units idle, by the model of `splits.split_heuristic`. Their workgroups, each of which leaves
  fp32 numbers for its own rows, are never more than the kernel's own and FULL_GRIDS that fill the chip: that bounds their memory."""
  dq, dkdv = tiles_of(p, arch)
  if arch.serial or not arch.cus: return Parts(0, 0, 0)      # of which nothing is known
  group, visible = p.H//p.Hkv, p.flops//(2*p.B*p.H*(p.D + p.Dv))      # scores of a head
  rows, keys = (p.total_q, p.total_k) if p.varlen else (p.B*p.Sq, p.B*p.Sk)
  def parts(tile:AnyBackwardTile, own:int, heads:int, walked:int, trips:int, numbers:int) -> int:
    workgroups, places = p.B*heads*ceildiv(own, tile.block_m), splits.places_of(p, arch, tile)
    most = min(ceildiv(walked, tile.block_n)*(p.H//heads), 1 + FULL_GRIDS*places//workgroups)
    choices = [2**i for i in range(MAX_SPLITS.bit_length()) if 2**i <= most]
    found = splits.quickest(choices, workgroups, max(1, trips), tile.block_n, places, numbers)
    return found if found > 1 else 0
  of_bias = 0
  if p.bias is not None:
    tile = choose_bias_tile(p, arch)
    share = BiasShare(p, tile.block_m, tile.block_n)
    of_bias = share.trips if share.uneven else min(share.trips, arch.cus//share.workgroups)
  return Parts(parts(dq, p.Sq, p.H, p.Sk, ceildiv(visible//p.Sq, dq.block_n), rows*p.H*p.D),
               parts(dkdv, p.Sk, p.Hkv, p.Sq, group*ceildiv(visible//p.Sk, dkdv.block_n), keys*p.Hkv*(p.D + p.Dv)), of_bias if of_bias > 1 else 0)

def memory_of(p:Problem, parts:Parts) -> int:
  """Bytes that the gradients take beside inputs and outputs: lse and delta of each row, and the parts."""
  of = {"dq": dq_arguments(p, parts=parts.dq), "dkdv": dkdv_arguments(p, parts.dkdv)} | \
       ({"dbias": dbias_arguments(p, parts.dbias)} if p.bias is not None and parts.dbias else {})
  names = {"dq": ("dq",), "dkdv": ("dk", "dv"), "dbias": ("dbias",)}
  left = sum(4*math.prod(of[kernel][name][0]) for kernel in of if getattr(parts, kernel) for name in names[kernel])
  return 8*p.rows + left

def tiles_of(p:Problem, arch:Chip) -> tuple[AnyBackwardTile, AnyBackwardTile]:
  """Of the backward kernels, which compute the gradient of `p`."""
  found = can_differentiate(p, arch)
  assert not isinstance(found, str)
  return found

def can_differentiate(p:Problem, arch:Chip|None) -> tuple[AnyBackwardTile, AnyBackwardTile]|str:
  """The tiles of the backward kernels for `p` on `arch`, or why they don't compute its gradient: they cannot, or ATTN_KERNEL asks for another way.
  Raises NotImplementedError where it asks for them and they cannot."""
  if (asked := asked_for()).backward == BY_TINYGRAD: return f"ATTN_KERNEL={BY_TINYGRAD} forces another"
  if isinstance(found := kernel_tiles(p, arch, asked.units), str): check_not_forced(found)
  return found

def check_not_forced(reason:str) -> None:
  """Raises NotImplementedError, with the reason, where ATTN_KERNEL asks for the backward kernels, which don't compute a gradient."""
  if (wanted := asked_for().backward) in WAYS: raise NotImplementedError(f"ATTN_KERNEL={wanted}: {reason}")

@cache_of_kernels
def kernel_tiles(p:Problem, arch:Chip|None, units:tuple[str, ...]=UNITS) -> tuple[AnyBackwardTile, AnyBackwardTile]|str:
  """The tiles of the backward kernels for `p` on `arch`, of those for some units, or why they cannot compute its gradient: a matrix unit's before
  those of plain UOps."""
  if arch is None: return NO_UNIT
  reasons = []
  for of, find in ((MATRIX_UNITS, matrix_tiles), ((ON_ANY,), plain_tiles)):
    if not (some := tuple(unit for unit in units if unit in of)): continue
    if not isinstance(found := find(replace(p, num_splits=1), arch, some), str): return found
    reasons.append(found)
  return "; ".join(dict.fromkeys(reasons))

def matrix_tiles(p:Problem, arch:Chip, units:tuple[str, ...]) -> tuple[AnyBackwardTile, AnyBackwardTile]|str:
  """Those for matrix units."""
  if (reason := (mma_refuses if arch.family == "nvidia" else amd_refuses)(p, arch)) is not None: return reason
  if p.kept < LEAST_KEPT: return f"dropout_p={p.dropout_p}: P/(1 - dropout_p) may be more than float16 holds, beyond {1 - LEAST_KEPT}"
  try:
    tiles = choose_backward_tiles(p, arch, units)
    used = (*tiles, *([choose_bias_tile(p, arch)] if p.bias is not None else []))
    for tile in used: check_backward(p, tile)
  except NotImplementedError as e: return str(e)
  if (need := max(tile.lds_bytes(p) for tile in used)) > arch.lds: return f"{need} bytes of LDS: a workgroup of {arch.name} has {arch.lds}"
  return tiles

def plain_tiles(p:Problem, arch:Chip, units:tuple[str, ...]) -> tuple[AnyBackwardTile, AnyBackwardTile]|str:
  """Those of plain UOps."""
  if (reason := beyond_registers(p)) is not None: return reason
  if p.bias is not None: return "bias: there is no kernel of plain UOps for its gradient"
  try:
    tiles = tiled_backward_tiles(p, arch)
    for tile in tiles: check_backward(p, tile)
  except NotImplementedError as e: return str(e)
  for tile, rows, heads in zip(tiles, (p.Sq, p.Sk), (p.B*p.H, p.B*p.Hkv)):
    if arch.serial and (reason := too_many_parts(p, arch, ceildiv(rows, tile.block_m), heads)) is not None: return reason
  return tiles

def by_tinygrad(arch:Chip|None, reason:str) -> BackwardChoice:
  """For a reason that ATTN_KERNEL cannot overcome."""
  check_not_forced(reason)
  return BackwardChoice(None, arch, reason)

def choose_backward(p:Problem, arch:Chip|None, forward:str) -> BackwardChoice:
  """What differentiates `p` where the kernel `forward` computed it."""
  if forward == "three_pass": return by_tinygrad(arch, "forward is three_pass, which tinygrad differentiates")
  found = can_differentiate(p, arch)
  if isinstance(found, str) or arch is None: return BackwardChoice(None, arch, str(found))
  parts, others = choose_parts(p, arch), others_of(p, arch, SUFFIXES[type(found[0])])
  if p.bias is None: return BackwardChoice(found, arch, None, (parts.dq, parts.dkdv), memory_of(p, parts), others)
  tiles = (*found, choose_bias_tile(p, arch))
  return BackwardChoice(tiles, arch, None, (parts.dq, parts.dkdv, parts.dbias), memory_of(p, parts), others)

BEST_FIRST = (ON_AMD, ON_WGMMA, ON_MMA, ON_ANY)
REFUSES: dict[str, Callable[[Problem, Chip], str|None]] = {ON_AMD: amd_refuses, ON_WGMMA: wgmma_backward_refuses, ON_MMA: mma_refuses}

def others_of(p:Problem, arch:Chip, chosen:str) -> tuple[tuple[str, str], ...]:
  """(kernels, reason) of the units that come before the chosen one."""
  asked, p, found = asked_for(), replace(p, num_splits=1), []
  for unit in BEST_FIRST[:BEST_FIRST.index(chosen)]:
    reason = REFUSES[unit](p, arch) or matrix_tiles(p, arch, (unit,))
    if not isinstance(reason, str): reason = f"ATTN_KERNEL={asked.backward} forces another"
    found.append((", ".join(name + unit for name in BACKWARD_KERNELS), reason))
  return tuple(found)
