"""Tests of the choice of a compiler for attn's kernels, of the cache, of the AMD device's renderers, and of attn without its optional packages."""
import ctypes.util, json, os, pickle, re, stat, subprocess, sys
from collections.abc import Callable, Iterator
from pathlib import Path
import pytest
from attn.api.custom_kernel import flash_attention_fn
from attn.chips import MODELLED
from attn.compilers import clang, renderer
from attn.compilers.choice import probe_source, refusal
from attn.compilers.clang import assembly
from attn.compilers.renderer import AMDClangRenderer, AMDHIPCCRenderer, AMDHIPRenderer, ClangCompiler, CompilerByMark
from attn.ops.renderers import MARK
from attn.tinygrad_compat import (AxisType, Compiled, Compiler, Context, Device, HIPCCRenderer, HIPRenderer, KernelInfo, Ops, Target, UOp,
                                  dtypes, lower)
import comgr_stand_in as comgr
from cases import in_turn
from isa_sample import sample

# every choice runs in its own process, with stand-ins for the installed packages and libraries (comgr_stand_in.py stands in for ROCm's compiler
# library)

ROOT = Path(__file__).resolve().parent.parent.parent
CHIPS = list(MODELLED)
EXTRAS = "ziglang,click,rich,tqdm,platformdirs"   # all packages that an extra of attn installs

# ***** processes with other packages and libraries *****

WITHOUT = """
import importlib.machinery, os, sys
class Without(importlib.machinery.PathFinder):
  @classmethod
  def find_spec(cls, name, path=None, target=None):
    return None if name.partition(".")[0] in os.environ.get("WITHOUT", "").split(",") else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Without
"""

@pytest.fixture(scope="session")
def machine(tmp_path_factory) -> Path:
  # Returns a folder with stand-ins for comgr and a `sitecustomize.py` that hides packages: with it, a process runs as on another machine.
  folder = tmp_path_factory.mktemp("machine")
  # hides the packages named in the environment variable WITHOUT from every Python process
  (folder/"sitecustomize.py").write_text(WITHOUT)
  (folder/"broken.so").write_text("no library")
  for name, script, major in (("new", comgr.compiles("22.0.0git"), 3), ("good", comgr.compiles("20.0.0git"), 3),
                              ("other", comgr.compiles("21.0.0git"), 3), ("old", comgr.too_old("18.0.0git"), 2)):
    comgr.build(folder, name, script, major)
  return folder

def environment(machine:Path, comgr:str="broken", without:str="", path:str="/bin:/usr/bin", **env:str) -> dict[str, str]:
  # Returns the environment variables of a process that uses the stand-in `comgr` and does not find the packages in `without`.
  # "broken" cannot be loaded
  library = str(machine/f"{comgr}.so")
  keep = {k: v for k, v in os.environ.items() if k in ("HOME", "TMPDIR", "LANG", "VIRTUAL_ENV")}
  settings = {"PATH": path, "PYTHONPATH": f"{machine}:{ROOT}", "COMGR_PATH": library, "COMGR_3_PATH": library, "ROCM_PATH": str(machine/"rocm"),
              "WITHOUT": without, "PARALLEL": "0"} | env
  settings.setdefault("XDG_CACHE_HOME", str(machine/"cache"))
  settings.setdefault("CACHEDB", f"{settings['XDG_CACHE_HOME']}/tinygrad.db")
  return keep | settings

