"""Reads the machine code of kernels, without ROCm: names kernels (source), reads assembly (parse, flow), and reports what it costs (report, roofline,
costs)."""
