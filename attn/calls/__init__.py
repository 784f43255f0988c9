"""Parts of a call of attention: options, placement on devices, views of tensors, kernels in the form that tinygrad needs, and gradients."""
