"""Changes of the scores between Q K^T and the softmax: first the terms (softcap, ALiBi, bias, score_mod), then the masks. Each term is one row of a
table in attn/score/terms.py, each mask one row of a table in attn/score/masks.py.

A term's table row holds functions for its value on a fragment, which is the scores that a lane holds, for its derivative, and for its value in tensor
operations. It also lists the tensors that the term reads, and its cost in registers. A mask's table row says which keys a query sees, which queries
see a key, and its form in tensor operations. Kernels, dispatch, checks and sharding read these table rows, and know no term and no mask by name. The
float64 reference of each term and mask is separate: attn/reference.py.
"""
