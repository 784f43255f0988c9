"""From scores and dP to P and dS, and what that takes of each query: its lse and its delta."""
from __future__ import annotations
import functools, math
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.chips.matrix import Matrix
from attn.kernels.parts.allocator import Allocator, InLds
from attn.kernels.parts.dropout import Kept, KeptHere
from attn.kernels.parts.lanes import Lane
from attn.kernels.parts.rows import GlobalRows
from attn.kernels.parts.scores import NEG_INF, Scores
from attn.ops import common as ops
from attn.ops.softmax import LOWEST
from attn.problem import Problem
from attn.score.term import LOG2E, Row, ScoreTerm
from attn.score.terms import terms_after
from attn.tinygrad_compat import UOp, dtypes

PASSES = {1: (("dv", "dk"),), 2: (("dv",), ("dk",))}     # what each pass over the queries computes

def exponent(log_sum:UOp, p:Problem) -> UOp:
  """What makes P = exp2(scores + exponent), scores in base 2, of an lse: -inf for a query that sees no key, whose P is 0. With dropout P is what is
  left of it in forward where it is kept, 1/(1 - dropout_p) times as large."""
  found = ops.mul(log_sum, -LOG2E)
  if p.dropout_p: found = ops.add(found, UOp.const(-math.log2(p.kept), dtypes.float))
  return log_sum.eq(NEG_INF).where(NEG_INF, found)

def scaled_delta(delta:UOp, p:Problem) -> UOp:
  """-delta, and with dropout so much less of it as P is larger than it should be beside it."""
  return ops.mul(delta, -p.kept)

def dp_start(minus_delta:list[UOp], kept:Kept) -> list[UOp]:
  """What dP begins with: -delta, or with dropout 0, for delta is not dropped."""
  return [ops.splat(0.0, ops.length(x)) for x in minus_delta] if kept.words else minus_delta

@dataclass(frozen=True)
class Weights:
  """P of a lane's scores. Both what is made of P and of dS is a factor of rows of tensors, so where a query does not see a key both are exactly 0,
  whatever numbers the two have: `visible` clears a vector there."""
  p: list[UOp]
  derivatives: dict[str, list[UOp]]                 # of terms at each score, by name and in their order
  visible: Callable[[list[UOp]], list[UOp]]

def weights_of(scores:Scores, raw:list[UOp], exponents:list[UOp], row:Row, tile:UOp, masked:bool) -> Weights:
  """P = exp2(scores + exponent) of raw scores."""
  return weights_of_rows(scores, raw, [exponents], [row], tile, masked)

def weights_of_rows(scores:Scores, raw:list[UOp], exponents:list[list[UOp]], rows:list[Row], tile:UOp, masked:bool) -> Weights:
  """The same of vectors that have the elements of several rows, one row after another; `exponents` row by row."""
  def by_row(x:list[UOp]) -> list[list[UOp]]:
    n = ops.length(x[0])//len(rows)
    return [x] if len(rows) == 1 else [[ops.slice_(y, i*n, n) for y in x] for i in range(len(rows))]
  def joined(parts:list[list[UOp]]) -> list[UOp]: return [functools.reduce(ops.concat, xs) for xs in zip(*parts)]
  def visible(x:list[UOp]) -> list[UOp]:
    return joined([scores.clear(part, row, tile) for part, row in zip(by_row(x), rows)]) if masked else x
  def of_row(part:list[UOp], row:Row, own:list[UOp]) -> tuple[list[UOp], dict[str, list[UOp]]]:
    steps = scores.steps(part, row, tile)
    return [ops.exp2(ops.fma(y, scores.to_log2, e)) for y, e in zip(steps[-1], own)], scores.derivatives(steps, row, tile)
  found = [of_row(*of) for of in zip(by_row(raw), rows, exponents)]
  derivatives = {name: joined([x[name] for _, x in found]) for name in found[0][1]}
  return Weights(visible(joined([p for p, _ in found])), derivatives, visible)

def reference(log_sum:UOp) -> UOp:
  """What makes P = exp(score - reference) of an lse: inf for a query that sees no key, whose P is 0."""
  return log_sum.eq(NEG_INF).where(math.inf, log_sum)

