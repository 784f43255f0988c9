#!/bin/sh
# The clang of examples/clang_of_zig.sh for tinygrad's DEV=CPU, of kernels that end their process where they leave an array of their own, or where a
# vector is not aligned. tinygrad keeps what it has compiled whatever the compiler was: CCACHE=0.
exec "$(dirname "$0")/../examples/clang_of_zig.sh" "$@" -fsanitize=array-bounds,local-bounds,alignment,null -fsanitize-trap=all
