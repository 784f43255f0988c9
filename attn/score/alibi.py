"""ALiBi: subtracts from a score the slope of its head times the distance of query and key (arXiv 2108.12409)."""
from __future__ import annotations
from collections.abc import Mapping
from typing import Any
from attn import values
from attn.ops import common as ops
from attn.ops.language import compound
from attn.ops.operation import Value, emit, integer
from attn.problem import TENSORS_OF_TERMS, Problem
from attn.score.places import Positions
from attn.score.term import Fragment, ScoreTerm, ScoreUnit, TermRegisters, TermTensor, changed, one
from attn.tinygrad_compat import Tensor, UOp, dtypes
from attn.values import FLOATS

@compound("alibi")
def _alibi(c:Any, x:Value, slope:Value, distance:Value, *, offsets:tuple[int, ...]) -> Value:
  away = c.let("away", c.abs(distance - c.constants(offsets)))
  return c.fma(c.splat(slope, len(offsets)), away, x)

def alibi(x:UOp, slope:UOp, distance:UOp, offsets:tuple[int, ...]) -> UOp:
  """Computes x + slope*|distance - offset| for each element of x, scores of one row; `slope` is minus the ALiBi slope of the row's head."""
  # `slope` is minus the row's ALiBi slope, in the unit of the scores. `distance` (fp32) and `offsets` count columns from the first element's column:
  # `distance` to the column where the diagonal meets the row, and `offsets` to the column of each element.
  return emit("alibi", x.dtype, x, slope, distance, offsets=offsets)

def _moved(x:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  row, p = at.row, at.p
  slope = ops.mul(ops.flat(at.given["alibi_slopes"])[row.batch*p.H + row.head if p.alibi_batched else row.head].load(), -at.unit.of_natural)
  # |i + offset - j| is symmetric. One conversion to fp32 serves all vectors: on NVIDIA it takes the time of eight subtractions
  distance = integer(at.diagonal - at.begin).cast(dtypes.float)
  def of(n:int) -> UOp: return ops.sub(distance, UOp.const(float(n*at.apart), dtypes.float))
  # all vectors use the same few constants
  return [alibi(y, slope, of(n), at.columns[0]) for n, y in enumerate(changed(x, unit, at.unit))]

def _plain(s:Tensor, p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor:
  _, kv_heads, group, queries, _ = map(int, s.shape)
  slopes = given["alibi_slopes"].float().reshape(-1, kv_heads, group, 1, 1)
  if at.member is not None: slopes = at.member.reshape(-1, 1, 1, queries, 1).where(slopes, 0.0).sum(0, keepdim=True)   # of its own sequence
  return s - slopes*(at.query - at.key).abs().float()

def _in_float(name:str, slopes:Tensor) -> Tensor:
  values.dtype_name(name, slopes.dtype, FLOATS)
  return slopes.cast(dtypes.float)

SLOPES = TermTensor(TENSORS_OF_TERMS["alibi"], taken=_in_float)
ALIBI = ScoreTerm("alibi", _moved, one, _plain, (SLOPES,), TermRegisters.COLUMNS, placed=True)
