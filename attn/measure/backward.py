"""Compares the backward kernels with PyTorch's SDPA backward (FlashAttention-2 and cuDNN; in float32 the memory-efficient backend) on the same NVIDIA
GPU, in one process and on the same inputs.

`DEV=CUDA COMPARE=1 BWD=1 python bench.py` times one problem (SWEEP=1: all shapes of the table; CSV=path, PLOT=path). `DEV=CUDA [CSV=path] python -m
attn.measure.backward [WORD ...]` prints the problems whose names contain every WORD, and writes them to a file."""
from __future__ import annotations
import itertools, os, sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
import numpy as np
from attn.calls.checked_kernel import device_arch
from attn.calls.gradient import GRADIENTS_OF_INPUTS, BackwardLaunch, backward_kernels
from attn.calls.tile_lists import tile_lists
from attn.chips import Chip
from attn.choose.backward import parts_of_chosen
from attn.choose.dispatch import single_kernel
from attn.kernels.parts.grid.tensors import Shapes, of_backward, split_into
from attn.kernels.tile_lists import ListedBlocks
from attn.measure.inputs import tensors_of_kernel
from attn.measure.machine import need
from attn.measure.peers import OURS, OURS_IN_NO_ORDER, as_tensor, backends, on_the_host, random_inputs
from attn.measure.rounds import in_turn, runs_of_a_round
from attn.measure.rows import line_of_row, write_rows
from attn.ops import renderers
from attn.problem import Problem
from attn.tinygrad_compat import Device, Tensor, UOp, compiled, cuda_graph_seconds, device_seconds, foreign_cuda_context

# Attn's times are those of all kernels that a call's gradients launch, with the default `deterministic=True` and with `deterministic=False`. Every
# rate counts 2.5 times the operations of forward: five matrix products, although two of attn's kernels together compute seven. Times are device
# times, measured by events. Each time is a median over rounds. In a round attn and each peer are timed once, one after another.

Launches = list[tuple[BackwardLaunch, ListedBlocks|None]]     # one after another, each with the lists of tiles that it gets
WAYS_OF_A_CALL = {OURS: True, OURS_IN_NO_ORDER: False}        # attn's name in the table -> deterministic

SIZES: tuple[tuple[int, int, int, int, int, int], ...] = (     # B, H, Hkv, Sq, Sk, D
  (1, 64, 64, 8192, 8192, 128), (4, 16, 16, 4096, 4096, 128), (4, 32, 8, 4096, 4096, 128), (4, 32, 32, 4096, 4096, 64), (1, 16, 16, 16384, 16384, 64),
  (2, 16, 16, 4096, 4096, 256), (1, 32, 1, 4096, 4096, 128), (1, 8, 8, 64, 65536, 128))
SIZES_FP32 = ((4, 16, 16, 2048, 2048, 64), (2, 8, 8, 4096, 4096, 128), (1, 1, 1, 4096, 4096, 512))
APART = {"float16": 2.0**-7, "bfloat16": 2.0**-4, "float32": 2.0**-16}     # allowed difference of gradients, relative to the largest element

def shape_of(p:Problem) -> str:
  heads = f"{p.H}/{p.Hkv}" if p.Hkv < p.H else f"{p.H}"
  keys = f"{p.Sq}" if p.Sq == p.Sk else f"{p.Sq}x{p.Sk}"
  return f"{p.B}x{heads}x{keys}x{p.D}"

def name_of(p:Problem, causal:bool) -> str: return f"{shape_of(p)} {'causal' if causal else 'full'} {p.dtype}"

def torch_backward(p:Problem, causal:bool, q:Any, k:Any, v:Any, do:Any) -> dict[str, Callable[[], tuple[Any, ...]]]:
  """Returns {backend name: function that computes dq, dk and dv with PyTorch}, without backends that refuse the problem."""
  import torch
  from torch.nn.attention import sdpa_kernel
  found = dict[str, Callable[[], tuple[Any, ...]]]()
  for name, backend in backends(p.dtype).items():
    inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
    try:
      with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(*inputs, dropout_p=p.dropout_p, is_causal=causal, scale=p.softmax_scale,
                                                             enable_gqa=p.Hkv < p.H)
      def gradients(o:Any=o, inputs:Any=inputs) -> tuple[Any, ...]: return tuple(torch.autograd.grad(o, inputs, do, retain_graph=True))
      gradients()
      found[name] = gradients
    except RuntimeError as e: print(f"{name} refuses {p}: {str(e).splitlines()[0]}")
  return found

def torch_seconds(run:Callable[[], Any]) -> Callable[[], float]:
  """Returns a timer: a function that runs `run` for about a quarter of a second and returns the mean seconds of one run."""
  import torch
  def seconds(count:int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count): run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end))*1e-3/count
  count = runs_of_a_round(lambda: seconds(1))
  return lambda: seconds(count)

def outputs_of(shapes:Shapes, fxn:Callable[..., UOp], have:dict[str, Tensor]) -> dict[str, Tensor]:
  """Returns {name: lazy tensor} for what the kernel `fxn` writes; `shapes` lists all its tensors, `have` those that exist already."""
  found = Tensor.custom_kernel(*tensors_of_kernel(shapes, have), fxn=fxn)
  return {name: t for name, t in zip(shapes, found) if name not in have}

