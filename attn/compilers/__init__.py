"""Compilers for AMD's chips: finding them, choosing one for attn's kernels, and giving it to tinygrad's device AMD. See docs/compilers.md.

clang.py and comgr.py drive the two kinds of compilers. choice.py finds one that can compile the kernels. renderer.py gives it to tinygrad.
"""
