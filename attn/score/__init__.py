"""What happens to a score between Q K^T and the softmax: a sequence of terms, one row each (attn/score/terms.py), and then the masks, one row each
(attn/score/masks.py).

A term's row says its value on a fragment, its derivative, its value in tensor operations, the tensors that it reads, and what it costs. A mask's row
says which columns it leaves a row, seen from queries and from keys, and the same in tensor operations. Kernels, dispatch, checks and sharding read
the rows, and know no term and no mask by name. The float64 reference of each stands apart: attn/reference.py.
"""
