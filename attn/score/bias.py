"""Bias: adds a tensor that broadcasts to (B, H, Sq, Sk) to the scores."""
from __future__ import annotations
import math
from collections.abc import Mapping
from typing import Any
from attn import values
from attn.chips.matrix import UNIT_BYTES
from attn.ops import common as ops
from attn.ops.language import compound
from attn.ops.operation import Value, emit
from attn.ops.softmax import LOWEST
from attn.problem import BYTES, TENSORS_OF_TERMS, Problem
from attn.score.places import Positions
from attn.score.term import NATURAL, Fragment, ScoreTerm, ScoreUnit, TermRegisters, TermTensor, changed, one
from attn.tinygrad_compat import Tensor, UOp, dtypes
from attn.values import FLOATS

@compound("rounded")
def _rounded(c:Any, x:Value) -> Value:
  """Returns x unchanged, by operations that compilers cannot remove, so that they don't fuse x with the next addition."""
  # Otherwise compilers could fuse the multiplication that makes x and the addition that follows into a multiply-add, which would not round x.
  n = c.length(x)
  bounded = c.let("bounded", c.max(x, c.splat(c.number(LOWEST), n)))
  def element(i:int) -> Value: return c.select(c.number(LOWEST) < c.element(x, i), c.element(bounded, i), c.element(x, i))
  return c.vector(*map(element, range(n)))

def _added(x:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  if at.unit == NATURAL != unit: return [ops.fma(y, unit.natural, b) for b, y in zip(_loaded(at), x)]
  if at.unit == NATURAL: x = [emit("rounded", y.dtype, y) for y in x]      # forward and backward then round x in the same way
  return [ops.fma(b, at.unit.of_natural, y) for b, y in zip(_loaded(at), changed(x, unit, at.unit))]

def _loaded(at:Fragment) -> list[UOp]:
  """Loads the bias of each score that a lane holds, as fp32 vectors."""
  p, size, row, first = at.p, BYTES[at.p.bias_dtype], at.row, at.first
  shape = p.shapes["bias"][0]
  b, h, i, j = (math.prod(shape[d+1:]) if n > 1 else 0 for d, n in enumerate(shape))   # strides, 0 where the bias is broadcast
  (i, j), length = ((i, j), shape[3]) if at.over == "keys" else ((j, i), shape[2])     # strides of rows and of columns, number of columns
  start = first.batch*b + first.head*h + first.index*i + at.tile*(at.size*j)
  # Beyond the end of the tensor the loaded bias is zero. For a score that a mask removes later, it may be any element of the tensor.
  records = ops.uniform((math.prod(shape) - start).maximum(0).minimum(ops.MAX_RECORDS//size)*size)
  lane = (row.head - first.head).simplify()*h + (row.index - first.index).simplify()*i + at.group*(at.block*j)
  chunk = math.gcd(length, at.block, UNIT_BYTES//size) if j == 1 else 1                # neighbouring columns that one load may take
  def load(n:int) -> list[UOp]:
    words = ops.buffer_load(ops.flat(at.given["bias"])[start], records, (lane + n*j)*size, chunk*size)
    values = ops.as_float(words) if size == 4 else ops.widen_to_float(words, chunk, p.bias_dtype)
    return [ops.extract(values, i) for i in range(chunk)]
  if not j: return [ops.build(*load(0)*len(at.columns[0]))]*len(at.columns)
  def vector(columns:tuple[int, ...]) -> UOp: return ops.build(*[x for first in columns[::chunk] for x in load(first)])
  return [vector(columns) for columns in at.columns]

def _plain(s:Tensor, p:Problem, at:Positions, given:Mapping[str, Tensor]) -> Tensor:
  _, kv_heads, group, _, _ = map(int, s.shape)     # for sharded tensors, the sizes over all devices
  bias = given["bias"]
  heads = (kv_heads, group) if bias.shape[1] == kv_heads*group else (1, 1)
  return s + bias.float().reshape(bias.shape[0], *heads, *bias.shape[2:])

def _of_four_dimensions(name:str, bias:Tensor) -> Tensor:
  if bias.dtype == dtypes.bool:
    raise ValueError(f"{name} has dtype bool: must be numbers that are added to scores, {', '.join(FLOATS)}; "
                     "attn.scaled_dot_product_attention takes a mask of bools")
  values.dtype_name(name, bias.dtype, FLOATS)
  if bias.ndim > 4: raise ValueError(f"{name} has shape {values.shown_shape(bias.shape)}: must broadcast to (B, H, Sq, Sk)")
  return bias.reshape(*[1]*(4 - bias.ndim), *values.static_shape(name, bias.shape))

BIAS_TENSOR = TermTensor(TENSORS_OF_TERMS["bias"], summed=True, taken=_of_four_dimensions)
BIAS = ScoreTerm("bias", _added, one, _plain, (BIAS_TENSOR,), TermRegisters.SCORES)
