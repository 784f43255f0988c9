"""Compares the ways in which attn computes dq, dk and dv on an NVIDIA GPU with wgmma: two kernels, one kernel whose workgroups add to dq in no order,
one whose workgroups add in a fixed order, and the kernel for few queries. Also times PyTorch's backward, where PyTorch has the options of a problem.

`DEV=CUDA python -m attn.measure.at_once [WORD ...]` prints the problems whose name has each WORD; CSV=path writes them to a file."""
from __future__ import annotations
import itertools, os, sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
import numpy as np
from attn.calls.checked_kernel import device_arch
from attn.calls.gradient import kernels_with_tiles
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.chips.nvidia import FEW_QUERIES_WGMMA
from attn.chips.shapes import WgmmaBackwardShape
from attn.choose.backward import Parts, choose_parts, few_queries, parts_of_kernel, tiles_of
from attn.choose.backward_tiles import AtOnceTile, faster_at_once
from attn.choose.dispatch import single_kernel
from attn.choose.tile_lists import listing
from attn.functions.trace import functions_of
from attn.kernels.tiles.wgmma import WgmmaBackwardTile, WgmmaFewQueriesTile
from attn.measure.backward import (APART, SIZES, Launches, computed_gradients, graph_timer, outputs_of, shape_of, torch_backward,
                                   torch_seconds)
from attn.measure.functions import (DOCUMENT, FLEX, FUNCTION_ROWS, HEAD_DIMENSION, HEADS, ROWS_OF_ALL, FunctionRow, flex_forward,
                                    tensors_of_functions)
from attn.measure.machine import need
from attn.measure.peers import CUDNN, as_tensor, in_turn, on_the_host, random_inputs
from attn.measure.rows import line_of_row, write_rows
from attn.ops import renderers
from attn.problem import Problem, problem_of
from attn.tinygrad_compat import Device, Tensor, foreign_cuda_context

# Times are device times of all kernels that a way needs, also of those that compute delta and turn the sums of dQ into dq. For a mask_mod the peer is
# PyTorch's compiled flex_attention.

MOST_COLUMNS = 128     # largest head dimension of this kernel
TWO, NO_ORDER, IN_ORDER, OF_FEW = ALL_WAYS = "two kernels", "in no order", "in order", "few queries"

def launches_of(p:Problem, arch:Chip, way:str, shape:WgmmaBackwardShape|None=None) -> Launches:
  """Returns the launches that compute dq, dk and dv in one of ALL_WAYS, such as two kernels, or one kernel."""
  # `shape` is the tile shape of the one kernel; None: the shape that attn uses.
  one: AtOnceTile|None = None
  if way == OF_FEW: one = WgmmaFewQueriesTile(**vars(shape or FEW_QUERIES_WGMMA), matrix=MMA[p.dtype])
  elif way != TWO: one = WgmmaBackwardTile(**vars(shape or faster_at_once(p).shape), matrix=MMA[p.dtype], keys=True, adds_dq=True)
  p, parts, (dq, dkdv) = replace(p, deterministic=way != NO_ORDER), choose_parts(p, arch), tiles_of(p, arch)
  lists = listing(p, arch, dq), listing(p, arch, dkdv, "queries")
  if isinstance(one, WgmmaFewQueriesTile): parts, lists = Parts(parts_of_kernel(p, arch, one, "keys"), 0), (None, None)
  elif one is not None: parts, lists = Parts(0, parts.dkdv), (None, listing(p, arch, one, "queries", p.deterministic))
  found, of_kernel = kernels_with_tiles(p, arch, False, parts, lists, dq, dkdv, one), {"dq": lists[0], "dkdv": lists[1], "all": lists[1]}
  return [(launch, of_kernel.get(name)) for name, launch in found.items() if name != "forward"]

WaysSizes = tuple[int, int, int, int, int, int]     # batch, heads, heads of keys, queries, keys, head dimension

