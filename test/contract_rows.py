"""Why a single draw's gradients may be over the contract's limit (docs/contract.md) although the kernels err less than the textbook.

    python test/contract_rows.py --write docs/contract_rows.md [--draws 100] [--chip gfx942]

All that the backward kernels and the textbook compute differently is delta = rowsum(dO * O): by an O of which forward has rounded P, and then O. Both
round the same numbers, but not in the same place: the textbook P/sum(P), a kernel exp2(S - m), whose m is that of its tiles. Here the errors of delta
are compared row by row: of the forward kernel's O, of the textbook's, and of that of the forward of FlashAttention-2 (arXiv 2307.08691, algorithm 1),
which is a textbook, too: P = exp(S - max S) rounded to the inputs' dtype, O divided by the fp32 sum of P as it was before.

And what other ways to make delta would change, in numpy: FlashAttention-2's backward (algorithm 2) from its own forward, its delta by each of WAYS.
"""
from __future__ import annotations
import argparse, itertools
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import attn
from attn.reference import exact, rounded, same
from attn.tinygrad_compat import Context
from backward_cases import options_of
from cases import DTYPES, array, expected_gradients, tensor
from contract import CHIPS, DEEP, GRADIENT_SHAPES, KINDS, OF_GRADIENTS, Case, Draws, drawn, ratio

SHAPE = next(iter(GRADIENT_SHAPES))
GRADIENTS = {"dq": "q", "dk": "k", "dbias": "bias", "dsinks": "sinks"}     # those that delta is in
OF_WAYS = {"all others": [kind for kind in (*KINDS, *OF_GRADIENTS) if kind != DEEP], DEEP: [DEEP]}
COLUMNS = ("rms, textbook", "rms, kernel", "rms, FlashAttention-2", "kernel > 2 textbook", "textbook > 2 kernel", "FlashAttention-2 > 2 textbook")

@dataclass(frozen=True)
class Errors:
  """Of delta, row by row."""
  kernel: np.ndarray
  textbook: np.ndarray
  other: np.ndarray
  def cells(self) -> list[str]:
    def rms(x:np.ndarray) -> str: return f"{np.sqrt(np.square(x).mean()):.1e}"
    def over(x:np.ndarray, y:np.ndarray) -> str: return f"{100*np.mean(np.abs(x) > 2*np.abs(y)):.0f} %"
    return [rms(self.textbook), rms(self.kernel), rms(self.other), over(self.kernel, self.textbook), over(self.textbook, self.kernel),
            over(self.other, self.textbook)]

