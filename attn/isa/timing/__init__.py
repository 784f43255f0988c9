"""Predicts the hot loop's time by stepping through its machine code cycle by cycle. docs/timing.md compares predictions with measurements.

steps: the results, unit and cycles that each instruction needs; addresses: LDS addresses and their bank conflicts; waves: the waves of a compute
unit; trips: the iterations of a kernel's loops; predict: the time of a problem; kernels: predictions for our kernels and others; tables, drawing:
output. The machine's figures are in attn/chips/machine.py."""
