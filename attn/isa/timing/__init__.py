"""Predicts the hot loop's time by stepping through its machine code cycle by cycle. Begin with trips.py; docs/timing.md compares predictions with
measurements."""
# steps.py: for each instruction, the execution unit and the cycles that it needs, and the instructions for whose results it waits
# addresses.py: LDS addresses and their bank conflicts
# waves.py: simulates the waves of a compute unit; trips.py: predicts the time of an iteration of a kernel's loop
# memory.py: the order of workgroups, and what they fetch from memory; predict.py: the time of a problem
# kernels.py: predictions for attn's kernels and for other kernels
# tables.py, drawing.py, costs_file.py: output
# The figures of the chips are in attn/chips/machine.py.
