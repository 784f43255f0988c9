"""Tests of rows whose biases are all large and negative, such as the lowest float32 or -1e9, with which models mask padding."""
from __future__ import annotations
import os, sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import attn
from attn.accuracy import Array
from attn.kernels.parts.weights import epilogue
from attn.problem import Problem
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes
from api_cases import check_attention, emulated
from cases import Inputs, array, normal, tensor
from test_context import devices
from test_tiled import on

# Adding a score to such a bias changes nothing in fp32, and an fp32 lse of this size loses the logarithm of the number of keys. The expected values
# are float64 results from scores that were rounded to fp32. The error limits of docs/contract.md are no help here: they grow with a score's size, and
# would allow nearly any result.

pytestmark = pytest.mark.usefixtures("not_unrolled")

LEAST = float(np.finfo(np.float32).min)
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}

def large_bias(shape:tuple[int, ...], dtype:str) -> Array:
  # Makes a bias with ordinary numbers in its even rows, and large negative numbers, which mask, in the odd rows.
  bias = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
  keys = shape[-1]
  # All columns are masked, some columns, or columns by a sum of two such numbers.
  bias[..., 1::16, :], bias[..., 3::16, :], bias[..., 5::16, :], bias[..., 7::16, :], bias[..., 9::16, :] = LEAST, -1e9, LEAST, LEAST, -1e4
  bias[..., 5::16, ::3] = -np.inf                      # beside the sum of two lowest numbers
  bias[..., 7::16, keys//2:] = -2.5e38
  bias[..., 11::16, :] = -np.inf
  bias[..., 13::16, :-3], bias[..., 15::16, 2:] = LEAST, -1e9
  return array(tensor(bias, dtype))

@dataclass(frozen=True)
class Given:
  # Inputs as numpy arrays: q (B, H, Sq, D), k and v (B, Hkv, Sk, D), the bias, dO and options.
  q: Array
  k: Array
  v: Array
  bias: Array
  do: Array
  dtype: str
  bias_dtype: str
  options: dict[str, Any]

  @staticmethod
  def of(Sq:int=20, Sk:int=52, D:int=16, H:int=4, Hkv:int=2, bias_heads:int=4, dtype:str="float16", bias_dtype:str="float32",
         **options:Any) -> Given:
    rng = np.random.default_rng(3)
    def normal(*shape:int) -> Array: return array(tensor(rng.standard_normal(shape, np.float32), dtype))
    x = [normal(1, heads, rows, D) for heads, rows in ((H, Sq), (Hkv, Sk), (Hkv, Sk), (H, Sq))]
    return Given(*x[:3], large_bias((1, bias_heads, Sq, Sk), bias_dtype), x[3], dtype, bias_dtype, options)

  @property
  def tensors(self) -> dict[str, Tensor]:
    found = {name: tensor(getattr(self, name), self.dtype) for name in ("q", "k", "v")}
    return {name: x.realize() for name, x in (found | {"bias": tensor(self.bias, self.bias_dtype)}).items()}

def exact(x:Given) -> dict[str, Array]:
  # Computes o, lse and the gradients of sum(o*do) in float64. Scores are rounded to fp32 after the bias is added.
  q, k, v, do, bias = (a.astype(np.float64) for a in (x.q, x.k, x.v, x.do, x.bias))
  (_, H, Sq, D), (_, Hkv, Sk, _) = q.shape, k.shape
  k, v = np.repeat(k, H//Hkv, 1), np.repeat(v, H//Hkv, 1)
  s, i, j = q @ k.swapaxes(-1, -2)*D**-0.5, np.arange(Sq)[:, None] + Sk - Sq, np.arange(Sk)
  cap = x.options.get("softcap", 0)
  slope = 1 - np.tanh(s/cap)**2 if cap else np.ones_like(s)
  if cap: s = cap*np.tanh(s/cap)
  if "alibi_slopes" in x.options: s = s - x.options["alibi_slopes"][:, None, None]*abs(i - j)
  with np.errstate(over="ignore"): s = (s + bias).astype(np.float32).astype(np.float64)
  if x.options.get("causal"): s = np.where(j <= i, s, -np.inf)
  top = s.max(-1, keepdims=True)
  top[np.isinf(top)] = 0
  p = np.exp(s - top)
  total = p.sum(-1, keepdims=True)
  with np.errstate(divide="ignore"): lse = top + np.log(total)
  p = p/np.where(total == 0, 1, total)
  o = p @ v
  ds = p*(do @ v.swapaxes(-1, -2) - (do*o).sum(-1, keepdims=True))
  def of_keys(a:Array) -> Array: return a.reshape(1, Hkv, H//Hkv, Sk, D).sum(2)
  of_bias, scaled = ds.sum(1, keepdims=True) if bias.shape[1] == 1 else ds, ds*slope*D**-0.5
  return {"o": o, "lse": lse[..., 0], "q": scaled @ k, "k": of_keys(scaled.swapaxes(-1, -2) @ q), "v": of_keys(p.swapaxes(-1, -2) @ do),
          "bias": of_bias}

def check_results(x:Given, found:dict[str, Array]) -> None:
  # Checks results, by name, against float64, with a tolerance of a few roundings of their dtype.
  want = exact(x)
  for name, got in found.items():
    if name == "lse":
      np.testing.assert_allclose(got, want[name], rtol=3e-7, atol=1e-5, err_msg=name)
      continue
    coarse = max(EPSILON[x.dtype], EPSILON[x.bias_dtype] if name == "bias" else 0, 2.0**-18)
    np.testing.assert_allclose(got, want[name], rtol=0, atol=4*coarse*np.abs(want[name]).max(), err_msg=name)

def computed(x:Given, *training:int) -> dict[str, Array]:
  # Computes o and lse by `attention`, and checks the gradients for each of the given values of tinygrad's setting TRAINING.
  given, options = x.tensors, dict(x.options)
  if "alibi_slopes" in options: options["alibi_slopes"] = tensor(options["alibi_slopes"], "float32")
  o, lse = attn.attention(**given, **options, return_lse=True)
  for setting in training or (1,):
    with Context(TRAINING=setting):
      gradients = (attn.attention(**given, **options).float()*tensor(x.do, "float32")).sum().gradient(*given.values())
    check_results(x, {name: array(g) for name, g in zip(given, gradients)})
  return {"o": array(o), "lse": array(lse)}

UNITS = (("gfx942", {}), ("gfx1100", {"dtype": "bfloat16", "bias_dtype": "bfloat16", "bias_heads": 1}), ("sm_80", {"softcap": 5.0}),
         ("gfx1030", {"dtype": "float32"}))
OPTIONS: dict[str, dict[str, Any]] = {
  "plain": {}, "softcap": {"softcap": 3.0}, "alibi": {"alibi_slopes": 2.0**-np.arange(1, 5, dtype=np.float32)}, "causal": {"causal": True, "Sk": 20},
  "one_bias": {"bias_heads": 1}, "bfloat16": {"dtype": "bfloat16", "bias_dtype": "bfloat16"}, "float32": {"dtype": "float32"},
  "D64": {"D": 64, "Sk": 150}, "D128": {"D": 128, "Sk": 150}}

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch, parameters", UNITS)
def test_rows_of_large_biases(arch:str, parameters:dict[str, Any]) -> None:
  x = Given.of(**parameters)
  with emulated(arch): check_results(x, computed(x, *range(2) if arch == "gfx942" else ()))

@pytest.mark.thorough
@pytest.mark.parametrize("arch", ("gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90", "gfx1030"))
@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name:str, arch:str) -> None:
  x = Given.of(**OPTIONS[name])
  with emulated(arch): check_results(x, computed(x))

def test_dropout_of_a_mean() -> None:
  # Backward drops the keys that forward drops, also in rows whose o is a mean of V. If dO is 1, the sum of v times its gradient equals the sum of o.
  x = Given.of()
  with emulated("gfx942"), Context(TRAINING=1):
    t = x.tensors
    o = attn.attention(**t, dropout_p=0.3, dropout_seed=Tensor([3, 4], dtype=dtypes.uint32))
    dv, = o.float().sum().gradient(t["v"])
    np.testing.assert_allclose((array(dv)*x.v).sum(), array(o).sum(), atol=0.05)

@pytest.mark.parametrize("arch", ("gfx942", "sm_80", pytest.param("gfx1030", marks=pytest.mark.thorough)))
def test_key_ranges(arch:str) -> None:
  # Key ranges of unequal length are merged correctly for rows whose biases are all large and negative: the weight of a range's result is proportional
  # to its number of keys.
  x = Given.of(Sq=16, Sk=400)
  with emulated(arch): check_results(x, dict(zip(("o", "lse"), map(array, attn.attention(**x.tensors, num_splits=3, return_lse=True)))))

def test_the_lost_part_of_lse_is_needed(monkeypatch:pytest.MonkeyPatch) -> None:
  # Kernels need lse_rest, the part of lse that fp32 loses. Without it, rows whose biases are all large and negative are wrong: a gradient is too
  # large by a factor of the number of keys, and key ranges of all lengths weigh the same.
  of = epilogue.LogSum.of
  def forgotten(reference:UOp, total:UOp) -> epilogue.LogSum:
    found = of(reference, total)
    return epilogue.LogSum(found.rounded, found.rest*0.0)
  monkeypatch.setattr(epilogue.LogSum, "of", forgotten)
  def in_ranges(x:Given) -> None: check_results(x, {"o": array(attn.attention(**x.tensors, num_splits=3))})
  for parameters, test in (({"Sk": 54}, computed), ({"Sq": 16, "Sk": 402}, in_ranges)):
    with emulated("gfx942"), pytest.raises(AssertionError, match="Not equal to tolerance"): test(Given.of(**parameters))

@pytest.mark.sample(1)
@pytest.mark.parametrize("count, keys", ((2, False), (3, True), *(pytest.param(4, keys, marks=pytest.mark.thorough) for keys in (False, True))))
def test_rows_that_devices_share(count:int, keys:bool) -> None:
  # Results are right for rows whose biases are all large and negative, if the rows of a sequence are sharded over devices. With `keys` only the rows
  # of k and v are, and each device has all of q.
  x, at = Given.of(Sq=18, Sk=54), devices(count)
  with emulated("gfx942"), Context(TRAINING=1):
    t = x.tensors
    t = {name: a.shard(at) if name == "bias" or (keys and name == "q") else attn.shard_sequence(a, at, 2) for name, a in t.items()}
    o, lse = attn.attention(**t, return_lse=True, sequence_order="zigzag", sequence_lengths=(18, 54))
    do = tensor(x.do, "float32")
    gradients = (o.float()*(do.shard(at) if keys else attn.shard_sequence(do, at, 2))).sum().gradient(*[t[name] for name in "qkv"])
    def whole(a:Tensor, rows:int) -> Array:
      return array(a.to(at[0]).contiguous() if a.uop.axis is None else attn.unshard_sequence(a, 2, rows))
    check_results(x, {"o": whole(o, 18), "lse": whole(lse, 18)} | {name: whole(g, 18 if name == "q" else 54) for name, g in zip("qkv", gradients)})

def test_a_mask_of_padding() -> None:
  # A float mask hides padding columns, and columns above the diagonal, by the lowest float32, as models make it. A row whose columns are all hidden
  # gets the mean of V.
  x = Given.of(Sq=20, Sk=20, bias_heads=1)
  with np.errstate(over="ignore"): mask = np.where(np.arange(20) < 6, LEAST, 0) + np.triu(np.full((20, 20), LEAST), 1)
  x.bias[:] = np.maximum(mask, LEAST)
  with emulated("gfx1100"):
    t = x.tensors
    o = attn.scaled_dot_product_attention(t["q"], t["k"], t["v"], attn_mask=t["bias"], enable_gqa=True)
    check_results(x, {"o": array(o)})

SCRIPT = """
from test_wide_bias import Given, computed, check_results
for parameters in ({}, {"dtype": "float16"}, {"dtype": "float32"}, {"softcap": 3.0})[:{types} + 1]:
  check_results(x := Given.of(**parameters), computed(x))
"""

def test_a_cpu() -> None:
  pytest.importorskip("ziglang")
  on("CPU", 1, SCRIPT, CC=str(Path(__file__).resolve().parent.parent.parent/"examples/clang_of_zig.sh"), PYTHONPATH=os.pathsep.join(sys.path))

@pytest.mark.sample(5)
@pytest.mark.parametrize("arch", ("gfx942", "gfx1100", "sm_80", "sm_90", "gfx1030"))
@pytest.mark.parametrize("options", ({"softcap": 20.0}, {"extras": {"alibi_slopes": np.float32([0.5, 0.25])}}), ids=("softcap", "slopes"))
def test_a_row_of_nan(arch:str, options:dict[str, Any]) -> None:
  # Scores of NaN stay NaN, and infinite scores keep their effect, if softcap or ALiBi changes the scores before a large negative bias is added.
  def make(p:Problem) -> Inputs:
    x = normal(p)
    x.q[:, :, 3], x.k[:, :, 5, 0] = np.nan, -np.inf
    return x
  options = options | {"extras": options.get("extras", {}) | {"bias": np.random.default_rng(5).standard_normal((1, 1, 20, 52)).astype(np.float32)}}
  check_attention(arch, make=make, Sq=20, Sk=52, D=16, **options)
