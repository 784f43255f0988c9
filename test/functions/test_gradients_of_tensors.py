"""Tests of the gradients of `mod_tensors`, the tensors that a score_mod reads, against float64. Each element gets the sum of the gradients of all
scores that read the element; kernels add up these sums."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
import pytest
import attn
from attn.reference import Array
from attn.tinygrad_compat import Context, Tensor, UOp, dtypes
from api_cases import emulated, floats
from cases import in_turn

pytestmark = pytest.mark.usefixtures("not_unrolled")

UNIT = 2.0**-11        # half a unit in the last place of float16

@dataclass(frozen=True)
class Case:
  # A score_mod of one tensor, and `numpy`, which computes the same.
  # `numpy` takes the scores, the tensor and the indices b, h, i and j. It returns the new scores, and a list with an entry for each element that
  # score_mod reads: (derivative of the score by the element, index of the element).
  shape: Callable[[int, int, int, int], tuple[int, ...]]
  function: Callable[..., UOp]
  numpy: Callable[..., tuple[Array, list[tuple[Any, tuple[Any, ...]]]]]

def scaled(x:UOp) -> UOp: return x.cast(dtypes.float)*0.01

CASES = {
  "a constant": Case(lambda B, H, Sq, Sk: (5,), lambda s, b, h, i, j, t: s + t[3]*scaled(i - j),
                     lambda s, t, b, h, i, j: (s + t[3]*(i - j)*0.01, [((i - j)*0.01, (3,))])),
  "heads": Case(lambda B, H, Sq, Sk: (H,), lambda s, b, h, i, j, t: s*t[h], lambda s, t, b, h, i, j: (s*t[h], [(s, (h,))])),
  "batches and heads": Case(lambda B, H, Sq, Sk: (H, B), lambda s, b, h, i, j, t: (s*t[h, b]).tanh()*2,
                            lambda s, t, b, h, i, j: (np.tanh(s*t[h, b])*2, [(2*s/np.cosh(s*t[h, b])**2, (h, b))])),
  "keys": Case(lambda B, H, Sq, Sk: (B, Sk + 3), lambda s, b, h, i, j, t: s + t[b, j + 2],
               lambda s, t, b, h, i, j: (s + t[b, j + 2], [(1, (b, j + 2))])),
  "keys backwards": Case(lambda B, H, Sq, Sk: (H, Sk), lambda s, b, h, i, j, t: s + t[h, t.shape[1] - 1 - j],
                         lambda s, t, b, h, i, j: (s + t[h, -1 - j], [(1, (h, t.shape[1] - 1 - j))])),
  "queries": Case(lambda B, H, Sq, Sk: (Sk + 5,), lambda s, b, h, i, j, t: s + t[i + 3]*scaled(j),
                  lambda s, t, b, h, i, j: (s + t[i + 3]*j*0.01, [(j*0.01, (i + 3,))])),
  "distances": Case(lambda B, H, Sq, Sk: (H, Sq + 2*Sk), lambda s, b, h, i, j, t: s + t[h, i - j + (t.shape[1]//2 + 1)],
                    lambda s, t, b, h, i, j: (s + t[h, i - j + t.shape[1]//2 + 1], [(1, (h, i - j + t.shape[1]//2 + 1))])),
  "distances backwards": Case(lambda B, H, Sq, Sk: (3*Sq + Sk,), lambda s, b, h, i, j, t: s*t[j - i + (t.shape[0]//2)],
                              lambda s, t, b, h, i, j: (s*t[j - i + len(t)//2], [(s, (j - i + len(t)//2,))])),
  "a table": Case(lambda B, H, Sq, Sk: (Sk, Sk), lambda s, b, h, i, j, t: s + t[i, j], lambda s, t, b, h, i, j: (s + t[i, j], [(1, (i, j))])),
  "two elements": Case(lambda B, H, Sq, Sk: (H, Sk), lambda s, b, h, i, j, t: s*t[h, 0] + t[1, j],
                       lambda s, t, b, h, i, j: (s*t[h, 0] + t[1, j], [(s, (h, 0)), (1, (1, j))])),
}

def expected(case:Case, q:Array, k:Array, v:Array, do:Array, t:Array, causal:bool, cap:float) -> tuple[Array, Array]:
  # Returns the gradient of the tensor `t`, which the score_mod of `case` reads, in float64, and the error limit of each element.
  # The limit is six standard deviations. `cap` is the softcap, 0 for none. The kernels round O to float16. This changes delta of a row by about the
  # sum of these roundings, and so dS of all scores of the row. Errors of different rows are independent.
  q, k, v, do, t = (x.astype(np.float64) for x in (q, k, v, do, t))
  k, v = (np.repeat(x, q.shape[1]//x.shape[1], 1) for x in (k, v))
  (B, H, Sq, D), Sk = q.shape, k.shape[2]
  b, h, i, j = np.arange(B)[:, None, None, None], np.arange(H)[:, None, None], np.arange(Sk - Sq, Sk)[:, None], np.arange(Sk)
  b, h, i, j = np.broadcast_arrays(b, h, i, j)
  s = q @ k.swapaxes(-1, -2)/np.sqrt(D)
  if cap: s = cap*np.tanh(s/cap)
  x, elements = case.numpy(s, t, b, h, i, j)
  if causal: x = np.where(j <= i, x, -np.inf)
  p = np.exp(x - x.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  o, dp = p @ v, do @ v.swapaxes(-1, -2)
  ds = p*(dp - (do*o).sum(-1, keepdims=True))
  found, variance = np.zeros(t.size), np.zeros(t.size)
  rows = np.broadcast_to(np.arange(B*H*Sq).reshape(B, H, Sq, 1), s.shape)
  of_delta = np.sqrt(((do*o)**2).sum(-1, keepdims=True))*UNIT      # error of delta, which all scores of a row share
  for slope, index in elements:
    of = np.ravel_multi_index(tuple(np.broadcast_to(x, s.shape) for x in index), t.shape)
    found += np.bincount(of.ravel(), (ds*slope).ravel(), t.size)
    shared = np.bincount((rows*t.size + of).ravel(), (p*slope*of_delta).ravel(), B*H*Sq*t.size).reshape(-1, t.size)
    variance += (shared**2).sum(0) + np.bincount(of.ravel(), ((p*dp*slope*UNIT)**2).ravel(), t.size)
  return found.reshape(t.shape), 6*np.sqrt(variance).reshape(t.shape) + 2e-6

def gradient_of(case:Case, t:Tensor, q:Tensor, k:Tensor, v:Tensor, do:Tensor, **options:Any) -> Array:
  o = attn.attention(q, k, v, score_mod=case.function, mod_tensors=(t,), **options)
  return (o*do).sum().gradient(t)[0].numpy().astype(np.float64)

def check(chip:str, name:str, Sq:int, Sk:int, causal:bool=False, softcap:float=0.0, D:int=32) -> None:
  B, H, case = 2, 4, CASES[name]
  x = [floats(*shape, seed=n).astype(np.float16) for n, shape in enumerate(((B, H, Sq, D), (B, 2, Sk, D), (B, 2, Sk, D), (B, H, Sq, D)))]
  t = floats(*case.shape(B, H, Sq, Sk), seed=9).astype(np.float32)
  want, bound = expected(case, *x, t, causal, softcap)
  with emulated(chip), Context(TRAINING=1):
    got = gradient_of(case, *(Tensor(a, device="EMU").realize() for a in (t, *x)), causal=causal, softcap=softcap)
  assert (excess := (abs(got - want)/bound).max()) <= 1, f"{excess} of the bound"
  assert abs(want).max() > 20*bound.max()

CHIPS = ("gfx942", "gfx1100", "sm_80", "gfx950", "gfx1201", "sm_90")

@pytest.mark.sample(5)
@in_turn("name, chip", CASES, CHIPS)
def test_gradients(name:str, chip:str) -> None: check(chip, name, 33, 50, causal=name in ("heads", "distances"))

@pytest.mark.sample(2)
@in_turn("of, chip", (("distances", 300, 170, False, 1.5), ("distances backwards", 150, 290, True, 0.0), ("keys", 130, 270, True, 0.0),
                      ("heads", 270, 150, False, 1.5)), CHIPS)
def test_several_tiles(of:tuple[str, int, int, bool, float], chip:str) -> None: check(chip, *of)
