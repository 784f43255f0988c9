"""Steps between the matrix products and after them: scores, their softmax, dropout, the ends of rows, and merging."""
