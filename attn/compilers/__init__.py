"""Compilers for AMD's chips: the search for compilers, the choice of the compiler for attn's kernels, and its use by tinygrad's device AMD. See
docs/compilers.md.

clang.py and comgr.py drive the two kinds of compilers. choice.py finds a compiler that can compile the kernels. renderer.py gives this compiler to
tinygrad.
"""
