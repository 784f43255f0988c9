"""Layouts of matrix tiles over (lane, element), as data: one table row per matrix instruction. Begin with `Matrix` for AMD, `Mma` for NVIDIA."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any

# An AMD matrix instruction computes D[M][N] += A[M][K] B[K][N] over the lanes of a wave. A lane is (h, n): n = lane % N is its column, h = lane // N
# its lane group. The kernels need only two facts about a layout (AMD Instinct MI300 ISA section 7.1, CDNA4 ISA section 7.1, RDNA3 ISA section 7.9,
# RDNA4 ISA section 7.9; AMD Matrix Instruction Calculator):
#
# C and D: element i of lane (h, n) is row `c_row(h, i)`, column n. Rows come in groups of `block` consecutive rows. The lane groups get these groups
# of rows in turn.
#
# A and B: lane (h, m) holds `operand` elements of row m of A, and of column m of B. Element e of lane group h of A is multiplied by element e of
# lane group h of B. The ISA gives each such pair a number k. This number does not matter, because pairs may be added in any order, as long as both
# operands agree.
#
# RDNA3 is the exception: a lane holds all 16 elements of a row of A and of a column of B, and lanes 16-31 must repeat lanes 0-15 (`duplicated`).
#
# With S^T = K Q^T a query is a column of S^T. A lane's elements of S^T are scores of one query with several keys of the tile; `key_of` returns the
# key of each score. These elements, packed, are then the B operand of O^T = V^T P^T, if V^T has the keys in the same order. So P never leaves its
# lane (on RDNA3 the lane groups exchange halves).

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
    """Length of the vectors that clang's builtin of the instruction takes as A and B."""
    return self.operand if self.size == 2 else self.operand_words
  @property
  def span(self) -> int:
    """Number of which the length of a sum, such as the head dimension D in S = Q K^T, must be a multiple."""
    # then each lane loads whole units of 16 bytes, and no operand of a matrix instruction is filled only in part
    return max(self.K, self.unit*self.groups)
  @property
  def least_keys(self) -> int:
    """Smallest number of keys that one iteration of a loop over keys may compute."""
    # at least M, because the M rows of S^T = K Q^T are keys, and at least `span`, because P V sums over keys
    return max(self.M, self.span)
  @property
  def groups(self) -> int: return self.wave // self.N             # number of lane groups
  @property
  def group_steps(self) -> tuple[int, ...]:
    """Distances between the lanes that hold elements of one column of C, e.g. (16, 32) for four lane groups of 16 lanes."""
    # After exchanges at all of these distances, every lane has received values of all lane groups.
    return tuple(self.N << i for i in range(self.groups.bit_length() - 1))
  @property
  def accumulator(self) -> int: return self.M*self.N // self.wave # fp32 elements of C in a lane
  @property
  def row_part(self) -> int: return self.accumulator             # elements of C in a lane that belong to one query
  @property
  def tile_keys(self) -> int: return self.M                       # keys of a tile of scores
  def c_row(self, h:Int, i:Int) -> Int:
    """Returns the row of matrix C that element i of a lane's C fragment has, for a lane in lane group `h`."""
    return i//self.block*(self.block*self.groups) + h*self.block + i%self.block
  def key_of(self, h:Int, n:Int) -> Int:
    """Returns the index, in the tile, of the key that belongs to the n-th score of a lane in lane group `h`."""
    # a lane holds scores of one query with several keys, from one or more matrix tiles: n first counts the scores of the first tile, then those of
    # the next
    return self.c_row(h, n % self.accumulator) + n//self.accumulator*self.M
  def row_of(self, d:Int) -> Int:
    """Returns the row of operand A that gets row d of V^T in the product O^T = V^T P^T, so that a lane computes neighbouring columns of O."""
    # in this order of rows a lane computes consecutive columns of O, which it can store together
    tile, d = d//self.M*self.M, d%self.M
    return tile + self.c_row(d//self.accumulator, d%self.accumulator)
  def column_of(self, row:Int) -> Int:
    """Returns the row of V^T that row `row` of operand A holds in the product O^T = V^T P^T: the inverse of `row_of`."""
    tile, r = row//self.M*self.M, row%self.M
    return tile + r//self.block%self.groups*self.accumulator + r//(self.block*self.groups)*self.block + r%self.block

@dataclass(frozen=True)
class LaneSums:
  """AMD matrix instruction D = A B + C that is used with ones in A, so that each lane gets the sum of the elements of B that it holds."""
  # v_mfma_f32_4x4x4_16b (MI300 ISA section 7.1): a lane holds one column of B, C and D. If all elements of A are 1, each element of D is the element
  # of C plus the sum of the lane's elements of B.
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
  """Instruction mma.sync, m16n8k16 on 16-bit inputs or m16n8k32 on 8-bit floats, with fp32 accumulation (PTX ISA 9.7.14.5.8 and 9.7.14.5.10)."""
  # The class also has the addresses from which ldmatrix.x4 (9.7.14.5.15) reads its operands. ldmatrix moves pairs of 8-bit floats as if each pair
  # were one number of 16 bits.
  #
  # Kernels compute S = Q K^T and O = P V, so a query is a row of S. A lane holds elements of two rows of C: g = lane//4 and g + 8. In each of these
  # rows, it holds the columns 2*(lane%4) and 2*(lane%4) + 1. An A fragment of P, for the product P V, consists of the weights P in the C fragments
  # of neighbouring tiles of S: of two tiles for 16-bit inputs, of four for 8-bit floats (`together`). So P never leaves its lane. For 8-bit floats,
  # the columns of this A fragment are not in the order of the PTX ISA. The product is right nevertheless if the rows of V are in the same order as
  # these columns. ldmatrix reads K as it lies in memory, and transposes V while it reads V.
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
    """Returns the index, in the tile, of the key that belongs to the n-th score of lane `h` (0 to 3), where four lanes share a row of S."""
    # a lane holds two neighbouring scores of each tile of S: n first counts those of the first tile, then those of the next
    return n//self.block*self.N + h*self.block + n%self.block
  def a_address(self, lane:Int) -> tuple[Int, Int]:
    """Returns (row, index of 16 bytes in the row) that a lane gives to ldmatrix.x4 to read 16 rows of operand A."""
    return lane%16, lane//16
  def b_address(self, lane:Int) -> tuple[Int, Int]:
    """Returns (row, index of 16 bytes in the row) that a lane gives to ldmatrix.x4 to read B for two C fragments from rows of B^T."""
    # such as the rows of K: the product sums over the columns; ldmatrix.x4 reads 8 rows for each tile of C, and gives two dwords for each
    return lane//16*8 + lane%8, lane//8%2
  def b_transposed_address(self, lane:Int) -> tuple[Int, Int]:
    """Returns (row, index of 16 bytes in the row) that a lane gives to ldmatrix.x4 to read B for two C fragments from rows of B."""
    # such as the rows of V, which ldmatrix.x4 transposes: the product sums over the rows; ldmatrix.x4 reads 8 columns for each tile of C
    return lane%self.K, lane//self.K

MMA_OF_8_BITS: dict[str, Mma] = {"fp8e4m3": Mma("mma_m16n8k32_e4m3", "e4m3", K=32, size=1)}
MMA: dict[str, Mma] = {"float16": Mma("mma_m16n8k16_f16", "f16"), "bfloat16": Mma("mma_m16n8k16_bf16", "bf16")}

def contraction(matrix:Matrix, length:int) -> int:
  """Returns `length`, such as a head dimension, rounded up to a multiple of the elements that the kernel's matrix instructions sum at a time."""
  return -(-length//matrix.span)*matrix.span

def row_registers(matrix:Matrix, length:int) -> int:
  """Returns how many registers a lane needs for the elements that it holds of a matrix operand with rows of `length` elements."""
  return contraction(matrix, length)*matrix.size//4//(1 if matrix.duplicated else matrix.groups)
