"""Tests of the first call of a kernel: what attn computes and caches before the kernel reaches the device, and what the next process takes from the
cache. No device is needed."""
from __future__ import annotations
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
from tinygrad import codegen
from attn import attention
from attn.cache import kept_programs
from attn.calls import checked_kernel
from attn.calls.kept_graphs import recipes
from attn.chips import get_chip
from attn.choose.dispatch import single_kernel
from attn.emulator.device import renderer_of
from attn.kernels.parts.grid.tensors import arguments
from attn.kernels.parts.program.statements import InOrder, Statements, awaited_by
from attn.ops.renderers import OperationsCUDARenderer, OperationsNVCCRenderer, printer_of
from attn.tinygrad_compat import DEBUG, AddrSpace, Compiler, Context, Target, Tensor, TinyELF, UOp, dtypes
from attn.tinygrad_compat.cuda import dynamic_shared_program
from cases import TYPES, problem

@pytest.mark.parametrize("renderer", (OperationsCUDARenderer, OperationsNVCCRenderer))
@pytest.mark.parametrize(("arch", "named"), (("sm_80", "sm_80"), ("sm_90", "sm_90a")))
def test_machine_code(renderer:Any, arch:str, named:str, monkeypatch) -> None:
  # attn's CUDA compiler makes machine code for the chip, and not PTX. The code has another key in tinygrad's disk cache than PTX. The compiler for
  # sm_90 gets the name sm_90a, but the renderer's target stays sm_90.
  from tinygrad.runtime.autogen import nvrtc
  monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda major, minor: 0)       # the compiler's library may be missing on this machine
  made = renderer(Target("CUDA", "", arch))
  assert (made.compiler.arch, made.compiler.ptx, made.target.arch) == (named, False, arch)
  assert made.compiler.cachekey not in (None, type(made.compiler)(named, ptx=True, cache_key="cuda").cachekey)

@pytest.mark.parametrize(("lib", "shown"), ((b"\x7fELF\x02\x80\xff", 4), (b".version 9.0", 5)))
def test_debug_takes_machine_code(lib:bytes, shown:int, monkeypatch) -> None:
  # tinygrad with DEBUG=5 would decode CUDA machine code as text, so attn lowers DEBUG while tinygrad loads machine code. PTX is still printed.
  from tinygrad.runtime import ops_cuda
  monkeypatch.setattr(ops_cuda, "CUDAProgram", lambda dev, obj, smem: (DEBUG.value, smem))
  with Context(DEBUG=5):
    assert dynamic_shared_program(SimpleNamespace(), TinyELF(lib, "attn_smem65536", Target("CUDA", "", "sm_90"), ())) == (shown, 65536)
    assert DEBUG.value == 5

FP16, BF16 = "#include <cuda_fp16.h>", "#include <cuda_bf16.h>"
@pytest.mark.parametrize(("headers", "left"), (((), ["half", "nv_bfloat16"]), ((FP16,), ["nv_bfloat16"]), ((BF16,), []), ((FP16, BF16), [])))
def test_a_type_is_declared_once(headers:tuple[str, ...], left:list[str]) -> None:
  # CUDA source does not declare a 16-bit type that an included header declares. The header of bfloat16 includes the header of half.
  buffers = [(None, (SimpleNamespace(dtype=dtype), None)) for dtype in (dtypes.half, dtypes.bfloat16)]
  found = printer_of("sm_90").declarations(list(headers), buffers, "")
  assert [line.split()[1] for line in found] == left

# ***** cached programs *****

class Echo(Compiler):
  """Stand-in for a compiler: it returns the source itself as machine code."""

@pytest.fixture
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  return tmp_path/"attn/compilers"

def kernel(arch:str, **options:Any) -> tuple[UOp, Any]:
  # Returns the UOps of a small kernel, and a renderer for `arch` that needs no compiler.
  p, renderer = problem(H=1, Sq=64, Sk=64, D=64, lse=False, **options), printer_of(arch)
  renderer.compiler = Echo()
  return single_kernel(p, get_chip(arch))[0](*[UOp.placeholder(s, TYPES[d], i) for i, (s, d) in enumerate(arguments(p).values())]), renderer

