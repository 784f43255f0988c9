"""Runs the same attention on an emulated chip of each of four matrix units, and prints a table: the error against float64, the tile description, and
the time. Needs the extra bench (pip install '.[bench]')."""
import os
os.environ.setdefault("DEV", "EMU")
import time
import numpy as np
from tinygrad import Context, Tensor, dtypes
from attn import flash_attention_fn
from attn.accuracy import judge, law_of
from attn.chips import get_chip
from attn.choose.dispatch import choose_tile
from attn.extras import needs
from attn.problem import problem_of
with needs("bench", "examples/four_architectures.py", __name__):
  from rich.console import Console
  from rich.table import Table

SHAPE = (1, 4, 256, 128)
rng = np.random.default_rng(0)
a, b, c = (rng.standard_normal(SHAPE, np.float32).astype(np.float16) for _ in range(3))
p = problem_of(SHAPE, SHAPE, SHAPE, SHAPE, dtypes=["float16"]*4, causal=True)
law = law_of(a, b, c, p.softmax_scale, p.window, dtype="float16", out_dtype="float16")[0]

table = Table("arch", "chips", "tile", "error", "limit", "first call s", "again s")
wrong = []
for name in ("gfx942", "gfx950", "gfx1100", "gfx1201"):
  with Context(DEV=f"EMU::{name}"):
    q, k, v = map(Tensor, (a, b, c))
    times = []
    for _ in range(2):   # the first call also lowers the kernel
      start = time.perf_counter()
      o = Tensor.custom_kernel(Tensor.empty(*SHAPE, dtype=dtypes.half), q, k, v, fxn=flash_attention_fn(causal=True))[0].numpy()
      times.append(time.perf_counter() - start)
  verdict, arch = judge(o, law), get_chip(name)
  if not verdict.ok: wrong.append(f"{name}: {verdict}")
  table.add_row(name, arch.products, str(choose_tile(p, arch)), f"{verdict.error:.1e}", f"{verdict.limit:.1e}", *(f"{t:.2f}" for t in times))
Console(width=150).print(table)
assert not wrong, wrong
