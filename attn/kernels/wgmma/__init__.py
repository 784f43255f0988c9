"""Implementation of the kernels with wgmma, the matrix instructions of Hopper."""
