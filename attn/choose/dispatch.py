"""Which kernel a problem gets on a chip. Two questions are asked of each: can it compute the problem, and is no other faster? Every no carries its
reason."""
from __future__ import annotations
import math
from dataclasses import dataclass, replace
from typing import Any, Callable
from attn.chips import CHIPS, Chip
from attn.chips.matrix import MMA
from attn.cache import tuned
from attn.choose import splits
from attn.choose.forced import Forced, forced
from attn.choose.splits import AnyTile
from attn.choose.mla_tiles import MLA_CANDIDATES, latent_refuses, mla_mma_tile, mla_tile
from attn.choose.tiles import choose_amd_tile, dual_wave_tile, mma_tile, staggered_tile, wgmma_tile
from attn.choose.tiled_tiles import tiled_tile
from attn.choose.tiles_table import CANDIDATES
from attn.kernels import dual_wave, forward, forward_mma, forward_wgmma, mla, mla_mma, staggered, tiled
from attn.kernels.combine import combine
from attn.kernels.forward_mma import MmaTile
from attn.kernels.forward_wgmma import WgmmaTile
from attn.kernels.mla import MlaTile
from attn.kernels.mla_mma import MlaMmaTile
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.rectangle import beyond_registers, serial_items
from attn.kernels.parts.tensors import check_range, too_wide
from attn.kernels.parts.tiles import blocks_of_queries
from attn.ops.plain import plain
from attn.problem import INVARIANT_KEYS, Problem
from attn.tinygrad_compat import UOp
from attn.values import cache_of_kernels

MATRIX_DTYPES = ("float16", "bfloat16")

DUAL_WAVE_LLVM = 22    # the release from which on no register of dual_wave is spilled
STAGGERED_UP_TO = 128  # head dimension: three tiles of K and of V fill LDS

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
  arch: Chip|None
  refused: tuple[tuple[str, str], ...]    # (kernel, reason)
  memory: tuple[tuple[str, int], ...] = ()    # bytes beside inputs and outputs, of it and of three_pass
  grid: str = ""                              # how it fills the chip, in words
  def why_not(self, kernel:str) -> str|None:
    """The reason for which `kernel` was not chosen, None if it was."""
    return dict(self.refused).get(kernel)
  def __str__(self) -> str:
    packed = ", GQA packed" if self.work.tile is not None and self.work.tile.pack_gqa else ""
    split = packed + (f", {self.work.splits} splits" if self.work.splits > 1 else ", no split")
    where = "any device" if self.arch is None else str(self.arch)
    lines = [f"{self.kernel} on {where}: " + ("scheduled by tinygrad" if self.work.tile is None else f"tile {self.work.tile}{split}")]
    if self.grid: lines.append(f"  {self.grid}")
    lines += [f"  not {name}: {reason}" for name, reason in self.refused]
    if self.memory: lines.append("  bytes beside inputs and outputs: " + ", ".join(f"{name} {n}" for name, n in self.memory))
    return "\n".join(lines)

# ***** what a kernel cannot compute *****

def amd_refuses(p:Problem, arch:Chip) -> str|None:
  """Why no kernel made of AMD's matrix instructions takes `p` on `arch`, or None."""
  if arch.family not in CANDIDATES: return f"{arch.name}: AMD's kernels have no tile for its matrix unit; they have some for {', '.join(CANDIDATES)}"
  if p.dtype not in MATRIX_DTYPES: return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MATRIX_DTYPES)}"
  return too_wide(p)

def dual_wave_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := amd_refuses(p, arch)) is not None: return reason
  if arch.family != "cdna4": return f"{arch.name} has no direct loads to LDS of 16 bytes and no transposing ones from it; gfx950 has"
  if (p.D, p.Dv) != (dual_wave.HEAD, dual_wave.HEAD): return f"D={p.D}, Dv={p.Dv}: it is written for {dual_wave.HEAD}"
  if p.window[0] >= 0: return f"window={p.window}: it starts at the first key"
  if options := (*p.options, *["num_splits"]*(p.num_splits > 1)): return f"{options[0]}: it takes plain problems only"
  return None

