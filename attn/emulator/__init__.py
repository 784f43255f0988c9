"""A GPU emulator for tinygrad kernels: the device `EMU`. docs/emulator.md is its manual.

device.py is tinygrad's side. plan.py makes a program (program.py) of UOps, machine.py runs it: threads.py says who is which, memory.py and alu.py are
what it works with, shadow.py who touched which location of LDS, under_way.py what has been started and not waited for, matrix.py the matrix
instructions, checks.py the kinds of errors, chips.py the targets, ranges.py what a program's integers can be, offsets.py what offsets of
buffer instructions are sums of, listing.py where an operation stands in Python and in C, probe.py a look at values inside a kernel, banks.py the
count of LDS bank conflicts. ATTN_EMU_CHECKS=0 turns the sanitiser off, ATTN_EMU_BANKS=1 the count on, which it then prints for each kernel.
"""
from attn.emulator.checks import (AccessError, BadEntry, BadOperand, Divergence, DivergentBarrier, DivergentMatrix, EmulatorError, LaunchLimit,
                                  LdsLimit, LdsRace, LimitExceeded, Misaligned, NegativePart, NeverWritten, NotWaitedFor, OutOfBounds, OutOfScope,
                                  Overflow, Race, SharedSlot, UninitialisedRead, UnwrittenOutput)
from attn.emulator.machine import Launch, last_run
from attn.emulator.probe import probe, probes

__all__ = ["AccessError", "BadEntry", "BadOperand", "Divergence", "DivergentBarrier", "DivergentMatrix", "EmulatorError", "Launch", "LaunchLimit",
           "LdsLimit", "LdsRace", "LimitExceeded", "Misaligned", "NegativePart", "NeverWritten", "NotWaitedFor", "OutOfBounds", "OutOfScope",
           "Overflow", "Race", "SharedSlot", "UninitialisedRead", "UnwrittenOutput", "last_run", "probe", "probes"]
