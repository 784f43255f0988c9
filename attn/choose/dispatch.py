"""Choice of the kernel for a problem on a chip (`choose`). The table KERNELS has a row for each forward kernel: whether the kernel can compute a
problem, and whether another kernel is faster."""
from __future__ import annotations
import math
from dataclasses import dataclass, replace
from typing import Any, Callable
from attn.cache import tuned
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.choose import splits
from attn.choose.forced import Forced, forced
from attn.choose.mla_tiles import (latent_refuses, latent_wgmma_refuses, latent_wgmma_slower, mla_mma_tile, mla_tile,
                                   mla_wgmma_tile)
from attn.choose.preparation import (TURN, WIDEN, Preparation, turned_refuses, turned_slower, turned_tile, widened_refuses, widened_slower,
                                     widened_tile)
from attn.choose.refusals import (ABLE_WITH_8_BITS, NO_UNIT, Refusal, amd_refuses, bits_refused, lacks_nothing, mma_refuses, most_telling,
                                  no_latent_tiles, no_mma, no_tiles, no_wgmma, too_many_parts, unconverted, wgmma_refuses)
from attn.choose.splits import AnyTile
from attn.choose.tiled_tiles import tiled_tile
from attn.choose.tiles import choose_amd_tile, dual_wave_tile, mma_tile, staggered_tile, wgmma_tile
from attn.kernels import dual_wave, staggered
from attn.kernels.amd.forward import AmdForward
from attn.kernels.amd.latent import AmdLatent
from attn.kernels.combine import combine
from attn.kernels.forward import forward
from attn.kernels.mma.forward import MmaForward
from attn.kernels.mma.latent import MmaLatent
from attn.kernels.parts.grid.tensors import check_range
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.plain.forward import PlainForward
from attn.kernels.plain.rectangle import beyond_registers, for_rectangles
from attn.kernels.tiles.common import blocks_of_queries
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.kernels.wgmma.forward import WgmmaForward
from attn.kernels.wgmma.latent import WgmmaLatent
from attn.ops.plain import plain
from attn.problem import INVARIANT_KEYS, Problem
from attn.score.masks import hiding, options_of_masks
from attn.tinygrad_compat import UOp
from attn.values import cache_of_kernels

DUAL_WAVE_LLVM = 22    # first release of LLVM that spills no register of dual_wave
STAGGERED_UP_TO = 128  # largest head dimension: three tiles of K and of V fill LDS

@dataclass(frozen=True)
class Work:
  """How a kernel divides a problem: its tile description (None for tensor operations) and its number of key ranges (KV splits)."""
  tile: AnyTile|None
  splits: int = 1

@dataclass(frozen=True)
class Choice:
  """The kernel that attn chose for a problem, how it divides the problem, and the reason why attn did not choose each kernel above it in the table
  KERNELS."""
  kernel: str
  work: Work
  arch: Chip|None
  refused: tuple[tuple[str, str], ...]    # (kernel, reason)
  memory: tuple[tuple[str, int], ...] = ()    # (kernel, bytes besides inputs and outputs) for the chosen kernel and for three_pass
  grid: str = ""                              # how the kernel's workgroups fill the chip, in words
  def why_not(self, kernel:str) -> str|None:
    """Returns why attn did not choose the kernel named `kernel`; None if no reason is recorded."""
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

# ***** problems that a kernel cannot compute, on a chip that has the kernel's unit *****

def plain_only(p:Problem, *supported:str) -> str|None:
  """Returns why a kernel for 16-bit inputs that supports no option but those in `supported` cannot compute `p`; None if it can."""
  if p.of_8_bits: return f"q, k and v are {p.dtype}: this kernel multiplies only {' and '.join(MMA)}"
  options = [x for x in (*p.options, *["num_splits"]*(p.num_splits > 1)) if x not in supported]
  return f"{options[0]}: this kernel does not support it" if options else None

def dual_wave_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := amd_refuses(p, arch)) is not None: return reason
  if not arch.unit.loads_to_lds: return f"{arch.name} has no direct loads to LDS of 16 bytes and no transposing ones from it; gfx950 has"
  if (p.D, p.Dv) != (dual_wave.HEAD, dual_wave.HEAD): return f"D={p.D}, Dv={p.Dv}: this kernel supports only D = Dv = {dual_wave.HEAD}"
  if masks := hiding(p).before: return f"{options_of_masks(p, masks)}: this kernel supports no mask that hides the first keys of a query"
  return plain_only(p)

