"""Moving tiles: global memory -> registers -> LDS -> matrix operands. What a kernel shares with its neighbours, apart from the algorithm itself."""
from __future__ import annotations
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self
from attn.chips.matrix import UNIT_BYTES, Matrix, Mma
from attn.ops import amd, common as ops
from attn.tinygrad_compat import AddrSpace, Ops, UOp

def ceildiv(a:int, b:int) -> int: return -(-a//b)
def round_up(a:int, b:int) -> int: return ceildiv(a, b)*b

@dataclass(frozen=True)
class Tile:
  """How a kernel divides the work on one chip."""
  matrix: Matrix
  waves: int         # waves of a workgroup, each with its own queries
  q_tiles: int       # tiles of matrix.N queries of a wave: they share the K and V operands
  block_n: int       # keys of a trip
  q_in_lds: bool = False       # Q is read from LDS in every trip instead of being kept in registers
  fenced: bool = False         # matrix work on one K or V tile is done before the next one is read from LDS: fewer registers
  prefetch: int = 1            # K and V tiles are loaded 0: for their own trip, 1: during the one before, 2: so, and stored to a second buffer in LDS
  pack_gqa: bool = False       # a tile's rows are the queries of all the heads that share a key/value head: K and V are read once for them
  rescale_above: float = 8.0   # accumulators are rescaled when a row maximum has grown by more than this, in powers of two; 0: whenever one has grown

  @property
  def block_m(self) -> int: return self.waves*self.q_tiles*self.matrix.N
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def options(self) -> str:
    """What is not by default, in words."""
    return " ".join([name for name in ("q_in_lds", "fenced") if getattr(self, name)] + [f"prefetch={self.prefetch}"]*(self.prefetch != 1))
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K}"

class Carried:
  """A dataclass of what a kernel carries from one step to the next: values that have `after`."""
  def after(self, *deps:UOp) -> Self:
    self_: Any = self
    return type(self)(*[getattr(self, f.name).after(*deps) for f in fields(self_)])

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

@dataclass(frozen=True)
class MmaLane:
  """The same for mma.sync: `h` says which columns of a tile of C the lane has."""
  lane: UOp
  wave: UOp
  matrix: Mma
  @property
  def h(self) -> UOp: return self.lane % self.matrix.groups
  @property
  def thread(self) -> UOp: return self.wave*self.matrix.wave + self.lane

# ***** matrix operands *****
# A contraction is read in units of 16 bytes. Lane group h owns every groups-th unit; where lanes are duplicated each lane reads all of them.

