"""What attention is, sequence by sequence in float64, whatever call asks for it; and the one place that holds results to it."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any
import numpy as np
from attn.reference import LSE_ULPS, Gradients, Options, exact, exact_backward, judge, rounded, same, same_backward
from cases import kept_mask

Arrays = dict[str, np.ndarray]
Pair = tuple[np.ndarray, np.ndarray]       # (exact, by the textbook)

@dataclass(frozen=True)
class Facts:
  """What is computed, beside the arrays: `wanted` names the results, o and lse, or gradients by the name of their input. V is the first `v_dim`
  columns of K, if any. `types` has the dtype of what is not in `dtype`."""
  dtype: str
  out_dtype: str
  scale: float
  wanted: tuple[str, ...]
  window: tuple[int, int] = (-1, -1)
  top_left: bool = False
  softcap: float = 0.0
  dropout_p: float = 0.0
  v_dim: int = 0
  types: tuple[tuple[str, str], ...] = ()
  def type_of(self, name:str) -> str: return {"o": self.out_dtype, "lse": "float32", **dict(self.types)}.get(name, self.dtype)

@dataclass(frozen=True)
class Sequence:
  """The queries and keys of one softmax: those of a batch, or of packed sequence `number`, which lie in batch `batch`."""
  batch: int
  number: int
  rows: slice
  keys: slice
  @property
  def counts(self) -> tuple[int, int]: return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
  def offset(self, f:Facts) -> int: return 0 if f.top_left else self.counts[1] - self.counts[0]

def sequences(x:Arrays) -> Iterator[Sequence]:
  """Of q (B, H, Sq, D) and k (B, Hkv, Sk, D): packed where there are cu_seqlens, else one a batch, with the keys from kv_starts to kv_lengths."""
  if "cu_seqlens_q" in x:
    ends = x["cu_seqlens_q"], x["cu_seqlens_k"]
    for i in range(len(ends[0]) - 1):
      yield Sequence(0, i, *(slice(int(e[i]), int(e[i + 1])) for e in ends))
    return
  B, Sq, Sk = x["q"].shape[0], x["q"].shape[2], x["k"].shape[2]
  for b in range(B):
    end = int(np.clip(x["kv_lengths"][b], 0, Sk)) if "kv_lengths" in x else Sk
    start = min(int(np.clip(x["kv_starts"][b], 0, Sk)) if "kv_starts" in x else 0, end)
    yield Sequence(b, b, slice(0, Sq), slice(start, end))

def full_bias(x:Arrays, s:Sequence) -> np.ndarray:
  """The bias of a sequence with all of its dimensions, or zeros."""
  shape = (1, x["q"].shape[1], *s.counts)
  return np.zeros(shape, np.float32) if "bias" not in x else np.broadcast_to(bias_of(x["bias"], s), shape)

def four(bias:np.ndarray) -> np.ndarray: return bias.reshape((1,)*(4 - bias.ndim) + bias.shape)

def where_of_bias(bias:np.ndarray, s:Sequence) -> tuple[Any, ...]:
  """The index of a sequence's part of a bias of four dimensions."""
  return slice(s.batch, s.batch + 1) if len(bias) > 1 else slice(None), slice(None), slice(None), s.keys if bias.shape[3] > 1 else slice(None)

def bias_of(bias:np.ndarray, s:Sequence) -> np.ndarray: return four(bias)[where_of_bias(four(bias), s)]

def options_of(x:Arrays, f:Facts, s:Sequence) -> Options:
  slopes, (queries, keys) = x.get("alibi_slopes"), s.counts
  kept = kept_mask(x["dropout_seed"], f.dropout_p, 1, x["q"].shape[1], queries, keys, s.number) if f.dropout_p else None
  return Options(softcap=f.softcap, alibi_slopes=slopes if slopes is None or slopes.ndim == 1 else slopes[s.number:s.number + 1],
                 bias=bias_of(x["bias"], s) if "bias" in x else None, sinks=x.get("sinks"), kept=kept, dropout_p=f.dropout_p)

