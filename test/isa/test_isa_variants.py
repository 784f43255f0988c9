"""Compiles every kernel that dispatch chooses, for every chip: no spills, no slow instruction sequences (`costs.defects`), and the costs of
docs/costs.txt."""
from __future__ import annotations
import functools, re
from dataclasses import replace
from pathlib import Path
from typing import Any
import pytest
from attn.chips import SEARCHED, get_chip
from attn.chips.shapes import ForwardShape, UpTo
from attn.choose.dispatch import choose_tile
from attn.choose.tiles import amd_tile
from attn.isa import costs
from attn.compilers.clang import assembly
from attn.isa.instruction import VECTOR, Instruction, matrix_shape
from attn.isa.parse import parse
from attn.isa.report import Report, analyse, hot_loop
from attn.isa.source import BACKWARD, FORWARD, MASKS, Spec, chosen, kernel_source, problem_of_spec
from attn.isa.timing import costs_file
from attn.isa.waits import time_of_loads
from attn.kernels import dual_wave
from attn.kernels.tiles.amd import BackwardTile, Tile
from attn.problem import OF_8_BITS
from cases import ARCHS
from isa_sample import PARKED

FILE = Path(__file__).parent.parent.parent/"docs"/"costs.txt"

# All kernels for one chip of each family. The source for the other chips differs only by names, so they have one kernel each; `python -m attn.isa
# costs --check` has all kernels.
COMPILED = [s for s in costs.SPECS if s.kernel == FORWARD and not s.option and
            (s.arch in SEARCHED or (s.d, s.dtype, s.mask) == (128, "bfloat16", "causal"))]
GRADIENTS = [replace(s, kernel=BACKWARD[0]) for s in COMPILED if s.dtype not in OF_8_BITS]

def test_the_file_has_every_kernel() -> None:
  assert [line.split(" ")[0] for line in FILE.read_text().splitlines()[2:]] == [str(s) for s in costs.SPECS]

# ***** waits *****

FENCE = '__builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");'
BARRIERS = ("s_barrier", "s_barrier_signal -1")      # barriers of a workgroup; s_barrier_wait ends a barrier that a signal begins
LOADS = {"vmcnt", "loadcnt"}                         # counters of loads from memory

def test_the_page_has_the_files_figures() -> None:
  # The table in docs/isa.md shows the figures of docs/costs.txt for the two backward kernels: instructions of each kernel and in total, spilled
  # registers, and `useful` (share of the matrix unit's peak rate that goes to useful products).
  header, *lines = [[cell.strip() for cell in line.split("|")] for line in FILE.read_text().splitlines()[1:]]
  of = {line[0]: dict(zip(header, line)) for line in lines}
  rows = re.findall(r"^\| (gfx\w+/\d+/\w+) \| ([\d.]+): ([\d.]+) \+ ([\d.]+) \| (\d+%) \| (\d+)", (FILE.parent/"isa.md").read_text(), re.M)
  assert len(rows) > 20
  for name, both, of_dq, of_dkdv, useful, spilled in rows:
    dq, dkdv = of[f"{name}/full/dq"], of[f"{name}/full/dkdv"]
    instructions = [float(x["VALU/elt"]) for x in (dq, dkdv)]
    assert [both, of_dq, of_dkdv] == [f"{x:.1f}" for x in (sum(instructions), *instructions)], name
    assert (useful, int(spilled)) == (dq["useful"], int(dq["spill"]) + int(dkdv["spill"])), name

def wrong_waits(spec:Spec, report:Report) -> list[str]:
  # Returns the waits and barriers in the hot loop of the forward kernel for `spec` that differ from the kernel's design.
  name, tile = chosen(spec)
  if name == "staggered": return wrong_in_staggered(report)
  return wrong_in_dual_wave(report) if name == "dual_wave" else wrong_in_forward(report, tile)

def wrong_in_staggered(report:Report) -> list[str]:
  # Returns the wrong waits and barriers of the staggered kernel.
  # One half of the waves multiplies while the other computes the softmax. Loads of two tiles must be pending during all matrix instructions of an
  # iteration and at its two barriers. The first half of the next iteration waits for them.
  assert report.loop is not None
  matrix = report.loop.matrix
  products = sum(n for shape, n in matrix.items() if "4x4x4" not in shape)      # without the matrix instructions that sum P
  barriers = [x for x in report.waits if x.what in BARRIERS]
  loads = [x for x in report.waits if x.awaited is not None and x.awaited.kind == "load"]
  right = {"barriers": len(barriers) == 2, "waits": bool(loads) and all(x.matrix <= sum(matrix.values()) - products for x in loads),
           "time of loads": (time_of_loads(report.waits) or 0) >= products,
           "under way at barriers": all(x.under_way.get("vmcnt", 0) > 0 for x in barriers)}
  return [what for what in right if not right[what]]

