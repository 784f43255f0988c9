"""Reads the machine code of kernels, without ROCm: names kernels (source), reads assembly (parse, flow), and says what it costs (report, roofline,
costs)."""
