"""The sanitiser: what hardware would not forgive, as errors that say which kernel, buffer, index, workgroup, wave and lane.

Each kind is a class. The indented ones are kinds of the one above them, and all are kinds of `EmulatorError`:

- `AccessError`: an access that the memory cannot serve.
  - `OutOfBounds`: a load or store outside its buffer (global, LDS or register array), by an active, ungated thread.
  - `Misaligned`: a vector access whose address is no multiple of its width, for the C cast that the renderer prints promises alignment; an operand of
    wgmma in shared memory that does not begin where the hardware wants it.
  - `NegativePart`: the offset of a buffer instruction is a sum with a part below 0, even where the whole is not: the compiler may leave that part
    alone in the register, which the memory unit may take for an address beyond the range (attn/emulator/offsets.py).
- `NeverWritten`: a value that nobody has put there.
  - `UninitialisedRead`: a read of LDS, of a register or of global memory that nobody wrote. Global memory counts from the allocation on, and only
    once somebody has begun to write the buffer: one that nobody ever touched (`Tensor.empty`, the buffers that BEAM times with) reads as bytes 0xff
    (NaN).
  - `UnwrittenOutput`: a buffer that a kernel stores to is copied to the host while some of its elements were never written by anyone, all of them
    where every store to it was simplified away. A host that copies out a buffer untouched by kernels gets what it asked for.
- `Race`: two accesses of which nothing says which comes first.
  - `LdsRace`: between two barriers one wave writes an LDS location that another wave reads or writes. Waves run in any order on hardware; lanes of
    one wave run in lockstep, so accesses of one wave are ordered. Reads by several waves are fine.
  - `NotWaitedFor`: an access to what an asynchronous operation still writes, be it LDS (a copy) or an accumulator (a wgmma), or a store to what it
    still reads: its thread has started it and not waited for it.
  - `SharedSlot`: two rows that one launch appends to the same slot of a cache.
- `Divergence`: threads that have to act together do not.
  - `DivergentBarrier`: a barrier that some threads of a workgroup reach and others do not; a wait for a phase of an mbarrier at which nobody arrived.
  - `DivergentMatrix`: a matrix instruction that some lanes of a wave execute and others do not.
- `LimitExceeded`: more than the chip has.
  - `LdsLimit`: a workgroup's LDS.
  - `LaunchLimit`: a grid or a workgroup.
- `BadOperand`: a matrix instruction that the chip does not have, or operands of another size than it takes.
- `BadEntry`: a number in a tensor that stands for a place which is not there, such as an entry of a block table beyond its pages.
- `Overflow`: an integer of one of our kernels that its type does not hold, where that is to be the exact one: what counts or says where something is.
- `OutOfScope`: a value from inside a loop that is used after it. The C that the renderer prints would not compile.
"""
from __future__ import annotations
from typing import Any
from dataclasses import dataclass
from numpy.typing import NDArray

Array = NDArray[Any]

class EmulatorError(RuntimeError):
  """Something that hardware would not forgive."""

class AccessError(EmulatorError): pass
class OutOfBounds(AccessError): pass
class Misaligned(AccessError): pass
class NegativePart(AccessError): pass

class NeverWritten(EmulatorError): pass
class UninitialisedRead(NeverWritten): pass
class UnwrittenOutput(NeverWritten): pass

class Race(EmulatorError): pass
class LdsRace(Race): pass
class NotWaitedFor(Race): pass
class SharedSlot(Race): pass

class Divergence(EmulatorError): pass
class DivergentBarrier(Divergence): pass
class DivergentMatrix(Divergence): pass

class LimitExceeded(EmulatorError): pass
class LdsLimit(LimitExceeded): pass
class LaunchLimit(LimitExceeded): pass

class BadOperand(EmulatorError): pass
class BadEntry(EmulatorError): pass
class Overflow(EmulatorError): pass
class OutOfScope(EmulatorError): pass

@dataclass
class Finding:
  """What is wrong with an access: for which threads, and who did what at the same location: a wave, or for NotWaitedFor an operation by number."""
  error: type[EmulatorError]
  threads: Array
  other: Array|None = None
  verb: str = ""

Span = tuple[int, int]     # the first location of a workgroup's buffer that an access touches, and the first one beyond
