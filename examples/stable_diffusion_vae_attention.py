"""Runs the attention of Stable Diffusion's VAE (the middle block of AutoencoderKL) for a 512 x 512 image: one head with head dimension 512, over 64 x
64 positions. tinygrad's own attention keeps the whole score matrix in memory, 64 MB here and 1 GB for a 1024 x 1024 image. The kernel of attn that
this example uses (`tiled` in docs/plain.md) keeps no scores in memory.

  DEV=CUDA python examples/stable_diffusion_vae_attention.py
  DEV=CL SIDE=32 python examples/stable_diffusion_vae_attention.py

The second command works on any OpenCL device, and computes a 256 x 256 image.

SIDE: positions along a side (64; on the emulator 8). HALF=1: float16 instead of float32. First calls compile and are not timed."""
import os
os.environ.setdefault("DEV", "EMU::gfx1030")
from typing import Any, Callable
import numpy as np
import attn
from tinygrad import Device, Tensor, dtypes
from tinygrad.device import Buffer
from tinygrad.helpers import GlobalCounters, getenv
from attn.tinygrad_compat import compiled, device_seconds

CHANNELS = 512
emulated = Device.DEFAULT.startswith("EMU")
SIDE = getenv("SIDE", 8 if emulated else 64)
DTYPE = dtypes.half if getenv("HALF", 0) else dtypes.float
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

most, allocate = 0, Buffer.allocate
def watched(self:Buffer, *args:Any, **kwargs:Any) -> Buffer:
  """Allocates a buffer like Buffer.allocate, and records the most memory in use so far."""
  global most
  found = allocate(self, *args, **kwargs)
  most = max(most, GlobalCounters.mem_used)
  return found
Buffer.allocate = watched   # type: ignore[method-assign]

def called(attention:Attention, q:Tensor, k:Tensor, v:Tensor) -> tuple[np.ndarray, float, int]:
  """Calls `attention`. Returns the result, the milliseconds of the kernels on the device, and the bytes of memory used besides inputs and output."""
  global most
  before = most = GlobalCounters.mem_used
  out = attention(q, k, v).realize()
  taken, result = most - before - out.nbytes(), out.float().numpy()
  schedule = compiled(attention(q, k, v))
  return result, 1e3*min(device_seconds(schedule) for _ in range(1 if emulated else 5)), taken

# outputs of the block's three 1 x 1 convolutions, (batch, channels, height, width), as heads: (batch, 1, positions, channels)
Tensor.manual_seed(0)
images = [Tensor.randn(1, CHANNELS, SIDE, SIDE).cast(DTYPE) for _ in range(3)]
q, k, v = (x.reshape(1, 1, CHANNELS, SIDE*SIDE).transpose(2, 3).contiguous().realize() for x in images)
attn.explain(q, k, v)
own, own_time, own_memory = called(lambda q, k, v: q.scaled_dot_product_attention(k, v), q, k, v)
ours, our_time, our_memory = called(attn.attention, q, k, v)
print(f"{SIDE*SIDE} positions, one head of {CHANNELS}, {DTYPE.name} on {Device.DEFAULT}")
for name, milliseconds, nbytes in (("tinygrad's attention", own_time, own_memory), ("these kernels", our_time, our_memory)):
  print(f"{name}: {milliseconds:.2f} ms a call, {nbytes/2**20:.3f} MB beside inputs and output")
print(f"largest difference {np.abs(own - ours).max():.1e}")
