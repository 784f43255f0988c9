"""Searches for the forward kernel's tile descriptions (numbers of waves and keys of a tile, for example), and makes the tables of tile descriptions
in attn/chips. The tables have the best tile descriptions for each class of head dimensions: up to 64, 128, 192 and 256.

    python -m attn.tune                        prints the chosen tile descriptions, and where the tables have others
    python -m attn.tune --check                also fails if the tables have others
    python -m attn.tune --write                rewrites the tables
    python -m attn.tune --arch gfx942 --d 128  searches for one chip and one class; --all prints every candidate that compiles, best first
    python -m attn.tune --gradient dkdv        prints the best tile descriptions of a backward kernel, whose table is written by hand
    python -m attn.tune --near                 looks near the tiles in use, by the predicted time of a problem, and prints the bytes that tiles move;
                                               --gradient dq, --option softcap: only of these kernels; --csv FILE: writes into FILE"""
from __future__ import annotations
import multiprocessing, os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from attn.extras import needs
with needs("isa", "python -m attn.tune", __name__):
  import click
  from rich.console import Console
  from rich.table import Table
  from attn.search.backward import ranked_backward
  from attn.search.forward import VARIANTS, Class, all_tables, differences, file_of, merged_rows, search, why_none, with_table
  from attn.search.near import near_table, near_text, read_near
from attn.chips import SEARCHED, get_chip
from attn.choose.backward_tiles import amd_backward_tile, backward_tile
from attn.choose.tiles import amd_tile
from attn.cache.tuned import CLASSES
from attn.compilers.clang import toolchain
from attn.isa.source import BACKWARD, FORWARD, ONE_OPTION, Spec, problem_of_spec

def bounds_table(found:Iterable[Class], everything:bool) -> Table:
  table = Table("chip", "D up to", "tile", "waves", "q tiles", "keys", "options", "predicted", "serial", "issued", "overlap", "waves/SIMD",
                title=f"predictions and bounds, not measured; {toolchain().version}")
  for x in found:
    for y in x.ranked if everything else x.rows:
      c, b = y.row.shape, y.bound
      tile = amd_tile(problem_of_spec(Spec(x.arch, x.d)), get_chip(x.arch), y.row)
      table.add_row(x.arch, str(x.d), str(tile), *map(str, (c.waves, c.q_tiles, c.block_n)), tile.options + f" fills={y.row.fills}"*(y.row.fills > 0),
                    *(f"{v/2}%" for v in (b.predicted, b.serial, b.issued, b.overlap)), str(b.waves))
  return table

def backward_table(arch:str, d:int, kernel:str, jobs:int, everything:bool) -> Table:
  """Makes a table of the best tile descriptions of a backward kernel, "dq" or "dkdv", for head dimensions up to `d`."""
  # With `everything` all tile descriptions are listed. `jobs` is the number of processes. A star marks the tile description in use.
  chip, p = get_chip(arch), problem_of_spec(Spec(arch, d))
  in_use = amd_backward_tile(p, chip, kernel == "dkdv")
  with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool: found = ranked_backward(arch, d, kernel, pool.map)
  tiles = [backward_tile(p, chip, x.row, kernel == "dkdv") for x in found]
  table = Table("tile", "options", "predicted", "serial", "issued", "overlap", "waves/SIMD", "in use",
                title=f"{arch}, D up to {d}, {kernel}: predictions and bounds, not measured; {toolchain().version}")
  for i, (x, tile) in enumerate(zip(found, tiles)):
    if not everything and i >= SHOWN and tile != in_use: continue
    uses = (f"{v/2}%" for v in (x.bound.predicted, x.bound.serial, x.bound.issued, x.bound.overlap))
    table.add_row(str(tile), tile.options, *uses, str(x.bound.waves), "*"*(tile == in_use))
  return table

