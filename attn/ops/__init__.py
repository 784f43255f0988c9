"""Operations that attn's kernels use and that tinygrad has no UOp for: see operation.py."""
