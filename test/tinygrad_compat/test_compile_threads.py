"""Tests of kernels that are compiled in threads while Python lowers other kernels. No GPU is needed."""
from __future__ import annotations
import threading, uuid
from dataclasses import replace
from typing import Any
import pytest
from tinygrad import codegen
from tinygrad.codegen import to_program_cache, to_program_key
from tinygrad.engine import worker
from attn.chips import get_chip
from attn.choose.dispatch import single_kernel
from attn.kernels.parts.grid.tensors import arguments
from attn.ops.renderers import printer_of
from attn.tinygrad_compat import Compiler, Context, UOp, compile_threads
from attn.tinygrad_compat.compile_threads import LoweredHere, begin
from cases import TYPES, problem

class Noting(Compiler):
  # Stand-in for a compiler that notes in which thread it compiles; its machine code is the source in capitals.
  def __init__(self, cachekey:str|None=None, wrong:str="no source") -> None:
    super().__init__(cachekey)
    self.wrong, self.threads = wrong, list[str]()
  def compile(self, src:str) -> bytes:
    self.threads.append(threading.current_thread().name)
    if self.wrong in src: raise RuntimeError(f"does not compile {self.wrong}")
    return src.upper().encode()

def kernels(heads:tuple[int, ...], compiler:Compiler, arch:str="sm_90") -> tuple[list[UOp], Any]:
  # Returns the ASTs of small kernels, one for each number of heads, and a renderer with this compiler.
  # Every other kernel has a causal mask, so that the kernel is larger.
  renderer = printer_of(arch)
  renderer.compiler = compiler
  found = []
  for i, H in enumerate(heads):
    p = problem(H=H, Sq=64, Sk=64, D=64, lse=False, causal=i % 2 == 1)
    found.append(single_kernel(p, get_chip(arch))[0](*[UOp.placeholder(s, TYPES[d], i) for i, (s, d) in enumerate(arguments(p).values())]))
  return found, renderer

def compiled(asts:list[UOp], renderer:Any, pool:Any=None) -> list[bytes]:
  # Compiles kernels as tinygrad does for a schedule, with a stand-in for the worker processes, and returns their machine code.
  tasks = [(i, (ast, renderer), {}) for i, ast in enumerate(asts)]
  found = dict(LoweredHere(lambda: pool).imap_unordered(lambda task: (task[0], codegen.to_program(*task[1])), tasks))
  return [found[i].src[-1].arg for i in range(len(asts))]

class NoWorkers:
  # Stand-in for a pool of worker processes that must not be used.
  def imap_unordered(self, *args:Any) -> Any: raise AssertionError("worker processes are used")

def test_few_kernels_are_lowered_here_and_compiled_in_threads(monkeypatch:pytest.MonkeyPatch) -> None:
  # A few kernels for CUDA are lowered in this process, the largest first, and each is compiled in another thread. Each gets its own machine code.
  compiler, order = Noting(), list[int]()
  asts, renderer = kernels((21, 22, 23), compiler)
  sizes = [len(ast.toposort()) for ast in asts]
  lower = codegen.do_to_program
  def lowered(ast:UOp, on:Any) -> UOp:
    if to_program_key(ast, on) not in compile_threads.begun: order.append(sizes[asts.index(ast)])
    return lower(ast, on)
  monkeypatch.setattr(codegen, "do_to_program", lowered)
  codes = compiled(asts, renderer, NoWorkers())
  assert order == sorted(sizes, reverse=True) and order != sizes
  assert len(compiler.threads) == 3 and all(name.startswith("attn_compile") for name in compiler.threads)
  for ast, code in zip(asts, codes):
    program = to_program_cache[to_program_key(ast, renderer)]
    assert code == program.src[-2].arg.upper().encode() and program.src[-1].arg == code
  assert len(set(codes)) == 3 and not compile_threads.begun

@pytest.mark.parametrize("why", ("many kernels", "workers run", "another device", "no kernel of attn"))
def test_worker_processes_compile_other_schedules(monkeypatch:pytest.MonkeyPatch, why:str) -> None:
  # tinygrad's worker processes compile a schedule with many kernels, with kernels for a device that does not compile in threads, or without a kernel
  # of attn. If the processes already run, they compile all schedules.
  if why == "many kernels": monkeypatch.setattr(compile_threads, "MOST_LOWERED_HERE", 1)
  if why == "workers run": monkeypatch.setattr(worker, "worker_pool", object())
  asts, renderer = kernels((24, 25), Noting(), "gfx942" if why == "another device" else "sm_90")
  if why == "no kernel of attn": asts = [ast.replace(arg=replace(ast.arg, name="a kernel of another library")) for ast in asts]
  with pytest.raises(AssertionError, match="worker processes are used"): compiled(asts, renderer, NoWorkers())

def test_machine_code_is_read_from_the_disk() -> None:
  # tinygrad's cache on disk keeps the machine code of a kernel that a thread has compiled. A later process compiles nothing.
  found, table = [], f"of_a_test_{uuid.uuid4().hex}"
  for _ in range(2):
    compiler = Noting(table)
    asts, renderer = kernels((26, 27), compiler)
    for ast in asts: to_program_cache.pop(to_program_key(ast, renderer), None)
    found.append((compiled(asts, renderer), len(compiler.threads)))
  (codes, compilations), (again, later) = found
  assert codes == again and (compilations, later) == (2, 0)

def test_an_error_of_the_compiler_is_raised() -> None:
  asts, renderer = kernels((28, 29), Noting(wrong="attn_"))
  with pytest.raises(RuntimeError, match="does not compile"): compiled(asts, renderer)
  compile_threads.begun.clear()

def test_a_kernel_that_has_begun_is_used_alone() -> None:
  # A thread that has begun to compile a kernel is used if tinygrad asks for this kernel alone, outside of a schedule: the kernel is not lowered and
  # compiled again.
  compiler = Noting()
  (ast,), renderer = kernels((30,), compiler)
  begin(ast, renderer)
  begin(ast, renderer)
  program = codegen.to_program(ast, renderer)
  assert program.src[-1].arg == program.src[-2].arg.upper().encode() and len(compiler.threads) == 1
  assert renderer.compiler is compiler

def test_machine_code_is_shown_where_it_was_asked_for() -> None:
  with Context(DEBUG=compile_threads.SHOWS_MACHINE_CODE): assert not compile_threads.in_threads(printer_of("sm_90"))
  assert compile_threads.in_threads(printer_of("sm_90")) and not compile_threads.in_threads(printer_of("gfx942"))
