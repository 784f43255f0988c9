"""Tests of the textbook kernel, which computes attention in plain UOps on one page of code, on every input of the other kernels' tests."""
from __future__ import annotations
import inspect, os, sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch
import numpy as np
import pytest
import attn.kernels.textbook
from attn.accuracy import judge, law_of
from attn.kernels.textbook import textbook
from attn.problem import Problem
from attn.tinygrad_compat import Context, Ops, Tensor, UOp, dtypes
sys.path += [str(Path(__file__).resolve().parent.parent.parent/"examples")]
from cases import Inputs, in_turn, normal, problem
from test_forward import ADVERSARIAL
with patch.dict(os.environ):   # the example sets DEV itself
  import removed_example_defects as defects

def check(make:Callable[[Problem], Inputs]=normal, **parameters) -> None:
  # runs the textbook kernel, and compares each element of o with float64
  p = problem(lse=False, out_dtype="float32", **parameters)
  x, dtype = make(p), {"float16": np.float16, "float32": np.float32}[p.dtype]
  inputs = [a.astype(dtype) for a in (x.q, x.k, x.v)]
  with Context(DEV="EMU::gfx942"):
    o = Tensor.empty(p.B, p.H, p.Sq, p.Dv, dtype=dtypes.float).custom_kernel(*map(Tensor, inputs), fxn=textbook(parameters.get("causal", False)))[0]
    got = o.numpy()
  work = (*inputs, p.softmax_scale, p.window, p.offset)
  verdict = judge(got, law_of(*work, dtype=p.dtype, out_dtype="float32")[0])
  assert verdict.ok, verdict

SHAPES = ({"Sq": 9, "Sk": 33, "H": 4, "Hkv": 2, "B": 2}, {"Sq": 33, "Sk": 17, "Dv": 8}, {"Sq": 1, "Sk": 1})

@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", ("float16", "float32"))
@in_turn("causal, shape", (True, False, "top-left"), SHAPES)
def test_normal(dtype:str, shape:dict[str, int], causal:bool|str) -> None: check(dtype=dtype, D=16, causal=causal, **shape)

@pytest.mark.sample(7)
@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda f: f.__name__)
def test_adversarial(make:Callable[[Problem], Inputs]) -> None: check(make, Sq=20, Sk=50, D=16)

def test_shapes_that_contradict_each_other() -> None:
  with Context(DEV="EMU::gfx942"):
    q, k = Tensor.empty(1, 2, 8, 16), Tensor.empty(1, 2, 8, 24)
    with pytest.raises(ValueError, match="the head dimension of q is 16"): Tensor.empty(1, 2, 8, 24).custom_kernel(q, k, k, fxn=textbook())

def test_it_is_plain_and_fits_on_a_screen() -> None:
  # The textbook kernel has at most 60 lines and consists of tinygrad's own UOps only, without source text in HIP or CUDA.
  assert len(inspect.getsource(attn.kernels.textbook).splitlines()) <= 60
  p = problem(Sq=8, D=16)
  sink = textbook(True)(*[UOp.placeholder(p.shapes[n][0], dtypes.half, i) for i, n in enumerate("oqkv")])
  assert not [u for u in sink.toposort() if u.op in (Ops.CUSTOM, Ops.CUSTOMI)]

@pytest.mark.parametrize("name", defects.DEFECTS)
def test_a_planted_defect_shows_on_normal_inputs_and_hides_on_uniform_ones(name:str) -> None:
  with Context(DEV="EMU::gfx942"):
    assert defects.mean_square(defects.KERNELS[name]) < 1e-2     # the check that the example had before passes
    verdict = defects.verdict(defects.KERNELS[name])
    assert not verdict.ok and verdict.error > 0.5

def test_the_kernel_without_a_defect_passes_both() -> None:
  with Context(DEV="EMU::gfx942"):
    assert defects.mean_square(defects.KERNELS["right"]) < 1e-9 and defects.verdict(defects.KERNELS["right"]).ok

def test_a_defect_that_is_not_in_the_text_is_an_error() -> None:
  with pytest.raises(AssertionError, match="is not one line of the textbook kernel"): defects.planted("no such line", "")
