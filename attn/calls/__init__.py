"""The parts of a call of attention: options, placement on devices, views of tensors, kernels as tinygrad takes them, and gradients."""
