"""Merges the partial results of split-KV, where several workgroups each compute one key range (KV split) of a head."""
from __future__ import annotations
import functools
from typing import Callable
from attn.chips import Chip
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.kernels.parts.weights.merging import MergedRow, reference_of, store_merged, weight_of
from attn.kernels.parts.weights.scores import NEG_INF
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, Estimates, KernelInfo, UOp, dtypes

# attn/kernels/parts/weights/merging.py holds the formula. Attention with split-KV takes three steps. The first chooses the number of key ranges,
# p.num_splits:
#
#   p = splits.resolve(p, arch, tile)
#   forward(p, arch, tile)(o_partial, lse_partial, q, k, v, ...)      # tensors.arguments(p): normalised O and natural-log LSE of each range
#   combine(p, arch, p.num_splits)(o, lse, o_partial, lse_partial)
#
# `combine` takes the tensors of `combine_arguments(p)`, in this order. `combine` takes no lse if p.return_lse is false. If scores may be as large as
# fp32 allows (p.wide_scores), an lse has a second number, lse_rest: the part of the lse that rounding to fp32 lost. Then lse_rest may follow lse, and
# lse_rest_partial follows lse_partial. Sinks come last. An empty range gives O = 0 and LSE = -inf, so its weight is 0.

MERGED = ("o", "lse", "lse_rest", "o_partial", "lse_partial", "lse_rest_partial", "sinks")
PARTS_AT_ONCE = 16          # partial results whose loads run at the same time: a thread has no other work while it waits

def combine_arguments(p:Problem) -> dict[str, tuple[tuple[int, ...], str]]:
  """Returns {name: (shape, dtype)} of the tensors that the kernel `combine` takes, in order."""
  shapes = {**p.shapes, **arguments(p)}
  return {name: shapes[name] for name in MERGED if name in shapes}

def combine(p:Problem, arch:Chip, splits:int) -> Callable[..., UOp]:
  """Returns the kernel that merges `splits` partial results, as a function of the tensors that `combine_arguments(p)` names, in order."""
  # o = sum_g exp(lse_g - lse) o_g, lse = ln(sum_g exp(lse_g) + exp(sink)). The kernel subtracts the largest exponent before it takes exponentials. o
  # has the layout and dtype of the problem. A row without keys gives o = 0 and lse = -inf. A row that belongs to no sequence also gives o = 0 and lse
  # = -inf, for any sinks.
  if splits != p.num_splits or splits < 2:
    raise ValueError(f"splits={splits}: must be the problem's num_splits, {p.num_splits}, and at least 2")
  return lambda *args: merged(p, arch, splits, args)

def loads(splits:int, new:Allocator) -> list[tuple[tuple[UOp, ...], list[UOp]]]:
  """Divides the indices of partial results into groups that are loaded together. Returns a list of (loops around a group, indices in the group)."""
  # if there are many key ranges, the first group is a loop that loads PARTS_AT_ONCE partial results in each iteration, and the last group has the
  # rest
  found, looped = list[tuple[tuple[UOp, ...], list[UOp]]](), splits//PARTS_AT_ONCE*PARTS_AT_ONCE if splits >= 2*PARTS_AT_ONCE else 0
  if looped:
    g = new.range(looped//PARTS_AT_ONCE, AxisType.LOOP)
    found.append(((g,), [g*PARTS_AT_ONCE + i for i in range(PARTS_AT_ONCE)]))
  if looped < splits: found.append(((), [UOp.const(n) for n in range(looped, splits)]))
  return found

def merged(p:Problem, arch:Chip, splits:int, args:tuple[UOp, ...]) -> UOp:
  """Returns the kernel `combine`, an AST, for the tensors `args`."""
  names, new = combine_arguments(p), Allocator()
  if len(args) != len(names): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(names)})")
  given = {name: flat(x) for name, x in zip(names, args)}
  at = MergedRow.of(p, arch, new)
  row, vec = at.index, at.vec
  parts = given["o_partial"].bitcast(ops.f32(vec)) if vec > 1 else given["o_partial"]
  top, total, acc = (new.registers(1, ops.f32(n)) for n in (1, 1, vec))
  def lse_of(g:UOp) -> UOp: return given["lse_partial"][g*p.rows + row].load()
  def weight_of_part(g:UOp) -> UOp:
    return weight_of(lse_of(g), reference, given["lse_rest_partial"][g*p.rows + row].load() if p.wide_scores else None)

  # ***** the largest LSE *****
  sink = given["sinks"][at.coordinates[1]].load() if "sinks" in given else None
  start = UOp.group(top[0].store(UOp.const(NEG_INF, dtypes.float) if sink is None else sink), total[0].store(UOp.const(0.0, dtypes.float)),
                    acc[0].store(ops.splat(0.0, vec)))
  before = start
  for g, numbers in loads(splits, new):
    now = top.after(before, *g)
    before = now[0].store(functools.reduce(ops.max_, map(lse_of, numbers), now[0].load())).end(*g)
  largest = top.after(before)[0].load()
  reference = reference_of(largest)

  # ***** sums, in the order of the partial results *****
  before = start
  for g, numbers in loads(splits, new):
    acc_now, total_now = acc.after(before, *g), total.after(before, *g)
    values, weights = acc_now[0].load(), total_now[0].load()
    for n in numbers:
      w, part = weight_of_part(n), parts[(n*p.rows + row)*at.columns + at.thread%at.columns].load()
      values, weights = ops.add(values, ops.mul(part, w)), ops.add(weights, w)
    before = UOp.group(acc_now[0].store(values), total_now[0].store(weights)).end(*g)
  weights, values = total.after(before)[0].load(), acc.after(before)[0].load()
  if sink is not None: weights = ops.add(weights, weight_of(sink, reference))

  # ***** O and LSE *****
  outputs = store_merged(at, given, values, weights, largest)
  size = 4*p.rows*(p.Dv + 1)*splits
  estimates = Estimates(ops=2*p.rows*p.Dv*splits, lds=size, mem=size)
  info = KernelInfo(f"attn_combine_{arch.name}_{p.out_dtype}_{splits}x{p.Dv}", opts_to_apply=(), estimates=estimates)
  return UOp.group(*outputs).end(at.block, at.thread).sink(arg=info, tag=OPTIMISED)