def staggered_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := amd_refuses(p, arch)) is not None: return reason
  if not arch.unit.agprs: return f"{arch.name}: its matrix unit does not run beside the vector unit; those of gfx90a, gfx942 and gfx950 do"
  if max(p.D, p.Dv) > STAGGERED_UP_TO: return f"D={p.D}, Dv={p.Dv}: this kernel supports at most {STAGGERED_UP_TO}"
  return plain_only(p, *(() if p.dealt is None else ("dealt", "k_view")))     # these change only where rows lie

def tiled_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := bits_refused(p, arch, False)) is not None: return reason
  if (reason := unconverted(p, arch) or beyond_registers(p)) is not None: return reason
  return "batch_invariant=True: the tiles of this kernel depend on the size of the batch" if p.batch_invariant else None

def tensors_refuse(p:Problem, arch:Chip|None) -> str|None:
  if p.of_8_bits: return f"q, k and v are {p.dtype}: tensor operations would convert them to float32; {ABLE_WITH_8_BITS}"
  return f"stored={p.stored!r}: tensor operations would hold all keys and values in memory once more, converted" if p.stored else None

def never(p:Problem, arch:Chip) -> None: return None

# ***** the division of a problem by a kernel, or the reason why the kernel cannot compute it *****

TileOf = Callable[[Problem, Chip], Any]     # returns a kernel's tile for a problem, or raises NotImplementedError if none fits

def whole(p:Problem, arch:Chip, tile_of:TileOf) -> Work|str:
  """Returns how a kernel divides the problem (`Work`) without splitting the keys, or the reason why it cannot; `tile_of` chooses its tiles."""
  try: check_range(p, tile := tile_of(p, arch))
  except NotImplementedError as e: return str(e)
  if (asked := min(p.num_splits, splits.key_tiles(p, tile))) > 1: return f"num_splits={p.num_splits} asks for {asked} key ranges"
  return Work(tile)

def into_ranges(p:Problem, arch:Chip, tile_of:TileOf) -> Work|str:
  """Returns how a kernel divides the problem (`Work`) with the keys split into at least two ranges, or the reason why it does not."""
  if p.num_splits == 1: return "num_splits=1 asks for no split"
  if isinstance(work := whole(replace(p, num_splits=1), arch, tile_of), str): return work
  assert work.tile is not None
  # Results must not depend on the batch, so there is one range for every INVARIANT_KEYS keys. Otherwise num_splits is the number of ranges; for
  # num_splits=0 an occupancy model chooses it (`split_heuristic`).
  if p.batch_invariant:
    tile = tile_of(replace(p, num_splits=2), arch)
    if (number := splits.resolve(p, arch, tile).num_splits) > 1: return Work(tile, number)
    return f"batch_invariant=True: room for one range of {INVARIANT_KEYS} keys only, or more queries than a tile has"
  if (tiles := splits.key_tiles(p, work.tile)) < 2: return f"no split is possible: {of_grid(p, arch, work.tile)}"
  number = min(max(2, splits.resolve(p, arch, work.tile).num_splits), tiles)
  return Work(tile_of(replace(p, num_splits=number), arch), number)

def over_threads(p:Problem, arch:Chip, tile_of:TileOf) -> Work|str:
  """Returns how `tiled`, the kernel without matrix instructions, divides the problem (`Work`), or the reason why `tiled` cannot compute the
  problem."""
  try: check_range(p, tile := tile_of(p, arch))
  except NotImplementedError as e: return str(e)
  if arch.serial and (reason := too_many_parts(p, arch, math.prod(blocks_of_queries(p, tile)), p.all_heads)) is not None: return reason
  if tile.alone: return Work(tile) if p.num_splits <= 1 else f"num_splits={p.num_splits}: not supported where a workgroup is one thread"
  return Work(tile, splits.resolve(replace(p, num_splits=p.num_splits or int(not arch.cus)), arch, tile).num_splits)

def by_tensors(p:Problem, arch:Chip, tile_of:TileOf) -> Work|str:
  """Returns the `Work` (how a problem is divided) of attention in plain tensor operations, or the reason why tensor operations cannot compute the
  problem."""
  if p.num_splits > 1: return f"num_splits={p.num_splits}: three_pass supports no key ranges"
  return Work(None)

# ***** reasons why another kernel is faster than one that can compute a problem *****

def of_grid(p:Problem, arch:Chip, tile:AnyTile) -> str:
  return f"{splits.workgroups(p, tile)} workgroups, {splits.key_tiles(p, tile)} key tiles, {arch.cus} compute units"

