"""The pictures of docs/algorithm.md, drawn from the tables and functions that the kernels themselves use: `python -m attn.pictures`.

Nothing here says where an element lies or which keys a block walks over. It calls what the kernels call, and draws the answer; a test draws the
pictures again and compares them with the files in docs/pictures.
"""
