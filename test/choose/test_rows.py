"""Tests of the choice of a row from a table of tiles: each condition of a row by itself, the order of rows, and the error if no row fits the problem.
"""
from __future__ import annotations
from dataclasses import fields, replace
from typing import Any
import numpy as np
import pytest
from attn.chips import Chip, get_chip
from attn.chips.matrix import MMA
from attn.chips.shapes import AT_MOST_ONE, BackwardShape, Burden, ForwardShape, MmaShape, UpTo
from attn.choose.backward_tiles import amd_backward_tile, backward_tile
from attn.choose.rows import burden, fitting, misfit, plain_rows
from attn.choose.tiles import amd_tile, choose_amd_tile
from attn.kernels.tiles.mma import MmaTile
from attn.problem import Problem
from cases import problem

SM_80, ROW = get_chip("sm_80"), UpTo(128, MmaShape(1, 64))
SIZES: dict[str, Any] = dict(H=2, Sq=150, Sk=500, D=96, Dv=64, softcap=20.0, lse=False)      # 6 workgroups

def tile_of(row:UpTo[MmaShape]) -> MmaTile: return MmaTile(**vars(row.shape), waves=4, matrix=MMA["float16"])
def why_not(p:Problem, row:UpTo[MmaShape]) -> str|None: return misfit(p, SM_80, row, tile_of(row), burden(p))

# (a condition that does not hold, the reason in the message, changes of the problem with which the condition holds)
CONDITIONS: list[tuple[dict[str, Any], str, dict[str, Any]|None]] = [
  (dict(up_to=64), "is for D and Dv up to 64", dict(D=64)),
  (dict(burden=Burden.MASK), "would need too many registers", dict(softcap=0.0)),
  (dict(spills_on=("sm_80",)), "would need too many registers on sm_80", None),
  (dict(beyond=150), "is for more than 150 rows, there are 150", dict(Hkv=1)),
  (dict(fills=9), "makes 6 workgroups, 9 are wanted", dict(B=2)),
  (dict(pages=64), "is for keys in pages of at most 64 rows", None),
  (dict(large=True), "makes 6 workgroups, 108 are wanted", dict(B=18)),
  (dict(at_once=4), "bytes of LDS for 4 workgroups, sm_80 has 166912", dict(D=16, Dv=16)),
  (dict(shape=MmaShape(1, 256)), "bytes of LDS, sm_80 has 166912", dict(D=16, Dv=16))]

@pytest.mark.parametrize("condition, said, holds", CONDITIONS, ids=str)
def test_each_condition(condition:dict[str, Any], said:str, holds:dict[str, Any]|None) -> None:
  assert why_not(problem(**SIZES), ROW) is None
  assert said in str(why_not(problem(**SIZES), row := replace(ROW, **condition)))
  if holds is not None: assert why_not(problem(**{**SIZES, **holds}), row) is None

@pytest.mark.parametrize("sizes, said", [(dict(D=60), "needs D and Dv to be multiples of 8"), (dict(Sq=40), "only with 4 waves"), ({}, "None")])
def test_whole_rows_of_whole_workgroups(sizes:dict[str, Any], said:str) -> None:
  p, chip, row = problem(**{**dict(Sq=150, D=64), **sizes}), get_chip("gfx1100"), UpTo(64, BackwardShape(4, 16), whole=True)
  assert said in str(misfit(p, chip, row, backward_tile(p, chip, row, False)))
  row = replace(row, whole=False)
  assert misfit(p, chip, row, backward_tile(p, chip, row, False)) is None

def test_every_condition_of_a_row_is_tested() -> None:
  # This file tests every condition that a row of a table of tiles may have, except the compiler's release, which test_tune.py tests.
  tested = {name for condition, _, _ in CONDITIONS for name in condition} | {"whole", "matrix", "llvm", "options"}
  assert {f.name for f in fields(UpTo)} == tested

SOFTCAP, BIAS = {"softcap": 20.0}, {"extras": {"bias": np.empty((1, 1, 4096, 4096), np.float32)}}
SINKS = {"extras": {"sinks": np.empty(16, np.float32)}}
@pytest.mark.parametrize("given, llvm, numbers", [
  ({}, 22, (32, 2)), (SOFTCAP, 22, (64, 8)), (BIAS, 22, (64, 0)),
  (SOFTCAP, 21, (32, 0)), (SOFTCAP | BIAS, 22, (32, 0)), (SINKS, 22, (32, 0)),
  (SOFTCAP | {"B": 1, "H": 2}, 22, (32, 0)), (SOFTCAP | {"D": 100}, 22, (32, 0))])
