"""Steps of a score between Q K^T and the softmax: first the terms, one table row each (attn/score/terms.py), then the masks, one table row each
(attn/score/masks.py).

A term's table row holds functions for its value on a fragment, for its derivative and for its value in tensor operations. It also lists the tensors
that the term reads, and its cost in registers.
A mask's table row says which columns it leaves to a row, seen from queries and from keys, and its form in tensor operations. Kernels, dispatch,
checks and sharding read these table rows, and know no term and no mask by name. The float64 reference of each term and mask is separate:
attn/reference.py.
"""
