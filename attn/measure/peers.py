"""Compares forward with PyTorch's SDPA (FlashAttention-2 and cuDNN; in float32 the memory-efficient backend) and with tinygrad's own SDPA, on the
same NVIDIA GPU, in one process and on the same inputs. `COMPARE=1 DEV=CUDA python bench.py` runs the comparison; SWEEP=1 runs it for a list of shapes
(`sweep`), and PLOT=path.png draws a picture."""
from __future__ import annotations
import csv, itertools, statistics, sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
import numpy as np
from attn.api.custom_kernel import flash_attention_fn
from attn.calls.checked_kernel import device_arch
from attn.choose.dispatch import single_kernel
from attn.measure.rounds import in_turn, runs_of_a_round
from attn.problem import Problem
from attn.tinygrad_compat import Tensor, compiled, cuda_seconds, device_seconds, foreign_cuda_context
from attn.values import FLOATS

# Times are device times, measured by events around many launches. Each time is a median over rounds. In a round attn and each peer are timed once,
# one after another, so that the chip's temperature has an equal effect on all.

SHAPES: list[dict[str, Any]] = [
  {"B": 1, "H": 64, "N": 8192, "D": 128}, {"B": 4, "H": 16, "N": 4096, "D": 128}, {"B": 4, "H": 32, "N": 4096, "D": 64},
  {"B": 1, "H": 32, "N": 1024, "D": 64}, {"B": 1, "H": 16, "N": 16384, "D": 64}, {"B": 4, "H": 32, "HKV": 8, "N": 4096, "D": 128}]
SHAPES_FP32: list[dict[str, Any]] = [
  {"B": 4, "H": 16, "N": 2048, "D": 64}, {"B": 2, "H": 8, "N": 4096, "D": 128}, {"B": 1, "H": 1, "N": 4096, "D": 512}]
OURS, OURS_IN_NO_ORDER, FLASH, CUDNN, EFFICIENT, OWN = PEERS = (
  "attn", "attn, deterministic=False", "FlashAttention-2", "cuDNN", "memory-efficient", "tinygrad SDPA")
ULPS = {"float16": 2.0**-8, "bfloat16": 2.0**-5, "float32": 2.0**-18}     # allowed difference of outputs of size 1: 4 units in the last place,
                                                                          # 32 in float32

def sweep(dtype:str) -> list[dict[str, Any]]:
  """Returns the settings of the problems that SWEEP=1 runs: each shape with and without a causal mask."""
  # Without float32, kernels use matrix units, and each shape is run in both 16-bit dtypes.
  shapes, types = (SHAPES_FP32, ("float32",)) if dtype == "float32" else (SHAPES, ("float16", "bfloat16"))
  return [{**shape, "DTYPE": one, "CAUSAL": causal} for one, shape, causal in itertools.product(types, shapes, ("0", "1"))]

def backends(dtype:str) -> dict[str, Any]:
  """Returns PyTorch's backends for inputs of this dtype, by name."""
  from torch.nn.attention import SDPBackend
  return {EFFICIENT: SDPBackend.EFFICIENT_ATTENTION} if dtype == "float32" else {FLASH: SDPBackend.FLASH_ATTENTION, CUDNN: SDPBackend.CUDNN_ATTENTION}

def random_inputs(p:Problem, seed:int, *shapes:tuple[int, int]) -> list[Any]:
  """Returns PyTorch tensors (B, heads, rows, D) of normally distributed random numbers on the GPU, one for each (heads, rows)."""
  import torch
  generator, kind = torch.Generator("cuda").manual_seed(seed), getattr(torch, p.dtype)
  return [torch.randn(p.B, h, n, p.D, device="cuda", generator=generator).to(kind) for h, n in shapes]

def on_the_host(x:Any) -> np.ndarray:
  """Returns a PyTorch tensor as a numpy array; a 16-bit tensor becomes an array of its bits, uint16."""
  import torch
  return x.cpu().numpy() if x.dtype == torch.float32 else x.cpu().view(torch.int16).numpy().view(np.uint16)

def as_tensor(x:np.ndarray, dtype:str) -> Tensor: return Tensor(x).bitcast(FLOATS[dtype]).realize()

def torch_peers(p:Problem, causal:bool, q:Any, k:Any, v:Any) -> dict[str, tuple[Callable[[], Any], Any]]:
  """Returns {name of PyTorch's backend: (function that computes attention, its output)}, without backends that refuse the problem."""
  import torch
  from torch.nn.attention import sdpa_kernel
  def peer(backend:Any) -> Callable[[], Any]:
    def attention() -> Any:
      with sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=p.softmax_scale, enable_gqa=p.H//p.Hkv > 1)
    return attention
  found = {}
  for name, backend in backends(p.dtype).items():
    try: found[name] = peer(backend), peer(backend)()
    except RuntimeError as e: print(f"{name} refuses {p}: {e}")
  return found

