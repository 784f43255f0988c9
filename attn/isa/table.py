"""Prints reports as tables: every figure of a few kernels side by side, the difference between two kernels, or one line per kernel."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from rich.table import Table
from attn.isa.report import HotLoop, Report
from attn.isa.roofline import published, rated, roofline
from attn.kernels.tiles.amd import Tile
from attn.problem import Problem

Cell = int|float|str|None

def _listed(counts:dict[str, int]) -> str: return " + ".join(f"{n} x {name}" for name, n in counts.items()) or "0"
def _kind(*kinds:str) -> Callable[[HotLoop], Cell]: return lambda x: sum(x.kinds[k] for k in kinds)
def _cycles(pipe:str) -> Callable[[HotLoop], Cell]: return lambda x: x.cycles[pipe]

# docs/isa.md says what each figure means
RESOURCES: dict[str, Callable[[Report], Cell]] = {
  "VGPR": lambda r: r.resources.vgpr, "AGPR": lambda r: r.resources.agpr, "SGPR": lambda r: r.resources.sgpr,
  "VGPR spills": lambda r: r.resources.vgpr_spills, "SGPR spills": lambda r: r.resources.sgpr_spills, "scratch bytes": lambda r: r.resources.scratch,
  "LDS bytes": lambda r: r.resources.lds, "threads": lambda r: r.resources.threads,
  "waves/SIMD by registers": lambda r: r.resources.waves_by_registers, "waves/SIMD by LDS": lambda r: r.resources.waves_by_lds,
}
LOOP: dict[str, Callable[[HotLoop], Cell]] = {
  "instructions": lambda x: x.instructions, "with side blocks": lambda x: x.instructions_in_all,
  "matrix": lambda x: _listed(x.matrix), "exp": _kind("exp"), "other transcendental": _kind("transcendental"),
  "VALU": lambda x: x.valu, "  of it packed": _kind("packed"), "  of it dual": _kind("dual"), "  of it AGPR moves": _kind("acc_move"),
  "  of it cross-lane": _kind("lane"), "  of it DPP": lambda x: x.dpp, "  of it conversions": lambda x: x.conversions,
  "LDS permute": _kind("lds_permute"), "LDS reads": lambda x: _listed(x.lds_read), "LDS writes": lambda x: _listed(x.lds_write),
  "global loads": lambda x: _listed(x.load_widths), "  of them to LDS": _kind("load_to_lds"), "global stores": _kind("store"),
  "scratch accesses": _kind("scratch"), "SALU": _kind("salu"), "scalar loads": _kind("scalar_load"), "branches": _kind("branch"),
  "waits": _kind("wait"), "barriers": _kind("barrier"), "nops and hints": _kind("nop", "hint"), "other": _kind("other", "memory_other", "lds_other"),
}
BOUNDS: dict[str, Callable[[HotLoop], Cell]] = {
  "scores per iteration": lambda x: x.scores, "  queries": lambda x: x.queries, "  keys": lambda x: x.keys,
  "VALU/elt": lambda x: x.valu_per_score, "exp/elt": lambda x: x.exp_per_score, "LDSB/elt": lambda x: x.lds_bytes_per_score,
  "matrix cycles": _cycles("matrix"), "vector cycles": _cycles("vector"), "transcendental cycles": _cycles("transcendental"),
  "LDS cycles": _cycles("lds"),
  "overlap %": lambda x: 100*x.overlap, "serial %": lambda x: 100*x.serial,
  "useful %": lambda x: 100*x.useful if x.useful is not None else None,
}

def show(value:Cell) -> str:
  if value is None: return "?"
  if not isinstance(value, float): return str(value)
  if value == int(value) and value >= 10: return f"{value:.0f}"
  return f"{value:.2f}" if value < 20 else f"{value:.1f}"

def rows_of(reports:Sequence[Report]) -> list[tuple[str, list[tuple[str, list[Cell]]]]]:
  """Returns the numbers in reports, in groups: (heading of the group, [(name of a number, its value in each report)])."""
  def of_loop(table:dict[str, Callable[[HotLoop], Cell]]) -> list[tuple[str, list[Cell]]]:
    return [(name, [f(r.loop) if r.loop is not None else None for r in reports]) for name, f in table.items()]
  return [("resources", [(name, [f(r) for r in reports]) for name, f in RESOURCES.items()]), ("hot loop, one iteration of a wave", of_loop(LOOP)),
          ("bound, not measured", of_loop(BOUNDS))]

def _change(a:Cell, b:Cell) -> str:
  if isinstance(a, (int, float)) and isinstance(b, (int, float)): return f"{b - a:+.2f}".rstrip("0").rstrip(".") if abs(b - a) >= 0.005 else ""
  return "" if a == b else "differs"

def full(reports:Sequence[Report], change:bool=False) -> Table:
  """Returns a table with all numbers in the reports, one column per kernel. With `change`, the last column is the second kernel minus the first."""
  table = Table("", *(f"{r.name}\n{r.arch}" for r in reports), *(["change"] if change else []))
  for heading, rows in rows_of(reports):
    table.add_section()
    table.add_row(f"[bold]{heading}")
    for name, values in rows:
      table.add_row(name, *map(show, values), *([_change(values[0], values[1])] if change else []))
  return table

def waits(report:Report) -> Table:
  """Returns a table of the waits and barriers of one iteration of the hot loop, one per line."""
  table = Table("at", "after matrix", "wait or barrier", "for", "the last of them", "issued before", "matrix since", "still under way",
                title=f"{report.name}: waits and barriers of an iteration")
  for x in report.waits:
    y = x.awaited
    awaited = [str(y.accesses), y.last, str(y.instructions), str(y.matrix)] if y is not None else [""]*4
    table.add_row(str(x.at), str(x.matrix), x.what, *awaited, ", ".join(f"{n} {name}" for name, n in x.under_way.items()))
  return table

def brief(reports:Sequence[Report]) -> Table:
  """Returns a table with one short line for each kernel."""
  table = Table("kernel", "arch", *BRIEF)
  for r in reports: table.add_row(r.name, r.arch, *brief_cells(r))
  return table

BRIEF = ("regs", "spill", "LDS", "waves", "by LDS", "mat", "VALU/elt", "exp/elt", "LDSB/elt", "overlap", "serial", "useful")

def brief_cells(r:Report) -> list[str]:
  """Returns the cells of a kernel's line in a short table, in the order of BRIEF. docs/isa.md explains the cells."""
  # "waves" and "by LDS": waves per SIMD that registers, and that the LDS, allow
  held, x = r.resources, r.loop
  cells = [f"{show(held.vgpr)}+{show(held.agpr)}", show(held.vgpr_spills), show(held.lds), show(held.waves_by_registers),
           f"{held.waves_by_lds:g}" if held.waves_by_lds is not None else "?"]
  if x is None: return cells + ["no loop"] + [""]*(len(BRIEF) - len(cells) - 1)
  names = {name.removeprefix("mfma_f32_").removeprefix("wmma_f32_"): n for name, n in x.matrix.items()}
  def known(value:float|None, form:str) -> str: return "?" if value is None else format(value, form)
  return [*cells, _listed(names), known(x.valu_per_score, ".2f"), known(x.exp_per_score, ".2f"), known(x.lds_bytes_per_score, ".1f"),
          f"{x.overlap:.0%}", f"{x.serial:.0%}", known(x.useful, ".0%")]

def bounds(p:Problem, tile:Tile, report:Report) -> Table:
  """Returns a table with an upper bound on a problem's rate, and the rates that others measured, for each card with the report's chip."""
  table = Table("card", "peak TFLOP/s", "bound", "serial", "limit", "tail", "useful work", "published", title="bound, not measured")
  if (loop:=report.loop) is None: return table
  for chip, card in rated(report.arch):
    upper, serial = (roofline(p, tile, chip, card, use) for use in (loop.overlap, loop.serial))
    others = ", ".join(f"{x.kernel} {x.tflops:g}" for x in published(p, card.name)) or "-"
    table.add_row(card.name, f"{chip.peak(card):.0f}", f"{upper.tflops:.0f}", f"{serial.tflops:.0f}", upper.limit, f"{100*upper.balance:.0f}%",
                  f"{100*upper.useful:.0f}%", others)
  return table
