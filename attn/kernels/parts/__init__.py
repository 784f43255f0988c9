"""What several kernels share: program (loops and the order of statements), memory (rows and layouts), weights (scores to O), grid (what a workgroup
computes), and backward (P, dS, and the order in which workgroups add to dQ)."""
