"""GPU emulator for tinygrad kernels: the device `EMU`. Begin with docs/emulator.md, its manual, then plan.py and machine.py."""
# device.py: the device as tinygrad sees it
# plan.py: makes a program of a kernel's UOps; program.py: the program; machine.py: the interpreter that runs it; launch.py: runs a grid of workgroups
# threads.py: thread numbers and masks; memory.py: buffers and registers; alu.py: arithmetic; matrix.py: matrix instructions; chips.py: the chips
# checks.py: kinds of errors; shadow.py: accesses to each location of LDS; under_way.py: asynchronous operations that are not complete
# meeting.py: atomic operations by which the workgroups of one launch work together
# ranges.py: range of every integer of a program; offsets.py: terms of the offsets of buffer instructions
# listing.py: the lines of Python and of C for an operation; probe.py: shows values inside a kernel; banks.py: LDS bank conflicts
#
# ATTN_EMU_CHECKS=0 turns the checks off. ATTN_EMU_BANKS=1 counts LDS bank conflicts and prints them for each kernel. ATTN_EMU_ORDER and
# ATTN_EMU_RESIDENT choose how workgroups with atomic operations run (launch.py).
from attn.emulator.checks import (AccessError, AtomicRace, BadEntry, BadOperand, Deadlock, Divergence, DivergentBarrier, DivergentMatrix,
                                  EmulatorError, LaunchLimit, LdsLimit, LdsRace, LimitExceeded, Misaligned, NegativeTerm, NeverWritten, NotWaitedFor,
                                  OutOfBounds, OutOfScope, Overflow, Race, SharedSlot, UninitialisedRead, UnwrittenOutput)
from attn.emulator.launch import Launch, last_run
from attn.emulator.probe import probe, probes

__all__ = ["AccessError", "AtomicRace", "BadEntry", "BadOperand", "Deadlock", "Divergence", "DivergentBarrier", "DivergentMatrix", "EmulatorError",
           "Launch", "LaunchLimit", "LdsLimit", "LdsRace", "LimitExceeded", "Misaligned", "NegativeTerm", "NeverWritten", "NotWaitedFor",
           "OutOfBounds", "OutOfScope", "Overflow", "Race", "SharedSlot", "UninitialisedRead", "UnwrittenOutput", "last_run", "probe", "probes"]
