"""Layouts of matrix tiles over (lane, element), as data: one table row per matrix instruction.

An AMD matrix instruction computes D[M][N] += A[M][K] B[K][N] over the lanes of a wave. A lane is (h, n): n = lane % N is its column, h = lane // N
its lane group. The kernels need only two facts about a layout (AMD Instinct MI300 ISA section 7.1, CDNA4 ISA section 7.1, RDNA3 ISA section 7.9,
RDNA4 ISA section 7.9; AMD Matrix Instruction Calculator):
- C and D: element i of lane (h, n) is row `c_row(h, i)`, column n. Rows come in groups of `block` consecutive rows. The lane groups get these groups
  of rows in turn.
- A and B: lane (h, m) holds `operand` elements of row m of A, and of column m of B. Element e of lane group h of A is multiplied by element e of lane
  group h of B. The ISA gives each such pair a number k. This number does not matter, because pairs may be added in any order, as long as both
  operands agree.

RDNA3 is the exception: a lane holds all 16 elements of a row of A and of a column of B, and lanes 16-31 must repeat lanes 0-15 (`duplicated`).

With S^T = K Q^T a query is a column of S^T. A lane's elements of S^T are scores of one query with several keys of the tile; `key_of` returns the key
of each score. These elements, packed, are then the B operand of O^T = V^T P^T, if V^T has the keys in the same order. So P never leaves its lane (on
RDNA3 the lane groups exchange halves)."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any

Int = Any   # an int, or a UOp in a kernel

UNIT_BYTES = 16   # bytes of a unit, the widest access to LDS and to global memory

@dataclass(frozen=True)
class Matrix:
  """An AMD matrix instruction with fp32 accumulation."""
  name: str          # name of the clang builtin after `__builtin_amdgcn_`
  M: int
  N: int
  K: int
  wave: int          # lanes of a wave
  operand: int       # elements of A (and of B) in a lane
  block: int         # consecutive rows of C in a lane
  operand_type: str  # type of an element of the builtin's A and B, as in ops.renderers.VECTOR_ELEMENTS; "long" if one long holds all elements. The
                     # builtins of 8-bit floats take vectors of int, each of which holds four
  arguments: str = "{a}, {b}, {c}"   # arguments of the builtin
  exchange: str = "bpermute"   # how lane groups exchange values: see ops.amd.pair
  duplicated: bool = False   # whether every lane group holds all of A and B
  size: int = 2      # bytes of an element of A and B
  banks: int = 32    # number of LDS banks from which its operands are read

  def call(self, a:str, b:str, c:str) -> str:
    """Returns the C text that calls the instruction, given the texts of its operands A, B and C."""
    return f"__builtin_amdgcn_{self.name}({self.arguments.format(a=a, b=b, c=c)})"
  @property
  def unit(self) -> int: return UNIT_BYTES//self.size             # elements of a unit
  @property
  def operand_words(self) -> int: return self.operand*self.size//4
  @property
  def operand_elements(self) -> int:
    """Length of the vectors that the builtin takes as A and B."""
    return self.operand if self.size == 2 else self.operand_words
  @property
  def span(self) -> int:
    """Smallest number of elements that a product may sum over. Every sum must have a multiple of this number of elements: then each lane holds whole
    16-byte units, and the instruction gets whole operands."""
    return max(self.K, self.unit*self.groups)
  @property
  def least_keys(self) -> int:
    """Smallest number of keys for which both matrix products of attention have whole operands: the product that makes scores, and the product that
    sums over keys."""
    return max(self.M, self.span)
  @property
  def groups(self) -> int: return self.wave // self.N             # number of lane groups
  @property
  def group_steps(self) -> tuple[int, ...]:
    """Distances in lanes by which all lane groups exchange values. A lane group is the lanes that hold the same rows of C. In one step each lane
    exchanges a value with the lane at one of these distances. After all steps, every lane group has values from all groups."""
    return tuple(self.N << i for i in range(self.groups.bit_length() - 1))
  @property
  def accumulator(self) -> int: return self.M*self.N // self.wave # fp32 elements of C in a lane
  @property
  def row_part(self) -> int: return self.accumulator             # elements of C in a lane that belong to one query
  @property
  def tile_keys(self) -> int: return self.M                       # keys of a tile of scores
  def c_row(self, h:Int, i:Int) -> Int:
    """Returns the row of C that element i of a lane in lane group h belongs to. A lane group is the lanes that hold the same rows of C."""
    return i//self.block*(self.block*self.groups) + h*self.block + i%self.block
  def key_of(self, h:Int, n:Int) -> Int:
    """Returns the key to which the n-th score of a lane in lane group h (the lanes that hold the same rows of C) belongs. A lane has scores of one
    query with the keys of several matrix tiles, which lie one below the other in S^T. n counts the lane's scores over all these tiles."""
    return self.c_row(h, n % self.accumulator) + n//self.accumulator*self.M
  def row_of(self, d:Int) -> Int:
    """Returns the row of A that must hold row d of V^T. If the rows are in this order, a lane's elements of O^T are consecutive columns d of O, and
    the lane stores many bytes at a time."""
    tile, d = d//self.M*self.M, d%self.M
    return tile + self.c_row(d//self.accumulator, d%self.accumulator)
  def column_of(self, row:Int) -> Int:
    """Returns the row d of V^T that is in row `row` of A. This function is the inverse of `row_of`."""
    tile, r = row//self.M*self.M, row%self.M
    return tile + r//self.block%self.groups*self.accumulator + r//(self.block*self.groups)*self.block + r%self.block

@dataclass(frozen=True)
class LaneSums:
  """A matrix instruction that computes several small products at once (v_mfma_f32_4x4x4_16b: MI300 ISA section 7.1), used to sum the elements of each
  lane. In each product D = A B + C, a lane holds one column of B and the same column of C and D. If all elements of A are 1, each element of D is the
  element of C plus the sum of the lane's own elements of B."""
  name: str             # name of the clang builtin after `__builtin_amdgcn_`
  operand_type: str     # element type of the builtin's A and B
  operand_words: int = 2
  arguments: str = "{a}, {b}, {c}, 0, 0, 0"
  def call(self, a:str, b:str, c:str) -> str:
    """Returns the C text that calls the instruction, given the texts of its operands A, B and C."""
    return f"__builtin_amdgcn_{self.name}({self.arguments.format(a=a, b=b, c=c)})"
  def with_ones(self, p:Any, ones:Any) -> tuple[Any, Any]:
    """Returns the operands (A, B) with which the instruction sums each lane's elements of P: `ones`, a matrix of ones, and `p`."""
    return ones, p

# ***** NVIDIA *****

@dataclass(frozen=True)
class Mma:
  """The instruction mma.sync.m16n8k16 on 16-bit inputs, or m16n8k32 on 8-bit floats, with fp32 accumulation (PTX ISA 9.7.14.5.8 and 9.7.14.5.10), and
  the addresses from which ldmatrix.x4 (9.7.14.5.15) reads its operands. ldmatrix moves pairs of 8-bit floats as if each pair were one number of 16
  bits.

  Kernels compute S = Q K^T and O = P V, so a query is a row of S. A lane holds elements of two rows of C: g = lane//4 and g + 8. In each of these
  rows, it holds the columns 2*(lane%4) and 2*(lane%4) + 1. If a lane packs its C fragments of `together` neighbouring tiles of S, it gets its A
  fragment of P for the product P V. So P never leaves its lane. For 8-bit floats, the lane then has the columns of P in another order than in the PTX
  ISA. This order does not matter if the rows of V have it, too. ldmatrix reads K as it lies in memory, and transposes V while it reads V."""
  name: str       # name of the instruction in the emulator
  ptx: str        # PTX type of A and B
  M: int = 16
  N: int = 8
  K: int = 16
  wave: int = 32
  groups: int = 4   # lanes that share a row of C
  block: int = 2    # consecutive columns of C in a lane
  size: int = 2     # bytes of an element of A and B
  operand_words: int = 4   # dwords of A in a lane
  def with_ones(self, p:Any, ones:Any) -> tuple[Any, Any]:
    """Returns the operands (A, B) with which the instruction sums each row of P: `p`, and `ones`, a matrix of ones."""
    return p, ones
  @property
  def unit(self) -> int: return UNIT_BYTES//self.size               # elements of a unit
  @property
  def together(self) -> int: return self.K//self.N                  # C fragments that, packed, are an A fragment
  @property
  def row_part(self) -> int: return self.N//self.groups            # elements of C in a lane that belong to one query
  @property
  def tile_keys(self) -> int: return self.N                         # keys of a tile of scores
  def c_row(self, lane:Int, i:int) -> Int: return lane//self.groups + i*8     # i: which of the two rows
  def key_of(self, h:Int, n:int) -> Int:
    """Returns the key to which the n-th score of a lane belongs. `h` is the index of the lane among the four lanes that share a row of S. A lane has
    scores of the row in several neighbouring tiles of S, and n counts these scores over all the tiles."""
    return n//self.block*self.N + h*self.block + n%self.block
  def a_address(self, lane:Int) -> tuple[Int, Int]:
    """Returns the address, as (row, unit of 16 bytes), that a lane gives to ldmatrix.x4 to read operand A (16 rows and K columns) from memory that
    holds rows of A. The result of ldmatrix.x4 is a uint4."""
    return lane%16, lane//16
  def b_address(self, lane:Int) -> tuple[Int, Int]:
    """Returns the address, as (row, unit of 16 bytes), that a lane gives to ldmatrix.x4 to read the operands B of two neighbouring tiles of C. The
    memory holds rows of B^T: ldmatrix.x4 reads 16 rows (keys) and K of their columns, over which the product sums. The result is a uint4, half of it
    for each tile."""
    return lane//16*8 + lane%8, lane//8%2
  def b_transposed_address(self, lane:Int) -> tuple[Int, Int]:
    """Returns the address, as (row, unit of 16 bytes), that a lane gives to ldmatrix.x4 to read the operands B of two neighbouring tiles of C. The
    memory holds rows of B: ldmatrix.x4 reads K rows, over which the product sums, and 16 of their columns, and transposes them."""
    return lane%self.K, lane//self.K

MMA_OF_8_BITS: dict[str, Mma] = {"fp8e4m3": Mma("mma_m16n8k32_e4m3", "e4m3", K=32, size=1)}
MMA: dict[str, Mma] = {"float16": Mma("mma_m16n8k16_f16", "f16"), "bfloat16": Mma("mma_m16n8k16_bf16", "bf16")}

def contraction(matrix:Matrix, length:int) -> int:
  """Rounds `length`, the number of elements that a product sums over, up to a number that the instruction can compute: a multiple of the matrix's
  `span`."""
  return -(-length//matrix.span)*matrix.span

def row_registers(matrix:Matrix, length:int) -> int:
  """Returns the number of registers that a lane needs for its part of a row of `length` elements, if the row is an operand of the matrix
  instruction."""
  return contraction(matrix, length)*matrix.size//4//(1 if matrix.duplicated else matrix.groups)
