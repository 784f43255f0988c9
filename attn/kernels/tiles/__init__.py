"""Tile descriptions of the kernels. A description, such as `Tile` or `BackwardTile`, is a set of sizes: it says how a kernel divides a problem over
workgroups and threads. Each kind of matrix unit has a file."""
