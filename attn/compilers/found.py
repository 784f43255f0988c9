"""A compiler that is there, and the error where none will do."""
from __future__ import annotations
import re
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips import CHIPS

OLDEST = 19                           # the release of LLVM from which on the kernels compile
ROCM = {19: "6.4", 20: "7.0"}         # the ROCm that brings it (docs/compilers.md)

class NoCompiler(RuntimeError):
  """No compiler can compile the kernels for a chip. The message is one sentence: what was found, why it won't do, what to install."""

@dataclass(frozen=True)
class Found:
  """A compiler of HIP for AMD's chips."""
  name: str                             # "clang" or "comgr": what ATTN_COMPILER calls it
  version: str                          # with the release of LLVM and where it was found; what it compiled is kept under this
  compile: Callable[[str, str], bytes]  # HIP source, chip -> linked code object; raises CompileError

  @property
  def llvm(self) -> int|None:
    """The release of LLVM in it, such as 22."""
    return llvm_release(self.version)

def llvm_release(version:str) -> int|None:
  """22 of "clang version 22.1.8"."""
  found = re.search(r"clang version (\d+)\.", version)
  return int(found[1]) if found is not None else None

def oldest_for(arch:str) -> int:
  """Oldest release of LLVM that kernels for a chip are compiled with."""
  return max(OLDEST, CHIPS[arch].unit.llvm) if arch in CHIPS else OLDEST

def base_arch(arch:str) -> str:
  """gfx942 of gfx942:sramecc+:xnack-"""
  return arch.split(":")[0]