def grid_told(p:Problem, arch:Chip|None, work:Work) -> str:
  """Returns a sentence for `attn.explain`: how many workgroups and waves the kernel has, and which percentage of its rows is padding."""
  if arch is None or (tile := work.tile) is None: return ""
  rows, keys = (f"{100*x:.0f} %" for x in splits.padding(p, tile))
  units = f" on {arch.cus} compute units" if arch.cus else ""
  return f"workgroups: {splits.workgroups(p, tile)*work.splits} x {tile.waves} waves{units}; padding: {rows} of the rows, {keys} of the keys"

def split_slower(p:Problem, arch:Chip) -> str|None:
  if p.num_splits or p.batch_invariant: return None
  tile = choose_tile(replace(p, num_splits=1), arch)
  return f"no split is the fastest: {of_grid(p, arch, tile)}" if splits.split_heuristic(p, arch, tile) == 1 else None

def dual_wave_slower(p:Problem, arch:Chip) -> str|None:
  if arch.llvm < DUAL_WAVE_LLVM: return f"compiled by LLVM {arch.llvm}, this kernel would spill registers; it needs LLVM {DUAL_WAVE_LLVM} or later"
  if p.return_lse and (any(hiding(p)) or p.Sk%dual_wave.TRIP_KEYS):
    return f"an lse, and a mask or a number of keys that is no multiple of {dual_wave.TRIP_KEYS}: this kernel would spill registers, " \
           "forward does not"
  rows = dual_wave_tile(p, arch).block_m
  if (blocks := p.B*p.H*ceildiv(p.Sq, rows)) < arch.cus:
    return f"{blocks} blocks of {rows} queries leave some of the {arch.cus} compute units idle"
  return "TUNE=1 found a tile of forward that is faster on this device" if tuned.winner(p, arch) else None

STAGGERED_FROM = 65     # least head dimension: below it an iteration has too little matrix work beside the vector work of the other half of the waves

def staggered_slower(p:Problem, arch:Chip) -> str|None:
  if max(p.D, p.Dv) < STAGGERED_FROM: return f"D={p.D}, Dv={p.Dv}: forward is predicted to be faster below {STAGGERED_FROM}"
  tile = staggered_tile(p, arch)
  if (p.D % tile.matrix.unit == 0) != (p.Dv % tile.matrix.unit == 0):
    return f"D={p.D}, Dv={p.Dv}: only one of them is a multiple of {tile.matrix.unit}, for which forward is predicted to be faster"
  rows = tile.block_m
  if (blocks := p.B*p.H*ceildiv(p.Sq, rows)) < arch.cus:
    return f"{blocks} blocks of {rows} queries leave some of the {arch.cus} compute units idle"
  if 2*p.Sq <= rows: return f"Sq={p.Sq}: half of the {rows} rows of a block would be padding; forward has smaller blocks"
  return "TUNE=1 found a tile of forward that is faster on this device" if tuned.winner(p, arch) else None

def mma_slower(p:Problem, arch:Chip) -> str|None:
  if not (p.of_8_bits and arch.wgmma) or wgmma_slower(p, arch) is not None: return None
  return f"q, k and v are {p.dtype}: mma.sync multiplies them no faster than wgmma multiplies 16 bits; convert them to bfloat16"

def wgmma_slower(p:Problem, arch:Chip) -> str|None:
  rows = WgmmaTile(1, MMA["float16"].N).block_m
  return f"Sq={p.Sq}: a warpgroup has {rows} queries; forward_mma, with smaller tiles, is faster" if p.Sq < rows else None

# ***** the kernels *****

@dataclass(frozen=True)
class ForwardKernel:
  """A forward kernel, and the functions that say whether and how it computes a problem: a row of the table KERNELS."""
  refuses: Callable[[Problem, Chip], str|None]                              # why it cannot compute a problem on a chip that has its unit, or None
  tile: TileOf
  program: Callable[[Problem, Chip, Any], Callable[..., UOp]]|None          # makes the kernel of a tile; None: tensor operations
  lacks: Callable[[Chip], str|None] = lacks_nothing                     # why a chip lacks its unit, or None
  slower: Callable[[Problem, Chip], str|None] = never                       # why another kernel is faster where this one can, or None
  divide: Callable[[Problem, Chip, TileOf], Work|str] = whole               # divides a problem that the kernel does not refuse
  ranges: bool = False      # whether split_kv may give it ranges of the keys
  before: Preparation|None = None     # the kernel that runs before it, and writes buffers that it reads in place of its inputs
  general: bool = False     # whether it takes every problem that its unit can compute: then its reason says more than those of other kernels
  def can(self, p:Problem, arch:Any) -> Work|str:
    """Returns how the kernel divides a problem on a chip (`Work`), or the reason why the kernel cannot compute the problem."""
    return self.lacks(arch) or self.refuses(p, arch) or self.divide(p, arch, self.tile)

