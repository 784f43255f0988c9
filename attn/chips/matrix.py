"""How a matrix tile lies in (lane, element), as data: one row per matrix instruction.

An AMD matrix instruction computes D[M][N] += A[M][K] B[K][N] over the lanes of a wave. A lane is (h, n): n = lane % N is its column, h = lane // N
its lane group. Two facts about a layout are all that the kernels need (AMD Instinct MI300 ISA section 7.1, CDNA4 ISA section 7.1, RDNA3 ISA section
7.9, RDNA4 ISA section 7.9; AMD Matrix Instruction Calculator):
- C and D: element i of lane (h, n) is row `c_row(h, i)`, column n. Rows come in blocks of `block` consecutive ones, dealt to the lane groups in turn.
- A and B: lane (h, m) holds `operand` elements of row (column) m, and element e of lane group h of A meets element e of lane group h of B.
  Which k the ISA calls that pair does not matter: a contraction may be done in any order as long as both operands agree.
RDNA3 is the exception: a lane holds all 16 elements of a row, and lanes 16-31 must repeat lanes 0-15 (`duplicated`).

With S^T = K Q^T a query is a column: it stays in one lane, and the keys of a tile are that lane's elements. `key_of` says which. The same elements
are then, packed, the B operand of O^T = V^T P^T, provided that V^T is laid out in that order of keys: P never leaves its lane (on RDNA3 the lane
groups exchange halves).
"""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any

Int = Any   # an int, or a UOp in a kernel

UNIT_BYTES = 16   # a unit: the widest access of LDS and of global memory

