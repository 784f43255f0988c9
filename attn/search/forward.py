"""Search that makes the tables of forward tiles in attn/chips. It predicts times from machine code and measures nothing. The command is
attn/tune.py; begin with `search_class`."""
from __future__ import annotations
import functools, itertools, multiprocessing, re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple
import numpy as np
from attn import chips
from attn.chips import LLVM, SEARCHED, Chip, get_chip
from attn.chips.matrix import Matrix, contraction, row_registers
from attn.chips.shapes import EVERY, ForwardShape, UpTo
from attn.choose.refusals import MATRIX_DTYPES
from attn.choose.rows import misfit
from attn.choose.tiles import amd_tile
from attn.compilers.clang import assembly
from attn.emulator.banks import phases
from attn.extras import needs
from attn.isa.report import Report, analyse
from attn.isa.source import MASKS, Source, Spec, kernel_source, problem_of_spec
from attn.isa.timing.predict import Division, fed_by_l2, walked_in_a_trip
from attn.isa.timing.trips import timing_of
from attn.isa.waits import time_of_loads
from attn.kernels.parts.program.counts import round_up
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.tinygrad_compat import CompileError
with needs("isa", "python -m attn.tune", __name__): from tqdm import tqdm

# A table row is for one family of matrix units and for head dimensions up to one of CLASSES. The search looks at those tile descriptions of
# `candidates` that do not spill. The best one has the greatest `Bound`: its prediction by attn.isa.timing counts first, and each figure is the worst
# over fp16 and bf16, full and causal. If the best tile has more than SMALL_TILE queries, a second row has the best tile with at most SMALL_TILE
# queries, for grids too small to fill a chip.
#
# Rows belong to the release of LLVM that the search ran with: the release of the clang of the pip extra `isa` (pip install '.[isa]'), or of the one
# that ATTN_CLANG names. Rows of the newest release are for every compiler. Rows of an older release replace them for compilers of that release and
# before; the table has such rows only if their tiles differ from those of the newest release. On a GPU, TUNE=1 of bench.py chooses by time instead.

VARIANTS = [(dtype, mask) for dtype in reversed(MATRIX_DTYPES) for mask in reversed(MASKS)]   # the costliest variants first
SPACE: dict[str, tuple[int, ...]] = {
  "waves": (8, 4), "q_tiles": (2, 1), "block_n": (128, 64, 32, 16), "q_in_lds": (False, True), "fenced": (False, True),
  "prefetch": (1, 2, 0)}
MATRICES = (0, 1)      # which of a chip's matrix instructions, by number
LARGEST_TILE = 256     # most queries of a tile: under a causal mask a block computes keys in vain, on average half as many as the tile has queries
SMALL_TILE = 128     # most queries of a tile that any grid may use
FILLS = 256     # a larger tile is used only if it makes this many workgroups, about one for each compute unit of the largest chips
ENOUGH = 2      # waves per SIMD: one computes while the other waits
AHEAD = 3       # each load of the next tile should be under way during at least 1/AHEAD of an iteration's matrix work
ISSUED = ("lds_read", "lds_write", "lds_permute", "load", "load_to_lds", "barrier")   # kinds (instruction.KINDS) that take an issue slot
LEADING = 3     # number of best tiles that are also tried with two buffers in LDS
RESERVE = 16    # registers for addresses, operands that are being read, and the state of rows: every kernel needs at least these
Each = Callable[..., Iterable[Any]]   # map, or the map of a pool of processes

class Bound(NamedTuple):
  """Predicted figures of a kernel's speed, by which tiles are compared: the first field counts most, and greater is better."""
  # Shares of the matrix unit's dense rate are rounded to half percents: smaller differences come from details of the compiler's output, and say
  # nothing about the tile.
  predicted: int  # predicted share of the dense rate in the hot loop, limited by what L2 feeds
  enough: int     # waves per SIMD, but no more than ENOUGH
  ahead: int      # 1 if a tile is being loaded during a good part of the matrix work, else 0: no other figure covers waiting for memory
  issued: int     # the serial bound, with an issue slot for each access to LDS and memory and each barrier
  serial: int     # the serial bound: nothing overlaps
  waves: int      # waves per SIMD of the workgroups for which registers and LDS have room
  overlap: int    # the bound if everything overlaps
  small: int      # minus the queries of a workgroup
  short: int      # minus the keys of an iteration

