"""Choice of tile descriptions (the sizes by which a kernel divides its work) for the kernels of plain UOps.

The table rows for NVIDIA were measured on an H200, the table rows for workgroups of one thread on a CPU (docs/plain.md). Other chips use the first
row whose tiles fit into their local memory."""
from __future__ import annotations
from dataclasses import replace
from attn.cache import tuned
from attn.chips import Chip
from attn.chips.shapes import UpTo
from attn.choose.rows import fitting
from attn.kernels.plain.rectangle import MAX_WIDTH
from attn.kernels.tiles.plain import TiledBackwardTile, TiledTile
from attn.problem import Problem

STEPS_AT_ONCE = 4     # steps of a product that are computed together: on an H200 D=128 takes 3.55 ms so, and 3.92 ms one by one

# the first row that fits is taken
TILED = (
  UpTo(64, TiledTile(8, 16, 8, 8, 64, 64, ahead=True, steps_at_once=STEPS_AT_ONCE), large=True),
  UpTo(64, TiledTile(16, 16, 4, 4, 64, 64)),
  UpTo(128, TiledTile(16, 16, 8, 8, 32, 32, ahead=True, steps_at_once=STEPS_AT_ONCE), large=True),
  UpTo(128, TiledTile(16, 16, 8, 4, 64, 32)),
  UpTo(128, TiledTile(32, 16, 4, 4, 32, 16, ahead=True)),
  UpTo(256, TiledTile(16, 16, 8, 4, 32, 32, ahead=True, steps_at_once=STEPS_AT_ONCE)),
  UpTo(MAX_WIDTH, TiledTile(32, 8, 8, 4, 32, 16, ahead=True, steps_at_once=STEPS_AT_ONCE)),
  UpTo(MAX_WIDTH, TiledTile(32, 16, 8, 4, 16, 16, keeps_own=False, ahead=True)),
  UpTo(128, TiledTile(16, 16, 4, 4, 32, 32, keeps_own=False)),
  UpTo(MAX_WIDTH, TiledTile(16, 16, 4, 4, 16, 16, keeps_own=False)),
  UpTo(256, TiledTile(16, 16, 4, 4, 16, 8, keeps_own=False)),
  UpTo(MAX_WIDTH, TiledTile(16, 8, 4, 4, 16, 8, keeps_own=False)))

ALONE = TiledTile(1, 1, 8, 8, 0, 0, parts=8, columns=8)      # for workgroups of one thread

def tiled_tile(p:Problem, arch:Chip) -> TiledTile:
  """Chooses the tile description of the forward kernel of plain UOps: the one that a search with the environment variable TUNE=1 found, or else the
  first one of the table that fits."""
  rows = (*tuned.kept_rows(p, arch, "tiled", TiledTile, tuned.check_threads), *(TILED if arch.lds else [UpTo(MAX_WIDTH, ALONE)]))
  return next(fitting("tiled", p, arch, rows, lambda row: row.shape))

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
  """Chooses the tile description of a backward kernel of plain UOps. With `keys` this is the kernel of dk and dv, whose workgroups own keys and loop
  over queries. Otherwise it is the kernel of dq, whose workgroups own queries and loop over keys. Returns the first one whose tiles fit into local
  memory, among those that a search with the environment variable TUNE=1 found and then those of the kernel's table."""
  kernel, table = ("backward_dkdv_tiled", DKDV_TILED) if keys else ("backward_dq_tiled", DQ_TILED)
  rows = (*tuned.kept_rows(p, arch, kernel, TiledBackwardTile, tuned.check_threads), *(table if arch.lds else [UpTo(MAX_WIDTH, BACKWARD_ALONE)]))
  return next(fitting(kernel, p, arch, rows, lambda row: replace(row.shape, keys=keys)))
