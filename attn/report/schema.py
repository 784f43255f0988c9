"""Form of a report: dataclasses, which are written to JSON and read back. A file that is wrong in any way gives an error that names the field."""
from __future__ import annotations
import json, math, re, statistics, types, typing
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any
from attn.report.shapes import REPORT_SHAPES, ReportedShape

VERSION = 1     # changes with every change of the fields

# how the time of a kernel was taken
BY_GRAPH, BY_LAUNCH, BY_EMULATOR = HOW = ("events around a CUDA graph of launches", "the device's time of each launch", "the emulator's time")
TFLOPS, GBS = RATE_UNITS = ("TFLOP/s", "GB/s")

class BadReport(ValueError):
  """Error: a file is no valid report. The message names the field."""

# ***** the fields *****

def limited(least:float|None=None, among:Sequence[Any]|None=None, matching:str|None=None, default:Any=MISSING) -> Any:
  """Returns a dataclass field with limited values: at least `least`, one of `among`, or matching the regular expression `matching`."""
  return field(default=default, metadata={"least": least, "among": among, "matching": matching})

@dataclass(frozen=True)
class SensorReading:
  """Clocks, power and temperature of a card at one moment; a field is None if the driver does not give its value."""
  core_mhz: float|None = limited(0, default=None)
  memory_mhz: float|None = limited(0, default=None)
  watts: float|None = limited(0, default=None)
  celsius: float|None = None

@dataclass(frozen=True)
class CardText:
  """The card that a report describes: device, chip, product name, driver, and sensor readings before and after the measurements."""
  # tinygrad's name of the device
  kind: str = limited(matching=r"[A-Z]+")
  # instruction set such as gfx942
  chip: str = limited(matching=r"[\w.]+")
  # name of the product
  name: str = limited()
  compute_units: int|None = limited(1)
  driver: str = limited()
  before: SensorReading|None = None
  after: SensorReading|None = None

@dataclass(frozen=True)
class SoftwareText:
  attn: str
  commit: str|None = limited(matching=r"[0-9a-f]{7,40}(, changed)?")
  tinygrad: str = limited()
  python: str = limited()
  compiler: str = limited()
  system: str = limited()

@dataclass(frozen=True)
class MeasuredRate:
  """Measured speed of a card that does not depend on attention, such as the rate of a copy."""
  # exactly what was measured
  what: str
  unit: str = limited(among=RATE_UNITS)
  # rate of each round of the measurement
  rounds: tuple[float, ...] = limited(0)
  during: SensorReading|None = None
  @property
  def rate(self) -> float: return statistics.median(self.rounds)

@dataclass(frozen=True)
class PredictedTime:
  """Time of a kernel that the timing model of attn/isa/timing predicts for a card at a clock. `limit` says what limits the speed."""
  card: str
  ghz: float = limited(0)
  seconds: float = limited(0)
  limit: str = limited()

@dataclass(frozen=True)
class KernelTime:
  """Measured and predicted time of one kernel, including the kernel that merges its partial results, if there is one."""
  name: str
  tile: str
  # runs of a round
  runs: int = limited(1)
  # seconds of one run in each round
  rounds: tuple[float, ...] = limited(0)
  during: SensorReading|None = None
  # at the rated clock, then at the clock that GEMMs sustain if it is known
  predicted: tuple[PredictedTime, ...] = ()
  # why there are no predictions
  unpredicted: str|None = None
  @property
  def seconds(self) -> float: return statistics.median(self.rounds)
  @property
  def expected(self) -> PredictedTime|None:
    """Prediction with which the measured time is compared: at the clock sustained under matrix work if known, else at the rated clock."""
    # at the clock that the card sustains in GEMMs if this clock is known, otherwise at the rated clock
    return self.predicted[-1] if self.predicted else None
  @property
  def ratio(self) -> float|None:
    """Measured time divided by the predicted time."""
    return self.seconds/self.expected.seconds if self.expected is not None else None

