"""Searches for tiles that differ in a few sizes from the tile in use, by the predicted time of a whole problem. `python -m attn.tune --near` prints
the result."""
from __future__ import annotations
import csv, functools, io, itertools, math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any
from attn.cache.tuned import CLASSES
from attn.chips import SEARCHED, get_chip
from attn.chips.shapes import BackwardShape, ForwardShape, UpTo
from attn.choose.backward_tiles import amd_backward_tile, backward_tile
from attn.choose.rows import misfit
from attn.choose.tiles import amd_tile, choose_amd_tile
from attn.compilers.clang import assembly, toolchain
from attn.isa.costs import report_of_text
from attn.isa.source import BACKWARD, FORWARD, ONE_OPTION, Shape, Spec, kernel_source, problem_of_spec
from attn.isa.timing.kernels import ASKED, of_source
from attn.isa.timing.predict import Prediction, work_of_grid
from attn.isa.timing.published import csv_text
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.search.backward import BACKWARD_SPACE, backward_held
from attn.search.forward import LARGEST_TILE, SPACE, VARIANTS, held, whole_and_smooth
from attn.tinygrad_compat import CompileError

# The search starts from the tile in use. It tries every tile that differs from the best one so far in one number, such as the waves of a workgroup,
# and goes on from the fastest of them until no such tile is faster. Of all tiles that it tried, the best one gains the most in that variant of the
# kernel (dtype, mask, with an lse or without) in which it gains the least. The time counts the matrix work, the caches and the memory of a card at
# the clock that it sustains under matrix work. Beside each time stand the bytes that the tile moves.

GAIN = 0.03          # a table row is changed only if every variant of the kernel is predicted to be faster by this share
FASTER_BY = 0.01     # the search goes on from a tile only if it is faster than the best one so far by this share
NUMBERS_CHANGED: dict[str, Mapping[str, tuple[Any, ...]]] = {     # by kernel: the numbers of a shape that the search changes
  FORWARD: SPACE, "dkdv": (of_dkdv := {**BACKWARD_SPACE, "read_ahead": (0, 1, 3)}),
  "dq": {name: values for name, values in of_dkdv.items() if name != "passes"}}

@dataclass(frozen=True)
class Timed:
  """A tile with the predicted time of a problem and the predicted number of bytes that its kernel reads and writes."""
  row: UpTo[Any]
  tile: Tile|BackwardTile
  prediction: Prediction
  workgroups: int
  @property
  def ms(self) -> float: return 1e3*self.prediction.seconds
  @property
  def ms_apart(self) -> float: return 1e3*self.prediction.seconds_apart     # if workgroups drift apart (attn/isa/timing/memory.py)
  @property
  def read(self) -> float:
    """Mean number of bytes that a workgroup moves from and to L2."""
    return self.prediction.bytes["L2"]/self.workgroups

# ***** the tiles to try *****

def tile_of(spec:Spec, row:UpTo[Any], shape:Shape=ASKED) -> Tile|BackwardTile:
  p, chip = problem_of_spec(spec, shape), get_chip(spec.arch)
  return amd_tile(p, chip, row) if spec.kernel == FORWARD else backward_tile(p, chip, row, spec.kernel == "dkdv")

def row_in_use(spec:Spec, shape:Shape=ASKED) -> UpTo[Any]:
  """Returns the tile that attn uses for a problem of size `shape`, as a row of a tile table."""
  p, chip = problem_of_spec(spec, shape), replace(get_chip(spec.arch), llvm=toolchain().llvm)
  tile = choose_amd_tile(p, chip) if spec.kernel == FORWARD else amd_backward_tile(p, chip, spec.kernel == "dkdv")
  return row_of_tile(spec, tile)

def row_of_tile(spec:Spec, tile:Tile|BackwardTile) -> UpTo[Any]:
  """Makes a row of a tile table from a tile description."""
  # a tile may be smaller than the row from which it was made
  kind = ForwardShape if spec.kernel == FORWARD else BackwardShape
  shape = kind(**{f.name: getattr(tile, f.name) for f in fields(kind)})
  return UpTo(spec.d, shape, matrix=get_chip(spec.arch).matrix[spec.dtype].index(tile.matrix))

def usable(spec:Spec, row:UpTo[Any]) -> bool:
  """Returns whether a kernel can use the tile: whole matrix tiles, no bank conflicts, few enough LDS bytes and registers."""
  chip, p, tile = get_chip(spec.arch), problem_of_spec(spec, ASKED), tile_of(spec, row)
  if misfit(p, chip, row, tile) is not None or not whole_and_smooth(chip, tile.matrix, row.shape.block_n, spec.d): return False
  if isinstance(tile, BackwardTile): return backward_held(tile, spec.d) <= chip.vgprs
  return held(row, chip, spec.d) <= chip.vgprs and tile.block_m <= LARGEST_TILE

