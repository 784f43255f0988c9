"""Changes of the scores between Q K^T and the softmax: first the score terms (softcap, ALiBi, bias, score_mod), then the masks. Each term is a row of
the table in attn/score/terms.py, each mask a row of the table in attn/score/masks.py.

A term's table row has functions for its value on a fragment (the scores that a lane holds), for its derivative, and for its value in tensor
operations. It also lists the tensors that the term reads, and how many registers it needs. A mask's table row says which keys a query sees, which
queries see a key, and gives its form in tensor operations. Kernels, dispatch, checks and sharding read these table rows, and know no term and no mask
by name. The float64 reference of each term and mask is separate: attn/reference.py."""
