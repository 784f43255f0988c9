"""What is kept on disk for the next process, in the user's cache directory: machine code, printed kernels, the fastest tiles."""
