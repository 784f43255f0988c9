"""Computes P and dS from scores and dP, and reads what that takes of each query: its delta, and its lse with the rest that fp32 may have lost."""
from __future__ import annotations
import functools, math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from attn.chips.matrix import Matrix
from attn.kernels.parts.grid.tensors import log_sums
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.lanes import Lane
from attn.kernels.parts.memory.rows import GlobalRows
from attn.kernels.parts.program.allocator import Allocator, InLds
from attn.kernels.parts.weights.dropout import Kept, KeptHere
from attn.kernels.parts.weights.scores import NEG_INF, Scores
from attn.kernels.tiles.common import numbers_of_queries, units_of_numbers
from attn.ops import common as ops
from attn.ops.softmax import LOWEST
from attn.problem import Problem
from attn.score.term import LOG2E, Row, ScoreTerm
from attn.score.terms import terms_after
from attn.tinygrad_compat import UOp, dtypes

OF_QUERIES, OF_KEYS = ("q", "do"), ("k", "v")            # rows that scores are made of, and those of dP: of queries and of keys
WEIGHTED = {"dq": ("k", "ds"), "dk": ("q", "ds"), "dv": ("do", "p")}     # what each gradient is a sum of: rows of a tensor, and their weights
PASSES = {1: (("dv", "dk"),), 2: (("dv",), ("dk",))}     # what each pass over the queries computes

@dataclass(frozen=True)
class Exponent:
  """What makes P = exp2(scores*to_log2 + low) of scores, or exp2((scores - high)*to_log2 + low): numbers, or vectors as the scores are. With dropout
  P is what is left of it in forward where it is kept, 1/(1 - dropout_p) times as large.

  Natural scores have their difference from the lse taken first, which is exact where it matters. Beside a wide bias `low` is what that has lost."""
  low: UOp|None
  high: UOp|None = None

  @staticmethod
  def of(p:Problem, log_sum:UOp, rest:UOp|None=None) -> Exponent:
    """Makes the exponent of an lse, and of wide scores of its rest. A query that sees no key has P = 0."""
    kept = UOp.const(-math.log2(p.kept), dtypes.float)
    def low(x:UOp) -> UOp: return ops.add(x, kept) if p.dropout_p else x
    if rest is not None: return Exponent(low(ops.mul(rest, -LOG2E)), reference(log_sum))
    return Exponent(log_sum.eq(NEG_INF).where(NEG_INF, low(ops.mul(log_sum, -LOG2E))))
  @staticmethod
  def joined(parts:Sequence[Exponent], join:Callable[..., UOp]) -> Exponent:
    """Joins several into one."""
    return Exponent(*[None if xs[0] is None else join(*xs) for xs in ([x.low for x in parts], [x.high for x in parts])])
  @property
  def numbers(self) -> list[UOp]:
    """Lists `high` and `low`, as far as there are."""
    return [x for x in (self.high, self.low) if x is not None]
  def each(self, change:Callable[[UOp], UOp]) -> Exponent:
    """Changes each of its numbers."""
    return Exponent.joined([self], change)
  def where(self, there:UOp) -> Exponent:
    """Makes P 0 where a query is not there."""
    assert self.low is not None
    return replace(self, low=there.where(self.low, NEG_INF))
  def weight(self, x:UOp, to_log2:float) -> UOp:
    """P of scores."""
    if self.high is not None: x = ops.sub(x, self.high)
    return ops.exp2(ops.mul(x, to_log2) if self.low is None else ops.fma(x, to_log2, self.low))

def shared_numbers(p:Problem, log_sum:UOp, delta:UOp, *rest:UOp) -> list[UOp]:
  """Lists what a kernel that owns keys puts into shared memory of a query's numbers: of its exponent `low`, `scaled_delta`, and `high` if there is
  one."""
  exponent = Exponent.of(p, log_sum, *rest)
  return [x for x in (exponent.low, scaled_delta(delta, p), exponent.high) if x is not None]

def kinds_of_exponents(p:Problem) -> range:
  """Says which of those numbers make the exponent."""
  return range(0, len(numbers_of_queries(p)), 2)

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

def weights_of(scores:Scores, raw:list[UOp], exponents:list[Exponent], row:Row, tile:UOp, masked:bool) -> Weights:
  """P of raw scores."""
  return weights_of_rows(scores, raw, [exponents], [row], tile, masked)

def weights_of_rows(scores:Scores, raw:list[UOp], exponents:list[list[Exponent]], rows:list[Row], tile:UOp, masked:bool) -> Weights:
  """P and dS's factors of vectors that hold the elements of several rows, one row after another. `exponents` has one entry for each row."""
  def by_row(x:list[UOp]) -> list[list[UOp]]:
    n = ops.length(x[0])//len(rows)
    return [x] if len(rows) == 1 else [[ops.slice_(y, i*n, n) for y in x] for i in range(len(rows))]
  def joined(parts:list[list[UOp]]) -> list[UOp]: return [functools.reduce(ops.concat, xs) for xs in zip(*parts)]
  def visible(x:list[UOp]) -> list[UOp]:
    return joined([scores.clear(part, row, tile) for part, row in zip(by_row(x), rows)]) if masked else x
  def of_row(part:list[UOp], row:Row, own:list[Exponent]) -> tuple[list[UOp], dict[str, list[UOp]]]:
    steps = scores.steps(part, row, tile)
    return [e.weight(y, scores.to_log2) for y, e in zip(scores.left(steps), own)], scores.derivatives(steps, row, tile)
  found = [of_row(*of) for of in zip(by_row(raw), rows, exponents)]
  derivatives = {name: joined([x[name] for _, x in found]) for name in found[0][1]}
  return Weights(visible(joined([p for p, _ in found])), derivatives, visible)

