"""Functions for scores and masks that a caller writes. attn calls such a function once with UOps as arguments, and so gets an expression of UOps
(traces the function). Kernels compute the expression."""
