"""Tests of the forward kernel on every matrix unit: each element agrees with float64 within its error limit (docs/contract.md)."""
from __future__ import annotations
from dataclasses import replace
import numpy as np
import pytest
from attn.chips import get_chip
from attn.chips.shapes import ForwardShape, UpTo
from attn.choose.tiles import amd_tile
from attn.emulator import plan
from attn.emulator.checks import LdsRace, UninitialisedRead
from attn.emulator.plan import Plan
from attn.kernels.parts.memory.layouts import LdsTile
from attn.ops.interpret_numpy import Numbers
from attn.problem import Problem
from attn.reference import rounded
from attn.tinygrad_compat import Ops
from cases import ARCHS, ONE_OPTION, Inputs, amd_in_turn, check, check_kernels, in_turn, normal, problem

every_arch = pytest.mark.parametrize("arch", ARCHS)

SHAPES = {   # shapes of plain problems
  "one query, one key": dict(Sq=1, Sk=1, D=16),
  "one query": dict(Sq=1, Sk=300),
  "one key": dict(Sq=70, Sk=1, dtype="bfloat16"),
  "odd lengths": dict(Sq=77, Sk=133, D=32),
  "whole tiles": dict(Sq=128, Sk=128, D=128, dtype="bfloat16"),
  "several trips": dict(H=1, Sq=40, Sk=520, D=48),
  "D 80": dict(Sq=33, Sk=65, D=80),
  "D 96": dict(Sq=33, Sk=65, D=96, dtype="bfloat16"),
  "D 112": dict(Sq=33, Sk=65, D=112),
  "D 160": dict(Sq=40, Sk=65, D=160, dtype="bfloat16"),
  "D 192": dict(Sq=40, Sk=65, D=192),
  "D 256": dict(Sq=40, Sk=65, D=256, dtype="bfloat16"),
  "D 40, by whole chunks": dict(Sq=33, Sk=50, D=40),
  "D 20, by elements": dict(H=1, Sq=20, Sk=18, D=20, dtype="bfloat16"),
  "D 111, by elements": dict(H=1, Sq=20, Sk=18, D=111),
  "D 1": dict(H=1, Sq=20, Sk=18, D=1),
  "Dv below D": dict(Sq=40, Sk=65, D=128, Dv=64),
  "Dv above D": dict(Sq=40, Sk=65, D=64, Dv=192, dtype="bfloat16"),
  "Dv not a multiple": dict(Sq=40, Sk=65, D=64, Dv=23),
  "batches": dict(B=3, H=2, Sq=20, Sk=40),
  "fp32 out": dict(Sq=40, Sk=65, out_dtype="float32"),
  "bf16 out of fp16": dict(Sq=40, Sk=65, out_dtype="bfloat16"),
  "fp16 out of bf16": dict(Sq=40, Sk=65, dtype="bfloat16", out_dtype="float16"),
  "bshd": dict(B=2, H=3, Sq=40, Sk=65, layout="bshd", dtype="bfloat16"),
  "nsd": dict(B=2, H=3, Sq=40, Sk=65, layout="nsd"),
  "softmax_scale": dict(Sq=40, Sk=65, softmax_scale=0.37),
  "no lse": dict(Sq=40, Sk=65, lse=False),
}

MASKS = {
  "causal": dict(Sq=150, causal=True),
  "causal, more keys": dict(Sq=70, Sk=200, causal="bottom-right", dtype="bfloat16"),
  "causal, more queries": dict(Sq=200, Sk=70, causal=True),
  "causal, rows that see nothing": dict(Sq=5, Sk=2, causal=True),
  "causal top-left": dict(Sq=70, Sk=200, causal="top-left"),
  "causal top-left, more queries": dict(Sq=200, Sk=70, causal="top-left", dtype="bfloat16"),
  "causal, one query": dict(Sq=1, Sk=200, causal=True),
  "causal, D 128": dict(Sq=130, Sk=140, D=128, causal=True),
  "window": dict(Sq=200, window=(30, 7)),
  "window on the left": dict(Sq=130, Sk=200, window=(33, -1), dtype="bfloat16"),
  "window on the right": dict(Sq=200, window=(-1, 5)),
  "window of one": dict(Sq=70, window=(0, 0)),
  "causal window": dict(Sq=200, Sk=260, window=(64, 0)),
  "causal and window": dict(Sq=1, Sk=256, window=(127, -1), causal=True),
}

