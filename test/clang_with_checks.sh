#!/bin/sh
# Runs the clang of examples/clang_of_zig.sh for tinygrad's DEV=CPU, with checks: a kernel stops its process if it leaves a private array, or if a
# vector is not aligned. tinygrad caches compiled kernels without regard to the compiler, so set CCACHE=0 or a CACHEDB of its own.
exec "$(dirname "$0")/../examples/clang_of_zig.sh" "$@" -fsanitize=array-bounds,local-bounds,alignment,null -fsanitize-trap=all
