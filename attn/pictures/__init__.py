"""Draws the pictures of the documents from the tables and functions that the kernels use: `python -m attn.pictures`."""
# No module of this package defines where an element lies or which keys a block loops over. The modules call the kernels' functions and draw their
# answers. A test draws the pictures again and compares them with the files in docs/pictures.
