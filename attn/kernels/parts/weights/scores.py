"""Turns raw scores Q K^T into the input of the softmax. First the problem's terms (bias, softcap, ALiBi: attn/score) change the scores, then masks
hide some of them.

Scores are exponents, and leave this file in one of three bases. Without a term they stay raw: one fma multiplies a raw score by softmax_scale *
log2(e) and subtracts the number that the softmax subtracts from the row's scores. After terms they are in base 2: multiplied by log2(e), in fp32, so
that P = 2^(score - m). For float32 inputs the rounding of this multiplication would be too coarse. The scores are then in base e (`natural`): P =
e^(score - m), with the roundings of the textbook formula, the same in forward and backward. Wide scores (Problem.wide_scores: scores as large as fp32
allows) are in base e, too, because a caller's bias may be the least float32, and this number times log2(e) overflows."""
from __future__ import annotations
import functools, math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from attn.kernels.parts.memory.lanes import Lane, MmaLane, ThreadPlace
from attn.kernels.parts.program.blocks import Descending, TileList
from attn.ops import common as ops
from attn.problem import Problem
from attn.score.masks import first_seen, last_seen, scattered, seen_each
from attn.score.places import Walk
from attn.score.term import BASE2, NATURAL, Fragment, Row, ScoreTerm, ScoreUnit, one, raw_unit
from attn.score.terms import score_terms
from attn.tinygrad_compat import UOp
from attn.values import LOG2E

NEG_INF = -math.inf

