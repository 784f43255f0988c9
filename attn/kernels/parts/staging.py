"""The way of a K or V tile from global memory through registers to LDS, V transposed on the way: who carries what."""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.chips.matrix import Matrix
from attn.kernels.parts.counts import ceildiv
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp

# Sixteen lanes at a time store 8 bytes each to `v_columns` columns of V (rows of V^T), which must not meet in a bank.
def v_columns(block_n:int) -> int: return 16//math.gcd(block_n//4, 8)
def v_skew(mat:Matrix, block_n:int) -> int:
  """Columns two units apart lie in different matrix tiles where these have 16 rows: a gap after each tile puts them into different banks."""
  return 8//v_columns(block_n) if mat.M == 16 and mat.accumulator == mat.unit else 0

@dataclass(frozen=True)
class Staging:
  """Which part of a K or V tile a thread carries from global memory to LDS: its `items`, each (row or rows, unit, gate)."""
  rows: int
  units: int
  threads: int
  thread: UOp
  group: int = 1       # rows that one item takes, to be transposed
  together: int = 1    # so many neighbouring items of a row group take units `apart`: their columns then go to different banks
  apart: int = 1
  @property
  def items(self) -> int: return ceildiv(self.rows//self.group*self.units, self.threads)
  def item(self, j:int) -> tuple[UOp, UOp, UOp]:
    """(row group, unit, whether there is such an item). Up to eight row groups run fastest when rows are transposed: their stores fill a row."""
    index, groups = self.thread + j*self.threads, self.rows//self.group
    gate = index < groups*self.units
    if self.group == 1: return index//self.units, index%self.units, gate
    fast, block = math.gcd(groups, 8), self.together*self.apart
    unit = index//fast%self.units
    return index//(fast*self.units)*fast + index%fast, unit//block*block + unit%self.together*self.apart + unit%block//self.together, gate

def transpose(rows:list[UOp]) -> list[UOp]:
  """Four rows of eight 16-bit elements -> eight columns of four (dword pairs)."""
  columns = []
  for w in range(4):
    r0, r1, r2, r3 = [ops.extract(r, w) for r in rows]
    for selector in (0x05040100, 0x07060302): columns.append(ops.build(amd.byte_perm(r1, r0, selector), amd.byte_perm(r3, r2, selector)))
  return columns

def key_row(matrix:Matrix, quad:UOp, i:int) -> UOp:
  """The key that a row of V^T has in slot quad*4 + i: unit quad//2 belongs to lane group quad//2 % groups."""
  unit, slot = quad//2, quad%2*4 + i
  n = unit//matrix.groups*matrix.unit + slot
  return n//matrix.accumulator*matrix.M + matrix.c_row(unit%matrix.groups, n%matrix.accumulator)
