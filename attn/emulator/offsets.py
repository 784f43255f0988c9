"""Finds terms of a buffer instruction's offset that may be negative. In a kernel of attn no such term may be negative."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass
from attn.emulator.ranges import Ranges
from attn.ops.operation import Call
from attn.tinygrad_compat import Ops, UOp

# A buffer instruction adds a register and an immediate number, and checks the sum against the range of the buffer. If an offset is a sum, the
# compiler makes a positive constant the immediate and leaves the other terms in the register. If the register is then negative, no document says
# whether the memory unit uses the whole sum, or treats the address as out of range and loads zeros. (LLVM calls a negative register illegal:
# splitBufferOffsets in SIISelLowering.cpp.) An LDS address may have negative terms: from Sea Islands on the hardware uses the whole sum (LLVM,
# GCNSubtarget::hasUsableDSOffset).

OPERANDS = {"buffer_load": 2, "load_to_lds": 2}     # buffer instruction -> index of the operand that is its offset

@dataclass(frozen=True)
class OffsetTerm:
  """One term of a buffer instruction's offset: `number`, or minus `number` if `subtracted`."""
  number: UOp
  subtracted: bool = False

def terms_of_offset(offset:UOp) -> Iterator[OffsetTerm]:
  """Yields the terms of a buffer instruction's offset, except constants: the offset, and the operands of its sums and products."""
  if offset.op in (Ops.CAST, Ops.WHERE):
    for x in offset.src[offset.op is Ops.WHERE:]: yield from terms_of_offset(x)
  elif offset.op is not Ops.CONST:
    yield OffsetTerm(offset)
    if offset.op is Ops.SUB: yield OffsetTerm(offset.src[1], True)
    # a compiler may multiply out a product
    if offset.op in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.SHL):
      for x in offset.src: yield from terms_of_offset(x)

def may_be_negative(u:UOp, ranges:Ranges) -> list[OffsetTerm]:
  """Returns those terms of a buffer instruction's offset that may be negative, and an empty list for other operations."""
  if not isinstance(u.arg, Call) or u.arg.name not in OPERANDS: return []
  terms = dict.fromkeys(terms_of_offset(u.src[OPERANDS[u.arg.name]]))
  return [x for x in terms if (ranges.of[x.number][1] > 0 if x.subtracted else ranges.of[x.number][0] < 0)]