def near_rows(spec:Spec, row:UpTo[Any]) -> Iterator[UpTo[Any]]:
  """Yields usable tiles that differ in one size from the tile in `row`, as rows of a tile table."""
  for name, values in NUMBERS_CHANGED[spec.kernel].items():
    for value in values:
      if value == getattr(row.shape, name) or not usable(spec, near := replace(row, shape=replace(row.shape, **{name: value}))): continue
      if (made := row_of_tile(spec, tile_of(spec, near))) != row: yield made

# ***** the time of one tile *****

@functools.cache
def timed(spec:Spec, row:UpTo[Any], shape:Shape=ASKED) -> Timed|None:
  """Compiles a kernel with the tile shape in `row`, and predicts the time of a problem of size `shape`; None if the kernel spills."""
  chip, tile = get_chip(spec.arch), tile_of(spec, row, shape)
  kernel = kernel_source(spec, tile, shape=shape)
  try: text = assembly(kernel.text, spec.arch)
  except CompileError: return None
  resources = report_of_text(spec, kernel, text).resources
  if resources.scratch or resources.sgpr_spills: return None
  found = of_source(spec, kernel, text, shape)
  assert found.problem is not None and found.division is not None
  # the chip's first card with a published GEMM, at the clock that this GEMM sustains; else the first card with a known clock, at this clock
  card = next((card for card in chip.cards if card.gemm), next(card for card in chip.cards if card.ghz))
  prediction = found.on_cards(card.name)[-1]
  return Timed(row, tile, prediction, len(work_of_grid(found.problem, found.division)))

TileTimer = Callable[[Spec, UpTo[Any], Shape], Timed|None]     # predicts the time of a kernel with a tile, for a problem of this size

def climb(spec:Spec, time:TileTimer=timed) -> list[Timed]:
  """Searches from the tile in use, step by step, for faster tiles; returns all that were tried, the fastest first. `time` predicts a tile's time."""
  tried: dict[UpTo[Any], Timed|None] = {}
  def look(row:UpTo[Any]) -> None:
    if row not in tried: tried[row] = time(spec, row, ASKED)
  best = row_in_use(spec)
  look(best)
  while True:
    so_far = math.inf if (now := tried[best]) is None else now.ms
    for row in near_rows(spec, best): look(row)
    ranked = sorted((x for x in tried.values() if x is not None), key=lambda x: x.ms)
    if not ranked or ranked[0].ms > (1 - FASTER_BY)*so_far: return ranked
    best = ranked[0].row

def gain_of(spec:Spec, row:UpTo[Any], time:TileTimer=timed, enough:float=-math.inf) -> float:
  """Returns by what fraction the tile in `row` is faster than the tile in use, in the worst of several dtypes and masks: 0.05 means 5 %."""
  found = math.inf
  # The smallest fraction over the dtypes and masks of VARIANTS, for forward without and with an lse, and whether workgroups run together or drift
  # apart. Minus infinity if a kernel with the tile doesn't compile or spills, or if the fraction is not more than `enough`.
  for (dtype, mask), lse in itertools.product(VARIANTS, (False, True) if spec.kernel == FORWARD else (False,)):
    variant, shape = replace(spec, dtype=dtype, mask=mask), replace(ASKED, lse=lse)
    before, after = time(variant, row_in_use(variant, shape), shape), time(variant, row, shape)
    if before is None or after is None: return -math.inf
    if (found := min(found, 1 - after.ms/before.ms, 1 - after.ms_apart/before.ms_apart)) <= enough: return -math.inf
  return found

def surest(spec:Spec, used:Timed, tried:Iterable[Timed], time:TileTimer=timed) -> tuple[Timed, float]|None:
  """Returns (tile, gain) of the tile in `tried` that gains most in its worst dtype and mask; None if no tile gains more than GAIN."""
  found = None
  for x in tried:
    if x.ms > (1 - GAIN)*used.ms: continue
    gain = gain_of(spec, x.row, time, found[1] if found is not None else GAIN)
    if gain > -math.inf: found = x, gain
  return found

# ***** the table *****

NEAR_COLUMNS = ("chip", "D", "kernel", "option", "which tile", "tile", "predicted, ms", "MB that a workgroup moves", "GB from L2",
                "GB from Infinity Cache", "GB from memory", "gain in the worst variant", "result")
NAME_CELLS = slice(0, 4)     # the columns that name a kernel
IN_TABLE, BEST, BOTH_IN_ONE, NONE = "in the table", "best predicted", "in the table, the best", "none"     # values of the column "which tile"

def cells_of(spec:Spec, which:str, x:Timed, gain:str="", result:str="") -> tuple[str, ...]:
  gb = (f"{x.prediction.bytes[level]/1e9:.2f}" if level in x.prediction.bytes else "" for level in ("L2", "Infinity Cache", "memory"))
  return (spec.arch, str(spec.d), spec.kernel, spec.option, which, tile_text(x.tile), f"{x.ms:.3f}", f"{x.read/1e6:.2f}", *gb, gain, result)

