"""Why a single draw's gradients may be over the contract's limit (docs/contract.md) although the kernels err less than the textbook.

    python test/contract_rows.py --write docs/contract_rows.md [--draws 100] [--chip gfx942]

All that the backward kernels and the textbook compute differently is delta = rowsum(dO * O): by an O of which forward has rounded P, and then O. Both
round the same numbers, but not in the same place: the textbook P/sum(P), a kernel exp2(S - m), whose m is that of its tiles. Here the errors of delta
are compared row by row: of the forward kernel's O, of the textbook's, and of that of the forward of FlashAttention-2 (arXiv 2307.08691, algorithm 1),
which is a textbook, too: P = exp(S - max S) rounded to the inputs' dtype, O divided by the fp32 sum of P as it was before.
"""
from __future__ import annotations
import argparse
from dataclasses import dataclass
from pathlib import Path
import numpy as np
import attn
from attn.reference import exact, rounded, same
from attn.tinygrad_compat import Context
from backward_cases import options_of
from cases import DTYPES, array, tensor
from contract import CHIPS, GRADIENT_SHAPES, KINDS, OF_GRADIENTS, Case, Draws, drawn

SHAPE = next(iter(GRADIENT_SHAPES))
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

def of_flash_attention(d:Draws) -> np.ndarray:
  """O of causal attention with a bias and sinks by algorithm 1, in a single tile of keys."""
  p, x, group = d.p, d.x, d.p.H//d.p.Hkv
  s = x.q @ np.repeat(x.k, group, 1).swapaxes(2, 3)*np.float32(p.softmax_scale) + d.extras["bias"]
  s = np.where(np.arange(p.Sq)[:, None] + p.offset >= np.arange(p.Sk), s, np.float32(-np.inf))
  sinks = d.extras["sinks"][:, None, None]
  m = np.maximum(s.max(-1, keepdims=True), sinks)
  weights = np.exp(s - m)
  total = weights.sum(-1, keepdims=True) + np.exp(sinks - m)
  return rounded(rounded(weights, p.dtype) @ np.repeat(x.v, group, 1)/total, p.out_dtype)

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
    outs = by_kernel(d, chip), same(*args, dtype=p.dtype, out_dtype=p.out_dtype)[0], of_flash_attention(d)
    found.append([(do*(o - want)).sum(-1) for o in outs])
  return Errors(*[np.concatenate(x) for x in zip(*found)])

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
more rows in each less often. Only a delta that is not made of a rounded O would not have it: sum(P * dP), known when all keys have been seen.
dQ = sum(P * (dP - delta) K) would then want sum(P K) as well, a fourth product beside the three of `backward_dq`, which nobody computes.

| types | kind | {columns} |
|---|---|---|---|---|---|---|---|
{lines}
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
                     lines="\n".join(lines))
  if given.write is not None: given.write.write_text(text)
  else: print(text, end="")

if __name__ == "__main__": main()
