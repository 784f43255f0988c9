"""How each kernel divides a problem over workgroups and threads: its tile, in one file for each unit."""
