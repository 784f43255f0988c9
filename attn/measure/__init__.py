"""Measurements on a real GPU, mostly in comparison with other people's kernels."""
