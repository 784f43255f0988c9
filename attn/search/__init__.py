"""The search for tiles by predictions from machine code: which it compiles, how it ranks them, the table that it writes. The command is attn.tune."""
