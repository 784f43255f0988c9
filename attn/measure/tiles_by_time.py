"""Times a kernel with every possible tile description (here called tile), and stores the fastest in the user's cache directory, where attn looks for
it. bench.py does this with TUNE=1. The caller passes the function that times a kernel with a tile, so tests need no GPU."""
from __future__ import annotations
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from attn.cache import tuned
from attn.calls.gradient import BackwardLaunch
from attn.chips import Chip
from attn.chips.shapes import BackwardShape, ForwardShape, UpTo
from attn.choose.backward import can_differentiate, dkdv_of, dq_of
from attn.choose.backward_tiles import backward_tile
from attn.choose.dispatch import KERNELS, choose
from attn.choose.rows import misfit
from attn.choose.tiles import amd_tile
from attn.compilers import clang
from attn.compilers.found import NoCompiler
from attn.extras import needs
from attn.kernels.parts.grid.tensors import dkdv_arguments, dq_arguments
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.kernels.tiles.plain import TiledBackwardTile, TiledTile
from attn.ops.renderers import render
from attn.problem import Problem, Shapes
from attn.search.plain import tiled_backward_space, tiled_space
from attn.tinygrad_compat import CompileError, UOp
from attn.values import FLOATS
with needs("bench", "bench.py", __name__): from tqdm import tqdm

# ***** machine code *****

def assembly_of(kernel:Callable[..., UOp], shapes:Shapes, arch:Chip) -> str:
  """Compiles a kernel for tensors of these shapes and returns the assembly text; raises NoCompiler if no compiler is installed."""
  tensors = [UOp.placeholder(shape, FLOATS[dtype], slot) for slot, (shape, dtype) in enumerate(shapes.values())]
  return clang.assembly(render(kernel(*tensors), arch.name), arch.name)

def spills(kernel:Callable[..., UOp], shapes:Shapes, arch:Chip) -> bool:
  """Returns whether the kernel spills registers to memory; False if no compiler is installed."""
  from attn.isa import report
  try: clang.toolchain()
  except NoCompiler: return False
  r = report.analyse(assembly_of(kernel, shapes, arch), arch.name).resources
  return bool(r.vgpr_spills or r.sgpr_spills or r.scratch)

# ***** forward *****

Seconds = Callable[[Callable[..., UOp], Tile|TiledTile], float]   # times a kernel with its tile, in seconds

def time_forward(p:Problem, arch:Chip, seconds:Seconds) -> list[dict[str, Any]]:
  """Times the forward kernel with its default tile and with all other tiles that don't spill, and stores the fastest; returns rows for printing."""
  # Raises NotImplementedError if dispatch chooses a kernel whose tiles cannot be timed.
  from attn.search.forward import candidates
  arch = replace(arch, tuned=False)
  own = choose(replace(p, num_splits=1), arch)
  if isinstance(own.work.tile, TiledTile): return time_tiled(p, arch, own.work.tile, seconds)
  if not isinstance(own.work.tile, Tile):
    raise NotImplementedError(f"TUNE=1 times only tiles of the kernels forward and tiled; this problem gets {own.kernel}: {own.why_not('forward')}")
  todo: dict[tuple[str, Tile], UpTo[ForwardShape]|None] = {(own.kernel, own.work.tile): None}
  for row in candidates(arch, tuned.head_class(p)):
    if misfit(p, arch, row, tile := amd_tile(p, arch, row)) is None: todo.setdefault(("forward", tile), row)
  timed: list[tuple[float, str, Tile, UpTo[ForwardShape]|None]] = []
  for (kernel, tile), found in tqdm(todo.items(), unit="tile"):
    make = KERNELS[kernel].program
    assert make is not None
    program = make(p, arch, tile)
    if found is None or not spills(program, p.shapes, arch): timed.append((seconds(program, tile), kernel, tile, found))
  timed.sort(key=lambda x: x[0])
  tuned.store(p, arch, timed[0][3], timed[0][0])
  return [{"kernel": kernel, "tile": str(tile), "options": tile.options, "ms": 1e3*x, "TFLOP/s": p.flops/x/1e12,
           "chosen by": "the table" if found is None else ""} for x, kernel, tile, found in timed]

def time_tiled(p:Problem, arch:Chip, own:TiledTile, seconds:Seconds) -> list[dict[str, Any]]:
  """Times `tiled`, the kernel without matrix instructions, with its default tile `own` and with all other tiles; stores the fastest; returns rows for
  printing."""
  # Tiles that spill are timed too, because the compilers of this kernel don't report spills.
  make = KERNELS["tiled"].program
  assert make is not None
  return time_plain(p, arch, "tiled", own, tiled_space(p, arch), lambda tile: seconds(make(p, arch, tile), tile), p.flops)

