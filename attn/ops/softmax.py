"""The rare branch of the online softmax, for all matrix units, that raises m, the numbers subtracted from the scores of a wave's rows. Begin with
`correct`."""
from __future__ import annotations
import functools, operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
import numpy as np
from attn.ops.common import f32, length
from attn.ops.language import compound
from attn.ops.numerics import IN_A_DWORD
from attn.ops.operation import Value, LocalVariable, emit, statement
from attn.tinygrad_compat import UOp

# Each row has a reference m, and P = exp2(S*scale + addend) with addend = -m*scale. No P is negative. So if a sum of P is at most a bound,
# 2^`above`, no P in the sum exceeds this bound: the row keeps its reference, and no maximum is computed. If a sum in any lane of the wave is larger,
# inf or NaN, then the wave takes the branch: the reference of every row becomes the maximum of its scores so far, the accumulators are rescaled to
# this reference, and P and its sums are computed again.
#
# If |addend| exceeded LARGE (2^14), the rounding error of the addend would show in the result of S*scale + addend. The addend of such a row is set
# to NaN. Its sums are then NaN, so every loop iteration takes the branch, and the branch subtracts the reference from the score before it multiplies
# by the scale. Every iteration with a score that is NaN or +inf takes the branch too: correct, but slow.
#
# A row that has seen no key begins with the reference LOWEST, the lowest finite number of fp32, so its addend is a huge positive number. P of a
# finite score then overflows to inf, and the wave takes the branch. P of the score -inf is 0. In some problems a score may itself be as low as
# -3e38, and P would not overflow (`Problem.wide_scores`). There the addend of a row that has seen no key is NaN, which leads to the branch too.

LARGE = 2.0**14                             # a larger |addend| (in powers of two) has a rounding error that shows in exp2
LOWEST = -float(np.finfo(np.float32).max)   # finite, and not above any finite score

@dataclass(frozen=True)
class RowLanes:
  """How a lane's vectors hold scores of several queries: parts of `rows` queries, concatenated. Lanes `steps` apart have the same queries, other
  keys."""
  rows: int
  steps: tuple[int, ...]
  # kind of instruction by which the lanes that share a row exchange values
  exchange: str = "shuffle"

def first_addend(scale:float) -> float:
  """Returns -m*scale for the m of a row that has seen no key: exp2(s*scale + result) is inf for a finite score s, and 0 for -inf."""
  return -LOWEST*min(scale, 1.0)

def by_row(c:Any, x:Value, rows:int) -> list[Value]:
  """Splits the vector `x` into `rows` vectors of equal length, one for each row."""
  n = c.length(x)//rows
  return [c.part(x, r*n, n) for r in range(rows)]

def highest(c:Any, start:Value, scores:list[Value]) -> Value:
  """Returns the maximum of `start` and of all elements of `scores`."""
  # the maxima are nested in pairs; clang makes one instruction of each pair, a maximum of three
  top = c.variable("top", start)
  for x in scores:
    for i in range(0, c.length(x), 2): c.assign(top, c.max(c.max(top.value, c.element(x, i)), c.element(x, i + 1)))
  return top.value

def raise_reference(c:Any, rows:RowLanes, m:Value, addend:Value, scores:list[Value],
                    scale:float, lift:float=0.0) -> tuple[Value, Value, list[Value], Callable[[Value], Value]]:
  """Returns (new m, -m*scale, factors for O, function from scores to P), where m, the number to subtract from scores, is each row's maximum."""
  # P = exp2((score - m)*scale). The new m is the row's largest score so far, so that the largest P is 1; if `lift` is above 0, m is lower, so that
  # the largest P is 2^lift. The addend is -m*scale, or NaN if its rounding error is too large.
  split, tops, addends, factors, nears, shifts = [by_row(c, x, rows.rows) for x in scores], [], [], [], [], []
  for r in range(rows.rows):
    old = c.let("old", c.element(m, r))
    top = highest(c, old if not lift else c.number(LOWEST), [x[r] for x in split])
    if lift: top = c.let("top", c.max(old, top - c.number(lift/scale)))
    for step in rows.steps: top = c.let("top", c.max(*c.exchange(top, step, rows.exchange)))
    found = c.let("found", -top*scale)
    factors.append(c.let("factor", c.exp2(c.let("power", (old - top)*scale))))
    far = c.let("far", ~(c.abs(found) <= LARGE))
    shifts.append(c.let("shift", c.select(far, top, c.number(0.0))))
    nears.append(c.let("rest", c.select(far, c.number(0.0), found)))
    addends.append(c.let("next", c.select(top == old, c.element(addend, r), c.select(far, c.nan, found))))
    tops.append(top)
  def weigh(x:Value) -> Value:
    each = [c.exp2(c.let("x", c.fma(y - shifts[r], c.number(scale), nears[r]))) for r, y in enumerate(by_row(c, x, rows.rows))]
    return c.let("weights", c.join(*each))
  return c.vector(*tops), c.vector(*addends), factors, weigh

