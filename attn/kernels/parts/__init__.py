"""What several kernels share, in five folders:

- program: ranges, loops over tiles, blocks of rows, and the order of statements
- memory: loads of rows, layouts in LDS, and positions of lanes
- weights: what happens to scores between the two matrix products, and to O after them
- grid: which rows a workgroup computes, and which tensors a kernel takes
- backward: P and dS, and the order in which workgroups add to dQ"""