def test_a_row_for_problems_with_one_option(given:dict[str, Any], llvm:int, numbers:tuple[int, int]) -> None:
  # A problem with one option takes the table row for this option, and a problem without options the row for none. Both need a compiler of LLVM 22, a
  # grid that fills the chip, and rows of whole 16-byte units. Other problems, such as those with two options, take the rows for every problem.
  p = problem(**{"B": 4, "H": 16, "Sq": 4096, "Sk": 4096, "D": 128, **given})
  tile = amd_backward_tile(p, replace(get_chip("gfx942"), llvm=llvm), False)
  assert (tile.block_n, tile.fenced) == numbers

DROPOUT: dict[str, Any] = {"dropout_p": 0.1, "extras": {"dropout_seed": np.empty(2, np.uint32)}}
@pytest.mark.parametrize("given, llvm, keys", [
  (DROPOUT, 22, 64), (DROPOUT, 21, 32), ({}, 22, 32), (DROPOUT | SOFTCAP, 22, 32), (DROPOUT | {"B": 1, "H": 2}, 22, 32),
  (DROPOUT | {"D": 100}, 22, 32), (DROPOUT | {"D": 64}, 22, 32), (DROPOUT | {"B": 64, "Sq": 40}, 22, 32), (DROPOUT | {"B": 64, "Sq": 100}, 22, 64)])
def test_a_row_of_forward_for_problems_with_one_option(given:dict[str, Any], llvm:int, keys:int) -> None:
  # The forward kernel takes a table row for one option under the same conditions as a backward kernel. The queries of a head must fill the waves of
  # a workgroup: 40 queries fill two of four waves, 100 queries fill all four.
  sizes = {"B": 4, "H": 16, "Sq": 4096, "Sk": 4096, "D": 128, **given}
  assert choose_amd_tile(problem(**sizes), replace(with_rows("dropout_p"), llvm=llvm)).block_n == keys

@pytest.mark.parametrize("given, names", [
  ({}, [""]), ({"causal": True}, [""]), ({"window": (-1, 5)}, [""]),
  ({"window": (5, -1)}, ["window"]), ({"causal": True, "window": (5, 0)}, ["window"]), (SOFTCAP | {"window": (5, 5)}, ["softcap"])])
def test_a_row_for_windows(given:dict[str, Any], names:list[str]) -> None:
  # A window that hides a query's first keys counts as an option if the problem has no other option.
  p, shape = problem(B=4, H=16, Sq=4096, Sk=4096, D=128, **given), ForwardShape(4, 1, 64, fenced=True)
  chip = with_rows("")
  rows = [UpTo(128, shape, options=(name,)) for name in AT_MOST_ONE]
  assert [row.options for row in plain_rows(p, replace(chip, llvm=22), rows, lambda row: amd_tile(p, chip, row))] == [tuple(names)]

def with_rows(option:str) -> Chip:
  # Returns gfx950 with one tile in each table of forward.
  # The tile has 64 keys for plain problems with this option, 32 keys for every other problem, and 128 keys for 8-bit floats.
  rows = tuple(UpTo(256, ForwardShape(4, 1, keys)) for keys in (32, 128))
  row = UpTo(128, ForwardShape(4, 1, 64, fenced=True), options=(option,))
  return replace(get_chip("gfx950"), unit=replace(get_chip("gfx950").unit, forward=rows[:1], forward_of_bytes=rows[1:], plain_forward=(row,)))

def test_a_row_for_plain_problems_is_not_for_8_bits() -> None:
  sizes = dict(B=4, H=16, Sq=4096, Sk=4096, D=128)
  assert choose_amd_tile(problem(**sizes), with_rows("")).block_n == 64
  assert choose_amd_tile(problem(**sizes, dtype="fp8e4m3", out_dtype="bfloat16"), with_rows("")).block_n == 128

def test_the_first_that_fits_is_taken() -> None:
  p, rows = problem(**SIZES), [replace(ROW, up_to=64), replace(ROW, shape=MmaShape(1, 32)), ROW]
  assert [tile.block_n for tile in fitting("this", p, SM_80, rows, tile_of)] == [32, 64]
  with pytest.raises(NotImplementedError, match=r"no tile of this fits D=96, Dv=64 on sm_80 \(A100, A30\): tile .* up to 64; tile .* up to 32$"):
    next(fitting("this", p, SM_80, [rows[0], replace(ROW, up_to=32)], tile_of))
