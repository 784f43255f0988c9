"""The contract of attn/reference.py over many draws: the worst ratio of error to limit, of each kind of input on each chip.

    python test/contract.py --write docs/contract.md [--draws 100] [--jobs 2] [--chips gfx942 gfx1100] [--of gradients] [--seconds 400]
    python test/contract.py --write docs/contract.md --missing [--seconds 400]

With --chips the columns of the other chips stay as the file has them, and with --of the other tables. What is drawn anew is "not drawn" until it is:
where --seconds or anything else ends a run before it is done, --missing goes on, with as many processes as there are cores (--jobs).

A draw is a problem with one head or a few (the fewer rows, the oftener the textbook's error, and with it the limit, is small by chance: of one row
alone it may be 0); the batch is made of draws, and each draw is judged by itself, element by element: the ratio is the largest
|out - exact| over the draw's limit, 2 max|same - exact| + 1e-5. For O it is that of the contract; for an LSE, where the contract allows two units in
the last place of its own size besides (LSE_ULPS), too.

Gradients are those of `attn.attention` for a dO of its own in each draw, by all of its kernels one after the other. The bias is one row of each
draw, so its gradient is a sum over heads and queries. Sinks are shared by the draws that run together, and their gradient, a number a head, is a sum
over these. Gradients are judged three times: of all draws together; of each draw by itself (dsinks: of those that ran together); and of each draw by
itself where the backward kernels are given the o and the lse of the textbook, so that delta has the same roundings in both. test/contract_rows.py
shows why the second number may be above 1 while the third one may not.
"""
from __future__ import annotations
import argparse, itertools, os, sys, time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any
import numpy as np
import attn
from attn.api.gradient import kernel_gradients
from attn.chips import get_chip
from attn.problem import Problem
from attn.reference import LSE_ULPS, exact, judge, rounded, same
from attn.tinygrad_compat import Context, Tensor
from cases import DTYPES, Inputs, array, expected, expected_gradients, floats, normal, problem, run_kernels, tensor

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

def level(p:Problem, seed:int) -> Inputs:
  """dP and delta nearly cancel."""
  x = normal(p, seed)
  return replace(x, v=rounded(3 + 0.1*x.v, p.dtype))

def deep(p:Problem, seed:int) -> Inputs:
  """Every lse is below -100."""
  x = normal(p, seed)
  return replace(x, q=np.full_like(x.q, 4), k=rounded(x.k*0.125 - 12, p.dtype))

DEEP, LARGE = "lse below -100", "dO 1000 times as large"
OF_GRADIENTS = {"V near 3": level, DEEP: deep, LARGE: plain}     # besides KINDS
SHAPES:dict[str, dict[str, Any]] = {
  "2 heads, 239 x 203, D 64": dict(H=2, Sq=239, Sk=203, D=64), "1 head, 96 x 512, D 128": dict(H=1, Sq=96, Sk=512, D=128),
  "8 heads, 1 x 700, D 128, 4 splits": dict(H=8, Sq=1, Sk=700, D=128, num_splits=4)}

GRADIENT_SHAPES:dict[str, dict[str, Any]] = {
  "gradients, 4 heads on 2, 97 x 113, D 64, causal": dict(H=4, Hkv=2, Sq=97, Sk=113, D=64, causal=True),
  "gradients, 2 heads, 70 x 200, D 128": dict(H=2, Sq=70, Sk=200, D=128)}
GRADIENT_OUT = dict(zip(GRADIENT_SHAPES, ("", "float32")))      # the output's dtype, where it is not that of the inputs

def kinds_of(shape:str) -> dict[str, Callable[[Problem, int], Inputs]]: return {**KINDS, **OF_GRADIENTS} if shape in GRADIENT_SHAPES else KINDS

# ***** one case *****

@dataclass(frozen=True)
class Case:
  kind: str
  shape: str
  dtype: str
  out_dtype: str
  chip: str
  def __str__(self) -> str: return f"{self.chip}, {self.kind}, {self.shape}, {self.dtype} to {self.out_dtype}"

