"""The contract of attn/reference.py over many draws: the worst ratio of error to limit, of each kind of input on each chip.

    python test/contract.py --write docs/contract.md [--draws 100] [--jobs 2] [--chips gfx942 gfx1100]

With --chips the columns of the other chips stay as the file has them.

A draw is a problem with one head or a few (the fewer rows, the oftener the textbook's error, and with it the limit, is small by chance: of one row
alone it may be 0); the batch is made of draws, and each draw is judged by itself, element by element: the ratio is the largest
|out - exact| over the draw's limit, 2 max|same - exact| + 1e-5. For O it is that of the contract; for an LSE, where the contract allows two units in
the last place of its own size besides (LSE_ULPS), too.
"""
from __future__ import annotations
import argparse, itertools, os, sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
import numpy as np
from attn.problem import Problem
from attn.reference import LSE_ULPS, exact, judge, rounded, same
from cases import Inputs, normal, problem, run_kernels

CHIPS = ("gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90")

# ***** the draws *****

def peaked(p:Problem, seed:int, ramp:np.ndarray) -> Inputs:
  """Keys are as long as `ramp` says, and up to 2 to 16 times that, another number in each draw: rows are peaked, and their maxima follow it."""
  x, rng = normal(p, seed), np.random.default_rng(seed + 1)
  longest = rng.uniform(2, 16, (p.B, 1, 1, 1)).astype(np.float32)
  return replace(x, q=np.abs(x.q), k=rounded(x.k*ramp[:, None]*longest, p.dtype))

def rising(p:Problem, seed:int) -> Inputs: return peaked(p, seed, np.linspace(0.01, 1, p.Sk, dtype=np.float32))
def falling(p:Problem, seed:int) -> Inputs: return peaked(p, seed, np.linspace(1, 0.01, p.Sk, dtype=np.float32))

def steep(p:Problem, seed:int) -> Inputs:
  x = normal(p, seed)
  return replace(x, q=rounded(8*x.q, p.dtype))

def constant_rows(p:Problem, seed:int) -> Inputs:
  """All keys are alike, and so are the scores of a row."""
  x = normal(p, seed)
  return replace(x, k=np.broadcast_to(x.k[:, :, :1], x.k.shape).copy())

def huge_key(p:Problem, seed:int) -> Inputs:
  """One key of each draw, which each query likes or dislikes above all others, is 30 times as long as others."""
  x, rng = normal(p, seed), np.random.default_rng(seed + 1)
  k = x.k.copy()
  k[np.arange(p.B), :, rng.integers(0, p.Sk, p.B)] *= 30
  return replace(x, k=rounded(k, p.dtype))

def plain(p:Problem, seed:int) -> Inputs: return normal(p, seed)

KINDS:dict[str, Callable[[Problem, int], Inputs]] = {"normal": plain, "rising": rising, "falling": falling, "q times 8": steep,
                                                     "constant rows": constant_rows, "one huge key": huge_key}
SHAPES = {"2 heads, 239 x 203, D 64": dict(H=2, Sq=239, Sk=203, D=64), "1 head, 96 x 512, D 128": dict(H=1, Sq=96, Sk=512, D=128),
          "8 heads, 1 x 700, D 128, 4 splits": dict(H=8, Sq=1, Sk=700, D=128, num_splits=4)}

# ***** one case *****

@dataclass(frozen=True)
class Case:
  kind: str
  shape: str
  dtype: str
  out_dtype: str
  chip: str
  def __str__(self) -> str: return f"{self.chip}, {self.kind}, {self.shape}, {self.dtype} to {self.out_dtype}"

CASES = [Case(kind, shape, dtype, out, chip) for shape in SHAPES for chip in CHIPS for kind in KINDS for dtype in ("float16", "bfloat16")
         for out in ("float32", dtype)]

@dataclass(frozen=True)
class Ratios:
  """Of each draw, the largest error over the limit."""
  o: np.ndarray
  lse: np.ndarray

def ratio(out:np.ndarray, want:np.ndarray, text:np.ndarray, relative:float=0.0) -> float:
  verdict = judge(out, want, text, relative)
  return np.inf if verdict.pattern else verdict.error/verdict.limit

