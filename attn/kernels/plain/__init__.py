"""The steps of the kernels in plain UOps, for every device that tinygrad renders for."""