def units_of(matrix:Matrix, length:int, h:UOp) -> list[UOp]:
  """The units of a contraction of `length` elements that a lane reads, in the order of the matrix instructions that use them."""
  if matrix.duplicated: return [UOp.const(u) for u in range(length//matrix.unit)]
  return [u*matrix.groups + h for u in range(length//(matrix.unit*matrix.groups))]

def operands(matrix:Matrix, units:list[UOp]) -> list[UOp]:
  """Register images of 16-byte units -> the operands of successive matrix instructions."""
  held, words = UNIT_BYTES//4, matrix.operand_words
  if words < held: return [ops.slice_(u, i, words) for u in units for i in range(0, held, words)]
  if words == held: return units
  return [ops.concat(lo, hi) for lo, hi in zip(units[0::2], units[1::2])]

def contraction(matrix:Matrix, length:int) -> int:
  """`length` rounded up to what whole units of every lane group cover."""
  return round_up(length, matrix.unit*(2 if matrix.duplicated else matrix.groups))

# ***** LDS *****

@dataclass(frozen=True)
class LdsTile:
  """A tile of rows of 16-byte units in LDS, or several of them. The row stride is an odd number of units, so that eight neighbouring rows lie in
  different banks; after every 16 rows there may be a gap of `skew` units."""
  buffer: UOp
  rows: int
  units: int
  skew: int = 0
  base: UOp|int = 0
  @staticmethod
  def size(rows:int, units:int, skew:int=0) -> int: return rows*(units | 1) + ceildiv(rows, 16)*skew
  @staticmethod
  def create(rows:int, units:int, slot:int, buffers:int=1, skew:int=0) -> LdsTile:
    return LdsTile(UOp.placeholder((buffers*LdsTile.size(rows, units, skew),), ops.u32(4), slot, AddrSpace.LOCAL), rows, units, skew)

  def after(self, *deps:UOp) -> LdsTile: return replace(self, buffer=self.buffer.after(*deps))
  def number(self, i:UOp) -> LdsTile: return replace(self, base=i*LdsTile.size(self.rows, self.units, self.skew))
  def place(self, row:UOp) -> UOp: return self.base + row*(self.units | 1) + row//16*self.skew
  def load(self, row:UOp, unit:UOp) -> UOp: return self.buffer[self.place(row) + unit].load()
  def store(self, row:UOp, unit:UOp, value:UOp, gate:UOp) -> UOp: return self.buffer[(self.place(row) + unit).valid(gate)].store(value)
  def store_half(self, row:UOp, half:UOp, value:UOp, gate:UOp) -> UOp:
    """Stores 8 bytes at the `half`-th half unit of a row."""
    return self.buffer.bitcast(ops.u32(2))[(self.place(row)*2 + half).valid(gate)].store(value)

# ***** global memory *****

def flat(placeholder:UOp) -> UOp:
  """A placeholder as the one-dimensional buffer it is. (An index through `.flatten()` would be divided up by the shape and put together again: slow
  to lower.)"""
  while placeholder.op is Ops.RESHAPE: placeholder = placeholder.src[0]
  return placeholder.flatten()

@dataclass(frozen=True)
class Rows:
  """The rows of one head of q, k or v in global memory: `base` the flat index of row 0, `stride` the distance of rows, both in elements."""
  buffer: UOp
  base: UOp
  stride: int
  count: int|UOp     # rows there are
  width: int         # elements of a row
  size: int          # bytes of an element
  pin: bool = False  # clang would compute the range in vector registers, and load in a loop over its values: take it to a scalar register

  @property
  def unit(self) -> int: return UNIT_BYTES//self.size   # elements of a unit

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    """The `unit`-th 16 bytes of row `first` + `row`, of which rows beyond the last and columns beyond the width read as zero.

    `first` is uniform over the workgroup, `row` < `rows` is not. A row whose units are not all 16-byte aligned is read element by element.
    """
    left = (self.count - first).maximum(0).minimum(rows)
    records = ((left - 1)*self.stride + self.width).maximum(0)*self.size
    if self.pin: records = ops.uniform(records)
    return self._load(self.buffer[(self.base + first*self.stride)], records, row*self.stride, unit, gate)

  def _load(self, base:UOp, records:UOp, start:UOp, unit:UOp, gate:UOp|None) -> UOp:
    """The `unit`-th 16 bytes of the row at `start`, of which elements that `gate` or the width excludes read as zero."""
    offset = (start + unit*self.unit)*self.size
    if self.width % self.unit == 0 and self.stride % self.unit == 0:
      inside = unit < self.width//self.unit if gate is None else gate & (unit < self.width//self.unit)
      return ops.buffer_load(base, records, inside.where(offset, ops.OUT_OF_RANGE), UNIT_BYTES)
    parts = []
    for i in range(self.unit):
      inside = unit*self.unit + i < self.width if gate is None else gate & (unit*self.unit + i < self.width)
      parts.append(ops.buffer_load(base, records, inside.where(offset + self.size*i, ops.OUT_OF_RANGE), self.size))
    for size, selector in ((1, 0x01010400), (2, 0x05040100)):   # two elements side by side, until they fill dwords
      if size >= self.size: parts = [amd.byte_perm(hi, lo, selector) for lo, hi in zip(parts[0::2], parts[1::2])]
    return ops.build(*parts)

@dataclass(frozen=True)
class PackedRows(Rows):
  """The rows of `heads` neighbouring heads as one list: row r is row r//heads of head r%heads. `count` counts them all."""
  heads: int = 1
  head_stride: int = 0
  extent: UOp = field(default_factory=lambda: UOp.const(0))   # bytes from the first row of the first head to the end of the last row of the last one

  def load_units(self, first:UOp, rows:int, row:UOp, unit:UOp, gate:UOp|None=None) -> UOp:
    packed = first + row
    there = packed < self.count if gate is None else gate & (packed < self.count)
    start = packed//self.heads*self.stride + packed%self.heads*self.head_stride
    return self._load(self.buffer[self.base], self.extent, start, unit, there)
