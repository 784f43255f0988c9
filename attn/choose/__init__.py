"""What a problem gets on a chip: which kernel, which tile, how many key ranges; and the search that made the tables."""