def choose_tile(p:Problem, arch:Chip) -> AnyTile:
  """Returns the tile description of the chip's best forward kernel for `p`, or raises NotImplementedError if there is none."""
  refusals = []
  for kernel in KERNELS.values():
    if not kernel.ranges: continue
    lacking = kernel.lacks(arch)
    if (reason := lacking or kernel.refuses(p, arch) or kernel.slower(p, arch)) is None: return kernel.tile(p, arch)
    refusals.append(Refusal(lacking is None, kernel.general, reason))
  raise NotImplementedError(most_telling(refusals))

def forward_of(p:Problem, arch:Chip, tile:AnyTile) -> Callable[..., UOp]:
  """Returns the function that builds the forward kernel with the tile description `tile`."""
  program = KERNELS[tile.kernel].program
  assert program is not None
  return program(p, arch, tile)

WIDENING, TURNING = "widened_wgmma", "turned_wgmma"     # kernels before which another one converts k and v to 16 bits, or transposes V

def prepared(before:Preparation) -> Callable[[Problem, Chip, Any], Callable[..., UOp]]:
  """Returns a function that builds the wgmma forward kernel; the kernel reads buffers that an earlier kernel, `before`, has written, in place of k or
  v."""
  return lambda p, arch, tile: forward(WgmmaForward.of)(before.problem(p, tile), arch, tile)

# best first: a problem gets the first kernel that can compute it and that would not be slower than another
KERNELS: dict[str, ForwardKernel] = {
  "split_kv": ForwardKernel(never, choose_tile, forward_of, slower=split_slower, divide=into_ranges),
  "dual_wave": ForwardKernel(dual_wave_refuses, dual_wave_tile, dual_wave.dual_wave, no_tiles, dual_wave_slower),
  "staggered": ForwardKernel(staggered_refuses, staggered_tile, staggered.staggered, no_tiles, staggered_slower),
  "forward": ForwardKernel(amd_refuses, choose_amd_tile, forward(AmdForward.of), no_tiles, ranges=True, general=True),
  WIDENING: ForwardKernel(widened_refuses, widened_tile, prepared(WIDEN), no_wgmma, widened_slower, before=WIDEN),
  TURNING: ForwardKernel(turned_refuses, turned_tile, prepared(TURN), no_wgmma, turned_slower, before=TURN),
  "forward_wgmma": ForwardKernel(wgmma_refuses, wgmma_tile, forward(WgmmaForward.of), no_wgmma, wgmma_slower, ranges=True),
  "forward_mma": ForwardKernel(mma_refuses, mma_tile, forward(MmaForward.of), no_mma, mma_slower, ranges=True, general=True),
  "mla": ForwardKernel(latent_refuses, mla_tile, forward(AmdLatent.of), no_latent_tiles, ranges=True),
  "mla_wgmma": ForwardKernel(latent_wgmma_refuses, mla_wgmma_tile, forward(WgmmaLatent.of), no_wgmma, latent_wgmma_slower, ranges=True),
  "mla_mma": ForwardKernel(latent_refuses, mla_mma_tile, forward(MmaLatent.of), no_mma, ranges=True),
  "tiled": ForwardKernel(tiled_refuses, tiled_tile, for_rectangles(forward(PlainForward.of)), divide=over_threads),
  "three_pass": ForwardKernel(tensors_refuse, never, None, divide=by_tensors)}

def can(name:str, p:Problem, arch:Chip|None) -> Work|str:
  """Returns how the kernel `name` divides `p` on `arch` (`Work`), or the reason why the kernel cannot compute `p` there."""
  return NO_UNIT if arch is None and KERNELS[name].program is not None else KERNELS[name].can(p, arch)

def read_by(p:Problem, choice:Choice) -> Problem:
  """Returns the problem that the chosen kernel computes: `p`, or `p` with k or v as an earlier kernel has converted or transposed them."""
  return p if (before := KERNELS[choice.kernel].before) is None else before.problem(p, choice.work.tile)

