#!/bin/sh
# The clang of the wheel `ziglang`, for tinygrad's DEV=CPU, which takes the compiler that CC names:
#   CC=examples/clang_of_zig.sh DEV=CPU python examples/stable_diffusion_vae_attention.py
# It names targets in another way, and by default adds what tinygrad's loader does not take.
for argument do
  shift
  case "$argument" in --target=*) argument="--target=$(uname -m)-linux-musl" ;; esac
  set -- "$@" "$argument"
done
exec python -m ziglang cc -g0 -fno-sanitize=undefined "$@"
