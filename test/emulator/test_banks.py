"""Tests of LDS bank conflicts in attn's kernels, which the emulator counts."""
from __future__ import annotations
from dataclasses import replace
import pytest
from attn.chips import get_chip
from attn.chips.shapes import ForwardShape, UpTo
from attn.choose.tiles import amd_tile, dual_wave_tile
from attn.emulator import last_run
from attn.emulator.banks import phases
from attn.kernels.amd.staging import key_rows
from attn.kernels.dual_wave import dual_wave
from attn.kernels.tiles.amd import both_ways_layout, v_columns
from cases import ARCHS, check_kernel, check_kernels, normal, problem, run

def conflicts() -> dict[tuple[str, str], float]:
  # returns, for each (buffer, "read" or "write") of the last kernel, its LDS cycles divided by the cycles without conflicts
  launch = last_run()
  assert launch is not None and launch.bank_conflicts
  return {(use.buffer, use.verb): use.cycles/use.phases for use in launch.bank_conflicts}

@pytest.mark.sample(4)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("D", (64, 128))
def test_forward(monkeypatch, arch:str, D:int) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=128, Sk=128, D=D)
  run(p, normal(p), arch)
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_n", (16, 32, 64, 128))
def test_tiles(monkeypatch, arch:str, block_n:int) -> None:
  # Tiles of V^T with rows of any length cause no bank conflicts, with one LDS buffer or two.
  if block_n < get_chip(arch).matrix["float16"][0].M: pytest.skip("too few keys for a tile of the matrix instruction")
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  check_kernels(arch, tile=lambda t: replace(t, block_n=block_n, waves=4, prefetch=1 if block_n > 64 else 2), H=1, Sq=128, Sk=300, D=64)
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

def test_dual_wave(monkeypatch) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p, chip = problem(H=1, Sq=256, Sk=256, D=128), get_chip("gfx950")
  check_kernel(dual_wave(p, chip, dual_wave_tile(p, chip)), p, normal(p), "gfx950")
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

@pytest.mark.sample(5)
@pytest.mark.parametrize(("arch", "row"), [(arch, row) for arch in ARCHS for row in get_chip(arch).unit.forward], ids=str)
def test_table(monkeypatch, arch:str, row:UpTo[ForwardShape]) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=256, Sk=128, D=row.up_to)
  check_kernels(arch, tile=lambda _: amd_tile(p, get_chip(arch), row), H=1, Sq=256, Sk=128, D=row.up_to)
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("width", (64, 72, 128, 256))
@pytest.mark.parametrize("block_n", (16, 32, 64))
def test_rows_that_lie_both_ways(arch:str, width:int, block_n:int) -> None:
  # Tiles that backward kernels store to LDS twice, transposed and not transposed, cause no bank conflicts in stores or reads. The test computes which
  # elements each lane accesses. A table of the emulator says which lanes access LDS at the same time.
  chip = get_chip(arch)
  mat, threads = chip.matrix["float16"][0], 4*chip.wave
  if block_n < mat.M: pytest.skip("too few keys for a tile of the matrix instruction")
  layout, units = both_ways_layout(mat, block_n, width), max(width//mat.unit, 1)
  def conflict_free(places:list[int|None], read:bool) -> bool:
    banks, groups = phases(chip.family, chip.wave, read, 16)
    found = [[places[lane] for lane in group if places[lane] is not None] for group in groups]
    return all(len({x % (banks//4) for x in some}) == len(set(some)) for some in found)
  fast, groups = v_columns(block_n), block_n//4
  def item(thread:int) -> tuple[int, int]:
    # returns what a thread copies: the number of a group of four rows, and a 16-byte unit of these rows
    # as `Staging.item` computes it: up to 8 neighbouring threads copy the same unit of different groups; the next threads copy the next unit of
    # these groups
    near = min(groups, 8)
    group, unit = thread % near + thread//near//units*near, thread//near % units
    return group, unit//(2*fast)*(2*fast) + unit % fast*2 + unit % (2*fast)//fast
  for first in range(0, threads if units % (2*fast) == 0 else 0, chip.wave):
    items = [item(thread) if thread < groups*units else None for thread in range(first, first + chip.wave)]
    for i in range(4):
      rows = [key_rows(mat, x[0])[i] if x is not None else None for x in items]
      stored = [layout.begin(row) + x[1] if x is not None and row is not None else None for row, x in zip(rows, items)]
      assert conflict_free(stored, False), (first, i)
  for row in range(0, block_n, mat.M):
    lanes = range(chip.wave)
    assert conflict_free([layout.begin(row + lane % mat.N) + (0 if mat.duplicated else lane//mat.N) for lane in lanes], True)
  assert layout.size > layout.begin(block_n - 1) + layout.units - 1

def test_the_kernels_know_how_many_banks_there_are() -> None:
  for arch in ARCHS:
    chip = get_chip(arch)
    for mat in (mat for rows in chip.matrix.values() for mat in rows): assert phases(chip.family, chip.wave, True, 16)[0] == mat.banks, mat
