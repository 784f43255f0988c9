"""Split-KV: key ranges of one head go to workgroups of their own, which leave partial results; this kernel makes the result of them.

The merge is that of FlashAttention-2 (arXiv 2307.08691, section 2.3.1):

  p = splits.resolve(p, arch, tile)                                 # chooses p.num_splits, G
  forward(p, arch, tile)(o_partial, lse_partial, q, k, v, ...)      # tensors.arguments(p): normalised O and natural-log LSE of each range
  combine(p, arch, p.num_splits)(o, [lse,] o_partial, lse_partial, [sinks])

An empty range gives O = 0 and LSE = -inf, and so weighs nothing.
"""
from __future__ import annotations
import math
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.counts import ceildiv
from attn.kernels.parts.epilogue import OF_NO_SEQUENCE, OPTIMISED, store_row
from attn.kernels.parts.rows import flat, strides
from attn.kernels.parts.scores import LN2, LOG2E, NEG_INF
from attn.kernels.parts.tensors import arguments
from attn.ops import common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, Estimates, KernelInfo, UOp, dtypes

COMBINE_THREADS = 256       # of a workgroup, at most

def combine_arguments(p:Problem) -> dict[str, tuple[tuple[int, ...], str]]:
  """(shape, dtype) of the tensors that `combine` takes, by name and in order."""
  shapes = {**p.shapes, **arguments(p)}
  return {name: shapes[name] for name in ("o", "lse", "o_partial", "lse_partial", "sinks") if name in shapes}

def combine(p:Problem, arch:Chip, splits:int) -> Callable[..., UOp]:
  """The kernel that merges `splits` partial results: (o, [lse,] o_partial, lse_partial, [sinks]), the tensors of `combine_arguments(p)`.

    o = sum_g exp(lse_g - lse) o_g,   lse = ln(sum_g exp(lse_g) + exp(sink))

  with the largest exponent taken out. o is in the layout and dtype of the problem; a row without keys gives 0 and -inf, and so does a row of no
  sequence, whatever the sinks. Raises ValueError where `splits` is not what p says.
  """
  if splits != p.num_splits or splits < 2:
    raise ValueError(f"splits={splits}: the problem's num_splits is {p.num_splits}, and there must be two at least to combine")
  return lambda *args: merged(p, arch, splits, args)

def merged(p:Problem, arch:Chip, splits:int, args:tuple[UOp, ...]) -> UOp:
  """That kernel of its placeholders."""
  names, vec = combine_arguments(p), math.gcd(p.Dv, 4)
  columns = p.Dv//vec                       # threads of a row, each with `vec` neighbouring elements
  per = max(1, COMBINE_THREADS//columns)    # rows of a workgroup
  if len(args) != len(names): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(names)})")
  given = {name: flat(x) for name, x in zip(names, args)}

  # ***** ranges: one row of the output a `columns` threads *****
  new = Allocator()
  block = new.range(ceildiv(p.rows, per), AxisType.GLOBAL)
  thread = new.range(per*columns, AxisType.WARP)
  row, column = block*per + thread//columns, thread%columns*vec
  there, row = row < p.rows, row.minimum(p.rows - 1)
  length = p.total_q if p.varlen else p.Sq
  batch, head, query = row//(p.H*length), row//length%p.H, row%length
  parts = given["o_partial"].bitcast(ops.f32(vec)) if vec > 1 else given["o_partial"]
  top, total, acc = (new.registers(1, ops.f32(n)) for n in (1, 1, vec))
  def lse_of(g:UOp) -> UOp: return given["lse_partial"][g*p.rows + row].load()

  # ***** the largest LSE *****
  sink = given["sinks"][head].load() if "sinks" in given else None
  start = UOp.group(top[0].store(UOp.const(NEG_INF, dtypes.float) if sink is None else sink), total[0].store(UOp.const(0.0, dtypes.float)),
                    acc[0].store(ops.splat(0.0, vec)))
  g = new.range(splits, AxisType.LOOP)
  before = top.after(start, g)
  largest = top.after(before[0].store(ops.max_(before[0].load(), lse_of(g))).end(g))[0].load()
  reference = largest.eq(NEG_INF).where(0.0, largest)
  def weight(x:UOp) -> UOp: return ops.exp2(ops.mul(ops.sub(x, reference), LOG2E))   # the difference first: it is exact where it matters

  # ***** sums *****
  g = new.range(splits, AxisType.LOOP)
  acc_now, total_now = acc.after(start, g), total.after(start, g)
  w, part = weight(lse_of(g)), parts[((g*p.rows + row)*p.Dv + column)//vec].load()
  sums = UOp.group(acc_now[0].store(ops.add(acc_now[0].load(), ops.mul(part, w))), total_now[0].store(ops.add(total_now[0].load(), w))).end(g)
  weights, values = total.after(sums)[0].load(), acc.after(sums)[0].load()
  if sink is not None: weights = ops.add(weights, weight(sink))

  # ***** O and LSE *****
  values = ops.mul(values, weights.eq(0.0).where(0.0, ops.rcp(weights)))
  sb, sh, ss = strides(p.layout, p.H, length, p.Dv)
  outputs = store_row(arch, given["o"], p.out_dtype, p.Dv, batch*sb + head*sh + query*ss, column, values, there)
  if "lse" in given:
    log_sum = weights.eq(0.0).where(NEG_INF, ops.add(reference, ops.mul(ops.log2(weights), LN2)))
    if p.varlen: log_sum = largest.eq(OF_NO_SEQUENCE).where(NEG_INF, log_sum)
    outputs.append(given["lse"][row.valid(there & column.eq(0))].store(log_sum))
  size = 4*p.rows*(p.Dv + 1)*splits
  estimates = Estimates(ops=2*p.rows*p.Dv*splits, lds=size, mem=size)
  info = KernelInfo(f"attn_combine_{arch.name}_{p.out_dtype}_{splits}x{p.Dv}", opts_to_apply=(), estimates=estimates)
  return UOp.group(*outputs).end(block, thread).sink(arg=info, tag=OPTIMISED)
