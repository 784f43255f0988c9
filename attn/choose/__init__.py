"""Choices for a problem on a chip: which kernel computes it, with which tile description (the sizes by which the kernel divides its work), and with
how many key ranges (KV splits)."""
