"""Functions for scores and masks that a caller writes. attn calls such a function once on UOps (traces it). The resulting expression of UOps is then
evaluated, differentiated, and bounded by intervals of visible keys."""
