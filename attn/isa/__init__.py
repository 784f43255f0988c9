"""Reports on the machine code of kernels, without ROCm. Begin with report.py; `python -m attn.isa` prints the reports."""
# source.py renders the source of a kernel of attn, which a word such as gfx942/128/float16/causal names
# parse.py reads assembly; flow.py finds the loops in it
# report.py, roofline.py and costs.py compute the costs of the code: registers, instructions, cycles
