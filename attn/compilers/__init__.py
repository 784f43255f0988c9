"""Compilers for AMD's chips: finds them, chooses the compiler for attn's kernels, and makes tinygrad's device AMD use it. Begin with choice.py;
docs/compilers.md."""
# clang.py and comgr.py call the two kinds of compilers. choice.py finds a compiler that can compile the kernels. renderer.py gives this compiler to
# tinygrad.
