"""What a term is, and what it may go by: one of the steps of a score on its way from Q K^T to the softmax."""
from __future__ import annotations
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from attn.ops import common as ops
from attn.problem import Problem, TensorOfTerm
from attn.tinygrad_compat import Tensor, UOp

LOG2E, LN2 = math.log2(math.e), math.log(2)

# ***** scores as a lane holds them *****

@dataclass(frozen=True)
class Row:
  """A query of one head, as a lane has it, or a key where lanes are keys; `there` says whether it exists (the last block may reach beyond them)."""
  batch: UOp
  head: UOp
  index: UOp
  there: UOp

@dataclass(frozen=True)
class Unit:
  """What 1 in a score stands for: so much of a natural logarithm, and so much of one to base 2."""
  natural: float
  base2: float
  @property
  def of_natural(self) -> float:
    """The number of it that is 1 in a natural logarithm."""
    return LOG2E/self.base2

BASE2, NATURAL = Unit(LN2, 1.0), Unit(1.0, LOG2E)

def raw_unit(p:Problem) -> Unit:
  """The unit of Q K^T: softmax_scale, which so takes no instruction of its own."""
  return Unit(p.softmax_scale, p.softmax_scale*LOG2E)

def changed(x:list[UOp], unit:Unit, to:Unit) -> list[UOp]:
  """Changes scores to another unit."""
  return x if unit == to else [ops.mul(y, unit.base2/to.base2) for y in x]

@dataclass(frozen=True)
class Fragment:
  """Where the scores of one row in one tile lie, as a lane holds them: a list of vectors, whose elements are columns of the tile."""
  p: Problem
  given: Mapping[str, UOp]            # the problem's optional tensors, by name
  row: Row
  first: Row                          # the workgroup's first head, and its first row or, where it has those of several heads, row 0: uniform
  over: str                           # what the columns are: "keys" or "queries"
  diagonal: UOp                       # the column at which the diagonal meets the row
  tile: UOp
  size: int                           # columns of a tile
  group: UOp                          # the lane's group, whose first column lies group*block beyond that of the tile
  block: int                          # columns of a group that lie side by side
  columns: list[tuple[int, ...]]      # those of each vector, counted from the lane's first one
  apart: int                          # columns from one vector to the next
  unit: Unit                          # what terms leave scores in: BASE2 or NATURAL
  @property
  def begin(self) -> UOp:
    """The lane's first column."""
    return self.tile*self.size + self.group*self.block

# ***** scores in tensor operations *****

@dataclass(frozen=True)
class Positions:
  """Which keys there are for a query, and where both stand in their sequences: `belongs` (bool, broadcastable to (B, 1, 1, Sq, Sk)) or None for all,
  query positions (.., Sq, 1), counted so that a causal query sees the keys up to its own, and key positions (1, Sk)."""
  belongs: Tensor|None
  query: Tensor
  key: Tensor
  counted: tuple[Tensor, Tensor, Tensor]   # (batch or sequence, query, key) as dropout counts them, broadcastable to (B, 1, 1, Sq, Sk)
  member: Tensor|None = None   # (sequences, Sq): whether a query is of a sequence

# ***** terms *****

class TermRegisters(IntEnum):
  """What a term keeps in registers beside the scores: each more than the one before."""
  FEW = 0        # a number or two
  COLUMNS = 1    # something of each column
  SCORES = 2     # as many numbers as there are scores

# of scores, where they lie and what unit they are in: them after the term, in the unit of the fragment
TermValue = Callable[[list[UOp], Fragment, Unit], list[UOp]]
# of scores before a term and after it, where they lie and what unit they are in before: the derivative of the natural score, at each
TermDerivative = Callable[[list[UOp], list[UOp], Fragment, Unit], list[UOp]]
# of natural scores (B, Hkv, heads of each, Sq, Sk), where they stand, and the optional tensors by name: the natural scores after the term
PlainTerm = Callable[[Tensor, Problem, Positions, Mapping[str, Tensor]], Tensor]

def one(before:list[UOp], after:list[UOp], at:Fragment, unit:Unit) -> list[UOp]:
  """The derivative of what adds to a score: kernels leave the product with it out."""
  return [ops.splat(1.0, ops.length(x)) for x in after]

def tensor_as_given(name:str, t:Tensor) -> Tensor: return t

@dataclass(frozen=True)
class TermTensor:
  """An optional tensor of Problem that a term reads, whose name, axes and dtypes its field says. Along an axis where it has size 1 it is the same.

  summed: whether a kernel sums its gradient, that of the scores after the term over the axes that it lacks: of one tensor that a problem has at most.
    The gradients of others are by tinygrad
  taken: a caller's tensor as kernels take it, or a ValueError
  """
  given: TensorOfTerm
  summed: bool = False
  taken: Callable[[str, Tensor], Tensor] = tensor_as_given
  @property
  def name(self) -> str: return self.given.name
  @property
  def axes(self) -> tuple[str, ...]: return self.given.axes
  @property
  def dtypes(self) -> tuple[str, ...]: return self.given.dtypes
  def dimension(self, axis:str) -> int|None:
    """Which dimension of a tensor with all axes is this one."""
    return self.axes.index(axis) if axis in self.axes else None
  def names(self, shape:tuple[int, ...]) -> tuple[str|None, ...]:
    """The axis of each dimension, None where the tensor is the same all along."""
    return tuple(axis if n > 1 else None for axis, n in zip(self.axes[len(self.axes) - len(shape):], shape))

@dataclass(frozen=True)
class ScoreTerm:
  """A row: what a term is, for all that computes with it.

  derivative: None where the backward kernels have none: then tinygrad differentiates `plain`
  differentiable: whether there is a derivative at all; where there is none, who asks for a gradient gets an error with the term's name
  placed: whether it goes by how far a query and a key are apart in their sequence
  """
  name: str                           # the field of Problem that says whether it is in use
  value: TermValue
  derivative: TermDerivative|None
  plain: PlainTerm
  tensors: tuple[TermTensor, ...] = ()
  registers: TermRegisters = TermRegisters.FEW
  placed: bool = False
  differentiable: bool = True
