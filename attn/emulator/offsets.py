"""The parts that the offset of a buffer instruction is a sum of. None of them may be below 0.

Such an instruction adds a register and a number of its own, and holds the sum against the range of the buffer. Of an offset that is a sum the
compiler makes a positive number the instruction's, and leaves the other parts in the register. Where these are below 0 no document says whether the
memory unit comes back to the sum or is beyond the range, where it loads zeros. (LLVM calls that illegal: splitBufferOffsets in SIISelLowering.cpp.)
An address in LDS may have such parts: from Sea Islands on it comes back (LLVM, GCNSubtarget::hasUsableDSOffset)."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass
from attn.emulator.ranges import Ranges
from attn.ops.operation import Call
from attn.tinygrad_compat import Ops, UOp

OPERANDS = {"buffer_load": 2, "load_to_lds": 2}     # operations that are buffer instructions -> which operand is the offset

@dataclass(frozen=True)
class Part:
  """A number that an offset is a sum of, or that is taken from it."""
  number: UOp
  taken: bool = False

def parts_of(offset:UOp) -> Iterator[Part]:
  """The sums that an offset is as it is printed, and what they add; of a product the sum that is multiplied, for a compiler multiplies its terms."""
  if offset.op in (Ops.CAST, Ops.WHERE):
    for x in offset.src[offset.op is Ops.WHERE:]: yield from parts_of(x)
  elif offset.op is not Ops.CONST:
    yield Part(offset)
    if offset.op is Ops.SUB: yield Part(offset.src[1], True)
    if offset.op in (Ops.ADD, Ops.SUB, Ops.MUL, Ops.SHL):
      for x in offset.src: yield from parts_of(x)

def may_be_negative(u:UOp, ranges:Ranges) -> list[Part]:
  """The parts of the offset of a buffer instruction of which it is not known that they are not below 0; of another operation none."""
  if not isinstance(u.arg, Call) or u.arg.name not in OPERANDS: return []
  parts = dict.fromkeys(parts_of(u.src[OPERANDS[u.arg.name]]))
  return [part for part in parts if (ranges.of[part.number][1] > 0 if part.taken else ranges.of[part.number][0] < 0)]