def wrong_in_dual_wave(report:Report) -> list[str]:
  # Returns the wrong waits and barriers of the dual_wave kernel.
  # One group of waves computes while the other reads LDS. An iteration computes two tiles of keys. Each tile takes four steps, two of computation
  # and two of memory access, and a barrier ends each step. A step of memory access ends with a wait for loads that were issued four steps before, so
  # that the two matrix products of a tile hide them. Loads of two later tiles are always pending.
  assert report.loop is not None
  waits = [x for x in report.waits if x.what.startswith("vmcnt")]
  barriers = [x for x in report.waits if x.what in BARRIERS]
  right = {"barriers": len(barriers) == 8,
           "waits": [x.what for x in waits] == [f"vmcnt({dual_wave.BEHIND})"]*4,
           "what is waited for": [x.awaited.accesses if x.awaited is not None else 0 for x in waits] == [dual_wave.LOADS]*4,
           "time of loads": time_of_loads(report.waits) == sum(report.loop.matrix.values())//2,
           "under way at barriers": all(x.under_way == {"vmcnt": dual_wave.BEHIND} for x in barriers)}
  return [what for what in right if not right[what]]

def wrong_in_forward(report:Report, tile:Tile) -> list[str]:
  # Returns the wrong waits and barriers of a forward kernel.
  # With prefetch, the next tile's loads must be pending from before the first matrix instruction of an iteration until after the last. Without
  # prefetch, an iteration waits for its loads before the first matrix instruction. Barriers separate stores to LDS from reads by other waves.
  assert report.loop is not None
  matrix = sum(report.loop.matrix.values())
  # At D=256 the compiler moves loads below the softmax's branch, on CDNA3 and its predecessor, and for 8-bit floats on CDNA4. They are then under way
  # in most of the second product only.
  late = report.d == 256 and (report.arch in ("gfx90a", "gfx942") or any("f8f6f4" in name for name in report.loop.matrix))
  begin, end = (matrix*6//10, matrix*9//10) if late else (0, matrix)
  busy = [x for x in report.waits if begin < x.matrix < end]
  loads = [x for x in report.waits if x.awaited is not None and x.awaited.kind == "load"]
  time = time_of_loads(report.waits) or 0
  right = {"barriers": sum(x.what in BARRIERS for x in report.waits) == (1 if tile.prefetch == 2 else 2),
           "waits": bool(loads) and all(x.matrix >= end if tile.prefetch else x.matrix == 0 for x in loads),
           "time of loads": time >= end - begin if tile.prefetch else time == 0,
           "under way": all(bool(LOADS & set(x.under_way)) == bool(tile.prefetch) for x in busy)}
  return [what for what in right if not right[what]]

def test_a_fence_that_waits_for_loads_is_seen(monkeypatch:pytest.MonkeyPatch) -> None:
  # A barrier that is compiled as a memory fence waits for loads that the kernel has just issued. `wrong_waits` reports this wait.
  spec = Spec("gfx950", 128)
  kernel = kernel_source(spec)
  text = kernel.text.replace("__builtin_amdgcn_s_waitcnt(0xc07f);", FENCE)
  report = analyse(assembly(text, spec.arch), spec.arch, kernel.d, kernel.dv)
  assert wrong_waits(spec, report) == ["waits", "what is waited for", "time of loads", "under way at barriers"]

def test_loads_that_have_no_time_are_seen() -> None:
  # `wrong_waits` reports a wait that comes too soon after its loads. Here the second matrix product has no compiler fences: clang moves loads into
  # the middle of the product, and waits for them six matrix instructions later.
  spec = Spec("gfx942", 256)
  _, tile = chosen(spec)
  assert isinstance(tile, Tile)
  kernel = kernel_source(spec, unfenced := replace(tile, fenced=False))
  report = analyse(assembly(kernel.text, spec.arch), spec.arch, kernel.d, kernel.dv)
  assert wrong_in_forward(report, unfenced) == ["waits", "time of loads", "under way"] and time_of_loads(report.waits) == 6

@pytest.mark.sample(7)
@pytest.mark.parametrize("spec", COMPILED, ids=str)
def test_kernel(spec:Spec) -> None:
  arch, kernel = get_chip(spec.arch), kernel_source(spec)
  text = assembly(kernel.text, spec.arch)
  report = costs.report_of_text(spec, kernel, text)
  r, matrix = report.resources, choose_tile(problem_of_spec(spec), arch).matrix
  assert (r.sgpr_spills, r.scratch) == (0, 0) and (r.vgpr_spills == 0 or (spec.arch, spec.d, spec.dtype) in PARKED)
  assert r.lds is not None and r.lds <= arch.lds
  assert report.loop is not None and f"_{matrix.M}x{matrix.N}x{matrix.K}_" in " ".join(f"_{name}" for name in report.loop.matrix)
  assert costs.defects(parse(text)[0]) == []
  assert wrong_waits(spec, report) == []
  changes = costs_file.costs().compare(FILE.read_text(), [costs_file.line_of(report)])
  assert changes == [], "the costs changed; if that is intended, run python -m attn.isa costs --write docs/costs.txt"

SWAPS = ("v_permlane16_swap_b32", "v_permlane32_swap_b32")
EXCHANGES = {("gfx942", 0): {"ds_bpermute_b32"}, ("gfx942", 1): {"ds_bpermute_b32"}, ("gfx950", 0): {SWAPS[1]}, ("gfx950", 1): set(SWAPS),
             ("gfx1100", 0): {"v_permlanex16_b32"}, ("gfx1201", 0): {"v_permlanex16_b32"}}

@pytest.mark.parametrize(("arch", "matrix"), EXCHANGES, ids=str)
def test_lane_groups_meet_by_the_chips_own_instruction(arch:str, matrix:int) -> None:
  spec, chip = Spec(arch, 64), get_chip(arch)
  tile = amd_tile(problem_of_spec(spec), chip, UpTo(64, ForwardShape(4, 1, 64, fenced=True), matrix=matrix))
  found = re.findall(r"\b(v_permlane\w+?|ds_bpermute_b32)(?:_e\d\d)?\b", assembly(kernel_source(spec, tile).text, arch))
  assert set(found) == EXCHANGES[arch, matrix]

def hot_loop_of(spec:Spec, **tile:Any) -> list[Instruction]:
  # Returns the instructions of the forward kernel's hot loop, with the fields `tile` of its tile changed.
  p, arch = problem_of_spec(spec), get_chip(spec.arch)
  kernel = kernel_source(spec, replace(choose_tile(p, arch), **tile))
  found = hot_loop(parse(assembly(kernel.text, spec.arch))[0], get_chip(spec.arch), kernel.d, kernel.dv)
  assert found is not None
  return found[1]

@pytest.mark.sample(6)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("d", costs.HEAD_DIMENSIONS)
def test_the_next_tile_is_loaded_before_the_matrix_work(arch:str, d:int) -> None:
  # An iteration issues the loads of the next tile before all its matrix instructions. On gfx942 with D=256 clang moves some loads further down,
  # behind the branch of the softmax but before the second product.
  kinds = ["sum of P" if x.kind == "matrix" and not matrix_shape(x.op)[1] else x.kind for x in hot_loop_of(Spec(arch, d), prefetch=1)]
  after = kinds[len(kinds) - kinds[::-1].index("load"):].count("matrix")
  assert after >= kinds.count("matrix")*(0.5 if (arch, d) == ("gfx942", 256) else 1)

@pytest.mark.sample(6)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("prefetch", "barriers"), ((0, 2), (1, 2), (2, 1)))
def test_barriers_of_a_trip(arch:str, prefetch:int, barriers:int) -> None:
  assert sum(x.op in ("s_barrier", "s_barrier_signal") for x in hot_loop_of(Spec(arch, 64), prefetch=prefetch, block_n=32)) == barriers

