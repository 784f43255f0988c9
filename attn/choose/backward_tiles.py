"""Which tiles the backward kernels get for a problem on a chip: the first row that fits, of a table for each family of matrix units.

AMD's are chosen by the registers that clang 22 needs, and mma.sync's by those that nvcc 13 needs, and not measured.
"""
from __future__ import annotations
from collections.abc import Iterator
from attn.chips import Chip
from attn.chips.candidates import BOTH, BackwardCandidate, Burden, MmaBackwardCandidate, cautious_backward
from attn.chips.matrix import MMA
from attn.chips.nvidia import DBIAS_MMA, DKDV_MMA, DKDV_WGMMA, DQ_MMA, DQ_WGMMA
from attn.cache import tuned
from attn.choose.tiles import burden
from attn.choose.dispatch import wgmma_refuses
from attn.kernels.parts.counts import ceildiv
from attn.kernels.tiles.amd import BackwardTile
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.kernels.tiles.plain import TiledBackwardTile
from attn.kernels.tiles.wgmma import WgmmaBackwardTile
from attn.ops import hopper as wgmma
from attn.problem import Problem
from attn.score.masks import hiding
from attn.score.terms import varies

# Rows of plain problems are tried before the others, each for its class of head dimensions alone, for problems without options whose rows are whole
# units, where their workgroups fill the chip: chosen by the time that is predicted of the code of this release of LLVM, and by the registers that it
# needs.
PLAIN_LLVM = 22
FEWEST_WAVES = 2     # of a workgroup in the tables: their tiles are for small grids as well

AnyBackwardTile = BackwardTile|MmaBackwardTile|WgmmaBackwardTile|TiledBackwardTile

# ***** the tile of a kernel that owns queries, that of dq, or of one that owns `keys`, that of dk and dv *****

def amd_backward_tile(p:Problem, arch:Chip, keys:bool) -> BackwardTile:
  if keys: return _chosen("backward_dkdv", p, arch, arch.unit.dkdv, True, arch.unit.plain_dkdv)
  return _chosen("backward_dq", p, arch, arch.unit.dq, False, arch.unit.plain_dq)

def amd_bias_tile(p:Problem, arch:Chip) -> BackwardTile:
  """The tile of the kernel of dbias: that of the kernel of dq."""
  return _chosen("backward_dq", p, arch, arch.unit.dq, False)

def mma_backward_tile(p:Problem, arch:Chip, keys:bool) -> MmaBackwardTile:
  if keys: return _chosen_mma("backward_dkdv_mma", p, arch, DKDV_MMA, p.Sk, True)
  return _chosen_mma("backward_dq_mma", p, arch, DQ_MMA, p.Sq, False)

def mma_bias_tile(p:Problem, arch:Chip) -> MmaBackwardTile: return _chosen_mma("backward_dbias_mma", p, arch, DBIAS_MMA, p.Sq, False)

