"""HIP text -> assembly and code object, with no ROCm: by the clang of the PyPI package `ziglang` (extra `attn[isa]`), or by another clang or hipcc.

    assembly(source, "gfx942")      the text that `python -m attn.isa FILE.s` reports on
    code_object(source, "gfx942")   a linked ELF, as tinygrad's AMDProgram loads it

The compiler is the one named by ATTN_CLANG (a path or a name on PATH), else the clang of `ziglang`, else a `clang` or `hipcc` that knows AMD GPUs.
Results are kept in the user's cache directory, by source, options, architecture and compiler version.
"""
from __future__ import annotations
import functools, hashlib, importlib.metadata, importlib.util, os, re, shutil, subprocess, tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from attn.ops.renderers import OperationsHIPRenderer
from attn.tinygrad_compat import Compiled, CompileError, Compiler, HIPRenderer, Ops, Target, double_transcendentals, opened_devices

INSTALL = "install attn[isa] (the PyPI package ziglang brings clang), or name a clang or hipcc in ATTN_CLANG"

# As near to tinygrad's own comgr call (runtime/support/compiler_amd.py: -O3 -mcumode -std=c++14 -nogpuinc, internalized symbols) as the driver goes.
# -nogpulib and -nostdinc: nothing of ROCm or of the host is read. Code object version 5 is what comgr of ROCm 6 writes.
OPTIONS = ("-x", "hip", "--cuda-device-only", "-nogpulib", "-nogpuinc", "-nostdinc", "-std=c++14", "-O3", "-mcumode", "-mcode-object-version=5",
           "-fuse-cuid=none", "-D__HIPCC_RTC__", "-Wno-gnu-line-marker", "-Wno-missing-prototypes", "-Wno-unused-command-line-argument")

# The functions of ROCm's device library that tinygrad's HIP source declares. The workgroup's size comes from the dispatch packet, which is where
# tinygrad's runtime writes it (it fills no implicit kernel arguments). `sin`, and exp2 and log2 of doubles, are not here: AMDClangRenderer has
# tinygrad expand them, since the hardware's sine is not accurate and it has no double exponential.
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
  """A compiler and its linker, as the beginnings of command lines."""
  clang: tuple[str, ...]
  lld: tuple[str, ...]|None
  version: str

def _run(command:tuple[str, ...], text:str|None=None) -> subprocess.CompletedProcess[str]:
  return subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", check=False)

def _zig() -> str|None:
  spec = importlib.util.find_spec("ziglang")
  if spec is None or not spec.submodule_search_locations: return None
  return shutil.which("zig", path=next(iter(spec.submodule_search_locations)))

