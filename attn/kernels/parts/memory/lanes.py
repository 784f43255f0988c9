"""The position of a thread in the tiles of a matrix instruction, and the operands that the thread reads."""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips.matrix import UNIT_BYTES, Matrix, Mma
from attn.kernels.tiles.plain import QUAD
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp

@dataclass(frozen=True)
class Lane:
  """A thread's position in a matrix tile of an AMD instruction: `n` is its column of C, and `h` its lane group."""
  lane: UOp
  wave: UOp
  matrix: Matrix
  @property
  def n(self) -> UOp: return self.lane % self.matrix.N
  @property
  def h(self) -> UOp: return self.lane // self.matrix.N
  @property
  def thread(self) -> UOp: return self.wave*self.matrix.wave + self.lane
  # the lanes with which this lane exchanges values: distances to them, and the instruction (`exchange` of the interpreters in attn/ops)
  @property
  def sharing(self) -> tuple[tuple[int, ...], str]:
    """Returns (distances between the lanes that hold scores of the same row, name of the instruction by which these lanes exchange values)."""
    return self.matrix.group_steps, self.matrix.exchange
  @property
  def neighbours(self) -> tuple[tuple[int, int, int], str]:
    """Returns (distances between the lanes that hold eight neighbouring rows of C, name of the instruction by which they exchange values)."""
    return (1, 2, 4), "neighbours"
  @property
  def in_octet(self) -> UOp: return self.lane % 8

@dataclass(frozen=True)
class MmaLane:
  """A thread's position in a matrix tile of mma.sync, where four lanes share each row of C: `h` is 0 to 3."""
  lane: UOp
  wave: UOp
  matrix: Mma
  @property
  def h(self) -> UOp: return self.lane % self.matrix.groups
  @property
  def thread(self) -> UOp: return self.wave*self.matrix.wave + self.lane
  @property
  def sharing(self) -> tuple[tuple[int, ...], str]: return (1, 2), "shuffle"
  @property
  def neighbours(self) -> tuple[tuple[int, int, int], str]: return (4, 8, 16), "shuffle"
  @property
  def in_octet(self) -> UOp: return self.lane // self.matrix.groups

@dataclass(frozen=True)
class OwnKeys:
  """The keys of a tile whose scores one thread computes, in a kernel in plain UOps."""
  # The keys are divided into quads. Of `groups` threads, thread h computes quads h, h + groups, h + 2*groups, and so on. The fields have the names of
  # a matrix instruction's fields, so that the same code can read both.
  groups: int     # threads that share the keys of a tile
  keys: int       # keys of each of these threads
  @property
  def block(self) -> int: return QUAD
  @property
  def row_part(self) -> int: return QUAD
  @property
  def tile_keys(self) -> int: return self.groups*QUAD
  def key_of(self, h:int, n:int) -> int: return n//QUAD*self.tile_keys + h*QUAD + n%QUAD

@dataclass(frozen=True)
class ThreadPlace:
  """A thread's position in a kernel in plain UOps, where threads form a rectangle over a tile of scores."""
  h: UOp   # index along the keys
  x: UOp   # index along the queries
  thread: UOp
  matrix: OwnKeys

# ***** sums *****

def element_sum(x:UOp) -> UOp:
  """Returns the sum of the elements of a vector, whose length is a power of two."""
  while (n := ops.length(x)) > 2: x = ops.add(ops.slice_(x, 0, n//2), ops.slice_(x, n//2, n//2))
  return ops.add(ops.extract(x, 0), ops.extract(x, 1))

def sum_over_groups(x:UOp, matrix:Matrix) -> UOp:
  """Returns the sum of `x` over the lanes that share a column of the matrix tile."""
  for step in matrix.group_steps:
    pair = amd.pair(x, step, matrix)
    x = ops.add(ops.extract(pair, 0), ops.extract(pair, 1))
  return x

# ***** matrix operands *****
# Rows are read in units of 16 bytes. Of g lane groups, group h reads units h, h + g, h + 2*g, ... Duplicated lanes each read all units.

def units_of(matrix:Matrix, length:int, h:UOp) -> list[UOp]:
  """Returns the indices of the 16-byte units that a lane of lane group `h` reads from a row, for a product that sums over the row's `length`
  elements."""
  if matrix.duplicated: return [UOp.const(u) for u in range(length//matrix.unit)]
  return [h + u*matrix.groups for u in range(length//(matrix.unit*matrix.groups))]

def operands(matrix:Matrix, units:list[UOp]) -> list[UOp]:
  """Returns the operands of successive matrix instructions, cut out of (or joined from) the 16-byte `units` in registers."""
  # if operands are shorter than a unit, each unit is cut; if operands are longer, units are joined
  held, words = UNIT_BYTES//4, matrix.operand_words
  if words < held: return [ops.slice_(u, i, words) for u in units for i in range(0, held, words)]
  if words == held: return units
  return [ops.concat(*parts) for parts in zip(*[iter(units)]*(words//held), strict=True)]

def fragment_operands(at:Lane, packed:list[UOp], renewed:bool=False) -> list[UOp]:
  """Returns `packed`, this lane's C fragments rounded to 16 or 8 bits, as operands B of the matrix product that follows."""
  # The next product sums over the rows of C, in the order in which a lane holds them.
  mat, words = at.matrix, UNIT_BYTES//4
  if mat.accumulator < mat.unit: packed = [ops.concat(a, b) for a, b in zip(packed[0::2], packed[1::2], strict=True)]
  units = [ops.slice_(y, i, words) for y in packed for i in range(0, ops.length(y), words)]
  if not mat.duplicated: return operands(mat, units)
  # Lanes 16-31 must hold the same operands as lanes 0-15. The instruction for this needs a boolean: whether the lane is one of lanes 0-15. With
  # `renewed` the boolean is computed here, just before its use. Otherwise it is computed once in the kernel, and stays in a register.
  return [amd.share_halves(u, amd.low_lanes(u) if renewed else at.h.eq(0)) for u in units]