@dataclass(frozen=True)
class WaysRow:
  """A problem of the comparison: its sizes, its options, and a text that names the options (`told`)."""
  sizes: WaysSizes
  told: str
  options: dict[str, Any] = field(default_factory=dict)
  extras: dict[str, np.ndarray] = field(default_factory=dict)  # the optional tensors by name
  packed: bool = False  # whether the batches are packed sequences
  function: FunctionRow|None = None  # the mask_mod, for attn and for PyTorch
  @property
  def p(self) -> Problem:
    (B, H, Hkv, Sq, Sk, D), layout = self.sizes, "thd" if self.packed else "bhsd"
    def shape(heads:int, rows:int) -> tuple[int, ...]: return (B*rows, heads, D) if self.packed else (B, heads, rows, D)
    given: dict[str, Any] = {"max_seqlen_q": Sq, "max_seqlen_k": Sk} if self.packed else {}
    kinds = tuple((x.shape, str(x.dtype)) for x in self.extras.values())
    if self.function is not None: given |= functions_of(None, self.function.mask_mod, kinds)
    return problem_of(shape(H, Sq), shape(H, Sq), shape(Hkv, Sk), shape(Hkv, Sk), dtypes=["bfloat16"]*4 + ["float32"], layout=layout,
                      lse=(H, B*Sq) if self.packed else (B, H, Sq), extras={name: (x.shape, str(x.dtype)) for name, x in self.extras.items()},
                      **given, **self.options)
  @property
  def name(self) -> str: return f"{shape_of(self.p)} {self.told}"

TimedOptions = dict[str, Any]
LIKE_TORCH:TimedOptions = {"causal": "top-left"}
OF_PEERS:dict[str, TimedOptions] = {"full": {}, "causal": LIKE_TORCH}      # options that PyTorch's backends have, too
OPTIONS_TIMED:dict[str, TimedOptions] = {
  "window": {"window": (1023, 0)}, "softcap": {"softcap": 30.0}, "softcap, causal": {"softcap": 30.0} | LIKE_TORCH, "dropout": {"dropout_p": 0.1},
  "dropout, causal": {"dropout_p": 0.1} | LIKE_TORCH, "ALiBi, causal": LIKE_TORCH, "packed": {}, "packed, causal": LIKE_TORCH}
SIZES_WITH_OPTIONS = ((4, 16, 16, 4096, 4096, 128), (4, 32, 8, 4096, 4096, 128), (4, 32, 32, 4096, 4096, 64), (4, 16, 16, 2048, 2048, 64))
SIZES_WITH_MASKS = (1, HEADS, HEADS, ROWS_OF_ALL, ROWS_OF_ALL, HEAD_DIMENSION)
MASKS_TIMED = ("documents", "dilated", "neighbours")
FURTHER_SIZES = ((4, 16, 16, 4000, 4000, 128), (8, 16, 16, 2048, 2048, 128), (16, 16, 16, 1024, 1024, 128))

