"""Tests of score_mod and mask_mod at their limits: an index outside its tensor; scores that are infinite, NaN or as large as float32 allows; rows
that see no key."""
from __future__ import annotations
import math, re
from collections.abc import Callable
from typing import Any
import numpy as np
import pytest
import attn
from attn.emulator.checks import BadEntry
from attn.tinygrad_compat import Tensor, UOp, dtypes
from api_cases import emulated, floats

pytestmark = pytest.mark.usefixtures("not_unrolled")

Array = np.ndarray
CHIPS = ("gfx942", "sm_90", "gfx1030")     # gfx1030 has no matrix unit: the plain kernels
B, H, D = 1, 2, 32
LEAST = float(np.finfo(np.float32).min)

def on(x:Array) -> Tensor: return Tensor(x, device="EMU").realize()
def drawn(Sq:int, Sk:int) -> list[Array]: return [floats(B, H, n, D, seed=m).astype(np.float16) for m, n in enumerate((Sq, Sk, Sk, Sq))]

def weighted(x:Array, v:Array) -> Array:
  # Computes softmax(x) V in float64. A row without keys gives 0.
  with np.errstate(invalid="ignore"):
    m = x.max(-1, keepdims=True)
    p = np.exp(x - np.where(m == -np.inf, 0, m))
    total = p.sum(-1, keepdims=True)
  return p/np.where(total == 0, 1, total)@v.astype(np.float64)

def scores(q:Array, k:Array) -> Array: return q.astype(np.float64)@k.astype(np.float64).swapaxes(-1, -2)/math.sqrt(q.shape[-1])

# ***** an index outside its tensor *****

def beyond(s:UOp, b:UOp, h:UOp, i:UOp, j:UOp, t:UOp) -> UOp: return s + t[h, j]
def before(s:UOp, b:UOp, h:UOp, i:UOp, j:UOp, t:UOp) -> UOp: return s + t[h, i - j]
FIRST = {f: f.__code__.co_firstlineno for f in (beyond, before)}

Bad = tuple[Callable[..., UOp], tuple[int, int], dict[str, Any], str]     # function, shape of the tensor, options, the index that the error names
BAD: dict[str, Bad] = {"beyond": (beyond, (H, 20), {}, r"(2[0-9]|3[0-2])"), "before": (before, (H, 40), {}, r"-\d+"),
                       "one key": (beyond, (H, 32), {}, "32")}

def says(name:str) -> str:
  function, shape, _, index = BAD[name]
  where = rf"{function.__name__} \({re.escape(__file__)}:{FIRST[function]}\)"
  return rf"score_mod={where}: index of axis 1 of mod_tensors\[0\], counted from 0, is {index}: must lie in 0..{shape[1] - 1}"

@pytest.mark.sample(3)
@pytest.mark.parametrize("name, chip", [pytest.param(name, chip, marks=() if name == "beyond" or chip == "gfx942" else pytest.mark.thorough)
                                        for chip in CHIPS for name in BAD])
def test_the_emulator_stops_at_an_index_outside_a_tensor(chip:str, name:str) -> None:
  function, shape, options, _ = BAD[name]
  with emulated(chip):
    q, k, v = map(on, drawn(21, 33)[:3])
    with pytest.raises(BadEntry, match=says(name)):
      attn.attention(q, k, v, score_mod=function, mod_tensors=(on(np.ones(shape, np.float32)),), **options).realize()

@pytest.mark.parametrize("chip", [pytest.param(chip, marks=() if chip == "gfx942" else pytest.mark.thorough) for chip in CHIPS])
@pytest.mark.parametrize("of", (0, 1))
def test_backward_stops_too(chip:str, of:int) -> None:
  # If a score_mod reads an element outside its tensor, the emulator also stops the kernel for dq, and the kernel for dk and dv. Forward runs with
  # right indices; then the test changes the tensor from which the score_mod computes an index, and runs backward.
  with emulated(chip):
    q, k, v, do = map(on, drawn(21, 33))
    table, last = on(np.ones((H, 33), np.float32)), on(np.zeros(1, np.int32))
    o = attn.attention(q, k, v, score_mod=lambda s, b, h, i, j, t, last: s*t[h, j + last[0]], mod_tensors=(table, last)).realize()
    gradient = o.gradient((q, k)[of], gradient=do)[0]
    last.assign(Tensor([1], dtype=dtypes.int, device="EMU")).realize()
    with pytest.raises(BadEntry, match=r"score_mod=<lambda> .*: index of axis 1 of mod_tensors\[0\], counted from 0, is 33: must lie in 0..32"):
      gradient.realize()

