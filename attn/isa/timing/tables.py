"""Prints a prediction as tables: the cycles of a loop iteration, the time of a problem on each card, and the waits by instruction and source line."""
from __future__ import annotations
from collections.abc import Mapping, Sequence
from typing import Any
from rich.table import Table
from attn.isa.source import PythonLine
from attn.chips import Chip
from attn.chips.machine import ASSUMED, ORIGINS, figures_of
from attn.isa.timing.predict import Prediction
from attn.isa.timing.trips import LoopTiming, Timing


def trips_table(timing:Timing) -> Table:
  """Returns a table of the cycles of one iteration, one column per loop."""
  table = Table("predicted, not measured", *(f"{timing.name}\n{x.label}" for x in timing.loops))
  for name, values in _rows(timing): table.add_row(name, *values)
  return table

def _rows(timing:Timing) -> list[tuple[str, list[str]]]:
  def each(f:Any) -> list[str]: return [f(x) for x in timing.loops]
  again = [""]*(len(timing.loops) - 1)
  return [
    ("cycles of an iteration", each(lambda x: f"{x.cycles:.0f}")),
    ("matrix unit in use", each(lambda x: f"{100*x.matrix_use:.1f}%")),
    ("instructions of an iteration", each(lambda x: str(len(x.steps)))),
    ("iterations measured, of a wave in the mean", each(lambda x: str(x.run.trips))),
    ("bank conflicts, cycles of a workgroup", each(lambda x: f"{x.conflicts}" + f", {x.unknown_addresses} accesses of a wave not known"*
                                                   bool(x.unknown_addresses))),
    ("waves of a workgroup", [str(timing.waves) + (f", {timing.behind} of them a barrier behind" if timing.behind else ""), *again]),
    ("workgroups on a compute unit" + (" pair" if timing.whole_processor else ""), [str(timing.groups), *again]),
    ("cycles before and after the loops", [str(timing.edges), *again])]

def problem_table(title:str, found:Sequence[Prediction]) -> Table:
  """Returns a table of the predicted time of a problem, one line per card and clock."""
  table = Table("card", "GHz", "iterations of a workgroup", "ms of compute units", "of L2", "of Infinity Cache", "of memory", "limit", "TFLOP/s",
                "ms if workgroups drift apart",
                title=f"{title}: predicted, not measured")
  for x in found:
    times = (f"{1e3*x.times[level]:.3f}" if level in x.times else "not known" for level in ("compute", "L2", "Infinity Cache", "memory"))
    table.add_row(x.card.name, f"{x.ghz:.2f}", f"{x.trips:.1f}", *times, x.limit, f"{x.tflops:.4g}", f"{1e3*x.seconds_apart:.3f}")
  return table

def stalls_table(loop:LoopTiming, most:int, lines:Mapping[int, PythonLine]) -> Table:
  """Returns a table of the `most` longest waits of an iteration, each with its instruction and source line."""
  table = Table("matrix idle", "waits", "for", "instruction", "line", title=f"{loop.label}: what a wave waits for in an iteration (predicted cycles)")
  for x in loop.stalls[:most]:
    table.add_row(f"{x.idle:.0f}", f"{x.cycles:.0f}", x.why, x.step.instruction.text, python_place(x.step.instruction.line, lines))
  return table

def python_place(line:int|None, lines:Mapping[int, PythonLine]) -> str:
  """Returns "file:line" of the Python code that emitted line `line` of the HIP source, or else a text that names `line`."""
  if line is None: return ""
  return f"{lines[line][0]}:{lines[line][1]}" if line in lines else f"line {line} of the source"

def machine_table(chip:Chip) -> Table:
  """Returns a table of the rates and latencies of a chip's family, each with its source."""
  table = Table("figure", "value", "source", title=f"{chip.family}: cycles, or bytes a cycle")
  for name, (value, origin) in figures_of(chip.latencies).items(): table.add_row(name, str(value), ORIGINS.get(origin, ASSUMED))
  return table

def timing_json(timing:Timing, found:Sequence[Prediction], lines:Mapping[int, PythonLine]) -> dict[str, Any]:
  """Returns the whole prediction as values for JSON, without the list of the cycles in which single instructions issue."""
  return {"name": timing.name, "arch": timing.chip.name, "cycles": timing.cycles, "matrix_use": timing.matrix_use, "groups": timing.groups,
          "waves": timing.waves, "behind": timing.behind, "edges": timing.edges, "unknown": list(timing.unknown),
          "loops": [{"label": x.label, "cycles": x.cycles, "matrix_use": x.matrix_use, "conflicts": x.conflicts,
                     "unknown_addresses": x.unknown_addresses,
                     "stalls": [{"instruction": s.step.instruction.text, "cycles": s.cycles, "idle": s.idle, "why": s.why,
                                 "line": python_place(s.step.instruction.line, lines)} for s in x.stalls]} for x in timing.loops],
          "problems": [{"card": x.card.name, "ghz": x.ghz, "seconds": x.seconds, "limit": x.limit,
                        "times": x.times, "bytes": x.bytes, "tflops": x.tflops, "seconds_apart": x.seconds_apart} for x in found]}
