"""Online softmax over the lanes that share a query: the steps of the forward kernels between their two matrix products."""
from __future__ import annotations
import functools, itertools, math
from dataclasses import dataclass
from typing import Any, Callable
from attn.chips import Chip
from attn.chips.matrix import Matrix
from attn.kernels.parts.memory.lanes import Lane, element_sum, fragment_operands, sum_over_groups
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.statements import Carried, Optional, add_all, load_all, store_all
from attn.kernels.parts.weights.dropout import Kept
from attn.kernels.parts.weights.scores import Scores
from attn.ops import amd, common as ops
from attn.ops.softmax import (DOT, LANE, LOWEST, ONES, UNSCALED, UNPACKED, RowLanes, correct, rounded_sum, scaled_weights, sum_without_scales)
from attn.ops.stored import zero_or_nan
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# The softmax subtracts one number m, the reference, from all scores of a row. An iteration over a tile of keys does not look for the maximum of the
# scores: it computes weights P = exp2(scores - m) with the m of the iteration before. The kernel needs the sums of these weights anyway, and the sums
# show whether m is still high enough: see attn/ops/softmax.py. Each row begins with the lowest possible m. With this m the exponent of every score
# overflows, so the first iteration raises m.
#
# O is divided by the sum of the P that is multiplied by V: P rounded to 16 bits. O is therefore a weighted mean of rows of V, whatever errors the
# rounding makes. If one key outweighs all other keys, O is exactly this key's row of V. The LSE is computed from the sum of P before the rounding.
# This second sum is computed only if an LSE is written.

@dataclass(frozen=True)
class Sums:
  """Choice of the sums of P that a kernel computes for each row (before rounding P, after rounding P), and of their instructions."""
  # `kinds` names the sums (attn/ops/softmax.py), in this order: the sum of P after rounding; UNSCALED, if P includes the scales of V's rows: the sum
  # of P without the scales (the first sum then only shows whether P is too large); LANE, if an LSE is written: the sum of P before rounding.
  dtype: str
  kinds: tuple[str, ...]
  # the matrix instruction that computes the first sum, as a product of P with ones; None if the chip sums this dtype by other instructions
  matrix: Any
  dual: bool   # whether the chip issues two dot products in one cycle

  @staticmethod
  def of(arch:Chip, dtype:str, lse:bool, scaled:bool=False) -> Sums:
    """Returns which sums of P a kernel computes: after rounding; if `scaled`, also without V's scales; if `lse`, also before rounding."""
    # with `scaled`, P includes the scales of V's rows, and the kernel also computes the sum of P without them
    matrix = arch.unit.sums.get(dtype)
    if dtype in arch.unit.dots: kind = DOT
    else: kind = UNPACKED if matrix is None else ONES
    return Sums(dtype, (kind, *[UNSCALED]*scaled, *[LANE]*lse), matrix, dtype in arch.unit.dual_dots)

  def rounded(self, packed:list[list[UOp]]) -> list[UOp]:
    """Returns this lane's sums of P after rounding, one for each matrix tile of queries, given P in packed dwords."""
    # `packed` has a list for each matrix tile of queries, with a vector for each of its matrix tiles of S^T. A vector holds P rounded to 16 bits (or
    # 8), several numbers in each 32-bit element.
    def total(column:list[UOp]) -> UOp: return rounded_sum(column, self.kinds[0], self.matrix, self.dtype, rows=1)
    # With `dual` two chains of dot products run side by side: one for each matrix tile of queries, or, if there is only one tile, one for the even
    # vectors and one for the odd ones. Two dot products issue at once only if their operands lie in different register banks. The first dwords of all
    # vectors lie in the same bank. So the second chain begins with the second dword of each vector.
    chains = packed if len(packed) == 2 else [packed[0][0::2], packed[0][1::2]]
    if not self.dual or not all(chains): return [total(column) for column in packed]
    def turned_dwords(x:UOp) -> UOp: return ops.build(*[ops.extract(x, (i + 1)%ops.length(x)) for i in range(ops.length(x))])
    turned = [*map(turned_dwords, chains[1])]
    both = amd.side_by_side(ops.build(total(chains[0]), total(turned)))
    sums = [ops.extract(both, i) for i in range(2)]
    return sums if len(packed) == 2 else [ops.add(*sums)]

