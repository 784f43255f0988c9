"""The kernels with mma.sync, the matrix instructions of NVIDIA's chips from sm_80 on."""