def scaled(c:Any, x:Value, factors:list[Value]) -> Value:
  """Returns x, a vector of len(factors) rows of equal length, with each row multiplied by its factor."""
  if len(factors) == 1: return x*factors[0]
  return c.join(*[y*factor for y, factor in zip(by_row(c, x, len(factors)), factors)])

# Kinds of sums of P. LANE adds a lane's own elements in fp32, before they are rounded. The other kinds add P after rounding to the inputs' dtype:
# DOT by dot products of a lane's dwords with ones (the first term may be a product with a matrix of ones),
# ONES by products with a matrix of ones (on NVIDIA over all lanes that share a row),
# UNPACKED by converting a lane's own elements back to fp32.
# Two kinds are for weights that include the scales of stored rows of V (attn/ops/stored.py). UNSCALED adds the weights without the scales. FACTORS
# adds a lane's own weights with the scales in 16 bits, two at a time; this sum only shows whether the weights are too large. It is at least as large
# as each of its weights, because rounding keeps the order of numbers.
LANE, DOT, ONES, UNPACKED, UNSCALED, FACTORS = "lane", "dot", "ones", "unpacked", "unscaled", "factors"

# Weights of 8 bits. The largest P of a row is 2^LIFT: small weights then keep more of their bits. If P has grown to 2^8 (OCP's e4m3 ends at 448), or
# to 2^7 (e4m3fnuz ends at 240), its exponent has all bits set, and the reference is raised.
LIFT = {"float16": 0.0, "bfloat16": 0.0, "fp8e4m3": 4.0, "fp8e4m3fnuz": 3.0}
SMALLEST_SCALE = 2.0**-100
ALL_SET_BEFORE, SIGNS = 0x08080808, 0x80808080     # the first plus a byte has the sign bit if the byte is NaN or its exponent has all bits

def lift_of(dtype:str, scale:float) -> float:
  """Returns e, such that the largest P of a row shall be 2^e: above 0 if P is rounded to 8-bit floats, otherwise 0."""
  # To make P larger, a kernel lowers the reference by e/scale, where `scale` is the factor of the scores. So e is 0 if `scale` is so small that fp32
  # cannot hold such a difference of references.
  return LIFT[dtype] if scale > SMALLEST_SCALE else 0.0

def of_bytes(dtype:str) -> bool: return IN_A_DWORD[dtype] == 4

def packed_together(c:Any, vectors:list[Value], rows:int, dtype:str) -> Value:
  """Rounds the vectors of P, each with `rows` queries, to `dtype` and packs them into dwords; a dword has elements of one query only."""
  # a dword has elements of one row only: two 16-bit elements of one vector, or four of 8 bits, two from each of two neighbouring vectors
  if rows == 1 or not of_bytes(dtype): return c.join(*[c.pack_weights(x, dtype) for x in vectors])
  split = [by_row(c, x, rows) for x in vectors]
  return c.vector(*[c.pack_weights(c.join(*row), dtype) for pair in zip(split[0::2], split[1::2]) for row in zip(*pair)])

def too_large(c:Any, packed:list[Value]) -> Value:
  """Returns whether an 8-bit P in the dwords `packed` is NaN, or so large that m, the number subtracted from scores, must be raised."""
  words = [c.element(x, i) for x in packed for i in range(c.length(x))]
  return ~((functools.reduce(operator.or_, [x + c.word(ALL_SET_BEFORE) for x in words]) & c.word(SIGNS)) == c.word(0))

