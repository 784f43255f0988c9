"""Makes docs/costs.txt, a table with a line for each kernel of attn on each chip: registers, spills, LDS, instructions, bounds, and for forward
kernels the predicted time."""
from __future__ import annotations
from collections.abc import Sequence
from attn.chips import get_chip
from attn.compilers.clang import assembly, toolchain
from attn.isa import source
from attn.isa.costs import COMMAND, Costs, reports_of, short_version
from attn.isa.report import Report
from attn.isa.source import FORWARD, Spec
from attn.isa.table import BRIEF, brief_cells
from attn.isa.timing.kernels import of_source

TIMES = ("ms", "ms at GEMM's clock")

def cells_of_times(spec:Spec) -> list[str]:
  """Returns two texts for the columns TIMES of docs/costs.txt: predicted ms at the rated clock, and at the clock sustained under matrix work."""
  # "-": no forward kernel, or the clock is not known
  if spec.kernel != FORWARD: return ["-"]*len(TIMES)
  kernel = source.kernel_source(spec, llvm=toolchain().llvm)
  # a problem of size ASKED on the chip's first card with a known clock
  card = next(card for card in get_chip(spec.arch).cards if card.ghz)
  times = [f"{1e3*x.seconds:.2f}" for x in of_source(spec, kernel, assembly(kernel.text, spec.arch)).on_cards(card.name)]
  return times + ["-"]*(len(TIMES) - len(times))

def line_of(report:Report) -> str: return " | ".join([report.name, *brief_cells(report), *cells_of_times(Spec.parse(report.name))])

def _lines(specs:Sequence[Spec]) -> list[str]: return [line_of(report) for report in reports_of(specs)]

def costs() -> Costs:
  """Returns the format of docs/costs.txt: its first line, its columns, and the function that makes the lines."""
  header = (f"# The costs of our kernels under {short_version(toolchain())}: bounds and predictions from their machine code, not measurements. "
            f"Rewritten by: {COMMAND} --write docs/costs.txt")
  return Costs(header, ("kernel", *BRIEF, *TIMES), _lines)
