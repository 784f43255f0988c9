"""The tiles of the kernels. A tile says how a kernel divides a problem over workgroups and threads. Each kind of matrix unit has a file."""
