"""Measurements that need a real GPU, most of them beside other people's kernels."""
