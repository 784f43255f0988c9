"""The online softmax over the lanes that share a query: what the forward kernels do to scores between their two matrix products."""
from __future__ import annotations
from typing import Callable
from attn import intrinsics as hw
from attn.kernels.tiles import UNIT, Lane, operands
from attn.tinygrad_compat import UOp

LARGE = 2.0**20   # a bias beyond it has a rounding error that shows in exp2

def over_groups(at:Lane, x:UOp, op:Callable[[UOp, UOp], UOp]) -> UOp:
  """op over the lane groups, in all of them."""
  mat, step = at.matrix, at.matrix.N
  if mat.wave == 32: return op(x, hw.swap_halves(x))
  while step < mat.wave: x, step = op(x, hw.from_lane(x, (at.lane + step)%mat.wave)), 2*step
  return x

def row_max(x:list[UOp], start:UOp) -> UOp:
  """The maximum of a lane's scores and `start`."""
  for y in x: start = hw.max_over(y, start)
  return start

def row_sum(x:list[UOp]) -> UOp:
  """The sums of the even and of the odd elements: packed additions all the way."""
  while len(x) > 1: x = [hw.add(a, b) for a, b in zip(x[0::2], x[1::2])] + x[len(x)//2*2:]
  while (n := hw.length(x[0])) > 2: x = [hw.add(hw.slice_(x[0], 0, n//2), hw.slice_(x[0], n//2, n//2))]
  return x[0]

def probabilities(at:Lane, x:list[UOp], m:UOp, bias:UOp, to_log2:float) -> list[UOp]:
  """exp2((x - m)*to_log2), given bias = -m*to_log2."""
  large = hw.any_lane((bias > LARGE) | (bias < -LARGE), at.matrix.wave)
  return [hw.exp2(hw.exponent(y, m, bias, to_log2, large)) for y in x]

def p_operands(at:Lane, x:list[UOp], dtype:str, native_bf16:bool) -> list[UOp]:
  """A column of S^T tiles, now P^T, as the B operands of O^T = V^T P^T."""
  mat, packed = at.matrix, [hw.pack(y, dtype, native_bf16) for y in x]
  if mat.accumulator < UNIT: packed = [hw.concat(a, b) for a, b in zip(packed[0::2], packed[1::2])]
  units = [hw.slice_(y, i, UNIT//2) for y in packed for i in range(0, hw.length(y), UNIT//2)]
  return [hw.share_halves(u, at.h.eq(0)) for u in units] if mat.duplicated else operands(mat, units)
