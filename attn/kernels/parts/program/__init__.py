"""Parts that every program is made of: numbers of ranges and registers, statements in their order, and the loops over tiles."""
