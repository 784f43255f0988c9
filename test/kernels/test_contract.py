"""Runs a small sample of the cases of test/contract.py: on each matrix unit all errors are within the limits of docs/contract.md, and each planted
fault gives an error above its limit."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
import numpy as np
import pytest
import attn
import backward_cases, contract
from attn.accuracy import Law, judge, law_of
from attn.kernels import combine
from attn.kernels.parts.grid import workgroup
from attn.kernels.parts.weights.epilogue import LogSum, finish
from attn.kernels.parts.weights.merging import weight_of
from attn.ops import common as ops, numerics
from attn.ops.operation import OPERATIONS
from attn.problem import Problem
from attn.reference import rounded
from attn.tinygrad_compat import UOp
from api_cases import emulated
from backward_cases import Loss, expected_gradients, loss_of, run_backward
from cases import DTYPES, Inputs, array, expected, in_turn, normal, problem, run_kernels, tensor
from contract import KERNELS, TILED_ON, UNITS, Case, Line, cases_of, lines_of
from kinds import KINDS

CHIPS = tuple(unit for unit in UNITS if unit != "tiled")

@pytest.fixture
def small(monkeypatch) -> None:
  for name, parameters in SMALL.items(): monkeypatch.setitem(contract.SHAPES, name, parameters)

# A problem with fewer queries than a workgroup gets, on AMD, a kernel that raises the reference at every new maximum. Sq=260 avoids this.
SMALL:dict[str, dict[str, Any]] = {
  "a sample": dict(H=1, Sq=260, Sk=150, D=32), "a sample in 3 splits": dict(H=8, Sq=1, Sk=300, D=32, num_splits=3),
  "gradients, a sample": dict(H=2, Hkv=1, Sq=66, Sk=70, D=16, causal=True)}      # a warpgroup has 64 rows

def held(case:Case, draws:int) -> None:
  for line in lines_of(case, draws): assert line.held, f"{case}: {line}"

@pytest.mark.sample(1)
@in_turn("unit, dtype", UNITS, ("float16", "bfloat16"), among=8)
def test_sample(unit:str, dtype:str, small:None) -> None:
  kinds = [kind for kind in KINDS if not kind.startswith("dO")]
  for i, kind in enumerate(kinds): held(Case(list(SMALL)[i % 2], unit, dtype, "float32" if i % 3 else dtype, kind), 4)

@pytest.mark.sample(1)
@in_turn("unit, dtype", UNITS, ("float16", "bfloat16"), among=6)
def test_sample_of_gradients(unit:str, dtype:str, small:None) -> None:
  for i, kind in enumerate(list(KINDS)[::3]): held(Case("gradients, a sample", unit, dtype, "float32" if i % 2 else dtype, kind), 6)

# ***** the file and the page *****

CSV = Path(__file__).resolve().parent.parent.parent/"docs/contract.csv"

def test_what_was_drawn_is_held() -> None:
  lines = contract.read(CSV)
  assert lines and set(lines) <= set(cases_of(UNITS)) and all(line.held for of in lines.values() for line in of)

def test_the_page_has_the_table_of_the_file() -> None:
  page = CSV.with_suffix(".md").read_text()
  assert contract.with_table(page, contract.read(CSV)) == page

def test_lines_are_read_as_they_are_written(tmp_path:Path) -> None:
  lines = {case: [Line("o", 100, i/7, 2.5, 0.75, 50.0), Line("lse", 100, 0.25, 0, 0, 0)] for i, case in enumerate(cases_of(UNITS)[::37])}
  contract.write(tmp_path/"a.csv", lines)
  contract.write(tmp_path/"b.csv", read := contract.read(tmp_path/"a.csv"))
  assert (tmp_path/"a.csv").read_text() == (tmp_path/"b.csv").read_text() and list(read) == list(lines)

# ***** faults that the law of each unit must find *****

Found = dict[str, tuple[np.ndarray, Law]]
Arrays = tuple[np.ndarray, np.ndarray]

def arch_of(unit:str) -> str: return TILED_ON if unit == "tiled" else unit

def forward(unit:str, p:Problem, x:Inputs, kernel:bool=True, **call:Any) -> Arrays:
  # computes o and lse by `attention` on the emulator of the chip that `unit` names
  with emulated(arch_of(unit), KERNELS.get(unit, "") if kernel else ""):
    q, k, v = (tensor(a, p.dtype) for a in (x.q, x.k, x.v))
    o, lse = attn.attention(q, k, v, return_lse=True, out_dtype=DTYPES[p.out_dtype], **call)
    return array(o), array(lse)

def against(p:Problem, x:Inputs, found:Arrays, *names:str) -> Found:
  return {name: each for name, each in zip(("o", "lse"), zip(found, expected(p, x, {}))) if name in names}

def dropped_key(unit:str, monkeypatch) -> Found:
  p = problem(H=1, Sq=2, Sk=16384, D=32)
  x, left = normal(p), np.arange(16384) != 777
  return against(p, x, forward(unit, p, Inputs(x.q, x.k[:, :, left], x.v[:, :, left]), False), "o")

def mask_off_by_one(unit:str, monkeypatch) -> Found:
  p = problem(H=1, Sq=70, D=32, causal=True)
  return against(p, x := normal(p), forward(unit, p, x, window=(-1, 1)), "o", "lse")

def scale_twice(unit:str, monkeypatch) -> Found:
  p = problem(H=1, Sq=20, Sk=90, D=32)
  return against(p, x := normal(p), forward(unit, p, x, softmax_scale=p.softmax_scale**2), "o", "lse")

def near_3(p:Problem) -> Inputs: return replace(x := normal(p), v=rounded(3 + 0.1*x.v, p.dtype))

def truncated(unit:str, monkeypatch) -> Found:
  # plants a fault: P is rounded towards 0, but O is divided by the sum of P before this rounding
  def down(x:np.ndarray) -> np.ndarray:
    bits = nearest(x)
    return np.where(numerics.widen(bits, "float16") > x, bits - np.uint32(1), bits)     # P is never negative
  def with_down(meaning:Callable[..., Any]) -> Callable[..., Any]:
    def changed(*args:Any, **static:Any) -> Any:
      with patch.object(numerics, "round_fp16", down): return meaning(*args, **static)
    return changed
  nearest = numerics.round_fp16
  for name in ("pack_weights", "pack_a", "weigh", "correct"):
    monkeypatch.setitem(OPERATIONS, name, replace(OPERATIONS[name], meaning=with_down(OPERATIONS[name].meaning)))
  monkeypatch.setattr(workgroup, "finish", of_lse)
  p = problem(B=2, H=2, Sq=91, Sk=153, D=32)
  return against(p, x := near_3(p), forward(unit, p, x), "o")

def lse_off(unit:str, monkeypatch) -> Found:
  def further(*args:Any) -> tuple[UOp, LogSum]:
    factor, log_sum = finish(*args)
    return factor, replace(log_sum, rounded=ops.add(log_sum.rounded, ops.splat(1e-4, 1)))
  monkeypatch.setattr(workgroup, "finish", further)
  p = problem(H=1, Sq=33, Sk=500, D=32)
  return against(p, x := normal(p), forward(unit, p, x), "lse")

def wrong_split(unit:str, monkeypatch) -> Found:
  # plants a fault: the merge multiplies the weight of each key range, except the one with the largest lse, by 1 + 2^-10
  monkeypatch.setattr(combine, "weight_of", lambda *of: ops.mul(w := weight_of(*of), w.eq(1.0).where(1.0, 1 + 2.0**-10)))
  p = problem(H=4, Sq=1, Sk=193, D=32, num_splits=2, out_dtype="float32")
  x = normal(p)
  v = 0.1*x.v + np.where(np.arange(193) < 97, 1, -1)[:, None].astype(np.float32)
  return against(p, x := replace(x, v=rounded(v, p.dtype)), forward(unit, p, x, False, num_splits=2), "o")

def backward(unit:str, p:Problem, x:Inputs, loss:Loss, right:Loss, *names:str) -> Found:
  # computes gradients of the faulty `loss` by kernels, and returns them with the expected ones of the loss `right`
  got, laws = run_backward(p, x, loss, arch_of(unit), {}), expected_gradients(p, x, right, {})
  return {name: (got[name], laws[name]) for name in names}

def rounded_twice(unit:str, monkeypatch) -> Found:
  def results(p:Problem, *args:Any) -> Arrays:
    o, lse = right(p, *args)
    return rounded(o, p.dtype), lse
  right = backward_cases.forward_results
  monkeypatch.setattr(backward_cases, "forward_results", results)
  p = problem(H=1, Sq=65, Sk=80, D=32, out_dtype="float32")
  return backward(unit, p, near_3(p), loss := loss_of(p), loss, "dq", "dk")

def no_dlse(unit:str, monkeypatch) -> Found:
  p = problem(H=1, Sq=65, Sk=81, D=32)
  return backward(unit, p, normal(p), replace(loss := loss_of(p, True), dlse=None), loss, "dq", "dk")

def dropped_head(unit:str, monkeypatch) -> Found:
  p = problem(H=8, Hkv=1, Sq=17, Sk=40, D=32)
  loss = loss_of(p)
  return backward(unit, p, normal(p), Loss(np.where(np.arange(8)[:, None, None] == 7, 0, loss.do).astype(np.float32), None), loss, "dk", "dv")

FAULTS:dict[str, Callable[..., Found]] = {f.__name__: f for f in (
  dropped_key, mask_off_by_one, scale_twice, truncated, lse_off, wrong_split, rounded_twice, no_dlse, dropped_head)}
UNIT_KINDS = ("gfx942", "gfx1100", "sm_80", "sm_90", "tiled")

@pytest.mark.sample(5)
@pytest.mark.usefixtures("without_places")
@in_turn("fault, unit", FAULTS, UNIT_KINDS)
def test_fault(fault:str, unit:str, monkeypatch) -> None:
  # Each planted fault gives an error above its limit (docs/contract.md). A fault that changes a kernel has its own problem, because the cache would
  # otherwise return the unchanged kernel of the same problem.
  if (fault, unit) == ("truncated", "tiled"): pytest.skip("tiled does not round P")
  for name, (got, law) in FAULTS[fault](unit, monkeypatch).items(): assert not judge(got, law).ok, f"{name}: {judge(got, law)}"

# ***** the two sums of P *****

def two_keys(p:Problem, seed:int) -> Inputs:
  # inputs in which only two keys have weight, and the last one weighs 2^6 to 2^7.9 times as much as the first
  # too little for the softmax to raise the number that it subtracts from the scores; the rounding error of P cancels only if O is divided by the sum
  # of the rounded P; all rows are equal
  x, q, k = normal(p, seed), np.zeros((p.B, 1, p.Sq, p.D), np.float32), np.zeros((p.B, 1, p.Sk, p.D), np.float32)
  gap = np.random.default_rng(seed).uniform(6, 7.9, p.B)
  q[..., 0], k[..., 1:-1, 0], k[..., -1, 0] = 1, -60/p.softmax_scale, gap[:, None]*np.log(2)/p.softmax_scale
  return Inputs(q, rounded(k, p.dtype), x.v)

def of_lse(m:UOp, totals:list[UOp], *rest) -> tuple[UOp, UOp]: return finish(m, [totals[-1]], *rest)
def of_o(m:UOp, totals:list[UOp], *rest) -> tuple[UOp, UOp]: return finish(m, [totals[0]], *rest)

SUMS = {"o of the sum before its rounding": (of_lse, "o", 259), "lse of the sum after its rounding": (of_o, "lse", 258), "none": (finish, "", 257)}

def of_two_keys(unit:str, dtype:str, out_dtype:str, Sq:int, monkeypatch) -> dict[str, Line]:
  monkeypatch.setitem(KINDS, "two keys", two_keys)
  monkeypatch.setitem(contract.SHAPES, "two keys", dict(H=1, Sq=Sq, Sk=149, D=32))
  return {line.output: line for line in lines_of(Case("two keys", unit, dtype, out_dtype, "two keys"), 12)}

@pytest.mark.sample(2)
@in_turn("chip, name", CHIPS, list(SUMS))
def test_faults_of_sums_show(chip:str, name:str, monkeypatch) -> None:
  # A kernel must divide O by the sum of P after rounding, and compute lse from the sum of P before rounding. If it uses the wrong sum for one of
  # these two outputs, this output has errors above the limits of docs/contract.md. The other output stays within the limits.
  fault, wrong, Sq = SUMS[name]
  monkeypatch.setattr(workgroup, "finish", fault)
  for dtype in ("float16", "bfloat16"):
    found = of_two_keys(chip, dtype, "float32", Sq, monkeypatch)
    for what in ("o", "lse"): assert found[what].held == (what != wrong), f"{dtype}: {what} {found[what]}"

@pytest.mark.sample(3)
@in_turn("chip, dtypes", CHIPS, (("bfloat16", "float16"), ("float16", "float16"), ("float16", "bfloat16")), among=3)
def test_a_row_that_two_keys_share(chip:str, dtypes:tuple[str, str], monkeypatch) -> None:
  # Rows in which two keys have all the weight are right: each element is within its error limit, for every pair of 16-bit dtypes of P and O. The root
  # mean square of the errors is not checked: all rows of one draw round equally, and 12 draws are too few.
  for line in of_two_keys(chip, *dtypes, 256, monkeypatch).values(): assert line.limit <= 1, line

# ***** 16-bit denormals *****

BY_DEFAULT = ("gfx90a", "gfx942", "gfx1201", "sm_90")

def marks(chip:str, dtype:str): return () if chip in BY_DEFAULT and dtype == "float16" else pytest.mark.thorough

@pytest.mark.parametrize("chip, dtype", [pytest.param(chip, dtype, marks=marks(chip, dtype))
                                         for chip in ("gfx90a", *CHIPS) for dtype in ("float16", "bfloat16")])
def test_denormal_weights(chip:str, dtype:str) -> None:
  # O and lse are right if P of many keys is denormal. One key has score 0, and 4096 keys have score ln 2^-15: their P is denormal in fp16 and normal
  # in bf16. Matrix units and dot products compute with denormals, except on CDNA2, which treats 16-bit denormals as zero. There these keys have no
  # weight in O. In lse they always count, because the sum for lse is computed before rounding.
  n, low = 4096, -15*np.log(2)
  p = problem(H=1, Sq=1, Sk=n + 1, D=16, dtype=dtype, out_dtype="float32", softmax_scale=1.0)
  q, k, v = np.zeros((1, 1, 1, 16), np.float32), np.zeros((1, 1, n + 1, 16), np.float32), np.zeros((1, 1, n + 1, 16), np.float32)
  q[..., :2], k[..., 1:, 0] = 1, 0
  # -15 ln 2 as a sum of two 16-bit numbers, so that the score is right to 2^-15.
  high = rounded(np.float32([low]), dtype)[0]
  k[..., 1:, 0], k[..., 1:, 1] = high, rounded(np.float32([low - high]), dtype)[0]
  v[..., 0, :], v[..., 1:, :] = 1, 3
  o, lse = run_kernels(p, Inputs(q, k, v), chip, {})
  flushed = chip == "gfx90a" and dtype == "float16"
  laws = law_of(q, k, v, 1.0, dtype=dtype, out_dtype="float32", flushes=flushed)
  for got, law in zip((o, lse), laws): assert (verdict := judge(got, law)).ok, verdict
  weight = n*2.0**-15                                        # sum over all low keys
  np.testing.assert_allclose(o, 1.0 if flushed else (1 + 3*weight)/(1 + weight), rtol=2e-3 if dtype == "float16" else 1e-2)
  if flushed: assert not judge(o, law_of(q, k, v, 1.0, dtype=dtype, out_dtype="float32")[0]).ok
