"""The kernels without matrix instructions, in UOps that every device of tinygrad can render."""
