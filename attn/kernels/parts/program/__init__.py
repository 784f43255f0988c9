"""What the program of every kernel is made of: ranges (UOps that are indices) and registers, statements (operations with side effects) in their
order, and the loops over tiles."""
