"""Choice of tile descriptions for the kernels of latent attention: mla on AMD's matrix units, mla_mma with mma.sync, and mla_wgmma with wgmma. Rows
of O and K are too long for one wave there, so several waves share each row."""
from __future__ import annotations
from typing import Any
from attn.cache import tuned
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.chips.nvidia import LATENT_MMA, LATENT_STORED_MMA, LATENT_WGMMA
from attn.chips.shapes import MlaMmaShape, MlaShape, UpTo, cautious_latent
from attn.choose.refusals import torn_rows, torn_views, unconverted
from attn.choose.rows import fitting
from attn.kernels.parts.memory.layouts import LINE
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.tiles.amd import MlaTile
from attn.kernels.tiles.mma import MlaMmaTile, fragments
from attn.kernels.tiles.wgmma import LATENT_GROUPS, PANEL_COLUMNS, MlaWgmmaTile
from attn.ops import hopper as wgmma
from attn.problem import Problem
from attn.score.terms import score_terms

WHOLE = 32     # the columns of V that are stored in 8 bits are whole steps of every matrix instruction
# On an H100, 64 sequences of 4096 keys take 110 us with 16 rows, by both kernels; with 32 rows 114 us by mla_wgmma, and 117 us by mla_mma.
MOST_ROWS_OF_MMA = 16
UP_TO = {"D": 576, "Dv": 512}      # longest rows of K and of O for which the tiles have registers

def latent_refuses(p:Problem, arch:Chip) -> str|None:
  """Returns why the kernels of latent attention cannot compute `p` on this chip, or None if they can."""
  # Whether the chip has their matrix unit is not checked.
  if not p.v_in_k: return "v_dim=None: this kernel is for latent attention, where V is the first v_dim columns of K"
  if p.dtype not in MMA: return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MMA)}"
  if (reason := unconverted(p, arch)) is not None: return reason
  if p.stored and p.Dv % WHOLE: return f"Dv={p.Dv} with stored={p.stored!r}: must be a multiple of {WHOLE}"
  tensors = [term.name for term in score_terms(p) if any("keys" in tensor.axes for tensor in term.tensors)]
  if options := [*tensors, *["dropout_p"]*(p.dropout_p > 0)]: return f"{options[0]}: this kernel does not support it"
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: this kernel supports at most {UP_TO[name]}" for name, value in widths if value > UP_TO[name]), None)

def latent_wgmma_refuses(p:Problem, arch:Chip) -> str|None:
  """Returns the reason why mla_wgmma (latent attention with Hopper's wgmma) cannot compute `p`, or None if it can."""
  if (reason := latent_refuses(p, arch) or torn_rows(p, unit := MMA[p.dtype].unit) or torn_views(p, unit)) is not None: return reason
  if p.stored: return f"stored={p.stored!r}: this kernel multiplies keys of 16 bits; mla_mma converts stored keys"
  if (panels := ceildiv(p.Dv, PANEL_COLUMNS)) % LATENT_GROUPS:
    return f"Dv={p.Dv}: {LATENT_GROUPS} warpgroups divide panels of {PANEL_COLUMNS} columns evenly, and O has {panels}"
  return None

def of_mla(row:UpTo[MlaShape], arch:Chip, p:Problem) -> MlaTile:
  """Makes the tile description of mla (latent attention on AMD) from a row of a tile table; raises ValueError if the matrix instruction does not
  fit."""
  if row.matrix >= len(matrices := arch.matrix[p.dtype]): raise ValueError(f"matrix={row.matrix}: {arch.name} has {len(matrices)} for {p.dtype}")
  tile = MlaTile(**vars(row.shape), matrix=matrices[row.matrix])
  # The waves of a workgroup divide the keys of an iteration: each part must fill whole matrix instructions.
  for name, parts in (("key_parts", tile.key_parts), ("weight_parts", tile.weight_parts)):
    if tile.block_n//parts % (least := tile.matrix.least_keys):
      raise ValueError(f"{name}={parts}: must divide block_n={tile.block_n} keys into parts of a multiple of {least}")
  return tile

def of_mla_mma(row:UpTo[MlaMmaShape], arch:Chip, p:Problem) -> MlaMmaTile:
  """Makes the tile description of mla_mma (latent attention with mma.sync) from a row of a tile table; raises ValueError if the instruction does not
  fit."""
  tile = MlaMmaTile(**vars(row.shape), matrix=MMA[p.dtype])
  # The warps of a block divide the keys of an iteration: each part must fill whole matrix instructions.
  if tile.block_n//tile.key_parts % (least := 2*tile.matrix.N):
    raise ValueError(f"key_parts={tile.key_parts}: must divide block_n={tile.block_n} keys into parts of a multiple of {least}")
  return tile

def checked_latent(row:UpTo[Any], arch:Chip, p:Problem) -> MlaTile|MlaMmaTile:
  """Makes the tile description of a kernel of latent attention from a row that a search or a file gave, or raises ValueError if it does not fit the
  chip."""
  # The shape was found by a search, or was read from the file of the fastest shapes.
  tile = of_mla_mma(row, arch, p) if arch.unit.mma else of_mla(row, arch, p)
  if isinstance(tile, MlaMmaTile) and tile.waves > (most := max(1, fragments(p.Dv, tile.matrix)//LINE)):
    raise ValueError(f"{tile.waves} warps: must be at most {most}, because O has {p.Dv} columns and a warp computes at least {LINE*tile.matrix.N}")
  if (need := tile.lds_bytes(p)) > arch.lds: raise ValueError(f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}")
  return tile

ENTRY = "mla"       # name of the entry in the file of kept tiles

def mla_tile(p:Problem, arch:Chip) -> MlaTile:
  """Chooses the tile description of mla (latent attention on AMD)."""
  # A tile found by a search (TUNE=1) comes first; the first row that fits is taken.
  rows = (*tuned.kept_rows(p, arch, ENTRY, MlaShape, checked_latent), *(arch.unit.latent or cautious_latent(arch.matrix[p.dtype][0])))
  return next(fitting("mla", p, arch, rows, lambda row: of_mla(row, arch, p)))

def latent_wgmma_slower(p:Problem, arch:Chip) -> str|None:
  if (rows := p.Sq*(p.H//p.Hkv)) <= MOST_ROWS_OF_MMA: return f"{rows} rows: a block has {wgmma.M}; mla_mma, with smaller blocks, is as fast"
  kept = tuned.kept_rows(p, arch, ENTRY, MlaMmaShape, checked_latent)
  return "TUNE=1 found a tile of mla_mma that is faster on this device" if kept else None

def mla_wgmma_tile(p:Problem, arch:Chip) -> MlaWgmmaTile:
  """Chooses the tile description of mla_wgmma (latent attention with Hopper's wgmma)."""
  return next(fitting("mla_wgmma", p, arch, LATENT_WGMMA, lambda row: MlaWgmmaTile(**vars(row.shape), matrix=MMA[p.dtype])))

def mla_mma_tile(p:Problem, arch:Chip) -> MlaMmaTile:
  """Chooses the tile description of mla_mma (latent attention with NVIDIA's mma.sync)."""
  # A tile found by a search (TUNE=1) comes first; the first row that fits is taken.
  rows = (*tuned.kept_rows(p, arch, ENTRY, MlaMmaShape, checked_latent), *(LATENT_STORED_MMA if p.stored else LATENT_MMA))
  return next(fitting("mla_mma", p, arch, rows, lambda row: of_mla_mma(row, arch, p)))
