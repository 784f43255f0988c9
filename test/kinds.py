"""Kinds of input for tests of the size of errors. Each kind stresses a different part of the arithmetic."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import replace
import numpy as np
from attn.problem import Problem
from attn.reference import rounded
from cases import Inputs, normal

def plain(p:Problem, seed:int) -> Inputs: return normal(p, seed)

def peaked(p:Problem, seed:int, ramp:np.ndarray) -> Inputs:
  # Makes inputs in which each row of P has one large weight: key j is multiplied by ramp[j] and by a factor of its batch.
  # Queries are positive, and the factor of a batch is random, between 2 and 16. So the scores of later keys are larger, in magnitude, with a rising
  # `ramp`.
  x, rng = normal(p, seed), np.random.default_rng(seed + 1)
  longest = rng.uniform(2, 16, (p.B, 1, 1, 1)).astype(np.float32)
  return replace(x, q=np.abs(x.q), k=rounded(x.k*ramp[:, None]*longest, p.dtype))

def rising(p:Problem, seed:int) -> Inputs: return peaked(p, seed, np.linspace(0.01, 1, p.Sk, dtype=np.float32))
def falling(p:Problem, seed:int) -> Inputs: return peaked(p, seed, np.linspace(1, 0.01, p.Sk, dtype=np.float32))

def steep(p:Problem, seed:int) -> Inputs:
  x = normal(p, seed)
  return replace(x, q=rounded(8*x.q, p.dtype))

def constant_rows(p:Problem, seed:int) -> Inputs:
  # Makes inputs with identical keys: all scores of a row are equal.
  x = normal(p, seed)
  return replace(x, k=np.broadcast_to(x.k[:, :, :1], x.k.shape).copy())

def huge_key(p:Problem, seed:int) -> Inputs:
  # Makes inputs in which one key is 30 times as large as usual, so that its score is the largest or the smallest of each query.
  x, rng = normal(p, seed), np.random.default_rng(seed + 1)
  k = x.k.copy()
  k[np.arange(p.B), :, rng.integers(0, p.Sk, p.B)] *= 30
  return replace(x, k=rounded(k, p.dtype))

def all_equal(p:Problem, seed:int) -> Inputs:
  # Makes inputs whose queries are 0, so that every score is 0.
  x = normal(p, seed)
  return replace(x, q=np.zeros_like(x.q))

def one_hot(p:Problem, seed:int) -> Inputs:
  # Makes inputs in which each query gives one key nearly all of P; all other keys together get at most e^-5.
  # Each query and each key lies on an axis: all its elements but one are 0.
  x, rng = normal(p, seed), np.random.default_rng(seed + 1)
  far = rng.uniform(5, 9, (p.B, p.H, p.Sq, 1)) + np.log(p.Sk)
  k = np.zeros((p.B, p.Hkv, p.Sk, p.D), np.float32)
  k[:, :, np.arange(p.Sk), np.arange(p.Sk) % p.D] = 1 + (np.arange(p.Sk)//p.D)/8
  chosen = rng.integers(0, p.D, (p.B, p.H, p.Sq, 1))
  q = np.where(np.arange(p.D) == chosen, far*8/p.softmax_scale, 0)
  return replace(x, q=rounded(q.astype(np.float32), p.dtype), k=rounded(k, p.dtype))

def deep(p:Problem, seed:int) -> Inputs:
  # Makes inputs with such low scores that every lse is below -100.
  x = normal(p, seed)
  return replace(x, q=np.full_like(x.q, 4), k=rounded(x.k*0.125 - 12, p.dtype))

def level(p:Problem, seed:int) -> Inputs:
  # Makes inputs in which all elements of V are near 3, so that dP and delta nearly cancel in dS = P*(dP - delta).
  x = normal(p, seed)
  return replace(x, v=rounded(3 + 0.1*x.v, p.dtype))

DEEP, LARGE = "lse below -100", "dO 1000 times as large"
KINDS:dict[str, Callable[[Problem, int], Inputs]] = {
  "normal": plain, "rising": rising, "falling": falling, "q times 8": steep, "constant rows": constant_rows, "one huge key": huge_key,
  "all scores equal": all_equal, "one-hot": one_hot, DEEP: deep, "V near 3": level, LARGE: plain}
