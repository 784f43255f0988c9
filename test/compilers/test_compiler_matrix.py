"""Compiles every kernel with the clangs of LLVM 19 to 22 and checks the machine code of the default tiles: python -m pytest -m compilers.

pip installs the compilers once (attn/compilers/releases.py). If pip cannot, pytest skips these tests and reports the reason.
"""
from __future__ import annotations
import functools, os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.calls.views import whole_places
from attn.chips import MODELLED, SEARCHED, get_chip
from attn.choose.backward import choose_bias_tile, dbias_of, dkdv_of, dq_of, kernel_tiles
from attn.choose.backward_tiles import AnyBackwardTile
from attn.choose.dispatch import KERNELS, choose, choose_tile, forward_of
from attn.choose.splits import AnyTile
from attn.compilers.clang import Toolchain, assembly
from attn.compilers.found import NoCompiler
from attn.compilers.releases import OLDER, ZIGLANG, toolchain_of
from attn.isa import costs
from attn.isa.check import findings, findings_of
from attn.isa.report import Report, analyse
from attn.isa.source import FORWARD, Source, Spec, chosen, kernel_source, problem_of_spec
from attn.kernels.append import Append, Scales, append
from attn.kernels.combine import combine, combine_arguments
from attn.kernels.parts.grid.tensors import arguments, dbias_arguments, dkdv_arguments, dq_arguments
from attn.kernels.tiles.amd import BackwardTile, MlaTile, Tile
from attn.ops import renderers
from attn.ops.renderers import render
from attn.problem import Pages
from attn.search.forward import ENOUGH, waves_of
from attn.tinygrad_compat import UOp
from attn.values import INTS
from cases import TYPES, floats, ints, problem
from isa_sample import PARKED

pytestmark = pytest.mark.compilers
FILE = Path(__file__).parent.parent.parent/"docs"/"costs_compilers.txt"
WITHOUT_SPILLS = (20, 21, 22)
OTHERS = [arch for arch in MODELLED if arch not in SEARCHED]     # differ from another chip of their family in names only: one kernel for each
FORWARDS = [spec for spec in costs.SPECS if spec.kernel == FORWARD and not spec.option]
PLAIN = {arch: [spec for spec in FORWARDS if spec.arch == arch] for arch in SEARCHED}
PLAIN["the others"] = [Spec(arch, 128, "bfloat16", "causal") for arch in OTHERS]

@pytest.fixture(scope="module")
def compilers() -> dict[int, Toolchain]:
  try: return {llvm: toolchain_of(llvm) for llvm in ZIGLANG}
  except NoCompiler as e: pytest.skip(str(e))

@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
  # Returns a thread pool that runs clang on every core.
  # the test's own thread lowers the kernels one after another
  with ThreadPoolExecutor(os.cpu_count()) as threads: yield threads

# ***** every kernel compiles *****

def text_of(program:Callable[..., UOp], tensors:dict[str, tuple[tuple[int, ...], str]], arch:str) -> str:
  return render(program(*[UOp.placeholder(shape, (TYPES | INTS)[dtype], i) for i, (shape, dtype) in enumerate(tensors.values())]), arch)

PAGES = Pages(16, 600, 256)
IN_PAGES, LATENT_IN_PAGES = (whole_places((PAGES.count, PAGES.size, *rows), "bshd") for rows in ((2, 128), (1, 576)))
LATENT: dict[str, Any] = dict(Hkv=1, Sk=4096, D=576, Dv=512, v_in_k=True)
OPTIONS: dict[str, dict[str, Any]] = {
  "D 16": dict(D=16, Sq=70), "odd D": dict(D=37, Dv=21, dtype="bfloat16", Sq=70, causal=True),
  "one query, GQA packed": dict(H=8, Hkv=2, Sq=1, Sk=999, num_splits=1),
  "few queries, window": dict(Sq=20, Sk=300, D=128, window=(50, 3), dtype="bfloat16", layout="bshd"),
  "every option": dict(H=64, Sq=512, D=128, causal=True, softcap=3.0, bias_dtype="bfloat16",
                       extras=dict(alibi_slopes=floats(64), bias=np.zeros((1, 64, 512, 512), np.float32), sinks=floats(64), kv_lengths=ints(500))),
  "packed sequences": dict(H=64, Sq=512, D=256, dtype="bfloat16", layout="thd", causal=True,
                           extras=dict(cu_seqlens_q=ints(0, 100, 512), cu_seqlens_k=ints(0, 90, 512))),
  "split": dict(H=8, Hkv=2, Sq=1, Sk=4096, D=128, num_splits=4, extras=dict(sinks=floats(8))),
  "pages": dict(B=2, H=8, Hkv=2, Sq=1, Sk=4096, D=128, num_splits=4, pages=PAGES, views=(IN_PAGES, IN_PAGES),
                extras=dict(kv_lengths=ints(999, 1), block_table=np.zeros((2, PAGES.most), np.int32))),
  "pages, many queries": dict(B=2, H=8, Hkv=2, Sq=300, Sk=4096, D=128, dtype="bfloat16", causal=True, pages=PAGES, views=(IN_PAGES, IN_PAGES),
                              extras=dict(kv_lengths=ints(999, 1), block_table=np.zeros((2, PAGES.most), np.int32))),
  "latent": dict(H=128, Sq=1, softcap=3.0, num_splits=1, **LATENT),
  "latent, few rows": dict(H=16, Sq=1, dtype="bfloat16", num_splits=1, lse=False, **LATENT),
  "latent, split, pages": dict(B=2, H=32, Sq=2, dtype="bfloat16", causal=True, num_splits=4, pages=PAGES, views=(LATENT_IN_PAGES, LATENT_IN_PAGES),
                               extras=dict(sinks=floats(32), kv_lengths=ints(999, 1), block_table=np.zeros((2, PAGES.most), np.int32)), **LATENT)}
