"""From raw scores Q K^T to what the softmax takes: softcap, ALiBi, bias, then the masks.

Without the first three, scores stay raw: the softmax takes differences first and folds softmax_scale * log2(e) in with its fma. With any of them,
scores are mapped to base-2 logarithms here, in fp32, and the softmax works on those with a factor of 1. Where inputs are float32 that is not exact
enough: there they become `natural` logarithms before they are masked, rounded as the textbook's are, in both passes alike.
"""
from __future__ import annotations
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.blocks import Walk
from attn.kernels.parts.lanes import Lane, MmaLane, ThreadPlace
from attn.kernels.parts.rows import flat
from attn.ops import common as ops
from attn.problem import BYTES, Problem
from attn.tinygrad_compat import UOp

LOG2E, LN2 = math.log2(math.e), math.log(2)
NEG_INF = -math.inf
SMALL_CAP = 64.0           # a softcap up to this has an error of 1e-5 at most by the short formula: less than P's rounding to 16 bits
MAX_RECORDS = 0x7ffffff0   # bytes of the largest range of a buffer descriptor

@dataclass(frozen=True)
class Row:
  """A query of one head, as a lane has it, or a key where lanes are keys; `there` says whether it exists (the last block may reach beyond them)."""
  batch: UOp
  head: UOp
  index: UOp
  there: UOp