@pytest.mark.parametrize("arch", ARCHS)
def test_lazy_and_eager(arch:str) -> None:
  # The softmax subtracts a number from all scores of a row. A kernel that sets this number to the row's maximum in every iteration executes about
  # half an instruction more for each score than a kernel that raises it only when needed.
  def valu(above:float) -> int: return sum(x.kind in VECTOR for x in hot_loop_of(Spec(arch, 128), rescale_above=above))
  spec = Spec(arch, 128)
  tile = choose_tile(problem_of_spec(spec), get_chip(arch))
  share = tile.q_tiles*tile.matrix.N*tile.block_n/tile.matrix.wave
  assert 0.3*share < valu(0.0) - valu(8.0) < 0.7*share

# ***** kernels with one option *****

@pytest.mark.sample(4)
@pytest.mark.parametrize("spec", [s for s in costs.SPECS if s.option and s.kernel != "dkdv"], ids=str)
def test_one_option(spec:Spec) -> None:
  # The kernels of forward and of the gradients with one option spill no register, and have none of the slow instruction sequences.
  for report, defects in both(spec):
    r = report.resources
    assert (r.vgpr_spills, r.sgpr_spills, r.scratch) == (0, 0, 0) and defects == []
  changes = costs_file.costs().compare(FILE.read_text(), [costs_file.line_of(report) for report, _ in both(spec)])
  assert changes == [], "the costs changed; if that is intended, run python -m attn.isa costs --write docs/costs.txt"

