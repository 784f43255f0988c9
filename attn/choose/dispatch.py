"""Which kernel and tile a problem gets on a chip, by predicates that carry the reason for a no."""
from __future__ import annotations
import functools, os
from dataclasses import dataclass, replace
from typing import Any, Callable
from attn import tuned
from attn.arch import ARCHS, Arch
from attn.fragment import MATRIX
from attn.kernels import dual_wave, forward, forward_mma, forward_wgmma, split_kv
from attn.kernels.forward_mma import MmaTile
from attn.kernels.forward_wgmma import WgmmaTile
from attn.kernels.split_kv import AnyTile
from attn.kernels.tiles import Candidate, Tile, ceildiv, contraction, round_up
from attn.problem import Problem
from attn.tiles_table import CANDIDATES
from attn.tinygrad_compat import UOp

MATRIX_DTYPES = ("float16", "bfloat16")
WIDE = 192     # beyond it O takes most of the registers of a wave that shares its SIMD

def fits(p:Problem, arch:Arch, tile:Tile, c:Candidate) -> str|None:
  """None if `tile` is for this problem on `arch`, else why not."""
  if max(p.D, p.Dv) > c.up_to: return f"tile {tile} has the registers for D and Dv up to {c.up_to}"
  if (blocks := split_kv.workgroups(p, tile)) < c.fills: return f"tile {tile} makes {blocks} workgroups, {c.fills} are wanted to fill the chip"
  if (need := forward.lds_bytes(p, tile)) > arch.lds: return f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}"
  return None

