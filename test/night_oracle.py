"""Expected results of random calls: attention in float64, sequence by sequence, and the check that each element of a call's results is within its
error limit (docs/contract.md)."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
import numpy as np
from attn.accuracy import SMALLEST, Law, ShortSums, judge, law_of, law_of_gradients, without_error
from attn.reference import Options, rounded
from cases import kept_mask

Arrays = dict[str, np.ndarray]

@dataclass(frozen=True)
class Facts:
  # Facts about a call that its arrays do not show.
  # `wanted` names the results: o and lse, or the inputs whose gradients the call returns. If `v_dim` is not 0, V is the first `v_dim` columns of K.
  # `short` says how the matrix unit adds products of 8-bit floats, if it does not add in fp32. `types` lists the inputs whose dtype is not `dtype`.
  # `flushes`: the chip treats 16-bit denormals as zero. `emulates`: tinygrad may emulate float16 on the device, and then reads and writes numbers
  # below 2^-14 as 0 (docs/plain.md).
  dtype: str
  out_dtype: str
  scale: float
  wanted: tuple[str, ...]
  window: tuple[int, int] = (-1, -1)
  top_left: bool = False
  softcap: float = 0.0
  dropout_p: float = 0.0
  v_dim: int = 0
  short: ShortSums|None = None
  types: tuple[tuple[str, str], ...] = ()
  flushes: bool = False
  emulates: bool = False
  def type_of(self, name:str) -> str: return {"o": self.out_dtype, "lse": "float32", **dict(self.types)}.get(name, self.dtype)

@dataclass(frozen=True)
class Sequence:
  # One sequence: its queries `rows` and its `keys`, as slices of the rows of a batch.
  batch: int
  number: int  # index of a packed sequence
  rows: slice
  keys: slice
  @property
  def counts(self) -> tuple[int, int]: return self.rows.stop - self.rows.start, self.keys.stop - self.keys.start
  def offset(self, f:Facts) -> int: return 0 if f.top_left else self.counts[1] - self.counts[0]

def sequences(x:Arrays) -> Iterator[Sequence]:
  # Yields the packed sequences if there are cu_seqlens, otherwise each batch, with its keys from kv_starts to kv_lengths.
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

def four(bias:np.ndarray) -> np.ndarray: return bias.reshape((1,)*(4 - bias.ndim) + bias.shape)

def where_of_bias(bias:np.ndarray, s:Sequence) -> tuple[Any, ...]:
  # Returns the index of the part of a 4-dimensional bias that one sequence uses.
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

def forward(x:Arrays, f:Facts) -> dict[str, Law]:
  # Returns o and lse in float64: for each the exact values and the error limit of each element.
  shape = x["q"].shape[:3]
  # Rows that belong to no sequence have o 0 and lse -inf.
  total = {"o": without_error((*shape, x["v"].shape[-1])), "lse": without_error(shape, -np.inf)}
  for s in sequences(x):
    scales = x["v_scales"][s.batch:s.batch + 1, :, s.keys] if "v_scales" in x else None
    laws = law_of(*part(x, s), f.scale, f.window, s.offset(f), options_of(x, f, s), dtype=f.dtype, out_dtype=f.out_dtype,
                  flushes=f.flushes, v_scales=scales, short=f.short)
    for to, law in zip(total.values(), laws): to.put((slice(s.batch, s.batch + 1), slice(None), s.rows), law)
  return total

def backward(x:Arrays, f:Facts) -> dict[str, Law]:
  # Returns the gradients of sum(o*do) + sum(lse*dlse) in float64: for each the exact values and the error limit of each element.
  # The second sum takes only rows that see a key.
  total = {name: without_error(x[name].shape) for name in f.wanted}
  for s in sequences(x):
    at, rows = slice(s.batch, s.batch + 1), (slice(s.batch, s.batch + 1), slice(None), s.rows)
    do = rounded(x["do"][rows], f.dtype) if "do" in x else None
    laws = law_of_gradients(*part(x, s), do, x["dlse"][rows] if "dlse" in x else None, f.scale, f.window, s.offset(f), options_of(x, f, s),
                            dtype=f.dtype, out_dtype=f.out_dtype, bias_dtype=f.type_of("bias"), flushes=f.flushes)
    places = {"q": rows, "k": (at, slice(None), s.keys), "v": (at, slice(None), s.keys)}
    for name, law in vars(laws).items():
      if name in places and name in total: total[name].add(places[name], law)
    if f.v_dim and "k" in total: total["k"].add((at, slice(None), s.keys, slice(f.v_dim)), laws.v)
    if laws.bias is not None and "bias" in total: total["bias"].of(four).add(where_of_bias(four(x["bias"]), s), laws.bias)
    if laws.sinks is not None and "sinks" in total: total["sinks"].add(..., laws.sinks)
    if laws.alibi_slopes is not None and "alibi_slopes" in total:
      total["alibi_slopes"].add(slice(s.number, s.number + 1) if x["alibi_slopes"].ndim == 2 else ..., laws.alibi_slopes)
  return total | {name: total[name].rounded_to(f.type_of(name)) for name in ("sinks", "alibi_slopes") if name in total}    # one rounding of the sums

# ***** the judge *****

def without_small(x:Arrays, f:Facts) -> Arrays:
  # Replaces numbers below the normal range of float16 by 0 in the float16 inputs.
  def read(name:str, a:np.ndarray) -> np.ndarray:
    half = name != "dlse" and a.dtype.kind == "f" and f.type_of(name) == "float16"
    return np.where(np.abs(a) < SMALLEST["float16"], np.float32(0), a) if half else a
  return {name: read(name, a) for name, a in x.items()}

def hold(x:Arrays, f:Facts, found:Arrays) -> list[str]:
  # Checks the results of a call, and returns a list of errors: empty if each element is within its error limit (docs/contract.md).
  wrong = errors(x, f, found, small=True)
  # A device for which tinygrad emulates float16 may read and write small numbers as 0. There, results are also right if they are right for inputs
  # with 0 in place of small numbers, and 0 is right in place of a small result.
  return errors(without_small(x, f), f, found, small=False) if wrong and f.emulates else wrong

def errors(x:Arrays, f:Facts, found:Arrays, small:bool) -> list[str]:
  # Returns a list of errors in the results `found`.
  # If `small` is false, 0 counts as right in place of a float16 result below the normal range. The gradient of v is 0 for a loss that uses only lse.
  # So 0 is also right where the expected value is NaN because a NaN was multiplied by this 0.
  expected = forward(x, f) if "o" in f.wanted or "lse" in f.wanted else backward(x, f)
  wrong = []
  for name in f.wanted:
    law = expected[name]
    if found[name].shape != law.exact.shape:
      wrong.append(f"{name} has shape {found[name].shape}: should be {law.exact.shape}")
      continue
    may_be_0 = np.isnan(law.exact) & (name == "v" and "do" not in x)
    if not small and f.type_of(name) == "float16": may_be_0 |= np.abs(law.exact) < SMALLEST["float16"]
    verdict = judge(np.where(may_be_0 & (found[name] == 0), law.exact, found[name]), law)
    if not verdict.ok: wrong.append(f"{name}: {verdict}" + (f" ({verdict.ratio:.1f} times)" if not verdict.pattern else ""))
  return wrong
