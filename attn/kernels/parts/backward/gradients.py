"""Computes P and dS from scores and dP, with the lse and delta of each query."""
from __future__ import annotations
import functools, math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from attn.chips.matrix import Matrix
from attn.kernels.parts.grid.tensors import log_sums
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.lanes import Lane
from attn.kernels.parts.memory.rows import GlobalRows
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.weights.dropout import Kept
from attn.kernels.parts.weights.scores import NEG_INF, Scores
from attn.kernels.tiles.common import query_value_names, units_of_query_values
from attn.ops import common as ops
from attn.ops.softmax import LOWEST
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes
from attn.values import LOG2E

# With wide scores (scores that may be as large as fp32 allows) a query also has lse_rest, the part of the lse that rounding to fp32 lost.
WEIGHTED = {"dq": ("k", "ds"), "dk": ("q", "ds"), "dv": ("do", "p")}     # each gradient sums the rows of a tensor, multiplied by these weights
PASSES = {1: (("dv", "dk"),), 2: (("dv",), ("dk",))}     # by the number of passes over the queries: the gradients that each pass computes

def gradients_of_passes(passes:int, adds_dq:bool=False) -> tuple[tuple[str, ...], ...]:
  """Returns the gradients that each loop over the queries computes, e.g. (("dv",), ("dk",)): dV in the first loop, dK in the second."""
  return (("dv", "dk", "dq"),) if adds_dq else PASSES[passes]

@dataclass(frozen=True)
class Normaliser:
  """The lse of a query, as two numbers that turn its scores into P: P = exp2((score - high)*to_log2 + low)."""
  # A missing `high` or `low` is 0. Each is a number, or a vector as long as those of the scores. With dropout, P includes the factor 1/(1 -
  # dropout_p). For scores in base e, with P = e^(score - lse), `high` is the lse. The kernel subtracts `high` first, because the difference is exact
  # where score and lse are close. With wide scores `low` holds the part of the lse that rounding lost.
  low: UOp|None
  high: UOp|None = None

  @staticmethod
  def of(p:Problem, log_sum:UOp, rest:UOp|None=None) -> Normaliser:
    """Makes the object from a query's lse, `log_sum`, and, with wide scores, its lse_rest, `rest` (what rounding lost of lse)."""
    kept = UOp.const(-math.log2(p.kept), dtypes.float)
    def low(x:UOp) -> UOp: return ops.add(x, kept) if p.dropout_p else x
    if rest is not None: return Normaliser(low(ops.mul(rest, -LOG2E)), reference(log_sum))
    # P is 0 for a query that sees no key
    return Normaliser(log_sum.eq(NEG_INF).where(NEG_INF, low(ops.mul(log_sum, -LOG2E))))
  @staticmethod
  def joined(parts:Sequence[Normaliser], join:Callable[..., UOp]) -> Normaliser:
    """Makes one object from those of several queries: `high` and `low` become vectors made by `join`."""
    def vector(numbers:list[UOp|None]) -> UOp|None:
      there = [x for x in numbers if x is not None]      # all of them or none
      return join(*there) if there else None
    return Normaliser(vector([x.low for x in parts]), vector([x.high for x in parts]))
  @property
  def values(self) -> list[UOp]:
    """Returns [high, low], without a number that is None."""
    return [x for x in (self.high, self.low) if x is not None]
  def each(self, change:Callable[[UOp], UOp]) -> Normaliser:
    """Returns a copy with `change(high)` and `change(low)` in place of `high` and `low`."""
    return Normaliser.joined([self], change)
  def where(self, there:UOp) -> Normaliser:
    """Returns a copy that makes P 0 for queries that do not exist, those where `there` is false."""
    assert self.low is not None
    return replace(self, low=there.where(self.low, NEG_INF))
  def weight(self, x:UOp, to_log2:float) -> UOp:
    """Returns P of the scores `x`. The factor `to_log2` turns the scores into exponents of 2."""
    if self.high is not None: x = ops.sub(x, self.high)
    return ops.exp2(ops.mul(x, to_log2) if self.low is None else ops.fma(x, to_log2, self.low))

