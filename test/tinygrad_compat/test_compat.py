"""Tests of each of tinygrad's names that attn uses. With another release of tinygrad they fail, with a sentence for each changed name."""
import ast, importlib, importlib.metadata, inspect, os, subprocess, sys, tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
import pytest
from attn.tinygrad_compat import Context, Device, UOp, release, version
from attn.tinygrad_compat.patches import helpers

ROOT = Path(__file__).resolve().parent.parent.parent
COMPAT = ROOT/"attn/tinygrad_compat"
TREES = {path: ast.parse(path.read_text()) for path in sorted((ROOT/"attn").rglob("*.py"))}

# module:name -> parameters; = marks those with a default
SIGNATURES = {
  "tinygrad.codegen.decomp.transcendental:xexp2": "d", "tinygrad.codegen.decomp.transcendental:xlog2": "d",
  "tinygrad.codegen:to_program": "ast renderer", "tinygrad.codegen:do_to_program": "*args **kwargs",
  "tinygrad.codegen:to_program_key": "ast renderer", "tinygrad.helpers:db_connection": "",
  "tinygrad.helpers:diskcache_get": "table key", "tinygrad.helpers:diskcache_put": "table key val prepickled=",
  "tinygrad.engine.realize:get_worker_pool": "",
  "tinygrad.codegen.late.linearizer:linearize": "sink", "tinygrad.codegen:full_rewrite_to_sink": "ast ren optimize=",
  "tinygrad.codegen:line_rewrite": "lst pm ctx=", "tinygrad.device:Allocator": "dev supports_copy_from_disk= supports_transfer=",
  "tinygrad.device:Allocator._alloc": "self size options", "tinygrad.device:Allocator._copyin": "self dest src",
  "tinygrad.device:Allocator._copyout": "self dest src", "tinygrad.device:Allocator._offset": "self buf size offset",
  "tinygrad.device:Buffer": "device size dtype opaque= options= initial_value= uop_refcount= base= offset= preallocate=",
  "tinygrad.device:MultiBuffer": "device size dtype",
  "tinygrad.engine.realize:get_call_arg_uops": "call", "tinygrad.engine.realize:resolve_params": "call inputs",
  "tinygrad.engine.realize:unwrap_multi": "call resolved",
  "tinygrad.engine.jit:GraphRunner.__init__": "self linear input_uops=",
  "tinygrad.device:canonicalize_device": "device", "tinygrad.mixin.gradient:_deepwalk": "root targets",
  "tinygrad.device:BufferSpec": "uncached= cpu_access= host= nolru= zero= external_ptr=",
  "tinygrad.device:Compiled": "device allocator renderers runtime graph= arch=", "tinygrad.device:Compiled._select_renderer": "self",
  "tinygrad.device:Compiled.synchronize": "self", "tinygrad.device:Compiler": "cachekey=", "tinygrad.device:Compiler.compile": "self src",
  "tinygrad.device:Compiler.compile_cached": "self src", "tinygrad.device:Program": "dev obj",
  "tinygrad.device:Program.__call__": "self *bufs global_size= local_size= vals= wait=",
  "tinygrad.device:TinyELF": "lib name target signature profile_key=", "tinygrad.dtype:DType": "*args **kwargs",
  "tinygrad.dtype:DType.new": "priority bitsize name fmt", "tinygrad.engine.realize:compile_linear": "linear beam= validate= input_uops= profile=",
  "tinygrad.engine.realize:get_runtime": "device ast cache=",
  "tinygrad.engine.realize:run_linear": "linear var_vals= input_uops= update_stats= jit= wait=", "tinygrad.helpers:Context": "**kwargs",
  "tinygrad.helpers:Target": "device= renderer= arch= interface= indices=", "tinygrad.renderer.amd:decode_inst": "data arch=",
  "tinygrad.mixin.gradient:compute_gradient": "root root_grad targets", "tinygrad.mixin.gradient:call_gradient": "ctx k needed",
  "tinygrad.mixin.gradient:_compact_params": "body all_args", "tinygrad.function:invalid_outputs": "uret",
  "tinygrad.function:renumber_invalid_outputs": "uret", "tinygrad.mixin.gradient:renumber_invalid_outputs": "uret",
  "tinygrad.schedule.rangeify:resolve_function": "c allow_param_mismatch=",
  "tinygrad.renderer.cstyle:CStyleLanguage": "target",
  "tinygrad.renderer.cstyle:CStyleLanguage.render_kernel": "self function_name kernel bufs uops prefix=",
  "tinygrad.renderer.cstyle:CUDARenderer": "target use_nvcc=", "tinygrad.renderer.cstyle:HIPCCRenderer": "target",
  "tinygrad.renderer.cstyle:HIPRenderer": "target use_hipcc=",
  "tinygrad.renderer.cstyle:HIPRenderer.render_kernel": "self function_name kernel bufs uops prefix=",
  "tinygrad.renderer.cstyle:NVCCRenderer": "target", "tinygrad.renderer:Estimates": "ops= lds= mem=", "tinygrad.renderer:Renderer": "target",
  "tinygrad.renderer:Renderer.render": "self uops", "tinygrad.renderer:Renderer.supported_dtypes": "self",
  "tinygrad.runtime.ops_cuda:CUDAProgram": "dev obj smem=", "tinygrad.runtime.ops_cuda:check": "status",
  "tinygrad.runtime.ops_cuda:cu_time_execution": "cb enable=", "tinygrad.runtime.ops_cuda:encode_args": "args vals signature",
  "tinygrad.runtime.support.compiler_amd:HIPCompiler": "arch",
  "tinygrad.runtime.support.compiler_cuda:NVCCCompiler": "arch ptx= cache_key= extra_options=",
  "tinygrad.runtime.support.compiler_cuda:NVRTCCompiler": "arch ptx= cache_key=",
  "tinygrad.runtime.support.elf:elf_loader": "blob force_section_align= link_libs=",
  "tinygrad.uop.ops:KernelInfo": "name= axis_types= dont_use_locals= applied_opts= opts_to_apply= estimates= beam=",
  "tinygrad.uop.ops:PatternMatcher": "patterns compiled=",
  "tinygrad.uop.ops:ProgramInfo": "name= global_size= local_size= vars= globals= outs= ins= target=",
  "tinygrad.uop.ops:UOp": "op dtype= src= arg= tag= metadata= _buffer=", "tinygrad.uop.ops:UOp.after": "self *src **kwargs",
  "tinygrad.uop.ops:UOp.barrier": "self *src", "tinygrad.uop.ops:UOp.bitcast": "self dtype",
  "tinygrad.uop.ops:UOp.call": "self *srcs ret_dtype= grad_fxn= name= precompile= precompile_backward= aux=",
  "tinygrad.uop.ops:shape_to_shape_arg": "arg", "tinygrad.uop.ops:UOp.new_buffer": "device size dtype num=",
  "tinygrad.uop.ops:UOp.get_idx": "self", "tinygrad.uop.ops:UOp.get_valid": "self",
  "tinygrad.uop.ops:UOp.cast": "self dtype", "tinygrad.uop.ops:UOp.const": "b dtype=", "tinygrad.uop.ops:UOp.end": "self *src",
  "tinygrad.uop.ops:UOp.flatten": "self start_dim= end_dim=", "tinygrad.uop.ops:UOp.group": "*srcs **kwargs",
  "tinygrad.uop.ops:UOp.load": "self *src **kwargs", "tinygrad.uop.ops:UOp.max_numel": "self", "tinygrad.uop.ops:UOp.maximum": "self x",
  "tinygrad.uop.ops:UOp.minimum": "self x", "tinygrad.uop.ops:UOp.placeholder": "shape dtype slot= addrspace= device= volatile= tag=",
  "tinygrad.uop.ops:UOp.range": "end axis_id axis_type= *arg dtype= src= **kwargs", "tinygrad.uop.ops:UOp.reshape": "self shape *args",
  "tinygrad.uop.ops:UOp.sink": "*srcs **kwargs", "tinygrad.uop.ops:UOp.store": "self src gate= **kwargs",
  "tinygrad.uop.ops:UOp.substitute": "self dvars name= extra_pm= walk= enter_calls=", "tinygrad.uop.ops:UOp.valid": "self cond",
  "tinygrad.uop.ops:UOp.where": "self x y",
  "tinygrad.uop.ops:UPat": "op= dtype= src= arg= name= allow_any_len= custom_early_reject= location= is_any= tag=",
  "tinygrad.uop.ops:exec_alu": "op dtype operands truncate_output=", "tinygrad:Tensor": "data device= dtype=", "tinygrad:TinyJit": "fxn= **kwargs",
  "tinygrad:Tensor.custom_kernel": "self *lst fxn grad_fxn=", "tinygrad:Tensor.empty": "*shape device= dtype=",
  "tinygrad.dtype:strong_dtype": "dtype",
  "tinygrad:Tensor.schedule_linear": "self *lst", "tinygrad:Tensor.replace": "self x", "tinygrad:Tensor.shard": "self devices axis=",
  "tinygrad:Tensor.scaled_dot_product_attention": "self key value attn_mask= dropout_p= is_causal= enable_gqa=",
  "tinygrad.uop.ops:UOp.custom_kernel": "*srcs fxn grad_fxn=", "tinygrad.uop.ops:UOp.placeholder_like": "self slot addrspace=",
  "tinygrad.uop.ops:UOp.replace": "self **kwargs", "tinygrad.uop.ops:UOp.rtag": "self tag=", "tinygrad:Tensor.backward": "self gradient=",
  "tinygrad:Tensor._next_counter": "device num", "tinygrad:Tensor._rand": "key counter shape dtype contiguous=",
  "tinygrad:Tensor.gradient": "self *targets gradient=", "tinygrad.tensor:_apply_map_to_tensors": "applied_map name",
  "tinygrad.uop.ops:UOp.toposort": "self gate= enter_calls=",
  "tinygrad.uop.ops:UOpMetaClass.__call__": "cls op dtype= src= arg= tag= metadata= _buffer=",
  "tinygrad.uop.ops:RewriteContext": "pm bpm ctx= enter_calls=", "tinygrad.uop.ops:RewriteContext.unified_rewrite": "self root",
  "tinygrad.uop.ops:RewriteContext.walk_rewrite": "self root",
  "tinygrad.renderer.cstyle:CStyleLanguage._render": "self uops",
  "tinygrad.uop.ops:CallInfo": "grad_fxn= name= precompile= precompile_backward= aux=", "tinygrad.uop.ops:UOp.gettuple": "self idx",
  "tinygrad.uop.ops:UOp.maketuple": "*srcs", "tinygrad.uop.ops:UOp.param_like": "self slot",
  "tinygrad.uop.ops:UOp.copy_to_device": "self device arg=",
  "tinygrad.uop.ops:UOp.mselect": "self arg", "tinygrad.uop.ops:UOp.mstack": "self *srcs", "tinygrad.uop.ops:UOp.unbind": "self",
  "tinygrad.uop.ops:UOp.unshard": "self axis device_range=", "tinygrad.uop.ops:UOp.contiguous_view": "self",
  "tinygrad.uop.ops:graph_rewrite": "*args **kwargs",
  "tinygrad.uop.ops:UOp.index": "self *srcs **kwargs", "tinygrad.uop.ops:UOp.has_buffer_identity": "self after_ok=",
  "tinygrad.uop.ops:UOp.variable": "name min_val max_val dtype= multiple_of= param=",
}
# names that are no functions
VALUES = ("tinygrad.runtime.support.compiler_cpu:ClangCompiler",
          "tinygrad:codegen", "tinygrad:helpers", "tinygrad:schedule", "tinygrad.engine:jit", "tinygrad.engine:realize", "tinygrad.engine:worker",
          "tinygrad.function:_function",
          "tinygrad.mixin:gradient", "tinygrad.schedule:rangeify", "tinygrad:TinyJit", "tinygrad.helpers:CCACHE",
          "tinygrad.helpers:DEBUG", "tinygrad.helpers:VIZ",
          "tinygrad.schedule.multi:multi_pm", "tinygrad.schedule.rangeify:pm_mops",
          "tinygrad.tensor:all_tensors", "tinygrad.uop.symbolic:symbolic", "tinygrad.uop.weak:pm_cast_weak", "tinygrad.uop.weak:pm_commit_weak",
          "tinygrad.dtype:promo_lattice",
          "tinygrad.uop.spec:glbls", "tinygrad.engine.realize:capturing", "tinygrad.codegen:pm_linearize_cleanups", "tinygrad.device:CompileError",
          "tinygrad.dtype:AddrSpace", "tinygrad.dtype:dtypes", "tinygrad.helpers:ALLOW_TF32", "tinygrad.helpers:DEV",
          "tinygrad.helpers:GlobalCounters", "tinygrad.helpers:TRAINING", "tinygrad.renderer.cstyle:CStyleLanguage",
          "tinygrad.renderer.llvmir:LLVMRenderer", "tinygrad.runtime.autogen:opencl",
          "tinygrad.runtime.autogen:comgr", "tinygrad.runtime.autogen:cuda", "tinygrad.runtime.autogen.amd.rdna3.ins:MUBUF",
          "tinygrad.runtime.autogen.amd.rdna4.ins:VBUFFER", "tinygrad.uop.ops:AxisType", "tinygrad.uop.ops:GroupOp", "tinygrad.uop.ops:Ops",
          "tinygrad.uop.ops:UOpMetaClass", "tinygrad:Device")
