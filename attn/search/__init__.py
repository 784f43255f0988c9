"""Searches tiles by predictions from machine code: which tiles it compiles, how it ranks them, and the table that it writes. The command is
attn.tune."""