def types_of(shape:str) -> list[tuple[str, str]]:
  """(dtype, out_dtype): of gradients, a float32 output, and with it dO, in one shape, and one of the inputs' dtype in the other."""
  return [(dtype, out) for dtype in ("float16", "bfloat16")
          for out in (("float32", dtype) if shape in SHAPES else (GRADIENT_OUT[shape] or dtype,))]

# those of the same kernels side by side: a process keeps what it has lowered
CASES = [Case(kind, shape, dtype, out, chip) for shape in (*SHAPES, *GRADIENT_SHAPES) for chip in CHIPS for dtype, out in types_of(shape)
         for kind in kinds_of(shape)]

@dataclass(frozen=True)
class Ratios:
  """Of each draw, the largest error over the limit."""
  o: np.ndarray
  lse: np.ndarray

@dataclass(frozen=True)
class GradientRatios:
  """Of each gradient, the largest error over the limit: of all draws `together`; the worst draw `alone`; and that of the backward kernels alone,
  `given` the textbook's o and lse."""
  together: dict[str, float]
  alone: dict[str, float]
  given: dict[str, float]

def ratio(out:np.ndarray, want:np.ndarray, text:np.ndarray, relative:float=0.0) -> float:
  verdict = judge(out, want, text, relative)
  return np.inf if verdict.pattern else verdict.error/verdict.limit

def ratios(case:Case, draws:int, seed:int=0) -> Ratios|GradientRatios:
  """Runs the kernels on so many draws, some at a time, and judges each."""
  return (gradient_ratios if case.shape in GRADIENT_SHAPES else forward_ratios)(case, draws, seed)

def forward_ratios(case:Case, draws:int, seed:int=0, together:int=25) -> Ratios:
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

Pair = tuple[np.ndarray, np.ndarray]
GRADIENTS = ("q", "k", "v", "bias", "sinks")

@dataclass(frozen=True)
class Run:
  """Gradients of so many draws together: by `attention`, by its backward kernels from the textbook's o and lse, and (exact, by the textbook)."""
  attention: dict[str, np.ndarray]
  backward: dict[str, np.ndarray]
  want: dict[str, Pair]

@dataclass(frozen=True)
class Draws:
  """What a case draws: the problem, q, k and v, bias and sinks, and dO."""
  p: Problem
  x: Inputs
  extras: dict[str, np.ndarray]
  do: np.ndarray

def drawn(case:Case, n:int, seed:int) -> Draws:
  options = dict(GRADIENT_SHAPES[case.shape])
  extras = {"bias": floats(n, 1, 1, options["Sk"], seed=seed + 2), "sinks": floats(options["H"], seed=seed + 3)}
  p = problem(B=n, dtype=case.dtype, out_dtype=case.out_dtype, lse=False, extras=extras, **options)
  if case.kind == DEEP: extras["sinks"] += np.float32(4*-12*p.D*p.softmax_scale)      # as low as the scores: else the sink has all of P
  size = 1000.0 if case.kind == LARGE else 1.0
  do = rounded(floats(n, p.H, p.Sq, p.Dv, seed=seed + 4)*np.float32(size), p.out_dtype)
  return Draws(p, kinds_of(case.shape)[case.kind](p, seed), extras, do)

def gradients(case:Case, n:int, seed:int) -> Run:
  d = drawn(case, n, seed)
  p, x, extras, do = d.p, d.x, d.extras, d.do
  (_, text_o), (_, text_lse) = expected(p, x, extras)
  with Context(DEV=f"EMU::{case.chip}", TRAINING=1):
    given = {name: tensor(a, p.dtype) for name, a in vars(x).items()} | {name: tensor(a, "float32") for name, a in extras.items()}
    o = attn.attention(**given, out_dtype=DTYPES[p.out_dtype], causal=GRADIENT_SHAPES[case.shape].get("causal", False))
    found = dict(zip(given, o.gradient(*given.values(), gradient=(of_o := tensor(do, p.out_dtype)))))
    outputs = {"o": tensor(text_o, p.out_dtype).uop, "lse": tensor(text_lse, "float32").uop}
    alone = kernel_gradients(p, get_chip(case.chip), {name: t.uop for name, t in given.items()}, outputs, {"o": of_o.uop})
    both = found, {name: Tensor(u) for name, u in alone.items()}
    Tensor.realize(*[t for of in both for t in of.values()])
    return Run(*[{name: array(of[name]) for name in GRADIENTS} for of in both], expected_gradients(p, x, extras, do, None))

