"""`python -m attn.report` measures tinygrad's default device, writes a report as JSON and prints it as Markdown."""
from __future__ import annotations
import argparse, re, sys
from collections.abc import Sequence
from pathlib import Path
from attn.compilers.found import NoCompiler
from attn.measure.machine import ANY, need
from attn.report.drawing import comparison
from attn.report.measured import measure_report
from attn.report.schema import BadReport, CardReport, read_report, report_json
from attn.report.shapes import REPORT_SHAPES
from attn.report.tables import markdown, table_of_folder, page_with_table
from attn.tinygrad_compat import Device

REPORT_COMMAND, FOLDER = "python -m attn.report", Path("docs/reports")
SLOW = ("EMU", "CPU")     # devices for which small shapes are the default
DESCRIPTION = """Checks attention on this device against float64, times it, and predicts its time. Takes under three minutes and about 3 GB of the
card's memory; with --shapes small seconds, and little memory. DEV names the device: DEV=AMD, DEV=CUDA, DEV=CL, DEV=CPU or DEV=EMU::gfx1201. Prints a
table to paste, and writes a JSON file for docs/reports. The report has no host name, no user name and no serial number. The exit status is 1 if a
result is wrong."""

def file_name(report:CardReport) -> str: return re.sub(r"[^a-z0-9]+", "_", f"{report.card.name} {report.card.chip}".lower()).strip("_") + ".json"

def make(out:Path|None, sizes:str|None, card:str|None) -> int:
  need(REPORT_COMMAND, kind=ANY)
  device = Device.DEFAULT.split(":")[0]
  if sizes == "full" and device == "EMU": raise ValueError("--shapes full: the emulator would need hours; use --shapes small")
  report = measure_report(sizes or ("small" if device in SLOW else "full"), card)
  text = report_json(report)
  path = out if out is not None else Path(file_name(report))
  path.write_text(text, encoding="utf-8")
  print(markdown(report))
  print(f"wrote {path}", file=sys.stderr)
  return int(not report.right)

def check(paths:Sequence[Path]) -> int:
  for path in paths:
    report = read_report(path)
    print(f"{path}: valid; {report.card.name}, {'all results are right' if report.right else 'results are WRONG'}")
  return 0

def draw_comparison(paths:Sequence[Path], out:Path) -> int:
  out.write_text(comparison([(path.stem, read_report(path)) for path in paths]), encoding="utf-8")
  return 0

def show_table(folder:Path, write:bool) -> int:
  new, page = table_of_folder(folder), folder/"README.md"
  if write: page.write_text(page_with_table(page.read_text(encoding="utf-8"), new), encoding="utf-8")
  else: print(new, end="")
  return 0

def main(arguments:Sequence[str]|None=None) -> int:
  parser = argparse.ArgumentParser(REPORT_COMMAND, description=DESCRIPTION)
  parser.add_argument("--out", type=Path, help="the JSON file to write, by default named after the card, in this folder")
  parser.add_argument("--shapes", choices=tuple(REPORT_SHAPES), help="small for a CPU and the emulator, where it is the default")
  parser.add_argument("--card", help="the card's name in attn's tables, if several cards have this chip")
  commands = parser.add_subparsers(dest="command")
  checks = commands.add_parser("check", help="check that files are valid reports")
  checks.add_argument("files", nargs="+", type=Path)
  compares = commands.add_parser("compare", help="draw measured against predicted times of reports as SVG")
  compares.add_argument("files", nargs="+", type=Path)
  compares.add_argument("--svg", type=Path, default=Path("reports.svg"), help="the file to write, by default reports.svg")
  tables = commands.add_parser("table", help="print the table of the reports in a folder")
  tables.add_argument("folder", nargs="?", type=Path, default=FOLDER)
  tables.add_argument("--write", action="store_true", help="write it into README.md of the folder")
  x = parser.parse_args(arguments)
  try:
    if x.command == "check": return check(x.files)
    if x.command == "compare": return draw_comparison(x.files, x.svg)
    if x.command == "table": return show_table(x.folder, x.write)
    return make(x.out, x.shapes, x.card)
  except (BadReport, ValueError, NotImplementedError, NoCompiler, OSError) as e:
    print(f"{REPORT_COMMAND}: {e}", file=sys.stderr)
    return 2

if __name__ == "__main__": sys.exit(main())
