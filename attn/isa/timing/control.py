"""Checks the timing model against times that were measured on an H100: the table docs/data/nvidia_order_of_heads.csv."""
from __future__ import annotations
import csv, io
from collections.abc import Mapping
from dataclasses import dataclass, replace
from attn.chips import Chip, get_chip
from attn.chips.family import Caches
from attn.isa.timing.memory import makespan_in_order
from attn.isa.timing.predict import Division, bytes_of_levels, work_of_grid
from attn.isa.timing.published import csv_text
from attn.problem import Problem

# of an H100 SXM: NVIDIA H100 Tensor Core GPU data sheet and architecture white paper
# The table has measured times of the wgmma forward kernel, for several shapes, tiles and orders of heads. The model predicts them without the
# machine code. The cycles of a tile's iteration follow from the measured time of one shape, BASE, with one head after another. So what is checked is
# the order in which workgroups run, and the memory.

MULTIPROCESSORS, MEMORY_GBS, L2_BYTES = 132, 3350, 50 << 20
HEAD_DIM, WARPGROUP_ROWS = 128, 64     # head dimension; queries of a warpgroup
BASE = "4, 16, 8192"
MEASURED_COLUMNS = ("shape (B, H, N), D = 128", "heads", "tile", "blocks of a multiprocessor", "measured, ms")
CONTROL_COLUMNS = (*MEASURED_COLUMNS, "predicted, ms", "limit", "predicted over measured", "predicted if workgroups drift apart, ms",
                   "that over measured")

def h100() -> Chip: return replace(get_chip("sm_90"), caches=Caches(l2=L2_BYTES))

@dataclass(frozen=True)
class ControlCase:
  """A problem whose time was measured: the cells of its row of docs/data/nvidia_order_of_heads.csv."""
  # its shape, the order of heads in the grid, and the tile (queries of a block and keys of an iteration)
  cells: Mapping[str, str]
  @property
  def ms(self) -> float: return float(self.cells["measured, ms"])
  @property
  def tile(self) -> str: return self.cells["tile"]
  @property
  def gives_cycles(self) -> bool: return self.cells[MEASURED_COLUMNS[0]] == BASE and self.cells["heads"] == "one after another"
  @property
  def problem(self) -> Problem:
    b, h, n = map(int, self.cells[MEASURED_COLUMNS[0]].split(", "))
    return Problem(b, h, h, n, n, HEAD_DIM, HEAD_DIM, dtype="bfloat16", out_dtype="bfloat16", softmax_scale=HEAD_DIM**-0.5)
  @property
  def division(self) -> Division:
    groups, keys = map(int, self.tile.split("x"))
    return Division(groups*WARPGROUP_ROWS, keys, together=0 if self.cells["heads"] == "alternate" else 1)
  @property
  def slots(self) -> int: return MULTIPROCESSORS*int(self.cells["blocks of a multiprocessor"])
  def iterations(self) -> float:
    """Returns the predicted duration of the kernel, from the start of the first workgroup to the end of the last, in loop iterations."""
    return makespan_in_order(work_of_grid(self.problem, self.division), self.slots, 1, 1.0, 0.0)
  def memory_ms(self, apart:bool) -> float:
    """Returns the ms that memory takes to deliver what L2 fetches. If `apart`, workgroups that read the same rows read them at different times."""
    # then they share fewer rows in the L2 (memory.py)
    work = work_of_grid(self.problem, self.division)
    return 1e3*bytes_of_levels(self.problem, self.division, work, h100(), self.slots, apart)["memory"]/(MEMORY_GBS*1e9)

def control_table(text:str) -> list[dict[str, str]]:
  """Returns the rows of docs/data/nvidia_order_of_heads.csv, whose text is `text`, with new predictions."""
  # only the measured columns are read
  cases = [ControlCase(row) for row in csv.DictReader(io.StringIO(text))]
  cycle = {x.tile: x.ms/x.iterations() for x in cases if x.gives_cycles}
  found = []
  for x in cases:
    row = {name: x.cells[name] for name in MEASURED_COLUMNS}
    if x.gives_cycles: predicted = dict.fromkeys(CONTROL_COLUMNS[5:], "") | {"limit": "gives the cycles"}
    else:
      compute, together, apart = cycle[x.tile]*x.iterations(), x.memory_ms(False), x.memory_ms(True)
      values = [max(compute, together), max(compute, apart)]
      cells = [(f"{ms:.4g}", f"{ms/x.ms:.2f}") for ms in values]
      predicted = dict(zip(CONTROL_COLUMNS[5:], (cells[0][0], "compute" if compute >= together else "memory", cells[0][1], *cells[1])))
    found.append(row | predicted)
  return found

def text_of_control(rows:list[dict[str, str]]) -> str:
  return csv_text(CONTROL_COLUMNS, ([row[name] for name in CONTROL_COLUMNS] for row in rows))