def tile_text(tile:Tile|BackwardTile) -> str: return ", ".join(filter(None, (str(tile), tile.options)))

# Why a table row stays although the search finds a tile that is better: chip, D, kernel and option -> what the search does not compile
NOT_TAKEN = {tuple(kernel.split("/")): why for why, kernels in {
  "kept: LDS has room for only six waves of the other on four SIMDs": "gfx90a/64/dkdv/ gfx90a/64/dkdv/window gfx90a/64/dkdv/softcap",
  "kept: the other spills with uneven rows": "gfx950/128/forward/ gfx942/192/dkdv/alibi gfx950/192/dkdv/softcap",
  "kept: the other spills if query heads share keys":
    "gfx950/64/dkdv/bias gfx950/128/dkdv/bias gfx1201/128/dkdv/bias gfx1201/192/dkdv/bias gfx1100/128/dkdv/softcap",
  "kept: it loads nothing ahead, and is to be measured first": "gfx1100/128/forward/",
  "kept: the other was not compiled for uneven rows and shared keys": """
    gfx90a/64/forward/window gfx90a/64/forward/softcap gfx90a/64/forward/alibi gfx90a/128/forward/window gfx90a/128/forward/bias
    gfx90a/192/forward/alibi gfx90a/64/dq/window gfx90a/128/dq/softcap gfx90a/128/dq/bias gfx90a/256/dq/softcap gfx90a/256/dq/alibi
    gfx90a/256/dq/dropout gfx90a/192/dkdv/softcap gfx942/192/dkdv/dropout gfx950/192/dkdv/alibi gfx950/192/dkdv/bias gfx950/192/dkdv/dropout
    gfx1100/256/dq/window gfx1100/256/dq/softcap gfx1100/192/dkdv/bias"""}.items()
              for kernel in kernels.split()}

def result_of(spec:Spec, gain:float) -> str:
  """Returns "better" if a faster tile that the search found should replace the table's tile, otherwise why the table keeps its tile."""
  # `gain` is the share by which this tile is faster in the worst variant of `spec`
  if gain == -math.inf: return "kept: the other spills in a variant"
  if gain < GAIN: return f"kept: the gain is below {GAIN:.0%} in a variant"
  return NOT_TAKEN.get((spec.arch, str(spec.d), spec.kernel, spec.option), "better")

def near_table(spec:Spec, time:TileTimer=timed) -> list[tuple[str, ...]]:
  """Returns one or two rows of a printed table: the tile in use, and the best tile that the search finds if it is faster; or that all tiles spill."""
  # The line of the tile in use is left out if it does not compile or spills. The best tile's line is left out if it is not clearly faster
  # (FASTER_BY). If no tile gains enough in every variant, the best tile is the fastest one.
  used = time(spec, row_in_use(spec), ASKED)
  if not (tried := climb(spec, time)):
    return [(spec.arch, str(spec.d), spec.kernel, spec.option, NONE, *[""]*7, "all tiles near that of the table spill, as it does")]
  best, *others = tried
  if used is None: return [cells_of(spec, BEST, best, result="the tile of the table spills")]
  if best.row == used.row or best.ms > (1 - FASTER_BY)*used.ms: return [cells_of(spec, BOTH_IN_ONE, used)]
  best, gain = surest(spec, used, (best, *others), time) or (best, gain_of(spec, best.row, time))
  return [cells_of(spec, IN_TABLE, used), cells_of(spec, BEST, best, "" if gain == -math.inf else f"{gain:.1%}", result_of(spec, gain))]

def read_near(text:str) -> list[tuple[str, ...]]:
  """Reads the text of docs/data/search_near.csv, and returns its rows."""
  head, *rows = map(tuple, csv.reader(io.StringIO(text)))
  if head != NEAR_COLUMNS: raise ValueError(f"the columns are {', '.join(head)}, and must be {', '.join(NEAR_COLUMNS)}")
  return rows

def near_text(rows:Iterable[tuple[str, ...]]) -> str:
  """Returns the text of the file docs/data/search_near.csv with the given `rows`, which `near_table` makes."""
  last: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
  # if a kernel was searched several times, only the rows of the last search are written
  for kernel, lines in itertools.groupby(rows, key=lambda row: row[NAME_CELLS]): last[kernel] = list(lines)
  # sorted by chip, head dimension, kernel and option
  order = (SEARCHED, [str(d) for d in CLASSES], (FORWARD, *BACKWARD), ("", *ONE_OPTION))
  kernels = sorted(last, key=lambda kernel: [known.index(x) for known, x in zip(order, kernel)])
  return csv_text(NEAR_COLUMNS, (line for kernel in kernels for line in last[kernel]))