# attributes of these values
ATTRIBUTES = ("tinygrad:codegen.to_program_cache", "tinygrad.function:_function.depth", "tinygrad.schedule:rangeify.earliest_rewrites",
              "tinygrad:schedule.schedule_cache", "tinygrad.engine:realize.runtime_cache", "tinygrad.engine:worker.worker_pool",
              "tinygrad.helpers:_db_connection", "tinygrad.helpers:_db_tables", "tinygrad.helpers:CACHEDB",
              "tinygrad:Device._opened_devices", "tinygrad.runtime.autogen:comgr.amd_comgr_get_version",
              "tinygrad.helpers:DEV.target", "tinygrad.helpers:GlobalCounters.time_sum_s", "tinygrad.helpers:GlobalCounters.mem_used_per_device",
              "tinygrad.renderer:Renderer.shared_max", "tinygrad.renderer:Renderer.tensor_cores",
              "tinygrad.renderer.cstyle:CStyleLanguage.string_rewrite",
              "tinygrad.uop.ops:UOp.buf_uop", "tinygrad.uop.ops:UOp.is_variable", "tinygrad.uop.ops:UOp.expr",
              "tinygrad.uop.ops:UOp.is_bound_var",
              "tinygrad.uop.ops:UOp.max_shard_shape")

