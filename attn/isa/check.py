"""Checks that find machine code which can give wrong numbers, or which slows a kernel down without need. CHECKS names each check.

  findings(assembly_text, "gfx942")           every check on any text
  python -m attn.isa check                    every check on every kernel of docs/costs.txt, under the compiler in use
  python -m attn.isa check --compilers        the same under older releases of clang"""
from __future__ import annotations
import os, re
from concurrent.futures import ThreadPoolExecutor
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from attn.chips import Chip, modelled
from attn.compilers.clang import Toolchain, assembly
from attn.isa import source
from attn.isa.active_lanes import across_lanes
from attn.isa.buffer_offsets import not_shown_to_fit
from attn.isa.flow import Block, blocks_of
from attn.isa.in_loops import scalar_spills, scratch_accesses, waterfalls
from attn.isa.parse import Kernel, parse
from attn.isa.source import Spec

@dataclass(frozen=True)
class Function:
  """Function of an assembly text, with the registers that the text declares for it, and its chip."""
  kernel: Kernel
  chip: Chip

  @cached_property
  def blocks(self) -> list[Block]: return blocks_of(self.kernel.code)

# name of a check -> function that returns its findings, one line each
CHECKS: dict[str, Callable[[Function], list[str]]] = {
  "across lanes": lambda f: across_lanes(f.blocks, f.chip.wave),
  "buffer offsets": lambda f: not_shown_to_fit(f.blocks, f.chip.wave, f.kernel.metadata.get("amdhsa_system_vgpr_workitem_id", 2) + 1),
  "waterfall": lambda f: waterfalls(f.blocks),
  "scratch": lambda f: scratch_accesses(f.blocks),
  "scalar spills": lambda f: scalar_spills(f.blocks),
}

def findings(text:str, arch:str|None=None) -> list[str]:
  """Runs all checks on the functions of an assembly text. Returns one line for each finding, which begins with the check's name."""
  functions = parse(text, arch)
  if not functions: raise ValueError("no AMDGPU code found: expected assembly text of a kernel, or the output of llvm-objdump -d")
  if functions[0].arch is None: raise ValueError("the text doesn't name its chip: give arch, such as gfx942")
  chip = modelled(re.split(r"[:+-]", functions[0].arch)[0])
  return [f"{name}: {found}" for kernel in functions for name, check in CHECKS.items() for found in check(Function(kernel, chip))]

def findings_of(specs:Sequence[Spec], tools:Toolchain) -> Iterator[tuple[str, list[str]]]:
  """Yields (description, findings) for each of attn's kernels in `specs`, compiled by `tools`."""
  # each kernel is checked twice: for numbers of queries and keys that fill whole tiles, and for numbers that are not powers of two
  def checked(spec:Spec, text:str) -> list[str]: return findings(assembly(text, spec.arch, tools=tools), spec.arch)
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    # kernels are rendered one after another while clang compiles on every core
    jobs = {f"{spec}{words}": pool.submit(checked, spec, source.kernel_source(spec, llvm=tools.llvm, shape=shape).text)
            for spec in specs for words, shape in (("", None), (" of uneven rows", source.uneven_shape(spec)))}
    for words, job in jobs.items(): yield f"{words} under clang {tools.llvm}", job.result()
