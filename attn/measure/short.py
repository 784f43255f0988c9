"""Compares attention over short sequences, and over sequences with different numbers of queries and keys, with PyTorch (FlashAttention-2 and cuDNN)
in bfloat16 on the same NVIDIA GPU. `DEV=CUDA python -m attn.measure.short [WORD ...]` prints a line for each problem whose name contains every
WORD."""
from __future__ import annotations
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
from attn.api.attention import attention, choice_of
from attn.measure.decode import STEPS, torch_graph_timer
from attn.measure.machine import need
from attn.measure.peers import OURS, ULPS, as_tensor, on_the_host, random_inputs, torch_peers
from attn.measure.rounds import in_turn
from attn.measure.rows import MeasuredRow, line_of_row
from attn.problem import Problem
from attn.tinygrad_compat import Context, Tensor, TinyJit, device_seconds, foreign_cuda_context, make_current

# A time is the device time of one launch, as a median over rounds; in each round, each of the three is timed once. attn runs in a TinyJit of 100
# launches, and PyTorch in a CUDA graph of 100 launches. Events around the graph measure the time. A graph of fewer launches would time the host,
# which needs 0.25 ms for a call of a TinyJit.

@dataclass(frozen=True)
class ShortRow(MeasuredRow):
  def __str__(self) -> str:
    return f"{self.B}, {self.heads}, {self.Sq} x {self.Sk}, {self.D} {'causal' if self.causal else 'full'}"
  @property
  def problem(self) -> Problem:
    """The Problem (shapes, dtype and mask) of this row of the table."""
    return Problem(self.B, self.H, self.Hkv, self.Sq, self.Sk, self.D, self.D, dtype="bfloat16", out_dtype="bfloat16", softmax_scale=self.D**-0.5,
                   window=(-1, 0 if self.causal else -1), num_splits=1)

SHORT_ROWS = (ShortRow(64, 16, 16, 256, 256, 64, True), ShortRow(8, 16, 16, 128, 128, 64, False), ShortRow(32, 12, 12, 512, 512, 64, False),
              ShortRow(2, 10, 10, 4096, 77, 64, False), ShortRow(2, 20, 20, 1024, 77, 64, False), ShortRow(3, 20, 20, 777, 777, 64, True),
              ShortRow(8, 32, 4, 2048, 2048, 128, True), ShortRow(4, 16, 16, 4096, 4096, 128, False))

def timer_of_jit(launches:Any, device:str, steps:int) -> Callable[[], float]:
  """Captures a TinyJit of `steps` equal steps, and returns a timer of one step."""
  for _ in range(3): launches()
  assert launches.captured is not None
  linear = launches.captured.linear
  def seconds() -> float:
    make_current(device)
    return device_seconds(linear)/steps
  return seconds

def jit_timer(q:Tensor, k:Tensor, v:Tensor, causal:bool, steps:int=STEPS, dtype:str="", **options:Any) -> tuple[Callable[[], float], Tensor]:
  """Returns (timer of one launch of attention in a TinyJit of `steps` launches, the output that all launches write)."""
  out = Tensor.empty(*q.shape, dtype=dtype or q.dtype).contiguous().realize()
  @TinyJit
  def launches() -> Tensor:
    for _ in range(steps): attention(q, k, v, causal=causal, out=out, **options).realize()
    return out
  with Context(JIT_BATCH_SIZE=steps):          # one graph
    return timer_of_jit(launches, str(q.device), steps), out

def compare_short(row:ShortRow) -> dict[str, Any]:
  """Times attn's kernel and PyTorch's kernels on one problem, and returns a row of the printed table."""
  import torch
  torch.cuda.init()
  p = row.problem
  inputs = random_inputs(p, 0, (p.H, p.Sq), (p.Hkv, p.Sk), (p.Hkv, p.Sk))
  peers = torch_peers(p, row.causal, *inputs)
  theirs = {name: torch_graph_timer(run) for name, (run, _) in peers.items()}
  with foreign_cuda_context() as in_theirs:
    q, k, v = (as_tensor(on_the_host(x), p.dtype) for x in inputs)
    ours, o = jit_timer(q, k, v, row.causal)
    timers = {OURS: ours, **{name: in_theirs(timer) for name, timer in theirs.items()}}
    for timer in timers.values(): timer()
    times = in_turn(timers)
    got, tile = o.float().numpy(), choice_of(q, k, v, causal=row.causal).work.tile
  expected = [x.float().cpu().numpy() for _, x in peers.values()]
  apart = max((float((np.abs(got - x)/np.maximum(np.abs(x), 1)).max()) for x in expected), default=0.0)
  best = min((t for name, t in times.items() if name != OURS), default=None)
  return {"row": str(row), "tile": str(tile), **{f"us {name}": t*1e6 for name, t in times.items()}, "x best": best/times[OURS] if best else "",
          "apart": apart, "verdict": "ok" if apart <= ULPS[p.dtype] else "WRONG"}

def main(words:list[str]) -> None:
  for row in SHORT_ROWS:
    if all(word in str(row) for word in words):
      print(line_of_row(compare_short(row)), flush=True)

if __name__ == "__main__":
  need("python -m attn.measure.short", "torch", device="CUDA")
  main(sys.argv[1:])
