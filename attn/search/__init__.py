"""Search for the best tiles without a GPU, by speeds predicted from machine code. The command is `python -m attn.tune`."""
