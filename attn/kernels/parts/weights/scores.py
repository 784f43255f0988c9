"""Turns raw scores Q K^T into the input of the softmax: the problem's terms (bias, softcap, ALiBi) change the scores, then masks hide some."""
from __future__ import annotations
import functools, math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from attn.functions.symbols import KEY, tensor_of
from attn.kernels.parts.memory.lanes import Lane, MmaLane, ThreadPlace
from attn.kernels.parts.program.blocks import Descending, TileList
from attn.ops import common as ops
from attn.ops.operation import integer
from attn.ops.pairs import PairCondition, PairOperands, pair_condition
from attn.problem import Problem
from attn.score.lifted import Lifted
from attn.score.masks import first_seen, last_seen, scattered, seen_each
from attn.score.places import Walk
from attn.score.term import BASE2, NATURAL, Fragment, Row, ScoreTerm, ScoreUnit, one, raw_unit
from attn.score.terms import score_terms
from attn.tinygrad_compat import UOp, dtypes
from attn.values import LOG2E

# Scores are exponents, and this module returns them in one of three bases. Without a term they stay raw: one fma multiplies a raw score by
# softmax_scale * log2(e) and subtracts the number that the softmax subtracts from the row's scores. After terms they are in base 2: multiplied by
# log2(e), in fp32, so that P = 2^(score - m). For float32 inputs the rounding of this multiplication would be too coarse. The scores are then in base
# e (`natural`): P = e^(score - m), with the roundings of the textbook formula, the same in forward and backward. Wide scores (Problem.wide_scores:
# scores as large as fp32 allows) are in base e, too, because a caller's bias may be the lowest float32, and this number times log2(e) overflows.

NEG_INF = -math.inf