@cache_of_kernels
def program_of(choice:Choice, p:Problem) -> Callable[..., UOp]:
  """Returns the function that builds the kernel chosen for `p`, or raises NotImplementedError if tensor operations are chosen instead."""
  # The kernel is a function of placeholders, in the order of `tensors.arguments(p)`. Equal arguments return the identical function.
  program = KERNELS[choice.kernel].program
  if program is None or choice.arch is None:
    raise NotImplementedError(f"{choice.kernel} is no single kernel: use attn.attention, which runs it as tensor operations")
  return program(p, choice.arch, choice.work.tile)

def combine_of(choice:Choice, p:Problem) -> Callable[..., UOp]:
  """Returns the function that builds the kernel that merges the results of the key ranges (KV splits) of `p`."""
  assert choice.arch is not None
  merge = combine(p, choice.arch, p.num_splits)
  # It is made of plain UOps if the forward kernel is.
  return (lambda *args: plain(merge(*args))) if choice.kernel == "tiled" else merge

def memory_of_forward(name:str, p:Problem, work:Work) -> int:
  """Returns the bytes of memory that the forward kernel `name` needs besides inputs and outputs."""
  # `three_pass` needs the score matrix, WIDENING the rows converted from 8 to 16 bits, and key ranges need their partial results.
  if name == "three_pass": return 4*p.H*(p.total_q*p.total_k if p.varlen else p.B*p.Sq*p.Sk)
  if (before := KERNELS[name].before) is not None: return before.size(p, work.tile)
  return 4*p.rows*(p.Dv + 1)*work.splits if work.splits > 1 else 0

def single_kernel(p:Problem, arch:Chip) -> tuple[Callable[..., UOp], AnyTile]:
  """Returns the function that builds the kernel that computes `p` without dividing the keys, and the kernel's tile description."""
  # Raises NotImplementedError if tensor operations would compute `p`.
  choice = _choose(p := replace(p, num_splits=1), arch, asked_for().forward, alone=True)
  if choice.work.tile is None:
    raise NotImplementedError(f"no single kernel takes this problem: {'; '.join(f'{name}: {reason}' for name, reason in choice.refused)}")
  return program_of(choice, p), choice.work.tile

def asked_for() -> Forced:
  """Returns the names of the kernels that the environment variable ATTN_KERNEL demands."""
  return forced(tuple(KERNELS))

def choose(p:Problem, arch:Chip|None) -> Choice:
  """Chooses the kernel for `p` on `arch`: the one that ATTN_KERNEL names, otherwise the first in the table KERNELS that can compute `p` and is not
  slower than another."""
  # `arch` is None for a device on which none of attn's kernels runs. Raises NotImplementedError, with every reason, if no kernel can compute `p` or
  # if the named kernel cannot, and ValueError if ATTN_KERNEL is not the name of a kernel.
  return _choose(p, arch, asked_for().forward)

LONG_SEQUENCE = 256     # queries of a sequence that counts as long

def one_of_any_batch(p:Problem) -> Problem:
  """Returns the problem for which a kernel is chosen: `p` itself, or with batch_invariant=True the same problem with one sequence."""
  # Results must not depend on the batch, so all batches must get the same kernel.
  if not p.batch_invariant: return p
  if not p.varlen: return replace(p, B=1)
  return replace(p, B=1, Sq=LONG_SEQUENCE, offset=p.offset + p.Sq - LONG_SEQUENCE if not p.top_left else 0)

@cache_of_kernels
def _choose(p:Problem, arch:Chip|None, wanted:str, alone:bool=False) -> Choice:
  refused, p = [], one_of_any_batch(p)
  for name, kernel in KERNELS.items():
    work, slower = can(name, p, arch), None
    if isinstance(work, str): refused.append((name, work))
    elif alone and kernel.before is not None: refused.append((name, "another kernel must run before it"))
    elif wanted and name != wanted: refused.append((name, f"ATTN_KERNEL={wanted} asks for another kernel"))
    elif not wanted and arch is not None and (slower := kernel.slower(p, arch)) is not None: refused.append((name, slower))
    else:
      memory = tuple((x, memory_of_forward(x, p, work)) for x in dict.fromkeys((name, "three_pass")))
      return Choice(name, work, arch, tuple(refused), memory, grid_told(p, arch, work))
  if wanted: raise NotImplementedError(f"ATTN_KERNEL={wanted}: {dict(refused)[wanted]}")
  raise NotImplementedError(f"no kernel takes this problem: {'; '.join(f'{name}: {reason}' for name, reason in refused)}")