@dataclass(frozen=True)
class JudgedResult:
  """Verdict on outputs, which were compared with float64 (docs/contract.md)."""
  ok: bool
  text: str
  # Error and limit of the element with the largest error relative to its limit. Both are None if NaN or inf are at wrong places, or if a kernel gave
  # no numbers to compare.
  error: float|None = limited(0)
  limit: float|None = limited(0)
  # share of the rows or heads that was compared
  checked: float = limited(0)

@dataclass(frozen=True)
class ReportRow:
  """One problem of a report: the verdict on its results, and the times of its kernels."""
  shape: ReportedShape
  verdict: JudgedResult|None = None
  kernels: tuple[KernelTime, ...] = ()
  # why no kernel of attn computes the problem on this device
  refused: str|None = None
  @property
  def right(self) -> bool: return self.refused is not None or (self.verdict is not None and self.verdict.ok)
  @property
  def seconds(self) -> float|None: return sum(x.seconds for x in self.kernels) if self.kernels else None
  @property
  def predicted(self) -> float|None:
    """Predicted seconds of all kernels together; None unless each kernel has a prediction."""
    found = [x.expected.seconds for x in self.kernels if x.expected is not None]
    return sum(found) if found and len(found) == len(self.kernels) else None

@dataclass(frozen=True)
class CardReport:
  version: int
  made: str = limited(matching=r"\d{4}-\d\d-\d\d")
  sizes: str = limited(among=tuple(REPORT_SHAPES))
  how: str = limited(among=HOW)
  card: CardText = limited()
  software: SoftwareText = limited()
  rates: tuple[MeasuredRate, ...] = ()
  rows: tuple[ReportRow, ...] = ()
  notes: tuple[str, ...] = ()
  @property
  def emulated(self) -> bool: return self.how == BY_EMULATOR
  @property
  def right(self) -> bool: return all(x.right for x in self.rows)
  def best_rate(self, unit:str) -> MeasuredRate|None:
    """Returns the highest of the card's measured rates in this unit, TFLOP/s or GB/s."""
    return max((x for x in self.rates if x.unit == unit), key=lambda x: x.rate, default=None)

# ***** to text and back *****

def report_json(report:CardReport) -> str: return json.dumps(asdict(report), indent=1, allow_nan=False) + "\n"

def read_report(path:Path) -> CardReport:
  """Reads a report from a file. Raises BadReport for anything that is wrong in the file."""
  try: data = json.loads(path.read_text(encoding="utf-8"))
  except OSError as e: raise BadReport(f"{path}: {e.strerror}") from None
  except (json.JSONDecodeError, UnicodeDecodeError) as e: raise BadReport(f"{path}: no JSON: {e}") from None
  try: return checked_report(data)
  except BadReport as e: raise BadReport(f"{path}: {e}") from None

def checked_report(data:Any) -> CardReport:
  """Returns a report made from the values of a JSON file. Raises BadReport, with the name of the field, for a wrong value."""
  if not isinstance(data, dict): raise BadReport(f"must be an object with the fields of a report, not {shown_value(data)}")
  if data.get("version") != VERSION: raise BadReport(f"version: is {shown_value(data.get('version'))}, and this attn reads {VERSION}")
  # a field that is missing, unknown, of a wrong type or out of its limits
  report: CardReport = made_from(CardReport, data, "")
  for at, problem in contradictions(report): raise BadReport(f"{at}: {problem}")
  return report

def shown_value(x:Any) -> str: return text if len(text := repr(x)) <= 60 else f"{text[:57]}..."

def made_from(kind:Any, x:Any, at:str) -> Any:
  """Converts a value from JSON to the type `kind`, or raises BadReport; `at` is the field's name in the message."""
  if isinstance(kind, types.UnionType):
    if x is None and types.NoneType in kind.__args__: return None
    kind, = (k for k in kind.__args__ if k is not types.NoneType)
  if is_dataclass(kind): return made_record(kind, x, at)
  if typing.get_origin(kind) is tuple:
    if not isinstance(x, list): raise BadReport(f"{at}: must be a list, not {shown_value(x)}")
    return tuple(made_from(typing.get_args(kind)[0], each, f"{at}[{i}]") for i, each in enumerate(x))
  wanted, name = {int: (int, "a whole number"), float: (int|float, "a number"), str: (str, "a text"), bool: (bool, "true or false")}[kind]
  if not isinstance(x, wanted) or (isinstance(x, bool) and kind is not bool): raise BadReport(f"{at}: must be {name}, not {shown_value(x)}")
  if isinstance(x, float) and not math.isfinite(x): raise BadReport(f"{at}: must be a finite number, not {x}")
  return kind(x)

