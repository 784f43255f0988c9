"""Makes tinygrad's device AMD compile attn's kernels with the compiler that choice.py finds. tinygrad's own kernels are compiled by tinygrad's
compiler, as before."""
from __future__ import annotations
import functools, shutil
from typing import Any
from attn.compilers import clang
from attn.compilers.choice import compiler_for
from attn.compilers.found import NoCompiler
from attn.ops.renderers import MARK, OperationsHIPCCRenderer, OperationsHIPRenderer
from attn.tinygrad_compat import (Compiled, Compiler, HIPCCRenderer, HIPRenderer, Ops, Target, c_compiler, device_of,
                                  double_transcendentals,
                                  opened_devices)

# The first line of a source marks attn's kernels (ops/renderers.py). tinygrad's compile processes import the class of a renderer from this module,
# so they choose the same compiler as their parent process.

class ClangCompiler(Compiler):
  """Compiler for tinygrad that compiles HIP with clang, by attn/compilers/clang.py."""
  # tinygrad's cache is not used: clang.py has a cache of its own, whose key contains the compiler's version
  def __init__(self, arch:str):
    self.arch, self.tools = arch, clang.toolchain()
    super().__init__(None)
  def compile(self, src:str) -> bytes: return clang.code_object(src, self.arch, tools=self.tools)
  def disassemble(self, lib:bytes) -> None:
    from attn.compilers.disassemble import disassemble
    print(disassemble(lib))

class CompilerByMark(Compiler):
  """Compiler for tinygrad that compiles attn's kernels with the compiler from `compiler_for`, and other kernels with the compiler `others`."""
  # The first line of a source says whether it is a kernel of attn. The cache of attn's kernels has the compiler's version in its key; other kernels
  # use tinygrad's cache.
  def __init__(self, arch:str, others:Compiler):
    self.arch, self.others = arch, others
    super().__init__(None)
  def compile(self, src:str) -> bytes: return compiler_for(self.arch).compile(src, self.arch) if src.startswith(MARK) else self.others.compile(src)
  def compile_cached(self, src:str) -> bytes: return self.compile(src) if src.startswith(MARK) else self.others.compile_cached(src)
  def disassemble(self, lib:bytes) -> None: self.others.disassemble(lib)

# tinygrad selects these classes by their names, for DEV=AMD:HIP, DEV=AMD:CLANG and DEV=AMD:HIPCC.
class AMDHIPRenderer(OperationsHIPRenderer):
  """Subclass of tinygrad's HIPRenderer that compiles attn's kernels with attn's compiler, and other kernels with comgr."""
  def __init__(self, target:Target):
    super().__init__(target)
    self.compiler = CompilerByMark(target.arch, self.compiler)

class AMDHIPCCRenderer(OperationsHIPCCRenderer):
  """Subclass of tinygrad's HIPCCRenderer that compiles attn's kernels with attn's compiler, and other kernels with ROCm's hipcc."""
  def __init__(self, target:Target):
    super().__init__(target)
    self.compiler = CompilerByMark(target.arch, self.compiler)

class AMDClangRenderer(OperationsHIPRenderer):
  """Subclass of tinygrad's HIPRenderer that compiles attn's kernels with attn's compiler, and other kernels with the clang of clang.py."""
  # DEV=AMD uses this renderer if comgr can't be loaded. It renders the same text as tinygrad's HIPRenderer, except for the sine, and exp2 and log2
  # of doubles: tinygrad expands these functions.
  def __init__(self, target:Target):
    super().__init__(target, use_hipcc=True)   # with HIPCC the constructor needs nothing installed
    self.compiler = CompilerByMark(target.arch, ClangCompiler(target.arch))
    self.code_for_op = {op: code for op, code in self.code_for_op.items() if op is not Ops.SIN}
    self.extra_matcher = self.extra_matcher + double_transcendentals

WITH_OUR_COMPILER: dict[Any, tuple[type, ...]] = {HIPRenderer: (AMDHIPRenderer, AMDClangRenderer), HIPCCRenderer: (AMDHIPCCRenderer,)}

def _offer(device:Any) -> None:
  if type(device).__name__ == "AMDDevice": device.renderers = [ours for r in device.renderers for ours in WITH_OUR_COMPILER.get(r, (r,))]

@functools.cache
def register_renderers() -> None:
  """Replaces tinygrad's renderers by attn's in the list of each AMD device."""
  # A device uses the first renderer that can be constructed, or the renderer that DEV names. No compiler is looked for, and no device is opened.
  init = Compiled.__init__
  @functools.wraps(init)
  def with_ours(self:Compiled, *args:Any, **kwargs:Any) -> None:
    init(self, *args, **kwargs)
    _offer(self)
  Compiled.__init__ = with_ours  # type: ignore[method-assign]
  for device in opened_devices("AMD"): _offer(device)

def missing_c_compiler(device:str) -> str|None:
  """Returns a sentence that says which compiler a CPU device lacks, or None if it lacks none."""
  if device.split(":")[0] != "CPU" or (command := c_compiler(device)) is None or shutil.which(command) is not None: return None
  return (f"tinygrad's device {device} needs a clang, but {command} is not there: install clang, or run `python -m pip install ziglang` and set CC "
          "to the path of examples/clang_of_zig.sh in a clone of attn")

def check_opens(device:str) -> None:
  """Raises NoCompiler if a CPU device can't be opened because there is no clang."""
  # tinygrad compiles four programs of its own when it opens such a device, unless it finds them in its cache
  try: device_of(device)
  except FileNotFoundError:
    if (missing := missing_c_compiler(device)) is None: raise
    raise NoCompiler(missing) from None

def require(devices:str|tuple[str, ...]|None) -> None:
  """Raises an error if attn's kernels can't be compiled for one of `devices`."""
  # An AMD GPU raises the NoCompiler or ValueError of `compiler_for`, or NotImplementedError if the GPU's renderer doesn't emit HIP (DEV=AMD:LLVM). A
  # CPU device without a clang raises NoCompiler.
  for name in (devices,) if isinstance(devices, str) else devices or ():
    if (missing := missing_c_compiler(name)) is not None: raise NoCompiler(missing)
    if name.split(":")[0] != "AMD": continue
    renderer = device_of(name).renderer
    compiler_for(renderer.target.arch)
    if not isinstance(renderer, HIPRenderer):
      raise NotImplementedError(f"device {name} has {type(renderer).__name__}, which prints no HIP: attn's kernels need DEV=AMD, DEV=AMD:HIP "
                                "or DEV=AMD:CLANG")