def scores_of(d:Draws) -> tuple[np.ndarray, np.ndarray]:
  """(scores, sinks) of causal attention with a bias and sinks in fp32."""
  p, x = d.p, d.x
  s = x.q @ np.repeat(x.k, p.H//p.Hkv, 1).swapaxes(2, 3)*np.float32(p.softmax_scale) + d.extras["bias"]
  return np.where(np.arange(p.Sq)[:, None] + p.offset >= np.arange(p.Sk), s, np.float32(-np.inf)), d.extras["sinks"][:, None, None]

def of_flash_attention(d:Draws) -> tuple[np.ndarray, np.ndarray]:
  """O, before it is rounded, and lse (with a last axis of 1) by algorithm 1, in a single tile of keys."""
  s, sinks = scores_of(d)
  m = np.maximum(s.max(-1, keepdims=True), sinks)
  weights = np.exp(s - m)
  total = weights.sum(-1, keepdims=True) + np.exp(sinks - m)
  return rounded(weights, d.p.dtype) @ np.repeat(d.x.v, d.p.H//d.p.Hkv, 1)/total, m + np.log(total)

def by_kernel(d:Draws, chip:str) -> np.ndarray:
  with Context(DEV=f"EMU::{chip}", TRAINING=1):
    given = {name: tensor(a, d.p.dtype) for name, a in vars(d.x).items()} | {name: tensor(a, "float32") for name, a in d.extras.items()}
    return array(attn.attention(**given, out_dtype=DTYPES[d.p.out_dtype], causal=True))

def errors(kind:str, dtype:str, chip:str, draws:int, together:int=20) -> Errors:
  found: list[list[np.ndarray]] = []
  for seed in range(0, draws, together):
    d = drawn(Case(kind, SHAPE, dtype, dtype, chip), min(together, draws - seed), seed)
    p, args = d.p, (d.x.q, d.x.k, d.x.v, d.p.softmax_scale, d.p.window, d.p.offset, options_of(d.p, d.extras))
    want, do = exact(*args)[0], rounded(d.do, p.dtype).astype(np.float64)
    outs = by_kernel(d, chip), same(*args, dtype=p.dtype, out_dtype=p.out_dtype)[0], rounded(of_flash_attention(d)[0], p.out_dtype)
    found.append([(do*(o - want)).sum(-1) for o in outs])
  return Errors(*[np.concatenate(x) for x in zip(*found)])

# ***** other ways to make delta *****

WAYS = {"rounded": "rowsum(dO * O) of the rounded O", "float32": "rowsum(dO * O) of an O in float32",
        "later": "dq of the rounded O; the others of sum(P * dP), which dq's kernel knows at its end",
        "fourth": "the same, and dq by a fourth product: sum(dS K) - (delta - delta of O) * sum(P K)"}

def backward(d:Draws, way:str) -> dict[str, np.ndarray]:
  """The gradients by algorithm 2, of which delta is made in this way."""
  p, group, scale = d.p, d.p.H//d.p.Hkv, np.float32(d.p.softmax_scale)
  (s, sinks), (o, lse), do, q = scores_of(d), of_flash_attention(d), rounded(d.do, d.p.dtype), d.x.q
  k, v = (np.repeat(a, group, 1) for a in (d.x.k, d.x.v))
  def operand(a:np.ndarray) -> np.ndarray: return rounded(a, p.dtype)
  def of_group(a:np.ndarray) -> np.ndarray: return operand(a.reshape(p.B, p.Hkv, group, *a.shape[-2:]).sum(2))
  weights, sink, dp = np.exp(s - lse), np.exp(sinks - lse), do @ v.swapaxes(2, 3)
  first = delta = (do*(o if way == "float32" else rounded(o, p.out_dtype))).sum(-1, keepdims=True)
  ds = weights*(dp - first)
  dq = operand(ds) @ k
  if way in ("later", "fourth"):
    delta = first + ds.sum(-1, keepdims=True) - first*sink
    ds = weights*(dp - delta)
  if way == "fourth": dq -= (delta - first)*(operand(weights) @ k)
  return {"dq": operand(dq*scale), "dk": of_group(operand(ds).swapaxes(2, 3) @ q*scale), "dbias": ds.sum((1, 2), keepdims=True),
          "dsinks": -(sink*delta).sum((0, 2, 3))}

def draw_by_draw(kind:str, dtype:str, draws:int, together:int=20) -> dict[str, dict[str, list[float]]]:
  """Of each way and gradient, the ratio of error to limit of each draw (dsinks: of those that are drawn together)."""
  found:dict[str, dict[str, list[float]]] = {way: {name: [] for name in GRADIENTS} for way in WAYS}
  for seed in range(0, draws, together):
    d = drawn(Case(kind, SHAPE, dtype, dtype, CHIPS[0]), min(together, draws - seed), seed)
    want = expected_gradients(d.p, d.x, d.extras, d.do, None)
    for way in WAYS:
      for name, gradient in backward(d, way).items():
        every = (gradient, *want[GRADIENTS[name]])
        found[way][name] += [ratio(*each) for each in (zip(*every, strict=True) if name != "dsinks" else [every])]
  return found

def lines_of_ways(draws:int) -> list[str]:
  """Of all kinds but DEEP, and of that one, the worst ratio of each gradient and the share of draws over the limit."""
  lines = []
  for dtype, (label, kinds) in itertools.product(("float16", "bfloat16"), OF_WAYS.items()):
    of_kinds = [draw_by_draw(kind, dtype, draws) for kind in kinds]
    for way, text in WAYS.items():
      ratios = [np.array([x for of in of_kinds for x in of[way][name]]) for name in GRADIENTS]
      lines.append(f"| {dtype} | {label} | {text} | {' | '.join(f'{x.max():.2f} ({100*np.mean(x > 1):.1f} %)' for x in ratios)} |")
  return lines

TEXT = """# The error of delta, row by row

What `python test/contract_rows.py --write docs/contract_rows.md` finds in {draws} draws of each kind on {chip}, {shape}, of {rows} rows each.

Given the o and the lse of the textbook, the backward kernels come as near to exact as the textbook in each single draw: the third number of each
gradient in docs/contract.md. Given their own forward's, they differ by delta = rowsum(dO * O) and by it alone. O is rounded to 16 bits, and so was P
before; which way a number is rounded is chance, and another chance where P is P/sum(P) than where it is exp(S - m). Below: the root of the mean
square of the error of delta, and in how many rows one error is more than twice another. The kernel's is smaller than the textbook's on the whole, and
more than twice the textbook's in every fourth or fifth row, not as often as the other way round, and as often as that of the forward of
FlashAttention-2, which is a textbook, too.

So where the largest error of a gradient in a draw is that of one row, as where one huge key is near the end of the keys, which few queries see, the
draw is over the contract's limit with that chance, for whoever rounds P and O, and however exactly he goes on: with many draws it happens, and with
more rows in each less often. FlashAttention-2 and 3 and cuDNN all take the rounded O.

| types | kind | {columns} |
|---|---|---|---|---|---|---|---|
{lines}

## Other ways to make delta

The same draws through FlashAttention-2's forward and backward in numpy, with a delta made in four ways: the worst ratio of error to limit of one draw
(dsinks: of 20 together, four numbers), and in how many draws it is over 1. The emulated kernels go by the first way; what its line has is what
docs/contract.md has in its second numbers.

| types | kind | delta | dq | dk | dbias | dsinks |
|---|---|---|---|---|---|---|
{ways}

What each would cost:

- An O in float32, or what rounding it to 16 bits left over, in 16 bits more, kept from forward to backward: 2 Dv bytes a query and head at least,
  as much as O itself, written once and read once. Beside inputs and outputs training has 8 bytes a query and head now.
- sum(P * dP) in fp32: one addition for each score in dq's loop. Where keys are divided over workgroups or devices, their sums have to be added before
  dk can be computed. And dq is as it was.
- dq as well: sum(P K), an eighth product where two kernels have seven, and as many accumulators again as dq has.
- Not centered, as dQ = sum(P * dP K) - delta * sum(P K), it is worse than the first way, for P * dP is rounded where it nearly cancels: tried on 60
  draws, dq came to 1.4 and 2.0 of the limit with V near 3, and to 7.4 and 21 with one huge key (fp16, bf16).

None of them is free, none holds every draw, and the first way's error is below the textbook's on the whole. So delta is rowsum(dO * O), and what
holds the kernels draw by draw is the third number of docs/contract.md. With every lse below -100 a draw of dk can be over its limit however exact
delta is: a row of dk has one number 64 times over, and which way the largest dS of a column is rounded is chance as well.
"""

def main() -> None:
  options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  options.add_argument("--write", type=Path, help="the file that gets the table; else it is printed")
  options.add_argument("--draws", type=int, default=100)
  options.add_argument("--chip", choices=CHIPS, default=CHIPS[0])
  given, sizes = options.parse_args(), GRADIENT_SHAPES[SHAPE]
  lines = [f"| {dtype} | {kind} | {' | '.join(errors(kind, dtype, given.chip, given.draws).cells())} |"
           for dtype in ("float16", "bfloat16") for kind in (*KINDS, *OF_GRADIENTS)]
  text = TEXT.format(draws=given.draws, chip=given.chip, shape=SHAPE, rows=sizes["H"]*sizes["Sq"], columns=" | ".join(COLUMNS),
                     lines="\n".join(lines), ways="\n".join(lines_of_ways(given.draws)))
  if given.write is not None: given.write.write_text(text)
  else: print(text, end="")

if __name__ == "__main__": main()
