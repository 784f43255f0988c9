"""The machine code of kernels without ROCm: compiling it (compiler), reading it (parse, flow), what it costs (model, report, roofline, costs)."""
