"""Tests of the module that runs clang: error messages, the cache, the choice of a clang, and code objects in the form that tinygrad's AMD runtime
reads."""
import itertools, re, stat, types
from dataclasses import replace
from pathlib import Path
import pytest
from tinygrad.runtime.ops_amd import AMDProgram
from tinygrad.runtime.support.hcq import CLikeArgsState
from attn.cache import user_cache
from attn.chips import MODELLED
from attn.compilers import clang
from attn.compilers.clang import assemble, assembly, code_object
from attn.compilers.found import NoCompiler
from attn.compilers.disassemble import elf_chip, elf_metadata
from attn.tinygrad_compat import CompileError, Target, TinyELF, dtypes
from isa_sample import UNITS, WAVES, sample

LOADED = [arch for arch in MODELLED if arch != "gfx90a"]   # chips that tinygrad's runtime can load

@pytest.fixture
def fresh(monkeypatch, tmp_path):
  # Gives the test an empty cache. attn forgets, before and after the test, which compiler it found.
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"cache"))
  monkeypatch.delenv("ATTN_CLANG", raising=False)
  def forget():
    for find in (clang._named, clang.packaged, clang.on_path): find.cache_clear()
  forget()
  yield tmp_path
  forget()

def script(path:Path, text:str) -> str:
  path.write_text(f"#!/bin/sh\n{text}\n")
  path.chmod(path.stat().st_mode | stat.S_IEXEC)
  return str(path)

# ***** the text *****

def test_the_version_is_reported(): assert re.search(r"clang version \d+\.\d+", clang.toolchain().version)

@pytest.mark.parametrize("arch", MODELLED)
def test_a_kernel_compiles_to_its_matrix_instruction(arch):
  text = assembly(sample(arch), arch)
  assert f"--{arch}\"" in text and ("v_mfma_f32" if arch.startswith("gfx9") else "v_wmma_f32") in text
  assert "__ockl" not in text and "s_swappc" not in text

def test_an_arch_with_features_is_its_base(): assert assembly(sample("gfx942"), "gfx942:sramecc+:xnack-") == assembly(sample("gfx942"), "gfx942")

def test_a_syntax_error_shows_the_line_of_the_source():
  source = sample("gfx942").replace("float m = -1e30f", "flaot m = -1e30f")
  line = next(i for i, x in enumerate(source.splitlines(), 1) if "flaot" in x)
  with pytest.raises(CompileError, match=rf"kernel.hip:{line}:\d+: error: .*flaot(.|\n)*flaot m = -1e30f"): assembly(source, "gfx942")

def test_too_much_lds_is_an_error_that_names_both_sizes():
  with pytest.raises(CompileError, match=r"local memory \(\d+\) exceeds limit \(65536\)"): assembly(sample("gfx942", 256), "gfx942")
  assembly(sample("gfx950", 256), "gfx950")

def test_a_function_that_only_rocm_has_is_an_error():
  source = sample("gfx942", exp="__ocml_erf_f32").replace("float __ocml_exp2_f32(float);", "float __ocml_erf_f32(float);")
  with pytest.raises(CompileError, match="__ocml_erf_f32"): assembly(source, "gfx942")

# ***** the cache *****

def test_the_cache_knows_source_arch_options_and_version(fresh, monkeypatch):
  calls, run = [], clang._run
  monkeypatch.setattr(clang, "_run", lambda command, text=None: (calls.append(command), run(command, text))[1])
  source, tools = sample("gfx942"), clang.toolchain()
  def compiles(*args, **named) -> bool:
    before = len(calls)
    assembly(source, *args, **named)
    return len(calls) > before
  assert compiles("gfx942") and not compiles("gfx942")
  assert compiles("gfx950") is True and compiles("gfx942", ("-DX=1",))
  assert compiles("gfx942", tools=replace(tools, version="another"))

@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: data[32:]])
def test_a_damaged_file_is_made_anew(fresh, damage):
  lib = code_object(sample("gfx1100"), "gfx1100")
  files = [f for f in user_cache.directory().rglob("*") if f.is_file()]
  assert len(files) == 2
  for f in files: f.write_bytes(damage(f.read_bytes()))
  assert code_object(sample("gfx1100"), "gfx1100") == lib