@dataclass(frozen=True)
class Scores:
  """Scores of one row that the workgroup owns, as a lane holds them in one iteration of the loop over tiles: a list of vectors. The rows over which
  the workgroup loops are the walked rows: keys if it owns queries, queries if it owns keys. Element n, counted over all vectors, is the score of
  walked row `tile*block_n + matrix.key_of(h, n)`."""
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
  def unit(self) -> ScoreUnit:
    """Unit of the scores after all score terms (softcap, ALiBi, bias) are applied: base 2, base e, or raw scores."""
    return raw_unit(self.p) if self.raw else self.unit_of_terms
  @property
  def unit_of_terms(self) -> ScoreUnit: return NATURAL if self.natural else BASE2
  @property
  def to_log2(self) -> float:
    """Factor by which the softmax multiplies scores to get exponents of 2."""
    return LOG2E if self.natural else self.unit.base2
  @property
  def to_natural(self) -> float: return 1.0 if self.natural else self.unit.natural
  @property
  def walked(self) -> list[tuple[int, ...]]:
    """Rows of the tile to which the elements of a lane's scores belong, as indices counted from the first row of the tile, one tuple for each vector.
    The indices are those of lane group 0 (lane group h is the lanes that hold the same rows of an accumulator). In lane group h each index is larger
    by h*matrix.block, the number of neighbouring rows that a lane holds."""
    mat = self.at.matrix
    return [tuple(mat.key_of(0, kt*mat.row_part + i) for i in range(mat.row_part)) for kt in range(self.block_n//mat.tile_keys)]
  def of_head(self, head:UOp) -> Scores:
    return replace(self, first=replace(self.first, head=head))
  def row(self, place:UOp) -> UOp:
    """Converts the position of a row in the workgroup's loop to the row's index in the sequence. The two differ if the loop has an `order`: it then
    leaves tiles out, or takes them in descending order."""
    return place if self.order is None else self.order.row(place)
  def tile(self, number:UOp) -> UOp:
    """Converts the index of an iteration to the index of the tile of the sequence that this iteration computes. The two differ if the loop has an
    `order`: it then leaves tiles out, or takes them in descending order."""
    return number if self.order is None else self.order.row(number*self.block_n)//self.block_n
  def begin(self, tile:UOp) -> UOp: return self.tile(tile)*self.block_n + self.at.h*self.at.matrix.block

  def fragment(self, row:Row, tile:UOp) -> Fragment:
    """Returns a `Fragment`: the query and the key of each of a row's scores in a tile. Score terms (softcap, ALiBi, bias) compute their values from
    it."""
    mat = self.at.matrix
    return Fragment(self.p, self.given, row, self.first, self.walk, self.tile(tile), self.block_n, self.at.h, mat.block, self.walked, mat.tile_keys,
                    self.unit_of_terms, self.limits(row, tile))

  def modify(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Applies the problem's score terms (softcap, ALiBi, bias) to raw scores. Without terms, multiplies the scores by softmax_scale if `natural` is
    set, and otherwise returns them unchanged."""
    return self.final(self.steps(x, row, tile))

  def final(self, steps:list[list[UOp]]) -> list[UOp]:
    """Returns the scores that the softmax uses, before masks are applied: the last of the `steps` (see the method `steps`), in base e if `natural` is
    set."""
    return [ops.mul(y, self.unit.natural) for y in steps[-1]] if self.natural and self.raw else steps[-1]

  def steps(self, x:list[UOp], row:Row, tile:UOp) -> list[list[UOp]]:
    """Returns a list with the raw scores `x`, and then the scores after each score term (softcap, ALiBi, bias) in turn."""
    found, at, unit = [x], self.fragment(row, tile), raw_unit(self.p)
    for term in self.terms:
      found.append(term.value(found[-1], at, unit))
      unit = at.unit
    return found

  def derivatives(self, steps:list[list[UOp]], row:Row, tile:UOp) -> dict[str, list[UOp]]:
    """Returns by name, for each score term (softcap, ALiBi, bias), the derivative of the term's result with respect to its input. `steps` has the
    scores that the method of this name returned. Leaves out terms whose derivative is always 1."""
    found, at, unit = dict[str, list[UOp]](), self.fragment(row, tile), raw_unit(self.p)
    for term, before, after in zip(self.terms, steps, steps[1:]):
      assert term.derivative is not None
      if term.derivative is not one: found[term.name] = term.derivative(before, after, at, unit)
      unit = at.unit
    return found

  def mask(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Replaces scores by -inf where the key or query does not exist, or where the query does not see the key."""
    return self._seen(self._beyond(x, row, tile, ops.mask_above, ops.mask_beyond), row, tile, NEG_INF)
  def clear(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Replaces elements of `x` by 0 where the key or query does not exist, or where the query does not see the key."""
    return self._seen(self._beyond(x, row, tile, ops.clear_above, ops.clear_beyond), row, tile, 0.0)

  def limits(self, row:Row, tile:UOp) -> tuple[UOp|None, UOp]:
    """Returns the first and the last column of a tile that a row sees, counted from the lane's first column. A column is a key if the row is a query,
    and a query if the row is a key. The first is None if masks hide no columns at the beginning of a row."""
    first, here = first_seen(self.walk, row.index), self.begin(tile)
    return None if first is None else first - here, last_seen(self.walk, row.index) - here

  def seen_by(self, first:UOp, last:UOp, tile:UOp) -> UOp:
    """Returns whether some row from `first` to `last` may see a column of a tile. A column is a key if rows are queries, and a query if rows are
    keys."""
    begin, first_column = self.tile(tile)*self.block_n, first_seen(self.walk, first)
    seen = begin <= last_seen(self.walk, last)
    return seen if first_column is None else seen & (first_column < begin + self.block_n)

  def _beyond(self, x:list[UOp], row:Row, tile:UOp, of_above:Callable[..., UOp], of_beyond:Callable[..., UOp]) -> list[UOp]:
    if not self.cut: return x
    first, last = self.limits(row, tile)
    if first is None: return [of_above(y, last, rows) for y, rows in zip(x, self.walked)]
    return [of_beyond(y, first, last, rows) for y, rows in zip(x, self.walked)]

  def _seen(self, x:list[UOp], row:Row, tile:UOp, hidden:float) -> list[UOp]:
    """Replaces elements by `hidden` where the caller's mask_mod hides the score. mask_mod may hide any score of a tile."""
    if (seen := seen_each(self.fragment(row, tile))) is None: return x
    return [ops.select_each(conditions, y, hidden) for conditions, y in zip(seen, x)]

  @property
  def in_place(self) -> bool:
    """Returns whether masks can be applied inside the registers that already hold the raw scores (see `masks`), without a copy. This needs a problem
    without score terms (softcap, ALiBi, bias) and without a mask_mod that is computed for every score."""
    return self.raw and not scattered(self.p)

  def masks(self, scores:UOp, rows:list[Row], tile:UOp, *done:UOp) -> list[UOp]:
    """Returns statements that mask the raw scores of two rows, in the registers that hold the scores. The statements come after the operations
    `done`, and may run in any order."""
    of_rows = [self.limits(row, tile) for row in rows]
    limits = {"above": [last for _, last in of_rows], "below": [first for first, _ in of_rows if first is not None]}
    return [ops.mask_rows(scores, each, side, self.walked[0], self.at.matrix.tile_keys, *done) for side, each in limits.items() if each]

  def finished(self, tiles:list[UOp], rows:list[Row], tile:UOp, masked:bool) -> list[UOp]:
    """Turns the raw scores of `rows`, which the vectors `tiles` hold, into the input of the softmax: applies the score terms (softcap, ALiBi, bias),
    and if `masked` the masks. In each vector the elements of one row lie before those of the next row."""
    if self.raw and not masked and not self.natural: return tiles
    n = ops.length(tiles[0])//len(rows)
    parts = [[ops.slice_(y, i*n, n) for y in tiles] for i in range(len(rows))]
    parts = [self.modify(x, row, tile) for x, row in zip(parts, rows)]
    if masked: parts = [self.mask(x, row, tile) for x, row in zip(parts, rows)]
    return parts[0] if len(rows) == 1 else [ops.concat(low, high) for low, high in zip(*parts)]
