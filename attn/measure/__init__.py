"""Measurements that need a real GPU and other people's kernels."""