# problems for the backward kernels
GRADIENTS: dict[str, dict[str, Any]] = {
  "GQA": dict(H=64, Hkv=8, Sq=512, D=128, dtype="bfloat16", causal=True),
  "dropout and a bias": dict(H=64, Sq=512, softcap=3.0, window=(70, 5), layout="bshd", dropout_p=0.1, bias_dtype="float16",
                             extras=dict(dropout_seed=np.array([1, 2], np.uint32), bias=np.zeros((1, 64, 1, 512), np.float32))),
  "packed sequences": dict(H=64, Sq=512, D=37, Dv=21, layout="thd", extras=dict(cu_seqlens_q=ints(0, 100, 512), cu_seqlens_k=ints(0, 90, 512)))}
APPENDED = Append(2, 4, 3, 100, 72, "bhsd", whole_places((2, 4, 100, 72), "bhsd"))
PAGED = Append(2, 2, 3, PAGES.rows, 128, "bhsd", IN_PAGES, PAGES)
IN_8_BITS = replace(APPENDED, scales=Scales("int8", "float16", whole_places((2, 4, 100, 1), "bhsd")))

@functools.cache
def forward_text(name:str, arch:str, kernel:str, tile:AnyTile) -> str:
  p = problem(**OPTIONS[name])
  program = KERNELS[kernel].program
  assert program is not None
  return text_of(program(p, get_chip(arch), tile), arguments(p), arch)

@functools.cache
def other_text(name:str, arch:str) -> str:
  if name == "combine": return text_of(combine(p := problem(**OPTIONS["split"]), get_chip(arch), p.num_splits), combine_arguments(p), arch)
  a, table = (PAGED, {"block_table": ((2, PAGES.most), "int32")}) if "pages" in name else (APPENDED, {})
  if "8 bits" in name: a, table = IN_8_BITS, {}
  dtype, of_scales = name.split()[1], {} if a.scales is None else {"scales": ((a.scales.places.size,), a.scales.dtype)}
  tensors = {"cache": ((a.places.size,), dtype if a.scales is None else "int8"), **of_scales, "rows": ((a.B, a.H, a.new, a.width), dtype),
             "lengths": ((2,), "int32"), **table}
  return text_of(append(a), tensors, arch)

@functools.cache
def gradient_texts(name:str, arch:str, tiles:tuple[AnyBackwardTile, AnyBackwardTile]) -> list[str]:
  # Returns the sources of the backward kernels for the problem GRADIENTS[name], with the tiles of dq and of dk and dv.
  p, chip = replace(problem(**GRADIENTS[name]), return_lse=True), get_chip(arch)
  dq, dkdv = tiles
  assert isinstance(dq, BackwardTile)
  texts = [text_of(dq_of(p, chip, dq, dlse=True), dq_arguments(p, dlse=True), arch), text_of(dkdv_of(p, chip, dkdv), dkdv_arguments(p), arch)]
  return texts if p.bias is None else [*texts, text_of(dbias_of(p, chip, dq), dbias_arguments(p), arch)]

def kernel_text(name:str, arch:str, llvm:int) -> str:
  # Returns the source of a kernel with the tile that dispatch chooses for this LLVM release.
  if name not in OPTIONS: return other_text(name, arch)
  choice = choose(problem(**OPTIONS[name]), replace(get_chip(arch), llvm=llvm))
  assert choice.work.tile is not None and (name not in ("split", "pages") or choice.kernel == "split_kv")
  assert isinstance(choice.work.tile, MlaTile) == ("latent" in name)
  return forward_text(name, arch, choice.kernel, choice.work.tile)

