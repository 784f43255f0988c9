"""The tiles of the kernels of latent attention, mla and mla_mma, whose waves share rows of O and of K that are too long for one."""
from __future__ import annotations
from collections.abc import Mapping
from dataclasses import dataclass
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.kernels.mla import MlaTile
from attn.kernels.mla_mma import MlaMmaTile
from attn.problem import Problem

UP_TO = {"D": 576, "Dv": 512}      # the rows of K and of O that the tiles have registers for
BIAS_AND_DROPOUT = ("bias", "dropout_p")

@dataclass(frozen=True)
class MlaCandidate:
  """A tile of mla for problems of more than `beyond` rows, queries times heads that share a key/value head; the other fields are those of MlaTile."""
  beyond: int
  matrix: int        # index into Chip.matrix of the dtype
  row_tiles: int
  block_n: int
  key_parts: int
  q_anew: bool = False
  fenced: int = 8
  weight_parts: int = 1
  prefetch: int = 1

# No register is spilled in any. On CDNA a wave keeps Q, and 64 rows wait for K in memory; of RDNA neither registers nor LDS have room for Q.
OF_CDNA = (MlaCandidate(0, 1, 4, 32, 1),)
OF_RDNA = (MlaCandidate(32, 0, 4, 32, 2, q_anew=True, weight_parts=2), MlaCandidate(0, 0, 2, 32, 2, q_anew=True, weight_parts=2, prefetch=0))
MLA_CANDIDATES: Mapping[str, tuple[MlaCandidate, ...]] = {"cdna2": OF_CDNA, "cdna3": OF_CDNA, "cdna4": OF_CDNA, "rdna3": OF_RDNA, "rdna4": OF_RDNA}

@dataclass(frozen=True)
class MlaMmaCandidate:
  """A tile of mla_mma for problems of more than `beyond` rows; the other fields are those of MlaMmaTile."""
  beyond: int
  row_tiles: int
  block_n: int
  key_parts: int

# the first that shared memory has room for
MLA_MMA_CANDIDATES = (MlaMmaCandidate(32, 4, 64, 2), MlaMmaCandidate(32, 4, 32, 2), MlaMmaCandidate(16, 2, 64, 4), MlaMmaCandidate(16, 2, 32, 2),
                      MlaMmaCandidate(0, 1, 64, 4), MlaMmaCandidate(0, 1, 32, 2))

def latent_refuses(p:Problem) -> str|None:
  """Why neither kernel takes `p` on any chip, or None."""
  if not p.v_in_k: return "v_dim=None: it takes values that are the first columns of the keys"
  if p.dtype not in MMA: return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MMA)}"
  if options := [x for x in BIAS_AND_DROPOUT if getattr(p, x)]: return f"{options[0]}: its waves have parts of a row's keys, and no part of that"
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: its tiles are for up to {UP_TO[name]}" for name, value in widths if value > UP_TO[name]), None)

def mla_tile(p:Problem, arch:Chip) -> MlaTile:
  """The first candidate for as many rows. Raises NotImplementedError where LDS has no room for it."""
  rows = p.Sq*(p.H//p.Hkv)
  c = next(c for c in MLA_CANDIDATES[arch.family] if rows > c.beyond)
  tile = MlaTile(arch.matrix[p.dtype][c.matrix], c.row_tiles, c.block_n, c.key_parts, c.q_anew, c.fenced, c.weight_parts, c.prefetch)
  if (need := tile.lds_bytes(p)) > arch.lds: raise NotImplementedError(f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}")
  return tile

def mla_mma_tile(p:Problem, arch:Chip) -> MlaMmaTile:
  """The first candidate for as many rows that fits. Raises NotImplementedError where shared memory has no room for any."""
  rows = p.Sq*(p.H//p.Hkv)
  for c in MLA_MMA_CANDIDATES:
    tile = MlaMmaTile(MMA[p.dtype], c.row_tiles, c.block_n, c.key_parts)
    if rows > c.beyond and tile.lds_bytes(p) <= arch.lds: return tile
  raise NotImplementedError(f"no tile of mla_mma fits D={p.D}, Dv={p.Dv} on {arch}")