def tile_of(p:Problem, arch:Arch, c:Candidate) -> Tile:
  """The tile that a candidate makes of a problem: no larger than its queries, and small enough for its bias."""
  mat = MATRIX[arch.family, p.dtype][c.matrix]
  pack = p.Hkv < p.H and p.Sq < mat.N                     # a matrix tile that the queries of one head don't fill takes those of its group
  rows = p.Sq*(p.H//p.Hkv if pack else 1)
  q_tiles = c.q_tiles if rows > mat.N and p.bias is None else 1        # a bias takes as many registers as the scores
  needed = waves = ceildiv(rows, mat.N*q_tiles)
  block_n = min(c.block_n, 32) if p.bias is not None else c.block_n
  if waves == 1: block_n = min(block_n, 32)                            # small workgroups, several to a compute unit: LDS for them all
  staged = ceildiv(block_n*(p.D + p.Dv)*2, 4*mat.wave)                 # registers of a lane that would carry K and V on its own
  of_q = 0 if c.q_in_lds else contraction(mat, p.D)//2//(1 if mat.duplicated else mat.groups)
  full = q_tiles*(round_up(p.Dv, mat.M)//mat.groups + of_q) > arch.vgprs//2            # of O and Q
  waves = min(c.waves, max(waves, ceildiv(staged, arch.vgprs//(16 if full else 8))))   # waves without a query only help to carry
  few, crowded = needed < c.waves, p.window[0] >= 0 and max(p.D, p.Dv) > WIDE          # a loop with both masks has no registers to spare
  if crowded: waves = min(waves, 4)
  # few queries wait for memory: what it takes to have the largest weight of each row exactly 1, as the textbook has it, is not seen there
  return Tile(mat, waves, q_tiles, block_n, c.q_in_lds, c.fenced or few or crowded, 0 if crowded else c.prefetch, pack, 0.0 if few else 8.0)

def choose_tile(p:Problem, arch:Arch) -> AnyTile:
  """The tile of the chip's best forward kernel for `p`. Raises NotImplementedError, with every reason, when none fits."""
  if arch.family == "nvidia":
    if forward_wgmma.refuses(p, arch) is None: return forward_wgmma.tile_of(p, arch)
    if (reason := forward_mma.refuses(p, arch)) is not None: raise NotImplementedError(reason)
    return forward_mma.tile_of(p, arch)
  return choose_amd_tile(p, arch)

def choose_amd_tile(p:Problem, arch:Arch) -> Tile:
  """The first candidate that fits."""
  if (reason := no_matrix(p, arch)) is not None: raise NotImplementedError(reason)
  reasons = []
  found = tuned.winner(p, arch)
  for c in (*([found] if found is not None else []), *CANDIDATES[arch.family]):
    tile = tile_of(p, arch, c)
    if (reason := fits(p, arch, tile, c)) is None: return tile
    reasons.append(reason)
  raise NotImplementedError(f"no tile of the forward kernel fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")

# ***** which kernel *****

@dataclass(frozen=True)
class Work:
  """How a kernel divides a problem: its tile (None: tinygrad's own schedule) and into how many key ranges."""
  tile: AnyTile|None
  splits: int = 1

@dataclass(frozen=True)
class Choice:
  """The kernel that computes a problem, and why those before it in KERNELS don't."""
  kernel: str
  work: Work
  arch: Arch|None
  refused: tuple[tuple[str, str], ...]    # (kernel, reason)
  def why_not(self, kernel:str) -> str|None:
    """The reason for which `kernel` was not chosen, None if it was."""
    return dict(self.refused).get(kernel)
  def __str__(self) -> str:
    packed = ", GQA packed" if self.work.tile is not None and self.work.tile.pack_gqa else ""
    split = packed + (f", {self.work.splits} splits" if self.work.splits > 1 else ", no split")
    where = "any device" if self.arch is None else str(self.arch)
    lines = [f"{self.kernel} on {where}: " + ("scheduled by tinygrad" if self.work.tile is None else f"tile {self.work.tile}{split}")]
    return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in self.refused])

NO_UNIT = f"the device has no matrix unit that the kernels know; they know {', '.join(ARCHS)}"

def no_matrix(p:Problem, arch:Arch) -> str|None:
  """Why no kernel made of AMD's matrix instructions takes `p` on `arch`, or None."""
  if arch.family not in CANDIDATES: return f"{arch.name}: AMD's kernels have no tile for its matrix unit; they have some for {', '.join(CANDIDATES)}"
  if p.dtype not in MATRIX_DTYPES: return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MATRIX_DTYPES)}"
  return forward.too_wide(p)

def takes_whole(p:Problem, tile:Callable[[], AnyTile]) -> Work|str:
  """A forward kernel with the tile that is chosen, without splits."""
  try:
    chosen = tile()
    forward.check_range(p, chosen)
  except NotImplementedError as e: return str(e)
  if (asked := min(p.num_splits, split_kv.key_tiles(p, chosen))) > 1: return f"num_splits={p.num_splits} asks for {asked} key ranges"
  return Work(chosen)

def takes_forward(p:Problem, arch:Arch|None) -> Work|str:
  if arch is None: return NO_UNIT
  return no_matrix(p, arch) or takes_whole(p, lambda: choose_amd_tile(p, arch))

def takes_dual_wave(p:Problem, arch:Arch|None) -> Work|str:
  if arch is None: return NO_UNIT
  if (reason := no_matrix(p, arch) or dual_wave.refuses(p, arch)) is not None: return reason
  if tuned.winner(p, arch) is not None: return "TUNE=1 found a tile of forward that is faster on this device"
  return Work(dual_wave.tile_of(p, arch))

def takes_forward_wgmma(p:Problem, arch:Arch|None) -> Work|str:
  if arch is None: return NO_UNIT
  return forward_wgmma.refuses(p, arch) or takes_whole(p, lambda: forward_wgmma.tile_of(p, arch))

def takes_forward_mma(p:Problem, arch:Arch|None) -> Work|str:
  if arch is None: return NO_UNIT
  return forward_mma.refuses(p, arch) or takes_whole(p, lambda: forward_mma.tile_of(p, arch))

def takes_split_kv(p:Problem, arch:Arch|None) -> Work|str:
  if arch is None: return NO_UNIT
  if p.num_splits == 1: return "num_splits=1 asks for no split"
  work = takes_whole(whole := replace(p, num_splits=1), lambda: choose_tile(whole, arch))
  if isinstance(work, str): return work
  tile = work.tile
  assert tile is not None
  if (splits := split_kv.resolve(p, arch, tile).num_splits) > 1: return Work(choose_tile(replace(p, num_splits=splits), arch), splits)
  blocks = f"{split_kv.workgroups(p, tile)} workgroups, {split_kv.key_tiles(p, tile)} key tiles, {arch.cus} compute units"
  return f"no split is {'possible' if p.num_splits else 'the fastest'}: {blocks}"

def takes_three_pass(p:Problem, arch:Arch|None) -> Work|str:
  if p.num_splits > 1: return f"num_splits={p.num_splits}: three_pass has no key ranges to split into"
  return Work(None)

# best first; the first that takes the problem gets it
KERNELS: dict[str, Callable[[Problem, Arch|None], Work|str]] = {
  "split_kv": takes_split_kv, "dual_wave": takes_dual_wave, "forward": takes_forward, "forward_wgmma": takes_forward_wgmma,
  "forward_mma": takes_forward_mma, "three_pass": takes_three_pass}

def forward_of(p:Problem, arch:Arch, tile:AnyTile) -> Callable[..., UOp]:
  """The forward kernel that a tile is for, of all keys or, with p.num_splits, of key ranges."""
  if isinstance(tile, WgmmaTile): return forward_wgmma.forward_wgmma(p, arch, tile)
  return forward_mma.forward_mma(p, arch, tile) if isinstance(tile, MmaTile) else forward.forward(p, arch, tile)

# what they are made of: problem, arch and tile -> a function of the placeholders that `forward.arguments` names
PROGRAMS: dict[str, Callable[[Problem, Arch, Any], Callable[..., UOp]]] = {
  "split_kv": forward_of, "dual_wave": dual_wave.dual_wave, "forward": forward.forward, "forward_wgmma": forward_wgmma.forward_wgmma,
  "forward_mma": forward_mma.forward_mma}

def single_kernel(p:Problem, arch:Arch) -> tuple[Callable[..., UOp], AnyTile]:
  """The one kernel that computes `p` whole, as a function of its placeholders, and its tile. NotImplementedError where it takes more than one."""
  choice = choose(replace(p, num_splits=1), arch)
  if choice.work.tile is None:
    raise NotImplementedError(f"no single kernel takes this problem: {'; '.join(f'{name}: {reason}' for name, reason in choice.refused)}")
  return PROGRAMS[choice.kernel](p, arch, choice.work.tile), choice.work.tile

def choose(p:Problem, arch:Arch|None) -> Choice:
  """The first kernel that takes `p` on `arch` (None: a chip without a matrix unit), or the one that ATTN_KERNEL names.

  Raises NotImplementedError, with every reason, when none does or that one doesn't, and ValueError for an ATTN_KERNEL that does not exist."""
  return _choose(p, arch, os.environ.get("ATTN_KERNEL", ""))

@functools.cache
def _choose(p:Problem, arch:Arch|None, forced:str) -> Choice:
  if forced and forced not in KERNELS: raise ValueError(f"ATTN_KERNEL={forced!r}: must be one of {', '.join(KERNELS)}")
  refused = []
  for name, takes in KERNELS.items():
    work = takes(p, arch)
    if isinstance(work, str): refused.append((name, work))
    elif forced and name != forced: refused.append((name, f"ATTN_KERNEL={forced} forces another"))
    else: return Choice(name, work, arch, tuple(refused))
  if forced: raise NotImplementedError(f"ATTN_KERNEL={forced}: {dict(refused)[forced]}")
  raise NotImplementedError(f"no kernel takes this problem: {'; '.join(f'{name}: {reason}' for name, reason in refused)}")
