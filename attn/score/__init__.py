"""What happens to a score between Q K^T and the softmax: a sequence of terms, one row each (attn/score/terms.py).

A row says the term's value on a fragment, its derivative, its value in tensor operations, the tensors that it reads, and what it costs. Kernels,
dispatch, checks and sharding read the rows, and know no term by name. The float64 reference of each stands apart: attn/reference.py.
"""
