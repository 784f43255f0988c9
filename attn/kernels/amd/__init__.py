"""The steps of the kernels by AMD's matrix instructions, MFMA and WMMA."""
