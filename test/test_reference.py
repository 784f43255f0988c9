"""Tests of attn/reference.py, attention in numpy: its gradients agree with central differences, and with tinygrad's gradients of three_pass."""
from __future__ import annotations
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
from attn.kernels.three_pass import three_pass
from attn.reference import Options, exact, exact_backward, rounded, same_backward
from attn.score.masks import plain_masks
from attn.score.terms import TERM_TENSORS, plain_terms
from attn.tinygrad_compat import Tensor
from api_cases import emulated
from cases import problem

pytestmark = pytest.mark.usefixtures("not_unrolled")

B, H, HKV, SQ, SK, D, DV, SCALE = 2, 4, 2, 5, 7, 3, 2, 0.4

def normal(*shape:int, seed:int=0) -> np.ndarray: return np.random.default_rng(seed).standard_normal(shape)

CASES: dict[str, dict[str, Any]] = {
  "plain": {}, "causal": {"window": (-1, 0), "offset": SK - SQ}, "top-left": {"window": (-1, 0)}, "window": {"window": (1, 2), "offset": 1},
  "rows that see no key": {"window": (-1, 0), "offset": -2},
  "softcap": {"options": Options(softcap=1.5)}, "alibi": {"options": Options(alibi_slopes=np.array([0.1, 0.5, 1.0, 2.0]))},
  "alibi of each batch": {"options": Options(alibi_slopes=np.abs(normal(B, H)))},
  "bias": {"options": Options(bias=normal(B, H, SQ, SK))}, "bias of a row": {"options": Options(bias=normal(1, H, SQ, 1))},
  "bias of keys": {"options": Options(bias=normal(B, 1, 1, SK))}, "one bias": {"options": Options(bias=normal(1, 1, 1, 1))},
  "sinks": {"options": Options(sinks=normal(H))}, "kv_lengths": {"options": Options(kv_lengths=np.array([3, 6]))},
  "no key in a batch": {"options": Options(kv_lengths=np.array([0, 7]))},
  "lengths, bias, sinks, causal": {"window": (-1, 0), "offset": SK - SQ,
                                   "options": Options(kv_lengths=np.array([4, 7]), bias=normal(1, H, SQ, SK), sinks=normal(H))},
  "softcap, bias, sinks, window": {"window": (2, 1), "options": Options(softcap=0.7, bias=normal(B, 1, SQ, SK), sinks=normal(H))}}

def inputs() -> dict[str, np.ndarray]:
  return {"q": normal(B, H, SQ, D, seed=1), "k": normal(B, HKV, SK, D, seed=2), "v": normal(B, HKV, SK, DV, seed=3)}

DO, DLSE = normal(B, H, SQ, DV, seed=4), normal(B, H, SQ, seed=5)

def slope(f:Any, x:np.ndarray, h:float=1e-5) -> np.ndarray:
  # Computes the gradient of f() with respect to each element of x by central differences with the step `h`.
  found = np.zeros_like(x)
  for i in np.ndindex(x.shape):
    at, ends = x[i], []
    for step in (h, -h):
      x[i] = at + step
      ends.append(f())
    x[i] = at
    found[i] = (ends[0] - ends[1])/(2*h)
  return found

@pytest.mark.sample(23)
@pytest.mark.parametrize("do, dlse", [(DO, None), (None, DLSE), (DO, DLSE)], ids=["o", "lse", "both"])
@pytest.mark.parametrize("name", CASES)
def test_exact_gradients_are_central_differences(name:str, do:np.ndarray|None, dlse:np.ndarray|None) -> None:
  case, t = dict(CASES[name]), inputs()
  x = case.pop("options", Options())
  x = replace(x, **{n: getattr(x, n).copy() for n in ("bias", "sinks") if getattr(x, n) is not None})
  def loss() -> float:
    o, lse = exact(t["q"], t["k"], t["v"], SCALE, **case, options=x)
    return float((0 if do is None else (o*do).sum()) + (0 if dlse is None else (np.where(np.isfinite(lse), lse, 0)*dlse).sum()))
  found = exact_backward(t["q"], t["k"], t["v"], do, dlse, SCALE, **case, options=x)
  for n, a in {**t, "bias": x.bias, "sinks": x.sinks}.items():
    if a is None: assert getattr(found, n) is None
    else: np.testing.assert_allclose(getattr(found, n), slope(loss, a), atol=1e-8, rtol=1e-6, err_msg=n)

