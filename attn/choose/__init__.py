"""Choices for a problem on a chip: which kernel computes it, with which tile, and with how many key ranges (KV splits)."""