def imported() -> set[str]:
  nodes = [n for path, tree in TREES.items() if path.parent == COMPAT for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
  return {f"{n.module}:{a.name}" for n in nodes for a in n.names if str(n.module).startswith("tinygrad")}

def changed(what:str) -> str:
  return f"tinygrad {importlib.metadata.version('tinygrad')} is not the {version.TINYGRAD_VERSION} that attn was written for: {what}"

def find(name:str) -> object:
  module, path = name.split(":")
  found = importlib.import_module(module)
  for part in path.split("."):
    assert hasattr(found, part), changed(f"{name} is not there")
    found = getattr(found, part)
  return found

def parameters(function:object) -> str:
  star = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
  return " ".join(star.get(p.kind, "") + name + ("" if p.default is p.empty else "=") for name, p in inspect.signature(function).parameters.items())

@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name:str) -> None:
  assert (found := parameters(find(name))) == SIGNATURES[name], changed(f"{name} takes ({found}), was ({SIGNATURES[name]})")

@pytest.mark.parametrize("name", VALUES + ATTRIBUTES)
def test_is_there(name:str) -> None: find(name)

@pytest.mark.parametrize("name", ["renderers", "runtime_t", "graph", "cached_renderer", "renderer", "target"])
def test_device_attribute(name:str) -> None: assert hasattr(Device["EMU"], name), changed(f"a device has no {name}")

