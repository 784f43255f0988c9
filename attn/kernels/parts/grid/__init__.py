"""The part of a problem that a workgroup computes: its tensors, its heads and its rows."""