def known(compilers:dict[int, Toolchain], arch:str) -> dict[int, Toolchain]:
  # Returns those of the compilers that support the instructions of the chip, by LLVM release.
  return {llvm: tools for llvm, tools in compilers.items() if costs.knows(tools, arch)}

Jobs = dict[tuple[Any, ...], Future[str]]

def check_compiled(jobs:Jobs, arch:str, checks:tuple[str, ...]=("waterfall", "across lanes")) -> None:
  # Checks that clang has compiled every kernel of `jobs`, and that the `checks` of machine code find nothing.
  assert {key: str(error) for key, job in jobs.items() if (error := job.exception()) is not None} == {}
  # "waterfall" finds loops that access memory for one lane after another, "across lanes" operations across lanes that run while some lanes of the
  # wave are inactive
  found = {key: [x for x in findings(job.result(), arch) if x.startswith(checks)] for key, job in jobs.items()}
  assert {key: lines for key, lines in found.items() if lines} == {}

@pytest.mark.parametrize("arch", SEARCHED)
def test_every_kernel_compiles(arch:str, compilers:dict[int, Toolchain], pool:ThreadPoolExecutor) -> None:
  jobs: Jobs = {}
  for name in (*OPTIONS, "combine", "append float16", "append bfloat16", "append float16 to pages", "append bfloat16 in 8 bits"):
    for llvm, tools in known(compilers, arch).items():
      jobs[name, llvm] = pool.submit(assembly, kernel_text(name, arch, llvm), arch, (), tools)
  check_compiled(jobs, arch)
  latent = {key: analyse(job.result(), arch, LATENT["D"], LATENT["Dv"]).resources for key, job in jobs.items() if "latent" in key[0]}
  assert {key: r for key, r in latent.items() if r.vgpr_spills or r.sgpr_spills or r.scratch} == {}

@pytest.mark.parametrize("arch", SEARCHED)
def test_every_backward_kernel_compiles(arch:str, compilers:dict[int, Toolchain], pool:ThreadPoolExecutor) -> None:
  jobs: Jobs = {}
  for name, options in GRADIENTS.items():
    for llvm, tools in known(compilers, arch).items():
      if llvm == max(ZIGLANG): continue
      tiles = kernel_tiles(replace(problem(**options), return_lse=True), replace(get_chip(arch), llvm=llvm))
      assert not isinstance(tiles, str), tiles
      for i, text in enumerate(gradient_texts(name, arch, tiles)): jobs[name, llvm, i] = pool.submit(assembly, text, arch, (), tools)
  check_compiled(jobs, arch)

# ***** operations across lanes run in whole waves *****

@functools.cache
def dbias_text(arch:str, causal:bool) -> str:
  # Returns the source of the kernel of a bias's gradient, where queries do not fill the last tile.
  # the bias has a row for each query
  p = replace(problem(Sq=83, Sk=71, causal=causal, extras=dict(bias=np.zeros((1, 2, 83, 71), np.float32))), return_lse=True)
  tile = choose_bias_tile(p, get_chip(arch))
  assert isinstance(tile, BackwardTile)
  return text_of(dbias_of(p, get_chip(arch), tile), dbias_arguments(p), arch)

@pytest.mark.parametrize("arch", SEARCHED)
def test_rows_of_a_bias(arch:str, compilers:dict[int, Toolchain], pool:ThreadPoolExecutor) -> None:
  jobs: Jobs = {(causal, llvm): pool.submit(assembly, dbias_text(arch, causal), arch, (), tools)
                for causal in (False, True) for llvm, tools in known(compilers, arch).items()}
  check_compiled(jobs, arch, ("across lanes",))

@pytest.mark.parametrize("arch, llvm, instruction", [("gfx950", 20, "v_permlane32_swap"), ("gfx1201", 19, "v_permlanex16")])
def test_swaps_that_clang_moves_into_a_branch_are_seen(arch:str, llvm:int, instruction:str, compilers:dict[int, Toolchain],
                                                       monkeypatch:pytest.MonkeyPatch) -> None:
  # The check of operations across lanes finds exchanges between lanes that clang has moved into a branch. To make clang do so, the test switches off
  # a protection: attn usually computes the values that a branch stores before the branch. The kernel is that for latent attention.
  monkeypatch.setattr(renderers, "made_before_branches", lambda uops: {})
  p = problem(**OPTIONS["latent, few rows"])
  tile = choose(p, replace(get_chip(arch), llvm=llvm)).work.tile
  assert isinstance(tile, MlaTile)
  text = assembly(text_of(forward_of(p, get_chip(arch), tile), arguments(p), arch), arch, tools=compilers[llvm])
  assert any(f": {instruction}" in x for x in findings(text, arch))

# ***** registers of plain kernels *****

