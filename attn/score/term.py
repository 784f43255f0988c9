"""Definition of a score term, an operation on scores between Q K^T and the softmax, and of the data that a term may read."""
from __future__ import annotations
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from attn.ops import common as ops
from attn.problem import Problem, TensorOfTerm
from attn.score.places import Positions, Walk
from attn.tinygrad_compat import Tensor, UOp
from attn.values import LN2, LOG2E

# ***** scores as a lane holds them *****

@dataclass(frozen=True)
class Row:
  """A row of the score matrix: a query of one head, or, in a kernel whose lanes own keys, a key of one head."""
  batch: UOp
  head: UOp
  index: UOp
  there: UOp  # whether the row exists: the last block may reach beyond the last row

@dataclass(frozen=True)
class ScoreUnit:
  """Unit of measure of scores: in the softmax a score s has the weight e^(s*natural) = 2^(s*base2)."""
  # For example, scores in base 2 have natural = ln 2 and base2 = 1.
  natural: float
  base2: float
  @property
  def of_natural(self) -> float:
    """Factor that converts a score s with the weight e^s in the softmax to this unit."""
    return LOG2E/self.base2

BASE2, NATURAL = ScoreUnit(LN2, 1.0), ScoreUnit(1.0, LOG2E)

def raw_unit(p:Problem) -> ScoreUnit:
  """Returns the unit of raw scores Q K^T, which still lack the factor softmax_scale."""
  # It includes softmax_scale, so no instruction multiplies scores by softmax_scale alone.
  return ScoreUnit(p.softmax_scale, p.softmax_scale*LOG2E)

def changed(x:list[UOp], unit:ScoreUnit, to:ScoreUnit) -> list[UOp]:
  """Converts scores from one unit to another, for example from base 2 to base e."""
  return x if unit == to else [ops.mul(y, unit.base2/to.base2) for y in x]

@dataclass(frozen=True)
class Fragment:
  """Scores of one tile that a lane holds: the row of the score matrix that all these scores share, and the column of each score."""
  # The scores themselves are a list of vectors, which is passed beside this object. Rows are queries and columns are keys, or the reverse (`over`).
  p: Problem
  given: Mapping[str, UOp]            # the problem's optional tensors, by name
  row: Row
  first: Row                          # the workgroup's first head and first row (row 0 where a tile has rows of several heads), the same in all lanes
  walk: Walk                          # the workgroup's walk over the columns, which are keys or queries
  tile: UOp                           # index of the tile
  size: int                           # columns of a tile
  group: UOp                          # the lane's group: its first column lies group*block beyond the tile's first column
  block: int                          # columns of a group that lie side by side
  columns: list[tuple[int, ...]]      # columns of each vector, counted from the lane's first column
  apart: int                          # columns from one vector to the next
  unit: ScoreUnit                     # unit of the scores after a term: BASE2 or NATURAL
  limits: tuple[UOp|None, UOp]        # first and last column that the row sees, counted from the lane's first column; None: no mask hides the first
  @property
  def over(self) -> str:
    """What the columns are: "keys" or "queries"."""
    return self.walk.over
  @property
  def diagonal(self) -> UOp:
    """Column at which the diagonal of the score matrix crosses the row."""
    return self.walk.diagonal(self.row.index)
  @property
  def begin(self) -> UOp:
    """Column of the lane's first score."""
    return self.tile*self.size + self.group*self.block

# ***** terms *****

class TermRegisters(IntEnum):
  """How many registers a score term (softcap, ALiBi, bias, score_mod) needs besides the scores themselves."""
  FEW = 0        # one or two numbers
  COLUMNS = 1    # a number for each column
  SCORES = 2     # a number for each score

# (scores, their positions, their unit) -> the scores after the term, in the unit of the fragment
TermValue = Callable[[list[UOp], Fragment, ScoreUnit], list[UOp]]
# (scores before the term, scores after it, their positions, their unit before it) -> the derivative of the natural score, at each score
TermDerivative = Callable[[list[UOp], list[UOp], Fragment, ScoreUnit], list[UOp]]
# (natural scores (B, Hkv, query heads of each, Sq, Sk), the problem, positions, the optional tensors by name) -> the natural scores after the term
PlainTerm = Callable[[Tensor, Problem, Positions, Mapping[str, Tensor]], Tensor]

def one(before:list[UOp], after:list[UOp], at:Fragment, unit:ScoreUnit) -> list[UOp]:
  """Returns 1, the derivative of a score term that only adds to a score, such as a bias."""
  return [ops.splat(1.0, ops.length(x)) for x in after]

def tensor_as_given(name:str, t:Tensor) -> Tensor: return t

@dataclass(frozen=True)
class TermTensor:
  """An optional tensor that a score term reads, such as a bias, and what backward does with its gradient."""
  given: TensorOfTerm  # name, axes and dtypes; along an axis of size 1 all scores share the elements
  # Whether a kernel computes the gradient of the tensor: the gradient of the scores after the term, summed over the axes that the tensor lacks. A
  # problem has at most one such tensor. tinygrad computes the gradients of other tensors.
  summed: bool = False
  # Converts a caller's tensor to the form that kernels read, or raises ValueError.
  taken: Callable[[str, Tensor], Tensor] = tensor_as_given
  @property
  def name(self) -> str: return self.given.name
  @property
  def axes(self) -> tuple[str, ...]: return self.given.axes
  @property
  def dtypes(self) -> tuple[str, ...]: return self.given.dtypes
  def dimension(self, axis:str) -> int|None:
    """Returns the index of the axis named `axis` in the tensor's full shape; None if the tensor has no such axis."""
    return self.axes.index(axis) if axis in self.axes else None
  def names(self, shape:tuple[int, ...]) -> tuple[str|None, ...]:
    """Returns the name of each axis of a tensor with this shape, None for an axis of size 1."""
    axes = self.axes[len(self.axes) - len(shape):]      # the first axes may be missing
    return tuple(axis if n > 1 else None for axis, n in zip(axes, shape))

@dataclass(frozen=True)
class ScoreTerm:
  """A score term (softcap, ALiBi, bias or score_mod): functions that change scores between Q K^T and the softmax, and their derivative."""
  name: str                           # field of Problem that says whether the term is in use
  value: TermValue
  # None: the backward kernels cannot compute the derivative, and tinygrad differentiates `plain`.
  derivative: TermDerivative|None
  plain: PlainTerm
  tensors: tuple[TermTensor, ...] = ()
  registers: TermRegisters = TermRegisters.FEW
  placed: bool = False  # depends on the distance between a query and a key
  moves: bool = True  # stays right if a device counts queries and keys from its own first row
  differentiable: bool = True  # if not, asking for a gradient raises an error with the term's name
  of: Callable[[Problem], ScoreTerm]|None = None  # returns the row for one problem; None: the same row for all