PlainTile = TypeVar("PlainTile", TiledTile, TiledBackwardTile)

def time_plain(p:Problem, arch:Chip, kernel:str, own:PlainTile, space:Sequence[PlainTile], seconds:Callable[[PlainTile], float],
               flops:int) -> list[dict[str, Any]]:
  """Times a kernel without matrix instructions with its default tile `own` and with the tiles `space`, and stores the fastest; returns rows for
  printing."""
  timed = [(seconds(own), own)]
  for tile in tqdm([x for x in space if x != own], unit="tile"):
    try: timed.append((seconds(tile), tile))
    # A tile is left out if its kernel does not compile or does not run.
    except (RuntimeError, CompileError) as e: tqdm.write(f"{kernel}, tile {tile}: {e}", file=sys.stderr)
  timed.sort(key=lambda x: x[0])
  fastest, best = timed[0]
  tuned.store(p, arch, UpTo(tuned.head_class(p), best) if best != own else None, fastest, kernel)
  return [{"kernel": kernel, "tile": str(tile), "depth": tile.depth, "values": tile.values, "columns": tile.columns, "options": tile.options,
           "ms": 1e3*x, "TFLOP/s": flops/x/1e12, "chosen by": "the table" if tile == own else ""} for x, tile in timed]

# ***** backward *****

TimedBackwardTile = BackwardTile|TiledBackwardTile
BackwardSeconds = Callable[[str, TimedBackwardTile], float]     # times a backward kernel, "dq" or "dkdv", with a tile, in seconds

def backward_launch(p:Problem, arch:Chip, name:str, tile:TimedBackwardTile) -> BackwardLaunch:
  p = replace(p, return_lse=True)
  if name == "dq": return BackwardLaunch(dq_of(p, arch, tile), dq_arguments(p), ("dq", "delta"))
  return BackwardLaunch(dkdv_of(p, arch, tile), dkdv_arguments(p), ("dk", "dv"))

def backward_tiles_to_tune(p:Problem, arch:Chip) -> tuple[TimedBackwardTile, TimedBackwardTile]:
  """Returns the default tiles of the backward kernels dq and dkdv for a problem; raises NotImplementedError if their tiles cannot be timed here."""
  if isinstance(tiles := can_differentiate(p, replace(arch, tuned=False)), str):
    raise NotImplementedError(f"TUNE=1 with BWD=1: no backward kernel takes this problem: {tiles}")
  dq, dkdv = tiles
  if isinstance(dq, TimedBackwardTile) and isinstance(dkdv, TimedBackwardTile): return dq, dkdv
  # Only AMD's kernels and those of plain UOps can be timed here.
  raise NotImplementedError(f"TUNE=1 with BWD=1 on {arch.name}: it is for AMD's kernels and those of plain UOps (float32, D above 256); the "
                            "tiles of NVIDIA's matrix units were measured")

def time_backward(p:Problem, arch:Chip, name:str, seconds:BackwardSeconds) -> list[dict[str, Any]]:
  """Times a backward kernel with its default tile and with all other tiles that don't spill, and stores the fastest; returns rows for printing."""
  from attn.search.backward import backward_candidates
  arch, keys = replace(arch, tuned=False), name == "dkdv"
  own, flops = backward_tiles_to_tune(p, arch)[keys], (4 if keys else 3)*p.flops//2
  if isinstance(own, TiledBackwardTile):
    space = tiled_backward_space(p, arch, keys)
    return time_plain(p, arch, f"backward_{name}_tiled", own, space, lambda tile: seconds(name, tile), flops)
  todo: dict[BackwardTile, UpTo[BackwardShape]|None] = {own: None}
  for row in backward_candidates(arch, tuned.head_class(p), keys):
    if misfit(p, arch, row, tile := backward_tile(p, arch, row, keys)) is None: todo.setdefault(tile, row)
  timed = []
  for tile, found in tqdm(todo.items(), unit="tile"):
    launch = backward_launch(p, arch, name, tile)
    if found is None or not spills(launch.kernel, launch.shapes, arch): timed.append((seconds(name, tile), tile, found))
  timed.sort(key=lambda x: x[0])
  tuned.store(p, arch, timed[0][2], timed[0][0], f"backward_{name}")
  return [{"kernel": f"backward_{name}", "tile": str(tile), "options": tile.options, "ms": 1e3*x, "TFLOP/s": flops/x/1e12,
           "chosen by": "the table" if found is None else ""} for x, tile, found in timed]
