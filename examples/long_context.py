"""Runs and trains a causal layer on a sequence whose rows are sharded over two devices in the order "zigzag": each device holds two pieces of the
sequence. Keys and values are passed from device to device, and their gradients return to the devices that hold the keys and values.

Takes seconds on the emulator, less with GRADIENT=0. On two GPUs: `DEV=CUDA S=65536 D=128 python examples/long_context.py`."""
import os
from typing import Any
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Device, Tensor, dtypes
import attn

DEVICES = (f"{Device.DEFAULT}:0", f"{Device.DEFAULT}:1")
S, H, HKV, D = int(os.getenv("S", "64")), 2, 1, int(os.getenv("D", "16"))
WIDTH = H*D
rng = np.random.default_rng(0)
def drawn(*shape:int) -> Tensor: return Tensor((rng.standard_normal(shape, np.float32)*shape[0]**-0.5).astype(np.float16)).realize()

x, target = (Tensor(rng.standard_normal((S, WIDTH), np.float32).astype(np.float16)).realize() for _ in range(2))
weights = [drawn(WIDTH, heads*D) for heads in (H, HKV, HKV)] + [drawn(WIDTH, WIDTH)]

def layer(x:Tensor, wq:Tensor, wk:Tensor, wv:Tensor, wo:Tensor, **shared:Any) -> Tensor:
  """Computes a causal attention layer with its four projections and a residual connection on x (rows, WIDTH). `shared` are further arguments of
  `attn.attention`, which say how the rows are sharded over devices. Each device projects the rows that it holds."""
  q, k, v = ((x @ w).reshape(1, x.shape[0], -1, D) for w in (wq, wk, wv))
  o = attn.attention(q, k, v, causal=True, layout="bshd", **shared)
  return x + o.reshape(x.shape[0], WIDTH) @ wo

# ***** on two devices *****
dealt, goal = (attn.shard_sequence(t, DEVICES, 0).realize() for t in (x, target))
on_both = [w.shard(DEVICES).realize() for w in weights]
y = layer(dealt, *on_both, sequence_order="zigzag", sequence_lengths=(S, S))
there = attn.shard_sequence(Tensor.ones(S, 1, dtype=dtypes.half), DEVICES, 0)     # 1 in real rows, 0 in padding
dwk, = ((y - goal)*there).float().square().sum().gradient(on_both[1])     # computed below, where it is used

# ***** on one *****
y_one = layer(x, *weights)
dwk_one, = (y_one - target).float().square().sum().gradient(weights[1])

def difference(a:Tensor, b:Tensor) -> float:
  got, want = (t.float().numpy() for t in (a, b))
  return float(np.abs(got - want).max()/np.abs(want).max())

compared = [("y", attn.unshard_sequence(y, 0, S), y_one), ("dwk", dwk.to(DEVICES[0]), dwk_one)]
for name, got, want in compared[:2 if int(os.getenv("GRADIENT", "1")) else 1]:
  print(f"{name:4s}largest difference from one device {difference(got, want):.1e} of the largest element")
  assert difference(got, want) < 5e-3
