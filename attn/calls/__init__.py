"""What a call of attention is made of: options, where tensors lie and which views they are, kernels as tinygrad takes them, and their gradients."""
