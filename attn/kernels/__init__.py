"""The kernels of attention, written as UOp programs. Each file holds one algorithm. The folders amd, mma and wgmma each implement the operations of
these algorithms (loads, products, softmax) with one kind of matrix instructions. The folder plain implements them without matrix instructions. The
folders nvidia, tiles and parts hold what several kernels share."""