# ***** the backward kernels *****

@functools.cache
def both(spec:Spec) -> list[tuple[Report, list[str]]]:
  # Returns, for the dq kernel and for the dk and dv kernel, a report on the machine code and its slow instruction sequences.
  sources = [kernel_source(x) for x in spec.together]
  texts = [assembly(source.text, spec.arch) for source in sources]
  reports = [costs.report_of_text(x, source, text) for x, source, text in zip(spec.together, sources, texts)]
  return [(costs.with_useful(r, reports), costs.defects(parse(text)[0])) for r, text in zip(reports, texts)]

OUTSIDE = 2      # registers that dq on RDNA3 keeps in memory

# Compiled by default; the other kernels take ten minutes.
SAMPLE = {("gfx942", 128, "bfloat16", "causal"), ("gfx950", 64, "float16", "causal"), ("gfx1100", 128, "bfloat16", "causal"),
          ("gfx1100", 256, "bfloat16", "full"), ("gfx1201", 64, "float16", "full")}
def sampled(arch:str, d:int, dtype:str, mask:str) -> Any:
  return pytest.param(Spec(arch, d, dtype, mask, BACKWARD[0]), id=f"{arch}/{d}/{dtype}/{mask}",
                      marks=() if (arch, d, dtype, mask) in SAMPLE else pytest.mark.thorough)

@pytest.mark.sample(2)
@pytest.mark.parametrize("spec", [sampled(x.arch, x.d, x.dtype, x.mask) for x in GRADIENTS])
def test_gradients(spec:Spec) -> None:
  # Backward kernels do not spill up to D=128. For larger D at most OUTSIDE vector registers spill, outside of the hot loop. An iteration has only the
  # barriers that separate stores to LDS from reads; on gfx12 a barrier is two instructions.
  for one, (r, slow) in zip(spec.together, both(spec), strict=True):
    held, loop, tile = r.resources, r.loop, chosen(one)[1]
    assert isinstance(tile, BackwardTile) and loop is not None
    barriers = loop.kinds["barrier"]//(2 if spec.arch in ("gfx1200", "gfx1201") else 1)
    assert barriers == tile.passes*(1 if tile.prefetch == 2 else 2)
    assert loop.kinds["scratch"] == 0 and slow == []
    assert spec.d > 128 or (held.vgpr_spills, held.sgpr_spills, held.scratch) == (0, 0, 0)
    assert held.vgpr_spills is not None and held.vgpr_spills <= OUTSIDE
    assert held.lds is not None and held.lds <= get_chip(spec.arch).lds
    assert loop.cycles["lds"] < sum(loop.cycles[pipe] for pipe in ("matrix", "vector", "transcendental"))
  changes = costs_file.costs().compare(FILE.read_text(), [costs_file.line_of(r) for r, _ in both(spec)])
  assert changes == [], "the costs changed; if that is intended, run python -m attn.isa costs --write docs/costs.txt"

# Limits for both kernels together: at most this many VALU instructions per score, and at least this `useful`. No public kernel without atomics has
# fewer instructions.
TARGETS = {("gfx942", 128, "float16"): (8, 55), ("gfx942", 128, "bfloat16"): (12, 52), ("gfx942", 64, "float16"): (8.5, 43),
           ("gfx942", 64, "bfloat16"): (12.5, 40), ("gfx950", 128, "float16"): (6.5, 51), ("gfx950", 64, "float16"): (6.5, 40),
           ("gfx950", 128, "bfloat16"): (6.5, 51), ("gfx950", 64, "bfloat16"): (6.5, 40),
           ("gfx1100", 128, "float16"): (16, 63), ("gfx1100", 64, "float16"): (18, 55), ("gfx1100", 128, "bfloat16"): (20, 62),
           ("gfx1100", 64, "bfloat16"): (22, 53), ("gfx1201", 128, "float16"): (12, 60), ("gfx1201", 64, "float16"): (13, 50),
           ("gfx1201", 128, "bfloat16"): (15, 58), ("gfx1201", 64, "bfloat16"): (16, 48)}

@pytest.mark.parametrize("spec", [sampled(*x, mask) for x in TARGETS for mask in MASKS])
def test_targets(spec:Spec) -> None:
  valu, useful = TARGETS[spec.arch, spec.d, spec.dtype]
  loops = [r.loop for r, _ in both(spec)]
  assert sum(x.valu_per_score or 0 for x in loops if x is not None) <= valu
  assert all(x is not None and x.useful is not None and 100*x.useful >= useful for x in loops)
