"""Where a thread stands in the tiles of a matrix instruction, and what it reads of their operands."""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips.matrix import UNIT_BYTES, Matrix, Mma
from attn.kernels.tiles.plain import QUAD
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp

@dataclass(frozen=True)
class Lane:
  """Where a thread stands: `n` its column of the matrix tile, `h` its lane group, `thread` its number in the workgroup."""
  lane: UOp
  wave: UOp
  matrix: Matrix
  @property
  def n(self) -> UOp: return self.lane % self.matrix.N
  @property
  def h(self) -> UOp: return self.lane // self.matrix.N
  @property
  def thread(self) -> UOp: return self.wave*self.matrix.wave + self.lane
  # what lanes exchange: over which distances, and how (`exchange` of the interpreters in attn/ops)
  @property
  def sharing(self) -> tuple[tuple[int, ...], str]:
    """Exchange with the lanes that share a row: its steps and its name."""
    return self.matrix.group_steps, self.matrix.exchange
  @property
  def neighbours(self) -> tuple[tuple[int, int, int], str]:
    """Exchange with the lanes that hold the other rows of an octet, eight neighbouring rows: its steps and its name."""
    return (1, 2, 4), "neighbours"
  @property
  def in_octet(self) -> UOp: return self.lane % 8

@dataclass(frozen=True)
class MmaLane:
  """A lane of a warp of mma.sync: `h` says which columns of a tile of C it holds."""
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
  """Which keys of a tile a thread of `tiled` has, in the words of a matrix instruction: quads of neighbouring ones, dealt to the threads in turn."""
  groups: int     # threads over the keys
  keys: int       # of each
  @property
  def block(self) -> int: return QUAD
  @property
  def row_part(self) -> int: return QUAD
  @property
  def tile_keys(self) -> int: return self.groups*QUAD
  def key_of(self, h:int, n:int) -> int: return n//QUAD*self.tile_keys + h*QUAD + n%QUAD

@dataclass(frozen=True)
class ThreadPlace:
  """Where a thread stands among those of `tiled`: `h` down, over keys, and `x` across, over queries."""
  h: UOp
  x: UOp
  across: int
  matrix: OwnKeys
  @property
  def thread(self) -> UOp: return self.h*self.across + self.x

# ***** sums *****

def element_sum(x:UOp) -> UOp:
  """The sum of a vector's elements, as a tree: of its halves, until two are left."""
  while (n := ops.length(x)) > 2: x = ops.add(ops.slice_(x, 0, n//2), ops.slice_(x, n//2, n//2))
  return ops.add(ops.extract(x, 0), ops.extract(x, 1))

def sum_over_groups(x:UOp, matrix:Matrix) -> UOp:
  """The sum of a number over the lanes, one of each group, that share a column of the matrix tile."""
  for step in matrix.group_steps:
    pair = amd.pair(x, step, matrix)
    x = ops.add(ops.extract(pair, 0), ops.extract(pair, 1))
  return x

# ***** matrix operands *****
# A contraction is read in units of 16 bytes. Lane group h owns every groups-th unit; where lanes are duplicated each lane reads all of them.

def units_of(matrix:Matrix, length:int, h:UOp) -> list[UOp]:
  """The units of a contraction of `length` elements that a lane reads, in the order of the matrix instructions that use them."""
  if matrix.duplicated: return [UOp.const(u) for u in range(length//matrix.unit)]
  return [h + u*matrix.groups for u in range(length//(matrix.unit*matrix.groups))]

def operands(matrix:Matrix, units:list[UOp]) -> list[UOp]:
  """Register images of 16-byte units -> the operands of successive matrix instructions."""
  held, words = UNIT_BYTES//4, matrix.operand_words
  if words < held: return [ops.slice_(u, i, words) for u in units for i in range(0, held, words)]
  if words == held: return units
  return [ops.concat(*parts) for parts in zip(*[iter(units)]*(words//held), strict=True)]

def fragment_operands(at:Lane, packed:list[UOp], renewed:bool=False) -> list[UOp]:
  """A column of C fragments, packed to the inputs' dtype -> the B operands of a product that contracts over their rows, in the order of
  `staging.key_rows`. `renewed`: which lanes are the low ones is told anew, see `amd.low_lanes`."""
  mat, words = at.matrix, UNIT_BYTES//4
  if mat.accumulator < mat.unit: packed = [ops.concat(a, b) for a, b in zip(packed[0::2], packed[1::2], strict=True)]
  units = [ops.slice_(y, i, words) for y in packed for i in range(0, ops.length(y), words)]
  if not mat.duplicated: return operands(mat, units)
  return [amd.share_halves(u, amd.low_lanes(u) if renewed else at.h.eq(0)) for u in units]