def computed_gradients(launches:Launches, have:dict[str, Tensor]) -> dict[str, Tensor]:
  """Returns dq, dk and dv as lazy tensors, which the launches compute from the tensors `have`."""
  there, device = dict(have), have["q"].device
  assert isinstance(device, str)
  for x, lists in launches:
    if lists is not None: there["tile_list"] = tile_lists(lists, device, have)
    after = Tensor.custom_kernel(*tensors_of_kernel(x.shapes, there), fxn=x.kernel)
    there |= {name: t for name, t in zip(x.shapes, after) if name in x.outputs}
  parts = {name: there[f"d{name}"] for name in ("q", "k", "v")}
  return {f"d{name}": t if t.ndim == have[name].ndim else t.sum(0).cast(have[name].dtype) for name, t in parts.items()}

def graph_timer(*outputs:Tensor) -> Callable[[], float]:
  """Returns a timer of the kernels that compute `outputs`: a function that repeats them in a CUDA graph and returns the mean seconds of one
  repetition."""
  schedule = compiled(*outputs)
  return cuda_graph_seconds(schedule, runs_of_a_round(lambda: device_seconds(schedule)))

def launches_of_call(p:Problem, arch:Chip) -> dict[str, BackwardLaunch]:
  """Returns {name: launch} for the kernels that compute dq, dk and dv in a call of attention. A name is, for example, "dq" or "dkdv"."""
  p = split_into(of_backward(p), 1)
  return {name: x for name, x in backward_kernels(p, arch, False, parts_of_chosen(p, arch)).items() if name in GRADIENTS_OF_INPUTS}

def compare_backward(p:Problem, causal:bool) -> dict[str, Any]:
  """Times the gradients of one problem with attn's kernels and with PyTorch's, and returns the results as a row of the printed table."""
  import torch
  torch.cuda.init()
  inputs = random_inputs(p, 0, (p.H, p.Sq), (p.Hkv, p.Sk), (p.Hkv, p.Sk), (p.H, p.Sq))
  theirs_run = torch_backward(p, causal, *inputs)
  expected = {name: [x.float().cpu().numpy() for x in run()] for name, run in theirs_run.items()}
  arrays = [on_the_host(x) for x in inputs]
  theirs_timers = {name: torch_seconds(run) for name, run in theirs_run.items()}
  with foreign_cuda_context() as theirs:
    renderers.adapt(Device.DEFAULT)
    arch, have = device_arch(), {name: as_tensor(x, p.dtype) for name, x in zip(("q", "k", "v", "do"), arrays)}
    have |= {name: t.realize() for name, t in outputs_of(p.shapes, single_kernel(p, arch)[0], have).items()}
    kernels, timers, apart = dict[str, str](), dict[str, Callable[[], float]](), 0.0
    for name, deterministic in WAYS_OF_A_CALL.items():
      launches = launches_of_call(replace(p, deterministic=deterministic), arch)
      found = computed_gradients([(x, None) for x in launches.values()], have)
      kernels[name], timers[name] = ", ".join(launches), graph_timer(*found.values())
      got = [t.float().numpy() for t in found.values()]
      apart = max(apart, *[float((np.abs(x - y)/np.abs(y).max()).max()) for others in expected.values() for x, y in zip(got, others)])
    times = in_turn(timers | {name: theirs(timer) for name, timer in theirs_timers.items()})
  row: dict[str, Any] = {"shape": shape_of(p), "causal": causal, "dtype": p.dtype}
  row |= {f"kernels of {name}": launches for name, launches in kernels.items()}
  row |= {f"TFLOP/s {name}": 2.5*p.flops/seconds/1e12 for name, seconds in times.items()}
  row |= {f"{ours} x {name}": times[name]/times[ours] for ours in WAYS_OF_A_CALL for name in theirs_run}
  return row | {"apart": apart, "verdict": "ok" if apart <= APART[p.dtype] else "WRONG"}

def problems(words:list[str]) -> list[tuple[Problem, bool]]:
  """Returns (problem, whether its mask is causal) for the problems whose name contains every one of `words`."""
  found = []
  cases = [*itertools.product(SIZES, ("bfloat16", "float16"), (False, True))]
  # Problems in float32 are included only if this word is given.
  if "float32" in words: cases = [*itertools.product(SIZES_FP32, ("float32",), (False, True))]
  for (B, H, Hkv, Sq, Sk, D), dtype, causal in cases:
    if causal and Sq != Sk: continue      # PyTorch's causal mask is top-left: few queries would see a few of many keys
    p = Problem(B, H, Hkv, Sq, Sk, D, D, dtype=dtype, out_dtype=dtype, window=(-1, 0 if causal else -1), top_left=causal, softmax_scale=D**-0.5,
                num_splits=1, return_lse=True)
    if all(word in name_of(p, causal) for word in words): found.append((p, causal))
  return found

def main(words:list[str], path:str|None) -> None:
  rows = []
  for p, causal in problems(words):
    rows.append(compare_backward(p, causal))
    print(line_of_row(rows[-1], digits=3), flush=True)
    if path is not None: write_rows(rows, path)

if __name__ == "__main__":
  need("python -m attn.measure.backward", "torch", device="CUDA")
  main(sys.argv[1:], os.environ.get("CSV"))
