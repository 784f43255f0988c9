"""Predicts the kernels of other projects whose speed was published: the table docs/data/timing_predicted.csv. Begin with `predicted_rows`."""
from __future__ import annotations
import csv, io, re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from attn.chips import CHIPS, Card, Chip, get_chip
from attn.chips.family import GEMM_USE
from attn.isa.timing.predict import Division, Prediction, at_both_clocks, walked_in_a_trip
from attn.isa.timing.trips import timing_of
from attn.problem import Problem

# Two tables are read. docs/data/timing_published.csv has the published speeds. docs/data/timing_kernels.csv names the machine code of the kernels.
# That code is not in this repository, so the table also has what the timing model found in the code, such as the cycles of a loop iteration. The
# timing model adds the grid, the caches and the clock of the card.

PREDICTED_COLUMNS = ("#", "chip", "kernel", "published", "at the rated clock", "ratio", "at the sustained clock", "ratio")
SHAPE_CELL = re.compile(r"(\d+), (\d+)(?:/(\d+))?, (\d+)(?: queries of (\d+) keys)?, (full|causal)")
MFMA_FLOPS = 2*32*32*8     # operations of the matrix instruction whose cycles rows 10 and 11 give
OWN_QUERIES, OWN_KEYS = "queries", "keys of a query head"     # what a workgroup owns: the column `owns`
NO_CODE = "no machine code"     # value of the column `owns`: `code` then says why the kernel is not predicted

@dataclass(frozen=True)
class PeerKernel:
  """Row of docs/data/timing_kernels.csv: a kernel of another project, and what the timing model found in its machine code."""
  rows: str              # numbers of the kernel's rows in docs/data/timing_published.csv
  kernel: str
  source: str            # project and commit, or compiler and settings
  code: str              # path of the code object or assembly
  chip: str = ""
  D: int = 0
  owns: str = OWN_QUERIES
  own: int = 0           # rows that a workgroup owns
  products: str = "1 1"  # matrix products of an iteration that have D as a dimension, and that have Dv
  order: str = ""        # heads of which workgroups run together: all, or one
  lds: str = ""          # LDS bytes and threads that the text does not name
  threads: str = ""
  walked: float = 0      # rows that an iteration reads
  groups: int = 0        # workgroups on a compute unit
  whole: str = ""        # yes: a workgroup runs on both compute units of a pair
  cycles: float = 0      # of an iteration
  edges: int = 0         # cycles of a workgroup before and after its iterations
  @property
  def whole_processor(self) -> bool: return self.whole == "yes"
  @property
  def of_each_dimension(self) -> tuple[int, int]:
    """Numbers of matrix products in an iteration: those with D as one of their three dimensions, and those with Dv."""
    of_d, of_dv = map(int, self.products.split())
    return of_d, of_dv

@dataclass(frozen=True)
class StepsOfPeer:
  """Figures that the timing model found in the machine code of another project's kernel, such as the cycles of an iteration."""
  chip: Chip
  groups: int
  whole_processor: bool
  cycles: float
  edges: int

@dataclass(frozen=True)
class PredictedRow:
  """Row of docs/data/timing_predicted.csv: a published speed of a kernel, and the speeds that the timing model predicts for it."""
  number: str
  chip: str
  kernel: str
  published: float
  rated: float|None = None          # predicted at the card's rated clock
  sustained: float|None = None      # predicted at the clock that the card sustains under matrix work
  why_not: str = ""
  @property
  def ratios(self) -> tuple[float|None, float|None]:
    """Predicted speed divided by published speed, at the rated and at the sustained clock."""
    rated = None if self.rated is None else self.rated/self.published
    # equal if the published figure depends on no clock
    return rated, rated if self.sustained is None else self.sustained/self.published
  def cells(self) -> list[str]:
    if self.rated is None: return [self.number, self.chip, self.kernel, f"{self.published:g}", self.why_not, "", "", ""]
    rated, sustained = self.ratios
    later = ["", ""] if self.sustained is None else [f"{self.sustained:.4g}", f"{sustained:.2f}"]
    return [self.number, self.chip, self.kernel, f"{self.published:g}", f"{self.rated:.4g}", f"{rated:.2f}", *later]

# ***** what the model finds in machine code *****

def stepped_peer(kernel:PeerKernel, text:str) -> PeerKernel:
  """Returns the row `kernel` of docs/data/timing_kernels.csv with new cycles, which the timing model finds in the kernel's assembly `text`."""
  lds, threads = (int(x) if x else None for x in (kernel.lds, kernel.threads))
  timing = timing_of(text, kernel.chip, kernel.D, lds=lds, threads=threads, products=(kernel.of_each_dimension,))
  return replace(kernel, walked=walked_in_a_trip(timing, kernel.own), groups=timing.groups, whole="yes" if timing.whole_processor else "no",
                 cycles=timing.cycles, edges=timing.edges)

def restepped(kernels:Iterable[PeerKernel], folder:Path, read:Callable[[Path], str]) -> list[PeerKernel]:
  """Returns the rows `kernels`, with new cycles for each kernel whose machine code lies in `folder`; `read` returns the assembly of such a file."""
  return [stepped_peer(x, read(folder/x.code)) if x.own and (folder/x.code).is_file() else x for x in kernels]

# ***** the two tables that are read *****

NUMBER_COLUMNS: dict[type[int]|type[float], tuple[str, ...]] = {int: ("D", "own", "groups", "edges"), float: ("walked", "cycles")}

