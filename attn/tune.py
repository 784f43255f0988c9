"""The search that makes attn/tiles_table.py: over bounds from machine code, not over measurements.

    python -m attn.tune                        prints what it would choose, and what the table has not
    python -m attn.tune --check                the same, and fails where the table has something else
    python -m attn.tune --write                rewrites the table
    python -m attn.tune --arch gfx942 --d 128  one class only; with --all also every tile that compiles, best first

A row is for one family of matrix units and for head dimensions up to one of CLASSES. Its tiles are those of `candidates` that do not spill, and the best
has the greatest `Bound`, whose figures are the worst over fp16 and bf16, full and causal. Where that one takes more than SMALL queries, the best of those
that don't comes after it, for grids too small to fill a chip. On a GPU, TUNE=1 of bench.py goes by time instead.
"""
from __future__ import annotations
import itertools, multiprocessing, os, re
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple
import click
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from attn.arch import Arch, get_arch
from attn.dispatch import fits, tile_of
from attn.fragment import MATRIX
from attn.isa.compiler import CompileError, assembly
from attn.isa.model import Pipes, pipes
from attn.isa.report import Report, analyse
from attn.isa.source import DTYPES, MASKS, Spec, kernel_source, problem_of
from attn.kernels.tiles import UNIT, Candidate, Tile, contraction, round_up
from attn.tuned import CLASSES

ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")   # one of each family
VARIANTS = [(dtype, mask) for mask in MASKS for dtype in DTYPES]
SPACE: dict[str, tuple[int, ...]] = {
  "waves": (8, 4), "q_tiles": (2, 1), "block_n": (128, 64, 32, 16), "q_in_lds": (False, True), "fenced": (False, True)}
SMALL = 128     # queries of a tile that every grid may have
FILLS = 256     # workgroups that a tile of more queries has to make, about one for each compute unit of the largest chips
ENOUGH = 2      # waves per SIMD: one computes while the other waits
TABLE = Path(__file__).parent/"tiles_table.py"

class Bound(NamedTuple):
  """What tiles are ranked by, the greatest first. Utilisations of the matrix unit in the hot loop are in tenths of a percent."""
  enough: int     # waves per SIMD, but no more than ENOUGH
  issued: int     # where nothing overlaps: the serial bound, in which every other instruction (LDS, waits, barriers, scalars) takes an issue slot too
  waves: int      # per SIMD, of the workgroups for which registers and LDS have room
  overlap: int    # where everything overlaps
  small: int      # minus the queries of a workgroup
  short: int      # minus the keys of a trip
  serial: int     # the serial bound, for the reader: it comes too late to decide

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

def report_of(spec:Spec, tile:Tile) -> Report|None:
  """The machine code of the forward kernel with this tile, None where it doesn't compile."""
  kernel = kernel_source(spec, tile)
  try: return analyse(assembly(kernel.text, spec.arch), spec.arch, kernel.d, kernel.dv, queries=kernel.queries, title=str(spec))
  except CompileError: return None

def waves_of(report:Report, tile:Tile, cu:Pipes) -> int:
  """Waves per SIMD, as many as whole workgroups make."""
  r = report.resources
  assert r.waves_by_registers is not None and r.waves_by_lds is not None
  groups = int(min(r.waves_by_registers, r.waves_by_lds)*cu.simds)//tile.waves
  return groups*tile.waves//cu.simds

def bound_of(report:Report|None, tile:Tile) -> Bound|None:
  """None where the kernel doesn't compile, or spills."""
  if report is None or (loop := report.loop) is None: return None
  r, cu = report.resources, pipes(report.arch)
  if r.vgpr_spills or r.sgpr_spills or r.scratch: return None
  matrix, waves = loop.cycles["matrix"], waves_of(report, tile, cu)
  others = cu.valu*(loop.instructions - loop.valu - loop.kinds["matrix"])
  def tenths(x:float) -> int: return round(1000*x)
  return Bound(min(waves, ENOUGH), tenths(matrix/(matrix/loop.serial + others)), waves, tenths(loop.overlap), -tile.block_m, -tile.block_n,
               tenths(loop.serial))