def ratios(case:Case, draws:int, seed:int=0, together:int=25) -> Ratios:
  """Runs the kernels on so many draws, some at a time, and judges each."""
  found:list[tuple[float, float]] = []
  for first in range(0, draws, together):
    n = min(together, draws - first)
    p = problem(B=n, dtype=case.dtype, out_dtype=case.out_dtype, **SHAPES[case.shape])
    x = KINDS[case.kind](p, seed + first)
    o, lse = run_kernels(p, x, case.chip, {})
    assert lse is not None
    want, text = exact(x.q, x.k, x.v, p.softmax_scale), same(x.q, x.k, x.v, p.softmax_scale, dtype=p.dtype, out_dtype=p.out_dtype)
    found += [(ratio(o[b], want[0][b], text[0][b]), ratio(lse[b], want[1][b], text[1][b], LSE_ULPS)) for b in range(n)]
  return Ratios(*map(np.array, zip(*found)))

# ***** the table *****

HEADER = """# The accuracy contract over {draws} draws of each kind

The worst ratio of error to limit, on the emulator: of O and of the LSE, where the limit is 2 max|same - exact| + 1e-5 of the draw (attn/reference.py)
and 1 is what the contract allows. `max|same - exact|` is the error of the textbook computation in the input type, rounded to the output type. The
emulator sums what a matrix instruction or a dot product adds up in fp32, in an order of its own. What the kinds are: test/contract.py, which also
writes this file: `python test/contract.py --write docs/contract.md`.
"""

def rows_of(shape:str) -> dict[str, tuple[str, str, str]]:
  """The begin of each line of a shape's table, and what it is of: dtype, out_dtype and kind."""
  return {f"| {dtype} to {out} | {kind} |": (dtype, out, kind)
          for dtype in ("float16", "bfloat16") for out, kind in itertools.product(("float32", dtype), KINDS)}

def cell(x:Ratios) -> str: return f"{x.o.max():.2f}, {x.lse.max():.2f}"

def table(cells:dict[Case, str], draws:int) -> str:
  lines = [HEADER.format(draws=draws)]
  for shape in SHAPES:
    lines += [f"## {shape}", "", "| types | kind | " + " | ".join(CHIPS) + " |", "|---|---|" + "---|"*len(CHIPS)]
    for begin, (dtype, out, kind) in rows_of(shape).items():
      lines.append(begin + "".join(f" {cells[Case(kind, shape, dtype, out, chip)]} |" for chip in CHIPS))
    lines.append("")
  lines.append("Each cell: O, LSE.")
  return "\n".join(lines) + "\n"

def cells_of(text:str) -> dict[Case, str]:
  """What a table has."""
  found = dict[Case, str]()
  for shape in SHAPES:
    part = text.split(f"## {shape}\n")[1].split("\n## ")[0]
    for begin, (dtype, out, kind) in rows_of(shape).items():
      line = next(line for line in part.splitlines() if line.startswith(begin))
      values = line.removeprefix(begin).strip(" |").split(" | ")
      found |= {Case(kind, shape, dtype, out, chip): value for chip, value in zip(CHIPS, values, strict=True)}
  return found

def computed(cases:Iterable[Case], draws:int, jobs:int) -> Iterable[tuple[Case, Ratios]]:
  cases = list(cases)
  os.environ["OMP_NUM_THREADS"] = "1"      # of the processes to come: each core has one
  with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
    yield from zip(cases, pool.map(ratios, cases, [draws]*len(cases)))

def main() -> int:
  options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  options.add_argument("--write", type=Path, help="the file that gets the table; else it is printed")
  options.add_argument("--draws", type=int, default=100)
  options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
  options.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS, help="those to compute")
  given = options.parse_args()
  cells = dict[Case, str]() if given.chips == CHIPS else cells_of(given.write.read_text())
  found = dict[Case, Ratios]()
  for case, x in computed([case for case in CASES if case.chip in given.chips], given.draws, given.jobs):
    found[case], cells[case] = x, cell(x)
    print(f"{case}: {cell(x)}", file=sys.stderr, flush=True)
  text = table(cells, given.draws)
  if given.write is None: print(text)
  else: given.write.write_text(text)
  over = [str(case) for case, x in found.items() if max(x.o.max(), x.lse.max()) > 1]
  for case in over: print(f"over its limit: {case}", file=sys.stderr)
  return bool(over)

if __name__ == "__main__": sys.exit(main())