def test_every_import_is_pinned() -> None:
  missing = imported() - set(SIGNATURES) - set(VALUES) - set(NOT_IMPORTABLE)
  assert not missing, f"attn/tinygrad_compat imports {', '.join(sorted(missing))}: pin them in {Path(__file__).name}"

# Classes of a module that the wheel of release 0.14.0 cannot import, with their method that attn replaces, and what the method assigns.
NOT_IMPORTABLE = {"tinygrad.llm.model:MLATransformerBlock": ("_init_state", "cache_k")}

@pytest.mark.parametrize("name", NOT_IMPORTABLE)
def test_what_cannot_be_imported_is_there(name:str) -> None:
  module, owner = name.split(":")
  method, assigned = NOT_IMPORTABLE[name]
  source = Path(str(helpers.__file__)).parent.joinpath(*module.split(".")[1:]).with_suffix(".py")
  of = next(n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.ClassDef) and n.name == owner)
  body = next(n for n in of.body if isinstance(n, ast.FunctionDef) and n.name == method)
  targets = [ast.unparse(t) for n in ast.walk(body) if isinstance(n, ast.Assign) for t in n.targets]
  assert [a.arg for a in body.args.args] == ["self", "x"] and f"self.{assigned}" in targets, changed(f"{name} has another {method}")

