"""The steps of the kernels by wgmma, the matrix instructions of Hopper."""