def lane_sums(c:Any, total:LocalVariable, x:Value, rows:int) -> None:
  """Adds the elements of x, a lane's P, to `total`, which has a sum for each of `rows` queries, or for one query two sums: even and odd elements."""
  # two sums of one row, so that additions are packed in pairs
  if rows == 1:
    for i in range(0, c.length(x), 2): c.assign(total, total.value + c.part(x, i, 2))
  else:
    each = [functools.reduce(operator.add, [c.element(y, i) for i in range(c.length(y))]) for y in by_row(c, x, rows)]
    c.assign(total, c.vector(*[c.element(total.value, r) + y for r, y in enumerate(each)]))

def row_totals(c:Any, total:Value, rows:int) -> Value:
  """Returns a lane's sum of P for each of `rows` rows; `total` is the result of `lane_sums`."""
  return c.element(total, 0) + c.element(total, 1) if rows == 1 else total

def add_rounded(c:Any, total:LocalVariable|None, packed:Value, kind:str, matrix:Any, dtype:str) -> LocalVariable:
  """Adds P, rounded and packed in `packed`, to a lane's sums `total`; `kind` names the instruction, e.g. DOT (dot products with ones)."""
  # DOT adds by dot products with ones, ONES by the chip's matrix instruction with a matrix of ones, UNPACKED by converting the elements back to fp32
  if kind == DOT: c.whole(packed)
  n = matrix.operand_words if kind == ONES else 1
  words = range(0, c.length(packed), n)
  if total is None and kind == DOT and matrix is not None:
    first, words = c.part(packed, 0, matrix.operand_words), words[matrix.operand_words:]
    total = c.variable("sums", c.element(c.times_ones(matrix, first, c.splat(c.number(0.0), 4), dtype), 0))
  elif total is None: total = c.variable("sums", c.splat(c.number(0.0), 4 if kind == ONES else 1))
  for i in words:
    x = c.part(packed, i, n) if n > 1 else c.element(packed, i)
    if kind == UNPACKED and of_bytes(dtype):
      four = c.let("four", c.widen_four(x, dtype))
      pair = c.let("pair", c.part(four, 0, 2) + c.part(four, 2, 2))
      added = total.value + (c.element(pair, 0) + c.element(pair, 1))
    elif kind == UNPACKED: added = total.value + c.widen(x, dtype) + c.widen(c.high_half(x), dtype)
    else: added = c.times_ones(matrix, x, total.value, dtype) if kind == ONES else c.dot_ones(x, total.value, dtype)
    c.assign(total, added)
  return total

def rounded_sums(c:Any, total:Value, kind:str, rows:int) -> Value:
  """Returns a lane's sum of rounded P for each of `rows` rows; `total` is the result of `add_rounded`."""
  # with ONES, the sum of row r is element 2*r
  return total if kind != ONES else c.vector(*[c.element(total, 2*r) for r in range(rows)])

# ***** weights that include the scales of V's rows *****

LEAST_SCALE, MOST_SCALE = 2.0**-100, 2.0**122     # a scale and its reciprocal, times a weight, are normal numbers of fp32
OF_NO_ROW = 2.0**-40     # instead of a scale that is no positive number. It is below the scale of any row of float16 numbers

def in_range(c:Any, x:Value) -> Value:
  """Returns the scales `x`. Scales that are too small, too large, zero or NaN are replaced, so that P can be multiplied and divided by every
  scale."""
  # see `stored.scale_in_range`
  def element(i:int) -> Value:
    scale = c.element(x, i)
    return c.max(c.select((scale > 0.0) & (scale <= MOST_SCALE), scale, c.number(OF_NO_ROW)), c.number(LEAST_SCALE))
  return c.vector(*map(element, range(c.length(x)))) if c.length(x) > 1 else element(0)

@dataclass(frozen=True)
class ScalesAt:
  """Where a lane finds the scales of rows of V: in registers if `apart` is 0, otherwise in shared memory."""
  # distance in shared memory from the scales for one vector of scores to those for the next one, counted in vectors of two scales
  apart: int = 0
  # If not 0, the scores have not yet been multiplied by the scales of K's rows. It is the distance from the scales of V to K's factors: the scales
  # of K times the number by which all scores are multiplied.
  factors: int = 0
  def __str__(self) -> str: return "_and_keys" if self.factors else "_in_shared" if self.apart else ""

IN_REGISTERS = ScalesAt()

