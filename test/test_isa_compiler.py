"""The compiler without ROCm: errors, cache, choice of compiler; code objects as tinygrad's AMD runtime reads them; the renderer in the AMD device."""
import itertools, os, pickle, re, stat, subprocess, sys, types
from pathlib import Path
import pytest
from tinygrad.runtime.ops_amd import AMDProgram
from tinygrad.runtime.support.hcq import CLikeArgsState
from attn.chips import MODELLED
from attn.isa import compiler
from attn.isa.compiler import AMDClangRenderer, ClangCompiler, assemble, assembly, code_object
from attn.isa.disassemble import elf_chip, elf_metadata
from attn.tinygrad_compat import (AxisType, Compiled, CompileError, Device, HIPCCRenderer, HIPRenderer, KernelInfo, Ops, Target, TinyELF, UOp, dtypes,
                                  lower)
sys.path.insert(0, os.path.dirname(__file__))
from isa_sample import UNITS, WAVES, sample

LOADED = [arch for arch in MODELLED if arch != "gfx90a"]   # by tinygrad's runtime

@pytest.fixture
def fresh(monkeypatch, tmp_path):
  """An empty cache, and the compiler looked for anew before and after."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path/"cache"))
  monkeypatch.delenv("ATTN_CLANG", raising=False)
  find = compiler.toolchain
  find.cache_clear()
  yield tmp_path
  find.cache_clear()

def script(path:Path, text:str) -> str:
  path.write_text(f"#!/bin/sh\n{text}\n")
  path.chmod(path.stat().st_mode | stat.S_IEXEC)
  return str(path)

# ***** the text *****

def test_the_version_is_reported(): assert re.search(r"clang version \d+\.\d+", compiler.toolchain().version)

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
  calls, run = [], compiler._run
  monkeypatch.setattr(compiler, "_run", lambda command, text=None: (calls.append(command), run(command, text))[1])
  source = sample("gfx942")
  def compiles(*args) -> bool:
    before = len(calls)
    assembly(source, *args)
    return len(calls) > before
  assert compiles("gfx942") and not compiles("gfx942")
  assert compiles("gfx950") is True and compiles("gfx942", ("-DX=1",))
  found = compiler.toolchain()
  monkeypatch.setattr(compiler, "toolchain", lambda: compiler.Toolchain(found.clang, found.lld, "another"))
  assert compiles("gfx942")

def test_a_cache_that_cannot_be_written_is_no_error(fresh, monkeypatch):
  (fresh/"cache").write_text("a file where the directory should be")
  assert "v_mfma" in assembly(sample("gfx942"), "gfx942")

def test_nothing_half_written_is_left(fresh):
  code_object(sample("gfx1100"), "gfx1100")
  assert sorted(f.suffix for f in (fresh/"cache").rglob("*") if f.is_file()) == [".co", ".s"]

# ***** which compiler *****

def test_attn_clang_names_the_compiler(fresh, monkeypatch):
  monkeypatch.setenv("ATTN_CLANG", script(fresh/"mine", f'exec "{compiler._zig()}" clang "$@"'))
  assert "ATTN_CLANG" in compiler.toolchain().version
  assert elf_chip(code_object(sample("gfx1201"), "gfx1201")).name == "gfx1201"

@pytest.mark.parametrize("text, said", [("exit 1", "not a clang"), ("echo gcc 12", "not a clang"),
                                        ("echo clang version 9; echo x86-64", "no amdgcn target")])
def test_a_wrong_attn_clang_is_an_error_that_says_why(fresh, monkeypatch, text, said):
  monkeypatch.setenv("ATTN_CLANG", script(fresh/"mine", text))
  with pytest.raises(RuntimeError, match=f"ATTN_CLANG: .*{said}"): compiler.toolchain()

def test_no_compiler_is_an_error_that_says_what_to_install(fresh, monkeypatch):
  monkeypatch.setattr(compiler, "_zig", lambda: None)
  monkeypatch.setenv("PATH", str(fresh))
  monkeypatch.setenv("ROCM_PATH", str(fresh))
  with pytest.raises(RuntimeError, match=r"attn\[isa\]"): compiler.toolchain()
  with pytest.raises(RuntimeError, match="no compiler for AMD GPUs"): AMDClangRenderer(Target("AMD", "CLANG", "gfx942"))

# ***** the code object, as the runtime reads it *****

class FakeDevice:
  """What AMDProgram asks of a device to load a program."""
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
  assert device.image[program.prog_addr - program.lib_gpu.va_addr:][:4] != b"\0\0\0\0"   # the entry is code

@pytest.mark.parametrize("arch", LOADED)
def test_the_arguments_lie_where_the_runtime_writes_them(arch):
  program, _, metadata = load(sample(arch), arch)
  view = types.SimpleNamespace(view=lambda offset=0, **_: offset)
  buffers = tuple(types.SimpleNamespace(va_addr=i) for i in range(4))
  state = CLikeArgsState(types.SimpleNamespace(cpu_view=lambda: view), program, buffers, vals=(7,))
  size = {"Q": 8, "i": 4}
  written = [(offset + i*size[fmt], size[fmt]) for values, offset, fmt in state.bind_data for i in range(len(values))]
  assert written == [(a[".offset"], a[".size"]) for a in metadata[".args"]]
  assert program.kernargs_segment_size == metadata[".kernarg_segment_size"] == sum(written[-1])   # no hidden arguments: nobody would write them

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

# ***** tinygrad *****

def elementwise(op, dtype, renderer) -> str:
  """What `renderer` prints for out[i] = op(x[i])."""
  out, x, i = UOp.placeholder((256,), dtype, 0), UOp.placeholder((256,), dtype, 1), UOp.range(256, 0, AxisType.GLOBAL)
  return renderer.render(lower(out[i].store(x[i].load().alu(op)).end(i).sink(arg=KernelInfo("E", opts_to_apply=())), renderer))

@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "gfx1201"])
@pytest.mark.parametrize("op", [Ops.EXP2, Ops.LOG2, Ops.SIN, Ops.SQRT, Ops.TRUNC])
@pytest.mark.parametrize("dtype", [dtypes.half, dtypes.float, dtypes.double])
def test_every_function_of_tinygrad_compiles_without_a_call(arch, op, dtype):
  renderer = AMDClangRenderer(Target("AMD", "CLANG", arch))
  text = assembly(elementwise(op, dtype, renderer), arch)
  assert "s_swappc" not in text and "__oc" not in text

def test_indices_are_not_widened():
  """Group and lane ids are size_t in tinygrad's source: the machine code must not compute with 64 bits for that."""
  source = elementwise(Ops.SQRT, dtypes.float, AMDClangRenderer(Target("AMD", "CLANG", "gfx942")))
  assert "__ockl_get_group_id" in source
  assert not re.search(r"v_(lshl_add|lshlrev)_[bu]64|v_mad_u64", assembly(source, "gfx942"))