def staggered_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := amd_refuses(p, arch)) is not None: return reason
  if not arch.unit.agprs: return f"{arch.name}: its matrix unit does not run beside the vector unit; those of gfx90a, gfx942 and gfx950 do"
  if max(p.D, p.Dv) > STAGGERED_UP_TO: return f"D={p.D}, Dv={p.Dv}: LDS has room for its tiles up to {STAGGERED_UP_TO}"
  others = () if p.dealt is None else ("dealt", "k_view")     # of which only the places of rows differ
  options = [x for x in (*p.options, *["num_splits"]*(p.num_splits > 1)) if x not in others]
  if options: return f"{options[0]}: it takes plain problems only"
  return None

def mma_refuses(p:Problem, arch:Chip) -> str|None:
  if arch.family != "nvidia": return f"{arch.name} has no mma.sync"
  if p.dtype not in MMA: return f"dtype {p.dtype}: mma.sync takes {' and '.join(MMA)}"
  return too_wide(p)

def wgmma_refuses(p:Problem, arch:Chip) -> str|None:
  if not arch.wgmma: return f"{arch.name} has no wgmma"
  if p.dtype not in MMA: return f"dtype {p.dtype}: wgmma takes {' and '.join(MMA)}"
  if (reason := too_wide(p)) is not None: return reason
  for name, width in (("D", p.D), ("Dv", p.Dv)):
    if width % (unit := MMA[p.dtype].unit): return f"{name}={width}: rows are copied by {unit} elements"
  for name, view in (("k", p.k_view), ("v", p.v_view)):
    if view is not None and not view.whole(unit): return f"{name} lies as {view} says: rows are copied by {unit} elements, from a multiple of them on"
  return None

def mla_refuses(p:Problem, arch:Chip) -> str|None:
  if arch.family not in MLA_CANDIDATES: return f"{arch.name}: it has tiles for {', '.join(MLA_CANDIDATES)}"
  return latent_refuses(p)

def mla_mma_refuses(p:Problem, arch:Chip) -> str|None:
  return latent_refuses(p) if arch.family == "nvidia" else f"{arch.name} has no mma.sync"

# ***** how a kernel would divide a problem, or why it cannot compute it *****

def whole(p:Problem, tile:Callable[[], AnyTile]) -> Work|str:
  """A forward kernel with the tile that is chosen, without splits."""
  try:
    chosen = tile()
    check_range(p, chosen)
  except NotImplementedError as e: return str(e)
  if (asked := min(p.num_splits, splits.key_tiles(p, chosen))) > 1: return f"num_splits={p.num_splits} asks for {asked} key ranges"
  return Work(chosen)

def can_forward(p:Problem, arch:Chip) -> Work|str: return amd_refuses(p, arch) or whole(p, lambda: choose_amd_tile(p, arch))

def can_dual_wave(p:Problem, arch:Chip) -> Work|str: return dual_wave_refuses(p, arch) or Work(dual_wave_tile(p, arch))

def can_staggered(p:Problem, arch:Chip) -> Work|str: return staggered_refuses(p, arch) or whole(p, lambda: staggered_tile(p, arch))

def can_forward_mma(p:Problem, arch:Chip) -> Work|str: return mma_refuses(p, arch) or whole(p, lambda: mma_tile(p, arch))

def can_forward_wgmma(p:Problem, arch:Chip) -> Work|str: return wgmma_refuses(p, arch) or whole(p, lambda: wgmma_tile(p, arch))

def can_mla(p:Problem, arch:Chip) -> Work|str: return mla_refuses(p, arch) or whole(p, lambda: mla_tile(p, arch))

def can_mla_mma(p:Problem, arch:Chip) -> Work|str: return mla_mma_refuses(p, arch) or whole(p, lambda: mla_mma_tile(p, arch))

def choose_tile(p:Problem, arch:Chip) -> AnyTile:
  """The tile of the chip's best forward kernel for `p`. Raises NotImplementedError, with every reason, when none fits."""
  latent = p.v_in_k and too_wide(p) is not None
  if arch.family != "nvidia":
    if latent and mla_refuses(p, arch) is None: return mla_tile(p, arch)
    if (reason := amd_refuses(p, arch)) is not None: raise NotImplementedError(reason)
    return choose_amd_tile(p, arch)
  if latent and mla_mma_refuses(p, arch) is None: return mla_mma_tile(p, arch)
  if wgmma_refuses(p, arch) is None and too_short(p) is None: return wgmma_tile(p, arch)
  if (reason := mma_refuses(p, arch)) is not None: raise NotImplementedError(reason)
  return mma_tile(p, arch)

