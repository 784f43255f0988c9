"""The tiles of the kernels. A tile is a set of numbers that says how a kernel divides a problem over workgroups and threads. Each kind of matrix unit
has a file."""
