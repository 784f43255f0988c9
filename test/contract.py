"""Measures how far the outputs of kernels are from exact, for each kind of input and each unit. A unit is a chip, or `tiled`, the kernels of plain
UOps for chips without a matrix unit. The error of an element is divided by the element's own rounding error, and has a limit (docs/contract.md).

    python test/contract.py --write docs/contract.csv [--draws 100] [--jobs 2] [--units gfx942 tiled] [--missing] [--seconds 400]
    python test/contract.py --write docs/contract.csv --device CUDA --units sm_80 sm_90

The first command uses the emulator, the second a Hopper GPU. On that GPU the unit sm_80 means the mma.sync kernels, and sm_90 the wgmma kernels. As
soon as a case is done, its results are written, one line of the file for each output. At the end the table of docs/contract.md is made from all
lines. Lines of units not in --units stay. --missing continues a run that --seconds or anything else ended early. The run fails if an error is above
its limit.

A draw is one batch of random inputs. Each draw goes through `attn.attention`: o and lse, then the gradients for a random dO. Each draw has its own
bias, with one number for each key, except for `tiled`, which computes no gradient of a bias. Draws of one launch have the same sinks."""
from __future__ import annotations
import argparse, csv, math, os, sys, time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any
import numpy as np
import attn
from attn.accuracy import ENOUGH_ELEMENTS, Law, Verdict, judge
from attn.reference import rounded
from attn.tinygrad_compat import Context, Tensor
from api_cases import computed_on
from cases import DTYPES, array, expected, expected_gradients, floats, problem, tensor
from kinds import DEEP, KINDS, LARGE

UNITS = ("gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90", "tiled")
TILED_ON = "gfx1030"      # a chip without a matrix unit
TOGETHER = 20             # draws in one launch

SHAPES:dict[str, dict[str, Any]] = {
  "2 heads 90x150 D32": dict(H=2, Sq=90, Sk=150, D=32), "4 heads 1x300 D32 in 3 splits": dict(H=4, Sq=1, Sk=300, D=32, num_splits=3),
  "gradients 2 heads on 1 70x90 D64 causal bias sinks": dict(H=2, Hkv=1, Sq=70, Sk=90, D=64, causal=True)}
BY_GRADIENTS = ("dO", "gradients")      # first words of the kinds and shapes that need gradients
KERNELS = {"sm_80": "forward_mma", "sm_90": "forward_wgmma", "tiled": "tiled"}      # forces these kernels where dispatch might choose another
BACKWARD = {"sm_80": "backward_dq_mma", "sm_90": "backward_dq_wgmma"}
EMULATOR, GPU = "EMU", "CUDA"
ON_GPU = ("sm_80", "sm_90")      # units whose kernels run on one Hopper GPU

@dataclass(frozen=True)
class Case:
  shape: str
  unit: str
  dtype: str
  out_dtype: str
  kind: str
  @property
  def gradients(self) -> bool: return self.shape.startswith(BY_GRADIENTS)
  @property
  def arch(self) -> str: return TILED_ON if self.unit == "tiled" else self.unit
  @property
  def kernel(self) -> str:
    # Returns the value of ATTN_KERNEL for this case: the names of the forward and the backward kernel.
    # The queries of a case with splits are too few for the wgmma kernel.
    if "splits" in self.shape: return ""
    # On sm_90 with a float32 dO, the backward kernel is not named: wgmma kernels do not support this dtype, and dispatch chooses another.
    backward = BACKWARD.get(self.unit, "") if self.gradients and (self.unit != "sm_90" or self.out_dtype == self.dtype) else ""
    return ",".join(filter(None, (KERNELS.get(self.unit, ""), backward)))
  @property
  def key(self) -> tuple[str, ...]: return (self.shape, self.unit, self.dtype, self.out_dtype, self.kind)

def cases_of(units:Iterable[str]) -> list[Case]:
  # Returns all cases of these units, with cases of the same kernel side by side.
  # A process caches the kernels that it has lowered.
  every = [Case(shape, unit, dtype, out, kind) for shape in SHAPES for unit in units for dtype in ("float16", "bfloat16")
           for out in (dtype, "float32") for kind in KINDS]
  return [case for case in every if case.gradients or not case.kind.startswith(BY_GRADIENTS)]

# ***** one case *****

