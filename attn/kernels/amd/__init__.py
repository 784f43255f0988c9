"""The kernels with AMD's matrix instructions, MFMA and WMMA."""
