"""Files that attn keeps for later processes in the user's cache directory: machine code, the rendered source of kernels, the fastest tile
descriptions."""