def lowerings(monkeypatch) -> list[str]:
  # Returns a list to which the name of each kernel is added that tinygrad lowers during the test.
  seen, own = [], codegen.full_rewrite_to_sink
  def lower(ast:UOp, *args:Any, **kwargs:Any) -> UOp:
    seen.append(ast.arg.name)
    return own(ast, *args, **kwargs)
  monkeypatch.setattr(codegen, "full_rewrite_to_sink", lower)
  return seen

@pytest.mark.parametrize("arch", ("gfx942", "sm_90"))
def test_cached_program(arch:str, cache, monkeypatch) -> None:
  # A later process loads the same program of a kernel from the cache and lowers nothing. A damaged file counts as a missing file.
  ast, renderer = kernel(arch)
  assert not kept_programs.has_program(ast, renderer)
  first, seen = codegen.do_to_program(ast, renderer), lowerings(monkeypatch)
  assert kept_programs.has_program(ast, renderer)
  again = codegen.do_to_program(ast, renderer)
  assert not seen
  for program in (again, codegen.do_to_program(ast, renderer)):
    assert program.arg == first.arg and program.src[2:] == first.src[2:] and "attn_" in program.src[2].arg
    assert (program.src[0].arg.name, program.src[0].arg.estimates) == (first.src[0].arg.name, first.src[0].arg.estimates)
    assert program.to_elf().signature == first.to_elf().signature and len(first.to_elf().signature) == 4
  file, = cache.glob("*.program")
  file.write_bytes(file.read_bytes().replace(b"attn_", b"none_"))
  assert codegen.do_to_program(ast, renderer).src[2:] == first.src[2:] and len(seen) == 1
  codegen.do_to_program(ast, renderer)
  assert len(seen) == 1

def test_what_a_cached_program_depends_on(cache, monkeypatch) -> None:
  # A kernel's source from the cache is not used if anything differs that the source depends on: the problem, the chip, one of tinygrad's settings,
  # the files of attn that render operations (`PRINTING`), or the files of tinygrad that lower kernels (`LOWERING`).
  ast, renderer = kernel("sm_90")
  codegen.do_to_program(ast, renderer)
  assert kept_programs.has_program(ast, renderer)
  assert not kept_programs.has_program(kernel("sm_90", causal=True)[0], renderer)
  assert not kept_programs.has_program(ast, printer_of("sm_80"))
  with Context(NOOPT=1): assert not kept_programs.has_program(ast, renderer)
  for part in ("PRINTING", "LOWERING"):
    with monkeypatch.context() as m:
      m.setattr(kept_programs, part, getattr(kept_programs, part)[1:])
      m.setattr(kept_programs, "printed_by", kept_programs.printed_by.__wrapped__)
      assert not kept_programs.has_program(ast, renderer), part
  printing = kept_programs.files(kept_programs.Path(kept_programs.__file__).parent.parent, kept_programs.PRINTING)
  assert {"softmax.py", "lowering.py"} <= {path.name for path in printing}

def test_a_cache_that_cannot_be_entered(cache, monkeypatch) -> None:
  # A cache directory that cannot be read counts as empty, and the call continues.
  ast, renderer = kernel("sm_90")
  monkeypatch.setenv("XDG_CACHE_HOME", "/" + "x"*300)      # longer than a file name may be
  assert not kept_programs.has_program(ast, renderer)
  assert kept_programs.kept("program", ("a",), lambda: b"made") == b"made"

def test_what_is_not_cached(cache) -> None:
  # The cache does not keep kernels of other libraries. It does not keep kernels on the emulator, which needs their UOps. It keeps nothing if settings
  # tell tinygrad not to cache, or to show how it lowers.
  ast, renderer = kernel("sm_90")
  assert kept_programs.key_of(ast, renderer) is not None
  assert kept_programs.key_of(ast.replace(arg=checked_kernel.replace(ast.arg, name="r_64")), renderer) is None
  assert kept_programs.key_of(ast, renderer_of(Target("EMU", "", "sm_90"))) is None
  for setting in ({"CCACHE": 0}, {"DEBUG": 3}, {"VIZ": 1}):
    with Context(**setting): assert kept_programs.key_of(ast, renderer) is None, setting