def gradient_ratios(case:Case, draws:int, seed:int, together:int=20) -> GradientRatios:
  runs = [gradients(case, min(together, draws - first), seed + first) for first in range(0, draws, together)]
  def worst_draw(name:str, of:str) -> float:
    every = [(getattr(run, of)[name], *run.want[name]) for run in runs]
    return max(ratio(*each) for run in every for each in (zip(*run, strict=True) if name != "sinks" else [run]))
  def of_all(name:str) -> float:
    return ratio(*map(np.stack, zip(*[(run.attention[name], *run.want[name]) for run in runs], strict=True)))
  return GradientRatios({name: of_all(name) for name in GRADIENTS},
                        *[{name: worst_draw(name, of) for name in GRADIENTS} for of in ("attention", "backward")])

# ***** the table *****

HEADER = """# The accuracy contract over {draws} draws of each kind

The worst ratio of error to limit, on the emulator: of O and of the LSE, and of the gradients of `attn.attention`, where the limit is
2 max|same - exact| + 1e-5 of the draw (attn/reference.py) and 1 is what the contract allows. `max|same - exact|` is the error of the textbook
computation in the input type, rounded to the output type. The emulator sums what a matrix instruction or a dot product adds up in
fp32, in an order of its own. What the kinds are: test/contract.py, which also writes this file: `python test/contract.py --write docs/contract.md`.

Gradients are through o, with a bias of keys, one row for each draw, and sinks, of which each gradient is a sum over 20 draws. Each has three numbers:

1. of all draws together, as of one tensor with as many batches;
2. in brackets, of the draw that looks worst alone (of dsinks, of four numbers, the sums of 20 draws);
3. after it, of the draw that looks worst alone where the backward kernels are given the o and the lse of the textbook.

The contract's words are those of the second number, and some draws break them. The first number is what a tensor of as many batches has: of dq, dk
and dv it is below 1 throughout. Held at most 1, by this file's command and by the tests, is the third one: it is of what the backward kernels
compute. The second one is over 1 here and there, and of dbias and dsinks the first one too, by chance and not by a fault: delta = rowsum(dO * O)
has the roundings of an O of 16 bits, which are other ones in the kernels' O and in the textbook's. Where the largest error of a draw is that of one
row (one huge key near the end of causal keys; a sink that counts in one row; a dbias, a sum in fp32, in which nothing else is rounded), it is over
twice the textbook's in every fourth or fifth such draw, as the textbook's is over twice the kernel's, though on the whole the kernel's is the
smaller one: docs/contract_rows.md has the figures, the same of FlashAttention-2's own forward, and what it would take to have less of it: as much
memory again as O has, or an eighth product.

With every lse at -380 the third number is over 1 as well, and held at most 2: P = exp2(S*c - lse*log2(e)) there is the difference of two numbers near
550, which fp32 rounds so that P is off by up to 2.2e-5 of itself, and scores with a bias are rounded there otherwise than near 380, where the
textbook has them. 16 bits are at least ten times as coarse, but now and then that decides how a large dS is rounded, and a dbias in fp32 shows it.

A cell without a third number is of an earlier draw.
"""

NOT_DRAWN = "not drawn"

def rows_of(shape:str) -> dict[str, tuple[str, str, str]]:
  """The begin of each line of a shape's table, and what it is of: dtype, out_dtype and kind."""
  return {f"| {dtype} to {out} | {kind} |": (dtype, out, kind) for (dtype, out), kind in itertools.product(types_of(shape), kinds_of(shape))}

def cell(x:Ratios|GradientRatios) -> str:
  if isinstance(x, Ratios): return f"{x.o.max():.2f}, {x.lse.max():.2f}"
  return ", ".join(f"{x.together[name]:.2f} ({x.alone[name]:.2f}; {x.given[name]:.2f})" for name in GRADIENTS)

def is_whole(case:Case, value:str) -> bool:
  """Whether this, of a cell of the table, is all numbers of its case."""
  return bool(value) and (case.shape not in GRADIENT_SHAPES or value.count(";") == len(GRADIENTS))

