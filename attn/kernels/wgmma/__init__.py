"""The kernels with wgmma, the matrix instructions of Hopper."""