def _candidates() -> list[tuple[tuple[str, ...], str]]:
  """(the compiler's command, where it was found), best first."""
  if (named:=os.environ.get("ATTN_CLANG")) is not None: return [((named,), "ATTN_CLANG")]
  zig = _zig()
  found = [((zig, "clang"), f"ziglang {importlib.metadata.version('ziglang')}")] if zig is not None else []
  rocm = os.path.join(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm", "bin", "clang")
  return found + [((path,), path) for name in ("clang", rocm, "hipcc") if (path:=shutil.which(name)) is not None]

def _linker(clang:tuple[str, ...]) -> tuple[str, ...]|None:
  """lld of the compiler's own release where it has one: a code object is linked by the version that wrote it."""
  if clang[-1] == "clang" and len(clang) == 2: return (clang[0], "ld.lld")
  own = _run((*clang, "-print-prog-name=ld.lld")).stdout.strip()
  if (path:=shutil.which(own) or shutil.which("ld.lld")) is not None: return (path,)
  return (zig, "ld.lld") if (zig:=_zig()) is not None else None

@functools.cache
def toolchain() -> Toolchain:
  """The compiler in use. Raises RuntimeError, saying what to install, where there is none that knows AMD GPUs."""
  reasons = []
  for clang, where in _candidates():
    try: version, targets = (_run((*clang, option)) for option in ("--version", "--print-targets"))
    except OSError as e: reasons.append(f"{where}: {e}")
    else:
      # hipcc prints its own version first; the compiler's line is the one that names clang
      line = next((x.strip() for x in version.stdout.splitlines() if "clang version" in x), None)
      if version.returncode == 0 and line is not None and "amdgcn" in targets.stdout: return Toolchain(clang, _linker(clang), f"{line} ({where})")
      wrong = "its clang has no amdgcn target" if line is not None else f"not a clang: {version.stderr.strip() or 'no version'}"
      reasons.append(f"{where}: {wrong}")
  raise RuntimeError(f"no compiler for AMD GPUs: {INSTALL}" + "".join(f"\n  {r}" for r in reasons))

# ***** cache *****

def _cache_path(kind:str, *key:str) -> Path:
  import platformdirs
  digest = hashlib.sha256("\0".join((kind, *key)).encode()).hexdigest()
  return Path(platformdirs.user_cache_dir("attn")) / "isa" / f"{digest}.{kind}"

def _write_atomically(path:Path, data:bytes) -> None:
  """So that another process sees the whole file or none. A cache that can't be written is no error."""
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as f: f.write(data)
    os.replace(f.name, path)
  except OSError: pass

# ***** compilation *****

def base_arch(arch:str) -> str:
  """gfx942 of gfx942:sramecc+:xnack-"""
  return arch.split(":")[0]

def _fail(arch:str, stderr:str) -> CompileError:
  """clang's diagnostics with the source lines they quote, less its counts."""
  text = "\n".join(x for x in stderr.splitlines() if not re.match(r"\d+ (warning|error)s? ", x)).strip()
  return CompileError(f"clang cannot compile this for {arch}:\n{text}")

def _undefined(text:str) -> list[str]: return sorted(set(re.findall(r"\b__oc(?:ml|kl)_\w+", text)))

def assembly(source:str, arch:str, options:tuple[str, ...]=()) -> str:
  """The assembly text of a HIP source; `options` are added to clang's command line. CompileError carries clang's words and the source line."""
  tools, arch = toolchain(), base_arch(arch)
  flags = (*OPTIONS, f"--offload-arch={arch}", *options)
  path = _cache_path("s", PRELUDE, source, arch, *flags, tools.version)
  if path.is_file(): return path.read_text()
  done = _run((*tools.clang, *flags, "-S", "-o", "-", "-"), PRELUDE + source)
  if done.returncode != 0: raise _fail(arch, done.stderr)
  if missing:=_undefined(done.stdout): raise CompileError(f"not supplied without ROCm's device library, for {arch}: {', '.join(missing)}")
  _write_atomically(path, done.stdout.encode())
  return done.stdout

def assemble(text:str, arch:str) -> bytes:
  """A linked code object of assembly text."""
  tools, arch = toolchain(), base_arch(arch)
  path = _cache_path("co", text, arch, tools.version)
  if path.is_file(): return path.read_bytes()
  if tools.lld is None: raise RuntimeError(f"no ld.lld beside {tools.version} or on PATH to link a code object with: {INSTALL}")
  with tempfile.TemporaryDirectory() as folder:
    relocatable, linked = os.path.join(folder, "kernel.o"), os.path.join(folder, "kernel.co")
    target = ("-target", "amdgcn-amd-amdhsa", f"-mcpu={arch}", "-mcode-object-version=5")
    for command in ((*tools.clang, *target, "-c", "-x", "assembler", "-", "-o", relocatable),
                    (*tools.lld, "-shared", "--no-undefined", relocatable, "-o", linked)):
      done = _run(command, text)
      if done.returncode != 0: raise _fail(arch, done.stderr)
    lib = Path(linked).read_bytes()
  _write_atomically(path, lib)
  return lib

def code_object(source:str, arch:str, options:tuple[str, ...]=()) -> bytes:
  """The linked code object of a HIP source (or of assembly text, if it begins with `.text`, as tinygrad's own compiler has it)."""
  return assemble(source if source.split("\n", 1)[0].strip() == ".text" else assembly(source, arch, options), arch)

# ***** tinygrad *****

class ClangCompiler(Compiler):
  """tinygrad's Compiler interface. It keeps its results itself (tinygrad's cache does not know the compiler's version), so it has no cache key."""
  def __init__(self, arch:str):
    self.arch, self.version = arch, toolchain().version
    super().__init__(None)
  def compile(self, src:str) -> bytes: return code_object(src, self.arch)
  def disassemble(self, lib:bytes) -> None:
    from attn.isa.disassemble import disassemble
    print(disassemble(lib))

class AMDClangRenderer(OperationsHIPRenderer):
  """tinygrad's HIP renderer over ClangCompiler: `DEV=AMD:CLANG`, and the default of `DEV=AMD` where comgr doesn't load. It prints what tinygrad's
  prints, but for what tinygrad expands when a renderer has no code for it: the sine, and exp2 and log2 of doubles."""
  def __init__(self, target:Target):
    super().__init__(target, use_hipcc=True)   # HIPCC's constructor wants nothing installed
    self.compiler = ClangCompiler(target.arch)
    self.code_for_op = {op: code for op, code in self.code_for_op.items() if op is not Ops.SIN}
    self.extra_matcher = self.extra_matcher + double_transcendentals

def _offer(device:Any) -> None:
  if type(device).__name__ == "AMDDevice" and AMDClangRenderer not in device.renderers and HIPRenderer in device.renderers:
    device.renderers.insert(device.renderers.index(HIPRenderer) + 1, AMDClangRenderer)

@functools.cache
def register() -> None:
  """Puts AMDClangRenderer right after HIPRenderer in the AMD device's list, from which tinygrad takes the first that can be constructed: HIPRenderer
  where comgr loads, else ours. It looks for no compiler and opens no device. A compile worker gets the renderer by its class: by importing this."""
  init = Compiled.__init__
  @functools.wraps(init)
  def with_clang(self:Compiled, *args:Any, **kwargs:Any) -> None:
    init(self, *args, **kwargs)
    _offer(self)
  Compiled.__init__ = with_clang  # type: ignore[method-assign]
  for device in opened_devices("AMD"): _offer(device)
