"""Code that the kernels with mma.sync and the kernels with wgmma share: the rows and fragments of a warp, and copies to shared memory."""
