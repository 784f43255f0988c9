"""Functions for scores and masks that a caller writes. attn calls such a function once with UOps as arguments, and so gets an expression of UOps
(traces the function). attn then evaluates the expression in kernels, differentiates the expression, and finds the intervals of keys that a mask
leaves visible."""
