"""Runs attention on two devices. If the tensors are sharded along batch or heads, the devices exchange nothing. If k and v are sharded along keys,
each device attends to its own keys, and the results of the devices are merged by their lse."""
import os
os.environ.setdefault("DEV", "EMU::gfx942")
import numpy as np
from tinygrad import Device, Tensor, dtypes
import attn
from attn.accuracy import judge, law_of

DEVICES = (f"{Device.DEFAULT}:0", f"{Device.DEFAULT}:1")
B, H, HKV, SQ, SK, D = 2, 4, 2, 40, 300, 64
q, k, v = (Tensor(np.random.default_rng(i).standard_normal((B, h, s, D), np.float32)).cast(dtypes.half).realize()
           for i, (h, s) in enumerate([(H, SQ), (HKV, SK), (HKV, SK)]))

q_, k_, v_ = (x.float().numpy() for x in (q, k, v))
law = law_of(q_, k_, v_, D**-0.5, (-1, 0), SK - SQ, dtype="float16", out_dtype="float16")[0]

for name, axis_q, axis_kv in (("batch", 0, 0), ("heads", 1, 1), ("keys", None, 2)):   # None: whole on both devices
  shards = q.shard(DEVICES, axis_q).realize(), k.shard(DEVICES, axis_kv).realize(), v.shard(DEVICES, axis_kv).realize()
  o = attn.attention(*shards, causal=True)
  assert o.device == shards[0].device and o.uop.axis == axis_q
  if name != "keys": assert all(call.src[0].op.name != "COPY" for call in attn.attention(*shards, causal=True).schedule_linear().src)
  verdict = judge(o.to(DEVICES[0]).float().numpy(), law)   # the result of one device, because tinygrad would gather a sharded one on the CPU
  print(f"{name:6s}{verdict}")
  assert verdict.ok
