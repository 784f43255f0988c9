"""Parts that the kernels by mma.sync and by wgmma share: a warp's fragments, and copies to shared memory."""