def shared_query_values(p:Problem, log_sum:UOp, delta:UOp, *rest:UOp) -> list[UOp]:
  """Returns what shared memory holds for a query: [`low` of the `Normaliser` made from its lse, -delta], and with wide scores also `high`."""
  # The first is `low` of the normaliser. The second is -delta, or with dropout -delta*(1 - dropout_p). With wide scores the third is `high` of the
  # normaliser.
  normaliser = Normaliser.of(p, log_sum, *rest)
  return [x for x in (normaliser.low, scaled_delta(delta, p), normaliser.high) if x is not None]

def kinds_of_normalisers(p:Problem) -> range:
  """Returns the indices of `low` and `high` in the list that `shared_query_values` returns."""
  # in the list of `shared_query_values`: all but 1, the index of delta
  return range(0, len(query_value_names(p)), 2)

def scaled_delta(delta:UOp, p:Problem) -> UOp:
  """Returns -delta of a query, as it is added to dP: with dropout -delta*(1 - dropout_p)."""
  # With dropout the kernels' P is the softmax weight divided by 1 - dropout_p, but in dS delta is multiplied by the weight itself. The factor 1 -
  # dropout_p makes up for the difference.
  return ops.mul(delta, -p.kept)

def dp_start(minus_delta:list[UOp], kept:Kept) -> list[UOp]:
  """Returns the initial accumulators of dP: -delta, so that the product ends as dP - delta, or 0 with dropout."""
  # dropout sets elements of dP to 0, but not the delta that is subtracted from them: so delta is then subtracted later (`less_delta`)
  return [ops.splat(0.0, ops.length(x)) for x in minus_delta] if kept.words else minus_delta

@dataclass(frozen=True)
class Weights:
  """The weights P of a lane's scores, and at each score the derivatives of the score terms (bias, softcap, ...)."""
  p: list[UOp]
  derivatives: dict[str, list[UOp]]                 # derivatives of the terms at each score, by the terms' names, in the terms' order
  # Returns the vectors with 0 for each score whose query does not see its key. P and dS must be exactly 0 there, because they are multiplied by rows
  # of tensors that may hold inf or NaN.
  visible: Callable[[list[UOp]], list[UOp]]

def weights_of(scores:Scores, raw:list[UOp], normalisers:list[Normaliser], row:Row, tile:UOp, masked:bool) -> Weights:
  """Returns P and the derivatives of the score terms for `raw`, the scores of one row in tile `tile` before score terms and masks."""
  # `normalisers` has one entry for each vector of `raw`; `masked`: whether masks may hide some of the scores
  return weights_of_rows(scores, raw, [normalisers], [row], tile, masked)

def weights_of_rows(scores:Scores, raw:list[UOp], normalisers:list[list[Normaliser]], rows:list[Row], tile:UOp, masked:bool) -> Weights:
  """Returns P and the derivatives of the score terms for `raw`, the scores of several rows in tile `tile` before score terms and masks."""
  # Each vector of `raw` has elements of all rows, one row after another. `normalisers` has a list for each row, with one entry for each vector.
  # `masked`: whether masks may hide some of the scores.
  def by_row(x:list[UOp]) -> list[list[UOp]]:
    n = ops.length(x[0])//len(rows)      # elements that a vector has of each row
    if len(rows) == 1: return [x]
    return [[ops.slice_(y, i*n, n) for y in x] for i in range(len(rows))]
  def joined(parts:list[list[UOp]]) -> list[UOp]: return [functools.reduce(ops.concat, xs) for xs in zip(*parts)]
  def visible(x:list[UOp]) -> list[UOp]:
    return joined([scores.clear(part, row, tile) for part, row in zip(by_row(x), rows)]) if masked else x
  def of_row(part:list[UOp], row:Row, own:list[Normaliser]) -> tuple[list[UOp], dict[str, list[UOp]]]:
    steps = scores.steps(part, row, tile)
    weights = [e.weight(y, scores.to_log2) for y, e in zip(scores.final(steps), own)]
    return weights, scores.derivatives(steps, row, tile)
  found = [of_row(*of) for of in zip(by_row(raw), rows, normalisers)]
  derivatives = {name: joined([x[name] for _, x in found]) for name in found[0][1]}
  return Weights(visible(joined([p for p, _ in found])), derivatives, visible)