def test_a_program_with_a_variable_is_lowered_again(cache, monkeypatch) -> None:
  ast, renderer = kernel("gfx942")
  n = UOp.variable("n", 1, 64, param=True)
  with_n = ast.replace(src=(*ast.src, n))
  seen = lowerings(monkeypatch)
  programs = [codegen.do_to_program(with_n, renderer) for _ in range(2)]
  assert len(seen) == 2 and not kept_programs.has_program(with_n, renderer)
  assert programs[0].arg == programs[1].arg and [v.expr for v in programs[0].arg.vars] == ["n"]

def test_cached_kernels_are_compiled_when_called(monkeypatch) -> None:
  # If the cache has a kernel's source, `attention` compiles the kernel itself. Otherwise tinygrad would start worker processes for the kernels of a
  # step, which takes longer than reading the cache.
  compiled: list[str] = []
  monkeypatch.setattr(checked_kernel, "compile_at_once", lambda call, device: compiled.append(call.src[0].arg.name))
  q = Tensor(np.zeros((1, 1, 32, 16), np.float16), device="EMU").realize()
  for kept, count in ((False, 0), (True, 1)):
    monkeypatch.setattr(checked_kernel, "has_program", lambda ast, renderer: kept)
    recipes.cache_clear()       # a later call takes the graph of the first one
    attention(q, q, q)
    assert len(compiled) == count

# ***** order of statements *****

@dataclass(frozen=True)
class SmallState(InOrder):
  # State of a small test kernel: two register arrays, and the operations on them so far.
  a: UOp
  b: UOp
  statements: Statements

def test_steps_come_in_order() -> None:
  # `InOrder.store` puts the stores of a kernel in order. A second store that uses the result of the first waits for the first, and later stores wait
  # for the second alone. A second store that uses only older values does not wait for the first, and later stores wait for both. In a loop, every
  # store also waits for the start of the loop.
  a, b, register = (UOp.placeholder((2,), dtypes.float, slot, AddrSpace.REG) for slot in range(3))
  s = SmallState(a, b, Statements(register))
  one = s.store([s.a[0].store(1.0)])
  first, = awaited_by(one.b)
  two = one.store([one.b[0].store(2.0)])
  second, = awaited_by(two.a)
  assert awaited_by(two.b) == {second} and first in second.toposort()
  assert awaited_by(two.statements.latest) == {first, second}     # otherwise a register array whose stores only precede other stores would be dropped
  apart = one.store([s.b[0].store(2.0)])       # uses a value from before the first step
  assert first in awaited_by(apart.a) and len(awaited_by(apart.a)) == 2
  r = UOp.range(3, 0)
  inside = two.after(r)
  assert awaited_by(inside.a) == {second, r}
  third, = awaited_by(inside.store([inside.a[0].store(inside.b[0].load())]).b)
  assert {second, r} <= set(third.toposort())
  assert r in awaited_by(inside.store([two.a[0].store(3.0)]).b)     # stores to an array from outside the loop

def test_uops_of_a_plain_problem() -> None:
  # The time of a first call grows with the number of UOps of its kernel. The causal forward kernel of wgmma with 192 queries and 96 keys must have
  # fewer than 900 UOps; an earlier version had 1285.
  p = problem(B=4, H=16, Sq=4096, Sk=4096, D=128, dtype="bfloat16", causal=True, lse=False)
  made, tile = single_kernel(p, get_chip("sm_90"))
  assert (tile.block_m, tile.block_n) == (192, 96)
  assert len(made(*[UOp.placeholder(s, TYPES[d], i) for i, (s, d) in enumerate(arguments(p).values())]).toposort()) < 900
