"""Reports on the machine code of kernels, without ROCm: names kernels (source), reads assembly (parse, flow), and computes what a kernel costs
(report, roofline, costs)."""