def reference(log_sum:UOp) -> UOp:
  """What makes P = exp(score - reference) of an lse: inf for a query that sees no key, whose P is 0."""
  return log_sum.eq(NEG_INF).where(math.inf, log_sum)

def exponent_of(group:Workgroup, row:Row) -> Exponent:
  """Makes the exponent of a query of the workgroup."""
  return Exponent.of(group.p, *[group.number(name, row) for name in log_sums(group.given)])

def exact_exponent(p:Problem, log_sum:UOp, *rest:UOp) -> Exponent:
  """Makes the exponent of an lse for natural scores."""
  return Exponent.of(p, log_sum, *rest) if rest else Exponent(None, reference(log_sum))

def exact_weights(scores:Scores, raw:list[UOp], exponents:list[Exponent], row:Row, tile:UOp, masked:bool) -> Weights:
  """P of raw scores, by `natural` scores that are rounded as they were in forward: so their differences are, and that of the one key that dominates a
  row is exactly 0. The maximum, which changes nothing, keeps compilers from a multiply-add, which would not round them; a bias comes after it."""
  def visible(x:list[UOp]) -> list[UOp]: return scores.clear(x, row, tile) if masked else x
  def weight(y:UOp, e:Exponent) -> UOp:
    if not scores.p.wide_scores: y = ops.max_(y, ops.splat(LOWEST, ops.length(y)))
    p = e.weight(y, scores.to_log2)
    return ops.mul(p, 1/scores.p.kept) if scores.p.dropout_p and e.low is None else p
  steps = scores.steps(raw, row, tile)
  return Weights(visible([weight(y, e) for y, e in zip(scores.left(steps), exponents)]), scores.derivatives(steps, row, tile), visible)

def less_delta(dp:list[UOp], kept:Kept|KeptHere, minus_delta:list[UOp]) -> list[UOp]:
  """dP - delta, given a dP that began with `dp_start`, of which dropout keeps as much as of P."""
  return [ops.add(x, d) for x, d in zip(kept.numbers(dp), minus_delta)] if kept.words else dp

def gradients_of(weights:Weights, dp:list[UOp], added:ScoreTerm|None=None) -> list[UOp]:
  """dS = P * (dP - delta), given the second factor, of raw scores: what it lacks is softmax_scale; or of what the term `added` adds."""
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
  """The numbers of each query in global memory, those of `numbers_of_queries`."""
  each: tuple[GlobalRows, ...]
  in_units = True
  def after(self, *deps:UOp) -> NumbersOfRows: return NumbersOfRows(tuple(x.after(*deps) for x in self.each))

@dataclass(frozen=True)
class RowNumbers(InLds):
  """The numbers of each query of a tile that `shared_numbers` says, in LDS in the order in which lanes have the queries as elements of C: those of a
  lane side by side."""
  p: Problem
  matrix: Matrix
  block_n: int
  buffer: UOp        # units
  thread: UOp
  base: UOp|int = 0

  @staticmethod
  def of(p:Problem, mat:Matrix, block_n:int, new:Allocator, buffers:int, thread:UOp) -> RowNumbers:
    return RowNumbers(p, mat, block_n, new.lds(buffers*units_of_numbers(p, block_n)), thread)
  def after(self, *deps:UOp) -> RowNumbers: return replace(self, buffer=self.buffer.after(*deps))
  def nth(self, i:UOp) -> RowNumbers: return replace(self, base=i*units_of_numbers(self.p, self.block_n))
  @property
  def single(self) -> list[RowNumbers]:
    """One staged part for each item of a thread: a thread has one item only."""
    return [self]

  def fetch(self, rows:NumbersOfRows, t:UOp) -> list[UOp]:
    """The numbers of the query that the thread carries."""
    mat, thread, gate = self.matrix, self.thread, self.thread < self.block_n
    row = thread//mat.M*mat.M + mat.c_row(thread%mat.M//mat.accumulator, thread%mat.accumulator)
    return [x.load_number(t*self.block_n, self.block_n, row, gate) for x in rows.each]

  def store(self, parts:list[UOp]) -> list[UOp]:
    to = self.buffer.bitcast(dtypes.float)
    return [to[(self.base*4 + i*self.block_n + self.thread).valid(self.thread < self.block_n)].store(x)
            for i, x in enumerate(shared_numbers(self.p, *parts))]

  def load(self, at:Lane) -> tuple[list[Exponent], list[UOp]]:
    """(exponents, -delta) of a lane's column of C fragments."""
    mat, units = self.matrix, self.matrix.accumulator//4
    def fragment(kind:int, kt:int) -> UOp:
      first = self.base + kind*(self.block_n//4) + (kt*mat.groups + at.h)*units
      parts = [ops.as_float(self.buffer[first + i].load()) for i in range(units)]
      while len(parts) > 1: parts = [ops.concat(a, b) for a, b in zip(parts[0::2], parts[1::2])]
      return parts[0]
    low, deltas, *high = ([fragment(kind, kt) for kt in range(self.block_n//mat.M)] for kind in range(len(numbers_of_queries(self.p))))
    return [Exponent(*xs) for xs in zip(low, *high)], deltas
