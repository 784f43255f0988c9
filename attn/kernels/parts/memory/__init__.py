"""Rows in global memory, tiles in LDS, fragments in lanes, and the ways between them."""