def judged(case:Case, n:int, seed:int, device:str=EMULATOR) -> dict[str, Verdict]:
  # Runs n draws of random inputs for a case as one call, and returns a `Verdict` for each output, by name.
  options = dict(SHAPES[case.shape])
  extras = {"sinks": floats(options["H"], seed=seed + 3)} if case.gradients else {}
  if case.gradients and case.unit != "tiled": extras["bias"] = floats(n, 1, 1, options["Sk"], seed=seed + 2)     # `tiled` computes no dbias
  p = problem(B=n, dtype=case.dtype, out_dtype=case.out_dtype, extras=extras, **options)
  if case.kind == DEEP and extras: extras["sinks"] += np.float32(4*-12*p.D*p.softmax_scale)      # without this term a sink gets all of P
  x = KINDS[case.kind](p, seed)
  do = rounded(floats(n, p.H, p.Sq, p.Dv, seed=seed + 4)*np.float32(1000.0 if case.kind == LARGE else 1.0), p.dtype)
  call = {name: options[name] for name in ("causal", "num_splits") if name in options}
  with computed_on(device if device == GPU else f"{device}::{case.arch}", case.kernel), Context(TRAINING=int(case.gradients)):
    given = {name: tensor(a, p.dtype, device) for name, a in vars(x).items()} | {name: tensor(a, "float32", device) for name, a in extras.items()}
    o, lse = attn.attention(**given, out_dtype=DTYPES[p.out_dtype], return_lse=True, **call)
    found = dict(zip(given, o.gradient(*given.values(), gradient=tensor(do, p.out_dtype, device)))) if case.gradients else {}
    found = {"o": o, "lse": lse} | {f"d{name}": g for name, g in found.items()}
    Tensor.realize(*found.values())
    laws:dict[str, Law] = dict(zip(("o", "lse"), expected(p, x, extras)))
    if case.gradients: laws |= {f"d{name}": law for name, law in expected_gradients(p, x, extras, do, None).items()}
    return {name: judge(array(t), laws[name]) for name, t in found.items()}

@dataclass(frozen=True)
class Line:
  # One line of docs/contract.csv: the errors of one output over a number of draws.
  # The contract limits the error of each element to 6 sigma + slack. Sigma is the standard deviation of the rounding errors that these dtypes force;
  # slack is for all other errors. `limit` is the largest ratio of an error to its limit, and must be at most 1. `sigmas` is the largest error/sigma,
  # and `rms` the root mean square of error/sigma. These two count only elements with slack < sigma/4; `rms` is 0 if there are too few such elements.
  # `resolved` is the percentage of such elements. `device` computed the output.
  output: str
  draws: int
  limit: float
  sigmas: float
  rms: float
  resolved: float
  device: str = EMULATOR
  @property
  def held(self) -> bool: return self.limit <= 1 and self.rms <= 1
  def cells(self) -> list[str]:
    far = [f"{x:.{digits}f}" if x else "" for x, digits in ((self.sigmas, 2), (self.rms, 3))]
    return [self.output, str(self.draws), f"{self.limit:.3f}", *far, f"{self.resolved:.1f}", self.device]
  @staticmethod
  def read(cells:list[str]) -> Line: return Line(cells[0], int(cells[1]), *[float(x or 0) for x in cells[2:6]], cells[6])

HEADER = ["shape", "unit", "inputs", "output type", "kind", "output", "draws", "error/limit", "error/sigma", "rms", "resolved %", "device"]

def line_of(output:str, draws:int, found:list[tuple[Verdict, int]], device:str) -> Line:
  # Combines the results of several calls for one output into one line of the table.
  # `found` has a comparison with float64 and a number of elements for each call.
  resolved = sum(v.resolved for v, _ in found)
  rms = math.sqrt(sum(v.rms**2*v.resolved for v, _ in found)/resolved) if resolved >= ENOUGH_ELEMENTS else 0.0
  worst = max(math.inf if v.pattern else v.ratio for v, _ in found)
  return Line(output, draws, worst, max(v.furthest for v, _ in found), rms, 100*resolved/sum(n for _, n in found), device)

def lines_of(case:Case, draws:int, device:str=EMULATOR, seed:int=0, together:int=TOGETHER) -> list[Line]:
  # Runs the kernels of a case on `draws` draws, and returns one line of docs/contract.csv for each output.
  # There are `together` draws in one launch.
  runs = [judged(case, min(together, draws - first), seed + first, device) for first in range(0, draws, together)]
  return [line_of(name, draws, [(run[name], run[name].count) for run in runs], device) for name in runs[0]]

# ***** the file *****

Lines = dict[Case, list[Line]]

def read(path:Path) -> Lines:
  found:Lines = {}
  for row in list(csv.reader(path.open()))[1:] if path.exists() else []: found.setdefault(Case(*row[:5]), []).append(Line.read(row[5:]))
  return found

