"""A sample of what test/contract.py does at length: each draw of each kind of input holds the contract, and the faults that it is there for show."""
from __future__ import annotations
import numpy as np
import pytest
import contract
from attn.kernels.parts import workgroup
from attn.kernels.parts.epilogue import finish
from attn.problem import Problem
from attn.reference import rounded
from attn.tinygrad_compat import UOp
from cases import Inputs, in_turn, normal, problem, run_kernels
from contract import CHIPS, GRADIENT_SHAPES, KINDS, Case, cells_of, forward_ratios, gradient_ratios, kinds_of, table
from contract_rows import errors

# On AMD fewer queries than fill a workgroup get a kernel whose references follow every maximum.
SMALL = {"a sample": dict(H=1, Sq=260, Sk=150, D=32),
         "a sample with splits": dict(H=8, Sq=1, Sk=300, D=32, num_splits=3)}

@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
  for name, parameters in SMALL.items(): monkeypatch.setitem(contract.SHAPES, name, parameters)

@in_turn("chip, dtype", CHIPS, ("float16", "bfloat16"), among=4)
def test_sample(chip:str, dtype:str) -> None:
  for i, kind in enumerate(KINDS):
    case = Case(kind, list(SMALL)[i % 2], dtype, "float32" if i % 3 else dtype, chip)
    found = forward_ratios(case, 4)
    assert found.o.max() <= 1 and found.lse.max() <= 1, f"{case}: {found}"

@in_turn("chip, dtype", CHIPS, ("float16", "bfloat16"), among=6)
def test_sample_of_gradients(chip:str, dtype:str, monkeypatch) -> None:
  monkeypatch.setitem(GRADIENT_SHAPES, "a sample", dict(H=2, Hkv=1, Sq=40, Sk=70, D=16, causal=True))
  for kind in list(kinds_of("a sample"))[::3]:
    found = gradient_ratios(Case(kind, "a sample", dtype, dtype, chip), 16, 0, together=8)
    held = [x for name, x in found.together.items() if name != "sinks"]      # a few numbers of one draw: test_gradient.py holds those
    assert max(*held, *found.given.values()) <= 1, f"{chip}, {kind}: {found}"

def test_delta_of_the_kernels_o_is_nearer_than_the_textbooks() -> None:
  """What docs/contract_rows.md says of a hundred draws, of eight."""
  found = errors("one huge key", "bfloat16", "gfx942", 8, together=8)
  kernel, textbook, other = (np.sqrt(np.square(x).mean()) for x in (found.kernel, found.textbook, found.other))
  assert 0.5*textbook < kernel < textbook and abs(kernel/other - 1) < 0.05
  assert 0.1 < np.mean(np.abs(found.kernel) > 2*np.abs(found.textbook)) < 0.3

def test_tables_are_read_as_they_are_written() -> None:
  cells = {case: f"{i}" for i, case in enumerate(contract.CASES[::7])}
  assert cells_of(table(cells, 100)) == cells

def two_keys(p:Problem, seed:int) -> Inputs:
  """Two keys count, the first and the last, whose weight is 2^6 to 2^7.9 of the first one's, relative to a reference that still holds: only division
  by the sum of what was rounded takes its rounding error out. All rows of a draw are alike."""
  x, q, k = normal(p, seed), np.zeros((p.B, 1, p.Sq, p.D), np.float32), np.zeros((p.B, 1, p.Sk, p.D), np.float32)
  gap = np.random.default_rng(seed).uniform(6, 7.9, p.B)
  q[..., 0], k[..., 1:-1, 0], k[..., -1, 0] = 1, -60/p.softmax_scale, gap[:, None]*np.log(2)/p.softmax_scale
  return Inputs(q, rounded(k, p.dtype), x.v)

def of_lse(m:UOp, totals:list[UOp], *rest) -> tuple[UOp, UOp]: return finish(m, [totals[-1]], *rest)
def of_o(m:UOp, totals:list[UOp], *rest) -> tuple[UOp, UOp]: return finish(m, [totals[0]], *rest)

