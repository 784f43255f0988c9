"""Ranks tiles for the backward kernels by predictions from machine code. `python -m attn.tune --gradient dq` prints this ranking."""
from __future__ import annotations
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from attn.chips import Chip, get_chip
from attn.chips.matrix import row_registers
from attn.chips.shapes import BackwardShape, UpTo
from attn.choose.backward_tiles import backward_tile
from attn.choose.refusals import MATRIX_DTYPES
from attn.choose.rows import misfit
from attn.compilers.clang import assembly
from attn.isa.costs import report_of_text
from attn.isa.source import Spec, kernel_source, problem_of_spec
from attn.kernels.parts.program.counts import round_up
from attn.kernels.tiles.amd import BackwardTile
from attn.search.forward import MATRICES, RESERVE, VARIANTS, Bound, Each, bound_of, whole_and_smooth
from attn.tinygrad_compat import CompileError

# bench.py with TUNE=1 and BWD=1 times the same tiles on a GPU. The backward tables in attn/chips are written by hand from such a ranking.
BACKWARD_SPACE: dict[str, tuple[Any, ...]] = {
  "waves": (4, 2, 8), "block_n": (32, 16, 64), "own_in_lds": ((False, False), (True, False), (True, True)), "fenced": (0, 4, 8, 2),
  "prefetch": (1, 0, 2), "sparing": (False, True), "passes": (1, 2)}

PRODUCTS_NEEDED = {"dq": 3, "dkdv": 4}     # matrix products: S, dP and dQ; S, dP, dV and dK

NOT_LOOKED_AT = {64: (), 32: (4,)}         # values of `fenced` that are skipped because neighbouring values are tried, by the lanes of a wave

@dataclass(frozen=True)
class RankedBackwardTile:
  row: UpTo[BackwardShape]
  bound: Bound

def backward_held(tile:BackwardTile, d:int) -> int:
  """Estimates from below how many vector registers a lane of a backward kernel needs; `d` is the head dimension."""
  # for accumulators, S and dP, the workgroup's own rows (those that do not lie in LDS), and a part of the tiles that are being loaded
  mat = tile.matrix
  row = row_registers(mat, d)
  accumulators = (2 if tile.keys and tile.passes == 1 else 1)*round_up(d, mat.M)//mat.groups
  on_the_way = 2*tile.block_n*d*mat.size//(4*tile.threads) if tile.prefetch else 0
  return RESERVE + accumulators + 2*tile.block_n//mat.groups + row*tile.own_in_lds.count(False) + on_the_way

def backward_candidates(arch:Chip, d:int, keys:bool) -> list[UpTo[BackwardShape]]:
  """Returns the tile shapes of BACKWARD_SPACE that a kernel (of dk and dv if `keys`, otherwise of dq) can use, as rows of a tile table."""
  found, p = list[UpTo[BackwardShape]](), problem_of_spec(Spec(arch.name, d))
  for *numbers, matrix in itertools.product(*BACKWARD_SPACE.values(), MATRICES):
    c = BackwardShape(**dict(zip(BACKWARD_SPACE, numbers)))
    if matrix >= len(arch.matrix[MATRIX_DTYPES[0]]) or (c.passes > 1 and not keys) or c.fenced in NOT_LOOKED_AT[arch.wave]: continue
    tile = backward_tile(p, arch, row := UpTo(d, c, matrix=matrix), keys)
    plain = backward_tile(p, arch, UpTo(d, BackwardShape(c.waves, c.block_n), matrix=matrix), keys)
    # Three options of a shape save registers: the workgroup's own rows lie in LDS (`own_in_lds`), rows are read a few units at a time (`sparing`),
    # or the kernel makes two passes over the queries (`passes`). A shape with such an option is tried only if the kernel would otherwise need more
    # than three quarters of the registers.
    needed = backward_held(plain, d) > arch.vgprs*3//4 or not (any(c.own_in_lds) or c.sparing or c.passes > 1)
    room = misfit(p, arch, row, tile) is None and backward_held(tile, d) <= arch.vgprs
    # whole tiles of the matrix instruction, no bank conflicts; fits into LDS and registers
    if whole_and_smooth(arch, tile.matrix, c.block_n, d) and needed and room: found.append(row)
  return found

def backward_bound(arch:str, row:UpTo[BackwardShape], kernel:str, dtype:str=VARIANTS[0][0], mask:str=VARIANTS[0][1]) -> Bound|None:
  """Compiles the kernel "dq" or "dkdv" with the tile shape in `row`; returns predicted figures of its speed, or None if it spills or does not
  compile."""
  spec = Spec(arch, row.up_to, dtype, mask, kernel)
  tile = backward_tile(problem_of_spec(spec), get_chip(arch), row, kernel == "dkdv")
  source = kernel_source(spec, tile)
  # None if the kernel doesn't compile, or spills registers
  try: text = assembly(source.text, spec.arch)
  except CompileError: return None
  report = report_of_text(spec, source, text)
  if (found := bound_of(text, source, report, tile)) is None: return None
  needed = PRODUCTS_NEEDED[kernel]/sum(a + b for a, b in source.products)       # a second pass computes S again
  return found._replace(predicted=round(found.predicted*needed), serial=round(found.serial*needed), issued=round(found.issued*needed))

def ranked_backward(arch:str, d:int, kernel:str, each:Each=map) -> list[RankedBackwardTile]:
  """Returns the tiles of a backward kernel for head dimensions up to `d`, best first. Tiles whose kernel spills registers are left out."""
  found = candidates = backward_candidates(get_chip(arch), d, kernel == "dkdv")
  # a tile's figures are the worst over all variants of the kernel
  worst: dict[UpTo[BackwardShape], Bound] = {}
  for dtype, mask in VARIANTS:
    bounds:Iterable[Bound|None] = each(backward_bound, [arch]*len(found), found, [kernel]*len(found), [dtype]*len(found), [mask]*len(found))
    kept = {c: x for c, x in zip(found, bounds, strict=True) if x is not None}
    worst = {c: x if c not in worst else Bound(*map(min, zip(x, worst[c], strict=True))) for c, x in kept.items()}
    found = [c for c in candidates if c in kept]
  return sorted((RankedBackwardTile(c, x) for c, x in worst.items()), key=lambda x: x.bound, reverse=True)