def can_split_kv(p:Problem, arch:Chip) -> Work|str:
  """With as many key ranges as are asked for, or as the heuristic finds, and two at least."""
  if p.num_splits == 1: return "num_splits=1 asks for no split"
  unsplit = replace(p, num_splits=1)
  work = whole(unsplit, lambda: choose_tile(unsplit, arch))
  if isinstance(work, str): return work
  assert work.tile is not None
  if p.batch_invariant:
    tile = choose_tile(replace(p, num_splits=2), arch)
    if (number := splits.resolve(p, arch, tile).num_splits) > 1: return Work(tile, number)
    return f"batch_invariant=True: room for one range of {INVARIANT_KEYS} keys only, or more queries than a tile has"
  if (tiles := splits.key_tiles(p, work.tile)) < 2: return f"no split is possible: {of_grid(p, arch, work.tile)}"
  number = max(2, splits.resolve(p, arch, work.tile).num_splits)
  return Work(choose_tile(replace(p, num_splits=min(number, tiles)), arch), min(number, tiles))

MOST_PARTS = 8192    # half of what tinygrad's queue of commands for a CPU holds

def too_many_parts(p:Problem, arch:Chip, blocks:int, heads:int) -> str|None:
  """Why a device without workgroups does not take so many blocks of rows of so many heads, over batches, or None."""
  if (parts := serial_items(p, blocks, heads)[0]) <= MOST_PARTS: return None
  return f"{parts} blocks of rows: {arch.name} takes {MOST_PARTS} at most, which tinygrad tells it one by one"

def can_tiled(p:Problem, arch:Chip) -> Work|str:
  """With as many key ranges as are asked for, or as the heuristic finds."""
  if (reason := beyond_registers(p)) is not None: return reason
  if p.batch_invariant: return "batch_invariant=True: its tiles are for the whole grid, and so depend on the batch"
  try:
    tile = tiled_tile(p, arch)
    check_range(p, tile)
  except NotImplementedError as e: return str(e)
  if arch.serial and (reason := too_many_parts(p, arch, math.prod(blocks_of_queries(p, tile)), p.all_heads)) is not None: return reason
  if tile.alone: return Work(tile) if p.num_splits <= 1 else f"num_splits={p.num_splits}: threads by themselves have no key ranges to merge"
  return Work(tile, splits.resolve(replace(p, num_splits=p.num_splits or int(not arch.cus)), arch, tile).num_splits)

def can_three_pass(p:Problem, arch:Chip|None) -> Work|str:
  if p.num_splits > 1: return f"num_splits={p.num_splits}: three_pass has no key ranges to split into"
  return Work(None)

# ***** why another kernel is faster than one that can *****

def of_grid(p:Problem, arch:Chip, tile:AnyTile) -> str:
  return f"{splits.workgroups(p, tile)} workgroups, {splits.key_tiles(p, tile)} key tiles, {arch.cus} compute units"

def grid_told(p:Problem, arch:Chip|None, work:Work) -> str:
  """How a problem, divided so, fills a chip."""
  if arch is None or (tile := work.tile) is None: return ""
  rows, keys = (f"{100*x:.0f} %" for x in splits.padding(p, tile))
  units = f" on {arch.cus} compute units" if arch.cus else ""
  return f"workgroups: {splits.workgroups(p, tile)*work.splits} x {tile.waves} waves{units}; padding: {rows} of the rows, {keys} of the keys"

def split_slower(p:Problem, arch:Chip) -> str|None:
  if p.num_splits or p.batch_invariant: return None
  tile = choose_tile(replace(p, num_splits=1), arch)
  return f"no split is the fastest: {of_grid(p, arch, tile)}" if splits.split_heuristic(p, arch, tile) == 1 else None

