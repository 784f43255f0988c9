"""A GPU emulator for tinygrad kernels: the device `EMU`. See device.py (tinygrad's side), plan.py and machine.py (the interpreter), checks.py (the sanitiser)."""
