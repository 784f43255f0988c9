"""Rows in global memory, tiles in LDS, fragments in lanes, and how data moves between them."""