@dataclass(frozen=True)
class Scores:
  """The scores of one row and trip as a lane holds them: a list of vectors, element n of them all being row `tile*block_n + matrix.key_of(h, n)` of
  what is walked over: the keys of a query, or the queries of a key."""
  p: Problem
  at: Lane|MmaLane|ThreadPlace
  block_n: int
  walk: Walk
  first: Row         # the workgroup's first head, and its first row or, where it has those of several heads, row 0: uniform
  slopes: UOp|None
  bias: UOp|None
  seed: UOp|None     # of dropout: see parts/dropout.py
  start: UOp|None    # the batch and the head of the whole tensor that this one's first ones are
  natural: bool = field(default=False, kw_only=True)

  @property
  def raw(self) -> bool: return not self.p.softcap and self.slopes is None and self.bias is None
  @property
  def to_log2(self) -> float:
    """What the softmax multiplies scores by to have base-2 logarithms."""
    return LOG2E if self.natural else self.p.softmax_scale*LOG2E if self.raw else 1.0
  @property
  def to_natural(self) -> float: return 1.0 if self.natural else self.unit
  @property
  def unit(self) -> float:
    """Of raw scores, or of base-2 logarithms, in natural ones."""
    return self.p.softmax_scale if self.raw else LN2
  @property
  def walked(self) -> list[tuple[int, ...]]:
    """The rows of each vector in lane group 0; those of lane group h lie h*matrix.block further on."""
    mat = self.at.matrix
    return [tuple(mat.key_of(0, kt*mat.row_part + i) for i in range(mat.row_part)) for kt in range(self.block_n//mat.tile_keys)]
  def of_head(self, head:UOp) -> Scores:
    """The same of another head."""
    return replace(self, first=replace(self.first, head=head))
  def begin(self, tile:UOp) -> UOp: return tile*self.block_n + self.at.h*self.at.matrix.block

  def modify(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Raw scores -> base-2 logarithms: log2(e) * (cap(softmax_scale*x) - slope*|i + offset - j| + bias), see Problem; or natural ones."""
    found = x if self.raw else self.shifted(self.capped(x), row, tile)
    return [ops.mul(y, self.unit) for y in found] if self.natural else found

  def capped(self, x:list[UOp]) -> list[UOp]:
    """log2(e) * cap(softmax_scale*x)."""
    p = self.p
    terms = 10 if p.dtype == "float32" else 4 if p.softcap > SMALL_CAP else 0
    if p.softcap: return [ops.softcap(y, p.softmax_scale/p.softcap, p.softcap*LOG2E, terms) for y in x]
    return [ops.mul(y, p.softmax_scale*LOG2E) for y in x]

  def cap_slopes(self, capped:list[UOp]) -> list[UOp]:
    """The derivative of cap at each score, 1 - tanh^2, from what `capped` gives."""
    tanh = [ops.mul(y, 1/(self.p.softcap*LOG2E)) for y in capped]
    return [ops.sub(ops.splat(1.0, ops.length(y)), ops.mul(y, y)) for y in tanh]

  def shifted(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """log2(e) * (-slope*|i + offset - j| + bias) more than x."""
    p = self.p
    if self.slopes is not None:
      slope = ops.mul(flat(self.slopes)[row.batch*p.H + row.head if p.alibi_batched else row.head].load(), -LOG2E)
      distance = self.walk.at(row.index) - self.begin(tile)     # |i + offset - j| is symmetric
      x = [ops.alibi(y, slope, distance - kt*self.at.matrix.tile_keys, self.walked[0]) for kt, y in enumerate(x)]   # the same few constants for all
    if self.bias is not None: x = [ops.fma(b, LOG2E, y) for b, y in zip(self.load_bias(self.bias, row, tile), x)]
    return x

  def load_bias(self, bias:UOp, row:Row, tile:UOp) -> list[UOp]:
    """The bias of a lane's scores in fp32; zero beyond the end of the tensor, and any of its elements where a mask will take the score away."""
    p, size, mat = self.p, BYTES[self.p.bias_dtype], self.at.matrix
    shape = p.shapes["bias"][0]
    b, h, i, j = (math.prod(shape[d+1:]) if n > 1 else 0 for d, n in enumerate(shape))   # distances, 0 where the bias is broadcast
    (i, j), length = ((i, j), shape[3]) if self.walk.over == "keys" else ((j, i), shape[2])  # of a lane's own rows, and of those walked over
    start = self.first.batch*b + self.first.head*h + self.first.index*i + tile*(self.block_n*j)
    records = (math.prod(shape) - start).maximum(0).minimum(MAX_RECORDS//size)*size
    lane = (row.head - self.first.head).simplify()*h + (row.index - self.first.index)*i + self.at.h*(mat.block*j)
    chunk = math.gcd(length, mat.block, UNIT_BYTES//size) if j == 1 else 1                       # neighbouring rows that one load may take
    def load(n:int) -> list[UOp]:
      words = ops.buffer_load(flat(bias)[start], records, (lane + n*j)*size, chunk*size)
      values = ops.as_float(words) if size == 4 else ops.widen_to_float(words, chunk, p.bias_dtype)
      return [ops.extract(values, i) for i in range(chunk)]
    if not j: return [ops.build(*load(0)*len(self.walked[0]))]*len(self.walked)
    return [ops.build(*[y for n in rows[::chunk] for y in load(n)]) for rows in self.walked]

  def mask(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """-inf where there is no such key or query, or where the query does not see the key."""
    return self._beyond(x, row, tile, ops.mask_above, ops.mask_beyond)
  def clear(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """0 there."""
    return self._beyond(x, row, tile, ops.clear_above, ops.clear_beyond)

  def last_seen(self, row:Row, tile:UOp) -> UOp:
    """The last of a lane's keys in a tile that a row sees, counted from the lane's first one; or of its queries."""
    walk, here = self.walk, self.begin(tile)
    last = walk.count - 1 if isinstance(walk.count, UOp) else UOp.const(walk.count - 1)
    return last - here if walk.ahead < 0 else (walk.at(row.index) + walk.ahead).minimum(last) - here
  def first_seen(self, row:Row, tile:UOp) -> UOp|None:
    """The first one likewise; None where that is the first there is."""
    return None if self.walk.back < 0 else self.walk.at(row.index) - self.walk.back - self.begin(tile)

  def _beyond(self, x:list[UOp], row:Row, tile:UOp, of_above:Callable[..., UOp], of_beyond:Callable[..., UOp]) -> list[UOp]:
    last, first = self.last_seen(row, tile), self.first_seen(row, tile)
    if first is None: return [of_above(y, last, rows) for y, rows in zip(x, self.walked)]
    return [of_beyond(y, first, last, rows) for y, rows in zip(x, self.walked)]

  def masks(self, scores:UOp, rows:list[Row], tile:UOp, *done:UOp) -> list[UOp]:
    """`mask` of two rows whose raw scores lie in registers, in place: statements, in any order."""
    limits = {"above": [self.last_seen(row, tile) for row in rows], "below": [x for row in rows if (x := self.first_seen(row, tile)) is not None]}
    return [ops.mask_rows(scores, each, side, self.walked[0], self.at.matrix.tile_keys, *done) for side, each in limits.items() if each]

  def finished(self, tiles:list[UOp], rows:list[Row], tile:UOp, masked:bool) -> list[UOp]:
    """What the softmax takes, of the raw scores of these rows, whose elements lie in each vector one row after another."""
    if self.raw and not masked and not self.natural: return tiles
    n = ops.length(tiles[0])//len(rows)
    parts = [[ops.slice_(y, i*n, n) for y in tiles] for i in range(len(rows))]
    parts = [self.modify(x, row, tile) for x, row in zip(parts, rows)]
    if masked: parts = [self.mask(x, row, tile) for x, row in zip(parts, rows)]
    return parts[0] if len(rows) == 1 else [ops.concat(low, high) for low, high in zip(*parts)]
