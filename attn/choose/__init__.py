"""Choices for a problem on a chip: which kernel computes the problem, with which tile description, and with how many key ranges (KV splits)."""
