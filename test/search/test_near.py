"""Tests of the search near the tile in use, which ranks tiles by the predicted time of a problem."""
from __future__ import annotations
import math
from dataclasses import replace
from typing import Any
import pytest
from click.testing import CliRunner
from attn import tune
from attn.chips import get_chip
from attn.chips.shapes import BackwardShape, UpTo
from attn.isa.source import Spec
from attn.isa.timing.kernels import ASKED, of_spec
from attn.isa.timing.predict import Prediction
from attn.search.near import NUMBERS_CHANGED, Timed, climb, gain_of, near_rows, near_table, row_in_use, tile_of, timed, usable

SPEC = Spec("gfx942", 128, "bfloat16", "causal", "dq")
BYTES = {"L2": 2e9, "memory": 1e9}

def of_shape(ms:Any) -> Any:
  """Returns a stand-in for `timed`, which predicts the time of a tile. `ms(spec, shape)` gives the time of a tile shape in a variant of the kernel,
  or None if the kernel spills."""
  def time(spec:Spec, row:UpTo[Any]) -> Timed|None:
    if (found := ms(spec, row.shape)) is None: return None
    prediction = Prediction(get_chip(spec.arch).cards[0], 1.0, 1.0, found/1e3, BYTES, {}, 1.0)
    return Timed(row, tile_of(spec, row), prediction, 1000)
  return time

def test_the_row_in_use_gives_the_tile_in_use() -> None:
  for spec in (SPEC, replace(SPEC, kernel="dkdv"), replace(SPEC, kernel="forward", d=256), replace(SPEC, arch="gfx1201")):
    row = row_in_use(spec)
    assert tile_of(spec, row).matrix == get_chip(spec.arch).matrix["bfloat16"][row.matrix] and usable(spec, row)
  assert row_in_use(SPEC).shape == next(x for x in get_chip("gfx942").unit.plain_dq if x.up_to == 128).shape

def test_near_tiles_differ_in_one_number_and_fit() -> None:
  row = row_in_use(SPEC)
  found = list(near_rows(SPEC, row))
  assert found and all(usable(SPEC, x) for x in found)
  for x in found: assert sum(getattr(x.shape, n) != getattr(row.shape, n) for n in NUMBERS_CHANGED["dq"]) == 1
  assert {x.shape.passes for x in found} == {1}, "a kernel of dq makes one pass"
  assert not usable(SPEC, replace(row, shape=replace(row.shape, block_n=16))), "32 rows of the matrix instruction"
  assert not usable(SPEC, replace(row, shape=replace(row.shape, block_n=64, prefetch=2))), "more LDS than a workgroup has"

def test_the_search_goes_on_from_the_fastest_tile() -> None:
  """The search needs two steps to the fastest tile: other fences, and then no prefetch. Tiles that spill are left out."""
  def ms(spec:Spec, x:BackwardShape) -> float|None:
    if x.sparing: return None
    return 10 - 2*(x.fenced == 8) - 3*(x.fenced == 8 and x.prefetch == 0) + (x.waves != 4) + (x.prefetch == 0)
  found = climb(SPEC, of_shape(ms))
  assert (found[0].row.shape.fenced, found[0].row.shape.prefetch, found[0].ms) == (8, 0, pytest.approx(6))
  assert not any(x.row.shape.sparing for x in found)
  small = climb(SPEC, of_shape(lambda spec, x: 10 - 0.005*(x.fenced == 8) - 5*(x.fenced == 8 and x.prefetch == 0)))
  assert small[0].ms == pytest.approx(9.995), "no search from a tile that is faster by less than 1%"

def test_the_gain_is_that_of_the_worst_variant() -> None:
  row = replace(row_in_use(SPEC), shape=replace(row_in_use(SPEC).shape, fenced=8))
  def ms(spec:Spec, x:BackwardShape) -> float: return 10 - (x.fenced == 8)*(0.2 if (spec.dtype, spec.mask) == ("float16", "full") else 2)
  assert gain_of(SPEC, row, of_shape(ms)) == pytest.approx(0.02)
  assert gain_of(SPEC, row, of_shape(lambda spec, x: None if x.fenced == 8 and spec.mask == "full" else 1.0)) == -math.inf

def test_the_table_has_the_tile_in_use_and_the_best() -> None:
  before, after = near_table(SPEC, of_shape(lambda spec, x: 10 - (x.fenced == 8)))
  assert before[:4] == ("gfx942", "128", "dq", "in the table") and after[3] == "best predicted"
  assert before[5:] == ("10.000", "2.00", "2.00", "", "1.00", "") and after[-1] == "10.0%"
  assert [x[3] for x in near_table(SPEC, of_shape(lambda spec, x: 10 - 0.01*(x.fenced == 8)))] == ["in the table, the best"]

def test_a_tile_is_timed_as_its_kernel_is() -> None:
  """The predicted time of the tile in use is the same as that of `python -m attn.isa time`, at the sustained clock. A workgroup reads and writes as
  many bytes as its rows take: rows of K and V for half of the keys on average, and its own rows."""
  spec = replace(SPEC, d=64)
  found, kernel = timed(spec, row_in_use(spec)), of_spec(spec, ASKED, lines=False)
  assert found is not None and found.ms == pytest.approx(1e3*kernel.on_cards("MI300X")[-1].seconds)
  rows = 8192//found.tile.block_m
  keys = sum(found.tile.block_m*(i + 1) for i in range(rows))/rows
  assert found.workgroups == 64*rows and found.read == pytest.approx((keys + found.tile.block_m)*2*64*2)

def test_options_that_do_not_belong_together() -> None:
  for option in ("--write", "--check", "--all"): assert "--near prints a table" in CliRunner().invoke(tune.main, ["--near", option]).output
