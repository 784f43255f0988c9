"""Search for the best tile descriptions without a GPU, by speeds predicted from machine code. The command is `python -m attn.tune`."""
