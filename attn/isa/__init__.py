"""Reports on the machine code of kernels, without ROCm. The module source makes the source of the kernel that a word such as
gfx942/128/float16/causal names. The modules parse and flow read assembly. The modules report, roofline and costs compute the costs of the code:
registers, instructions, cycles."""