@dataclass(frozen=True)
class RankedTile:
  row: UpTo[ForwardShape]
  bound: Bound

# ***** the tiles to try *****

def held(row:UpTo[ForwardShape], arch:Chip, d:int) -> int:
  """Estimates from below how many vector registers a lane of a forward kernel needs; `d` is the head dimension."""
  # accumulators and scores, Q (unless it lies in LDS), and a part of the tiles of K and V that are being loaded
  mat, c = arch.matrix[MATRIX_DTYPES[0]][row.matrix], row.shape
  of_q = 0 if c.q_in_lds else row_registers(mat, d)
  on_the_way = 2*c.block_n*d*mat.size//(4*c.waves*mat.wave) if c.prefetch else 0
  return RESERVE + c.q_tiles*((round_up(d, mat.M) + c.block_n)//mat.groups + of_q) + on_the_way

def conflict(family:str, mat:Matrix, stride:int) -> bool:
  """Returns whether lanes that read a matrix operand at the same time access the same bank of LDS, with rows `stride` 16-byte units apart."""
  # Lane group h (the lanes that hold the same rows of a result) reads the h-th 16-byte unit of row n. `stride` is the number of units from one row
  # to the next. CDNA's 16x16 instructions have such conflicts, because lanes of two lane groups, with different rows, read at the same time.
  banks, groups = phases(family, mat.wave, True, 16)
  unit = np.arange(mat.wave)%mat.N*stride + (0 if mat.duplicated else np.arange(mat.wave)//mat.N)
  return any(len(set(u)) != len(set(u % (banks//4))) for u in unit[groups])

def whole_and_smooth(arch:Chip, mat:Matrix, rows:int, d:int) -> bool:
  """Returns whether `rows` rows divide into whole matrix tiles, and whether lanes read them from LDS without bank conflicts."""
  divides = rows % mat.M == 0 and rows % mat.span == 0
  return divides and not any(conflict(arch.family, mat, n//mat.unit | 1) for n in (contraction(mat, d), rows))

def candidates(arch:Chip, d:int) -> list[UpTo[ForwardShape]]:
  """Returns the tile shapes that the search tries on a chip, as rows of a tile table; `d` is the head dimension."""
  found, p = list[UpTo[ForwardShape]](), problem_of_spec(Spec(arch.name, d))
  for *numbers, matrix in itertools.product(*SPACE.values(), MATRICES):
    if matrix >= len(arch.matrix[MATRIX_DTYPES[0]]): continue
    row = UpTo(d, c := ForwardShape(**dict(zip(SPACE, numbers))), matrix=matrix)   # type: ignore[arg-type]
    tile = amd_tile(p, arch, row)
    # Q lies in LDS only if the tile would need more than half of the wave's registers with Q in registers, because every iteration reads Q from LDS
    # again
    crowded = not c.q_in_lds or held(replace(row, shape=replace(c, q_in_lds=False)), arch, d) > arch.vgprs//2
    room = misfit(p, arch, row, tile) is None and held(row, arch, d) <= arch.vgprs
    # whole tiles of the matrix instruction, no bank conflicts; fits into LDS and registers
    if whole_and_smooth(arch, tile.matrix, c.block_n, d) and crowded and tile.block_m <= LARGEST_TILE and room: found.append(row)
  return found

# ***** the bound of one tile *****

def waves_of(report:Report, tile:Tile|BackwardTile, chip:Chip) -> int:
  """Returns how many waves of the kernel fit on a SIMD at the same time."""
  r = report.resources
  assert r.waves_by_registers is not None and r.waves_by_lds is not None
  simds = chip.pipes.simds
  # registers and LDS limit this number, and a SIMD runs only waves of whole workgroups
  return int(min(r.waves_by_registers, r.waves_by_lds)*simds)//tile.waves*tile.waves//simds

def bound_of(text:str, kernel:Source, report:Report|None, tile:Tile|BackwardTile) -> Bound|None:
  """Predicts the figures of a kernel's speed from its machine code `text`; None if the kernel spills or has no loop."""
  if report is None or (loop := report.loop) is None: return None
  r, chip = report.resources, get_chip(report.arch)
  # clang also counts moves from vector registers to accumulation registers as spills. These moves stay in the register file, so they are allowed,
  # and the prediction includes their time.
  if r.scratch or r.sgpr_spills: return None
  matrix, waves = loop.cycles["matrix"], waves_of(report, tile, chip)
  others = chip.pipes.valu*sum(loop.kinds[kind] for kind in ISSUED)
  ahead = AHEAD*(time_of_loads(report.waits) or 0) >= sum(loop.matrix.values())
  def halves(x:float) -> int: return round(200*x)
  timing = timing_of(text, report.arch, kernel.d, kernel.dv, products=kernel.products)
  division = Division(kernel.block_m, walked_in_a_trip(timing, kernel.block_m), products=kernel.products)
  fed = fed_by_l2(timing, division, (kernel.d + kernel.dv)*tile.matrix.size)
  issued = matrix/(matrix/loop.serial + others)
  return Bound(halves(min(timing.share, fed)), min(waves, ENOUGH), int(ahead), halves(issued), halves(loop.serial), waves, halves(loop.overlap),
               -tile.block_m, -tile.block_n)

def tile_bound(spec:Spec, tile:Tile) -> Bound|None:
  """Compiles a forward kernel with `tile` and predicts the figures of its speed; None if it does not compile, or spills."""
  kernel = kernel_source(spec, tile)
  try: text = assembly(kernel.text, spec.arch)
  except CompileError: return None
  return bound_of(text, kernel, analyse(text, spec.arch, kernel.d, kernel.dv, queries=kernel.queries, title=str(spec)), tile)

def why_none(arch:str, d:int) -> str:
  """Returns the reason why no tile was found for head dimensions up to `d`."""
  chip = get_chip(arch)
  if not (space := candidates(chip, d)): return "none of those looked at fits"
  spec = Spec(arch, d)
  try: assembly(kernel_source(spec, amd_tile(problem_of_spec(spec), chip, space[0])).text, arch)
  except CompileError as e: return str(e)
  return "all of them spill registers"

def first_bound(arch:str, row:UpTo[ForwardShape], dtype:str=VARIANTS[0][0], mask:str=VARIANTS[0][1]) -> Bound|None:
  """Compiles the forward kernel with the tile shape in `row`, for one dtype and mask; returns predicted figures of speed, or None if the kernel
  spills."""
  spec = Spec(arch, row.up_to, dtype, mask)
  tile = amd_tile(problem_of_spec(spec), get_chip(arch), row)
  # by default with the first of VARIANTS, with which the kernel is slowest; None if the kernel doesn't compile, or spills registers
  return tile_bound(spec, tile)

def worst_bound(arch:str, row:UpTo[ForwardShape], each:Each=map) -> Bound|None:
  """Returns each figure of `Bound` at its smallest over the dtypes and masks of VARIANTS; None if a kernel spills or does not compile."""
  found = [x for x in each(first_bound, *zip(*[(arch, row, dtype, mask) for dtype, mask in VARIANTS])) if x is not None]
  # None if a kernel doesn't compile, or spills registers
  return Bound(*map(min, zip(*found, strict=True))) if len(found) == len(VARIANTS) else None

# ***** the best of a class *****

def best(ranked:Iterable[RankedTile], worst:Callable[[UpTo[ForwardShape]], Bound|None]) -> RankedTile|None:
  """Returns the tile whose speed in its slowest dtype and mask (`worst`) is the greatest; `ranked` is sorted, the fastest tile first."""
  found: RankedTile|None = None
  for x in ranked:
    # The worst figures are never greater than those of one variant, and `ranked` has the tiles by those, the greatest first: the search stops at the
    # first tile that cannot be better.
    if found is not None and x.bound <= found.bound: break
    if (bound := worst(x.row)) is not None and (found is None or bound > found.bound): found = RankedTile(x.row, bound)
  return found

def queries(x:RankedTile) -> int: return -x.bound.small

def rows_of_class(arch:str, ranked:list[RankedTile], each:Each=map) -> list[RankedTile]:
  """Returns the rows of a tile table for one range of head dimensions: the best tile, and, if this tile has many queries, also a smaller tile for few
  workgroups."""
  worst = functools.cache(lambda row: worst_bound(arch, row, each))
  first = best(ranked, worst)
  if first is None or queries(first) <= SMALL_TILE: return [first] if first is not None else []
  # for grids too small to fill a chip: at most SMALL_TILE queries
  second = best([x for x in ranked if queries(x) <= SMALL_TILE], worst)
  return [replace(first, row=replace(first.row, fills=FILLS)), *([second] if second is not None else [])]

@dataclass(frozen=True)
class Class:
  arch: str
  d: int
  ranked: tuple[RankedTile, ...]    # tiles that were tried and don't spill, by the bound of their first variant
  rows: tuple[RankedTile, ...]

def search_class(arch:str, d:int, each:Each=map) -> Class:
  """Searches for the best tile descriptions for head dimensions up to `d` (64, 128, 192 or 256) on a chip."""
  chip, ranked, rows = get_chip(arch), list[RankedTile](), list[RankedTile]()
  space = candidates(chip, d)
  def look(tiles:list[UpTo[ForwardShape]]) -> list[RankedTile]:
    ranked.extend(RankedTile(c, x) for c, x in zip(tiles, each(first_bound, [arch]*len(tiles), tiles), strict=True) if x is not None)
    ranked.sort(key=lambda x: x.bound, reverse=True)
    return rows_of_class(arch, ranked, each)
  heavy = {row: ENOUGH*held(row, chip, d) > chip.registers for row in space}
  # Tiles without prefetch, and tiles that need too many registers for ENOUGH waves per SIMD, are tried only if the tiles tried before are not good
  # enough.
  for prefetch, weight in ((1, False), (0, False), (1, True)):
    rows = look([row for row in space if row.shape.prefetch == prefetch and heavy[row] == weight])
    if rows and queries(rows[-1]) <= SMALL_TILE and all(x.bound.enough == ENOUGH for x in rows): break
  # Tiles with a second LDS buffer are tried only for the LEADING best tiles, and for the LEADING best with at most SMALL_TILE queries: a second
  # buffer hardly changes which tile is best.
  leading = {x.row for some in (ranked, [x for x in ranked if queries(x) <= SMALL_TILE]) for x in some[:LEADING]}
  rows = look([row for row in space if row.shape.prefetch == 2 and replace(row, shape=replace(row.shape, prefetch=1)) in leading])
  return Class(arch, d, tuple(ranked), tuple(rows))

def search(archs:Iterable[str], classes:Iterable[int], jobs:int) -> Iterator[Class]:
  """Searches for the best tiles for each chip and each of the largest head dimensions `classes`, in `jobs` processes; shows a progress line."""
  kinds = list(itertools.product(archs, classes))
  with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
    for arch, d in (bar := tqdm(kinds, unit="class")):
      def each(f:Callable[..., Bound|None], *args:Iterable[Any]) -> Iterator[Bound|None]:
        for x in pool.map(f, *args):
          bar.set_postfix_str(f"{arch} up to {d}: {next(count)} kernels compiled")
          yield x
      count = itertools.count(1)
      yield search_class(arch, d, each)

# ***** the table *****

ALONGSIDE = 78     # the column of a line where the comment with the figures begins

def row_of(x:RankedTile, llvm:int=EVERY) -> str:
  """Returns the table row of a tile as a line of Python, with its figures in a comment, for LLVM releases up to `llvm`."""
  row, shape = replace(x.row, llvm=llvm), x.row.shape
  def named(of:Any) -> list[str]:
    return [f"{f.name}={value}" for f in fields(of) if f.default is not MISSING and (value := getattr(of, f.name)) != f.default]
  numbers = ", ".join([str(getattr(shape, f.name)) for f in fields(shape) if f.default is MISSING] + named(shape))
  text = f"  UpTo({', '.join([str(row.up_to), f'ForwardShape({numbers})', *named(row)])}),"
  uses = ", ".join(f"{name} {getattr(x.bound, name)/2}%" for name in ("predicted", "serial", "issued", "overlap"))
  return f"{text:<{ALONGSIDE}}# {uses}, waves {x.bound.waves}"

RowsKey = tuple[int, int]   # class, and minus the newest release of LLVM that its rows serve: keys sort like the table
TableRows = dict[str, dict[RowsKey, list[str]]]   # family -> key -> lines

TABLE = re.compile(r"^(FORWARD_ON_\w+: tuple\[UpTo\[ForwardShape\], \.\.\.\] = \(\n)(.*?)^\)$", re.MULTILINE | re.DOTALL)

def file_of(family:str) -> Path:
  """Returns the path of the Python file with the table of forward tiles for a family of chips."""
  return Path(chips.__file__).parent/f"{family}.py"

def table_rows_in(text:str) -> dict[RowsKey, list[str]]:
  """Returns the lines of the table of forward tiles in a Python file's `text`, as {(largest head dimension, -LLVM release): lines}."""
  if (table := TABLE.search(text)) is None: raise ValueError("a family's file has no table FORWARD_ON_...: tuple[UpTo[ForwardShape], ...] = (")
  rows: dict[RowsKey, list[str]] = {}
  for line in table[2].splitlines():
    if (row := re.match(r"  UpTo\((\d+),(?:.* llvm=(\d+))?", line)) is None: raise ValueError(f"no row of a table: {line!r}")
    rows.setdefault((int(row[1]), -int(row[2] or EVERY)), []).append(line)
  return rows

def all_tables() -> TableRows:
  """Returns the tables of forward tiles of all families of chips for which tiles are searched, as lines of Python."""
  return {family: table_rows_in(file_of(family).read_text()) for family in (get_chip(a).family for a in SEARCHED)}

def tiles_in(lines:Iterable[str]) -> list[str]:
  """Returns the lines of a tile table without comments and LLVM releases, so that equal tiles give equal text."""
  return [re.sub(r", llvm=\d+", "", line.partition("#")[0]).strip() for line in lines]

def merged_rows(old:TableRows, found:Iterable[Class], llvm:int) -> TableRows:
  """Returns the tables `old`, with lines replaced by the tiles `found` in a search under the LLVM release `llvm`."""
  rows = {family: dict(lines) for family, lines in old.items()}
  up_to = llvm if llvm < LLVM else EVERY
  for x in found:
    own, key = rows.setdefault(get_chip(x.arch).family, {}), (x.d, -up_to)
    lines = [row_of(y, up_to) for y in x.rows]
    # rows for an older release are kept only if their tiles differ from the tiles of the next newer release
    newer = [k for k in own if k[0] == x.d and k < key]
    if newer and tiles_in(own[max(newer)]) == tiles_in(lines): own.pop(key, None)
    else: own[key] = lines
  return rows

def with_table(text:str, rows:Mapping[RowsKey, list[str]]) -> str:
  """Returns the text of a Python file, in which the lines of its tile table are replaced by `rows`."""
  lines = "".join(f"{line}\n" for key in sorted(rows) for line in rows[key])
  return TABLE.sub(lambda table: f"{table[1]}{lines})", text)

def differences(old:TableRows, new:TableRows) -> list[str]:
  """Returns a line of text for each tile that is in only one of the tables `old` and `new`."""
  # figures in the tables' comments, such as predicted speeds, are not compared
  def tiles(rows:TableRows, family:str, key:RowsKey) -> list[str]:
    return [line.partition("#")[0].strip() for line in rows.get(family, {}).get(key, [])]
  lines = []
  for family in new:
    for key in sorted({*old.get(family, {}), *new[family]}):
      before, after = tiles(old, family, key), tiles(new, family, key)
      if before != after: lines += [f"{family}: - {x}" for x in before if x not in after] + [f"{family}: + {x}" for x in after]
  return lines
