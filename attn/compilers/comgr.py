"""ROCm's compiler library, comgr, as tinygrad loads it: what it is, and machine code from it that is kept by its version."""
from __future__ import annotations
import contextlib, functools, io, re
from attn.compilers.found import Found, base_arch
from attn.tinygrad_compat import CompileError, Compiler, comgr_compiler, comgr_version
from attn.cache.user_cache import kept

# comgr doesn't say which LLVM is in it, but what it compiles does, in the section .comment. Every comgr knows gfx900.
EMPTY_KERNEL, ANY_ARCH = 'extern "C" __attribute__((global)) void attn_empty(float* x) { *x = 0.0f; }', "gfx900"

def _compile(compiler:Compiler, source:str) -> bytes:
  """tinygrad prints the diagnostics; here they belong to the error."""
  printed = io.StringIO()
  try:
    with contextlib.redirect_stdout(printed): return compiler.compile(source)
  except CompileError as e: raise CompileError(f"comgr cannot compile this for {compiler.arch}: {e}\n{printed.getvalue()}".strip()) from None  # type: ignore[attr-defined]

@functools.cache
def _version() -> str:
  """Such as "comgr 3.0 with AMD clang version 20.0.0git (roc-7.1.1 ...)"."""
  name = "comgr {}.{}".format(*comgr_version())
  try: lib = _compile(comgr_compiler(ANY_ARCH), EMPTY_KERNEL)
  except CompileError: return f"{name}, which compiles not even an empty kernel"
  clang = re.search(rb"[ -~]*clang version [ -~]*", lib)
  return f"{name} with {clang[0].decode()}" if clang is not None else name

def compile_hip(source:str, arch:str) -> bytes:
  """The linked code object of a HIP source. CompileError carries comgr's words."""
  arch = base_arch(arch)
  return kept("co", ("comgr", _version(), arch, source), lambda: _compile(comgr_compiler(arch), source))

def loaded_comgr() -> Found|str:
  """comgr, or why there is none."""
  try: comgr_compiler(ANY_ARCH)
  except AssertionError as e: return str(e)
  return Found("comgr", _version(), compile_hip)