def dual_wave_slower(p:Problem, arch:Chip) -> str|None:
  if arch.llvm < DUAL_WAVE_LLVM: return f"LLVM {arch.llvm} would compile it: clang 21 spills its registers, {DUAL_WAVE_LLVM} does not"
  if p.return_lse and (p.window != (-1, -1) or p.Sk%dual_wave.TRIP_KEYS):
    return f"an lse beside a mask, or a last trip of fewer than {dual_wave.TRIP_KEYS} keys: its registers for two sums of P are spilled, " \
           "those of forward are not"
  rows = dual_wave_tile(p, arch).block_m
  if (blocks := p.B*p.H*ceildiv(p.Sq, rows)) < arch.cus:
    return f"{blocks} blocks of {rows} queries leave compute units idle, of which there are {arch.cus}"
  return "TUNE=1 found a tile of forward that is faster on this device" if tuned.winner(p, arch) is not None else None

STAGGERED_FROM = 65     # head dimension, below which a trip has too little matrix work beside the other half's vector work

def staggered_slower(p:Problem, arch:Chip) -> str|None:
  if max(p.D, p.Dv) < STAGGERED_FROM: return f"D={p.D}, Dv={p.Dv}: forward is predicted to be faster below {STAGGERED_FROM}"
  tile = staggered_tile(p, arch)
  if (p.D % tile.matrix.unit == 0) != (p.Dv % tile.matrix.unit == 0):
    return f"D={p.D}, Dv={p.Dv}: one of them comes in pieces, for whose addresses forward is predicted to be faster"
  rows = tile.block_m
  if (blocks := p.B*p.H*ceildiv(p.Sq, rows)) < arch.cus:
    return f"{blocks} blocks of {rows} queries leave compute units idle, of which there are {arch.cus}"
  return "TUNE=1 found a tile of forward that is faster on this device" if tuned.winner(p, arch) is not None else None

def too_short(p:Problem) -> str|None:
  rows = WgmmaTile(1, MMA[p.dtype].N).block_m
  return f"Sq={p.Sq}: a warpgroup has {rows} queries, forward_mma has smaller tiles" if p.Sq < rows else None

def never(p:Problem, arch:Chip) -> None: return None

# ***** the kernels *****

def forward_of(p:Problem, arch:Chip, tile:AnyTile) -> Callable[..., UOp]:
  """The forward kernel that a tile is for, of all keys or, with p.num_splits, of key ranges."""
  if isinstance(tile, tiled.TiledTile): return tiled.tiled(p, arch, tile)
  if isinstance(tile, MlaTile): return mla.mla(p, arch, tile)
  if isinstance(tile, MlaMmaTile): return mla_mma.mla_mma(p, arch, tile)
  if isinstance(tile, WgmmaTile): return forward_wgmma.forward_wgmma(p, arch, tile)
  return forward_mma.forward_mma(p, arch, tile) if isinstance(tile, MmaTile) else forward.forward(p, arch, tile)

@dataclass(frozen=True)
class Implementation:
  """A kernel as dispatch knows it."""
  can: Callable[[Problem, Any], Work|str]                              # how it divides a problem on a chip, or why it cannot compute it
  slower: Callable[[Problem, Chip], str|None] = never                  # why another is faster where it can, or None
  program: Callable[[Problem, Chip, Any], Callable[..., UOp]]|None = None   # of a tile; None: tensor operations

# best first: the first that can compute a problem, and would not be slower than another, gets it
KERNELS: dict[str, Implementation] = {
  "split_kv": Implementation(can_split_kv, split_slower, forward_of),
  "dual_wave": Implementation(can_dual_wave, dual_wave_slower, dual_wave.dual_wave),
  "staggered": Implementation(can_staggered, staggered_slower, staggered.staggered),
  "forward": Implementation(can_forward, program=forward.forward),
  "forward_wgmma": Implementation(can_forward_wgmma, lambda p, arch: too_short(p), forward_wgmma.forward_wgmma),
  "forward_mma": Implementation(can_forward_mma, program=forward_mma.forward_mma),
  "mla": Implementation(can_mla, program=mla.mla),
  "mla_mma": Implementation(can_mla_mma, program=mla_mma.mla_mma),
  "tiled": Implementation(can_tiled, program=forward_of),
  "three_pass": Implementation(can_three_pass)}