@pytest.mark.sample(5)
@amd_in_turn("case", SHAPES)
def test_shapes(arch:str, case:str) -> None: check(arch, **SHAPES[case])

@pytest.mark.sample(6)
@amd_in_turn("case", MASKS)
def test_masks(arch:str, case:str) -> None: check(arch, **MASKS[case])

@pytest.mark.sample(4)
@amd_in_turn("ratio", (1, 3, 4, 5, 7, 8, 24))
def test_grouped_heads(arch:str, ratio:int) -> None:
  layout = {"gfx950": "bshd", "gfx1201": "nsd"}.get(arch, "bhsd")
  check(arch, B=2 if layout != "nsd" else 1, H=2*ratio, Hkv=2, Sq=20, Sk=40, layout=layout, causal=ratio % 2 == 1)

# ***** inputs that break a wrong online softmax *****

def falling(p:Problem) -> Inputs:
  # inputs in which the largest score of a row falls: each tile of keys has a lower maximum than the tiles before
  x = normal(p)
  return Inputs(np.abs(x.q), rounded(x.k*np.linspace(3, 0.01, p.Sk, dtype=np.float32)[:, None], p.dtype), x.v)

def rising(p:Problem) -> Inputs:
  # inputs in which a row's largest score rises from tile to tile by more than the threshold for rescaling
  x = normal(p)
  k = np.broadcast_to((np.arange(p.Sk)//16*8).astype(np.float32)[:, None], x.k.shape).copy()
  return Inputs(np.full_like(x.q, 0.25), k, x.v)

def creeping(p:Problem) -> Inputs:
  # inputs in which a row's largest score rises from tile to tile by less than the threshold for rescaling, but far in total
  x = normal(p)
  k = np.broadcast_to((np.arange(p.Sk)//32).astype(np.float32)[:, None], x.k.shape).copy()
  return Inputs(np.full_like(x.q, 0.25), k, x.v)

def climbing(p:Problem) -> Inputs:
  # inputs in which the scores rise by more than 89 from each 64 keys to the next: exp(89) overflows float32
  x = normal(p)
  k = np.broadcast_to((np.arange(p.Sk)//64*64 - 64).astype(np.float32)[:, None], x.k.shape).copy()
  return Inputs(np.full_like(x.q, 0.5), k, x.v)

def deep(p:Problem) -> Inputs:
  # inputs with such low scores that exp of any score underflows
  x = normal(p)
  return Inputs(np.full_like(x.q, 1), rounded(x.k*0.125 - 48, p.dtype), x.v)

def late_key(p:Problem) -> Inputs:
  # inputs in which the last key has more weight than all earlier keys, in some rows only
  x = normal(p)
  x.k[..., -1, :] = 64
  return Inputs(np.where(np.arange(p.Sq)[:, None] % 7 == 2, np.abs(x.q), x.q*np.float32(0.125)), x.k, x.v)

def masked_first(p:Problem) -> Inputs:
  # inputs in which some waves see only scores of -inf in the first tiles of keys
  x = normal(p)
  return Inputs(rounded(np.abs(x.q) + 1, p.dtype), np.where(np.arange(p.Sk)[:, None] < p.Sk*2//3, np.float32(-np.inf), x.k), x.v)

def large_rows(p:Problem) -> Inputs:
  x = normal(p)
  x.q[..., ::3, :] *= 64
  x.k[..., ::5, :] *= 64
  return x

def constants(p:Problem) -> Inputs:
  x = normal(p)
  return Inputs(np.ones_like(x.q), np.ones_like(x.k), x.v)

def huge_key(p:Problem) -> Inputs:
  x = normal(p)
  x.k[..., p.Sk//2, :] = 512
  return x

def minus_inf_keys(p:Problem) -> Inputs:
  # inputs in which some scores are -inf, and in some rows all scores
  x = normal(p)
  x.q[..., 3, :] = 1
  x.q[..., 5, :] = 1
  x.k[..., ::2, :] = np.abs(x.k[..., ::2, :])
  return Inputs(np.abs(x.q), np.where(np.arange(p.Sk)[:, None] % 3 == 0, np.float32(-np.inf), x.k), x.v)

def nan_query(p:Problem) -> Inputs:
  x = normal(p)
  x.q[..., 7, 2] = np.nan
  return x

def inf_query(p:Problem) -> Inputs:
  x = normal(p)
  x.q[..., 7, :] = np.inf
  return x

def nan_neighbour(p:Problem) -> Inputs:
  # inputs in which all keys and values of the heads after head 0 are NaN
  # the NaN reach the output if a kernel reads beyond the last key of head 0
  x = normal(p)
  x.k[:, 1:], x.v[:, 1:] = np.nan, np.nan
  return x

ADVERSARIAL = (falling, rising, creeping, climbing, deep, late_key, masked_first, large_rows, constants, huge_key, minus_inf_keys, nan_query,
               inf_query, nan_neighbour)

@pytest.mark.sample(5)
@in_turn("make, arch", ADVERSARIAL, ARCHS)
def test_adversarial(arch:str, make) -> None:
  check(arch, make, H=2, Sq=40, Sk=200, D=64, dtype="bfloat16" if make is huge_key else "float16")
  check(arch, make, H=2, Sq=70, Sk=90, D=32, dtype="bfloat16", causal=True)

@pytest.mark.sample(3)
@pytest.mark.parametrize("above", (0.0, 8.0))
@in_turn("make, arch", (normal, *(f for f in ADVERSARIAL if f is not huge_key)), ARCHS)
def test_rescale_above(arch:str, above:float, make) -> None:
  # The forward kernel is right for both values of the tile's field `rescale_above`: how far the maximum of a row may rise before the kernel rescales
  # its accumulators. With 0 it rescales whenever the maximum rises. Dispatch chooses only one of the values; the test runs both.
  check_kernels(arch, make, tile=lambda t: replace(t, rescale_above=above), H=2, Sq=70, Sk=300, D=64)

TRIPS = {   # for each of 8 iterations: 1 if it raises the reference
  normal: (1, 0, 0, 0, 0, 0, 0, 0), constants: (1, 0, 0, 0, 0, 0, 0, 0), falling: (1, 0, 0, 0, 0, 0, 0, 0), climbing: (1, 0, 1, 0, 1, 0, 1, 0),
  rising: (1,)*8, late_key: (1, 0, 0, 0, 0, 0, 0, 1),
  creeping: (1, 0)*4}    # the 16 weights of a lane grow by 2^2.9 in each iteration; their sum may reach 2^8

@pytest.mark.parametrize("make", TRIPS, ids=lambda f: f.__name__)
def test_which_trips_correct(monkeypatch, make) -> None:
  # The forward kernel rarely raises the number that the softmax subtracts from a row's scores. TRIPS lists for each kind of input in which iterations
  # of the loop over tiles the kernel does so. The emulated kernel does so in exactly these iterations.
  seen, any_lane = [], Numbers.any_lane
  def note(self, condition):
    seen.append(int((found := any_lane(self, condition)).any()))
    return found
  monkeypatch.setattr(Numbers, "any_lane", note)
  check_kernels("gfx1201", make, tile=lambda t: replace(t, block_n=32, rescale_above=8.0), H=1, Sq=16, Sk=256, D=64)
  assert tuple(seen) == TRIPS[make]

@pytest.mark.sample(2)
@every_arch
def test_scores_too_large_for_one_fma(arch:str) -> None:
  # The forward kernel computes exp2(score - maximum) without overflow for bfloat16 scores of 1.7e10, with a scale that makes products inexact. A
  # single fma would round the product of the scale with the maximum, but not its product with the score.
  def make(p:Problem) -> Inputs:
    x = normal(p)
    return Inputs(np.full_like(x.q, 16512), np.full_like(x.k, 16512), x.v)
  for scale in (0.25, 0.3, 0.11):
    check(arch, make, H=1, Sq=20, Sk=300, D=64, dtype="bfloat16", softmax_scale=scale, out_dtype="float32")

# ***** tiles for plain problems *****

@pytest.mark.parametrize("arch, row, option", [
  pytest.param(arch, row, option, id=f"{arch}-{row.up_to}-{option or 'no option'}")
  for arch in ("gfx90a", *ARCHS) for row in get_chip(arch).unit.plain_forward for option in row.options])
def test_tiles_for_problems_with_at_most_one_option(arch:str, row:UpTo[ForwardShape], option:str) -> None:
  # Each tile in the tables for plain problems gives right results, also with a last tile that is not full, with a causal mask and with a window. For
  # grids that are small enough to emulate, dispatch itself would choose other tiles.
  for mask in (dict(causal=True), dict(window=(70, 30))):
    sizes = dict(H=1, Sq=150, Sk=200, D=row.up_to, dtype="bfloat16", **{**mask, **ONE_OPTION[option]})
    check_kernels(arch, tile=lambda t: amd_tile(problem(**sizes), get_chip(arch), row), **sizes)

# ***** loading tiles *****

AHEAD = {"one trip": dict(Sq=20, Sk=20, D=32), "several trips": dict(Sq=40, Sk=333), "causal": dict(Sq=150, Sk=170, causal=True, dtype="bfloat16"),
         "three loops": dict(Sq=90, Sk=300, window=(100, 20)), "splits": dict(Sq=40, Sk=500, num_splits=3)}

@pytest.mark.sample(4)
@pytest.mark.parametrize("prefetch", (0, 2))
@amd_in_turn("case", AHEAD)
def test_prefetch(arch:str, prefetch:int, case:str) -> None:
  check_kernels(arch, tile=lambda t: replace(t, prefetch=prefetch, block_n=32), H=1, **{"D": 64, **AHEAD[case]})

@every_arch
@pytest.mark.usefixtures("without_places")
def test_one_buffer_for_two(monkeypatch, arch:str) -> None:
  # A planted fault gives the kernel one LDS buffer in place of two: a tile is stored while other waves still read the tile before. The emulator
  # reports this race.
  monkeypatch.setattr(LdsTile, "nth", lambda self, i: self)
  with pytest.raises(LdsRace): check_kernels(arch, tile=lambda t: replace(t, prefetch=2, block_n=32), H=1, Sq=128, Sk=200, D=64)

@amd_in_turn("prefetch", (0, 1, 2))
@pytest.mark.usefixtures("without_places")
def test_no_barriers(monkeypatch, arch:str, prefetch:int) -> None:
  monkeypatch.setattr(Plan, "barrier", lambda self, u: None)
  monkeypatch.setattr(plan, "_RULES", {**plan._RULES, Ops.BARRIER: Plan.barrier})
  with pytest.raises((LdsRace, UninitialisedRead)): check_kernels(arch, tile=lambda t: replace(t, prefetch=prefetch, block_n=32), H=1, Sq=128, Sk=200)

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ("gfx942", "gfx950"))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_narrow_matrices(arch:str, dtype:str) -> None:
  # Kernels with CDNA's 16x16 matrix instructions are right. A wave has four lane groups in these instructions, and two in the usual 32x32
  # instructions.
  narrow = get_chip(arch).matrix[dtype][1]
  for make in (normal, rising, masked_first):
    check_kernels(arch, make, tile=lambda t: replace(t, matrix=narrow, waves=4), H=1, Sq=70, Sk=300, D=96, dtype=dtype, causal=make is normal)

def test_65536_heads() -> None:
  # Attention of 65,536 heads is right for every head, although the second dimension of a grid may have at most 65,535 workgroups.
  check("gfx1201", B=1, H=65536, Sq=1, Sk=1, D=16)
