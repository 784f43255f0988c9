"""Search for the best tiles without a GPU: which tiles to compile, a prediction of their speed from the machine code, their order, and the text of
the tables of tiles. The command is `python -m attn.tune`."""
