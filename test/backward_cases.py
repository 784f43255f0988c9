"""Inputs and checks for tests of the backward kernels. The tests launch the kernels one after the other on the emulator."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
import cases
from attn.accuracy import Law, judge
from attn.chips.matrix import MMA
from attn.chips.shapes import BackwardShape, ShapeAtOnce
from attn.choose.backward import all_of, choose_bias_tile, dbias_of, delta_of, dkdv_of, dq_of, few_of, finish_of, tiles_of
from attn.kernels.parts.grid.tensors import (all_arguments, dbias_arguments, delta_arguments, dkdv_arguments, dq_arguments, few_arguments,
                                             finish_arguments)
from attn.kernels.tiles.amd import BackwardTile, at_once_tile
from attn.kernels.tiles.wgmma import WgmmaBackwardTile, WgmmaFewQueriesTile
from attn.ops.renderers import adapt
from attn.problem import Problem
from attn.reference import Options, arrange, restore, rounded, same
from attn.tinygrad_compat import Context, Tensor
from cases import DTYPES, SCORE_OPTIONS, TYPES, Inputs, array, chip, dropped, normal, numbers_of_rows, packed_sequences, problem, tensor

@dataclass(frozen=True)
class Loss:
  # Gradients of the loss by o (B, H, Sq, Dv), in the dtype of o, and by lse (B, H, Sq), or None.
  do: np.ndarray
  dlse: np.ndarray|None

def loss_of(p:Problem, dlse:bool=False, size:float=1.0) -> Loss:
  rng, rows = np.random.default_rng(11), (1, p.H, p.total_q) if p.varlen else (p.B, p.H, p.Sq)
  do = rounded(rng.standard_normal((*rows, p.Dv), dtype=np.float32)*np.float32(size), p.out_dtype)
  return Loss(do, rng.standard_normal(rows, dtype=np.float32) if dlse else None)

def forward_results(p:Problem, x:Inputs, extras:dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
  # Computes o and lse in numpy by FlashAttention-2's arithmetic (attn/reference.py).
  if not p.varlen: return same(x.q, x.k, x.v, p.softmax_scale, p.window, p.offset, options_of(p, extras), dtype=p.dtype, out_dtype=p.out_dtype)
  # Rows that belong to no sequence get o 0 and lse -inf.
  o, lse = np.zeros((1, p.H, p.total_q, p.Dv), np.float32), np.full((1, p.H, p.total_q), -np.inf, np.float32)
  for b, (qs, ks) in enumerate(packed_sequences(p, extras)):
    q, k, v = x.q[:, :, qs], x.k[:, :, ks], x.v[:, :, ks]
    options = options_of(p, extras, (b, q.shape[2], k.shape[2]))
    o[:, :, qs], lse[:, :, qs] = same(q, k, v, p.softmax_scale, p.window, 0 if p.top_left else k.shape[2] - q.shape[2], options,
                                      dtype=p.dtype, out_dtype=p.out_dtype)
  return o, lse

def options_of(p:Problem, extras:dict[str, np.ndarray], sequence:tuple[int, int, int]|None=None) -> Options:
  # Returns the options of a problem, or of one packed sequence, in the form that attn/reference.py takes.
  # `sequence` is the index of the packed sequence, its number of queries and its number of keys.
  found: dict[str, Any] = {n: extras[n] for n in SCORE_OPTIONS if n in extras} | dropped(p, extras, *(sequence or ()))
  return Options(top_left=p.top_left, **numbers_of_rows(p), **found)

def expected_gradients(p:Problem, x:Inputs, loss:Loss, extras:dict[str, np.ndarray]) -> dict[str, Law]:
  # Returns the exact values and error limits of dq, dk, dv, and of dbias if p has a bias.
  return {f"d{n}": law for n, law in cases.expected_gradients(p, x, extras, loss.do, loss.dlse).items()}

# shapes of CDNA's kernel that computes dq, dk and dv at once, by head dimension, for chips on which dispatch does not choose it
AT_ONCE_ON_AMD = {64: BackwardShape(4, 32, fenced=2), 128: BackwardShape(4, 32, fenced=4)}

def run_backward(p:Problem, x:Inputs, loss:Loss, arch:str, extras:dict[str, np.ndarray],
                 tiles:Callable[[Any], Any]=lambda tile: tile, only:str="", parts:int=0) -> dict[str, np.ndarray]:
  # Runs the backward kernels on the emulator, or on the GPU if `arch` is "CUDA", and returns dq, dk and dv.
  # The kernels get o and lse from a forward pass in numpy, and the gradients of o and lse from `loss`. `tiles` maps the tile that dispatch chooses to
  # the tile that is used. `only` runs a single kernel: "dq", "dkdv" or "dbias"; the last two get delta from numpy. `only` = "all" runs the kernel
  # that computes dq, dk and dv at once, between a kernel for delta and one that finishes dq. If `parts` is not 0, the kernels write that many partial
  # gradients, which this function adds.
  on, device, (o, lse) = chip(arch), "CUDA" if arch == "CUDA" else "EMU", forward_results(p, x, extras)
  dq_tile, dkdv_tile = map(tiles, tiles_of(p, on))
  launches = {"dq": (dq_arguments(p, loss.dlse is not None, parts), dq_of(p, on, dq_tile, loss.dlse is not None, parts)),
              "dkdv": (dkdv_arguments(p, parts), dkdv_of(p, on, dkdv_tile, parts))}
  if only == "all":
    if isinstance(dq_tile, BackwardTile):
      rows = on.unit.at_once.get(p.D, (ShapeAtOnce(AT_ONCE_ON_AMD[p.D]),))
      one = tiles(at_once_tile(p, on, next((x.shape for x in rows if set(p.options) <= set(x.options)), rows[-1].shape)))
    else: one = tiles(WgmmaBackwardTile(2, 64, matrix=MMA[p.dtype], keys=True, adds_dq=True))
    launches = {"delta": (delta_arguments(p, loss.dlse is not None), delta_of(p, on, one, loss.dlse is not None)),
                only: (all_arguments(p, parts), all_of(p, on, one, parts)),
                "finish": (finish_arguments(p), finish_of(p, on, one))}
  if only == "few":
    few = tiles(WgmmaFewQueriesTile(1, 64, matrix=MMA[p.dtype]))
    launches = {only: (few_arguments(p, loss.dlse is not None, parts), few_of(p, on, few, loss.dlse is not None, parts))}
  if only == "dbias": launches[only] = dbias_arguments(p, parts), dbias_of(p, on, tiles(choose_bias_tile(p, on)), parts)
  with Context(DEV=device if device == "CUDA" else f"EMU::{arch}"):
    adapt(device)
    done = {n: tensor(arrange(a, p.layout), p.dtype, device) for n, a in (("q", x.q), ("k", x.k), ("v", x.v))}
    done |= {n: tensor(arrange(a, p.layout), p.out_dtype, device) for n, a in (("o", o), ("do", loss.do))}
    rows = {"lse": lse, "lse_rest": np.zeros_like(lse)} | ({} if loss.dlse is None else {"dlse": loss.dlse})
    if only in ("dkdv", "dbias"): rows["delta"] = (rounded(loss.do, p.dtype)*o).sum(-1) - (0 if loss.dlse is None else loss.dlse)
    done |= {n: tensor(a.reshape(dq_arguments(p)["lse"][0]), "float32", device) for n, a in rows.items()}
    for n, a in extras.items():
      done[n] = Tensor(a, device=device) if a.dtype in (np.int32, np.uint32) else tensor(a, p.bias_dtype if n == "bias" else "float32", device)
    for t in done.values(): t.realize()
    for names, fxn in [launches[only]] if only in launches and only != "all" else launches.values():
      given = [done[n] if n in done else Tensor.empty(*shape, dtype=TYPES[dtype], device=device) for n, (shape, dtype) in names.items()]
      done |= zip(names, Tensor.custom_kernel(*given, fxn=fxn))
    if parts:
      divided = {"all": ("dk", "dv"), "few": ("dq",)}.get(only, ("dq", "dk", "dv", "dbias"))
      written = [n for n in divided if n in done]
      done |= {n: done[n].sum(0).cast(DTYPES[p.bias_dtype if n == "dbias" else p.dtype]) for n in written}
    if only == "dbias": return {"dbias": array(done["dbias"])}
    found = {n: like for n, like in (("dq", x.q), ("dk", x.k), ("dv", x.v)) if n in done}
    Tensor.realize(*[done[n] for n in found])
    return {n: restore(array(done[n]), p.layout, like.shape) for n, like in found.items()}

def check_backward_kernels(arch:str, make:Callable[[Problem], Inputs]=normal, *, extras:dict[str, np.ndarray]|None=None, dlse:bool=False,
                           size:float=1.0, tiles:Callable[[Any], Any]=lambda tile: tile, only:str="", parts:int=0,
                           **parameters:Any) -> dict[str, np.ndarray]:
  # Runs the backward kernels on drawn inputs, and checks that each element of dq, dk and dv is within its error limit (docs/contract.md).
  # `parameters` are the arguments of `problem`. Gradients must be exactly 0 for a query that sees no key, for a key that no query sees, and for a row
  # of no sequence. The loss uses o, and with `dlse` also lse. `size` scales dO. `run_backward` explains `tiles`, `only` and `parts`.
  p, extras = problem(extras=extras, **parameters), dict(extras or {})
  if "bias" in extras: extras["bias"] = rounded(extras["bias"], p.bias_dtype)
  x, loss = make(p), loss_of(p, dlse, size)
  got = run_backward(p, x, loss, arch, extras, tiles, only, parts)
  want = expected_gradients(p, x, loss, extras)
  for name, out in got.items(): assert (verdict := judge(out, want[name])).ok, f"{name}: {verdict}"
  blind = np.isneginf(forward_results(p, x, extras)[1])
  for name, nothing in (("dq", blind), *((name, (want[name].exact == 0).all(-1)) for name in ("dk", "dv"))):
    assert name not in got or (got[name][nothing] == 0).all(), f"{name}: must be exactly 0 in rows that see nothing or that nothing sees"
  return got
