"""Runs and times the problems of a report on this device: accuracy, times of attn's kernels, rates for comparison, predictions. Begin with
`measure_report`."""
from __future__ import annotations
import datetime, sys, time
from dataclasses import dataclass, field, replace
from typing import Any
from attn.api.attention import attention, choice_of
from attn.calls.checked_kernel import device_arch
from attn.chips import Chip
from attn.choose.backward import choose_backward
from attn.compilers.found import NoCompiler
from attn.measure import verdicts
from attn.measure.gradients import GRADIENT_NAMES, backward_of
from attn.measure.inputs import random_operands, to_array
from attn.measure.rounds import repeater, timed_rounds
from attn.report.predicted import predicted
from attn.report.rates import measured_rates
from attn.report.schema import BY_EMULATOR, BY_GRAPH, BY_LAUNCH, VERSION, CardReport, JudgedResult, KernelTime, ReportRow
from attn.report.shapes import OF_BACKWARD, OF_DECODE, OF_FORWARD, REPORT_SHAPES, ReportedShape
from attn.report.system import FoundCard, Sensors, find_card, first_line, median_reading, sampled, software
from attn.tinygrad_compat import Device, UOp, compiled, device_seconds

REPORT_SEED = 34
# most scores of a shape that are checked, except that backward checks at least one head
SCORES = {OF_FORWARD: 1 << 20, OF_DECODE: 1 << 18, OF_BACKWARD: 1 << 20}

@dataclass
class ReportedKernel:
  """A kernel that computes a problem of a report, compiled and ready to run."""
  name: str
  tile: str
  schedule: UOp
  seconds: float = 0.0     # of its first run

@dataclass
class JudgedShape:
  """A problem of a report, with the verdict on its results and the kernels that computed them."""
  shape: ReportedShape
  verdict: JudgedResult|None = None
  # their tensors stay on the device, so that the same kernels can be timed later
  kernels: list[ReportedKernel] = field(default_factory=list)
  refused: str|None = None

# ***** verdicts *****

def judged(shape:ReportedShape, arch:Chip) -> JudgedShape:
  """Runs the kernels of a problem once and checks the accuracy of the results."""
  found = JudgedShape(shape)
  try: verdict, checked = (judge_backward if shape.kind == OF_BACKWARD else judge_forward)(found, arch)
  # no kernel of attn supports the problem
  except NotImplementedError as e: return JudgedShape(shape, refused=first_line(e))
  except NoCompiler: raise
  # such as a compiler's error or a fault of the card: the results count as wrong
  except Exception as e: return JudgedShape(shape, failed(first_line(e)))
  error, limit = (None, None) if verdict.pattern else (verdict.error, verdict.limit)
  found.verdict = JudgedResult(verdict.ok, verdicts.verdict_text(verdict), error, limit, checked)
  return found

def failed(text:str) -> JudgedResult: return JudgedResult(False, text, None, None, 0.0)

def first_run(found:JudgedShape, name:str, tile:Any, *outputs:Any) -> None:
  """Compiles the kernel that computes `outputs`, runs it once, and appends it to the list of kernels in `found`."""
  schedule = compiled(*outputs)
  found.kernels.append(ReportedKernel(name, str(tile), schedule, device_seconds(schedule)))

def judge_forward(found:JudgedShape, arch:Chip) -> tuple[Any, float]:
  p = found.shape.problem
  inputs, (q, k, v), _ = random_operands(p, REPORT_SEED)
  choice = choice_of(q, k, v, causal=found.shape.causal)
  o = attention(q, k, v, causal=found.shape.causal)
  first_run(found, found.shape.kind, choice.kernel if choice.work.tile is None else choice.work.tile, o)
  return verdicts.verify(p, inputs, [to_array(o)], SCORES[found.shape.kind])

