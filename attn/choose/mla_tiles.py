"""The tiles of the kernels of latent attention, mla and mla_mma, whose waves share rows of O and of K that are too long for one."""
from __future__ import annotations
import itertools
from collections.abc import Mapping
from typing import Any
from attn.chips import Chip
from attn.chips.candidates import MlaCandidate, MlaMmaCandidate, cautious_latent
from attn.chips.matrix import MMA, contraction
from attn.chips.nvidia import MLA_MMA_CANDIDATES
from attn.cache import tuned
from attn.kernels.parts.layouts import LINE
from attn.kernels.tiles.amd import MlaTile
from attn.kernels.tiles.mma import MlaMmaTile, fragments
from attn.problem import Problem
from attn.score.terms import score_terms

UP_TO = {"D": 576, "Dv": 512}      # the rows of K and of O that the tiles have registers for

def latent_refuses(p:Problem, arch:Chip) -> str|None:
  """Why neither kernel takes `p` on any chip, or None."""
  if not p.v_in_k: return "v_dim=None: it takes values that are the first columns of the keys"
  if p.dtype not in MMA: return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MMA)}"
  tensors = [term.name for term in score_terms(p) if any("keys" in tensor.axes for tensor in term.tensors)]
  if options := [*tensors, *["dropout_p"]*(p.dropout_p > 0)]: return f"{options[0]}: its waves have parts of a row's keys, and no part of that"
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: its tiles are for up to {UP_TO[name]}" for name, value in widths if value > UP_TO[name]), None)

def mla_tile_of(p:Problem, arch:Chip, c:MlaCandidate) -> MlaTile:
  """The tile of a candidate. Raises ValueError where the matrix instruction doesn't divide it."""
  if c.matrix >= len(matrices := arch.matrix[p.dtype]): raise ValueError(f"matrix={c.matrix}: {arch.name} has {len(matrices)} for {p.dtype}")
  tile = MlaTile(matrices[c.matrix], c.row_tiles, c.block_n, c.key_parts, c.q_anew, c.fenced, c.weight_parts, c.prefetch)
  for name, parts in (("key_parts", c.key_parts), ("weight_parts", c.weight_parts)):
    if c.block_n//parts % tile.matrix.least_keys: raise ValueError(f"{name}={parts}: no parts of {c.block_n} keys")
  return tile

def mla_mma_tile_of(p:Problem, arch:Chip, c:MlaMmaCandidate) -> MlaMmaTile:
  """The same on NVIDIA: a warp has pairs of fragments of scores, and none waits while others multiply with V."""
  tile, line = MlaMmaTile(MMA[p.dtype], c.row_tiles, c.block_n, c.key_parts), LINE*MMA[p.dtype].N
  if c.block_n//c.key_parts % (2*tile.matrix.N): raise ValueError(f"key_parts={c.key_parts}: no parts of {c.block_n} keys")
  if tile.waves > max(1, fragments(p.Dv, tile.matrix)//LINE): raise ValueError(f"{tile.waves} warps: O has {p.Dv} columns, of which each has {line}")
  return tile

def mla_tile(p:Problem, arch:Chip) -> MlaTile:
  """The one that TUNE=1 found, or the first candidate for as many rows. Raises NotImplementedError where LDS has no room for it."""
  kept = tuned.kept_tile(p, arch, ENTRY, lambda found, arch, p: read(found, arch, p, MlaCandidate, MLA_LIMITS, mla_tile_of))
  if kept is not None: return kept
  rows = p.Sq*(p.H//p.Hkv)
  tile = mla_tile_of(p, arch, next(c for c in arch.unit.latent or cautious_latent(arch.matrix[p.dtype][0]) if rows > c.beyond))
  if (need := tile.lds_bytes(p)) > arch.lds: raise NotImplementedError(f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}")
  return tile

def mla_mma_tile(p:Problem, arch:Chip) -> MlaMmaTile:
  """The one that TUNE=1 found, or the first candidate for as many rows that fits. Raises NotImplementedError where shared memory has no room for
  any."""
  kept = tuned.kept_tile(p, arch, ENTRY, lambda found, arch, p: read(found, arch, p, MlaMmaCandidate, MLA_MMA_LIMITS, mla_mma_tile_of))
  if kept is not None: return kept
  rows = p.Sq*(p.H//p.Hkv)
  for c in MLA_MMA_CANDIDATES:
    tile = MlaMmaTile(MMA[p.dtype], c.row_tiles, c.block_n, c.key_parts)
    if rows > c.beyond and tile.lds_bytes(p) <= arch.lds: return tile
  raise NotImplementedError(f"no tile of mla_mma fits D={p.D}, Dv={p.Dv} on {arch}")

# ***** TUNE=1 *****

ENTRY = "mla"       # of the file of kept tiles
MLA_LIMITS: dict[str, tuple[Any, ...]] = {
  "beyond": (0,), "matrix": (0, 1), "row_tiles": (4, 2, 1), "block_n": (32, 64), "key_parts": (1, 2, 4), "q_anew": (False, True), "fenced": (8,),
  "weight_parts": (1, 2), "prefetch": (1, 0)}
MLA_MMA_LIMITS: dict[str, tuple[Any, ...]] = {"beyond": (0,), "row_tiles": (4, 2, 1), "block_n": (64, 32), "key_parts": (2, 1, 4, 8)}
LATENT_NUMBERS = {64: 384, 32: 240}      # registers for Q, S and O that a lane may have, by the lanes of a wave; what else it needs comes to that

def read(found:Any, arch:Chip, p:Problem, kind:Any, limits:Mapping[str, tuple[Any, ...]], tile_of:Any) -> Any:
  """The tile that a kept entry says, None for the table's own. Raises ValueError for what is no tile of this problem and chip."""
  if (c := tuned.tile_said(found, kind, limits)) is None: return None
  tile = tile_of(p, arch, c)
  if (need := tile.lds_bytes(p)) > arch.lds: raise ValueError(f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}")
  return tile

def numbers(p:Problem, tile:MlaTile|MlaMmaTile) -> int:
  """Registers of a lane for what it has of Q, S and O, at least."""
  if isinstance(tile, MlaMmaTile): return 4*(tile.row_tiles*tile.columns(p) + tile.block_n//tile.key_parts//tile.matrix.N)
  mat = tile.matrix
  own = 0 if tile.q_anew else contraction(mat, p.D)*mat.size//4//(1 if mat.duplicated else mat.groups)
  return own + tile.row_tiles*tile.columns(p)*mat.accumulator + tile.block_n//tile.key_parts//mat.groups

def latent_space(p:Problem, arch:Chip) -> dict[MlaTile|MlaMmaTile, MlaCandidate|MlaMmaCandidate]:
  """The tiles that TUNE=1 times: all that LDS and registers have room for, with no more rows than there are but for the last tile."""
  nvidia, found = bool(arch.unit.mma), dict[Any, Any]()
  kind, limits, tile_of = (MlaMmaCandidate, MLA_MMA_LIMITS, mla_mma_tile_of) if nvidia else (MlaCandidate, MLA_LIMITS, mla_tile_of)
  for values in itertools.product(*limits.values()):
    c: Any = kind(*values)
    try: tile: Any = tile_of(p, arch, c)
    except ValueError: continue
    small, most = tile.block_m//tile.row_tiles*(tile.row_tiles - 1) < p.Sq*(p.H//p.Hkv), LATENT_NUMBERS[32 if nvidia else arch.wave]
    if small and tile.lds_bytes(p) <= arch.lds and numbers(p, tile) <= most: found.setdefault(tile, c)
  return found