def write(path:Path, lines:Lines) -> None:
  place = {case: i for i, case in enumerate(cases_of(UNITS))}
  with path.open("w", newline="") as to:
    out = csv.writer(to, lineterminator="\n")
    out.writerow(HEADER)
    for case in sorted(lines, key=lambda c: place.get(c, -1)): out.writerows([*case.key, *line.cells()] for line in lines[case])

# ***** the table of the page *****

BEGIN, END = "<!-- of docs/contract.csv -->\n", "<!-- end -->\n"
OUTPUTS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")

def worst_of(lines:list[Line]) -> str:
  # Formats the largest error/limit of all lines, followed by the largest rms if a line has an rms.
  if not lines: return ""
  of_many = [line.rms for line in lines if line.rms]
  return f"{max(line.limit for line in lines):.2f}" + (f", {max(of_many):.2f}" if of_many else "")

def table(lines:Lines) -> str:
  # Makes the table of the worst results over all shapes and types, by kind of input and by matrix unit.
  def rows(names:Iterable[str], field:str) -> Iterator[str]:
    for name in names:
      every = [line for case, of in lines.items() if getattr(case, field) == name for line in of]
      yield f"| {name} | " + " | ".join(worst_of([line for line in every if line.output == output]) for output in OUTPUTS) + " |"
  head = ["", "| | " + " | ".join(OUTPUTS) + " |", "|---|" + "---|"*len(OUTPUTS)]
  done, wanted = len(lines), len(cases_of(UNITS))
  return "\n".join([*head, *rows(KINDS, "kind"), *rows(UNITS, "unit"), "", f"{done} of {wanted} cases are drawn."]) + "\n"

def with_table(page:str, lines:Lines) -> str:
  before, rest = page.split(BEGIN)
  return before + BEGIN + table(lines) + END + rest.split(END)[1]

# ***** many cases *****

def lines_until(case:Case, draws:int, device:str, until:float) -> list[Line]|None:
  # Returns the lines of a case, or None, without any computation, if it is already later than `until`.
  return None if time.time() > until else lines_of(case, draws, device)

def computed(cases:Iterable[Case], draws:int, device:str, jobs:int, seconds:float) -> Iterable[tuple[Case, list[Line]]]:
  # Yields the lines of each case when they are ready, computed by `jobs` processes.
  # No case begins later than `seconds` after the start.
  os.environ["OMP_NUM_THREADS"] = "1"      # for the worker processes: each one has one core
  with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
    begun = {pool.submit(lines_until, case, draws, device, time.time() + seconds): case for case in cases}
    for future in as_completed(begun):
      if (found := future.result()) is not None: yield begun[future], found

def main() -> int:
  options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  options.add_argument("--write", type=Path, help="file of the lines; a page of the same name gets their table; by default lines are printed")
  options.add_argument("--draws", type=int, default=100)
  options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
  options.add_argument("--units", nargs="+", choices=UNITS, default=UNITS, help="units to compute")
  options.add_argument("--device", choices=(EMULATOR, GPU), default=EMULATOR, help=f"device to run on; {GPU} has only {' and '.join(ON_GPU)}")
  options.add_argument("--missing", action="store_true", help="compute only cases that the file lacks or has with fewer draws")
  options.add_argument("--seconds", type=float, default=float("inf"), help="begin no case after this many seconds")
  given = options.parse_args()
  if given.device == GPU and (others := set(given.units) - set(ON_GPU)): options.error(f"--device {GPU} has no units {', '.join(sorted(others))}")
  lines = read(given.write) if given.write is not None else {}
  wanted = [case for case in cases_of(given.units) if not given.missing or any(line.draws < given.draws for line in lines.get(case, [NONE]))]
  over, done = list[str](), 0
  for case, found in computed(wanted, given.draws, given.device, given.jobs, given.seconds):
    lines[case], done = found, done + 1
    over += [f"{', '.join(case.key)}: {line}" for line in found if not line.held]
    print(", ".join(case.key), *[" ".join(line.cells()) for line in found], sep="; ", file=sys.stderr, flush=True)
    if given.write is None: continue
    write(given.write, lines)
    page = given.write.with_suffix(".md")
    page.write_text(with_table(page.read_text(), read(given.write)))      # read from text, to round the numbers as in the file
  for text in over: print(f"the law is broken: {text}", file=sys.stderr)
  print(f"drawn {done} of {len(wanted)} cases", file=sys.stderr)
  return bool(over)

NONE = Line("", 0, 0, 0, 0, 0)

if __name__ == "__main__": sys.exit(main())