def amd_device(renderers) -> Compiled:
  class AMDDevice(Compiled):
    def __init__(self): super().__init__("AMD", None, renderers, None, arch="gfx942")
  return AMDDevice()

def test_without_comgr_the_device_takes_ours(monkeypatch):
  compiler.register()
  def fails(self, arch): raise AssertionError("no comgr")
  monkeypatch.setattr("tinygrad.runtime.support.compiler_amd.HIPCompiler.__init__", fails)
  device = amd_device([HIPRenderer, HIPCCRenderer])
  assert device.renderers == [HIPRenderer, AMDClangRenderer, HIPCCRenderer]
  assert type(device.renderer) is AMDClangRenderer and type(device.compiler) is ClangCompiler
  assert device._renderer_name(AMDClangRenderer) == "CLANG"   # DEV=AMD:CLANG

def test_with_comgr_tinygrads_own_stays_the_default(monkeypatch):
  compiler.register()
  monkeypatch.setattr("tinygrad.runtime.support.compiler_amd.HIPCompiler.__init__", lambda self, arch: None)
  assert type(amd_device([HIPRenderer, HIPCCRenderer]).renderer) is HIPRenderer

def test_other_devices_are_left_alone():
  compiler.register()
  compiler.register()
  class OtherDevice(Compiled):
    def __init__(self): super().__init__("OTHER", None, [HIPRenderer], None)
  assert OtherDevice().renderers == [HIPRenderer]
  shared = [HIPRenderer, HIPCCRenderer]
  amd_device(shared), amd_device(shared)
  assert shared.count(AMDClangRenderer) <= 1
  assert "AMD" not in Device._opened_devices   # registering opens nothing

def test_a_spawned_worker_gets_the_renderer():
  """tinygrad compiles in spawned processes, which get the renderer pickled."""
  renderer = AMDClangRenderer(Target("AMD", "CLANG", "gfx1100"))
  code = f"import pickle; r = pickle.loads({pickle.dumps(renderer)!r}); print(r.compiler.compile_cached({sample('gfx1100')!r})[:4] == b'\\x7fELF')"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
  assert done.stdout.strip() == "True", done.stderr

def test_it_prints_what_tinygrads_renderer_prints():
  target = Target("AMD", "CLANG", "gfx942")
  assert elementwise(Ops.EXP2, dtypes.float, AMDClangRenderer(target)) == elementwise(Ops.EXP2, dtypes.float, HIPCCRenderer(target))
