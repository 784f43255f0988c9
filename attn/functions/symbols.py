"""Symbols: the UOps that stand for the arguments of a caller's score_mod or mask_mod while attn traces the function, that is, calls the function on
UOps in place of numbers."""
from __future__ import annotations
import math
from attn.tinygrad_compat import Ops, UOp, dtypes
from attn.values import FLOATS, INTS

# A traced function is one scalar UOp, made of symbols, constants, arithmetic, and elements of tensors. An element of a tensor is a UOp that indexes
# the tensor's symbol by one int for each axis. Kernels and tensor operations replace the symbols by their own values.

FAR = 2**28     # no position of a query or key is farther from 0 than this (attn.problem.MOST_ROWS)

FUNCTION_TENSOR_DTYPES = {**FLOATS, "bool": dtypes.bool, **INTS}      # dtypes of mod_tensors, by name

def _number(name:str, least:int=0) -> UOp: return UOp.variable(name, least, FAR, dtypes.int, param=True)

SCORE = UOp.variable("score", -math.inf, math.inf, dtypes.float, param=True)                      # softmax_scale * Q K^T after the built-in terms
BATCH, QUERY_HEAD = _number("b"), _number("h")                                                     # batch or packed sequence, query head
QUERY, KEY = _number("i", -FAR), _number("j")                                                      # places of the query and of the key
SYMBOLS = (SCORE, BATCH, QUERY_HEAD, QUERY, KEY)

def tensor_symbol(number:int, shape:tuple[int, ...], dtype:str) -> UOp:
  """Makes the UOp that stands for the tensor `number` of mod_tensors in a score_mod or mask_mod."""
  return UOp.placeholder(shape, FUNCTION_TENSOR_DTYPES[dtype], slot=number)

def is_element(u:UOp) -> bool:
  """Returns whether a UOp inside score_mod or mask_mod reads an element of one of mod_tensors."""
  return u.op is Ops.INDEX

def tensor_of(element:UOp) -> UOp:
  """Returns the UOp that stands for the tensor from which `element` is read."""
  return element.src[0]

def indices_of(element:UOp) -> tuple[UOp, ...]:
  """Returns the indices by which `element` is read from its tensor, one for each axis."""
  return element.src[1:]

def number_of_tensor(element:UOp) -> int:
  """Returns the number n of the tensor mod_tensors[n] from which `element` is read."""
  base = tensor_of(element)
  while base.op is Ops.RESHAPE: base = base.src[0]
  return int(base.arg.slot)

def elements_of(value:UOp) -> list[UOp]:
  """Returns the elements of tensors that the function `value` reads; an element used as an index comes before the element with this index."""
  return [u for u in value.toposort() if is_element(u)]

def depends(value:UOp, *symbols:UOp) -> bool:
  """Returns whether the expression `value` depends on at least one of the symbols."""
  return any(u in symbols for u in value.toposort())
