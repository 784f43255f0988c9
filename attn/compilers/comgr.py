"""Compiles kernels with comgr, ROCm's compiler library, which tinygrad loads, and finds out comgr's version."""
from __future__ import annotations
import contextlib, functools, io, re
from attn.compilers.found import Found, base_arch
from attn.tinygrad_compat import CompileError, Compiler, comgr_compiler, comgr_version
from attn.cache.user_cache import kept

# comgr doesn't tell its LLVM release, but the section .comment of a compiled kernel does. Every comgr knows gfx900.
# the machine code is stored in the user's cache directory, separately for each version of comgr
EMPTY_KERNEL, ANY_ARCH = 'extern "C" __attribute__((global)) void attn_empty(float* x) { *x = 0.0f; }', "gfx900"

def _compile(compiler:Compiler, source:str) -> bytes:
  """Compiles a source with comgr; the error for a wrong source contains comgr's messages."""
  # tinygrad only prints comgr's messages
  printed = io.StringIO()
  try:
    with contextlib.redirect_stdout(printed): return compiler.compile(source)
  except CompileError as e: raise CompileError(f"comgr cannot compile this for {compiler.arch}: {e}\n{printed.getvalue()}".strip()) from None  # type: ignore[attr-defined]

@functools.cache
def _version() -> str:
  """Returns the version of comgr as text, such as "comgr 3.0 with AMD clang version 20.0.0git (roc-7.1.1 ...)"."""
  name = "comgr {}.{}".format(*comgr_version())
  try: lib = _compile(comgr_compiler(ANY_ARCH), EMPTY_KERNEL)
  except CompileError: return f"{name}, which cannot compile even an empty kernel"
  clang = re.search(rb"[ -~]*clang version [ -~]*", lib)
  return f"{name} with {clang[0].decode()}" if clang is not None else name

def compile_hip(source:str, arch:str) -> bytes:
  """Compiles a HIP source to a linked code object. Raises CompileError with comgr's message."""
  arch = base_arch(arch)
  return kept("co", ("comgr", _version(), arch, source), lambda: _compile(comgr_compiler(arch), source))

def loaded_comgr() -> Found|str:
  """Returns comgr as a compiler that choice.py can choose, or a text that says why comgr can't be loaded."""
  try: comgr_compiler(ANY_ARCH)
  except AssertionError as e: return str(e)
  return Found("comgr", _version(), compile_hip)
