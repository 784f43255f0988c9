"""Merges results of attention over different keys: results of one device that reads the keys in several steps, or of several devices that hold
different keys."""
from __future__ import annotations
import functools, itertools
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.memory.rows import strides
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import round_up
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.kernels.parts.weights.merging import MergedRow, reference_of, store_merged, weight_of
from attn.kernels.parts.weights.scores import NEG_INF
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Problem
from attn.tinygrad_compat import Estimates, KernelInfo, UOp, dtypes

# merge(p, arch, parts)(o, lse, part_0, part_1, ...)
#
# The kernel writes the outputs of the problem (p.outputs): o, lse if p.return_lse is true, and lse_rest if p.lse_rest is true. lse_rest is the part
# of the lse that rounding to fp32 lost. The kernel reads one float32 buffer for each partial result, and the sinks, if there are any, at the end. A
# partial result is one buffer, so that one copy brings it to another device. The buffer holds, for some of the rows: first o, normalised, in the
# layout of the problem; then the LSE in natural logarithm; and with p.wide_scores the rest of the LSE. Each of these begins at a multiple of
# UNIT_BYTES, because kernels write results by vectors of up to that size. attn/kernels/parts/weights/merging.py holds the formula.

@dataclass(frozen=True)
class RowRange:
  """The rows that a partial result contains for each head: rows `first` to `first + count - 1`."""
  first: int
  count: int
  def has(self, row:UOp) -> UOp: return (row >= self.first) & (row < self.first + self.count)

def part_places(p:Problem, rows:int) -> list[int]:
  """Returns the indices at which o, LSE and, with p.wide_scores, LSE's rounding error begin in a partial result's buffer, then its length."""
  sizes = (p.B*p.H*rows*n for n in (p.Dv, 1, *[1]*p.wide_scores))
  return [0, *itertools.accumulate(round_up(n, UNIT_BYTES//4) for n in sizes)]

def part_row(at:MergedRow, part:UOp, rows:RowRange) -> tuple[UOp, UOp, UOp|None]:
  """Loads one row from `part`, the buffer of a partial result with the rows `rows`; returns (elements of o, LSE, rounding error of LSE or None)."""
  # The rest is what rounding the LSE to fp32 lost; it is None unless p.wide_scores. If the buffer does not have the row, o is 0 and LSE is -inf.
  p, (batch, head, query) = at.p, at.coordinates
  inside, own, places = rows.has(query) & at.there, query - rows.first, part_places(p, rows.count)
  sb, sh, ss = strides(p.layout, p.H, rows.count, p.Dv)
  values = ops.load_where(part[batch*sb + head*sh + own*ss + at.column], inside, 4*at.vec)
  def number(n:int) -> UOp:
    return ops.as_float(ops.load_where(part[(batch*p.H + head)*rows.count + own + places[n]], inside, 4))
  return ops.as_float(values), inside.where(number(1), NEG_INF), number(2) if p.wide_scores else None

def merge(p:Problem, arch:Chip, parts:tuple[RowRange, ...], there:tuple[RowRange, ...]=()) -> Callable[..., UOp]:
  """Returns the kernel that merges partial results into the outputs of `p`. Partial result i contains the rows parts[i] of each head."""
  # The kernel takes one buffer for each partial result. A row that no partial result holds gives o = 0 and lse = -inf. With p.sinks, `there` says
  # which rows are real: the kernel adds the sinks only to these rows. All other rows are padding.
  for rows in (*parts, *there):
    if rows.first < 0 or rows.count < 1 or rows.first + rows.count > p.Sq: raise ValueError(f"{rows}: must lie within the problem's {p.Sq} rows")
  return lambda *args: merged_parts(p, arch, parts, there, args)

def merged_parts(p:Problem, arch:Chip, parts:tuple[RowRange, ...], there:tuple[RowRange, ...], args:tuple[UOp, ...]) -> UOp:
  """Returns the kernel `merge`, an AST, for the tensors `args`."""
  names = (*p.outputs, *(f"part_{i}" for i in range(len(parts))), *["sinks"]*p.sinks)
  if len(args) != len(names): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(names)})")
  given = {name: flat(x) for name, x in zip(names, args)}
  at = MergedRow.of(p, arch, Allocator())
  found = [part_row(at, given[f"part_{i}"], rows) for i, rows in enumerate(parts)]
  nothing = UOp.const(NEG_INF, dtypes.float)
  sink = None
  if p.sinks:
    of_row = functools.reduce(UOp.__or__, [rows.has(at.coordinates[2]) for rows in there], UOp.const(False))
    sink = of_row.where(given["sinks"][at.coordinates[1]].load(), nothing)

  # ***** the largest LSE *****
  largest = functools.reduce(ops.max_, [lse for _, lse, _ in found], nothing if sink is None else sink)
  reference = reference_of(largest)

  # ***** sums, in the order of the parts *****
  values, weights = ops.splat(0.0, at.vec), UOp.const(0.0, dtypes.float)
  for part, lse, rest in found:
    w = weight_of(lse, reference, rest)
    values, weights = ops.add(values, ops.mul(part, w)), ops.add(weights, w)
  if sink is not None: weights = ops.add(weights, weight_of(sink, reference))

  # ***** O and LSE *****
  outputs = store_merged(at, given, values, weights, largest)
  read = sum(part_places(p, rows.count)[-1] for rows in parts)
  size = 4*read + p.rows*(p.Dv*p.out_itemsize + 4)
  estimates = Estimates(ops=2*read, lds=size, mem=size)
  info = KernelInfo(f"attn_merge_{arch.name}_{p.out_dtype}_{len(parts)}x{p.Dv}", opts_to_apply=(), estimates=estimates)
  return UOp.group(*outputs).end(at.block, at.thread).sink(arg=info, tag=OPTIMISED)
