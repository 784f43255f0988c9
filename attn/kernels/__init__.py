"""The kernels of attention, written as UOp programs. Each file holds one algorithm. The folders amd, mma, wgmma and plain each hold the steps of the
algorithms for one kind of matrix unit. The folders nvidia, tiles and parts hold what several kernels share."""
