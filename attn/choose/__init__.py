"""What a problem gets on a chip: which kernel, which tile, how many key ranges."""
