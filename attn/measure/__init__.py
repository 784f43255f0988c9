"""Measurements on a real GPU. Most of them compare attn's kernels with kernels of other projects."""
