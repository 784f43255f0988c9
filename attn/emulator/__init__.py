"""A GPU emulator for tinygrad kernels: the device `EMU`.

device.py is tinygrad's side, plan.py and machine.py the interpreter, memory.py and alu.py what it works with, matrix.py the matrix instructions,
checks.py the sanitiser, banks.py the count of LDS bank conflicts. ATTN_EMU_CHECKS=0 turns the
sanitiser off, ATTN_EMU_BANKS=1 the count on, which it prints for each kernel.
"""
from attn.emulator.checks import EmulatorError
from attn.emulator.machine import Launch, last_run

__all__ = ["EmulatorError", "Launch", "last_run"]
