"""Report of a card: which results are right, how fast each kernel is, and how fast it was predicted to be. `python -m attn.report` writes one."""
