"""Compares the ways in which attn computes dq, dk and dv on an NVIDIA GPU with wgmma: by two kernels, by one kernel whose workgroups add to dq in no
order, and by one kernel whose workgroups add to dq in a fixed order. Also times the backward of PyTorch's cuDNN backend.

  DEV=CUDA python -m attn.measure.at_once [WORD ...]      prints the rows whose name has each WORD; CSV=path writes them to a file

Times are device times of all kernels that a way needs, also of those that compute delta and turn the sums of dQ into dq."""
from __future__ import annotations
import csv, itertools, os, sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
import numpy as np
from attn.calls.checked_kernel import device_arch
from attn.calls.gradient import BackwardLaunch, kernels_with_tiles
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.chips.shapes import WgmmaBackwardShape
from attn.choose.backward import Parts, choose_parts, tiles_of
from attn.choose.backward_tiles import AtOnceTile
from attn.choose.dispatch import single_kernel
from attn.kernels.tiles.wgmma import WgmmaBackwardTile
from attn.measure.backward import APART, SIZES, name_of, outputs_of, shape_of, torch_backward, torch_seconds
from attn.measure.functions import graph_timer
from attn.measure.machine import need
from attn.measure.peers import CUDNN, as_tensor, in_turn, on_the_host, random_inputs
from attn.ops import renderers
from attn.problem import Problem
from attn.tinygrad_compat import Device, Tensor, foreign_cuda_context
from attn.values import FLOATS, INTS

SHAPE_AT_ONCE = WgmmaBackwardShape(2, 64)      # of the kernel that computes all gradients at once
TWO, NO_ORDER, IN_ORDER = "two kernels", "in no order", "in order"

def launches_of(p:Problem, arch:Chip, way:str) -> list[BackwardLaunch]:
  """Returns the launches, one after another, that compute dq, dk and dv. `way` is TWO for two kernels, NO_ORDER for one kernel that adds to dq in any
  order, and IN_ORDER for one kernel that adds to dq in a fixed order."""
  one: AtOnceTile|str = TWO if way == TWO else WgmmaBackwardTile(**vars(SHAPE_AT_ONCE), matrix=MMA[p.dtype], keys=True, adds_dq=True)
  parts = choose_parts(p, arch)
  if way != TWO: parts = Parts(0, parts.dkdv)
  found = kernels_with_tiles(replace(p, deterministic=way != NO_ORDER), arch, False, parts, (None, None), *tiles_of(p, arch), one)
  return [launch for name, launch in found.items() if name != "forward"]

def computed_gradients(launches:list[BackwardLaunch], have:dict[str, Tensor]) -> dict[str, Tensor]:
  """Returns dq, dk and dv as tensors that the launches compute from the tensors `have`, by name. dq, dk and dv are not computed yet."""
  there = dict(have)
  for x in launches:
    given = [there[name] if name in there else Tensor.empty(*shape, dtype=(FLOATS | INTS)[dtype]) for name, (shape, dtype) in x.shapes.items()]
    after = Tensor.custom_kernel(*given, fxn=x.kernel)
    there |= {name: t for name, t in zip(x.shapes, after) if name in x.outputs}
  parts = {name: there[f"d{name}"] for name in ("q", "k", "v")}
  return {f"d{name}": t if t.ndim == have[name].ndim else t.sum(0).cast(have[name].dtype) for name, t in parts.items()}

def compare_ways(p:Problem, causal:bool, seed:int=0) -> dict[str, Any]:
  """Times the gradients of problem `p` in each of the three ways in which attn computes them, and in cuDNN. Returns a row of the table: the
  milliseconds of each, and whether attn's gradients agree with cuDNN's. `causal` says whether `p` has a causal mask."""
  import torch
  torch.cuda.init()
  inputs = random_inputs(p, seed, (p.H, p.Sq), (p.Hkv, p.Sk), (p.Hkv, p.Sk), (p.H, p.Sq))
  peer = torch_backward(p, causal, *inputs)[CUDNN]
  expected, timer = [x.float().cpu().numpy() for x in peer()], torch_seconds(peer)
  with foreign_cuda_context() as theirs:
    renderers.adapt(Device.DEFAULT)
    arch, have = device_arch(), {name: as_tensor(on_the_host(x), p.dtype) for name, x in zip(("q", "k", "v", "do"), inputs)}
    have |= {name: t.realize() for name, t in outputs_of(p.shapes, single_kernel(p, arch)[0], have).items()}
    timers, apart = dict[str, Callable[[], float]](), 0.0
    for way in (TWO, NO_ORDER, IN_ORDER):
      found = computed_gradients(launches_of(p, arch, way), have)
      timers[way] = graph_timer(*found.values())
      apart = max(apart, *[float((np.abs(t.float().numpy() - y)/np.abs(y).max()).max()) for t, y in zip(found.values(), expected)])
    times = in_turn(timers | {CUDNN: theirs(timer)})
  row = {"shape": shape_of(p), "mask": "causal" if causal else "full", "dtype": p.dtype}
  return row | {f"{name} ms": round(x*1e3, 3) for name, x in times.items()} | {"verdict": "ok" if apart <= APART[p.dtype] else "WRONG"}

def problems_of_ways(words:list[str]) -> list[tuple[Problem, bool]]:
  """Returns the problems of this comparison whose name contains every one of `words`, each with whether it is causal. All numbers of keys are
  multiples of the block of keys in the kernel that computes all three gradients."""
  found = []
  for (B, H, Hkv, Sq, Sk, D), causal in itertools.product(SIZES, (False, True)):
    p = Problem(B, H, Hkv, Sq, Sk, D, D, dtype="bfloat16", out_dtype="bfloat16", window=(-1, 0 if causal else -1), top_left=causal,
                softmax_scale=D**-0.5, num_splits=1, return_lse=True)
    if D <= 128 and all(word in name_of(p, causal) for word in words): found.append((p, causal))
  return found

def main(words:list[str], path:str|None) -> None:
  rows = []
  for p, causal in problems_of_ways(words):
    rows.append(compare_ways(p, causal))
    print("  ".join(f"{name} {x}" for name, x in rows[-1].items()), flush=True)
    if path is not None:
      with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)

if __name__ == "__main__":
  need("python -m attn.measure.at_once", "torch", device="CUDA")
  main(sys.argv[1:], os.environ.get("CSV"))
