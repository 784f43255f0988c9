"""Parts of the backward kernels alone: P and dS of scores, and the share of a bias that a workgroup has."""