def part(x:Arrays, s:Sequence) -> tuple[np.ndarray, ...]:
  one = slice(s.batch, s.batch + 1)
  return x["q"][one, :, s.rows], x["k"][one, :, s.keys], x["v"][one, :, s.keys]

def forward(x:Arrays, f:Facts) -> dict[str, Pair]:
  """o and lse: 0 and -inf in rows of no sequence."""
  shape = x["q"].shape[:3]
  o, lse = ([np.full(of, fill, kind) for kind in (np.float64, np.float32)] for of, fill in (((*shape, x["v"].shape[-1]), 0), (shape, -np.inf)))
  for s in sequences(x):
    args = *part(x, s), f.scale, f.window, s.offset(f), options_of(x, f, s)
    for i, found in enumerate((exact(*args), same(*args, dtype=f.dtype, out_dtype=f.out_dtype))):
      for to, value in zip((o[i], lse[i]), found): to[s.batch:s.batch + 1, :, s.rows] = value
  return {"o": (o[0], o[1]), "lse": (lse[0], lse[1])}

def slopes_gradient(of_scores:np.ndarray, offset:int) -> np.ndarray:
  """Of dS (1, H, Sq, Sk), the sums for each head of what a slope is multiplied with."""
  queries, keys = of_scores.shape[2:]
  distances = np.abs(np.arange(queries)[:, None] + offset - np.arange(keys)).astype(of_scores.dtype)
  return -(of_scores*distances).sum((0, 2, 3))

def backward(x:Arrays, f:Facts) -> dict[str, Pair]:
  """The gradients that are wanted, of sum(o*do) + sum(lse*dlse), the latter over rows that see a key."""
  total = {name: (np.zeros(x[name].shape), np.zeros(x[name].shape, np.float32)) for name in f.wanted}
  for s in sequences(x):
    at, rows = slice(s.batch, s.batch + 1), (slice(s.batch, s.batch + 1), slice(None), s.rows)
    do = rounded(x["do"][rows], f.dtype) if "do" in x else None
    def both(options:Options) -> tuple[Gradients, Gradients]:
      args = *part(x, s), do, x["dlse"][rows] if "dlse" in x else None, f.scale, f.window, s.offset(f), options
      return exact_backward(*args), same_backward(*args, dtype=f.dtype, out_dtype=f.out_dtype)
    options = options_of(x, f, s)
    for i, found in enumerate(both(options)):
      for name, index in (("q", rows), ("k", (at, slice(None), s.keys)), ("v", (at, slice(None), s.keys))):
        if name in total: total[name][i][index] += getattr(found, name)
      if f.v_dim and "k" in total: total["k"][i][at, :, s.keys, :f.v_dim] += found.v
      if "bias" in total: four(total["bias"][i])[where_of_bias(four(x["bias"]), s)] += found.bias
      if "sinks" in total: total["sinks"][i][...] += found.sinks
    if "alibi_slopes" not in total: continue
    for i, found in enumerate(both(replace(options, bias=full_bias(x, s)))):
      to = total["alibi_slopes"][i]
      (to if to.ndim == 1 else to[s.number])[...] += slopes_gradient(found.bias, s.offset(f))
  return {name: (want, rounded(text, f.type_of(name)) if name not in ("q", "k", "v") else text) for name, (want, text) in total.items()}

# ***** the judge *****

def hold(x:Arrays, f:Facts, found:Arrays) -> list[str]:
  """What is wrong with results, by name, in the shapes of `forward` and of the inputs: nothing where all keep to the accuracy contract."""
  expected = forward(x, f) if "o" in f.wanted or "lse" in f.wanted else backward(x, f)
  wrong = []
  for name in f.wanted:
    want, text = expected[name]
    if found[name].shape != want.shape:
      wrong.append(f"{name} has shape {found[name].shape}: should be {want.shape}")
      continue
    verdict = judge(found[name], want, text, LSE_ULPS if name == "lse" else 0.0)
    if not verdict.ok: wrong.append(f"{name}: {verdict}" + (f" ({verdict.error/verdict.limit:.1f} times)" if not verdict.pattern else ""))
  return wrong
