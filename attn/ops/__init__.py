"""Operations of attn's kernels for which tinygrad has no UOp: operation.py explains how they are defined."""
