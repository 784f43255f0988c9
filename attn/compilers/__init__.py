"""Compilers of AMD's machine code: which there are, which one compiles the kernels of attn, and how tinygrad's device AMD gets it. docs/compilers.md

clang.py and comgr.py drive the two kinds, choice.py finds the one that is good enough, renderer.py hands it to tinygrad.
"""
