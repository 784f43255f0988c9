"""Reports on the machine code of kernels, without ROCm. The module source turns a name such as gfx942/128/float16/causal into a kernel; parse and
flow read its assembly; report, roofline and costs compute what it costs."""