def waves(report:Report, tile:AnyTile) -> int:
  assert isinstance(tile, Tile)
  return waves_of(report, tile, get_chip(report.arch))

def small_grid(spec:Spec, llvm:int) -> Tile:
  # Returns the tile that dispatch chooses for the problem of `spec` with only two heads.
  # a smaller tile, because a large one would leave compute units idle
  tile = choose_tile(replace(problem_of_spec(spec), H=2, Hkv=2, num_splits=1), replace(get_chip(spec.arch), llvm=llvm))
  assert isinstance(tile, Tile)
  return tile

# With clang 20 and 21, no tile of 128 queries that fits into LDS leaves enough registers for two waves.
CANNOT_BE_HELPED = {("gfx950", 256, "small", 20), ("gfx950", 256, "small", 21)}
# Tiles for q, k and v of 8 bits have one table for all compilers, chosen for LLVM 22. Under older compilers some of them leave fewer waves.
HAVE_TILES_FOR_COMPILERS = ("float16", "bfloat16")

@pytest.mark.parametrize("grid", ("large", "small"))
@pytest.mark.parametrize("arch", (*SEARCHED, "the others"))
def test_no_default_tile_spills(arch:str, grid:str, compilers:dict[int, Toolchain], pool:ThreadPoolExecutor) -> None:
  # No tile that dispatch chooses spills registers with LLVM 20, 21 or 22. An older release may use more registers than LLVM 22 for a tile, but a SIMD
  # must still hold as many waves, or at least enough waves to stay busy. This is not required of kernels for 8-bit floats.
  jobs: dict[tuple[Spec, int], tuple[AnyTile, Future[Report]]] = {}
  for spec in PLAIN[arch]:
    for llvm in WITHOUT_SPILLS:
      tile = small_grid(spec, llvm) if grid == "small" else None
      source = kernel_source(spec, tile, llvm)
      jobs[spec, llvm] = tile or chosen(spec, llvm)[1], pool.submit(report_on, source, spec, compilers[llvm])
  wrong = []
  for (spec, llvm), (tile, job) in jobs.items():
    r = job.result().resources
    spills = (0 if (spec.arch, spec.d, spec.dtype) in PARKED else r.vgpr_spills, r.sgpr_spills, r.scratch)
    if spills != (0, 0, 0): wrong.append(f"{spec} under {llvm} with {tile}: spills {spills}")
    newest, report = jobs[spec, max(WITHOUT_SPILLS)]
    fewer = waves(job.result(), tile) < min(ENOUGH, waves(report.result(), newest))
    fewer = fewer and spec.dtype in HAVE_TILES_FOR_COMPILERS
    if fewer and (spec.arch, spec.d, grid, llvm) not in CANNOT_BE_HELPED: wrong.append(f"{spec} under {llvm} with {tile}: too few waves")
  assert wrong == []

# kernels whose loops had scratch accesses under one of the compilers in an earlier version, if the numbers of rows were no powers of two
UNEVEN_SPILLED = ("gfx1100/64/float16/full/dkdv", "gfx1100/256/float16/full/dq")

@pytest.mark.parametrize("name", UNEVEN_SPILLED)
def test_uneven_rows_spill_under_no_compiler(name:str, compilers:dict[int, Toolchain]) -> None:
  found = {words: lines for tools in compilers.values() for words, lines in findings_of([Spec.parse(name)], tools)}
  assert len(found) == 2*len(compilers) and not any(found.values()), found

def report_on(source:Source, spec:Spec, tools:Toolchain) -> Report:
  return analyse(assembly(source.text, spec.arch, tools=tools), spec.arch, source.d, source.dv, queries=source.queries, title=str(spec))

def test_dual_wave_is_for_the_newest(compilers:dict[int, Toolchain]) -> None:
  # Dispatch chooses the kernel dual_wave only for the newest compiler, because older ones spill its registers. With an older compiler dispatch
  # chooses another kernel, and `explain` says why.
  spec = Spec("gfx950", 128)
  assert chosen(spec, 22)[0] == "dual_wave"
  source = kernel_source(spec, None, 22)
  for llvm in (20, 21):
    choice = choose(problem_of_spec(spec), replace(get_chip("gfx950"), llvm=llvm))
    assert choice.kernel == "staggered" and "this kernel would spill registers; it needs LLVM 22" in str(choice)
  assert (report_on(source, spec, compilers[21]).resources.scratch or 0) > 0

# ***** the file *****

def test_the_file_is_current(compilers:dict[int, Toolchain]) -> None:
  file, text = costs.costs_under([compilers[llvm] for llvm in OLDER]), FILE.read_text()
  assert [line.split(" ")[0] for line in text.splitlines()[2:]] == [str(s) for s in FORWARDS]
  assert file.compare(text, file.lines_of([spec for specs in PLAIN.values() for spec in specs])) == []