def peer_kernels_in(text:str) -> list[PeerKernel]:
  def kernel(row:Mapping[str, str]) -> PeerKernel:
    cells: dict[str, Any] = dict(row)
    for kind, names in NUMBER_COLUMNS.items(): cells |= {name: kind(row[name] or 0) for name in names}
    return PeerKernel(**cells)
  return [kernel(row) for row in csv.DictReader(io.StringIO(text))]

def text_of_kernels(kernels:Iterable[PeerKernel]) -> str:
  def cell(value:object) -> str: return "" if not value else f"{value:.10g}" if isinstance(value, float) else str(value)
  return csv_text(tuple(PeerKernel.__dataclass_fields__), ([cell(x) for x in vars(kernel).values()] for kernel in kernels))

def csv_text(head:Iterable[str], rows:Iterable[Iterable[str]]) -> str:
  out = io.StringIO()
  csv.writer(out, lineterminator="\n").writerows([head, *rows])
  return out.getvalue()

# ***** the predictions *****

def card_of(name:str) -> tuple[Chip, Card]: return next((chip, card) for chip in CHIPS.values() for card in chip.cards if card.name == name)

def problem_of_cell(shape:str, kernel:PeerKernel) -> Problem:
  """Returns the problem of a text such as "4, 64/8, 8192, causal": batch 4, 64 query heads, 8 key/value heads, 8192 rows."""
  # the column "shape" of docs/data/timing_published.csv
  if (found := SHAPE_CELL.match(shape)) is None: raise ValueError(f"shape {shape!r}: must be B, H[/Hkv], N[ queries of M keys], full or causal")
  b, h, hkv, n, m = (int(x) if x else 0 for x in found.groups()[:5])
  if kernel.owns == OWN_KEYS: hkv = h     # each query head has workgroups of its own
  return Problem(b, h, hkv or h, n, m or n, kernel.D, kernel.D, dtype="bfloat16", out_dtype="bfloat16", softmax_scale=kernel.D**-0.5,
                 window=(-1, 0 if found[6] == "causal" else -1))

def of_peer(kernel:PeerKernel, shape:str, card:Card) -> tuple[Prediction, Prediction|None]:
  """Returns the predicted times of a kernel on `card` for the problem `shape`, at the rated and at the sustained clock."""
  division = Division(kernel.own, kernel.walked, kernel.owns == OWN_KEYS, (kernel.of_each_dimension,), together=1 if kernel.order == "one" else 0)
  steps = StepsOfPeer(get_chip(kernel.chip), kernel.groups, kernel.whole_processor, kernel.cycles, kernel.edges)
  return at_both_clocks(problem_of_cell(shape, kernel), steps, division, card)

def cycles_of_mfma(kernel:PeerKernel) -> float:
  """Returns the predicted cycles that a SIMD takes in the hot loop for MFMA_FLOPS operations of matrix work (one matrix instruction)."""
  flops = kernel.walked*kernel.own*4*kernel.D*kernel.groups/get_chip(kernel.chip).pipes.simds
  return kernel.cycles*MFMA_FLOPS/flops

def predicted_rows(published:str, kernels:Iterable[PeerKernel]) -> list[PredictedRow]:
  """Returns a prediction for each row of docs/data/timing_published.csv, whose text is `published`."""
  by_row = {number: kernel for kernel in kernels for number in kernel.rows.split()}
  found, shape = list[PredictedRow](), ""
  for row in csv.DictReader(io.StringIO(published)):
    if (kernel := by_row.get(row["#"])) is None: raise ValueError(f"row {row['#']} of timing_published.csv: no kernel of timing_kernels.csv names it")
    shape = shape if row["shape (B, H/Hkv, N)"] == "the same" else row["shape (B, H/Hkv, N)"]
    line = PredictedRow(row["#"], row["chip"], f"{kernel.kernel}: {shape}", float(row["published"].split()[0]))
    if kernel.owns == NO_CODE: found.append(replace(line, why_not=kernel.code))
    elif shape.startswith("cycles"): found.append(replace(line, rated=cycles_of_mfma(kernel)))
    elif not kernel.own:
      # A GEMM, without the timing model: at the rated clock it keeps the matrix units busy a fixed share of the time (GEMM_USE); at the sustained
      # clock it is as fast as the fastest published GEMM of its card.
      chip, card = card_of(row["chip"])
      found.append(replace(line, rated=GEMM_USE*chip.peak(card), sustained=card.gemm))
    else:
      rated, sustained = of_peer(kernel, shape, card_of(row["chip"])[1])
      found.append(replace(line, rated=rated.tflops, sustained=sustained.tflops if sustained else None))
  return found

def predictions_within(rows:Iterable[PredictedRow], share:float) -> Mapping[str, int]:
  """Returns how many predictions lie within the fraction `share` of the published speed, at the "rated" and the "sustained" clock, and how many there
  are ("all")."""
  ratios = [x.ratios for x in rows if x.rated is not None]
  near = [[r is not None and abs(r - 1) <= share for r in pair] for pair in ratios]
  return {"rated": sum(x for x, _ in near), "sustained": sum(x for _, x in near), "all": len(ratios)}

def text_of_rows(rows:Iterable[PredictedRow]) -> str: return csv_text(PREDICTED_COLUMNS, (x.cells() for x in rows))