def torch_timer(attention:Callable[[], Any]) -> Callable[[], float]:
  """Returns a timer of one call of `attention`: a CUDA graph repeats the call for about a quarter of a second."""
  import torch
  def seconds(run:Callable[[], None]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)*1e-3
  seconds(attention)
  count = runs_of_a_round(lambda: seconds(attention))
  graph = torch.cuda.CUDAGraph()
  with torch.cuda.graph(graph):
    for _ in range(count): attention()
  seconds(graph.replay)
  return lambda: seconds(graph.replay)/count

def compare_problem(p:Problem, causal:bool, seed:int, name:str) -> dict[str, Any]:
  """Times attn's kernel, PyTorch's kernels and tinygrad's own attention on one problem, and returns a row of the printed table."""
  import torch
  torch.cuda.init()
  inputs = random_inputs(p, seed, (p.H, p.Sq), (p.Hkv, p.Sk), (p.Hkv, p.Sk))
  peers = torch_peers(p, causal, *inputs)
  timers = {peer: torch_timer(attention) for peer, (attention, _) in peers.items()}
  arrays = [on_the_host(x) for x in inputs]
  values = lambda x: x.float().cpu().numpy()
  others = {peer: values(o) for peer, (_, o) in peers.items()}
  with foreign_cuda_context() as theirs:
    q, k, v = (as_tensor(x, p.dtype) for x in arrays)
    fxn = flash_attention_fn(causal="top-left" if causal else False, softmax_scale=p.softmax_scale)
    ours = Tensor.custom_kernel(Tensor.empty(*q.shape, dtype=q.dtype), q, k, v, fxn=fxn)[0]
    schedule = compiled(ours)
    count = runs_of_a_round(lambda: device_seconds(schedule))
    timers = {OURS: lambda: cuda_seconds(schedule, count)} | {peer: theirs(timer) for peer, timer in timers.items()}
    times = in_turn(timers)
    o = ours.float().numpy()
    own = q.scaled_dot_product_attention(k, v, is_causal=causal, enable_gqa=p.H//p.Hkv > 1)
    own_schedule = compiled(own)
    times[OWN] = statistics.median(device_seconds(own_schedule) for _ in range(4))
    others[OWN] = own.float().numpy()
  apart = {peer: float((np.abs(o - x)/np.maximum(np.abs(x), 1)).max()) for peer, x in others.items()}
  row: dict[str, Any] = {"shape": name, "causal": causal, "dtype": p.dtype, "tile": str(single_kernel(p, device_arch())[1]), "ms": times[OURS]*1e3}
  row |= {f"TFLOP/s {peer}": p.flops/t/1e12 for peer, t in times.items()}
  row |= {f"x {peer}": t/times[OURS] for peer, t in times.items() if peer != OURS}
  return row | {"apart": max(apart.values()), "verdict": "ok" if max(apart.values()) <= ULPS[p.dtype] else "WRONG"}

def rows_of_file(path:str) -> list[dict[str, Any]]:
  """Returns the rows of a CSV file that COMPARE=1 has written."""
  with open(path, newline="") as file:
    return [{name: float(x) if name.startswith("TFLOP/s") else x for name, x in row.items() if x} | {"causal": row["causal"] == "True"}
            for row in csv.DictReader(file)]

def plot(rows:Sequence[Mapping[str, Any]], path:str, title:str) -> None:
  """Draws bars of TFLOP/s as a picture: one plot for each dtype and mask, and one group of bars for each shape."""
  import matplotlib
  matplotlib.use("Agg")
  import matplotlib.pyplot as plt
  there = [peer for peer in PEERS if any(f"TFLOP/s {peer}" in row for row in rows)]
  parts = list(dict.fromkeys((row["dtype"], row["causal"]) for row in rows))
  figure, axes = plt.subplots(len(parts), 1, figsize=(12, 3.2*len(parts)), squeeze=False, layout="constrained")
  for axis, part in zip(axes[:, 0], parts, strict=True):
    mine = [row for row in rows if (row["dtype"], row["causal"]) == part]
    for i, peer in enumerate(there):
      heights = [row.get(f"TFLOP/s {peer}", 0.0) for row in mine]
      bars = axis.bar([x + (i - (len(there) - 1)/2)*0.2 for x in range(len(mine))], heights, 0.2, label=peer)
      axis.bar_label(bars, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(mine)), [row["shape"] for row in mine], fontsize=8)
    axis.set_ylabel("TFLOP/s")
    axis.set_title(f"{part[0]}, {'causal' if part[1] else 'full'}", fontsize=9)
  figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=len(there), fontsize=8)
  figure.suptitle(title, fontsize=10)
  figure.savefig(path, dpi=120)

if __name__ == "__main__":     # python -m attn.measure.peers FILE.csv PICTURE.png TITLE
  if len(sys.argv) != 4: raise SystemExit("python -m attn.measure.peers FILE.csv PICTURE.png TITLE: draws the rows that bench.py wrote")
  written, picture, heading = sys.argv[1:]
  plot(rows_of_file(written), picture, heading)
