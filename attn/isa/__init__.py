"""The machine code of kernels without ROCm: which source is whose (source), reading it (parse, flow), what it costs (report, roofline, costs)."""