def test_rows_without_keys_and_keys_beyond_get_exactly_0() -> None:
  t = inputs()
  for found in (exact_backward(*t.values(), DO, DLSE, SCALE, (-1, 0), -2),
                same_backward(*t.values(), DO, DLSE, SCALE, (-1, 0), -2, dtype="float16", out_dtype="float16")):
    assert not found.q[:, :, :2].any() and found.q[:, :, 2:].any(axis=-1).all() and not found.k[:, :, 3:].any() and found.v[:, :, :3].all()
  lengths = Options(kv_lengths=np.array([0, 3]))
  found = exact_backward(*t.values(), DO, DLSE, SCALE, options=lengths)
  assert not found.q[0].any() and not found.k[0].any() and not found.v[1, :, 3:].any() and found.v[1, :, :3].all()

@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if i % 6 == 0 else pytest.mark.thorough)
                                  for i, n in enumerate(n for n in CASES if "lengths" not in n and "batch" not in n)])
def test_exact_is_tinygrads_autograd_of_three_pass(name:str) -> None:
  case, t = dict(CASES[name]), inputs()
  x = case.pop("options", Options())
  want = exact_backward(*t.values(), DO, DLSE, SCALE, **case, options=x)
  t |= {n: getattr(x, n).astype(np.float32) for n in ("alibi_slopes", "bias", "sinks") if getattr(x, n) is not None}
  with emulated("gfx942"):
    given = {n: Tensor(a.astype(np.float32), device="EMU") for n, a in t.items()}
    terms = plain_terms(problem(B, H, HKV, SQ, SK, D, DV, softcap=x.softcap, extras={n: t[n] for n in TERM_TENSORS if n in t}), given)
    masks = plain_masks(problem(B, H, HKV, SQ, SK, D, DV, window=case.pop("window", (-1, -1))), {})
    o, lse, _ = three_pass(**{n: a for n, a in given.items() if n not in TERM_TENSORS}, softmax_scale=SCALE, terms=terms, masks=masks, **case)
    do, dlse = (Tensor(a.astype(np.float32), device="EMU") for a in (DO, DLSE))
    loss = (o*do).sum() + (lse.isinf().where(0.0, lse)*dlse).sum()
    names = [n for n in given if n != "alibi_slopes"]
    for n, got in zip(names, loss.gradient(*[given[n] for n in names])):
      np.testing.assert_allclose(got.numpy(), getattr(want, n), atol=2e-6, rtol=2e-5, err_msg=n)

@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_textbook_rounds_like_its_type(dtype:str) -> None:
  # `same_backward` computes gradients in numpy with the roundings of a dtype. In float32 it is exact up to errors of fp32. In a 16-bit dtype its
  # results are numbers of this dtype, and its errors are about as large as the dtype's roundoff.
  rng = np.random.default_rng(0)
  q, k, v, do = (rounded(rng.standard_normal((1, 2, 64, 32), dtype=np.float32), dtype) for _ in range(4))
  dlse = rng.standard_normal((1, 2, 64), dtype=np.float32)
  want = exact_backward(q, k, v, do, dlse, 32**-0.5)
  fine = same_backward(q, k, v, do, dlse, 32**-0.5, dtype="float32", out_dtype="float32")
  text = same_backward(q, k, v, do, dlse, 32**-0.5, dtype=dtype, out_dtype=dtype)
  unit = {"float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype]
  for n in ("q", "k", "v"):
    size = np.abs(getattr(want, n)).max()
    assert np.abs(getattr(fine, n) - getattr(want, n)).max() < 1e-5*size
    assert (getattr(text, n) == rounded(getattr(text, n), dtype)).all()
    assert unit/4*size < np.abs(getattr(text, n) - getattr(want, n)).max() < 4*unit*size
