"""Tile descriptions of the kernels, such as `Tile`: sizes that say how a kernel divides a problem over workgroups and threads."""
