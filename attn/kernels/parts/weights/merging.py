"""What the kernels that merge partial results have in common. A partial result is attention over some of the keys, with its LSE."""
from __future__ import annotations
import math
from dataclasses import dataclass
from typing import Mapping
from attn.chips import Chip
from attn.kernels.parts.memory.rows import strides
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.weights.epilogue import OF_NO_SEQUENCE, LogSum, store_row
from attn.kernels.parts.weights.scores import NEG_INF
from attn.ops import common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp
from attn.values import LOG2E

# o = sum_g exp(lse_g - lse) o_g, lse = ln(sum_g exp(lse_g) + exp(sink)) (FlashAttention-2, arXiv 2307.08691, section 2.3.1). The largest lse_g is
# subtracted from every exponent first. A partial result of no keys has o_g = 0 and lse_g = -inf, so its weight is 0.

COMBINE_THREADS = 256       # largest number of threads in a workgroup

def rows_together(p:Problem, arch:Chip, columns:int) -> int:
  """Returns how many rows of the output a workgroup merges, with `columns` threads for each row."""
  # If there are few rows in all, a workgroup merges fewer rows, so that more compute units have work; but it merges at least as many as fill a wave
  # with threads.
  return max(1, min(COMBINE_THREADS//columns, max(ceildiv(p.rows, max(1, arch.cus)), arch.wave//columns)))

@dataclass(frozen=True)
class MergedRow:
  """The row of the output to which a thread merges partial results; the thread computes `vec` elements of the row."""
  p: Problem
  arch: Chip
  block: UOp
  thread: UOp
  vec: int

  @staticmethod
  def of(p:Problem, arch:Chip, new:Allocator) -> MergedRow:
    vec = math.gcd(p.Dv, 4)
    columns = p.Dv//vec                       # threads per row
    per = rows_together(p, arch, columns)     # rows per workgroup
    workgroup, thread = (AxisType.LOOP,)*2 if arch.serial else (AxisType.GLOBAL, AxisType.WARP)
    return MergedRow(p, arch, new.range(ceildiv(p.rows, per), workgroup), new.range(per*columns, thread), vec)
  @property
  def columns(self) -> int: return self.p.Dv//self.vec
  @property
  def unheld(self) -> UOp:
    return self.block*rows_together(self.p, self.arch, self.columns) + self.thread//self.columns
  @property
  def there(self) -> UOp: return self.unheld < self.p.rows
  @property
  def index(self) -> UOp: return self.unheld.minimum(self.p.rows - 1)
  @property
  def column(self) -> UOp: return self.thread%self.columns*self.vec
  @property
  def length(self) -> int:
    """Number of rows of one head in the tensors: Sq, or total_q for packed sequences."""
    return self.p.total_q if self.p.varlen else self.p.Sq
  @property
  def coordinates(self) -> tuple[UOp, UOp, UOp]:
    """Batch, head and query of the output's row that this thread merges."""
    return self.index//(self.p.H*self.length), self.index//self.length%self.p.H, self.index%self.length

def reference_of(largest:UOp) -> UOp:
  """Returns the number that is subtracted from every exponent: the largest lse, or 0 if no partial result has a key."""
  return largest.eq(NEG_INF).where(0.0, largest)

def weight_of(lse:UOp, reference:UOp, rest:UOp|None=None) -> UOp:
  """Returns the weight of a partial result, exp(lse + rest - reference), where lse + `rest` is the exact LSE."""
  # the difference first, because it is exact where lse and reference are close
  found = ops.mul(ops.sub(lse, reference), LOG2E)
  return ops.exp2(found if rest is None else ops.fma(rest, LOG2E, found))

def store_merged(at:MergedRow, given:Mapping[str, UOp], values:UOp, weights:UOp, largest:UOp) -> list[UOp]:
  """Returns the stores of a merged row of o (`values`/`weights`), and of its lse if `given` has this tensor."""
  # `values` is the weighted sum of the partial results, and `weights` the sum of the weights. lse gets `largest` + ln(`weights`), rounded to fp32,
  # where `largest` is the largest lse of the partial results and of the sink. lse_rest gets what this rounding lost.
  p, (batch, head, query) = at.p, at.coordinates
  values = ops.mul(values, weights.eq(0.0).where(0.0, ops.rcp(weights)))
  sb, sh, ss = strides(p.layout, p.H, at.length, p.Dv)
  outputs = store_row(at.arch, given["o"], p.out_dtype, p.Dv, batch*sb + head*sh + query*ss, at.column, values, at.there)
  log_sum = LogSum.of(reference_of(largest), weights)
  for name, x, nothing in (("lse", log_sum.rounded, NEG_INF), ("lse_rest", log_sum.rest, 0.0)):
    if name not in given: continue
    if p.has_rows_of_none: x = largest.eq(OF_NO_SEQUENCE).where(nothing, x)
    outputs.append(given[name][at.index.valid(at.there & at.column.eq(0))].store(x))
  return outputs