def extras_of(told:str, sizes:WaysSizes) -> dict[str, np.ndarray]:
  """Returns the optional tensors by name for the options that the text `told` names, such as "ALiBi"."""
  B, H, _, Sq, Sk, _ = sizes
  if "dropout" in told: return {"dropout_seed": np.array([1, 2], np.uint32)}
  if told.endswith("documents"): return {"mod_tensor0": np.arange(Sk, dtype=np.int32)//DOCUMENT}
  if "ALiBi" in told: return {"alibi_slopes": 2.0**(-8*(np.arange(H, dtype=np.float32) + 1)/H)}
  return {f"cu_seqlens_{name}": np.arange(B + 1, dtype=np.int32)*n for name, n in (("q", Sq), ("k", Sk))} if "packed" in told else {}

def rows_of_ways(words:list[str]) -> list[WaysRow]:
  """Returns the problems to compare: those whose name contains every one of `words`."""
  sizes = [x for x in (*SIZES, *FURTHER_SIZES) if x[-1] <= MOST_COLUMNS]
  found = [WaysRow(x, told, options) for x, (told, options) in itertools.product(sizes, OF_PEERS.items())]
  found += [WaysRow(x, told, options, extras_of(told, x), "packed" in told)
            for x, (told, options) in itertools.product(SIZES_WITH_OPTIONS, OPTIONS_TIMED.items())]
  masks = [(f"mask_mod, {row.name}", row) for row in FUNCTION_ROWS if row.name in MASKS_TIMED]
  found += [WaysRow(SIZES_WITH_MASKS, told, {}, extras_of(told, SIZES_WITH_MASKS), function=row) for told, row in masks]
  return [row for row in found if all(word in row.name for word in words)]

def as_laid(t:Tensor, p:Problem) -> Tensor:
  """Rearranges a tensor (B, heads, rows, D) to the layout of the problem."""
  return t.permute(0, 2, 1, 3).reshape(-1, t.shape[1], t.shape[3]).contiguous().realize() if p.varlen else t

def flex_backward(row:FunctionRow, q:Any, k:Any, v:Any, do:Any) -> Callable[[], tuple[Any, ...]]:
  """Returns a function that computes dq, dk and dv from q, k, v and do by PyTorch's compiled flex_attention, with the mask_mod of `row`."""
  import torch
  torch._dynamo.reset()
  inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
  o = flex_forward(inputs, row.torch_mask(tensors_of_functions()))()
  return lambda: tuple(torch.autograd.grad(o, inputs, do, retain_graph=True))

def compare_ways(row:WaysRow) -> dict[str, Any]:
  """Times the gradients of a problem in each way and by PyTorch; returns milliseconds and a verdict as a row of the printed table."""
  import torch
  torch.cuda.init()
  p = row.p
  inputs = random_inputs(p, 0, (p.H, p.Sq), (p.Hkv, p.Sk), (p.Hkv, p.Sk), (p.H, p.Sq))
  peers = torch_backward(p, "causal" in row.told, *inputs) if row.told in OF_PEERS or p.dropout_p else {}
  if row.function is not None: peers = {FLEX: flex_backward(row.function, *inputs)}
  # attn's gradients are compared with those of cuDNN or flex_attention. If neither has the options, the gradients of one kernel are compared with
  # those of two.
  exact = peers.get(CUDNN if row.told in OF_PEERS else FLEX)
  expected = [] if exact is None else [x.float().cpu().numpy() for x in exact()]
  theirs_timers = {name: torch_seconds(x) for name, x in peers.items()}
  with foreign_cuda_context() as theirs:
    renderers.adapt(Device.DEFAULT)
    arch, have = device_arch(), {name: as_laid(as_tensor(on_the_host(x), p.dtype), p) for name, x in zip(("q", "k", "v", "do"), inputs)}
    have |= {name: Tensor(x).realize() for name, x in row.extras.items()}
    have |= {name: t.realize() for name, t in outputs_of(p.shapes, single_kernel(p, arch)[0], have).items()}
    timers, apart = dict[str, Callable[[], float]](), 0.0
    for way in ALL_WAYS if isinstance(few_queries(p, arch), WgmmaFewQueriesTile) else ALL_WAYS[:-1]:
      found = computed_gradients(launches_of(p, arch, way), have)
      timers[way] = graph_timer(*found.values())
      got = [t.float().numpy() for t in found.values()]
      expected = expected or got
      apart = max(apart, *[float((np.abs(x - y)/np.abs(y).max()).max()) for x, y in zip(got, expected)])
    times = in_turn(timers | {name: theirs(timer) for name, timer in theirs_timers.items()})
  found_row = {"shape": shape_of(p), "options": row.told, "dtype": p.dtype} | {f"{name} ms": round(x*1e3, 3) for name, x in times.items()}
  return found_row | {"verdict": "ok" if apart <= APART[p.dtype] else "WRONG"}

def main(words:list[str], path:str|None) -> None:
  rows = []
  for row in rows_of_ways(words):
    rows.append(compare_ways(row))
    print(line_of_row(rows[-1]), flush=True)
    if path is not None: write_rows(rows, path)

if __name__ == "__main__":
  need("python -m attn.measure.at_once", "torch", device="CUDA")
  main(sys.argv[1:], os.environ.get("CSV"))
