"""Operations that attn's kernels use and tinygrad has no UOp for: see operation.py."""