@dataclass(frozen=True)
class Matrix:
  """One matrix instruction with fp32 accumulation."""
  name: str          # the clang builtin after `__builtin_amdgcn_`
  M: int
  N: int
  K: int
  wave: int          # lanes
  operand: int       # elements of A (and of B) in a lane
  block: int         # consecutive rows of C in a lane
  operand_type: str  # of the builtin's A and B: of an element, as in ops.renderers.VECTOR_ELEMENTS, or "long" for all of them
  arguments: str = "{a}, {b}, {c}"   # of the builtin
  exchange: str = "bpermute"   # how lane groups exchange values: see ops.amd.pair
  duplicated: bool = False
  size: int = 2      # bytes of an element of A and B
  banks: int = 32    # of LDS, from which its operands are read

  def call(self, a:str, b:str, c:str) -> str:
    """Text of the instruction, made of the texts of its operands."""
    return f"__builtin_amdgcn_{self.name}({self.arguments.format(a=a, b=b, c=c)})"
  @property
  def unit(self) -> int: return UNIT_BYTES//self.size             # elements of a unit
  @property
  def operand_words(self) -> int: return self.operand*self.size//4
  @property
  def span(self) -> int:
    """Elements of a contraction of which each lane has whole units, and the instruction whole operands."""
    return max(self.K, self.unit*self.groups)
  @property
  def least_keys(self) -> int:
    """Keys of which both products, of their rows and over them, have whole operands."""
    return max(self.M, self.span)
  @property
  def groups(self) -> int: return self.wave // self.N             # lane groups
  @property
  def group_steps(self) -> tuple[int, ...]:
    """Distances of lanes over which all groups meet, two by two."""
    return tuple(self.N << i for i in range(self.groups.bit_length() - 1))
  @property
  def accumulator(self) -> int: return self.M*self.N // self.wave # fp32 elements of C in a lane
  @property
  def row_part(self) -> int: return self.accumulator             # those of them that belong to one query
  @property
  def tile_keys(self) -> int: return self.M                       # keys of a tile of scores
  def c_row(self, h:Int, i:Int) -> Int:
    """The row of C that lane group h holds as element i."""
    return i//self.block*(self.block*self.groups) + h*self.block + i%self.block
  def key_of(self, h:Int, n:Int) -> Int:
    """The key that lane group h holds as its n-th score, over a column of S^T tiles."""
    return self.c_row(h, n % self.accumulator) + n//self.accumulator*self.M
  def row_of(self, d:Int) -> Int:
    """The row of A that must hold row d of V^T so that a lane's elements of O^T are consecutive d (and its stores wide)."""
    tile, d = d//self.M*self.M, d%self.M
    return tile + self.c_row(d//self.accumulator, d%self.accumulator)
  def column_of(self, row:Int) -> Int:
    """The row d of V^T that is row `row` of A: the inverse of `row_of`."""
    tile, r = row//self.M*self.M, row%self.M
    return tile + r//self.block%self.groups*self.accumulator + r//(self.block*self.groups)*self.block + r%self.block

@dataclass(frozen=True)
class LaneSums:
  """A matrix instruction of small blocks (v_mfma_f32_4x4x4_16b: MI300 ISA section 7.1), for the sums of what each lane has: a column of a block of B,
  and of D, is a lane, so with A all ones each element of D is that of C plus the sum of the lane's own elements of B."""
  name: str             # the clang builtin after `__builtin_amdgcn_`
  operand_type: str     # of the builtin's A and B
  operand_words: int = 2
  arguments: str = "{a}, {b}, {c}, 0, 0, 0"
  def call(self, a:str, b:str, c:str) -> str:
    """Text of the instruction, made of the texts of its operands."""
    return f"__builtin_amdgcn_{self.name}({self.arguments.format(a=a, b=b, c=c)})"
  def with_ones(self, p:Any, ones:Any) -> tuple[Any, Any]:
    """(A, B) of the product that sums P."""
    return ones, p

# ***** NVIDIA *****

@dataclass(frozen=True)
class Mma:
  """mma.sync.m16n8k16 on 16-bit inputs with fp32 accumulation (PTX ISA 9.7.14.5.8), and where ldmatrix.x4 (9.7.14.5.15) finds its operands.

  With S = Q K^T and O = P V a query is a row: a lane has part of rows g = lane//4 and g + 8, of C the columns 2*(lane%4) and the next in each. The C
  fragments of two neighbouring tiles, packed, are the A fragment of their 16 columns: P never leaves its lane. K is read as it lies in memory, V
  through the transposition that ldmatrix does.
  """
  name: str       # as the emulator knows it
  ptx: str        # the type of A and B
  M: int = 16
  N: int = 8
  K: int = 16
  wave: int = 32
  groups: int = 4   # lanes that share a row of C
  block: int = 2    # consecutive columns of C in a lane
  size: int = 2     # bytes of an element of A and B
  operand_words: int = 4   # dwords of A in a lane
  def with_ones(self, p:Any, ones:Any) -> tuple[Any, Any]:
    """(A, B) of the product that sums the rows of P."""
    return p, ones
  @property
  def unit(self) -> int: return UNIT_BYTES//self.size               # elements of a unit
  @property
  def row_part(self) -> int: return self.N//self.groups            # elements of C in a lane that belong to one query
  @property
  def tile_keys(self) -> int: return self.N                         # keys of a tile of scores
  def c_row(self, lane:Int, i:int) -> Int: return lane//self.groups + i*8     # i: which of the two rows
  def key_of(self, h:Int, n:int) -> Int:
    """The key that lane h of a row holds as its n-th score, over a row of tiles of S."""
    return n//self.block*self.N + h*self.block + n%self.block
  # (row, unit of 8 columns) of the address that a lane gives
  def a_address(self, lane:Int) -> tuple[Int, Int]:
    """A of 16 rows and 16 columns, from rows of A: a uint4."""
    return lane%16, lane//16
  def b_address(self, lane:Int) -> tuple[Int, Int]:
    """B of two tiles, from 16 rows of B^T (keys) and 16 of their columns (the contraction): the halves of a uint4."""
    return lane//16*8 + lane%8, lane//8%2
  def b_transposed_address(self, lane:Int) -> tuple[Int, Int]:
    """B of two tiles, from 16 rows of B (the contraction) and 16 of their columns, transposed on the way."""
    return lane%16, lane//16

MMA: dict[str, Mma] = {"float16": Mma("mma_m16n8k16_f16", "f16"), "bfloat16": Mma("mma_m16n8k16_bf16", "bf16")}

def contraction(matrix:Matrix, length:int) -> int:
  """`length` rounded up to whole operands, and whole units of every lane group."""
  return -(-length//matrix.span)*matrix.span

def row_registers(matrix:Matrix, length:int) -> int:
  """Registers of a lane that hold its part of a row of `length` elements, as an operand."""
  return contraction(matrix, length)*matrix.size//4//(1 if matrix.duplicated else matrix.groups)