def reference(log_sum:UOp) -> UOp:
  """Returns the number that is subtracted from a query's scores: its lse, or inf (so that P is 0) if the query sees no key."""
  # inf makes P 0
  return log_sum.eq(NEG_INF).where(math.inf, log_sum)

def normaliser_of(group:Workgroup, row:Row) -> Normaliser:
  """Loads the lse of query `row`, and returns it as `Normaliser`, the numbers that turn scores into P."""
  return Normaliser.of(group.p, *[group.query_value(name, row) for name in log_sums(group.given)])

def exact_normaliser(p:Problem, log_sum:UOp, *rest:UOp) -> Normaliser:
  """Returns the lse of a query as `Normaliser`, for kernels that compute P = e^(score - lse) in base e."""
  # `rest`, given with wide scores, is the part of the lse that rounding to fp32 lost
  return Normaliser.of(p, log_sum, *rest) if rest else Normaliser(None, reference(log_sum))

def exact_weights(scores:Scores, raw:list[UOp], normalisers:list[Normaliser], row:Row, tile:UOp, masked:bool) -> Weights:
  """Returns P = e^(score - lse) and the derivatives of the score terms for the raw scores of row `row`, for float32 inputs."""
  # The scores are computed with the same roundings as in forward. So if one key dominates a row, the difference of its score and the row's lse is
  # exactly 0.
  def visible(x:list[UOp]) -> list[UOp]: return scores.clear(x, row, tile) if masked else x
  def weight(y:UOp, e:Normaliser) -> UOp:
    # max(score, LOWEST) changes no score. It keeps compilers from joining the multiplication that makes a score and the subtraction of the lse into a
    # multiply-add, which would leave out a rounding. Wide scores need no maximum: their last step is the addition of a bias.
    if not scores.p.wide_scores: y = ops.max_(y, ops.splat(LOWEST, ops.length(y)))
    p = e.weight(y, scores.to_log2)
    return ops.mul(p, 1/scores.p.kept) if scores.p.dropout_p and e.low is None else p
  steps = scores.steps(raw, row, tile)
  weights = [weight(y, e) for y, e in zip(scores.final(steps), normalisers)]
  return Weights(visible(weights), scores.derivatives(steps, row, tile), visible)

def less_delta(dp:list[UOp], kept:Kept, minus_delta:list[UOp]) -> list[UOp]:
  """Returns dP - delta as C fragments, where `dp` is dP; with dropout, dP of a dropped score counts as 0."""
  # without dropout `dp` itself, because its accumulators began with -delta (`dp_start`)
  return [ops.add(x, d) for x, d in zip(kept.drop(dp), minus_delta)] if kept.words else dp

def gradients_of(weights:Weights, dp:list[UOp], derivatives:Collection[str]|None=None) -> list[UOp]:
  """Returns dS = P * (dP - delta) * derivatives of the score terms. `dp` already is dP - delta."""
  # P * (dP - delta) is the gradient of the finished scores, after all score terms. Times the derivatives of all terms, it is the gradient of the raw
  # scores, without the factor softmax_scale. Times only those that `derivatives` names, it is the gradient of a bias, or of a tensor's element that
  # score_mod reads.
  ds = [ops.mul(y, d) for y, d in zip(weights.p, dp)]
  for name, derivative in weights.derivatives.items():
    if derivatives is None or name in derivatives: ds = [ops.mul(y, slope) for y, slope in zip(ds, derivative)]
  return weights.visible(ds)

