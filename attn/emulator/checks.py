"""Errors that the emulator raises at actions that are undefined or fail on hardware. An error names the kernel, buffer, index, workgroup, wave and
lane.

Each kind of error is a class. An indented class is a subclass of the one above it; all are subclasses of `EmulatorError`:

- `AccessError`: an access that the memory cannot serve.
  - `OutOfBounds`: a load or store outside its buffer (global, LDS or register array), by an active, ungated thread.
  - `Misaligned`: a vector access whose address is not a multiple of its width (the rendered C cast promises alignment); an operand of
    wgmma in shared memory that does not begin at the alignment which the hardware requires.
  - `NegativeTerm`: the offset of a buffer instruction is a sum with a negative term, even if the sum is not negative. The compiler may leave that
    term alone in the register, and the memory unit may treat the register as an address out of range (attn/emulator/offsets.py).
- `NeverWritten`: a value that was never written.
  - `UninitialisedRead`: a read of LDS, of a register or of global memory that was never written. For global memory this counts from the allocation
    on, and only after the first write to the buffer: a buffer without any write (`Tensor.empty`, the buffers that BEAM times with) reads as bytes
    0xff (NaN).
  - `UnwrittenOutput`: the host copies a buffer that a kernel stores to, but some of its elements were never written. A possible reason is that
    tinygrad has simplified every store to the buffer away. It is no error to copy a buffer that no kernel stores to.
- `Race`: two accesses whose order is not defined.
  - `LdsRace`: between two barriers one wave writes an LDS location that another wave reads or writes. Waves run in any order on hardware; lanes of
    one wave run in lockstep, so accesses of one wave are ordered. It is no error if several waves read the same location.
  - `NotWaitedFor`: an access to data that an asynchronous operation still writes, in LDS (a copy) or in an accumulator (a wgmma), or a store to data
    that such an operation still reads. The thread that started the operation has not waited for it. Or a wave passes a turn (below), and nothing
    makes sure that the additions by another wave of its workgroup are complete.
  - `AtomicRace`: one launch accesses an element by atomic operations and by others, and no turn puts them in order. A turn is the period in which one
    workgroup may act: it begins when a counter has the number of the turn (attn/ops/atomics.py). Or one wave of a workgroup has waited for a turn,
    and no barrier has followed: then nothing stops another wave of the workgroup from adding to an element before this turn.
  - `SharedSlot`: one launch appends two rows to the same slot of a cache.
- `Divergence`: threads that must execute an operation together do not.
  - `DivergentBarrier`: some threads of a workgroup reach a barrier and others do not, or threads wait for a phase of an mbarrier before any arrival.
  - `DivergentMatrix`: some lanes of a wave execute a matrix instruction and others do not.
- `Deadlock`: all workgroups that have started wait for others.
- `LimitExceeded`: a limit of the chip is exceeded.
  - `LdsLimit`: the LDS of a workgroup.
  - `LaunchLimit`: the size of a grid or a workgroup.
- `BadOperand`: a matrix instruction that the chip does not have, or operands whose size does not fit the instruction.
- `BadEntry`: an index in a tensor of something that does not exist, such as an entry of a block table that is not the index of a page.
- `Overflow`: an integer of one of attn's kernels that does not fit its type, although its exact value matters (it counts or addresses something).
- `OutOfScope`: a value from inside a loop is used after the loop. The C that the renderer emits would not compile.
"""
from __future__ import annotations
from typing import Any
from dataclasses import dataclass
from numpy.typing import NDArray

Array = NDArray[Any]

class EmulatorError(RuntimeError):
  """Base class of the errors that the emulator raises at an action that is undefined or fails on hardware."""

class AccessError(EmulatorError): pass
class OutOfBounds(AccessError): pass
class Misaligned(AccessError): pass
class NegativeTerm(AccessError): pass

class NeverWritten(EmulatorError): pass
class UninitialisedRead(NeverWritten): pass
class UnwrittenOutput(NeverWritten): pass

class Race(EmulatorError): pass
class LdsRace(Race): pass
class NotWaitedFor(Race): pass
class SharedSlot(Race): pass
class AtomicRace(Race): pass

class Divergence(EmulatorError): pass
class DivergentBarrier(Divergence): pass
class DivergentMatrix(Divergence): pass

class Deadlock(EmulatorError): pass

class LimitExceeded(EmulatorError): pass
class LdsLimit(LimitExceeded): pass
class LaunchLimit(LimitExceeded): pass

class BadOperand(EmulatorError): pass
class BadEntry(EmulatorError): pass
class Overflow(EmulatorError): pass
class OutOfScope(EmulatorError): pass

@dataclass
class Finding:
  """A faulty access to LDS: the class of the error, and a bool for each thread, whether it made the access."""
  error: type[EmulatorError]
  threads: Array
  # for each thread in a race: the wave that accessed the location before; for NotWaitedFor: the index of the asynchronous operation
  other: Array|None = None
  # what that wave or operation did at the location, such as "written"
  verb: str = ""

Span = tuple[int, int]     # first location of a workgroup's buffer that an access touches, and the first location after it