def test_a_cache_that_cannot_be_written_is_no_error(fresh, monkeypatch):
  (fresh/"cache").write_text("a file where the directory should be")
  assert "v_mfma" in assembly(sample("gfx942"), "gfx942")

def test_nothing_half_written_is_left(fresh):
  code_object(sample("gfx1100"), "gfx1100")
  assert sorted(f.suffix for f in (fresh/"cache").rglob("*") if f.is_file()) == [".co", ".s"]

# ***** which clang *****

def test_attn_clang_names_the_compiler(fresh, monkeypatch):
  monkeypatch.setenv("ATTN_CLANG", path := script(fresh/"mine", f'exec "{clang._zig()}" clang "$@"'))
  assert f"ATTN_CLANG={path}" in clang.toolchain().version
  assert elf_chip(code_object(sample("gfx1201"), "gfx1201")).name == "gfx1201"

def a_file(path:Path) -> str:
  path.write_text("no program")
  return str(path)

@pytest.mark.parametrize("make, said", [
  (lambda p: script(p, "exit 1"), "not a clang: its --version says nothing"),
  (lambda p: script(p, "echo gcc 12.2"), "not a clang: its --version says 'gcc 12.2'"),
  (lambda p: script(p, "echo clang version 22.1.0; echo x86-64"), "clang version 22.1.0, which does not know AMD's chips"),
  (lambda p: script(p, "echo clang version 18.1.8; echo amdgcn"), "clang version 18.1.8, which is too old"),
  (lambda p: (p.mkdir(), str(p))[1], "a directory"),
  (a_file, "a file that may not be executed"),
  (lambda p: (a_file(p), p.chmod(0o755), str(p))[2], "no program: Exec format error"),
  (lambda p: str(p), "neither a file nor a command on PATH"),
])
def test_a_wrong_attn_clang_is_one_sentence_that_says_what_it_is_and_what_is_needed(fresh, monkeypatch, make, said):
  monkeypatch.setenv("ATTN_CLANG", path := make(fresh/"mine"))
  with pytest.raises(ValueError) as e: clang.toolchain()
  assert str(e.value) == f"ATTN_CLANG={path!r}: it is {said}; needed is a clang or hipcc of LLVM 19 or later that knows AMD's chips (amdgcn)"

def test_a_clang_on_path_is_found_and_an_old_one_passed_by(fresh, monkeypatch):
  monkeypatch.setattr(clang, "_zig", lambda: None)
  monkeypatch.setenv("ROCM_PATH", str(fresh/"rocm"))
  (fresh/"rocm/llvm/bin").mkdir(parents=True)
  monkeypatch.setenv("PATH", f"{fresh}:/bin:/usr/bin")
  script(fresh/"clang", "echo Debian clang version 14.0.6; echo amdgcn")
  rocm = script(fresh/"rocm/llvm/bin/clang", "echo AMD clang version 20.0.0git; echo amdgcn")
  assert clang.toolchain().version == f"AMD clang version 20.0.0git ({rocm})"

def test_no_compiler_is_an_error_that_says_what_to_install(fresh, monkeypatch):
  monkeypatch.setattr(clang, "_zig", lambda: None)
  monkeypatch.setenv("PATH", str(fresh))
  monkeypatch.setenv("ROCM_PATH", str(fresh))
  with pytest.raises(NoCompiler, match="the extra isa is not installed; there is no clang or hipcc on PATH; install the extra"): clang.toolchain()

# ***** the code object in the form that the runtime reads *****

class FakeDevice:
  # Stand-in for an AMD GPU, into which tinygrad's AMDProgram loads a program.
  # records the loaded bytes and the size of scratch memory
  device, sqtt_enabled = "AMD", False
  def __init__(self, arch:str):
    self.target, self.allocator = {"gfx9": (9, 4, 2), "gfx1": (11, 0, 0)}[arch[:4]], self
    self.iface, self.prof_prg_counter = types.SimpleNamespace(props={"lds_size_in_kb": 160 if arch == "gfx950" else 64}), itertools.count()
  def synchronize(self): pass
  def alloc(self, size, options=None): return types.SimpleNamespace(va_addr=0x7f0000000000, size=size)
  def free(self, *args): pass
  def _copyin(self, buffer, data): self.image = bytes(data)
  def _ensure_has_local_memory(self, size): self.scratch = size

