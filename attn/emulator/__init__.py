"""GPU emulator for tinygrad kernels: the device `EMU`. docs/emulator.md is its manual.

- device.py: tinygrad's device, plan.py: UOps compiled to a program (program.py), machine.py: the interpreter that runs it
- threads.py: thread numbers and masks, memory.py: buffers and registers, alu.py: arithmetic, matrix.py: matrix instructions, chips.py: targets
- checks.py: kinds of errors, shadow.py: accesses to each location of LDS, under_way.py: asynchronous operations not yet waited for
- ranges.py: ranges of a program's integers, offsets.py: terms of the offsets of buffer instructions
- listing.py: place of an operation in Python and in C, probe.py: values inside a kernel, banks.py: LDS bank conflicts

ATTN_EMU_CHECKS=0 turns the sanitiser off. ATTN_EMU_BANKS=1 counts LDS bank conflicts and prints them for each kernel.
"""
from attn.emulator.checks import (AccessError, BadEntry, BadOperand, Divergence, DivergentBarrier, DivergentMatrix, EmulatorError, LaunchLimit,
                                  LdsLimit, LdsRace, LimitExceeded, Misaligned, NegativePart, NeverWritten, NotWaitedFor, OutOfBounds, OutOfScope,
                                  Overflow, Race, SharedSlot, UninitialisedRead, UnwrittenOutput)
from attn.emulator.machine import Launch, last_run
from attn.emulator.probe import probe, probes

__all__ = ["AccessError", "BadEntry", "BadOperand", "Divergence", "DivergentBarrier", "DivergentMatrix", "EmulatorError", "Launch", "LaunchLimit",
           "LdsLimit", "LdsRace", "LimitExceeded", "Misaligned", "NegativePart", "NeverWritten", "NotWaitedFor", "OutOfBounds", "OutOfScope",
           "Overflow", "Race", "SharedSlot", "UninitialisedRead", "UnwrittenOutput", "last_run", "probe", "probes"]