def where_known(known:UOp|None, x:UOp, factor:float) -> UOp:
  """Returns `x`*`factor` where `known` is true, and exactly 0 elsewhere, even if `x` is inf or NaN there."""
  # `x` is elements of a row of a gradient; None means true
  if known is None: return ops.mul(x, factor)
  return ops.build(*[known.where(ops.mul(ops.extract(x, i), factor), 0.0) for i in range(ops.length(x))])

@dataclass(frozen=True)
class QueryValueTensors:
  """Tensors in global memory with one number for each query: lse, delta and, with wide scores, lse_rest."""
  # in the order of `query_value_names`
  each: tuple[GlobalRows, ...]
  # computes the index of a tile's first query in a scalar register: from a vector register, clang would load for one lane after another
  pin: bool = False
  in_units = True
  def after(self, *deps:UOp) -> QueryValueTensors: return replace(self, each=tuple(x.after(*deps) for x in self.each))

@dataclass(frozen=True)
class QueryValues(InLds):
  """LDS buffer with lse and -delta of each query of a tile, from which a lane loads the numbers that its C fragments need."""
  # The queries are stored in the order in which a lane holds their scores in C, so the numbers for one lane lie side by side.
  p: Problem
  matrix: Matrix
  block_n: int
  buffer: UOp        # in units of 16 bytes
  thread: UOp
  base: UOp|int = 0

  @staticmethod
  def of(p:Problem, mat:Matrix, block_n:int, new:Allocator, buffers:int, thread:UOp) -> QueryValues:
    return QueryValues(p, mat, block_n, new.lds(buffers*units_of_query_values(p, block_n)), thread)
  def after(self, *deps:UOp) -> QueryValues: return replace(self, buffer=self.buffer.after(*deps))
  def nth(self, i:UOp) -> QueryValues: return replace(self, base=i*units_of_query_values(self.p, self.block_n))
  @property
  def single(self) -> list[QueryValues]:
    """List with this `QueryValues` alone, because all its numbers are copied at once. (`StagedTile.single` lists smaller tiles.)"""
    # `StagedTile.single`, which the same loop calls, divides a tile into smaller tiles
    return [self]

  def fetch(self, rows:QueryValueTensors, t:UOp) -> list[UOp]:
    """Loads lse and delta of one query of tile t, the query that this thread copies to LDS."""
    mat, thread, gate = self.matrix, self.thread, self.thread < self.block_n
    row = thread//mat.M*mat.M + mat.c_row(thread%mat.M//mat.accumulator, thread%mat.accumulator)
    first = ops.opaque_uniform(t*self.block_n) if rows.pin else t*self.block_n
    return [x.load_number(first, self.block_n, row, gate) for x in rows.each]

  def store(self, parts:list[UOp]) -> list[UOp]:
    to = self.buffer.bitcast(dtypes.float)
    return [to[(self.base*4 + i*self.block_n + self.thread).valid(self.thread < self.block_n)].store(x)
            for i, x in enumerate(shared_query_values(self.p, *parts))]

  def load(self, at:Lane) -> tuple[list[Normaliser], list[UOp]]:
    """Loads lse and -delta from LDS for this lane's C fragments; returns (list of `Normaliser`, list of -delta), one entry for each fragment."""
    # with dropout -delta*(1 - dropout_p)
    mat, units = self.matrix, self.matrix.accumulator//4
    def fragment(kind:int, kt:int) -> UOp:
      first = self.base + kind*(self.block_n//4) + (kt*mat.groups + at.h)*units
      parts = [ops.as_float(self.buffer[first + i].load()) for i in range(units)]
      while len(parts) > 1: parts = [ops.concat(a, b) for a, b in zip(parts[0::2], parts[1::2])]
      return parts[0]
    low, deltas, *high = ([fragment(kind, kt) for kt in range(self.block_n//mat.M)] for kind in range(len(query_value_names(self.p))))
    return [Normaliser(*xs) for xs in zip(low, *high)], deltas