FAULTS = {"o of the sum before its rounding": (of_lse, "o", 259),
          "lse of the sum after its rounding": (of_o, "lse", 258),
          "none": (finish, "", 257)}

@in_turn("chip, name", CHIPS, list(FAULTS))
def test_faults_show(chip:str, name:str, monkeypatch) -> None:
  """And without one this kind of input holds the contract, too. (Kernels are kept by their problem: each fault has a problem of its own.)"""
  fault, wrong, Sq = FAULTS[name]
  monkeypatch.setattr(workgroup, "finish", fault)
  monkeypatch.setitem(KINDS, "two keys", two_keys)
  monkeypatch.setitem(contract.SHAPES, "with a fault", dict(H=1, Sq=Sq, Sk=149, D=32))
  for dtype in ("float16", "bfloat16"):
    found = forward_ratios(Case("two keys", "with a fault", dtype, "float32", chip), 12)
    for what in ("o", "lse"): assert (getattr(found, what).max() > 1) == (what == wrong), f"{dtype}: {what} {getattr(found, what)}"

@in_turn("chip, dtypes", CHIPS, (("bfloat16", "float16"), ("float16", "bfloat16")), among=3)
def test_a_row_that_two_keys_share(chip:str, dtypes:tuple[str, str], monkeypatch) -> None:
  """Where P and O are rounded to two 16-bit types: an O in float16 does not hide how P was rounded to bfloat16."""
  monkeypatch.setitem(KINDS, "two keys", two_keys)
  monkeypatch.setitem(contract.SHAPES, "two keys", dict(H=1, Sq=256, Sk=149, D=32))
  found = forward_ratios(Case("two keys", "two keys", *dtypes, chip), 12)
  assert found.o.max() <= 1 and found.lse.max() <= 1, found

# ***** 16-bit denormals *****

BY_DEFAULT = ("gfx90a", "gfx942", "gfx1201", "sm_90")

def marks(chip:str, dtype:str): return () if chip in BY_DEFAULT and dtype == "float16" else pytest.mark.thorough

@pytest.mark.parametrize("chip, dtype", [pytest.param(chip, dtype, marks=marks(chip, dtype))
                                         for chip in ("gfx90a", *CHIPS) for dtype in ("float16", "bfloat16")])
def test_denormal_weights(chip:str, dtype:str) -> None:
  """A key of score 0 and 4096 keys of score ln 2^-15, whose P is denormal in fp16 and not in bf16. Matrix units multiply and dot products add such
  numbers as they are, but for CDNA2, which takes 16-bit denormals for zero in both (see attn/emulator/matrix.py): there they weigh nothing in O. An
  LSE, of P before it is rounded, has them everywhere."""
  n, low = 4096, -15*np.log(2)
  p = problem(H=1, Sq=1, Sk=n + 1, D=16, dtype=dtype, out_dtype="float32", softmax_scale=1.0)
  q, k, v = np.zeros((1, 1, 1, 16), np.float32), np.zeros((1, 1, n + 1, 16), np.float32), np.zeros((1, 1, n + 1, 16), np.float32)
  q[..., :2], k[..., 1:, 0] = 1, 0
  # -15 ln 2 as a sum of two numbers of 16 bits, so that the score is right to 2^-15
  high = rounded(np.float32([low]), dtype)[0]
  k[..., 1:, 0], k[..., 1:, 1] = high, rounded(np.float32([low - high]), dtype)[0]
  v[..., 0, :], v[..., 1:, :] = 1, 3
  o, lse = run_kernels(p, Inputs(q, k, v), chip, {})
  weight = n*2.0**-15                                        # of all low keys together
  flushed = chip == "gfx90a" and dtype == "float16"
  np.testing.assert_allclose(o, 1.0 if flushed else (1 + 3*weight)/(1 + weight), rtol=2e-3 if dtype == "float16" else 1e-2)
  np.testing.assert_allclose(lse, np.log(1 + weight), atol=2e-4)
