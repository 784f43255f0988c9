"""Parts of every kernel's program: the ids of ranges and registers, the order of statements (operations with side effects), and the loops over
tiles."""
