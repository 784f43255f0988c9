"""Runs causal attention in bfloat16: eight query heads share two key/value heads, and there are more keys than queries. Checks o and lse with
numpy."""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Tensor, dtypes
from attn import flash_attention_fn
from attn.accuracy import judge, law_of

B, H, HKV, SQ, SK, D = 2, 8, 2, 77, 130, 64
q, k, v = (Tensor(np.random.default_rng(i).standard_normal((B, h, s, D), np.float32)).cast(dtypes.bfloat16).realize()
           for i, (h, s) in enumerate([(H, SQ), (HKV, SK), (HKV, SK)]))

# causal=True is bottom-right: query i sees keys j <= i + SK - SQ, so the last query sees every key ("top-left" is PyTorch's is_causal)
fxn = flash_attention_fn(causal=True, return_lse=True)
o, lse = Tensor.custom_kernel(Tensor.empty(B, H, SQ, D, dtype=dtypes.bfloat16), Tensor.empty(B, H, SQ, dtype=dtypes.float), q, k, v, fxn=fxn)[:2]
Tensor.realize(o, lse)

q_, k_, v_ = (x.float().numpy() for x in (q, k, v))
window, offset = (-1, 0), SK - SQ   # no bound on the left, nothing beyond the diagonal
laws = law_of(q_, k_, v_, D**-0.5, window, offset, dtype="bfloat16", out_dtype="bfloat16")
for name, got, law in zip(("o", "lse"), (o, lse), laws):
  verdict = judge(got.float().numpy(), law)
  print(f"{name:4s}{verdict}")
  assert verdict.ok
