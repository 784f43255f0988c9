"""Parts of every kernel's program: the ids of ranges and registers, the order of statements, and the loops over tiles."""
