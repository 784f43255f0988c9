"""The UOp programs, one algorithm a file."""