def first_bound(arch:str, c:Candidate, dtype:str=DTYPES[0], mask:str=MASKS[0]) -> Bound|None:
  """The bound of one tile for one variant of the kernel."""
  spec = Spec(arch, c.up_to, dtype, mask)
  tile = tile_of(problem_of(spec), get_arch(arch), c)
  return bound_of(report_of(spec, tile), tile)

def worst_bound(arch:str, c:Candidate) -> Bound|None:
  """Figure by figure the worst over the variants."""
  found = []
  for dtype, mask in VARIANTS:
    if (bound := first_bound(arch, c, dtype, mask)) is None: return None
    found.append(bound)
  return Bound(*map(min, zip(*found, strict=True)))

# ***** the best of a class *****

def best(ranked:Iterable[Found], worst:Callable[[Candidate], Bound|None]) -> Found|None:
  """The best by its worst variant. `ranked` is by the bound of one variant, the greatest first; no worst one is greater, so few are looked at."""
  found: Found|None = None
  for x in ranked:
    if found is not None and x.bound <= found.bound: break
    if (bound := worst(x.candidate)) is not None and (found is None or bound > found.bound): found = Found(x.candidate, bound)
  return found

def queries(x:Found) -> int: return -x.bound.small

def choose(arch:str, ranked:list[Found]) -> list[Found]:
  """The rows of a class: the best tile, and the best of SMALL queries at most where that is another."""
  known: dict[Candidate, Bound|None] = {}
  def worst(c:Candidate) -> Bound|None:
    if c not in known: known[c] = worst_bound(arch, c)
    return known[c]
  first = best(ranked, worst)
  if first is None or queries(first) <= SMALL: return [first] if first is not None else []
  second = best([x for x in ranked if queries(x) <= SMALL], worst)
  return [replace(first, candidate=replace(first.candidate, fills=FILLS)), *([second] if second is not None else [])]

@dataclass(frozen=True)
class Class:
  arch: str
  d: int
  ranked: tuple[Found, ...]    # every tile that compiles without spills, by the bound of its fp16 kernel without a mask
  rows: tuple[Found, ...]

def _first(job:tuple[str, Candidate]) -> Bound|None: return first_bound(*job)
def _choose(job:tuple[str, list[Found]]) -> list[Found]: return choose(*job)

def search(archs:Iterable[str], classes:Iterable[int], jobs:int, quiet:bool=False) -> list[Class]:
  """Every class of every chip, in `jobs` processes."""
  kinds = list(itertools.product(archs, classes))
  tiles = [(arch, c) for arch, d in kinds for c in candidates(get_arch(arch), d)]
  with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
    of: dict[tuple[str, int], list[Found]] = {kind: [] for kind in kinds}
    for (arch, c), bound in zip(tiles, tqdm(pool.map(_first, tiles), "tiles", len(tiles), disable=quiet), strict=True):
      if bound is not None: of[arch, c.up_to].append(Found(c, bound))
    for found in of.values(): found.sort(key=lambda x: x.bound, reverse=True)
    rows = list(tqdm(pool.map(_choose, [(arch, of[arch, d]) for arch, d in kinds]), "classes", len(kinds), disable=quiet))
  return [Class(arch, d, tuple(of[arch, d]), tuple(r)) for (arch, d), r in zip(kinds, rows, strict=True)]

# ***** the table *****

HEADER = '''"""The tiles that the forward kernel may have on each family of matrix units, best first: the first one that fits is taken.

Made by a search over bounds from machine code; none of it was measured. Rewritten by: python -m attn.tune --write
Beside each row the worst over fp16 and bf16, full and causal: bounds on the use of the matrix unit, and waves per SIMD.
"""
from attn.kernels.tiles import Candidate

CANDIDATES: dict[str, tuple[Candidate, ...]] = {
'''

def row_of(x:Found) -> str:
  """A line of the table."""
  c = x.candidate
  options = [f"{f.name}={getattr(c, f.name)}" for f in fields(c)[4:] if getattr(c, f.name) != f.default]
  text = f"    Candidate({', '.join([str(getattr(c, f.name)) for f in fields(c)[:4]] + options)}),"
  return f"{text:<64}# serial {x.bound.serial/10:.1f}%, issued {x.bound.issued/10:.1f}%, overlap {x.bound.overlap/10:.1f}%, waves {x.bound.waves}"