def exact_weights(scores:Scores, raw:list[UOp], references:list[UOp], row:Row, tile:UOp, masked:bool) -> Weights:
  """P = exp(score - reference) of raw scores, by `natural` scores that are rounded as they were in forward: so their differences are, and that of the
  one key that dominates a row is exactly 0. The maximum, which changes nothing, keeps compilers from a multiply-add, which would not round them."""
  def visible(x:list[UOp]) -> list[UOp]: return scores.clear(x, row, tile) if masked else x
  def weight(y:UOp, r:UOp) -> UOp:
    score = ops.max_(ops.mul(y, scores.unit.natural), ops.splat(LOWEST, ops.length(y)))
    p = ops.exp2(ops.mul(ops.sub(score, r), LOG2E))
    return ops.mul(p, 1/scores.p.kept) if scores.p.dropout_p else p
  steps = scores.steps(raw, row, tile)
  return Weights(visible([weight(y, r) for y, r in zip(steps[-1], references)]), scores.derivatives(steps, row, tile), visible)

def gradients_of(weights:Weights, dp:list[UOp], kept:Kept|KeptHere, minus_delta:list[UOp], added:ScoreTerm|None=None) -> list[UOp]:
  """dS = P * (dP - delta), given a dP that began with `dp_start`, of raw scores: what it lacks is softmax_scale; or of what the term `added` adds."""
  if kept.words: dp = [ops.add(x, d) for x, d in zip(kept.numbers(dp), minus_delta)]
  ds = [ops.mul(y, d) for y, d in zip(weights.p, dp)]
  for name, derivative in weights.derivatives.items():
    if added is None or name in terms_after(added): ds = [ops.mul(y, slope) for y, slope in zip(ds, derivative)]
  return weights.visible(ds)

def where_known(known:UOp|None, x:UOp, factor:float) -> UOp:
  """Elements of a row of a gradient times a factor; exactly 0 where the row is not `known`, whatever x is there. None: it is stored where it is
  known only."""
  if known is None: return ops.mul(x, factor)
  return ops.build(*[known.where(ops.mul(ops.extract(x, i), factor), 0.0) for i in range(ops.length(x))])

@dataclass(frozen=True)
class NumbersOfRows:
  """Two numbers of each query in global memory."""
  lse: GlobalRows
  delta: GlobalRows
  in_units = True
  def after(self, *deps:UOp) -> NumbersOfRows: return NumbersOfRows(self.lse.after(*deps), self.delta.after(*deps))

@dataclass(frozen=True)
class RowNumbers(InLds):
  """The exponent and `scaled_delta` of each query of a tile, in LDS in the order in which lanes have the queries as elements of C: those of a lane
  side by side."""
  p: Problem
  matrix: Matrix
  block_n: int
  buffer: UOp        # units
  thread: UOp
  base: UOp|int = 0

  @staticmethod
  def of(p:Problem, mat:Matrix, block_n:int, new:Allocator, buffers:int, thread:UOp) -> RowNumbers:
    return RowNumbers(p, mat, block_n, new.lds(buffers*block_n//2), thread)
  def after(self, *deps:UOp) -> RowNumbers: return replace(self, buffer=self.buffer.after(*deps))
  def number(self, i:UOp) -> RowNumbers: return replace(self, base=i*(self.block_n//2))
  @property
  def single(self) -> list[RowNumbers]:
    """The same with one item of a thread each: it has no more."""
    return [self]

  def fetch(self, rows:NumbersOfRows, t:UOp) -> list[UOp]:
    """The lse and the delta of the query that the thread carries."""
    mat, thread, gate = self.matrix, self.thread, self.thread < self.block_n
    row = thread//mat.M*mat.M + mat.c_row(thread%mat.M//mat.accumulator, thread%mat.accumulator)
    return [x.load_number(t*self.block_n, self.block_n, row, gate) for x in (rows.lse, rows.delta)]

  def store(self, parts:list[UOp]) -> list[UOp]:
    to, (log_sum, delta) = self.buffer.bitcast(dtypes.float), parts
    values = (exponent(log_sum, self.p), scaled_delta(delta, self.p))
    return [to[(self.base*4 + i*self.block_n + self.thread).valid(self.thread < self.block_n)].store(x) for i, x in enumerate(values)]

  def load(self, at:Lane) -> tuple[list[UOp], list[UOp]]:
    """(exponents, -delta) of a lane's column of C fragments."""
    mat, units = self.matrix, self.matrix.accumulator//4
    def fragment(kind:int, kt:int) -> UOp:
      first = self.base + kind*(self.block_n//4) + (kt*mat.groups + at.h)*units
      parts = [ops.as_float(self.buffer[first + i].load()) for i in range(units)]
      while len(parts) > 1: parts = [ops.concat(a, b) for a, b in zip(parts[0::2], parts[1::2])]
      return parts[0]
    exponents, deltas = ([fragment(kind, kt) for kt in range(self.block_n//mat.M)] for kind in range(2))
    return exponents, deltas
