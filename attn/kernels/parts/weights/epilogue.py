"""The end of a kernel: O = O / l and LSE = m + ln l of each row, their stores, and the estimates of the kernel's cost for tinygrad."""
from __future__ import annotations
import math
from dataclasses import dataclass, replace
from typing import Callable, Mapping
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.memory.rows import strides
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import Extent, Outside, outside, trip_count
from attn.kernels.parts.program.counts import below
from attn.kernels.parts.weights.scores import NEG_INF, Scores
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import BYTES, Problem
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, Estimates, UOp, dtypes
from attn.values import LN2, LOG2E

OPTIMISED = "attn"   # tag on the SINK: tinygrad then leaves the ranges unchanged, and keeps the KernelInfo with our estimates
OF_NO_SEQUENCE = (2 - 2.0**-23)*2.0**127   # partial lse of a row of no sequence: the largest fp32 number, beside which every other lse vanishes

@dataclass(frozen=True)
class LogSum:
  """LSE of a row, as a sum of two fp32 numbers: `rounded`, the nearest fp32 number, and `rest`, the rounding error."""
  # The LSE is m + ln(total), where m is the number that the softmax subtracted from the row's scores, and `total` the row's sum of P. If m is large,
  # `rest` is all of ln(total). If the total is 0, the LSE is -inf and `rest` is 0.
  rounded: UOp
  rest: UOp

  @staticmethod
  def of(reference:UOp, total:UOp) -> LogSum:
    more = ops.mul(ops.log2(total), LN2)
    found = ops.add(reference, more)
    return LogSum(total.eq(0.0).where(NEG_INF, found), total.eq(0.0).where(0.0, ops.sub(more, ops.sub(found, reference))))

def finish(m:UOp, totals:list[UOp], scores:Scores, sink:UOp|None) -> tuple[UOp, LogSum]:
  """Returns (factor 1/l by which the row's O is multiplied, LSE of the row), made from m and the row's sums of P."""
  # `m` is the number that the softmax subtracted from the row's scores. `totals` are sums of the resulting P: the first one, of P rounded to 16 bits,
  # is the sum by which O is divided, and the last one gives the LSE. A sink adds a term to both sums.
  m, rounded, exact = ops.mul(m, scores.to_natural), totals[0], totals[-1]
  if sink is None:
    return rounded.eq(0.0).where(0.0, ops.rcp(rounded)), LogSum.of(m, exact)
  top = ops.max_(m, sink)
  safe = top.eq(NEG_INF).where(0.0, top)
  weight, own = ops.exp2(ops.mul(ops.sub(m, safe), LOG2E)), ops.exp2(ops.mul(ops.sub(sink, safe), LOG2E))
  rounded, exact = (ops.add(ops.mul(total, weight), own) for total in (rounded, exact))
  return rounded.eq(0.0).where(0.0, ops.mul(weight, ops.rcp(rounded))), LogSum.of(safe, exact)

def place_of_row(p:Problem, x:Extent, row:Row, *split:UOp) -> tuple[UOp, UOp]:
  """Returns (index of a row in lse, index of its first element in o). If `split`, a key range, is given, both are for the tensors of partial
  results."""
  # `split` is the index of a key range, if there are several
  number = row.head*p.total_q + x.q_start + row.index if p.varlen else (row.batch*p.H + row.head)*p.Sq + row.index
  for s in split: number = s*p.rows + number
  sb, sh, ss = strides(p.layout, p.H, p.Sq, p.Dv)
  if split: return number, number*p.Dv
  begin = row.batch*sb + row.head*sh + (x.q_start + row.index)*ss
  return number - p.rows_before, begin if p.layout == "bshd" else begin - p.rows_before*p.Dv