Rows = dict[str, dict[int, list[str]]]   # family -> class -> lines

def rows_in(text:str) -> Rows:
  """The lines of a table's text."""
  found: Rows = {}
  for line in text.splitlines():
    if (family := re.match(r'  "(\w+)": \(', line)) is not None: rows = found.setdefault(family[1], {})
    elif (row := re.match(r"    Candidate\((\d+),", line)) is not None: rows.setdefault(int(row[1]), []).append(line)
  return found

def rows_of(found:Iterable[Class]) -> Rows:
  rows: Rows = {}
  for x in found: rows.setdefault(get_arch(x.arch).family, {})[x.d] = [row_of(y) for y in x.rows]
  return rows

def file_text(rows:Rows) -> str:
  """The table's text."""
  lines = []
  for family in (get_arch(a).family for a in ARCHS):
    if family in rows: lines += [f'  "{family}": (', *(line for d in CLASSES for line in rows[family].get(d, [])), "  ),"]
  return HEADER + "\n".join([*lines, "}"]) + "\n"

def differences(old:Rows, new:Rows) -> list[str]:
  """What `new` would change in `old`, of the classes that it has."""
  lines = []
  for family, d in ((f, d) for f in new for d in new[f]):
    before, after = old.get(family, {}).get(d, []), new[family][d]
    lines += [f"{family}: - {x.strip()}" for x in before if x not in after] + [f"{family}: + {x.strip()}" for x in after if x not in before]
  return lines

# ***** the command *****

def show(found:Iterable[Class], everything:bool) -> Table:
  table = Table("chip", "D up to", "tile", "waves", "q tiles", "keys", "options", "serial", "issued", "overlap", "waves/SIMD",
                title="bounds, not measured")
  for x in found:
    for y in x.ranked if everything else x.rows:
      c, b = y.candidate, y.bound
      options = " ".join(name for name in ("q_in_lds", "fenced") if getattr(c, name)) + f" fills={c.fills}"*(c.fills > 0)
      table.add_row(x.arch, str(x.d), f"{queries(y)}x{c.block_n}", *map(str, (c.waves, c.q_tiles, c.block_n)), options,
                    *(f"{v/10:.1f}%" for v in (b.serial, b.issued, b.overlap)), str(b.waves))
  return table

@click.command()
@click.option("--arch", "archs", multiple=True, type=click.Choice(ARCHS), help="Only these. [default: one chip of each family]")
@click.option("--d", "classes", multiple=True, type=click.Choice([str(d) for d in CLASSES]), help="Only this class. [default: all of them]")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True, help="Processes.")
@click.option("--all", "everything", is_flag=True, help="Print every tile that compiles without spills, by its fp16 kernel without a mask.")
@click.option("--write", is_flag=True, help="Rewrite the table, of what was searched.")
@click.option("--check", is_flag=True, help="Fail where the table has something else.")
def main(archs:tuple[str, ...], classes:tuple[str, ...], jobs:int, everything:bool, write:bool, check:bool) -> None:
  """Choose the tiles of the forward kernel by a search over bounds from machine code. Nothing is measured, and no GPU is needed."""
  if write and check: raise click.UsageError("--write or --check: one of them")
  found = search(archs or ARCHS, [int(d) for d in classes] or CLASSES, jobs)
  Console(width=None if Console().is_terminal else 160).print(show(found, everything))
  if empty := [f"{x.arch} up to {x.d}" for x in found if not x.rows]:
    raise click.ClickException(f"no tile compiles without spills: {', '.join(empty)}")
  old, new = rows_in(TABLE.read_text()), rows_of(found)
  changes = differences(old, new)
  click.echo("\n".join(changes) if changes else f"{TABLE.name} has these rows")
  if write: TABLE.write_text(file_text({f: {**old.get(f, {}), **new.get(f, {})} for f in {**old, **new}}))
  elif check and changes: raise click.ClickException(f"{TABLE.name} has other rows: python -m attn.tune --write")

if __name__ == "__main__":
  try: main(prog_name="python -m attn.tune")
  except (ValueError, RuntimeError) as e: raise SystemExit(f"python -m attn.tune: {e}") from None
