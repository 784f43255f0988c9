"""Measures in float64 how much attention changes if keys and values are rounded to a 16-bit dtype or an 8-bit format. `DEV=EMU::gfx942 python -m
attn.measure.rounding --write docs/data/rounding.csv` writes the table."""
from __future__ import annotations
import csv, sys
from collections.abc import Callable, Iterator
import numpy as np
from numpy.typing import NDArray
from attn.calls.quantized import rotate
from attn.measure.machine import ANY, need
from attn.ops.formats import FORMATS, Format, sizes_of
from attn.tinygrad_compat import DType, Tensor, dtypes

# Queries, keys and values are normally distributed, the queries with a standard deviation of 2. Keys are drawn in two kinds, which the column "keys"
# of the table names: "normal", and "outliers", where 4 columns are 16 times as large as the others. Keys of language models have such columns. The
# error of the scores is the standard deviation of their differences from the exact scores. The mean difference of each query is subtracted first,
# because the softmax cancels it. The error of the output is the norm of its difference from the exact output, divided by the norm of the exact
# output. tinygrad rounds on the device `DEV`; NumPy computes attention over the rounded keys and values, so no attention kernel runs.

Rounding = Callable[[NDArray[np.float64]], NDArray[np.float64]]

DRAWN_COUNTS, OUTLIERS, OUTLIER = (4, 32, 2048), 4, 16     # (heads, queries, keys); columns of outliers, and their factor
WIDTHS = (64, 128)
ERROR_COLUMNS = ("D", "keys", "stored as", "scales", "rotated", "error of scores", "error of output")

def through(x:NDArray[np.float64], change:Callable[[Tensor], Tensor]) -> NDArray[np.float64]:
  """Rounds a float64 array to fp32, applies `change`, a function of a Tensor, and returns the result as float64."""
  return change(Tensor(x.astype(np.float32))).float().numpy().astype(np.float64)

def to_format(format:Format, scale_dtype:DType) -> Rounding:
  """Returns a function that rounds rows to an 8-bit format with scales of dtype `scale_dtype`, and converts them back to float64."""
  def changed(x:Tensor) -> Tensor:
    scale = format.scale_of(sizes_of(x).max(-1, keepdim=True), scale_dtype)
    return format.decode(format.stored(x, scale))*scale
  return lambda x: through(x, changed)

def to_dtype(dtype:DType) -> Rounding: return lambda x: through(x, lambda t: t.cast(dtype).contiguous())

ROUNDINGS: dict[tuple[str, str], Rounding] = {
  ("float16", ""): to_dtype(dtypes.half), ("bfloat16", ""): to_dtype(dtypes.bfloat16),
  **{(name, scales): to_format(format, dtype) for name, format in FORMATS.items()
     for scales, dtype in (("float32", dtypes.float), ("float16", dtypes.half))}}

def exact_attention(q:NDArray[np.float64], k:NDArray[np.float64], v:NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
  """Computes attention in float64; returns (scores minus the mean score of their query, output)."""
  scores = q @ k.swapaxes(-1, -2)*q.shape[-1]**-.5
  p = np.exp(scores - scores.max(-1, keepdims=True))
  return scores - scores.mean(-1, keepdims=True), p/p.sum(-1, keepdims=True) @ v

def error_rows(widths:tuple[int, ...]=WIDTHS) -> Iterator[tuple[str, ...]]:
  """Yields the rows of docs/data/rounding.csv as tuples of strings, for each head dimension, kind of keys, and format."""
  heads, queries, count = DRAWN_COUNTS
  for width in widths:
    for keys in ("normal", "outliers"):
      rng = np.random.default_rng(width)
      q, k, v = (rng.standard_normal((heads, n, width)) for n in (queries, count, count))
      if keys == "outliers": k[..., rng.choice(width, OUTLIERS, replace=False)] *= OUTLIER
      scores, o = exact_attention(q := 2*q, k, v)
      turned = through(np.eye(width), rotate)
      for (name, scales), rounding in ROUNDINGS.items():
        # Once for q and k as drawn, and once for q and k multiplied by a Hadamard matrix (`rotate`).
        for rotated in (False, True):
          of_q, of_k = (q @ turned, rounding(k @ turned)) if rotated else (q, rounding(k))
          found = exact_attention(of_q, of_k, rounding(v))
          errors = float((found[0] - scores).std()), float(np.linalg.norm(found[1] - o)/np.linalg.norm(o))
          yield str(width), keys, name, scales, "yes" if rotated else "no", *(f"{x:.2g}" for x in errors)

def main(arguments:list[str]) -> None:
  need("python -m attn.measure.rounding", kind=ANY)
  to = open(arguments[1], "w", newline="") if arguments[:1] == ["--write"] else sys.stdout     # noqa: SIM115 - closed when the process ends
  csv.writer(to, lineterminator="\n").writerows((ERROR_COLUMNS, *error_rows()))

if __name__ == "__main__": main(sys.argv[1:])
