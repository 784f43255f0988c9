"""Files that attn keeps for later processes in the user's cache directory: machine code, printed kernels, the fastest tiles."""