@pytest.mark.parametrize("chip", [pytest.param(chip, marks=() if chip == "gfx942" else pytest.mark.thorough) for chip in CHIPS])
def test_hidden_pairs_do_not_stop(chip:str) -> None:
  # The emulator does not stop at an index outside its tensor if a mask hides this key from the query, or if the query or the key does not exist.
  q, k, v, do = drawn(21, 33)
  table = floats(H, 33, seed=9)
  i, j = np.arange(21)[:, None] + 12, np.arange(33)
  added = scores(q, k) + table.astype(np.float64)[:, np.clip(i - j, 0, 32)]
  want = weighted(np.where(i >= j, added, -np.inf), v)
  with emulated(chip):
    for options in ({"causal": True}, {"mask_mod": lambda b, h, i, j, t: i >= j}):
      x = [on(a) for a in (q, k, v)]
      o = attn.attention(*x, score_mod=before, mod_tensors=(on(table),), **options)
      np.testing.assert_allclose(o.numpy(), want, atol=3e-3)
      for g in o.gradient(*x, gradient=on(do)): assert np.isfinite(g.numpy()).all()
    n = 17
    o = attn.attention(*x, score_mod=beyond, mod_tensors=(on(table[:, :n].copy()),), kv_lengths=on(np.array([n], np.int32)))
    np.testing.assert_allclose(o.numpy(), weighted(scores(q, k[:, :, :n]) + table[:, None, :n], v[:, :, :n]), atol=3e-3)

# ***** hard scores *****

Values = tuple[Callable[..., UOp], Callable[..., Array]]

HARD: dict[str, Values] = {
  "-inf": (lambda s, b, h, i, j, t: ((i + j) % 2 == 0).where(s, -math.inf), lambda s, i, j, t: np.where((i + j) % 2 == 0, s, -np.inf)),
  "no key": (lambda s, b, h, i, j, t: (i % 3 == 0).where(-math.inf, s), lambda s, i, j, t: np.where(i % 3 == 0, -np.inf, s)),
  "the least number in a row": (lambda s, b, h, i, j, t: (i % 3 == 0).where(LEAST, s), lambda s, i, j, t: np.where(i % 3 == 0, LEAST, s)),
  "the least number as a mask": (lambda s, b, h, i, j, t: (i >= j).where(s, LEAST), lambda s, i, j, t: np.where(i >= j, s, LEAST)),
  "a huge table": (lambda s, b, h, i, j, t: s + t[j], lambda s, i, j, t: s.astype(np.float32) + t[j]),
  "the most": (lambda s, b, h, i, j, t: (j < 3).where(-LEAST, s), lambda s, i, j, t: np.where(j < 3, -LEAST, s))}

def huge_table(n:int) -> Array: return np.where(np.arange(n) % 4 == 1, 1e30, np.where(np.arange(n) % 4 == 2, LEAST, -1e30)).astype(np.float32)

@pytest.mark.sample(2)
@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("chip, kernel", [("gfx942", ""), *[pytest.param(*x, marks=pytest.mark.thorough) for x in (
  ("sm_90", ""), ("gfx1030", ""), ("gfx942", "three_pass"))]])
def test_scores_as_large_as_float32_allows(chip:str, kernel:str, name:str) -> None:
  (q, k, v, do), (function, value) = drawn(20, 33), HARD[name]
  i, j, table = np.arange(20)[:, None] + 13, np.arange(33), huge_table(33)
  x = np.broadcast_to(value(scores(q, k), i, j, table), (B, H, 20, 33)).astype(np.float64)
  with emulated(chip, kernel):
    q_, k_, v_ = given = [on(a) for a in (q, k, v)]
    o, lse = attn.attention(q_, k_, v_, score_mod=function, mod_tensors=(on(table),), return_lse=True)
    np.testing.assert_allclose(o.numpy(), weighted(x, v), atol=3e-3)
    m = x.max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
      expected = np.where(m == -np.inf, -np.inf, m + np.log(np.exp(x - np.where(m == -np.inf, 0, m)[..., None]).sum(-1)))
    np.testing.assert_allclose(lse.numpy(), expected.astype(np.float32), rtol=1e-5, atol=1e-3)
    for g in o.gradient(*given, gradient=on(do)): assert np.isfinite(g.numpy()).all()

@pytest.mark.sample(2)
@pytest.mark.parametrize("chip, kernel", [*((chip, "") for chip in CHIPS), ("gfx942", "three_pass")])
def test_nan_and_infinity_stay_in_their_rows(chip:str, kernel:str) -> None:
  # A score that is NaN or +inf makes its row NaN. No other row changes.
  q, k, v, _ = drawn(20, 33)
  i = np.arange(20) + 13
  for bad in (math.nan, math.inf):
    with emulated(chip, kernel):
      o = attn.attention(on(q), on(k), on(v), score_mod=lambda s, b, h, i, j, bad=bad: ((i % 3 == 0) & (j == 5)).where(bad, s)).numpy()
    assert np.isnan(o[:, :, i % 3 == 0]).all()
    np.testing.assert_allclose(o[:, :, i % 3 != 0], weighted(scores(q, k), v)[:, :, i % 3 != 0], atol=3e-3)
