"""The part of a problem that a workgroup has: its tensors, its heads and its rows."""
