"""What kernels compute between and after the matrix products: scores, softmax, dropout, the final O and LSE of each row, and merging of partial
results."""
