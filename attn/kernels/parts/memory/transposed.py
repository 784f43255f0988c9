"""Transposition of small matrices in the registers of one thread, by instructions that move bytes."""
from __future__ import annotations
from attn.chips.matrix import UNIT_BYTES
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp

TURNED_ROWS = 4                   # rows that are transposed together
FIRST_OF_FOUR = 0x05040100        # byte_perm: the low halves of two dwords side by side
SECOND_OF_FOUR = 0x07060302       # byte_perm: the high halves of two dwords side by side
LOW_BYTES_IN_TURN, HIGH_BYTES_IN_TURN = 0x05010400, 0x07030602     # byte_perm: alternating bytes of two dwords, of the low halves or the high ones

def transpose(rows:list[UOp]) -> list[UOp]:
  """Transposes four rows of eight 16-bit elements in registers, and returns eight columns of two dwords each."""
  columns = []
  for dword in range(UNIT_BYTES//4):
    r0, r1, r2, r3 = [ops.extract(r, dword) for r in rows]
    for selector in (FIRST_OF_FOUR, SECOND_OF_FOUR): columns.append(ops.build(amd.byte_perm(r1, r0, selector), amd.byte_perm(r3, r2, selector)))
  return columns

def transpose_bytes(rows:list[UOp]) -> list[UOp]:
  """Transposes four rows of sixteen 8-bit elements in registers, and returns sixteen columns of one dword each."""
  return [column for dword in range(UNIT_BYTES//4) for column in transpose_dwords([ops.extract(r, dword) for r in rows])]

def transpose_dwords(rows:list[UOp]) -> list[UOp]:
  """Transposes four rows of one dword, four 8-bit elements, in registers, and returns four columns of one dword."""
  columns, (r0, r1, r2, r3) = list[UOp](), rows
  for pairs in (LOW_BYTES_IN_TURN, HIGH_BYTES_IN_TURN):
    first, second = amd.byte_perm(r1, r0, pairs), amd.byte_perm(r3, r2, pairs)
    columns += [amd.byte_perm(second, first, selector) for selector in (FIRST_OF_FOUR, SECOND_OF_FOUR)]
  return columns