NO_UNIT = f"none of the kernels runs on this device; they know {', '.join(CHIPS)}, and tiled also OpenCL, Metal and a CPU"

def can(name:str, p:Problem, arch:Chip|None) -> Work|str:
  """How the kernel `name` divides `p` on `arch`, or why it cannot compute it there."""
  return NO_UNIT if arch is None and KERNELS[name].program is not None else KERNELS[name].can(p, arch)

def program_of(choice:Choice, p:Problem) -> Callable[..., UOp]:
  """The kernel that was chosen for `p`, a function of the placeholders that `tensors.arguments(p)` names."""
  program = KERNELS[choice.kernel].program
  if program is None or choice.arch is None: raise NotImplementedError(f"{choice.kernel} is no single kernel")
  return program(p, choice.arch, choice.work.tile)

def combine_of(choice:Choice, p:Problem) -> Callable[..., UOp]:
  """The kernel that merges the key ranges of `p`, in the operations of the one that was chosen."""
  assert choice.arch is not None
  merge = combine(p, choice.arch, p.num_splits)
  return (lambda *args: plain(merge(*args))) if choice.kernel == "tiled" else merge

def memory_of_forward(name:str, p:Problem, work:Work) -> int:
  """Bytes beside inputs and outputs, at least: the parts of split keys, or the score matrix."""
  if name == "three_pass": return 4*p.H*(p.total_q*p.total_k if p.varlen else p.B*p.Sq*p.Sk)
  return 4*p.rows*(p.Dv + 1)*work.splits if work.splits > 1 else 0

def single_kernel(p:Problem, arch:Chip) -> tuple[Callable[..., UOp], AnyTile]:
  """The one kernel that computes `p` whole, as a function of its placeholders, and its tile. NotImplementedError where it takes more than one."""
  choice = choose(p := replace(p, num_splits=1), arch)
  if choice.work.tile is None:
    raise NotImplementedError(f"no single kernel takes this problem: {'; '.join(f'{name}: {reason}' for name, reason in choice.refused)}")
  return program_of(choice, p), choice.work.tile

def asked_for() -> Forced:
  """What ATTN_KERNEL asks for."""
  return forced(tuple(KERNELS))

def choose(p:Problem, arch:Chip|None) -> Choice:
  """The first kernel that takes `p` on `arch` (None: a chip without a matrix unit), or the one that ATTN_KERNEL names, even where another is faster.

  Raises NotImplementedError, with every reason, when none can or that one can't, and ValueError for an ATTN_KERNEL that does not exist."""
  return _choose(p, arch, asked_for().forward)

LONG_SEQUENCE = 256     # queries

def one_of_any_batch(p:Problem) -> Problem:
  """What a batch-invariant problem is taken for where its kernel is chosen: one sequence, of packed ones a long one."""
  if not p.batch_invariant: return p
  if not p.varlen: return replace(p, B=1)
  return replace(p, B=1, Sq=LONG_SEQUENCE, offset=p.offset + p.Sq - LONG_SEQUENCE if not p.top_left else 0)

@cache_of_kernels
def _choose(p:Problem, arch:Chip|None, wanted:str) -> Choice:
  refused, p = [], one_of_any_batch(p)
  for name, kernel in KERNELS.items():
    work, slower = can(name, p, arch), None
    if isinstance(work, str): refused.append((name, work))
    elif wanted and name != wanted: refused.append((name, f"ATTN_KERNEL={wanted} forces another"))
    elif not wanted and arch is not None and (slower := kernel.slower(p, arch)) is not None: refused.append((name, slower))
    else:
      memory = tuple((x, memory_of_forward(x, p, work)) for x in dict.fromkeys((name, "three_pass")))
      return Choice(name, work, arch, tuple(refused), memory, grid_told(p, arch, work))
  if wanted: raise NotImplementedError(f"ATTN_KERNEL={wanted}: {dict(refused)[wanted]}")
  raise NotImplementedError(f"no kernel takes this problem: {'; '.join(f'{name}: {reason}' for name, reason in refused)}")
