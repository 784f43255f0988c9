"""Choice of tile descriptions for the kernels of plain UOps, which use no matrix instructions: the first row of a table whose tiles fit into the
chip's local memory."""
from __future__ import annotations
from dataclasses import replace
from attn.cache import tuned
from attn.chips import Chip
from attn.chips.shapes import UpTo
from attn.choose.rows import fitting, in_units
from attn.kernels.plain.rectangle import MAX_WIDTH
from attn.kernels.tiles.plain import QUAD, TiledBackwardTile, TiledTile
from attn.problem import Problem

# The table rows for NVIDIA were measured on an H200, the rows for workgroups of one thread on a CPU (docs/plain.md).

STEPS_AT_ONCE = 4     # steps of a product that are computed together: on an H200 D=128 takes 3.55 ms so, and 3.92 ms one by one
MANY_BLOCKS = 600     # workgroups that fill an H100 at least twice, two to a multiprocessor

def copied_by(down:int, across:int, walked:int, own:int, depth:int, values:int, steps:int) -> TiledTile:
  """Makes the tile description of a forward kernel with asynchronous copies and `down` x `across` threads; a thread has `walked` keys and `own`
  queries at a time."""
  # The threads of a workgroup form a rectangle of `down` rows and `across` columns. A thread computes the scores of `walked` keys with `own` queries
  # at a time. Local memory holds `depth` columns of a tile of K, and `values` rows of V, at a time. One iteration adds `steps` outer products to a
  # matrix product.
  return TiledTile(down, across, walked, own, depth, values, asynchronous=True, steps_at_once=steps)

# the first row that fits is taken
TILED = (
  UpTo(64, copied_by(8, 16, 8, 8, 64, 64, 8), fills=MANY_BLOCKS),
  UpTo(64, copied_by(16, 8, 8, 8, 32, 32, 8)),
  UpTo(128, copied_by(16, 8, 8, 8, 16, 8, 16), fills=MANY_BLOCKS, at_once=2),     # a workgroup of 4 warps does not fill a multiprocessor alone
  UpTo(128, copied_by(16, 8, 8, 8, 16, 16, 8), at_once=2),
  UpTo(256, copied_by(16, 16, 8, 4, 32, 32, 16), large=True),
  UpTo(64, TiledTile(8, 16, 8, 8, 64, 64, ahead=True, steps_at_once=STEPS_AT_ONCE), large=True),
  UpTo(64, TiledTile(16, 16, 4, 4, 64, 64)),
  UpTo(128, TiledTile(16, 16, 8, 8, 32, 32, ahead=True, steps_at_once=STEPS_AT_ONCE), large=True),
  UpTo(128, TiledTile(16, 16, 8, 4, 64, 32)),
  UpTo(128, TiledTile(32, 16, 4, 4, 32, 16, ahead=True)),
  UpTo(256, TiledTile(16, 16, 8, 4, 32, 32, ahead=True, steps_at_once=STEPS_AT_ONCE)),
  UpTo(MAX_WIDTH, copied_by(32, 8, 4, 4, 32, 16, 16)),
  UpTo(MAX_WIDTH, TiledTile(32, 8, 8, 4, 32, 16, ahead=True, steps_at_once=STEPS_AT_ONCE)),
  UpTo(MAX_WIDTH, TiledTile(32, 16, 8, 4, 16, 16, keeps_own=False, ahead=True)),
  UpTo(128, TiledTile(16, 16, 4, 4, 32, 32, keeps_own=False)),
  UpTo(MAX_WIDTH, TiledTile(16, 16, 4, 4, 16, 16, keeps_own=False)),
  UpTo(256, TiledTile(16, 16, 4, 4, 16, 8, keeps_own=False)),
  UpTo(MAX_WIDTH, TiledTile(16, 8, 4, 4, 16, 8, keeps_own=False)))

ALONE = TiledTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # for workgroups of one thread

def copies_asynchronously(p:Problem, arch:Chip) -> bool:
  """Returns whether a kernel without matrix instructions can bring K and V to local memory by asynchronous copies, as only NVIDIA's chips can."""
  # A copy moves 16 bytes and converts nothing, so all rows must be whole units of 16 bytes.
  views = [view for view in (p.k_view, p.v_view) if view is not None]
  return bool(arch.unit.mma) and p.dtype == "float32" and not p.stored and in_units(p, QUAD) and all(view.whole(QUAD) for view in views)

def tiled_tile(p:Problem, arch:Chip) -> TiledTile:
  """Chooses the tile description of `tiled`, the forward kernel without matrix instructions."""
  # A tile found by a search (TUNE=1) comes first; the first row that fits is taken.
  rows = (*tuned.kept_rows(p, arch, "tiled", TiledTile, tuned.check_threads), *(TILED if arch.lds else [UpTo(MAX_WIDTH, ALONE)]))
  able = copies_asynchronously(p, arch)
  return next(fitting("tiled", p, arch, [row for row in rows if able or not row.shape.asynchronous], lambda row: row.shape))

# ***** backward *****

def tile_of_sums(down:int, across:int, walked:int, own:int, depth:int, values:int, keeps_own:bool=True) -> TiledBackwardTile:
  return TiledBackwardTile(down, across, walked, own, depth, values, keeps_own, steps_at_once=STEPS_AT_ONCE if keeps_own else 1)

# the first row that fits is taken; the rows that keep their own rows were measured on an H200, except those for 256
DQ_TILED = (
  UpTo(64, tile_of_sums(8, 16, 8, 4, 64, 64)),
  UpTo(128, tile_of_sums(16, 16, 8, 8, 32, 32)),
  UpTo(128, tile_of_sums(8, 16, 8, 4, 32, 32)),
  UpTo(256, tile_of_sums(16, 8, 8, 4, 32, 16)),
  UpTo(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 32, 16)),
  UpTo(256, tile_of_sums(16, 16, 4, 4, 16, 16, keeps_own=False)),
  UpTo(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 16, 8, keeps_own=False)),
  UpTo(MAX_WIDTH, tile_of_sums(16, 8, 4, 4, 16, 8, keeps_own=False)))
DKDV_TILED = (
  UpTo(64, tile_of_sums(8, 16, 8, 4, 64, 64)),
  UpTo(128, tile_of_sums(16, 16, 4, 8, 32, 32)),
  UpTo(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 32, 16)),
  UpTo(128, tile_of_sums(16, 16, 4, 4, 16, 16, keeps_own=False)),
  UpTo(MAX_WIDTH, tile_of_sums(32, 8, 4, 4, 16, 8, keeps_own=False)),
  UpTo(MAX_WIDTH, tile_of_sums(16, 8, 4, 4, 16, 8, keeps_own=False)))

BACKWARD_ALONE = TiledBackwardTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # for workgroups of one thread

def tiled_backward_tile(p:Problem, arch:Chip, keys:bool) -> TiledBackwardTile:
  """Chooses the tile description of the backward kernel without matrix instructions: the one of dk and dv if `keys` is true, otherwise of dq."""
  kernel, table = ("backward_dkdv_tiled", DKDV_TILED) if keys else ("backward_dq_tiled", DQ_TILED)
  # A tile found by a search (TUNE=1) comes first; the first row that fits is taken.
  rows = (*tuned.kept_rows(p, arch, kernel, TiledBackwardTile, tuned.check_threads), *(table if arch.lds else [UpTo(MAX_WIDTH, BACKWARD_ALONE)]))
  return next(fitting(kernel, p, arch, rows, lambda row: replace(row.shape, keys=keys)))