@dataclass(frozen=True)
class Softmax(Carried):
  """The registers of the online softmax: sums of O, m, l, and the scores and P of the iteration's tile."""
  acc: UOp           # accumulators of O^T
  m: UOp             # reference of each matrix tile of queries: the number that is subtracted from the scores
  addend: UOp        # -m*to_log2, or NaN if the rounding error of this product is too large
  l: UOp             # this lane's part of the row sums, for each kind of sum (`Sums`)
  p: UOp             # P of the current iteration, packed to 16 bits
  scores: UOp        # scores of the current iteration
  l_of_trip: UOp     # what the current iteration adds to `l`
  scales: Optional

  @staticmethod
  def create(matrix:Matrix, q_tiles:int, d_tiles:int, k_tiles:int, sums:Sums, new:Allocator) -> Softmax:
    """Returns a new state, with registers for `q_tiles` matrix tiles of queries."""
    # Each matrix tile of queries has `d_tiles` matrix tiles of O^T, and `k_tiles` matrix tiles of S^T in an iteration.
    totals = len(sums.kinds)*q_tiles
    kinds = ((q_tiles*d_tiles, ops.f32(matrix.accumulator)), (q_tiles, ops.f32(1)), (q_tiles, ops.f32(1)), (totals, ops.f32(1)),
             (q_tiles*k_tiles, ops.u32(matrix.accumulator*matrix.size//4)), (q_tiles*k_tiles, ops.f32(matrix.accumulator)), (totals, ops.f32(1)))
    scales = new.registers(k_tiles, ops.f32(matrix.accumulator)) if UNSCALED in sums.kinds else None
    acc, m, addend, l, p, scores, l_of_trip = (new.registers(n, dtype) for n, dtype in kinds)
    return Softmax(acc, m, addend, l, p, scores, l_of_trip, Optional(scales))

  def start(self, scores:Scores) -> UOp:
    begin = ((self.acc, 0.0), (self.m, LOWEST), (self.addend, math.nan if scores.natural else -LOWEST), (self.l, 0.0))
    return UOp.group(*[x[i].store(ops.splat(value, ops.length(x))) for x, value in begin for i in range(x.max_numel())])

  def addends(self, dual:bool) -> tuple[Softmax, list[UOp]]:
    """Returns (state, -m*to_log2 of each matrix tile of queries); `dual`: in neighbouring registers, for chips that issue two instructions at
    once."""
    found = load_all(self.addend)
    # `dual`: the chip issues two instructions at once if their operands are in neighbouring registers. Then two addends are moved to neighbouring
    # registers, and a single addend becomes a vector of two copies.
    if not dual: return self, found
    both = amd.side_by_side(ops.build(found[0], found[-1]))
    kept = self.after(UOp.group(*[self.addend[i].store(ops.extract(both, i)) for i in range(len(found))]))
    return kept, [kept.addend[i].load() for i in range(2)] if len(found) == 2 else [both]

  def weights(self, scores:list[UOp], addend:UOp, to_log2:float) -> list[UOp]:
    """Returns P = exp2(scores*to_log2 + addend) of a matrix tile of queries, where `addend` is -m*to_log2."""
    if ops.length(addend) == 1: return [ops.weights(x, addend, to_log2) for x in scores]
    # the first of two addends is for the first half of each vector of scores, and the second for the second half
    def exponents(x:UOp) -> UOp:
      n = ops.length(x)//2
      return ops.concat(*[ops.fma(ops.slice_(x, i*n, n), to_log2, ops.splat(ops.extract(addend, i), n)) for i in range(2)])
    return [ops.exp2(amd.side_by_side(exponents(x))) for x in scores]

  def correct(self, weights:list[list[UOp]], scores:list[list[UOp]], to_log2:float, matrix:Matrix, sums:Sums, above:float,
              do:Callable[[UOp], UOp], *before:UOp, scales:list[UOp]|None=None) -> Softmax:
    """Adds P (`weights`) to the row sums. If a sum exceeds 2^`above`, increases m and computes P, the sums and O for the new m. Returns the state."""
    # `scores` are the scores from which P was computed. A sum of P above the limit `above` (see attn/ops/softmax.py) means that the reference m of a
    # row is too low. Then m is raised, and P and the whole state are corrected for the new m. `do` adds a statement to the program; the correction
    # comes after the operations `before`. If the rows of V have `scales`, a vector for each vector of P, P is multiplied by them before it is
    # rounded.
    def packed_column(column:list[UOp]) -> list[UOp]:
      if scales is not None: column = [scaled_weights(x, scale) for x, scale in zip(column, scales)]
      return [ops.pack_weights(x, sums.dtype) for x in column]
    packed = [packed_column(column) for column in weights]
    parts = sums.rounded(packed)
    if scales is not None: parts += [sum_of_unscaled(x, y, scales, sums.dtype) for x, y in zip(packed, weights)]
    if LANE in sums.kinds: parts += [row_sum(column, matrix.wave == 64) for column in weights]
    stores = [*store_all(self.p, itertools.chain(*packed)), *store_all(self.scores, itertools.chain(*scores))]
    if self.scales.value is not None: stores += store_all(self.scales.value, scales or [])
    s = self.after(UOp.group(*stores, *store_all(self.l_of_trip, parts)))
    rows = RowLanes(1, matrix.group_steps, matrix.exchange)
    s = s.after(do(correct(s.m, s.addend, s.l, s.acc, s.p, s.scores, s.l_of_trip, *before, rows=rows, dtype=sums.dtype, sums=sums.kinds,
                           matrix=sums.matrix, scale=to_log2, above=above, scales=s.scales.value)))
    return s.after(UOp.group(*add_all(s.l, load_all(s.l_of_trip))))

  def spoiled(self, nans:list[UOp]) -> Softmax:
    """Adds `nans`, 0 or NaN for each matrix tile of queries, to the sums of P by which O is divided, and returns the state."""
    # NaN for a row that sees a key whose scale of V is NaN, otherwise 0 (`nans_of_scales`)
    q_tiles = self.m.max_numel()
    return self.after(UOp.group(*add_all(self.l, nans, range(q_tiles, 2*q_tiles))))

  def totals(self, qt:int, matrix:Matrix) -> list[UOp]:
    """Returns the row sums of P for matrix tile `qt` of queries, added over all lanes that share a query."""
    # O is divided by the first sum, and the LSE is computed from the last one; a list of one sum serves for both
    q_tiles, first = self.m.max_numel(), 0 if self.scales.value is None else 1       # with scales, the first sum only shows whether P is too large
    return [sum_over_groups(self.l[i].load(), matrix) for i in range(qt + first*q_tiles, self.l.max_numel(), q_tiles)]

  def operands(self, at:Lane, qt:int, k_tiles:int, kept:Kept, renewed:bool=False) -> list[UOp]:
    """Returns P of matrix tile `qt` of queries, after dropout, as fragments of B in O^T = V^T P^T."""
    # `renewed`: see `fragment_operands`
    return fragment_operands(at, [kept.packed(self.p[qt*k_tiles + kt].load(), kt) for kt in range(k_tiles)], renewed)

def nans_of_scales(scores:Scores, scales:list[UOp], rows:list[Row], tile:UOp, masked:bool) -> UOp:
  """Returns a vector with NaN for each of `rows` that sees a key whose scale of V is NaN, and 0 for other rows."""
  # Such a NaN reaches O, but not the LSE. `scales` has the scales of V's rows in the tile, a vector for each vector of scores.
  return sum_of_nans(scores, [zero_or_nan(x) for x in scales], rows, tile, masked)

def sum_of_nans(scores:Scores, nans:list[UOp], rows:list[Row], tile:UOp, masked:bool) -> UOp:
  """Returns a vector with NaN for each of `rows` that sees a key whose number in `nans` is NaN, and 0 for other rows."""
  # `nans` has NaN or 0 for each key of the tile, a vector for each vector of scores; `masked`: whether masks may hide keys of the tile
  seen = [scores.clear(nans, row, tile) if masked else nans for row in rows]
  # fma, not add: if rows of V share a scale, all vectors are one UOp x, and tinygrad 0.14.0 would rewrite x + x to x*2, which fails for vectors
  return ops.build(*[row_sum([functools.reduce(lambda a, b: ops.fma(a, 1.0, b), x)], False) for x in seen])

def sum_of_unscaled(packed:list[UOp], p:list[UOp], scales:list[UOp], dtype:str, rows:int=1) -> UOp:
  """Returns the sum of P over the keys for each of `rows` queries of this lane; `packed` holds P times V's scales, rounded to 16 bits."""
  # `packed` is P times `scales`, rounded to 16 bits
  total = ops.splat(0.0, rows)
  for x, y, scale in zip(packed, p, scales): total = sum_without_scales(total, x, y, scale, dtype)
  return total

def compared_scores(scores:list[UOp], scales:list[UOp], to_log2:float) -> list[UOp]:
  """Returns s + log(scale) for each score s, where `scale` belongs to the key's row of V: the logarithm of P times the scale."""
  # if P includes these scales, the softmax must subtract the largest of these numbers from the scores of a row
  return [ops.add(x, ops.mul(ops.log2(y), 1/to_log2)) for x, y in zip(scores, scales)]

def row_sum(x:list[UOp], pairs:bool) -> UOp:
  """Returns the sum of all elements of the vectors `x`. `pairs`: with instructions that add two numbers at once."""
  def tree(x:list[UOp]) -> UOp:
    while len(x) > 1: x = [ops.add(a, b) for a, b in zip(x[0::2], x[1::2])] + x[len(x)//2*2:]
    return x[0]
  total = tree(x)
  # the chip adds two numbers with one instruction: the elements are added as vectors of two, as long as possible
  if pairs: total = tree([ops.slice_(total, i, 2) for i in range(0, ops.length(total), 2)])
  return element_sum(total)
