"""The operations that kernels are written in, where tinygrad has no UOp for them: see operation.py."""
