"""Compiles HIP text to assembly and code objects without ROCm, by the clang of the PyPI package `ziglang` or by another clang or hipcc. Begin with
`assembly`, whose text `python -m attn.isa FILE.s` can report on, and `code_object`, an ELF that tinygrad can load."""
from __future__ import annotations
import functools, importlib.metadata, importlib.util, os, re, shutil, subprocess, tempfile
from dataclasses import dataclass
from pathlib import Path
from attn.compilers.found import OLDEST, Found, NoCompiler, base_arch, llvm_release
from attn.tinygrad_compat import CompileError
from attn.cache.user_cache import kept

# The compiler is the program that ATTN_CLANG names (a path or a name on PATH), else the clang of `ziglang` (pip extra `isa`), else a `clang` or
# `hipcc` that can compile for AMD GPUs. Assembly texts and code objects are stored in the user's cache directory. The key consists of the source,
# the options, the architecture and the compiler version.

INSTALL = "install the extra isa, which brings a clang (pip install '.[isa]' in a clone of attn), or name a clang or hipcc in ATTN_CLANG"
NEEDED = f"needed is a clang or hipcc of LLVM {OLDEST} or later that knows AMD's chips (amdgcn)"

# These options are as close to tinygrad's own comgr call (runtime/support/compiler_amd.py: -O3 -mcumode -std=c++14 -nogpuinc, internalized symbols)
# as the driver allows. With -nogpulib and -nostdinc no file of ROCm or of the host is read. comgr of ROCm 6 writes code object version 5 too.
OPTIONS = ("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdinc", "-std=c++14", "-O3", "-mcumode", "-mcode-object-version=5",
           "-fuse-cuid=none", "-D__HIPCC_RTC__", "-Wno-gnu-line-marker", "-Wno-missing-prototypes", "-Wno-unused-command-line-argument")

# Definitions of the functions of ROCm's device library that tinygrad's HIP source declares. The workgroup's size comes from the dispatch packet,
# where tinygrad's runtime writes it (it fills no implicit kernel arguments). `sin`, and exp2 and log2 of doubles, are left undefined on purpose:
# AMDClangRenderer makes tinygrad expand them, because the hardware's sine is not accurate and the hardware has no exponential of doubles.
_FUNCTIONS = [("const", "unsigned long", f"__ockl_get_{name}", "unsigned d", f"d == 0 ? {x} : d == 1 ? {y} : {z}") for name, (x, y, z) in {
  "local_id": [f"__builtin_amdgcn_workitem_id_{c}()" for c in "xyz"],
  "group_id": [f"__builtin_amdgcn_workgroup_id_{c}()" for c in "xyz"],
  "local_size": [f"((const __attribute__((address_space(4))) unsigned short*)__builtin_amdgcn_dispatch_ptr())[{2+i}]" for i in range(3)]}.items()]
_FUNCTIONS += [(attribute, ctype, f"__ocml_{name}_f{bits}", f"{ctype} x", f"__builtin_elementwise_{name}(x)")
               for name, attribute, sizes in [("exp2", "pure", (16, 32)), ("log2", "pure", (16, 32)),
                                              ("sqrt", "const", (16, 32, 64)), ("trunc", "const", (16, 32, 64))]
               for bits, ctype in [(16, "_Float16"), (32, "float"), (64, "double")] if bits in sizes]
SOURCE_NAME = "kernel.hip"
PRELUDE = "".join(f'extern "C" inline __attribute__((device, always_inline, {attribute})) {ret} {name}({arg}) {{ return {body}; }}\n'
                  for attribute, ret, name, arg, body in _FUNCTIONS) + f'#line 1 "{SOURCE_NAME}"\n'

@dataclass(frozen=True)
class Toolchain:
  """Compiler and linker, each given by the first words of its command line."""
  clang: tuple[str, ...]
  # None: no linker was found
  lld: tuple[str, ...]|None
  # the compiler's version and where the compiler was found
  version: str
  @property
  def llvm(self) -> int:
    """LLVM release of the compiler, such as 22."""
    release = llvm_release(self.version)
    assert release is not None, self.version      # `inspected` has made sure of this
    return release

def _run(command:tuple[str, ...], text:str|None=None) -> subprocess.CompletedProcess[str]:
  return subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=False)

def _zig() -> str|None:
  spec = importlib.util.find_spec("ziglang")
  if spec is None or not spec.submodule_search_locations: return None
  return shutil.which("zig", path=next(iter(spec.submodule_search_locations)))

def _linker(clang:tuple[str, ...]) -> tuple[str, ...]|None:
  """Returns the command of the linker lld for the compiler whose command is `clang`, or None if there is none."""
  # the compiler's own lld is preferred, so that compiler and linker are of the same release
  if clang[-1] == "clang" and len(clang) == 2: return (clang[0], "ld.lld")
  own = _run((*clang, "-print-prog-name=ld.lld")).stdout.strip()
  if (path:=shutil.which(own) or shutil.which("ld.lld")) is not None: return (path,)
  return (zig, "ld.lld") if (zig:=_zig()) is not None else None

def inspected(command:tuple[str, ...], where:str) -> Toolchain|str:
  """Returns the compiler that `command` runs, found at `where`, or a text that says why this compiler can't be used."""
  path = shutil.which(command[0]) or command[0]
  if os.path.isdir(path): return "a directory"
  if not os.path.exists(path): return "neither a file nor a command on PATH"
  if not os.access(path, os.X_OK): return "a file that may not be executed"
  try: version, targets = (_run((*command, option)) for option in ("--version", "--print-targets"))
  except OSError as e: return f"no program: {e.strerror}"
  # hipcc prints its own version first; the line of the compiler contains "clang version"
  line = next((x.strip() for x in version.stdout.splitlines() if "clang version" in x), None)
  if version.returncode != 0 or line is None:
    said = (version.stdout + version.stderr).strip().splitlines()
    return f"not a clang: its --version says {said[0]!r}" if said else "not a clang: its --version says nothing"
  if "amdgcn" not in targets.stdout: return f"{line}, which does not know AMD's chips"
  if (llvm_release(line) or 0) < OLDEST: return f"{line}, which is too old"
  return Toolchain(command, _linker(command), f"{line} ({where})")