def python(machine:Path, *args:str, **options:str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([sys.executable, *args], capture_output=True, text=True, timeout=300, cwd=ROOT, env=environment(machine, **options))

# Imports attn once and forks a copy for each script, because imports take most of a process's time. Importing runs and searches nothing
# (test_import_runs_and_searches_nothing).
COPIED = """
import json, os, sys, tempfile, traceback
import attn, attn.api.attention, attn.compilers.choice
for line in sys.stdin:
  settings, code = json.loads(line)
  with tempfile.TemporaryFile() as output:
    if (copy := os.fork()) == 0:
      os.environ.clear()
      os.environ.update(settings)
      for stream in (1, 2): os.dup2(output.fileno(), stream)
      try: exec(code, {"__name__": "__main__"})
      except BaseException: traceback.print_exc()
      sys.stdout.flush()
      os._exit(0)
    os.waitpid(copy, 0)
    output.seek(0)
    print(json.dumps(output.read().decode()), flush=True)
"""

@pytest.fixture(scope="session")
def say(machine) -> Iterator[Callable[..., str]]:
  # Returns a function that runs Python code with the packages and libraries of a folder, and returns the code's output.
  # The code runs in a fork of a process that has imported attn, to save time. So it must not depend on settings that tinygrad reads during its
  # import.
  with subprocess.Popen([sys.executable, "-c", COPIED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
                        env=environment(machine)) as process:
    assert process.stdin is not None and process.stdout is not None
    def ask(code:str, folder:Path=machine, **options:str) -> str:
      assert not {"DEV", "PARALLEL", "CACHEDB"} & options.keys()
      print(json.dumps((environment(folder, **options), code)), file=process.stdin, flush=True)
      return json.loads(process.stdout.readline()).strip()
    yield ask
    process.stdin.close()

def answer(machine:Path, code:str, **options:str) -> str:
  done = python(machine, "-c", code, **options)
  assert done.returncode == 0, done.stderr
  return done.stdout.strip()

def script(path:Path, text:str) -> str:
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\n{text}\n")
  path.chmod(path.stat().st_mode | stat.S_IEXEC)
  return str(path)

# ***** the choice *****

CHOOSE = """
from attn.compilers.choice import compiler_for
try: print(compiler_for("gfx942:sramecc+:xnack-").version)
except Exception as e: print(f"{type(e).__name__}: {e}")
"""
PACKAGED = r"clang version \d+\.\S+ \(ziglang .*\)"
GOOD, OLD = r"comgr 3\.7 with AMD clang version 20\.0\.0git \(roc-test\)", r"comgr 2\.7 with AMD clang version 18\.0\.0git \(roc-test\) "
REFUSES = OLD + r"can't \(use of undeclared identifier\)"
SENTENCE = "no compiler here can compile the kernels of attn for gfx942, which takes LLVM 19 or later: "

@pytest.mark.sample(7)
@pytest.mark.parametrize(("options", "says"), [
  ({"comgr": "good"}, PACKAGED),                                                                     # attn's clang is the first choice
  ({"comgr": "old"}, PACKAGED),
  ({}, PACKAGED),
  ({"comgr": "good", "without": EXTRAS}, GOOD),                                                      # the second choice is comgr
  ({"comgr": "old", "without": EXTRAS}, f"NoCompiler: {SENTENCE}the extra isa is not installed; {REFUSES}; there is no clang or hipcc on PATH; "
   r"install the extra isa, which brings a clang \(pip install '\.\[isa\]' in a clone of attn\), or ROCm 6.4 or later"),
  ({"without": EXTRAS}, f"NoCompiler: {SENTENCE}the extra isa is not installed; comgr not available: .*; there is no clang .*; install .*"),
  ({"comgr": "good", "ATTN_COMPILER": "comgr"}, GOOD),                                               # a setting forces the compiler
  ({"comgr": "good", "ATTN_COMPILER": "clang"}, PACKAGED),
  ({"comgr": "good", "ATTN_COMPILER": ""}, PACKAGED),
  ({"comgr": "old", "ATTN_COMPILER": "comgr"}, f"NoCompiler: ATTN_COMPILER=comgr: {SENTENCE}{REFUSES}; install ROCm 6.4 or later"),
  ({"comgr": "good", "ATTN_COMPILER": "clang", "without": EXTRAS}, f"NoCompiler: ATTN_COMPILER=clang: {SENTENCE}.*; install the extra isa, which .*"),
  ({"comgr": "good", "ATTN_COMPILER": "gcc"}, "ValueError: ATTN_COMPILER='gcc': must be clang or comgr, or not set"),
  ({"comgr": "good", "ATTN_CLANG": "/no/such", "without": EXTRAS},
   "ValueError: ATTN_CLANG='/no/such': it is neither a file nor a command on PATH; .*"),
  ({"comgr": "good", "ATTN_CLANG": "/no/such", "ATTN_COMPILER": "comgr"}, GOOD),
])
def test_the_choice(say, options, says):
  said = say(CHOOSE, **options)
  assert re.fullmatch(says, said), said

def test_a_clang_on_path_comes_last(say, tmp_path):
  found = script(tmp_path/"clang", f'exec "{clang._zig()}" clang "$@"')
  path = f"{tmp_path}:/bin:/usr/bin"
  assert "there is no ld.lld" in (said := say(CHOOSE, without=EXTRAS, path=path)) and said.startswith("NoCompiler: no compiler here")
  script(tmp_path/"ld.lld", f'exec "{clang._zig()}" ld.lld "$@"')
  for name in ("old", "broken"): assert say(CHOOSE, comgr=name, without=EXTRAS, path=path).endswith(f"({found})")
  assert re.fullmatch(GOOD, say(CHOOSE, comgr="good", without=EXTRAS, path=path))

def test_a_named_clang_that_cannot_compile_the_kernels_is_an_error(say, tmp_path):
  # A clang named by ATTN_CLANG that cannot compile the kernels is an error, even if its version and targets are right. attn does not replace it by
  # another compiler.
  text = ('case "$*" in *--version*) echo clang version 19.1.0;; *--print-targets*) echo amdgcn;; '
          '*) echo "kernel.hip:3:1: error: what is this" >&2; exit 1;; esac')
  named = script(tmp_path/"mine", text)
  said = say(CHOOSE, comgr="good", ATTN_CLANG=named)
  assert said == (f"ValueError: ATTN_CLANG={named!r}: clang version 19.1.0 (ATTN_CLANG={named}) can't compile the kernels of attn for gfx942 "
                  "(what is this); needed is LLVM 19 or later")

def test_the_cache_keeps_successes_only(say, tmp_path):
  # attn caches that a compiler works, but not that a compiler failed: what was missing may be installed later, under the same version number.
  home = tmp_path/"home"
  home.mkdir()
  def says(text:str) -> str:
    comgr.build.cache_clear()
    comgr.build(home, "mine", f'echo "$1" >> {home}/calls\n{text}', 3)
    (home/"sitecustomize.py").write_text(WITHOUT)
    return say(CHOOSE, home, comgr="mine", without=EXTRAS)
  calls = lambda: (home/"calls").read_text().split().count("gfx942")
  assert says(comgr.too_old("20.0.0git")).startswith("NoCompiler") and calls() == 1
  assert re.fullmatch(GOOD, says(comgr.compiles("20.0.0git"))) and calls() == 2
  assert re.fullmatch(GOOD, says(comgr.compiles("20.0.0git"))) and calls() == 2   # the second process found the answer in the cache

REAL = ctypes.util.find_library("amd_comgr")
@pytest.mark.skipif(REAL is None, reason="ROCm's comgr is not installed")
def test_the_comgr_that_is_installed(say):
  # attn's clang is the first choice, also if ROCm's compiler library comgr is installed where tinygrad finds it. Without attn's clang, attn uses
  # comgr. If comgr is too old, the error names comgr.
  nothing = {"COMGR_PATH": "", "COMGR_3_PATH": "", "ROCM_PATH": os.environ.get("ROCM_PATH", "/opt/rocm")}
  assert re.fullmatch(PACKAGED, say(CHOOSE, **nothing))
  said = say(CHOOSE, without=EXTRAS, **nothing)
  version = re.search(r"comgr \d+\.\d+ with .*clang version (\d+)\.", said)
  assert version is not None, said
  assert said.startswith("NoCompiler") if int(version[1]) < 18 else True, said

# ***** the probe *****

@pytest.mark.parametrize("arch", CHIPS)
def test_the_probe_has_the_matrix_instructions_of_its_chip(arch):
  # attn tests a compiler by a small source for each chip. This source uses the chip's matrix instructions for float16 and bfloat16, and the machine
  # code contains them.
  text = assembly(probe_source(arch), arch)
  expected = 4 if arch.startswith("gfx9") else 2
  assert len(re.findall(r"^\s+v_(?:mfma|wmma)_f32_", text, re.MULTILINE)) == expected and "buffer_load" in text
  assert refusal(clang.found(clang.toolchain()), arch) is None

def test_a_refusal_has_the_compilers_words():
  assert re.search("gfx9999", str(refusal(clang.found(clang.toolchain()), "gfx9999")))

# ***** two processes, one cache *****

COMPILE = """
import hashlib, sys
from attn.compilers.renderer import AMDHIPRenderer
from attn.ops.renderers import MARK
from attn.tinygrad_compat import Target
compiler = AMDHIPRenderer(Target("AMD", "HIP", "gfx942")).compiler
for source in (MARK + "\\nthe kernel", "another's kernel"): print(compiler.compile_cached(source)[:34])
"""
def test_an_exchanged_compiler_does_not_get_what_the_other_left(machine, tmp_path):
  # Another version of comgr, ROCm's compiler library, makes attn compile its kernels again, because the cache key contains the version. tinygrad's
  # own kernels still get old code from tinygrad's cache, as they do without attn.
  def compiled(name:str) -> list[str]:
    done = answer(machine, COMPILE, comgr=name, ATTN_COMPILER="comgr", XDG_CACHE_HOME=str(tmp_path), CACHEDB=str(tmp_path/"db"))
    return [re.findall(r"version (\d+)", line)[0] for line in done.splitlines()]
  assert compiled("good") == ["20", "20"]
  assert compiled("other") == ["21", "20"]
  assert compiled("good") == ["20", "20"]

def test_clang_and_comgr_do_not_share_what_is_kept(say, tmp_path):
  # comgr (ROCm's compiler library) and clang never load each other's code from the cache. The test compiles one source by comgr, then by clang, then
  # by comgr.
  code = ("from attn.compilers.choice import compiler_for, probe_source\n"
          "print(b'roc-test' in compiler_for('gfx1201').compile(probe_source('gfx1201'), 'gfx1201'))")
  results = [say(code, comgr="good", ATTN_COMPILER=name, XDG_CACHE_HOME=str(tmp_path)) for name in ("comgr", "clang", "comgr")]
  assert results == ["True", "False", "True"]

# ***** inside tinygrad *****

WORKERS = """
import json, os
import attn
from attn.api.custom_kernel import flash_attention_fn
from attn.compilers.renderer import AMDHIPRenderer
from attn.tinygrad_compat import AxisType, KernelInfo, Ops, Target, UOp, dtypes
from tinygrad.engine.realize import _compile_kernel
from tinygrad.engine.worker import get_worker_pool
placeholders = [UOp.placeholder((1, 2, 256, 64), dtypes.half, slot) for slot in range(4)]
x, y, i = UOp.placeholder((256,), dtypes.float, 0), UOp.placeholder((256,), dtypes.float, 1), UOp.range(256, 0, AxisType.GLOBAL)
exponential = x[i].store(y[i].load().alu(Ops.EXP2)).end(i).sink(arg=KernelInfo("E", opts_to_apply=()))
asts = [flash_attention_fn(arch="gfx942")(*placeholders).sink, exponential]
r = AMDHIPRenderer(Target("AMD", "HIP", "gfx942"))
where = map if get_worker_pool() is None else get_worker_pool().imap_unordered
done = dict(where(_compile_kernel, [(i, (ast, r), {}) for i, ast in enumerate(asts)]))
for i in range(2):
  text, lib = done[i].src[2].arg, done[i].src[3].arg
  print(json.dumps([text.splitlines()[0], b"clang version 2" in lib, b"roc-test" in lib]))
"""

@pytest.mark.sample(1)
@pytest.mark.parametrize("parallel", ["0", "2"])
def test_two_compilers_in_one_process_and_in_workers(machine, tmp_path, parallel):
  # One device uses two compilers: clang compiles attn's kernels, and comgr (ROCm's compiler library) compiles all other kernels.
  lines = answer(machine, WORKERS, comgr="good", PARALLEL=parallel, XDG_CACHE_HOME=str(tmp_path)).splitlines()
  ours, another = map(json.loads, lines[-2:])
  assert ours == [MARK, True, False]
  assert another[0] != MARK and another[2] is True

# A device like tinygrad's AMD device, for code that looks at its renderer.
DEVICE = """
import attn, attn.api.attention, attn.api.cache, attn.calls.checked_kernel, attn.calls.placement, attn.tinygrad_compat.devices
from attn.compilers import renderer
from attn.tinygrad_compat import Compiled, Device, HIPCCRenderer, HIPRenderer, Tensor, dtypes
class AMDDevice(Compiled):
  def __init__(self): super().__init__("AMD", None, [HIPRenderer, HIPCCRenderer], None, arch="gfx942")
class Devices:
  amd, DEFAULT = AMDDevice(), "AMD"
  def __getitem__(self, name): return self.amd if name.split(":")[0] == "AMD" else Device[name]
renderer.Device = attn.calls.checked_kernel.Device = attn.api.cache.Device = attn.tinygrad_compat.devices.Device = Devices()
q = Tensor.empty(1, 2, 64, 64, dtype=dtypes.half, device="AMD")
try: {what}
except Exception as e: print(f"{{type(e).__name__}}: {{e}}")
"""
ATTENTION = DEVICE.format(what="attn.attention(q, q, q); print('built')")
EXPLAIN = DEVICE.format(what="attn.explain(q, q, q)")

def test_attention_without_a_compiler_fails_before_anything_is_compiled(say):
  assert say(ATTENTION, comgr="good") == "built"
  assert say(ATTENTION, comgr="good", without=EXTRAS) == "built"
  assert re.fullmatch(f"NoCompiler: attention: {SENTENCE}.*{REFUSES}.*", say(ATTENTION, comgr="old", without=EXTRAS))

def test_explain_tells_the_compiler_on_an_amd_gpu(say, machine):
  forced = say(EXPLAIN, comgr="good", ATTN_COMPILER="comgr").splitlines()
  assert forced[0].startswith("forward on gfx942") and re.fullmatch(f"  compiler: {GOOD}", forced[-1])
  assert re.fullmatch(f"  compiler: {PACKAGED}", say(EXPLAIN).splitlines()[-1])
  assert "  compiler: no compiler here" in say(EXPLAIN, comgr="old", without=EXTRAS)
  emulated = "import attn; from tinygrad import Tensor; q = Tensor.empty(1, 2, 64, 64, dtype='half'); attn.explain(q, q, q)"
  assert "compiler" not in answer(machine, emulated, DEV="EMU::gfx942")

def test_the_command_tells_both_compilers(machine):
  done = python(machine, "-m", "attn.isa", "version", comgr="good", ATTN_COMPILER="comgr")
  assert re.fullmatch(f"reports: {PACKAGED}\nDEV=AMD: {GOOD}\n", done.stdout), done

def sources(renderer) -> str:
  placeholders = (UOp.placeholder((1, 2, 256, 64), dtypes.half, slot) for slot in range(4))
  return renderer.render(lower(flash_attention_fn(arch="gfx942")(*placeholders).sink, renderer))

def test_our_kernels_carry_the_mark_and_others_stay_as_they_are():
  mine, theirs = (renderer(Target("AMD", "HIPCC", "gfx942")) for renderer in (AMDHIPCCRenderer, HIPCCRenderer))
  assert sources(mine).startswith(f"{MARK}\n")
  for op in (Ops.EXP2, Ops.SQRT): assert elementwise(op, dtypes.float, mine) == elementwise(op, dtypes.float, theirs)
  i, buffers = UOp.range(64, 0, AxisType.GLOBAL), [UOp.placeholder((256,), dtypes.half, slot) for slot in range(2)]
  j = UOp.range(4, 1, AxisType.UPCAST)
  wide = buffers[0][i*4 + j].store(buffers[1][i*4 + j].load().alu(Ops.SQRT)).end(i, j).sink(arg=KernelInfo("E", opts_to_apply=()))
  printed = [r.render(lower(wide, r)) for r in (mine, theirs)]
  assert "half4" in printed[0] and printed[0] == printed[1]

def test_import_runs_and_searches_nothing(machine):
  # `import attn` starts no process, loads no compiler library, and does not import the tool for reports on machine code.
  code = ("import sys; seen = []\n"
          "sys.addaudithook(lambda event, args: seen.append(event) if event in ('subprocess.Popen', 'os.posix_spawn') else None)\n"
          "import attn; print(seen, [m for m in sys.modules if m.startswith(('attn.isa', 'tinygrad.runtime.autogen.comgr', 'rich', 'click'))])")
  assert answer(machine, code) == "[] []"

def test_printing_and_emulating_load_no_comgr(machine):
  # Rendering and emulating a kernel do not load comgr, ROCm's compiler library. The LLVM inside comgr crashes a process that has loaded another LLVM,
  # for example with an OpenCL driver.
  code = ("import sys, attn; from attn.ops.renderers import render; from tinygrad import Tensor, UOp, dtypes\n"
          "q = Tensor([[[[1.0]*16]*16]], dtype=dtypes.half, device='EMU::gfx942'); attn.attention(q, q, q).realize()\n"
          "tensors = [UOp.placeholder((1, 1, 16, 16), dtypes.half, i) for i in range(4)]\n"
          "assert 'mfma' in render(attn.flash_attention_fn(arch='gfx942')(*tensors).sink, 'gfx942')\n"
          "print([m for m in sys.modules if m.startswith('tinygrad') and ('comgr' in m or 'compiler_amd' in m)])")
  assert answer(machine, code) == "[]"

# ***** without the extras *****

PROGRAMS = (("bench.py", "bench"), ("-m attn.isa version", "isa"), ("-m attn.tune", "isa"), ("examples/four_architectures.py", "bench"),
            ("examples/removed_example_defects.py", "bench"))

@pytest.mark.sample(3)
@in_turn("case, without", PROGRAMS, (EXTRAS, "rich"))
def test_a_program_without_its_extra_ends_in_one_sentence(machine, case, without):
  program, extra = case[0].split(), case[1]
  done = python(machine, *program, without=without)
  assert done.returncode != 0 and done.stdout == ""
  name = "python " + " ".join(program[:2]) if program[0] == "-m" else program[0]
  sentence = rf"{re.escape(name)}: needs \w+, which the extra {extra} installs: run pip install '\.\[{extra}\]' in a clone of attn\n"
  assert re.fullmatch(sentence, done.stderr), done.stderr
  if program[0].startswith("examples"): assert f"pip install '.[{extra}]'" in (ROOT/program[0]).read_text().split('"""')[1]

def test_the_other_examples_need_no_extra(machine):
  for path in sorted((ROOT/"examples").glob("*.py")):
    if "needs(" in (text := path.read_text()): continue
    assert not re.search(r"^(from|import) (rich|click|tqdm|ziglang|platformdirs)", text, re.MULTILINE)
  done = python(machine, "examples/custom_kernel_call.py", without=EXTRAS)
  assert done.returncode == 0, done.stderr

def test_an_import_without_the_extra_has_the_sentence_too(say):
  code = "\ntry: import attn.tune\nexcept ModuleNotFoundError as e: print(e.name, e)"
  assert say(code, without="click").startswith("click python -m attn.tune: needs click, which the extra isa installs")

def test_bench_without_a_compiler_for_bounds(machine):
  # bench.py with ISA=1 computes bounds of the speed from machine code, for which it needs clang and the package rich. Without clang it ends with exit
  # code 2 and one sentence that says so.
  done = python(machine, "bench.py", without="ziglang", ISA="1", DEV="EMU::gfx942", H="1", N="32", D="16")
  assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith("bench.py: no clang of LLVM 19 or later") and "Traceback" not in done.stderr

# ***** the renderers *****

def elementwise(op, dtype, renderer) -> str:
  # Returns the source of a kernel that computes out[i] = op(x[i]), as `renderer` renders it.
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
  # clang computes a kernel's indices in 32 bits if attn's renderer wrote the source. In tinygrad's source the indices of workgroups and threads have
  # 64 bits (size_t).
  source = elementwise(Ops.SQRT, dtypes.float, AMDClangRenderer(Target("AMD", "CLANG", "gfx942")))
  assert "__ockl_get_group_id" in source
  assert not re.search(r"v_(lshl_add|lshlrev)_[bu]64|v_mad_u64", assembly(source, "gfx942"))

def amd_device(renderers) -> Compiled:
  class AMDDevice(Compiled):
    def __init__(self): super().__init__("AMD", None, renderers, None, arch="gfx942")
  return AMDDevice()

def without_comgr(self, arch): raise AssertionError("no comgr")

def test_without_comgr_the_device_takes_our_clang(monkeypatch):
  renderer.register_renderers()
  monkeypatch.setattr("tinygrad.runtime.support.compiler_amd.HIPCompiler.__init__", without_comgr)
  device = amd_device([HIPRenderer, HIPCCRenderer])
  assert device.renderers == [AMDHIPRenderer, AMDClangRenderer, AMDHIPCCRenderer]
  assert type(device.renderer) is AMDClangRenderer and type(device.compiler) is CompilerByMark and type(device.compiler.others) is ClangCompiler
  assert [device._renderer_name(r) for r in device.renderers] == ["HIP", "CLANG", "HIPCC"]   # DEV=AMD:CLANG

def test_with_comgr_others_kernels_are_compiled_as_before(monkeypatch):
  renderer.register_renderers()
  monkeypatch.setattr("tinygrad.runtime.support.compiler_amd.HIPCompiler.__init__", lambda self, arch: Compiler.__init__(self, "x"))
  device = amd_device([HIPRenderer, HIPCCRenderer])
  assert type(device.renderer) is AMDHIPRenderer and type(device.compiler.others).__name__ == "HIPCompiler"
  monkeypatch.setattr("tinygrad.runtime.support.compiler_amd.HIPCompiler.compile", lambda self, source: b"by comgr")
  assert device.compiler.compile("another's kernel") == b"by comgr"

@pytest.mark.parametrize(("name", "expected"), [("CLANG", AMDClangRenderer), ("HIPCC", AMDHIPCCRenderer)])
def test_a_renderer_by_name(name, expected):
  renderer.register_renderers()
  with Context(DEV=f"AMD:{name}"): assert type(amd_device([HIPRenderer, HIPCCRenderer]).renderer) is expected

def test_other_devices_are_left_alone():
  renderer.register_renderers()
  renderer.register_renderers()
  class OtherDevice(Compiled):
    def __init__(self): super().__init__("OTHER", None, [HIPRenderer], None)
  assert OtherDevice().renderers == [HIPRenderer]
  shared = [HIPRenderer, HIPCCRenderer]
  amd_device(shared), amd_device(shared)
  assert shared == [HIPRenderer, HIPCCRenderer]
  assert "AMD" not in Device._opened_devices   # registration of the renderer opens no device

def test_a_spawned_worker_gets_the_renderer():
  # Python can pickle a renderer. tinygrad needs this, because its worker processes compile with it.
  renderer = AMDClangRenderer(Target("AMD", "CLANG", "gfx1100"))
  code = f"import pickle; r = pickle.loads({pickle.dumps(renderer)!r}); print(r.compiler.compile_cached({sample('gfx1100')!r})[:4] == b'\\x7fELF')"
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
  assert done.stdout.strip() == "True", done.stderr

def test_it_prints_what_tinygrads_renderer_prints():
  target = Target("AMD", "CLANG", "gfx942")
  assert elementwise(Ops.EXP2, dtypes.float, AMDClangRenderer(target)) == elementwise(Ops.EXP2, dtypes.float, HIPCCRenderer(target))

# ***** the tiles are those of the compiler *****

RELEASES = """
from attn.chips import get_chip
from attn.compilers.choice import compiled_on
print(*(compiled_on(get_chip("gfx942"), device).llvm for device in ("AMD", "AMD:1", "EMU")))"""

def test_a_chip_knows_the_release_of_its_compiler(say):
  # `compiled_on` returns the record of a chip with the LLVM release of the compiler that an AMD GPU uses. For an emulated chip, or a GPU without a
  # compiler, it is the newest release. Without a compiler only a call of a kernel raises an error.
  assert say(RELEASES, comgr="good", without=EXTRAS) == "20 20 22"
  assert say(RELEASES, comgr="other", without=EXTRAS) == "21 21 22"
  assert say(RELEASES, without=EXTRAS) == "22 22 22"

@pytest.mark.parametrize("command", ["clang", "a_clang_that_is_nowhere"])
def test_a_cpu_without_a_clang_says_what_to_install(command:str, tmp_path:Path) -> None:
  # A call on the CPU without clang is refused in one sentence, before tinygrad starts the missing compiler.
  code = "import numpy as np, attn\nfrom tinygrad import Tensor\nq = Tensor(np.ones((1, 2, 8, 16), np.float32))\nattn.attention(q, q, q)"
  env = {**os.environ, "DEV": "CPU", "PATH": str(tmp_path), "CC": command, "CACHEDB": str(tmp_path/"empty.db")}
  done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
  said = done.stderr.strip().splitlines()[-1]
  assert done.returncode == 1 and "NoCompiler: attention: tinygrad's device CPU needs a clang" in said
  assert command in said and "pip install ziglang" in said
