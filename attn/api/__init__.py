"""The public functions: attention of Tensors, the key/value cache, `scaled_dot_product_attention`, and kernels for `Tensor.custom_kernel`."""