@functools.cache
def _named(name:str) -> Toolchain:
  found = inspected((name,), f"ATTN_CLANG={name}")
  if isinstance(found, str): raise ValueError(f"ATTN_CLANG={name!r}: it is {found}; {NEEDED}")
  return found

def named() -> Toolchain|None:
  """Returns the compiler that ATTN_CLANG names, or None if ATTN_CLANG is not set."""
  return _named(name) if (name := os.environ.get("ATTN_CLANG", "")) else None

@functools.cache
def packaged() -> Toolchain|str:
  """Returns the clang of the pip extra `isa` (pip install '.[isa]'), or a text that says why it can't be used."""
  if (zig := _zig()) is None: return "the extra isa is not installed"
  where = f"ziglang {importlib.metadata.version('ziglang')}"
  found = inspected((zig, "clang"), where)
  return found if isinstance(found, Toolchain) else f"{where} is {found}"

@functools.cache
def on_path() -> Toolchain|str:
  """Returns a clang or hipcc on PATH or in ROCm that can compile for AMD's chips, or a text that says why none can be used."""
  rocm, reasons = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm", "bin", "clang"), []
  for path in dict.fromkeys(path for name in ("clang", rocm, "hipcc") if (path := shutil.which(name)) is not None):
    if isinstance(found := inspected((path,), path), Toolchain): return found
    reasons.append(f"{path} is {found}")
  return "; ".join(reasons) or "there is no clang or hipcc on PATH"

def toolchain() -> Toolchain:
  """Returns the compiler that the tools for machine code use. Raises NoCompiler, with what to install, if there is none."""
  reasons = []
  # the one that ATTN_CLANG names, the clang of the pip extra `isa`, or one on PATH
  for find in (named, packaged, on_path):
    if isinstance(found := find(), Toolchain): return found
    if found is not None: reasons.append(found)
  raise NoCompiler(f"no clang of LLVM {OLDEST} or later for AMD's chips: {'; '.join(reasons)}; {INSTALL}")

def found(tools:Toolchain) -> Found:
  """Returns the clang `tools` as a `Found`, the record of compilers among which choice.py chooses."""
  return Found("clang", tools.version, lambda source, arch: code_object(source, arch, tools=tools))

# ***** compilation *****

def _fail(arch:str, stderr:str) -> CompileError:
  """Returns a CompileError with clang's messages, without its counts of errors and warnings."""
  text = "\n".join(x for x in stderr.splitlines() if not re.match(r"\d+ (warning|error)s? ", x)).strip()
  return CompileError(f"clang cannot compile this for {arch}:\n{text}")

def _undefined(text:str) -> list[str]:
  """Returns the functions of ROCm's device library that an assembly text calls."""
  # the debug information also names functions that the compiler has inlined
  return sorted(set(re.findall(r"\b__oc(?:ml|kl)_\w+", re.sub(r"(?m)^\s*\.asciz\s.*$", "", text))))

def assembly(source:str, arch:str, options:tuple[str, ...]=(), tools:Toolchain|None=None) -> str:
  """Compiles a HIP source to assembly text. Raises CompileError with clang's message and the source line."""
  clang, arch = tools or toolchain(), base_arch(arch)
  flags = (*OPTIONS, f"--offload-arch={arch}", *options)
  def compiled() -> bytes:
    done = _run((*clang.clang, *flags, "-S", "-o", "-", "-"), PRELUDE + source)
    if done.returncode != 0: raise _fail(arch, done.stderr)
    if missing := _undefined(done.stdout): raise CompileError(f"functions of ROCm's device library are missing for {arch}: {', '.join(missing)}")
    return done.stdout.encode()
  return kept("s", (PRELUDE, source, arch, *flags, clang.version), compiled).decode()

def assemble(text:str, arch:str, tools:Toolchain|None=None) -> bytes:
  """Assembles and links assembly text to a code object. Raises CompileError for a wrong text."""
  clang, arch = tools or toolchain(), base_arch(arch)
  def assembled() -> bytes:
    if clang.lld is None: raise NoCompiler(f"there is no ld.lld beside {clang.version} or on PATH to link a code object with; {INSTALL}")
    with tempfile.TemporaryDirectory() as folder:
      relocatable, linked = os.path.join(folder, "kernel.o"), os.path.join(folder, "kernel.co")
      target = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-mcode-object-version=5")
      for command in ((*clang.clang, *target, "-c", "-x", "assembler", "-", "-o", relocatable),
                      (*clang.lld, "-shared", "--no-undefined", relocatable, "-o", linked)):
        done = _run(command, text)
        if done.returncode != 0: raise _fail(arch, done.stderr)
      return Path(linked).read_bytes()
  return kept("co", (text, arch, clang.version), assembled)

def code_object(source:str, arch:str, tools:Toolchain|None=None) -> bytes:
  """Compiles a HIP source to a linked code object."""
  # a source that begins with `.text` counts as assembly text, as for tinygrad's own compiler
  is_assembly = source.split("\n", 1)[0].strip() == ".text"
  return assemble(source if is_assembly else assembly(source, arch, tools=tools), arch, tools)
