"""Record of a compiler that was found on this machine, and the error if no compiler on this machine can be used."""
from __future__ import annotations
import re
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips import CHIPS

OLDEST = 19                           # oldest LLVM release that compiles the kernels
ROCM = {19: "6.4", 20: "7.0"}         # LLVM release -> oldest ROCm that has it (docs/compilers.md)

class NoCompiler(RuntimeError):
  """Error: no compiler can compile the kernels for a chip. The message says which were found, and what to install."""

@dataclass(frozen=True)
class Found:
  """Compiler for AMD's chips that was found on this machine."""
  name: str                             # "clang" or "comgr", as in ATTN_COMPILER
  version: str                          # text with the LLVM release and the place of the compiler; part of the key of kept results
  compile: Callable[[str, str], bytes]  # (HIP source, chip) -> linked code object; raises CompileError

  @property
  def llvm(self) -> int|None:
    """LLVM release of the compiler, such as 22; None if unknown."""
    return llvm_release(self.version)

def llvm_release(version:str) -> int|None:
  """Returns the LLVM release in a version text, such as 22 for "clang version 22.1.8", or None if the text has none."""
  found = re.search(r"clang version (\d+)\.", version)
  return int(found[1]) if found is not None else None

def oldest_for(arch:str) -> int:
  """Returns the oldest LLVM release that can compile the kernels for a chip."""
  return max(OLDEST, CHIPS[arch].unit.llvm) if arch in CHIPS else OLDEST

def base_arch(arch:str) -> str:
  """Returns the name of a chip without its features, such as gfx942 for gfx942:sramecc+:xnack-."""
  return arch.split(":")[0]
