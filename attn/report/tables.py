"""A report as text in Markdown, and the table of all reports in a folder."""
from __future__ import annotations
import statistics
from collections.abc import Sequence
from pathlib import Path
from attn.report.schema import GBS, TFLOPS, CardReport, KernelTime, ReportRow, SensorReading, read_report
from attn.report.shapes import OF_DECODE, OF_FORWARD

TABLE_BEGIN, TABLE_END = "<!-- python -m attn.report table writes the lines from here -->", "<!-- to here -->"

def table(head:Sequence[str], rows:Sequence[Sequence[str]]) -> str:
  lines = [[cell.replace("|", "\\|") for cell in x] for x in (head, ["---"]*len(head), *rows)]
  return "\n".join(f"| {' | '.join(x)} |" for x in lines) + "\n"

def figure(x:float|None) -> str:
  """Returns a number with three significant digits, or "" for None."""
  if x is None: return ""
  return f"{x:.0f}" if abs(x) >= 100 else f"{x:.3g}"

def rate_of(row:ReportRow) -> tuple[float, str]|None:
  """Returns the rate of a problem and its unit: TFLOP/s of the matrix products, or for decode GB/s of reading K and V."""
  # the problem has no time, or its results are wrong
  if row.seconds is None or not row.right: return None
  return (row.shape.bytes_read/row.seconds/1e9, GBS) if row.shape.kind == OF_DECODE else (row.shape.flops/row.seconds/1e12, TFLOPS)

def sensors_text(x:SensorReading|None) -> str:
  if x is None: return "not told"
  units = {"core_mhz": "MHz", "memory_mhz": "MHz memory", "watts": "W", "celsius": "°C"}
  return ", ".join(f"{value:.0f} {unit}" for name, unit in units.items() if (value := getattr(x, name)) is not None)

# ***** one report *****

def markdown(x:CardReport) -> str:
  """Returns a report as Markdown: the verdicts first, then times and predictions, then the rates of the card and facts about the system."""
  wrong = [row for row in x.rows if not row.right]
  verdict = "all results keep the accuracy law" if not wrong else f"{len(wrong)} of {len(x.rows)} results are WRONG"
  parts = [f"### {x.card.name}, {x.card.chip}, {x.card.kind}: {verdict}\n",
           table(("shape", "verdict", "error", "limit", "checked"), [verdict_cells(row) for row in x.rows]), times_table(x)]
  rates = [(r.what, figure(r.rate), r.unit, sensors_text(r.during)) for r in x.rates]
  if rates: parts.append(table(("rate of the card", "", "", "clock, power"), rates))
  about = [("before", sensors_text(x.card.before)), ("after", sensors_text(x.card.after)), ("driver", x.card.driver),
           ("compute units", str(x.card.compute_units or "not told")), ("compiler", x.software.compiler), ("system", x.software.system),
           ("attn", f"{x.software.attn}, commit {x.software.commit or 'not known'}"),
           ("tinygrad, Python", f"{x.software.tinygrad}, {x.software.python}"), ("made", f"{x.made}, {x.sizes} shapes, by {x.how}")]
  return "\n".join([*parts, table(("", ""), about), *[f"Note: {note}\n" for note in x.notes]])

def verdict_cells(row:ReportRow) -> tuple[str, ...]:
  if row.verdict is None: return str(row.shape), f"refused: {row.refused}", "", "", ""
  v = row.verdict
  exact = [f"{n:.3g}" if n is not None else "" for n in (v.error, v.limit)]
  return str(row.shape), v.text, *exact, f"{100*v.checked:.3g}%"

def times_table(x:CardReport) -> str:
  """Returns a report's table of times. For the emulator it has the emulator's times, and no ratios."""
  measured = "emulated s" if x.emulated else "measured ms (of rounds)"
  head = ("shape", "kernel", "tile", measured, "rate", "of the card's", "clock, power", "predicted ms", "limit", "measured/predicted")
  rows = [time_cells(x, row, kernel) for row in x.rows for kernel in row.kernels]
  reasons = {kernel.unpredicted for row in x.rows for kernel in row.kernels}
  if len(reasons) != 1 or None in reasons: return table(head, rows)
  return table(head[:-3], [cells[:-3] for cells in rows]) + f"\nNo predictions: {reasons.pop()}\n"

def time_cells(x:CardReport, row:ReportRow, kernel:KernelTime) -> tuple[str, ...]:
  rate, last = rate_of(row), kernel is row.kernels[-1]
  best = x.best_rate(rate[1]) if rate is not None else None
  milliseconds = f"{figure(1e3*kernel.seconds)} ({figure(1e3*min(kernel.rounds))} to {figure(1e3*max(kernel.rounds))})"
  speed = "", ""
  if x.emulated: milliseconds = figure(kernel.seconds)
  elif rate is not None and last: speed = f"{figure(rate[0])} {rate[1]}", f"{rate[0]/best.rate:.0%}" if best is not None else ""
  guesses = [f"{figure(1e3*p.seconds)} at {p.ghz:.2f} GHz" for p in kernel.predicted]
  guess = (", ".join(guesses), kernel.expected.limit) if kernel.expected is not None else (kernel.unpredicted or "", "")
  return (str(row.shape), kernel.name, kernel.tile, milliseconds, *speed, sensors_text(kernel.during) if kernel.during is not None else "", *guess,
          "" if x.emulated or kernel.ratio is None else f"{kernel.ratio:.2f}")

# ***** all reports of a folder *****

def overview(reports:Sequence[tuple[str, CardReport]]) -> str:
  """Returns a table with a line for each report, given with the name of its file."""
  head = ("report", "card", "attn", "results", "forward TFLOP/s", "of the matrix instructions'", "decode GB/s", "of the copy's", "measured/predicted")
  return table(head, [overview_cells(name, x) for name, x in reports])

def overview_cells(name:str, x:CardReport) -> tuple[str, ...]:
  judged = [row for row in x.rows if row.verdict is not None]
  cells = [f"[{name}]({name})", f"{x.card.name}, {x.card.chip}", f"{x.software.attn} {x.software.commit or ''}, {x.made}",
           f"{sum(row.right for row in judged)} of {len(judged)} right"]
  for kind in (OF_FORWARD, OF_DECODE):
    rates = [] if x.emulated else [rate for row in x.rows if row.shape.kind == kind and (rate := rate_of(row)) is not None]
    best = x.best_rate(rates[0][1]) if rates else None
    cells += [span([rate for rate, _ in rates]), span([100*rate/best.rate for rate, _ in rates], "%") if best is not None else ""]
  ratios = [] if x.emulated else [k.ratio for row in x.rows for k in row.kernels if k.ratio is not None]
  return (*cells, f"{statistics.median(ratios):.2f} ({span(ratios)})" if ratios else "")

def span(values:Sequence[float], unit:str="") -> str:
  """Returns a text with the smallest and the largest of the values, such as "3.1 to 4.7 ms"; "" without values."""
  return f"{figure(min(values))} to {figure(max(values))}{unit}" if values else ""

def table_of_folder(folder:Path) -> str: return overview([(path.name, read_report(path)) for path in sorted(folder.glob("*.json"))])

def page_with_table(page:str, new:str) -> str:
  """Returns the page with a new table between the two comments that mark the table's place."""
  before, begin, rest = page.partition(TABLE_BEGIN)
  _, end, after = rest.partition(TABLE_END)
  if not begin or not end: raise ValueError(f"the page has no lines {TABLE_BEGIN!r} and {TABLE_END!r}")
  return f"{before}{TABLE_BEGIN}\n\n{new}\n{TABLE_END}{after}"
