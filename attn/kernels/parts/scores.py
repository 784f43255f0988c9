"""From raw scores Q K^T to what the softmax takes: softcap, ALiBi, bias, then the masks.

Without the first three, scores stay raw: the softmax takes differences first and folds softmax_scale * log2(e) in with its fma. With any of them,
scores are mapped to base-2 logarithms here, in fp32, and the softmax works on those with a factor of 1.
"""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.blocks import Extent
from attn.kernels.parts.lanes import Lane, MmaLane
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
  """A query of one head, as a lane has it; `there` says whether it exists (the last block may reach beyond the queries)."""
  batch: UOp
  head: UOp
  query: UOp
  there: UOp

@dataclass(frozen=True)
class Scores:
  """The scores of one row and trip as a lane holds them: a list of vectors, element n of them all being key `tile*block_n + matrix.key_of(h, n)`."""
  p: Problem
  at: Lane|MmaLane
  block_n: int
  extent: Extent
  first: Row         # the workgroup's first query and head: uniform
  slopes: UOp|None
  bias: UOp|None

  @property
  def raw(self) -> bool: return not self.p.softcap and self.slopes is None and self.bias is None
  @property
  def to_log2(self) -> float:
    """What the softmax multiplies scores by to have base-2 logarithms."""
    return self.p.softmax_scale*LOG2E if self.raw else 1.0
  @property
  def to_natural(self) -> float: return self.p.softmax_scale if self.raw else LN2
  @property
  def keys(self) -> list[tuple[int, ...]]:
    """The keys of each vector in lane group 0; those of lane group h lie h*matrix.block further on."""
    mat = self.at.matrix
    return [tuple(mat.key_of(0, kt*mat.row_part + i) for i in range(mat.row_part)) for kt in range(self.block_n//mat.tile_keys)]
  def begin(self, tile:UOp) -> UOp: return tile*self.block_n + self.at.h*self.at.matrix.block

  def modify(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """Raw scores -> base-2 logarithms: log2(e) * (cap(softmax_scale*x) - slope*|i + offset - j| + bias), see Problem."""
    p = self.p
    if self.raw: return x
    if p.softcap: x = [ops.softcap(y, p.softmax_scale/p.softcap, p.softcap*LOG2E, series=p.softcap > SMALL_CAP) for y in x]
    else: x = [ops.mul(y, p.softmax_scale*LOG2E) for y in x]
    if self.slopes is not None:
      slope = ops.mul(flat(self.slopes)[row.batch*p.H + row.head if p.alibi_batched else row.head].load(), -LOG2E)
      distance = row.query + self.extent.offset - self.begin(tile)
      x = [ops.alibi(y, slope, distance - kt*self.at.matrix.tile_keys, self.keys[0]) for kt, y in enumerate(x)]   # the same few constants for all
    if self.bias is not None: x = [ops.fma(b, LOG2E, y) for b, y in zip(self.load_bias(self.bias, row, tile), x)]
    return x

  def load_bias(self, bias:UOp, row:Row, tile:UOp) -> list[UOp]:
    """The bias of a lane's scores in fp32; zero beyond the end of the tensor, and any of its elements where a mask will take the score away."""
    p, size, mat = self.p, BYTES[self.p.bias_dtype], self.at.matrix
    shape = p.shapes["bias"][0]
    b, h, i, j = (math.prod(shape[d+1:]) if n > 1 else 0 for d, n in enumerate(shape))   # distances, 0 where the bias is broadcast
    start = self.first.batch*b + self.first.head*h + self.first.query*i + tile*(self.block_n*j)
    records = (math.prod(shape) - start).maximum(0).minimum(MAX_RECORDS//size)*size
    lane = (row.head - self.first.head)*h + (row.query - self.first.query)*i + self.at.h*(mat.block*j)
    chunk = math.gcd(shape[3], mat.block, UNIT_BYTES//size) if j else 1                          # neighbouring keys that one load may take
    def load(key:int) -> list[UOp]:
      words = ops.buffer_load(flat(bias)[start], records, (lane + key*j)*size, chunk*size)
      values = ops.as_float(words) if size == 4 else ops.widen_to_float(words, chunk, p.bias_dtype)
      return [ops.extract(values, n) for n in range(chunk)]
    if not j: return [ops.build(*load(0)*len(self.keys[0]))]*len(self.keys)
    return [ops.build(*[y for key in keys[::chunk] for y in load(key)]) for keys in self.keys]

  def mask(self, x:list[UOp], row:Row, tile:UOp) -> list[UOp]:
    """-inf at the keys that there are not, or that the query does not see."""
    (left, right), offset, n_k, here = self.p.window, self.extent.offset, self.extent.n_k, self.begin(tile)
    last = n_k - 1 if isinstance(n_k, UOp) else UOp.const(n_k - 1)
    above = last - here if right < 0 else (row.query + offset + right).minimum(last) - here
    x = [ops.mask_above(y, above, keys) for y, keys in zip(x, self.keys)]
    return x if left < 0 else [ops.mask_below(y, row.query + offset - left - here, keys) for y, keys in zip(x, self.keys)]

  def finished(self, tiles:list[UOp], rows:list[Row], tile:UOp, masked:bool) -> list[UOp]:
    """What the softmax takes, of the raw scores of these rows, whose elements lie in each vector one row after another."""
    if self.raw and not masked: return tiles
    n = ops.length(tiles[0])//len(rows)
    parts = [[ops.slice_(y, i*n, n) for y in tiles] for i in range(len(rows))]
    parts = [self.modify(x, row, tile) for x, row in zip(parts, rows)]
    if masked: parts = [self.mask(x, row, tile) for x, row in zip(parts, rows)]
    return parts[0] if len(rows) == 1 else [ops.concat(low, high) for low, high in zip(*parts)]
