"""The machine code of kernels without ROCm: compiling it (compiler), reading it (parse, flow), what it costs (report, roofline, costs)."""
