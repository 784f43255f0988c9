"""Draws the pictures of the documents from the tables and functions that the kernels use: `python -m attn.pictures`.

This package does not itself define where an element lies or which keys a block loops over. It calls the kernels' functions and draws their answers. A
test draws the pictures again and compares them with the files in docs/pictures."""
