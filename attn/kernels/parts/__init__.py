"""Parts that several kernels share. program: loops, blocks, and the order of operations with side effects. memory: reading rows, layouts in LDS,
positions of lanes. weights: what happens to scores between the matrix products, and to O after them. grid: which rows a workgroup has. backward: P
and dS."""
