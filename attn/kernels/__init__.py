"""The kernels of attention, written in tinygrad's UOps: one algorithm in each file. Begin with textbook.py. The folders amd, mma, wgmma and plain
implement the algorithms' operations for one kind of matrix instructions, or for none; nvidia, tiles and parts hold what several kernels share."""