def judge_backward(found:JudgedShape, arch:Chip) -> tuple[Any, float]:
  p = found.shape.problem
  call, tiles = backward_of(p, arch, REPORT_SEED), choose_backward(p, arch, "forward").tiles or ()
  for name, tile in zip(("dq", "dkdv"), tiles):
    outputs = call.run(name)
    first_run(found, name, tile, *outputs.values())
    call.tensors.update({n: t.realize() for n, t in outputs.items()})
  return verdicts.verify_backward(p, call.arrays, [to_array(call.tensors[n]) for n in GRADIENT_NAMES], SCORES[OF_BACKWARD])

# ***** times *****

def kernel_time(x:ReportedKernel, how:str, sensors:Sensors) -> KernelTime:
  """Measures the time of a kernel in several rounds of runs, by the clock that `how` (one of `schema.HOW`) names."""
  # the time of the first run
  if how == BY_EMULATOR: return KernelTime(x.name, x.tile, 1, (x.seconds,))
  # while the rounds run, the sensors are read again and again
  with sampled(sensors) as readings: runs, rounds = timed_rounds(repeater(x.schedule))
  return KernelTime(x.name, x.tile, runs, rounds, median_reading(readings))

def timed_row(x:JudgedShape, how:str, sensors:Sensors) -> ReportRow:
  """Times the kernels of a problem whose results were checked before, and returns the report's row. If a kernel fails now, the results count as
  wrong."""
  try: return ReportRow(x.shape, x.verdict, tuple(kernel_time(k, how, sensors) for k in x.kernels), x.refused)
  except Exception as e: return ReportRow(x.shape, failed(f"failed while it was timed: {first_line(e)}"))

def with_prediction(x:KernelTime, shape:ReportedShape, arch:Chip, card:FoundCard) -> KernelTime:
  found = predicted(shape, x.name, x.tile, arch, card.may_be)
  return replace(x, unpredicted=found) if isinstance(found, str) else replace(x, predicted=found)

# ***** the whole report *****

def measure_report(sizes:str, card_name:str|None=None) -> CardReport:
  """Makes a report on tinygrad's default device, and prints what it does. `sizes` is a key of REPORT_SHAPES."""
  # `card_name` is a name from the table of cards
  device, arch, start = Device.DEFAULT, device_arch(), time.perf_counter()
  def say(text:str) -> None: print(f"{time.perf_counter() - start:6.1f} s  {text}", file=sys.stderr, flush=True)
  card, how = find_card(device, arch, card_name), {"EMU": BY_EMULATOR, "CUDA": BY_GRAPH}.get(device.split(":")[0], BY_LAUNCH)
  say(f"{card.text.name} ({arch.name}), {len(REPORT_SHAPES[sizes])} shapes")
  before, found = card.sensors(), list[JudgedShape]()
  for shape in REPORT_SHAPES[sizes]:
    found.append(x := judged(shape, arch))
    say(f"{shape}: {x.refused or (x.verdict.text if x.verdict is not None else '')}")
  say("the card's own rates")
  rates, refusals = ((), []) if how == BY_EMULATOR else measured_rates(arch, card, sizes)
  rows = []
  for x in found:
    say(f"time of {x.shape}")
    rows.append(timed_row(x, how, card.sensors))
  after = card.sensors()
  say("predictions")
  rows = [replace(row, kernels=tuple(with_prediction(k, row.shape, arch, card) for k in row.kernels)) for row in rows]
  text = replace(card.text, before=before, after=after)
  return CardReport(VERSION, datetime.datetime.now(datetime.UTC).date().isoformat(), sizes, how, text, software(device, arch), rates,
                    tuple(rows), (*refusals, *notes_on(card, before)))

def notes_on(card:FoundCard, before:Any) -> list[str]:
  """Returns remarks for the reader of a report, such as that the driver gives no clocks; `before` is a sensor reading from before the
  measurements."""
  # `before` is a reading of the card's sensors before the measurements
  several = len(card.may_be) > 1 and card.text.kind == "AMD"
  return [*[f"the card may be {' or '.join(x.name for x in card.may_be)}: predictions are for the first; --card names the right one"]*several,
          *["the driver gives neither clocks nor power"]*(before is None)]
