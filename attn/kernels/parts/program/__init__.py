"""What the program of every kernel is made of: ranges, registers, statements in their order, and loops over tiles."""
