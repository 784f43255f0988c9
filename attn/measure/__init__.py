"""Measurements on a real GPU. Most of them compare the kernels with other people's kernels."""