@dataclass(frozen=True)
class RowScales:
  """Scales of K and V, which are stored in 8 bits. A compound operation reads from it the scales of the keys of one vector of scores."""
  # interpreter of the definition
  c: Any
  # register array with the scales of V's rows, or the place in shared memory where they begin: `at` says which
  scales: Value
  at: ScalesAt
  # rows in a vector of scores
  rows: int
  def of_v(self, i:int) -> Value:
    """Returns the scales of V for the two keys of the i-th vector of scores."""
    return self.c.read(self.scales, i*self.at.apart, 2) if self.at.apart else self.c.load(self.scales, i)
  def logarithms(self, i:int) -> Value:
    """Returns the base-2 logarithms of the scales of V for the two keys of the i-th vector of scores."""
    # a scale in shared memory may be NaN
    return self.c.rough_log2(in_range(self.c, self.of_v(i)) if self.at.apart else self.of_v(i))
  def factors(self, i:int) -> Value|None:
    """Returns the factors of K for the two keys of the i-th vector of scores, or None if the scores include K's scales."""
    return self.c.read(self.scales, i*self.at.apart + self.at.factors, 2) if self.at.factors else None
  def score(self, x:Value, i:int, scale:float) -> Value:
    """Returns `x`, the i-th vector of scores, multiplied by the scales of K, if the scores do not include them."""
    # K's factors include `scale`, the number by which all scores are multiplied later
    if (factors := self.factors(i)) is None: return x
    return self.c.let("score", with_scales(self.c, x, self.c.let("factor", factors*(1/scale)), self.rows, operator.mul))

NORMAL = {"float16": 2.0**-14, "bfloat16": 2.0**-126}     # smallest normal numbers

def with_scales(c:Any, x:Value, scales:Value, rows:int, operation:Callable[[Value, Value], Value]) -> Value:
  """Splits `x`, scores of `rows` queries, into one vector for each query, and returns operation(vector, scales) of all, concatenated."""
  each = [operation(y, scales) for y in by_row(c, x, rows)]
  return c.join(*each) if rows > 1 else each[0]