def store_row(arch:Chip, o:UOp, dtype:str, length:int, begin:UOp, column:UOp, values:UOp, there:UOp) -> list[UOp]:
  """Returns the stores of `values` to a row of `o` that begins at index `begin`, from column `column` on, where `there` is true."""
  # The row has `length` elements. `values` are fp32 numbers, which are converted to `dtype`, or dwords with two elements of `dtype` each. Each store
  # writes 16 or 8 bytes if the alignment of rows allows it.
  size, packed = BYTES[dtype], values.dtype == ops.u32(ops.length(values))
  n = ops.length(values)*(2 if packed else 1)
  column, constant = column.pop_const()      # the common part of all columns of a lane is then computed only once
  further = int(constant)
  index = begin + column
  words = values if size == 4 or packed else ops.pack(values if n > 1 else ops.build(values, values), dtype)   # dwords of the row
  wide = min(UNIT_BYTES//size, n)                                                          # elements of a store
  def place(first:UOp, on:int, i:int) -> UOp: return (first + on).valid(there & below(column + (further + i), length))
  if length % wide == 0 and wide*size >= 4:
    kind = ops.f32 if size == 4 else ops.u32
    view, per = o.bitcast(kind(wide*size//4)), wide*size//4
    return [view[place((index + further%wide)//wide, (further + i)//wide, i)].store(ops.slice_(words, i*size//4, per)) for i in range(0, n, wide)]
  if size == 4: return [o[place(index, further + i, i)].store(ops.extract(values, i)) for i in range(n)]
  stores = []
  for i in range(n):
    half = (ops.extract(words, i//2) >> (16*(i % 2))).cast(dtypes.ushort).bitcast(o.dtype)
    stores.append(o[place(index, further + i, i)].store(half))
  return stores

def clear_outside(p:Problem, arch:Chip, x:Extent, given:Mapping[str, UOp], batch:UOp, heads:list[UOp], block:tuple[UOp, int], thread:tuple[UOp, int],
                  new:Allocator, *split:UOp) -> list[UOp]:
  """Returns loops that store o = 0 and lse = -inf, for each of `heads`, to rows of the outputs that belong to no sequence."""
  # Such rows exist if sequences are packed or if devices share a sequence. The work is divided over blocks and threads: `block` is (index of the
  # block, number of blocks), `thread` is (index of the thread, number of threads). If the keys are split into key ranges, the lse of these rows is
  # OF_NO_SEQUENCE instead of -inf, and so `combine` adds no sink to them. A row of a sequence that sees no key has lse -inf, and gets a sink.
  if not p.has_rows_of_none: return []
  partial = "_partial"*bool(split)
  o, dtype, vec = given[f"o{partial}"], "float32" if split else p.out_dtype, math.gcd(p.Dv, 4)
  of_none = {f"lse{partial}": OF_NO_SEQUENCE if split else NEG_INF, f"lse_rest{partial}": 0.0}
  numbers = [(given[name], x) for name, x in of_none.items() if name in given]
  def stores(row:UOp, column:UOp, there:UOp) -> list[UOp]:
    found = []
    for head in heads:
      number, begin = place_of_row(p, replace(x, q_start=0), Row(batch, head, row, there), *split)
      found += store_row(arch, flat(o), dtype, p.Dv, begin, column, ops.splat(0.0, vec), there)
      found += [flat(to)[number.valid(there & column.eq(0))].store(UOp.const(x, dtypes.float)) for to, x in numbers]
    return found
  return clear_rows(outside(p, x, batch, given), p.Dv//vec, vec, block, thread, new, stores)

def clear_rows(rows:Outside, columns:int, vec:int, block:tuple[UOp, int], thread:tuple[UOp, int], new:Allocator,
               stores:Callable[[UOp, UOp, UOp], list[UOp]]) -> list[UOp]:
  """Returns a loop over `rows`, rows that belong to no sequence, in which `stores` makes the stores of 0 to `vec` elements at a time."""
  # Each row has `columns` pieces; `stores(row, first element, whether the piece exists)` makes the stores to one piece. The work is divided over
  # blocks and threads: `block` is (index of the block, number of blocks), `thread` is (index of the thread, number of threads).
  together = block[1]*thread[1]
  if (count := trip_count((rows.count*columns + (together - 1))//together)) is None: return []
  trip = new.range(count, AxisType.LOOP)
  item = (trip*block[1] + block[0])*thread[1] + thread[0]
  there, column, row = below(item, rows.count*columns), item%columns*vec, rows.row(item//columns).minimum(rows.total - 1)
  return [UOp.group(*stores(row, column, there)).end(trip)]

def estimates(p:Problem) -> Estimates:
  """Returns the kernel's costs that tinygrad shows with DEBUG=2: floating-point operations, and bytes if each tensor is moved once."""
  keys = p.all_heads*p.Hkv//p.H*p.Sk
  memory = p.all_heads*p.Sq*(p.D*p.itemsize + p.Dv*p.out_itemsize) + keys*(p.D + (0 if p.v_in_k else p.Dv))*p.key_itemsize
  if p.stored: memory += 2*keys*BYTES[p.scale_dtype]
  return Estimates(ops=p.flops, lds=memory, mem=memory)
