"""Comparison of kernels' results with float64: the error of each element has a limit (attn/accuracy.py). Of large problems only a sample of the rows
is checked."""
from __future__ import annotations
import math
from collections.abc import Sequence
import numpy as np
from attn.accuracy import Verdict, judge, law_of, law_of_gradients
from attn.problem import Problem

SAMPLE = 1 << 24   # most scores that are computed in float64 if only a sample is checked

def verify(p:Problem, inputs:Sequence[np.ndarray], outputs:Sequence[np.ndarray], most:int|None=SAMPLE) -> tuple[Verdict, float]:
  """Checks o, or o and lse, against float64; returns the worst verdict, and the share of the rows that was checked: a sample of about `most`
  scores."""
  # All arrays have the shape (B, H, ...). The sample has about `most` scores in all; None: all rows. The worst block of rows has the largest
  # error/limit.
  (q, k, v), rows = inputs, max(1, min(p.Sq, (most or SAMPLE)//4//p.Sk))
  parts = [(b, h, slice(first, first + rows)) for b in range(p.B) for h in range(p.H) for first in range(0, p.Sq, rows)]
  step = 1 if most is None else math.ceil(len(parts)/max(1, most//(rows*p.Sk)))
  verdicts: list[Verdict] = []
  for b, h, here in parts[::step]:
    kv = slice(h//(p.H//p.Hkv), h//(p.H//p.Hkv) + 1)
    args = (q[b, h:h+1, here], k[b, kv], v[b, kv], p.softmax_scale, p.window, p.offset + here.start)
    verdicts += [judge(x[b, h:h+1, here], law) for x, law in zip(outputs, law_of(*args, dtype=p.dtype, out_dtype=p.out_dtype))]
  return max(verdicts, key=lambda x: (not x.ok, x.ratio)), len(parts[::step])/len(parts)

def verify_backward(p:Problem, inputs:Sequence[np.ndarray], gradients:Sequence[np.ndarray], most:int|None=SAMPLE) -> tuple[Verdict, float]:
  """Checks dq, dk and dv against float64; returns the worst verdict, and the share of the key/value heads that was checked."""
  # All arrays have the shape (B, H, ...). The sample has about `most` scores in all, but at least one head; None: all heads.
  group = p.H//p.Hkv
  heads = [(b, h) for b in range(p.B) for h in range(p.Hkv)]
  step = 1 if most is None else max(1, math.ceil(len(heads)*group*p.Sq*p.Sk/most))
  verdicts = []
  for b, h in heads[::step]:
    of_q, of_k = slice(h*group, (h + 1)*group), slice(h, h + 1)
    q, k, v, do = (x[b:b+1, at] for x, at in zip(inputs, (of_q, of_k, of_k, of_q)))
    laws = law_of_gradients(q, k, v, do, None, p.softmax_scale, p.window, p.offset, dtype=p.dtype, out_dtype=p.out_dtype)
    verdicts += [judge(g[b:b+1, at], getattr(laws, n))
                 for g, at, n in zip(gradients, (of_q, of_k, of_k), ("q", "k", "v"))]
  return max(verdicts, key=lambda x: (not x.ok, x.ratio)), len(heads[::step])/len(heads)

def verdict_text(verdict:Verdict) -> str: return "ok" if verdict.ok else verdict.pattern or "WRONG"