def load(source:str, arch:str) -> tuple[AMDProgram, FakeDevice, dict]:
  lib = code_object(source, arch)
  assert elf_chip(lib).name == arch
  device = FakeDevice(arch)
  return AMDProgram(device, TinyELF(lib, "sample", Target("AMD", "CLANG", arch), ((None, 4, dtypes.int, ()),))), device, elf_metadata(lib)[0]

@pytest.mark.parametrize("arch", LOADED)
def test_amd_program_reads_the_descriptor(arch):
  program, device, metadata = load(sample(arch), arch)
  assert program.wave32 == (UNITS[arch].wave == 32) and metadata[".wavefront_size"] == UNITS[arch].wave
  assert program.group_segment_size == metadata[".group_segment_fixed_size"] == 2*(64*72 + 64*72)
  assert program.private_segment_size == metadata[".private_segment_fixed_size"] == device.scratch == 0
  assert metadata[".max_flat_workgroup_size"] == WAVES*UNITS[arch].wave
  assert metadata[".symbol"] == "sample.kd" and not program.enable_private_segment_sgpr and not program.enable_dispatch_ptr
  assert device.image[program.prog_addr - program.lib_gpu.va_addr:][:4] != b"\0\0\0\0"   # the entry points to code

@pytest.mark.parametrize("arch", LOADED)
def test_the_arguments_lie_where_the_runtime_writes_them(arch):
  program, _, metadata = load(sample(arch), arch)
  view = types.SimpleNamespace(view=lambda offset=0, **_: offset)
  buffers = tuple(types.SimpleNamespace(va_addr=i) for i in range(4))
  state = CLikeArgsState(types.SimpleNamespace(cpu_view=lambda: view), program, buffers, vals=(7,))
  size = {"Q": 8, "i": 4}
  written = [(offset + i*size[fmt], size[fmt]) for values, offset, fmt in state.bind_data for i in range(len(values))]
  assert written == [(a[".offset"], a[".size"]) for a in metadata[".args"]]
  assert program.kernargs_segment_size == metadata[".kernarg_segment_size"] == sum(written[-1])   # without hidden arguments, which nobody would write

@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "gfx1201"])
def test_scratch_is_declared(arch):
  spilled = "  volatile float kept[64]; for (int i = 0; i < 64; i++) kept[i] = q[i]; o[0] = kept[n&63];\n"
  source = sample(arch).replace("  accum acc[", spilled + "  accum acc[")
  program, device, _ = load(source, arch)
  assert program.private_segment_size == device.scratch > 0

@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_the_workgroup_size_comes_from_the_dispatch_packet(arch):
  program, _, _ = load(sample(arch).replace("n; j++", "n + (int)__ockl_get_local_size(1); j++"), arch)
  assert program.enable_dispatch_ptr and program.kernargs_alloc_size == program.kernargs_segment_size + 64

@pytest.mark.parametrize("arch", ["gfx950", "gfx1101"])
def test_constant_tables_lie_behind_the_descriptor(arch):
  table = ", ".join(f"{i*i}.0f" for i in range(64))
  program, device, metadata = load(sample(arch).replace("float m = -1e30f", f"const float table[64] = {{{table}}}; float m = table[t%64]"), arch)
  assert program.group_segment_size == metadata[".group_segment_fixed_size"]
  assert device.image.find(b"\0\0\x80?\0\0\x80@") > program.aql_prog_addr - program.lib_gpu.va_addr

def test_assembly_text_is_assembled(): assert code_object(".text\n" + assembly(sample("gfx942"), "gfx942"), "gfx942")[:4] == b"\x7fELF"
def test_a_wrong_assembly_text_shows_its_line():
  with pytest.raises(CompileError, match="v_no_such_thing"): assemble(".text\nv_no_such_thing v0, v1\n", "gfx942")