def made_record(kind:Any, x:Any, at:str) -> Any:
  """Converts an object from JSON, which must have exactly the fields of the dataclass `kind`, or raises BadReport."""
  # `at` says in the message where the object stands in the report
  if not isinstance(x, dict): raise BadReport(f"{at}: must be an object, not {shown_value(x)}")
  types_of, names, dot = typing.get_type_hints(kind), [f.name for f in fields(kind)], f"{at}." if at else ""
  for name in names:
    if name not in x: raise BadReport(f"{dot}{name}: is missing")
  if unknown := sorted(x.keys() - set(names)): raise BadReport(f"{dot}{unknown[0]}: is no field of a report; the fields here are {', '.join(names)}")
  found = {f.name: made_from(types_of[f.name], x[f.name], f"{dot}{f.name}") for f in fields(kind)}
  for f in fields(kind):
    for each in found[f.name] if isinstance(found[f.name], tuple) else (found[f.name],): check_limits(f.metadata, each, f"{dot}{f.name}")
  try: return kind(**found)
  except ValueError as e: raise BadReport(f"{at}: {e}") from None

def check_limits(limits:typing.Mapping[str, Any], x:Any, at:str) -> None:
  """Raises BadReport if a field's value lies outside the field's `limits`; None is allowed."""
  least, among, matching = (limits.get(name) for name in ("least", "among", "matching"))
  if x is None: return
  if least is not None and x < least: raise BadReport(f"{at}: must be at least {least}, not {shown_value(x)}")
  if among is not None and x not in among: raise BadReport(f"{at}: must be one of {', '.join(map(repr, among))}, not {shown_value(x)}")
  if matching is not None and not re.fullmatch(matching, x): raise BadReport(f"{at}: must match {matching}, not {shown_value(x)}")

def contradictions(report:CardReport) -> typing.Iterator[tuple[str, str]]:
  """Yields (field, what is wrong) for fields of a report that contradict each other."""
  wanted, have = REPORT_SHAPES[report.sizes], [x.shape for x in report.rows]
  for shape in wanted:
    if shape not in have: yield "rows", f"there is none for {shape}"
  for i, row in enumerate(report.rows):
    at = f"rows[{i}]"
    if row.shape not in wanted or have.index(row.shape) != i: yield f"{at}.shape", f"{row.shape} is not expected here"
    if (row.verdict is None) != (row.refused is not None): yield f"{at}.verdict", "must be there exactly if the shape was not refused"
    for problem in of_verdict(row.verdict): yield f"{at}.verdict.ok", problem
    if row.right and row.refused is None and not row.kernels: yield f"{at}.kernels", "must name at least one kernel"
    for n, kernel in enumerate(row.kernels):
      here = f"{at}.kernels[{n}]"
      if not kernel.rounds: yield f"{here}.rounds", "must have at least one round"
      if (not kernel.predicted) != (kernel.unpredicted is not None): yield f"{here}.unpredicted", "must be there exactly if nothing is predicted"
  for i, rate in enumerate(report.rates):
    if not rate.rounds: yield f"rates[{i}].rounds", "must have at least one round"

def of_verdict(x:JudgedResult|None) -> list[str]:
  """Returns what contradicts the verdict "right" on a result: the error is missing, or above its limit. An empty list if nothing does."""
  # a result may be called right only if its error is given and within the limit
  if x is None or not x.ok: return []
  if x.error is None or x.limit is None: return ["is true, but there is no error and limit"]
  return [f"is true, but the error {x.error:.3g} is above the limit {x.limit:.3g}"]*(x.error > x.limit)