def search_near(specs:list[Spec], jobs:int, path:Path|None) -> None:
  """Searches, for each kernel of `specs`, for faster tiles that differ little from the tile in use, and prints them as CSV or writes them to
  `path`."""
  rows = read_near(path.read_text()) if path is not None and path.exists() else []
  if path is None: click.echo(near_text([]), nl=False)
  with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
    for lines in pool.map(near_table, specs):
      rows += lines
      if path is None: click.echo(near_text(lines).partition("\n")[2], nl=False)
      # After each search; the file keeps its rows of other kernels.
      else: path.write_text(near_text(rows))

SHOWN = 5     # tiles of a backward kernel that are printed without --all

@click.command()
@click.option("--arch", "archs", multiple=True, type=click.Choice(SEARCHED), help="Search only these chips. [default: one chip of each family]")
@click.option("--d", "classes", multiple=True, type=click.Choice([str(d) for d in CLASSES]), help="Only this class. [default: all classes]")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True, help="Number of processes.")
@click.option("--all", "everything", is_flag=True, help="Print every tile whose bf16 causal kernel compiles without spills.")
@click.option("--write", is_flag=True, help="Rewrite the searched part of the tables.")
@click.option("--check", is_flag=True, help="Fail if the tables have other tiles.")
@click.option("--gradient", type=click.Choice(BACKWARD), help="Search a backward kernel's tiles; its table is written by hand.")
@click.option("--near", is_flag=True, help="Look only near the tile in use, by the predicted time of a problem (bf16, causal).")
@click.option("--option", "options", multiple=True, type=click.Choice(("none", *ONE_OPTION)), default=("none",), show_default=True,
              help="With --near: search for problems with this option; none is for problems without options.")
@click.option("--csv", "path", type=click.Path(dir_okay=False, path_type=Path), help="With --near: write the rows into this file.")
def main(archs:tuple[str, ...], classes:tuple[str, ...], jobs:int, everything:bool, write:bool, check:bool, gradient:str|None, near:bool,
         options:tuple[str, ...], path:Path|None) -> None:
  """Choose the tile descriptions of the forward kernel: compile each candidate, and predict the kernel's speed from the machine code. --gradient
  ranks the tile descriptions of a backward kernel instead. Nothing is measured, and no GPU is needed."""
  if write and check: raise click.UsageError("give --write or --check, not both")
  if near:
    if write or check or everything: raise click.UsageError("--near prints a table: --write, --check and --all are for the search of forward tiles")
    kernels = (FORWARD, *BACKWARD) if gradient is None else (gradient,)
    search_near([Spec(arch, int(d), *VARIANTS[0], kernel, option.replace("none", "")) for arch in archs or SEARCHED
                 for d in classes or map(str, CLASSES) for kernel in kernels for option in options], jobs, path)
    return
  if path is not None or options != ("none",): raise click.UsageError("--csv and --option are for --near")
  if gradient is not None:
    if write or check: raise click.UsageError(f"--{'write' if write else 'check'} with --gradient: tables of backward kernels are written by hand")
    tables = [backward_table(arch, int(d), gradient, jobs, everything) for arch in archs or SEARCHED for d in classes or map(str, CLASSES)]
    for table in tables: Console(width=None if Console().is_terminal else 160).print(table)
    return
  found = list(search(archs or SEARCHED, [int(d) for d in classes] or CLASSES, jobs))
  Console(width=None if Console().is_terminal else 160).print(bounds_table(found, everything))
  if empty := [f"{x.arch} up to {x.d}: {why_none(x.arch, x.d)}" for x in found if not x.rows]:
    raise click.ClickException("no tile compiles without spills:\n" + "\n".join(empty))
  changes = differences(old := all_tables(), new := merged_rows(old, found, toolchain().llvm))
  click.echo("\n".join(changes) if changes else "attn/chips has these tiles")
  if write:
    for family, rows in new.items(): file_of(family).write_text(with_table(file_of(family).read_text(), rows))
  elif check and changes: raise click.ClickException("attn/chips has other tiles; to update them: python -m attn.tune --write")

if __name__ == "__main__":
  try: main(prog_name="python -m attn.tune")
  except (ValueError, RuntimeError) as e: raise SystemExit(f"python -m attn.tune: {e}") from None
