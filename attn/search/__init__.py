"""Searches for the best tiles without a GPU: decides which tiles are compiled, predicts their speed from the machine code, ranks them, and writes the
table. The command is attn.tune."""
