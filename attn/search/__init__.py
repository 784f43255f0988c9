"""Searches for the best tiles by predictions from machine code: which tiles are compiled, how they are ranked, and how the table is written. The
command is attn.tune."""
