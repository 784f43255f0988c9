"""The search that makes attn/tiles_table.py: over bounds from machine code, not over measurements.

    python -m attn.tune                        prints what it would choose, and whether that is what the table has
    python -m attn.tune --write                rewrites the table
    python -m attn.tune --arch gfx942 --d 128  one class; with --all every tile that compiles, best first

A row is for one family of matrix units and for head dimensions up to one of CLASSES. Its tiles are those of `candidates` that do not spill, and the best
is the greatest `Bound`, each of whose figures is the worst over fp16 and bf16, full and causal. On a GPU, TUNE=1 of bench.py takes time in place of bounds.
"""
from __future__ import annotations
import itertools, multiprocessing, os, sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple
import click
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from attn import tiles_table
from attn.arch import Arch, get_arch
from attn.dispatch import fits, tile_of
from attn.fragment import MATRIX
from attn.isa.compiler import CompileError, assembly
from attn.isa.report import Report, analyse
from attn.isa.source import DTYPES, MASKS, Spec, kernel_source, problem_of
from attn.kernels.tiles import UNIT, Candidate, contraction, round_up

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")   # one of each family
CLASSES = (64, 128, 192, 256)
VARIANTS = [(dtype, mask) for mask in MASKS for dtype in DTYPES]
SPACE: dict[str, tuple[int, ...]] = {"waves": (8, 4), "q_tiles": (2, 1), "block_n": (128, 64, 32, 16), "q_in_lds": (False, True), "fenced": (False, True)}
SMALL = 128     # queries of a tile that every grid may have
FILLS = 256     # workgroups that a tile with more queries has to make, about one for each compute unit of the largest chips
ENOUGH = 2      # waves per SIMD: one computes while the other waits

class Bound(NamedTuple):
  """What a tile is ranked by, the greatest first; tenths of a percent would rank the compiler's luck, so the utilisations are whole ones."""
  enough: int     # waves per SIMD that registers and LDS have room for, up to ENOUGH
  serial: int     # percent of the matrix unit's time in the hot loop where nothing overlaps
  overlap: int    # and where everything does
  waves: int      # as `enough`, all of them
  small: int      # minus the queries of a workgroup
  short: int      # minus the keys of a trip

@dataclass(frozen=True)
class Found:
  candidate: Candidate
  bound: Bound

# ***** the space *****

def held(c:Candidate, arch:Arch, d:int) -> int:
  """Vector registers of a lane that the tile takes at least: accumulators and scores, with Q and the tiles of K and V that are on their way."""
  mat = MATRIX[arch.family, DTYPES[0]][c.matrix]
  of_q = 0 if c.q_in_lds else contraction(mat, d)//2//(1 if mat.duplicated else mat.groups)
  return c.q_tiles*((round_up(d, mat.M) + c.block_n)//mat.groups + of_q) + c.block_n*d//(c.waves*mat.wave)

def candidates(arch:Arch, d:int) -> list[Candidate]:
  """The tiles of SPACE that the matrix instruction divides into, and that LDS and registers could hold."""
  found = []
  for values in itertools.product(*SPACE.values()):
    c, p = Candidate(d, **dict(zip(SPACE, values))), problem_of(Spec(arch.name, d))   # type: ignore[arg-type]
    tile = tile_of(p, arch, c)
    divides = c.block_n%tile.matrix.M == 0 and c.block_n%contraction(tile.matrix, UNIT) == 0
    if divides and fits(p, arch, tile, c) is None and held(c, arch, d) <= arch.vgprs: found.append(c)
  return found

# ***** the bound of one tile *****

def report_of(arch:Arch, d:int, c:Candidate, dtype:str, mask:str) -> Report|None:
  """The machine code of the forward kernel with this tile, None where it doesn't compile."""
  spec = Spec(arch.name, d, dtype, mask)
  kernel = kernel_source(spec, tile_of(problem_of(spec), arch, c))
  try: return analyse(assembly(kernel.text, arch.name), arch.name, kernel.d, kernel.dv, queries=kernel.queries, title=str(spec))
  except CompileError: return None
