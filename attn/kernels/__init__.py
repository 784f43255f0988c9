"""The kernels of attention, written in tinygrad's UOps. Each file holds one algorithm. The folders amd, mma and wgmma each implement the operations
of these algorithms (loads, products, softmax) for one family of matrix instructions. The folder plain implements them without matrix instructions.
The folders nvidia, tiles and parts hold what several kernels share."""
