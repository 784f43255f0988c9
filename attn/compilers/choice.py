"""Choice of the compiler for attn's kernels: the first compiler that can compile them, among those that ATTN_COMPILER allows."""
from __future__ import annotations
import functools, os, re
from collections.abc import Callable
from dataclasses import replace
from attn.chips import CHIPS, Chip
from attn.compilers import clang, comgr
from attn.compilers.found import ROCM, Found, NoCompiler, base_arch, oldest_for
from attn.chips.matrix import Matrix
from attn.ops.renderers import VECTOR_ELEMENTS
from attn.tinygrad_compat import CompileError
from attn.cache.user_cache import kept

# The clang of the pip extra `isa` (pip install '.[isa]') comes first, because the tiles were chosen and checked for spills with this clang; then
# ROCm's comgr; then any clang on PATH. attn does not judge a compiler by its version but tests it: the compiler compiles `probe_source`, a few lines
# with all compiler features that the kernels need. One test for each compiler version and chip is enough.

NAMES = ("clang", "comgr")   # values of ATTN_COMPILER

# ***** the probe *****

def _multiplies(i:int, m:Matrix) -> str:
  """Returns C++ lines that execute a matrix instruction on operands from memory. The number `i` makes the names of the C++ variables unique."""
  return f"""  typedef {VECTOR_ELEMENTS[m.operand_type]} operand{i} __attribute__((ext_vector_type({m.operand})));
  typedef float accumulator{i} __attribute__((ext_vector_type({m.accumulator})));
  operand{i} a{i} = ((operand{i}*)q)[lane];
  accumulator{i} c{i} = ((accumulator{i}*)o)[lane];
  ((accumulator{i}*)o)[lane] = {m.call(f"a{i}", f"a{i}", f"c{i}")};
"""

def probe_source(arch:str) -> str:
  """Returns a small HIP source with all compiler features that kernels for `arch` need, to test a compiler."""
  # named vectors, buffer loads through a descriptor, the matrix instructions of 16-bit inputs, elementwise builtins, and the device functions that
  # tinygrad declares
  chip = CHIPS.get(arch)
  wave = chip.wave if chip is not None else 64
  matrices = [m for rows in chip.matrix.values() for m in rows if m.size == 2] if chip is not None else []
  return f"""typedef long unsigned int size_t;
typedef unsigned uint4 __attribute__((ext_vector_type(4)));
typedef float float4 __attribute__((ext_vector_type(4)));
typedef _Float16 half4 __attribute__((ext_vector_type(4)));
typedef __bf16 bfloat4 __attribute__((ext_vector_type(4)));
extern "C" __attribute__((device, const)) size_t __ockl_get_local_id(unsigned int);
extern "C" __attribute__((global)) void __attribute__((amdgpu_flat_work_group_size(1, {wave}))) attn_probe(float* o, void* q, int n) {{
  int lane = __ockl_get_local_id(0);
  uint4 words = __builtin_bit_cast(uint4, __builtin_amdgcn_raw_buffer_load_b128(__builtin_amdgcn_make_buffer_rsrc(q, 0, n, 0), lane*16, 0, 0));
  float4 x = __builtin_elementwise_fma(__builtin_bit_cast(float4, words), (float4)(2.0f), (float4)(1.0f));
  half4 h = __builtin_convertvector(x, half4);
  x += __builtin_convertvector(h, float4) + __builtin_convertvector(__builtin_bit_cast(bfloat4, h), float4);
  if (__builtin_amdgcn_ballot_w{wave}(x[0] > 0.0f)) x[1] = __builtin_amdgcn_exp2f(x[0])*__builtin_amdgcn_rcpf(x[2]);
  ((float4*)o)[lane] = x;
{''.join(_multiplies(i, m) for i, m in enumerate(matrices))}}}
"""

def refusal(found:Found, arch:str) -> str|None:
  """Tests whether a compiler can compile the kernels for `arch`. Returns None if it can, else its error message."""
  source = probe_source(arch)
  def tried() -> bytes:
    found.compile(source, arch)
    return b"compiles"
  # a success is recorded in the user's cache directory, so that the test is not repeated
  try: kept("probe", (found.version, arch, source), tried)
  except (CompileError, NoCompiler) as e:    # NoCompiler: a linker is missing
    lines = str(e).splitlines()
    said = next((line for line in lines if "error:" in line), lines[0] if lines else "nothing")
    return re.sub(r"^.*?error: |^comgr cannot compile this for \w+: ", "", said).strip()
  return None

# ***** the choice *****

def asked() -> str:
  """Returns the value of the environment variable ATTN_COMPILER, or "" if the variable is not set."""
  if (name := os.environ.get("ATTN_COMPILER", "")) and name not in NAMES:
    raise ValueError(f"ATTN_COMPILER={name!r}: must be {' or '.join(NAMES)}, or not set")
  return name

def compiler_for(arch:str) -> Found:
  """Returns the compiler of attn's kernels for a chip such as "gfx942". Raises NoCompiler if no compiler can compile them."""
  name = asked()
  if name != "comgr" and (tools := clang.named()) is not None: return _named(base_arch(arch), tools)
  return _search(base_arch(arch), name)

@functools.cache
def _named(arch:str, tools:clang.Toolchain) -> Found:
  if (reason := refusal(found := clang.found(tools), arch)) is None: return found
  raise ValueError(f"ATTN_CLANG={os.environ['ATTN_CLANG']!r}: {tools.version} can't compile the kernels of attn for {arch} ({reason}); "
                   f"needed is {_oldest(arch)}")

def _clang_in_package() -> Found|str: return tools if isinstance(tools := clang.packaged(), str) else clang.found(tools)
def _clang_on_path() -> Found|str: return tools if isinstance(tools := clang.on_path(), str) else clang.found(tools)

# compilers to try, the best first, by the value of ATTN_COMPILER
SEARCH: dict[str, tuple[Callable[[], Found|str], ...]] = {
  "": (_clang_in_package, comgr.loaded_comgr, _clang_on_path), "clang": (_clang_in_package, _clang_on_path), "comgr": (comgr.loaded_comgr,)}

EXTRA = "the extra isa, which brings a clang (pip install '.[isa]' in a clone of attn)"

@functools.cache
def _search(arch:str, name:str) -> Found:
  reasons = []
  for find in SEARCH[name]:
    if isinstance(found := find(), str): reasons.append(found)
    elif (reason := refusal(found, arch)) is None: return found
    else: reasons.append(f"{found.version} can't ({reason})")
  forced = f"ATTN_COMPILER={name}: " if name else ""
  rocm = f"ROCm {ROCM[oldest_for(arch)]} or later"
  install = {"clang": EXTRA, "comgr": rocm, "": f"{EXTRA}, or {rocm}"}[name]
  raise NoCompiler(f"{forced}no compiler here can compile the kernels of attn for {arch}, which takes {_oldest(arch)}: {'; '.join(reasons)}; "
                   f"install {install}")

def _oldest(arch:str) -> str: return f"LLVM {oldest_for(arch)} or later"

def in_use(arch:str) -> str:
  """Returns the version of the compiler that compiles attn's kernels for `arch`, or a text that says why there is none."""
  try: return compiler_for(arch).version
  except (NoCompiler, ValueError) as e: return str(e)

def compiled_on(chip:Chip, device:str) -> Chip:
  """Returns a copy of `chip` whose field `llvm` is the release of the compiler for `device`, if the release is known."""
  if device.split(":")[0] != "AMD": return chip
  try: return replace(chip, llvm=compiler_for(chip.name).llvm or chip.llvm)
  # no error without a compiler
  except (NoCompiler, ValueError): return chip
