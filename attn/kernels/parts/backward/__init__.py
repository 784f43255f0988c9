"""Parts that only the backward kernels use: P and dS from scores, and a workgroup's share of the gradient of a bias."""
