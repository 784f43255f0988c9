"""Calls flash attention in three lines: on the GPU with DEV=AMD, without DEV on an emulated MI300X."""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Tensor, dtypes
from attn import flash_attention

inputs = [np.random.default_rng(i).standard_normal((1, 4, 200, 64)).astype(np.float16) for i in range(3)]   # (B, H, S, D)
q, k, v = map(Tensor, inputs)
o = Tensor.empty(*q.shape, dtype=dtypes.half)
o = Tensor.custom_kernel(o, q, k, v, fxn=flash_attention)[0]

q64, k64, v64 = (x.astype(np.float64) for x in inputs)
s = q64 @ k64.swapaxes(-1, -2)/8   # the score matrix, which the kernel never writes to memory
p = np.exp(s - s.max(-1, keepdims=True))
error = np.abs(o.numpy() - p/p.sum(-1, keepdims=True) @ v64).max()
print(f"{o.shape} on {o.device}: largest difference from numpy {error:.1e}")
assert error < 1e-3