@dataclass(frozen=True)
class Scores:
  """The scores that this lane holds, of one query with a tile of keys (or one key with a tile of queries), and the score terms and masks."""
  # The scores form a list of vectors. The walked rows are keys if the workgroup owns queries, and queries if it owns keys. Element n, counted over
  # all vectors, is the score of walked row `tile*block_n + matrix.key_of(h, n)`.
  p: Problem
  at: Lane|MmaLane|ThreadPlace
  block_n: int
  walk: Walk
  first: Row         # the workgroup's first head and first row (row 0 where a tile has rows of several heads); the same in the whole workgroup
  given: Mapping[str, UOp]   # the kernel's tensors by name, among them all that terms and dropout read
  natural: bool = False      # whether terms return scores in base e, P = e^(score - m), instead of base 2
  order: TileList|Descending|None = None      # the order in which the workgroup loops over tiles; None: ascending, without gaps
  cut: bool = True           # whether the interval of a row may begin or end inside a tile. If not, only mask_mod hides scores

  @functools.cached_property
  def terms(self) -> tuple[ScoreTerm, ...]: return score_terms(self.p)
  @property
  def raw(self) -> bool: return not self.terms
  @property
  def unchanged(self) -> bool:
    """Whether the softmax gets raw scores, which nothing changes but masks."""
    return self.raw and not self.natural
  @property
  def unit(self) -> ScoreUnit:
    """Form of the scores after all score terms: exponents of 2, exponents of e, or raw Q K^T without softmax_scale."""
    return raw_unit(self.p) if self.raw else self.unit_of_terms
  @property
  def unit_of_terms(self) -> ScoreUnit: return NATURAL if self.natural else BASE2
  @property
  def to_log2(self) -> float:
    """Factor by which the scores that the softmax gets are multiplied to become exponents of 2."""
    return LOG2E if self.natural else self.unit.base2
  @property
  def to_natural(self) -> float: return 1.0 if self.natural else self.unit.natural
  @property
  def walked(self) -> list[tuple[int, ...]]:
    """Indices in a tile of the keys (or queries) whose scores lane 0 holds, one tuple for each vector of scores; other lanes add an offset."""
    # in lane group h each index is larger by h*matrix.block, because a lane holds matrix.block neighbouring rows
    mat = self.at.matrix
    return [tuple(mat.key_of(0, kt*mat.row_part + i) for i in range(mat.row_part)) for kt in range(self.block_n//mat.tile_keys)]
  def of_head(self, head:UOp) -> Scores:
    return replace(self, first=replace(self.first, head=head))
  def row(self, place:UOp) -> UOp:
    """Returns the index in the sequence of row number `place` of the workgroup's loop, which may leave out or reverse tiles."""
    # `place` itself unless the loop leaves tiles out or takes them in descending order
    return place if self.order is None else self.order.row(place)
  def tile(self, number:UOp) -> UOp:
    """Returns the index in the sequence of the tile that iteration `number` of the workgroup's loop computes."""
    # `number` itself unless the loop leaves tiles out or takes them in descending order
    return number if self.order is None else self.order.row(number*self.block_n)//self.block_n
  def begin(self, tile:UOp) -> UOp: return self.tile(tile)*self.block_n + self.at.h*self.at.matrix.block

  def fragment(self, row:Row, tile:UOp) -> Fragment:
    """Returns, for score terms and masks, which query and which key each of this lane's scores belongs to."""
    mat = self.at.matrix
    return Fragment(self.p, self.given, row, self.first, self.walk, self.tile(tile), self.block_n, self.at.h, mat.block, self.walked, mat.tile_keys,
                    self.unit_of_terms, self.limits(row, tile))

  def modify(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Returns the raw scores `x` of a row after the problem's score terms (softcap, ALiBi, bias)."""
    # without terms: times softmax_scale if `natural` is set, and unchanged otherwise
    return self.final(self.steps(x, row, tile))

  def final(self, steps:list[list[UOp]]) -> list[UOp]:
    """Returns the last of `steps`, lists of scores that the method `steps` returned, as input of the masks and the softmax."""
    if not (self.natural and self.raw): return steps[-1]
    # without score terms the last entry is the raw scores
    return [ops.mul(y, self.unit.natural) for y in steps[-1]]

  def steps(self, x:list[UOp], row:Row, tile:UOp) -> list[list[UOp]]:
    """Returns the raw scores `x` of a row, then the scores after the first score term (softcap, ALiBi, bias, ...), after the second, and so on."""
    found, at, unit = [x], self.fragment(row, tile), raw_unit(self.p)
    for term in self.terms:
      found.append(term.value(found[-1], at, unit))
      unit = at.unit
    return found

  def derivatives(self, steps:list[list[UOp]], row:Row, tile:UOp) -> dict[str, list[UOp]]:
    """Returns {name of the score term: derivative of its output with respect to its input, at each score}."""
    # `steps` is what the method `steps` returned; terms whose derivative is always 1 are left out
    found, at, unit = dict[str, list[UOp]](), self.fragment(row, tile), raw_unit(self.p)
    for term, before, after in zip(self.terms, steps, steps[1:]):
      assert term.derivative is not None
      if term.derivative is not one: found[term.name] = term.derivative(before, after, at, unit)
      unit = at.unit
    return found

  def mask(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Returns the scores `x` of a row, with -inf in place of scores that a mask hides, or whose query or key does not exist."""
    return self._seen(self._beyond(x, row, tile, ops.mask_above, ops.mask_beyond), row, tile, NEG_INF)
  def clear(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Returns `x`, such as P of a row, with 0 in place of elements that a mask hides, or whose query or key does not exist."""
    return self._seen(self._beyond(x, row, tile, ops.clear_above, ops.clear_beyond), row, tile, 0.0)

  def limits(self, row:Row, tile:UOp) -> tuple[UOp|None, UOp]:
    """Returns (first, last) column that a row sees, both minus this lane's first column in the tile. The first is None if no mask hides earlier
    columns."""
    # Columns are keys if the row is a query, and queries if the row is a key. The first is None if no mask hides columns at the beginning of a row.
    first, here = first_seen(self.walk, row.index), self.begin(tile)
    return None if first is None else first - here, last_seen(self.walk, row.index) - here

  def seen_by(self, first:UOp, last:UOp, tile:UOp) -> UOp:
    """Returns whether masks may leave a score visible in the rows `first` to `last` of the tile; if false, masks hide all these scores."""
    # columns are keys if rows are queries, and queries if rows are keys
    begin, first_column = self.tile(tile)*self.block_n, first_seen(self.walk, first)
    seen = begin <= last_seen(self.walk, last)
    return seen if first_column is None else seen & (first_column < begin + self.block_n)

  def _beyond(self, x:list[UOp], row:Row, tile:UOp, of_above:Callable[..., UOp], of_beyond:Callable[..., UOp]) -> list[UOp]:
    if not self.cut: return x
    first, last = self.limits(row, tile)
    if first is None: return [of_above(y, last, rows) for y, rows in zip(x, self.walked)]
    return [of_beyond(y, first, last, rows) for y, rows in zip(x, self.walked)]

  def _seen(self, x:list[UOp], row:Row, tile:UOp, hidden:float) -> list[UOp]:
    # mask_mod may hide any scores of a tile: their elements of x become `hidden`
    if (seen := seen_each(self.fragment(row, tile))) is None: return x
    return [ops.select_each(conditions, y, hidden) for conditions, y in zip(seen, x)]

  @functools.cached_property
  def condition(self) -> PairCondition|None:
    """The mask_mod as a `PairCondition`, if the kernel can compute it behind a branch by the operations of attn/ops/pairs.py, otherwise None."""
    # None if the workgroup loops over no list of tiles of keys, or if these operations do not have the mask's arithmetic
    if self.p.mask_mod is None or not isinstance(self.order, TileList) or len(scattered(self.p)) > 1: return None
    if self.walk.over != "keys" or (found := pair_condition(self.p.mask_mod.value, KEY)) is None: return None
    fits = all(4*math.prod(int(n) for n in tensor_of(u).shape) <= ops.MAX_RECORDS for u in found.loaded)
    return found if fits else None
  def pairs(self, rows:list[Row], tile:UOp) -> PairOperands:
    """Returns the operands with which an operation of attn/ops/pairs.py evaluates the mask_mod for the scores of two `rows` in a tile."""
    assert self.condition is not None
    at = [replace(self.fragment(row, tile), columns=[self.walked[0][:1]]) for row in rows]
    lifted = [Lifted(x, f"mask_mod={self.p.mask_mod}") for x in at]
    def numbers(x:Lifted, us:tuple[UOp, ...]) -> list[UOp]: return [x.each(u)[0][0] for u in us]
    limits = [{name: x for name, x in zip(("first", "last"), y.limits) if self.cut and x is not None} for y in at]
    low, high = ([integer(x) for x in y.values()] for y in limits)
    of_low, of_high = ([x.cast(dtypes.int) for x in numbers(y, self.condition.rows)] for y in lifted)
    columns = [column - self.walked[0][0] for part in self.walked for column in part]
    return PairOperands(self.condition, lifted[0].first, (of_low, of_high), (low, high), tuple(limits[0]),
                 [x.src[0] for x in numbers(lifted[0], self.condition.loaded)], tuple(columns))

  @property
  def in_place(self) -> bool:
    """Whether masks can overwrite the raw scores in their registers, so that no copy of the scores is needed."""
    # needs a problem without score terms and without a mask_mod that is computed for every score
    return self.raw and not scattered(self.p)

  def masks(self, scores:UOp, rows:list[Row], tile:UOp, *done:UOp) -> list[UOp]:
    """Returns statements that overwrite hidden scores of two rows with -inf in the registers `scores`, after the operations `done`."""
    # the statements are independent of each other
    of_rows = [self.limits(row, tile) for row in rows]
    limits = {"above": [last for _, last in of_rows], "below": [first for first, _ in of_rows if first is not None]}
    return [ops.mask_rows(scores, each, side, self.walked[0], self.at.matrix.tile_keys, *done) for side, each in limits.items() if each]

  def finished(self, tiles:list[UOp], rows:list[Row], tile:UOp, masked:bool) -> list[UOp]:
    """Returns the softmax's input: raw scores changed by the score terms (softcap, ALiBi, bias), with -inf for hidden scores if `masked`."""
    # `tiles` are vectors of raw scores. Each vector has elements of all `rows`, one row after another. The result has the same form.
    if self.unchanged and not masked: return tiles
    n = ops.length(tiles[0])//len(rows)
    parts = [[ops.slice_(y, i*n, n) for y in tiles] for i in range(len(rows))]
    parts = [self.modify(x, row, tile) for x, row in zip(parts, rows)]
    if masked: parts = [self.mask(x, row, tile) for x, row in zip(parts, rows)]
    return parts[0] if len(rows) == 1 else [ops.concat(low, high) for low, high in zip(*parts)]
