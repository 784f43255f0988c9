"""Tiles for latent attention (MLA) that attn.measure.decode times with TUNE=1: all tiles that fit into LDS and registers."""
from __future__ import annotations
import itertools
from typing import Any
from attn.chips import Chip
from attn.chips.matrix import row_registers
from attn.chips.shapes import MlaMmaShape, MlaShape, UpTo
from attn.cache.tuned import LIMITS, head_class
from attn.choose.mla_tiles import checked_latent
from attn.kernels.tiles.amd import MlaTile
from attn.kernels.tiles.mma import MlaMmaTile
from attn.problem import Problem

LATENT_NUMBERS = {64: 384, 32: 240}      # most registers of a lane for Q, S and O, by the lanes of a wave; a lane also needs other registers

def latent_numbers(p:Problem, tile:MlaTile|MlaMmaTile) -> int:
  """Estimates from below how many registers a lane needs for Q, S and O in a kernel for latent attention."""
  if isinstance(tile, MlaMmaTile): return 4*(tile.row_tiles*tile.columns(p) + tile.block_n//tile.key_parts//tile.matrix.N)
  mat = tile.matrix
  own = 0 if tile.q_reloaded else row_registers(mat, p.D)
  return own + tile.row_tiles*tile.columns(p)*mat.accumulator + tile.block_n//tile.key_parts//mat.groups

def latent_space(p:Problem, arch:Chip) -> dict[MlaTile|MlaMmaTile, UpTo[Any]]:
  """Returns the tiles of latent attention to time, each with a row of a tile table that has its shape."""
  kind, found = MlaMmaShape if arch.unit.mma else MlaShape, dict[MlaTile|MlaMmaTile, UpTo[Any]]()
  for matrix, *numbers in itertools.product(*LIMITS[kind].values()):
    row: UpTo[Any] = UpTo(head_class(p), kind(*numbers), matrix=matrix)
    try: tile = checked_latent(row, arch, p)
    except ValueError: continue
    # A workgroup may compute several matrix tiles of query rows: a tile is left out if the last of these would have no query.
    small = tile.block_m//tile.row_tiles*(tile.row_tiles - 1) < p.Sq*(p.H//p.Hkv)
    if small and latent_numbers(p, tile) <= LATENT_NUMBERS[arch.wave]: found.setdefault(tile, row)
  return found