@pytest.mark.parametrize("owner", ["tinygrad.uop.ops:Ops", "tinygrad.uop.ops:AxisType", "tinygrad.dtype:AddrSpace", "tinygrad.uop.ops:GroupOp",
                                   "tinygrad.dtype:dtypes"])
def test_members(owner:str) -> None:
  # tinygrad has every member of Ops, dtypes and similar classes that attn uses, such as Ops.ADD.
  name = owner.split(":")[1]
  attributes = [n for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.Attribute)]
  used = {n.attr for n in attributes if isinstance(n.value, ast.Name) and n.value.id == name}
  assert used
  for member in sorted(used): find(f"{owner}.{member}")

def test_one_room_imports_tinygrad() -> None:
  def modules(tree:ast.Module) -> list[str]:
    found = [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    return found + [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
  assert {path.parent for path, tree in TREES.items() if any(m.split(".")[0] == "tinygrad" for m in modules(tree))} == {COMPAT}

def test_one_function_constructs_uops_by_their_fields() -> None:
  # Only one function of attn calls UOp's constructor with the fields of a UOp, and no class derives from UOp. So if tinygrad renames a field, one
  # line must change.
  calls = [(path, n) for path, tree in TREES.items() for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "UOp"]
  assert [(path, ast.unparse(n)) for path, n in calls] == [(COMPAT/"uops.py", "UOp(op, dtype, src, arg)")]
  assert not [x for tree in TREES.values() for n in ast.walk(tree) if isinstance(n, ast.ClassDef) for x in n.bases if ast.unparse(x) == "UOp"]

@pytest.fixture
def reopened(tmp_path:Path, monkeypatch:pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
  # Returns a function that makes tinygrad use a given file as its disk cache, opened as a new process would open it.
  def reopen(file:Path) -> None:
    for name, value in (("CACHEDB", str(file)), ("_db_connection", None), ("_db_tables", set())): monkeypatch.setattr(helpers, name, value)
    helpers.db_connection.cache_clear()
  with Context(CACHELEVEL=1): yield reopen
  helpers.db_connection.cache_clear()

@pytest.mark.parametrize("damage", ["garbage", "a directory", "a directory that is a file"])
def test_a_damaged_cache_of_tinygrad_is_an_empty_one_with_one_warning(damage:str, tmp_path:Path, reopened:Callable[[Path], None]) -> None:
  file = tmp_path/"tinygrad"/"cache.db"
  {"garbage": file.parent, "a directory": file}.get(damage, tmp_path).mkdir(parents=True, exist_ok=True)
  if damage == "garbage": file.write_bytes(b"no database"*1000)
  elif damage == "a directory that is a file": file.parent.write_text("")
  reopened(file)
  with pytest.warns(UserWarning, match="cache of compiled kernels, .*cache.db, cannot be used") as said:
    assert helpers.diskcache_get("attn_test", "key") is None
    helpers.diskcache_put("attn_test", "key", b"value")
    assert helpers.diskcache_get("attn_test", "key") == b"value" and len(said) == 1

def test_a_cache_of_tinygrad_that_is_whole_is_used(tmp_path:Path, reopened:Callable[[Path], None], recwarn:pytest.WarningsRecorder) -> None:
  for found in (None, b"value"):
    reopened(tmp_path/"cache.db")
    assert helpers.diskcache_get("attn_test", "key") == found
    helpers.diskcache_put("attn_test", "key", b"value")
  assert not recwarn.list

def test_the_installed_version_passes() -> None: version.check_version()

@pytest.mark.parametrize("installed", ["0.13.0", "0.14.1", None])
def test_another_version_is_refused_in_one_sentence(installed:str|None, monkeypatch:pytest.MonkeyPatch) -> None:
  def found(_:str) -> str:
    if installed is None: raise importlib.metadata.PackageNotFoundError
    return installed
  monkeypatch.setattr(importlib.metadata, "version", found)
  with pytest.raises(ImportError) as e: version.check_version()
  assert str(e.value).startswith(f"attn needs tinygrad==0.14.0 but {installed or 'none'} is installed") and "\n" not in str(e.value)

def test_the_version_is_checked_before_tinygrad_is_imported() -> None:
  # attn first imports the module that checks tinygrad's version. This module imports nothing of tinygrad.
  first = next(n for n in TREES[COMPAT/"__init__.py"].body if isinstance(n, (ast.Import, ast.ImportFrom)))
  assert ast.unparse(first) == "from attn.tinygrad_compat.version import TINYGRAD_VERSION"
  looks = TREES[COMPAT/"version.py"].body
  assert ast.unparse(looks[-1]) == "check_version()"
  imported = [ast.unparse(n) for n in looks if isinstance(n, (ast.Import, ast.ImportFrom))]
  assert imported == ["from __future__ import annotations", "import importlib.metadata"]
  assert "tinygrad==" + version.TINYGRAD_VERSION in (ROOT/"pyproject.toml").read_text()

# ***** another tinygrad with the same version number *****

def test_what_the_probe_asks_for_is_what_is_pinned() -> None:
  stars = str.maketrans("", "", "*=")
  assert {name: " ".join(names) for name, names in release.RELEASED.items()} == {name: SIGNATURES[name].translate(stars) for name in release.RELEASED}

@pytest.mark.parametrize("changed", ("a field less", "a name less"))
def test_another_tinygrad_of_this_version_is_refused_in_one_sentence(changed:str, monkeypatch:pytest.MonkeyPatch) -> None:
  if changed == "a name less": monkeypatch.delattr(UOp, "custom_kernel")
  else: monkeypatch.setattr(UOp, "call", lambda self, *srcs, name=None: None)
  with pytest.raises(ImportError, match=r"as it was released.*UOp.c(all takes|ustom_kernel is not there)") as e: release.check_release()
  assert "\n" not in str(e.value)

@pytest.mark.parametrize("name", ["tinygrad.uop.weak:pm_commit_weak", "tinygrad.dtype:strong_dtype", "tinygrad.codegen:to_program_key"])
def test_a_name_that_is_missing_is_told_in_one_sentence(name:str) -> None:
  # If tinygrad lacks a name that attn imports, `import attn` says which name is missing and what to install.
  module, _, path = name.partition(":")
  script = f"import {module} as module\ndel module.{path}\nimport attn"
  done = subprocess.run([sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
  last = done.stderr.strip().splitlines()[-1]
  assert done.returncode == 1 and last.startswith("ImportError: attn needs tinygrad 0.14.0 as it was released")
  assert path.split(".")[-1] in last and last.endswith("python -m pip install --force-reinstall tinygrad==0.14.0")

def test_workers_know_what_this_process_knows() -> None:
  # A worker process in which tinygrad compiles knows attn's vector types. Without them tinygrad fails under its setting SPEC=2, because it then
  # computes the dtype of each UOp again.
  script = ("import attn\nfrom tinygrad import Tensor\nif __name__ == '__main__':\n  q = Tensor.rand(1, 2, 20, 16).half().realize()\n"
            "  Tensor.realize(attn.attention(q, q, q, causal=True), attn.attention(q, q, q, softcap=2.0))")
  with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
    file.write(script)
    file.flush()
    env = {**os.environ, "SPEC": "2", "PARALLEL": "2", "DEV": "EMU::gfx942", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, file.name], env=env, check=True)

def test_only_one_module_makes_uops_by_their_fields() -> None:
  # Only uops.py calls UOp's constructor, or replaces a field of a UOp that the next release of tinygrad may not have.
  for path, tree in TREES.items():
    if path == ROOT/"attn/tinygrad_compat/uops.py": continue
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
      fields = {x.arg for x in call.keywords} if isinstance(call.func, ast.Attribute) and call.func.attr == "replace" else set()
      constructs = isinstance(call.func, ast.Name) and call.func.id == "UOp"
      assert not constructs and not ("src" in fields and fields & {"dtype", "op"}), f"{path.name}:{call.lineno}"