def without_scales(c:Any, packed:Value, p:Value, scales:Value, rows:int, dtype:str) -> Value:
  """Returns the sum of P for each query, after division of each element by the scale of its key; `packed` holds P times the scales of V, rounded."""
  # The sum so has the same rounding errors as the product with V. The weights `p`, before the scales and the rounding, are used where the rounding
  # made a product 0 or denormal.
  n = c.length(p)//rows
  inverse = [c.let("inverse", c.rcp(c.element(scales, e))) for e in range(n)]
  def weight(i:int) -> Value:
    word = c.element(packed, i//2)
    rounded = c.let("rounded", c.widen(c.high_half(word) if i % 2 else word, dtype))
    return c.select(rounded < NORMAL[dtype], c.element(p, i), rounded*inverse[i%n])
  each = [functools.reduce(operator.add, [weight(r*n + e) for e in range(n)]) for r in range(rows)]
  return c.vector(*each) if rows > 1 else each[0]

@compound("scaled_weights", suffix="_{rows}")
def _scaled_weights(c:Any, p:Value, scales:Value, *, rows:int) -> Value: return with_scales(c, p, scales, rows, operator.mul)
@compound("without_scales", suffix="_{rows}")
def _without_scales(c:Any, total:Value, packed:Value, p:Value, scales:Value, *, rows:int, dtype:str) -> Value:
  return total + without_scales(c, packed, p, scales, rows, dtype)

def scaled_weights(p:UOp, scales:UOp, rows:int=1) -> UOp:
  """Returns P, a vector of `rows` rows, concatenated, where each element is multiplied by the scale of its key's row of V."""
  return emit("scaled_weights", p.dtype, p, scales, rows=rows)
def sum_without_scales(total:UOp, packed:UOp, p:UOp, scales:UOp, dtype:str) -> UOp:
  """Adds the sum of P for each query to `total`. `packed` holds P times the scales of V, rounded; each element is divided by its key's scale
  first."""
  # `p` has the weights before the scales were multiplied in
  return emit("without_scales", total.dtype, total, packed, p, scales, rows=length(total), dtype=dtype)

@compound("weigh", suffix="_{count}")
def _weigh(c:Any, reference:Value, addend:Value, p:Value, scores:Value, part:Value, **how:Any) -> Value:
  return weigh_rows(c, reference, addend, p, scores, part, None, **how)

@compound("weigh_scaled", suffix="_{count}{at}")
def _weigh_scaled(c:Any, reference:Value, addend:Value, p:Value, scores:Value, part:Value, scales:Value, **how:Any) -> Value:
  return weigh_rows(c, reference, addend, p, scores, part, scales, **how)

@compound("weigh_raw", suffix="_{count}")
def _weigh_raw(c:Any, reference:Value, addend:Value, p:Value, scores:Value, part:Value, factor:Value, **how:Any) -> Value:
  return weigh_rows(c, reference, addend, p, scores, part, None, factor, **how)

def weigh_rows(c:Any, reference:Value, addend:Value, p:Value, scores:Value, part:Value, scales:Value|None, factor:Value|None=None, *, rows:RowLanes,
               dtype:str, sums:tuple[str, ...], matrix:Any, tiles:int, stride:int, count:int, together:int, scale:float,
               at:ScalesAt=IN_REGISTERS) -> Value:
  stored = None if scales is None else RowScales(c, scales, at, rows.rows)
  of_all = c.number(scale) if factor is None else c.let("of_all", factor*c.number(scale))
  def weights(t:int, i:int) -> Value:
    x, b = c.load(scores, t*stride + i), c.load(addend, t)
    by = None if stored is None else stored.factors(i)
    if by is None: by = of_all
    return c.let("weights", c.join(*[c.exp2(c.let("x", c.fma(y, by, c.element(b, r)))) for r, y in enumerate(by_row(c, x, rows.rows))]))
  def weigh_all() -> None:
    for t in range(tiles): store_weights(c, p, part, lambda i: weights(t, i), t, rows, dtype, sums, matrix, tiles, stride, count, together, stored)
  if of_bytes(dtype):     # without a reference, P of 8 bits is too large or NaN, which `correct` sees
    weigh_all()
    return c.number(0.0)
  for i in range(len(sums)*tiles): c.store(part, i, c.splat(c.inf, rows.rows))
  seen = [c.element(c.load(reference, t), r) > LOWEST for t in range(tiles) for r in range(rows.rows)]
  c.when(c.any_lane(functools.reduce(operator.or_, seen)), weigh_all)
  return c.number(0.0)

def store_weights(c:Any, p:Value, part:Value, weigh:Callable[[int], Value], t:int, rows:RowLanes, dtype:str, sums:tuple[str, ...], matrix:Any,
                  tiles:int, stride:int, count:int, together:int, stored:RowScales|None=None) -> None:
  """Computes P for tile `t` of the wave's queries, stores it to `p`, rounded to `dtype`, and stores sums of P to the registers `part`."""
  # `weigh(i)` computes P for the tile's i-th vector of scores. The tile has `stride` vectors, of which the first `count` are used. Each element of
  # `p` holds `together` vectors. If V's rows have scales (`stored`), P is multiplied by them before it is packed. `part` has a sum for each tile and
  # each kind in `sums`, such as sums in fp32 (LANE) or of P after rounding (DOT).
  total = c.variable("total", c.splat(c.number(0.0), 2)) if LANE in sums else None     # sums of even and odd elements, or of two rows
  of_factors = [c.variable("of_factors", c.word(0)) for _ in range(rows.rows)] if FACTORS in sums else []
  unscaled: LocalVariable|None = c.variable("unscaled", c.splat(c.number(0.0), rows.rows)) if UNSCALED in sums else None
  kind = next((x for x in sums if x not in (LANE, UNSCALED, FACTORS)), "")
  rounded = None
  for i in range(0, count, together):
    found = [weigh(j) for j in range(i, i + together)]
    factors = found if stored is None else [with_scales(c, x, stored.of_v(i + j), rows.rows, operator.mul) for j, x in enumerate(found)]
    packed = c.let("packed", packed_together(c, factors, rows.rows, dtype))
    c.store(p, (t*stride + i)//together, packed)
    if kind: rounded = add_rounded(c, rounded, packed, kind, matrix, dtype)
    if unscaled is not None:
      assert stored is not None
      for j, x in enumerate(found):
        words = c.part(packed, j*(n := c.length(x)//2), n)
        c.assign(unscaled, unscaled.value + without_scales(c, words, x, stored.of_v(i + j), rows.rows, dtype))
    for r, pairs in enumerate(of_factors):
      for j in range(r, c.length(packed), rows.rows): c.assign(pairs, c.add_pairs(pairs.value, c.element(packed, j), dtype))
    if total is not None:
      for x in found: lane_sums(c, total, x, rows.rows)
  if total is not None: c.store(part, sums.index(LANE)*tiles + t, row_totals(c, total.value, rows.rows))
  if of_factors:
    halves = [c.widen(x.value, dtype) + c.widen(c.high_half(x.value), dtype) for x in of_factors]
    c.store(part, sums.index(FACTORS)*tiles + t, c.vector(*halves))
  if rounded is not None: c.store(part, sums.index(kind)*tiles + t, rounded_sums(c, rounded.value, kind, rows.rows))
  if unscaled is not None: c.store(part, sums.index(UNSCALED)*tiles + t, unscaled.value)

def scaled_score(c:Any, x:Value, factor:Value) -> Value:
  """Returns the vector x of scores, multiplied by `factor`, the product of the scales of q and k."""
  return c.let("score", x*factor)

@compound("correct", suffix="_{count}")
def _correct(c:Any, reference:Value, addend:Value, l:Value, acc:Value, p:Value, scores:Value, part:Value, **how:Any) -> Value:
  return correct_rows(c, reference, addend, l, acc, p, scores, part, None, **how)

@compound("correct_scaled", suffix="_{count}{at}")
def _correct_scaled(c:Any, reference:Value, addend:Value, l:Value, acc:Value, p:Value, scores:Value, part:Value, scales:Value, **how:Any) -> Value:
  return correct_rows(c, reference, addend, l, acc, p, scores, part, scales, **how)

@compound("correct_raw", suffix="_{count}")
def _correct_raw(c:Any, reference:Value, addend:Value, l:Value, acc:Value, p:Value, scores:Value, part:Value, factor:Value, **how:Any) -> Value:
  return correct_rows(c, reference, addend, l, acc, p, scores, part, None, factor, **how)

def correct_rows(c:Any, reference:Value, addend:Value, l:Value, acc:Value, p:Value, scores:Value, part:Value, scales:Value|None,
                 factor:Value|None=None, *, rows:RowLanes, dtype:str, sums:tuple[str, ...], matrix:Any, tiles:int, stride:int, count:int, accs:int,
                 together:int, scale:float, above:float, at:ScalesAt=IN_REGISTERS) -> Value:
  stored = None if scales is None else RowScales(c, scales, at, rows.rows)
  def score(t:int, i:int) -> Value:
    x = c.load(scores, t*stride + i)
    if factor is not None: return scaled_score(c, x, factor)
    return x if stored is None else stored.score(x, i, scale)
  def compared(t:int) -> list[Value]:
    # The scores of tile t that compete to be the new reference. If P includes the scales of V's rows, the logarithms of the scales are added, so that
    # the largest product of P and scale counts.
    found = [score(t, i) for i in range(count)]
    if stored is None: return found
    logs = [c.let("log", stored.logarithms(i)*(1/scale)) for i in range(count)]
    return [c.let("with_scale", with_scales(c, x, log, rows.rows, operator.add)) for x, log in zip(found, logs)]
  def grown(t:int) -> Value:
    # True if the reference of any query of tile t must be raised: for 8 bits by P itself, else by sums of P or, if `above` is 0, by scores
    if of_bytes(dtype): return too_large(c, [c.load(p, (t*stride + i)//together) for i in range(0, count, together)])
    total = [c.element(c.load(part, t), r) for r in range(rows.rows)]
    if above: return functools.reduce(operator.or_, [~(x <= 2.0**above) for x in total])
    old = c.let("old", c.load(reference, t))
    return ~(total[0] < c.inf) | (highest(c, old, compared(t)) > old)
  def correct_all() -> None:
    for t in range(tiles): correct_tile(t)
  def correct_tile(t:int) -> None:
    m, next_addend, factors, weigh = raise_reference(c, rows, c.load(reference, t), c.load(addend, t), compared(t), scale, lift_of(dtype, scale))
    c.store(addend, t, next_addend)
    c.store(reference, t, m)
    for i in range(t, len(sums)*tiles, tiles): c.store(l, i, scaled(c, c.load(l, i), factors))
    for i in range(t*accs, (t + 1)*accs): c.store(acc, i, scaled(c, c.load(acc, i), factors))
    store_weights(c, p, part, lambda i: weigh(score(t, i)), t, rows, dtype, sums, matrix, tiles, stride, count, together, stored)
  c.when(c.any_lane(functools.reduce(operator.or_, [grown(t) for t in range(tiles)])), correct_all)
  return c.number(0.0)

def weigh(reference:UOp, addend:UOp, p:UOp, scores:UOp, part:UOp, *after:UOp, rows:RowLanes, dtype:str, sums:tuple[str, ...], matrix:Any,
          scale:float, scales:UOp|None=None, at:ScalesAt=IN_REGISTERS, factor:UOp|None=None) -> UOp:
  """Returns a statement that computes P of one tile of keys, stores P to `p`, rounded to `dtype`, and stores the row sums of P to `part`."""
  # `part` gets one sum for each constant in `sums`: LANE is the fp32 sum of P, DOT the sum of P after rounding. `correct` describes all operands. If
  # no row of the wave has seen a key, there is no reference yet, and the sums become inf, or P of 8 bits too large. `correct`, which runs next, takes
  # this as a sign to find a reference and to compute P again.
  tiles, together = reference.max_numel(), scores.max_numel()//p.max_numel()
  stride = scores.max_numel()//tiles
  name, operands = "weigh", [x[0] for x in (reference, addend, p, scores, part)]
  how: dict[str, Any] = dict(rows=rows, dtype=dtype, sums=sums, matrix=matrix, tiles=tiles, stride=stride, count=stride, together=together,
                             scale=scale)
  if scales is not None: name, operands, how = "weigh_scaled", [*operands, scales if at.apart else scales[0]], how | {"at": at}
  if factor is not None: name, operands = "weigh_raw", [*operands, factor]
  return statement(name, *operands, *after, **how)

def correct(reference:UOp, addend:UOp, l:UOp, acc:UOp, p:UOp, scores:UOp, part:UOp, *after:UOp, rows:RowLanes, dtype:str,
            sums:tuple[str, ...], matrix:Any, scale:float, above:float, first:int=0, count:int|None=None, scales:UOp|None=None,
            at:ScalesAt=IN_REGISTERS, factor:UOp|None=None) -> UOp:
  """Returns a statement that, if a sum of P in `part` is too large, inf or NaN, increases `reference`, the number subtracted from scores, and
  recomputes P."""
  # A sum of P in a lane is too large if it exceeds 2^above (`above` > 0), or if a score exceeds its query's reference (`above` = 0); with P of 8
  # bits, an element of P may be too large as well. Then the reference of every query of the wave becomes the query's largest score so far (for 8
  # bits a number below it, see `lift_of`). The correction is one statement, because tinygrad has no branch around stores to registers.
  #
  # The operands are register arrays, with equally many elements for each of the wave's tiles of queries:
  #   reference, addend: of each query (P = exp2(score*scale + addend))
  #   l: the sums of P over all iterations, for each kind in `sums`: LANE adds P in fp32; DOT, ONES and UNPACKED add P after rounding
  #   acc: the accumulators of O
  #   p: P of this iteration, packed to `dtype`
  #   scores: the scores of this iteration. `count` vectors of each tile, from `first` on, are used
  #   part: the sums of P of this iteration, for each kind in `sums`
  #   scales: if P includes the scales of V's rows, these scales, for the keys of each vector of scores. If they lie in shared memory, `scales`
  #     indexes shared memory at the first vector. `at` says where they lie, and whether those of K's rows do, too
  #   factor: the scales of q and k of 8-bit floats, multiplied, if the scores have not yet been multiplied by them
  tiles, together = reference.max_numel(), scores.max_numel()//p.max_numel()
  stride = scores.max_numel()//tiles
  name, operands = "correct", [x[0] for x in (reference, addend, l, acc)] + [p[first//together], scores[first], part[0]]
  how: dict[str, Any] = dict(rows=rows, dtype=dtype, sums=sums, matrix=matrix, tiles=tiles, stride=stride, count=stride if count is None else count,
                             accs=acc.max_numel()//tiles, together=together, scale=scale, above=above)
  if scales is not None: name, operands, how = "correct_scaled", [*operands, scales if at.apart else scales[first]], how | {"at": at}
  if factor is not None: name, operands = "correct_raw", [*operands, factor]
  return statement(name, *operands, *after, **how)

# ***** the correction where several waves share a row's scores: all of them raise its reference together *****

@compound("raised")
def _raised(c:Any, reference:Value, top:Value, *, rows:int, scale:float, above:float) -> Value:
  def each(r:int) -> Value:
    old, new = c.let("old", c.element(reference, r)), c.let("top", c.element(top, r))
    return c.select(~((new - old)*scale <= above) | (old == LOWEST), new, old)
  return c.vector(*map(each, range(rows))) if rows > 1 else each(0)

@compound("weights_from", suffix="_{rows}")
def _weights_from(c:Any, scores:Value, reference:Value, *, rows:int, scale:float) -> Value:
  return c.join(*[c.exp2((y - c.element(reference, r))*scale) for r, y in enumerate(by_row(c, scores, rows))])

@compound("rescale")
def _rescale(c:Any, acc:Value, factors:Value, *, rows:int, tiles:int, accs:int) -> Value:
  found = [[c.element(c.load(factors, t), r) for r in range(rows)] for t in range(tiles)]
  def rescale_all() -> None:
    for i in range(tiles*accs): c.store(acc, i, scaled(c, c.load(acc, i), found[i//accs]))
  c.when(c.any_lane(functools.reduce(operator.or_, [~(x == 1.0) for row in found for x in row])), rescale_all)
  return c.number(0.0)

def raised(reference:UOp, top:UOp, scale:float, above:float) -> UOp:
  """Returns each row's new reference: its maximum `top`, if exp2((top - reference)*scale) exceeds 2^above, otherwise `reference`."""
  # a row that has seen no key before gets `top`, too
  return emit("raised", reference.dtype, reference, top, rows=length(reference), scale=scale, above=above)
def weights_from(scores:UOp, reference:UOp, scale:float) -> UOp:
  """Returns P = exp2((scores - reference[r])*scale) for each row r; `scores` is one vector that holds rows of equal length, concatenated."""
  # the subtraction comes first, so that large scores lose no accuracy
  return emit("weights_from", scores.dtype, scores, reference, rows=length(reference), scale=scale)
def rescale(acc:UOp, factors:UOp, *after:UOp) -> UOp:
  """Returns a statement that multiplies each row of O, in the accumulators `acc`, by its factor, unless all factors in the wave are 1."""
  tiles = factors.max_numel()
  return statement("rescale", acc[0], factors[0], *after, rows=length(factors[0]), tiles=tiles, accs=acc.max_numel()//tiles)

@compound("lane_sum")
def _lane_sum(c:Any, total:Value, x:Value, *, rows:int) -> Value:
  sums = c.variable("sums", total)
  lane_sums(c, sums, x, rows)
  return sums.value

def lane_sum(total:UOp, p:UOp, rows:int) -> UOp:
  """Adds a lane's P to its sums `total`, one for each of `rows` queries; for one query there are two sums, of even and of odd elements."""
  return emit("lane_sum", total.dtype, total, p, rows=rows)

@compound("rounded_sum")
def _rounded_sum(c:Any, total:Value, packed:Value, *, kind:str, matrix:Any, dtype:str) -> Value:
  return add_rounded(c, c.variable("sums", total), packed, kind, matrix, dtype).value

@compound("first_sum")
def _first_sum(c:Any, packed:Value, *, kind:str, matrix:Any, dtype:str) -> Value: return add_rounded(c, None, packed, kind, matrix, dtype).value

@compound("row_sums", inline=True)
def _row_sums(c:Any, total:Value, *, kind:str, rows:int) -> Value: return rounded_sums(c, total, kind, rows)

def rounded_sum(packed:list[UOp], kind:str, matrix:Any, dtype:str, rows:int, zero:UOp|None=None) -> UOp:
  """Returns a sum for each of `rows` rows of P, which is rounded to `dtype` and packed into dwords; `kind` names the instruction, e.g. DOT."""
  # `kind` says how to add (see `add_rounded`); the sums begin with the UOp of zeros `zero`, and are computed after it
  how = {"kind": kind, "matrix": matrix, "dtype": dtype}
  if zero is None: zero, packed = emit("first_sum", f32(4 if kind == ONES else 1), packed[0], **how), packed[1:]
  total = functools.reduce(lambda l, x: emit("rounded_sum", l.dtype, l, x, **how), packed, zero)
  return emit("row_sums", f32(rows), total, kind=kind, rows=rows)