def wgmma_backward_tile(p:Problem, arch:Chip, keys:bool) -> WgmmaBackwardTile:
  """Every problem has one."""
  queries, rows = (p.Sq*(p.H//p.Hkv), p.Sk) if keys else (p.Sq, p.Sq)
  table = DKDV_WGMMA if keys else DQ_WGMMA
  c = next(c for c in table if max(p.D, p.Dv) <= c.up_to and (c.varied or not varies(p)) and (c.few is None or queries <= c.few))
  return WgmmaBackwardTile(MMA[p.dtype], min(c.groups, ceildiv(rows, wgmma.M)), c.block_n, keys, c.passes)

def wgmma_backward_refuses(p:Problem, arch:Chip) -> str|None:
  """Why the gradient of `p` on `arch` is not computed by wgmma, or None."""
  if (reason := wgmma_refuses(p, arch)) is not None: return reason
  if p.out_dtype != p.dtype: return f"out_dtype {p.out_dtype}: dO is copied as it is, and has to be {p.dtype} as its factors are"
  rows = wgmma.M
  return f"Sq={p.Sq}, Sk={p.Sk}: a warpgroup has {rows} rows, mma.sync has smaller tiles" if min(p.Sq, p.Sk) < rows else None

def _chosen_mma(kernel:str, p:Problem, arch:Chip, table:tuple[MmaBackwardCandidate, ...], rows:int, keys:bool) -> MmaBackwardTile:
  mat, load, reasons = MMA[p.dtype], Burden.BIAS if p.dropout_p else burden(p), []      # dropout takes as many registers as a bias
  for c in table:
    row_tiles = min(c.row_tiles, ceildiv(rows, mat.M))
    waves = min(c.waves, ceildiv(rows, row_tiles*mat.M))
    tile = MmaBackwardTile(mat, waves, row_tiles, c.block_n, c.part_n, keys=keys, passes=c.passes)
    spills = load > c.burden or arch.name in c.spills_on
    if max(p.D, p.Dv) > c.up_to or spills: reasons.append(f"tile {tile} has the registers for D and Dv up to {c.up_to}")
    elif (need := tile.lds_bytes(p)) > arch.lds: reasons.append(f"tile {tile} needs {need} bytes of shared memory, {arch.name} has {arch.lds}")
    else: return tile
  raise NotImplementedError(f"no tile of {kernel} fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")

def backward_tile(p:Problem, arch:Chip, c:BackwardCandidate, keys:bool) -> BackwardTile:
  """The tile that a candidate makes of a problem: with no more waves than its own rows fill, queries or `keys`."""
  mat = arch.matrix[p.dtype][c.matrix]
  waves = max(1, min(c.waves, ceildiv(p.Sk if keys else p.Sq, mat.N)))
  crowded = p.dropout_p or (keys and p.wide_scores)     # dropout, or what lse has lost, takes the registers of a tile that would be on its way
  prefetch = 0 if crowded and c.own_in_lds == BOTH else c.prefetch
  return BackwardTile(mat, waves, c.block_n, c.own_in_lds, c.fenced, prefetch, c.sparing, keys, c.passes, c.by_item, c.read_ahead)

def in_units(p:Problem, tile:BackwardTile) -> bool: return p.D % tile.matrix.unit == 0 and p.Dv % tile.matrix.unit == 0

def backward_fits(p:Problem, arch:Chip, tile:BackwardTile, c:BackwardCandidate) -> str|None:
  """None if `tile` is for this problem on `arch`, else why not."""
  whole = tile.matrix.operand//tile.matrix.unit      # units of an operand
  if tile.fenced and whole and tile.fenced % whole: return f"tile {tile} reads {tile.fenced} units together, an operand is made of {whole}"
  if max(p.D, p.Dv) > c.up_to: return f"tile {tile} has the registers for D and Dv up to {c.up_to}"
  if c.whole and not in_units(p, tile): return f"tile {tile} has the registers for D and Dv in units of {tile.matrix.unit}"
  if c.whole and tile.waves < c.waves: return f"tile {tile} has the registers for {c.waves} waves"
  if (need := tile.lds_bytes(p)) > arch.lds: return f"tile {tile} needs {need} bytes of LDS, {arch.name} has {arch.lds}"
  return None

def _plain(p:Problem, arch:Chip, table:tuple[BackwardCandidate, ...], keys:bool) -> Iterator[BackwardCandidate]:
  """Those of a table of plain problems that are for this one: dk's and dv's without a mask, with which moves between registers take over."""
  if p.options or arch.llvm < PLAIN_LLVM or (keys and any(hiding(p))): return
  for c in (x for x in table if x.up_to == tuned.head_class(p)):
    tile = backward_tile(p, arch, c, keys)
    workgroups = p.B*(p.Hkv if keys else p.H)*ceildiv(p.Sk if keys else p.Sq, tile.block_m)
    if in_units(p, tile) and tile.waves == c.waves and (workgroups >= arch.cus or c.waves == FEWEST_WAVES): yield c

def _chosen(kernel:str, p:Problem, arch:Chip, table:tuple[BackwardCandidate, ...], keys:bool,
            plain:tuple[BackwardCandidate, ...]=()) -> BackwardTile:
  reasons, found = [], tuned.backward_winner(p, arch, kernel)
  for c in (*([found] if found is not None else []), *_plain(p, arch, plain, keys), *(table or cautious_backward(arch.matrix[p.dtype][0], keys))):
    if (reason := backward_fits(p, arch, tile := backward_tile(p, arch, c, keys), c)) is None: return tile
    reasons.append(reason)
  raise NotImplementedError(f"no tile of {kernel} fits D={p.D}, Dv={p.Dv} on {arch}: {'; '.join(reasons)}")
