"""Parts that several kernels share. Each module holds one idea of attention on matrix units."""
