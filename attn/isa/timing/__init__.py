"""Predicts the hot loop's time by stepping through its machine code cycle by cycle. docs/timing.md compares predictions with measurements.

steps: the unit and the cycles that each instruction needs, and the results that it waits for; addresses: LDS addresses and their bank conflicts;
waves: the waves of a compute unit; trips: the iterations of a kernel's loops; memory: the order of workgroups, and what they fetch; predict: the
time of a problem; kernels: predictions for attn's kernels and for other kernels; tables, drawing, costs_file: output. The machine's figures are in
attn/chips/machine.py."""