def worst(x:Ratios|GradientRatios) -> float: return max(x.o.max(), x.lse.max()) if isinstance(x, Ratios) else max(x.given.values())
def allowed(case:Case) -> float:
  """What `worst` may be; docs/contract.md says why 2."""
  return 2 if case.kind == DEEP else 1

def table(cells:dict[Case, str], draws:int) -> str:
  lines = [HEADER.format(draws=draws)]
  for shape in [x for x in (*SHAPES, *GRADIENT_SHAPES) if any(case.shape == x for case in cells)]:
    lines += [f"## {shape}", "", "| types | kind | " + " | ".join(CHIPS) + " |", "|---|---|" + "---|"*len(CHIPS)]
    for begin, (dtype, out, kind) in rows_of(shape).items():
      lines.append(begin + "".join(f" {cells.get(Case(kind, shape, dtype, out, chip), NOT_DRAWN)} |" for chip in CHIPS))
    lines.append("")
  lines.append("Each cell: O, LSE; or dq, dk, dv, dbias, dsinks, of all draws, and in brackets of one, by itself and given the textbook's o and lse.")
  return "\n".join(lines) + "\n"

def cells_of(text:str) -> dict[Case, str]:
  """What a table has."""
  found = dict[Case, str]()
  for shape in (*SHAPES, *GRADIENT_SHAPES):
    if f"## {shape}\n" not in text: continue
    part = text.split(f"## {shape}\n")[1].split("\n## ")[0]
    for begin, (dtype, out, kind) in rows_of(shape).items():
      line = next(line for line in part.splitlines() if line.startswith(begin))
      values = line.removeprefix(begin).strip(" |").split(" | ")
      found |= {Case(kind, shape, dtype, out, chip): value for chip, value in zip(CHIPS, values, strict=True) if value != NOT_DRAWN}
  return found

def ratios_until(case:Case, draws:int, until:float) -> Ratios|GradientRatios|None:
  """None where this time has come before the case is begun."""
  return None if time.time() > until else ratios(case, draws)

def computed(cases:Iterable[Case], draws:int, jobs:int, seconds:float) -> Iterable[tuple[Case, Ratios|GradientRatios]]:
  """Each case as it is done, by so many processes; after so many seconds none is begun any more."""
  os.environ["OMP_NUM_THREADS"] = "1"      # of the processes to come: each core has one
  with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
    begun = {pool.submit(ratios_until, case, draws, time.time() + seconds): case for case in cases}
    for future in as_completed(begun):
      if (found := future.result()) is not None: yield begun[future], found

def main() -> int:
  options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  options.add_argument("--write", type=Path, help="the file that gets the table; else it is printed")
  options.add_argument("--draws", type=int, default=100)
  options.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
  options.add_argument("--chips", nargs="+", choices=CHIPS, default=CHIPS, help="those to compute")
  options.add_argument("--of", choices=("all", "forward", "gradients"), default="all", help="what to compute")
  options.add_argument("--missing", action="store_true", help="only what the file does not have")
  options.add_argument("--seconds", type=float, default=float("inf"), help="after these nothing is begun any more")
  given = options.parse_args()
  found, wanted = dict[Case, Ratios|GradientRatios](), {"all": (False, True), "forward": (False,), "gradients": (True,)}[given.of]
  cells = cells_of(given.write.read_text()) if given.write is not None and given.write.exists() else {}
  cases = [case for case in CASES if case.chip in given.chips and (case.shape in GRADIENT_SHAPES) in wanted
           and not (given.missing and is_whole(case, cells.get(case, "")))]
  for case in cases: cells.pop(case, None)
  for case, x in computed(cases, given.draws, given.jobs, given.seconds):
    found[case], cells[case] = x, cell(x)
    print(f"{case}: {cell(x)}", file=sys.stderr, flush=True)
    if given.write is not None: given.write.write_text(table(cells, given.draws))
  if given.write is None: print(table(cells, given.draws))
  over = [str(case) for case, x in found.items() if worst(x) > allowed(case)]
  for case in over: print(f"over its limit: {case}", file=sys.stderr)
  print(f"drawn {len(found)} of {len(cases)} cells, {len(over)} over their limit", file=sys.stderr)
  return bool(over)

if __name__ == "__main__": sys.exit(main())
