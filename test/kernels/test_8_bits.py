"""Tests of forward kernels over q, k and v of 8-bit floats."""
from __future__ import annotations
from typing import Any
import numpy as np
from attn.accuracy import ShortSums
from attn.chips import get_chip
from attn.choose.dispatch import choose_tile
from attn.emulator.chips import SHORT_SUMS
from attn.ops.softmax import LIFT
from attn.problem import Problem
from cases import Inputs, floats, hold, in_turn, normal, problem, rounded, run_kernels

UNITS = ("sm_89", "sm_120")
RUN = 128       # products that a matrix unit with short sums adds up before the sum goes to fp32

def short_sums(arch:str, fast:bool=False) -> ShortSums|None:
  """Returns how the matrix unit of a chip adds 8-bit products, if it does not add them in fp32."""
  return ShortSums(SHORT_SUMS[arch], 0 if fast else RUN) if arch in SHORT_SUMS else None

def check_8_bits(arch:str, make:Any=normal, *, extras:dict[str, np.ndarray]|None=None, out_dtype:str="float32", **parameters:Any) -> None:
  """Builds a problem of the chip's own 8-bit floats, runs the kernels, and compares o and lse with float64: each element must be within its error
  limit (docs/contract.md)."""
  extras = dict(extras or {})
  p = problem(dtype=get_chip(arch).fp8, out_dtype=out_dtype, extras=extras, **parameters)
  x = make(p)
  o, lse = run_kernels(p, x, arch, extras, choose_tile(p, get_chip(arch)))
  hold(p, x, extras, o, lse, short_sums(arch, p.fast_accumulate))

# ***** shapes *****

SHAPES = (dict(Sq=64, Sk=64, D=32), dict(Sq=40, Sk=150, D=64), dict(Sq=33, Sk=200, D=128, H=4, Hkv=2), dict(Sq=20, Sk=70, D=192, Dv=128),
          dict(Sq=17, Sk=90, D=136, Dv=192), dict(Sq=30, Sk=77, D=80, Dv=48), dict(Sq=5, Sk=300, D=64, H=8, Hkv=2),
          dict(Sq=1, Sk=400, D=128, H=8, Hkv=1))

@in_turn("shape, arch", SHAPES, UNITS)
def test_shapes(shape:dict[str, Any], arch:str) -> None: check_8_bits(arch, **shape)

# ***** inputs *****

def of(p:Problem, q:np.ndarray, k:np.ndarray, v:np.ndarray) -> Inputs: return Inputs(*(rounded(a, p.dtype) for a in (q, k, v)))

def rising(p:Problem, by:float) -> Inputs:
  """Makes scores that rise by `by` powers of two from each group of 16 keys to the next, the same for all queries."""
  x = normal(p)
  k = np.zeros_like(x.k)
  steps = np.arange(p.Sk)//16*by*np.log(2)/p.softmax_scale      # q k, which is the product of the first two elements of the rows
  k[..., 0], k[..., 1] = np.floor(steps/16), steps % 16
  q = np.zeros_like(x.q)
  q[..., 0], q[..., 1] = 16, 1
  return of(p, q, k, x.v)

def just_below_the_headroom(p:Problem) -> Inputs: return rising(p, 8 - LIFT[p.dtype] - 0.02)
def just_above_the_headroom(p:Problem) -> Inputs: return rising(p, 8 - LIFT[p.dtype] + 0.1)
def falling(p:Problem) -> Inputs:
  x = just_below_the_headroom(p)
  return Inputs(x.q, x.k[:, :, ::-1].copy(), x.v)
def large(p:Problem) -> Inputs:
  """Makes queries and keys up to the largest numbers of the format."""
  x = normal(p)
  return of(p, x.q*100, x.k*100, x.v*100)
def one_huge_key(p:Problem) -> Inputs:
  x = normal(p)
  x.k[:, :, p.Sk//2] *= 16
  return of(p, x.q, x.k, x.v)
def constants(p:Problem) -> Inputs: return Inputs(*(np.full_like(a, c) for a, c in zip((normal(p).q, normal(p).k, normal(p).v), (1, 1, 3))))
def positive(p:Problem) -> Inputs:
  """Makes inputs without negative numbers, whose sums have errors of one sign."""
  x = normal(p)
  return Inputs(*map(np.abs, (x.q, x.k, x.v)))
def tiny(p:Problem) -> Inputs:
  """Makes inputs many of which are denormal numbers of the format."""
  x = normal(p)
  return of(p, x.q*2.0**-5, x.k*2.0**-5, x.v*2.0**-8)
def nan_rows(p:Problem) -> Inputs:
  """Makes a NaN in a query, in a key that only some queries see under a causal mask, and in a row of V that all of them see."""
  x = normal(p)
  x.q[:, :, 3, 1], x.k[:, :, p.Sk - p.Sq + 9, 0], x.v[:, :, 0, 2] = np.nan, np.nan, np.nan
  return x

HARD = (just_below_the_headroom, just_above_the_headroom, falling, large, one_huge_key, constants, positive, tiny, nan_rows)

@in_turn("make, arch", HARD, UNITS)
def test_hard_inputs(make:Any, arch:str) -> None:
  check_8_bits(arch, make, Sq=24, Sk=150, D=32, causal=True)
  check_8_bits(arch, make, Sq=20, Sk=300, D=64, causal=True, num_splits=3)

# ***** options *****

def scales_of(B:int, Hkv:int) -> dict[str, np.ndarray]:
  rng = np.random.default_rng(3)
  return {name: (2.0**rng.uniform(-3, 3, (B, Hkv))).astype(np.float32) for name in ("q_scale", "k_scale", "v_scale")}

OPTIONS: dict[str, dict[str, Any]] = {
  "scales of heads": dict(B=2, H=4, Hkv=2, extras=scales_of(2, 2)), "scales of tensors": dict(extras=scales_of(1, 1)),
  "a scale of V": dict(extras={"v_scale": np.array([[-0.25]], np.float32)}), "NaN scale": dict(extras={"k_scale": np.array([[np.nan]], np.float32)}),
  "causal": dict(causal=True), "window": dict(window=(20, 3)), "softcap": dict(softcap=3.0, extras=scales_of(1, 2), H=2),
  "alibi": dict(extras={"alibi_slopes": np.array([0.3, 0.02], np.float32)}), "bias": dict(extras={"bias": floats(1, 2, 33, 100)}),
  "sinks": dict(extras={"sinks": np.array([0.5, 4], np.float32), **scales_of(1, 2)}), "no lse": dict(lse=False),
  "lengths": dict(B=2, extras={"kv_lengths": np.array([37, 90], np.int32)}), "bshd": dict(layout="bshd"), "nsd": dict(layout="nsd"),
  "splits": dict(num_splits=2, extras=scales_of(1, 2)), "bfloat16": dict(out_dtype="bfloat16"), "float16": dict(out_dtype="float16"),
  "few queries": dict(Sq=3, H=8, Hkv=2, extras=scales_of(1, 2)), "fast sums": dict(fast_accumulate=True, D=128)}

@in_turn("name, arch", OPTIONS, UNITS)
def test_options(name:str, arch:str) -> None: check_8_bits(arch, **{"Sq": 33, "Sk": 100, "D": 32, **OPTIONS[name]})
