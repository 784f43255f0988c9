"""Tests of the backward kernels on every matrix unit: each element of the gradients agrees with float64 within its error limit (docs/contract.md)."""
from __future__ import annotations
import itertools, re, shutil, subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
import numpy as np
import pytest
from attn.accuracy import judge
from attn.chips import get_chip
from attn.chips.matrix import MMA
from attn.chips.shapes import BackwardShape, UpTo
from attn.choose.backward import all_of, at_once, can_differentiate, choose_bias_tile, choose_parts, dbias_of, dkdv_of, dq_of, few_of, tiles_of
from attn.choose.backward_tiles import amd_backward_tile, backward_tile, short_of_registers
from attn.choose.rows import misfit
from attn.choose.splits import places_of
from attn.choose.tile_lists import listing, with_lists
from attn.emulator import plan
from attn.emulator.checks import Deadlock, EmulatorError, LdsRace, NotWaitedFor, OutOfBounds, UninitialisedRead, UnwrittenOutput
from attn.emulator.machine import Frame
from attn.emulator.plan import Plan
from attn.functions.trace import functions_of
from attn.kernels.amd.backward import AmdBackward, AmdTrip
from attn.kernels.mma.backward import MmaTrip
from attn.kernels.nvidia import gradient_sums
from attn.kernels.nvidia.warp_gradients import WarpRows, WarpTrip
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.backward.bias_share import BiasPart
from attn.kernels.parts.backward.gradients import Normaliser, QueryValues
from attn.kernels.parts.backward.turns import Turns
from attn.kernels.parts.grid.tensors import Shapes, all_arguments, dbias_arguments, dkdv_arguments, dq_arguments, few_arguments
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.wgmma import WgmmaBackwardTile, WgmmaFewQueriesTile
from attn.kernels.wgmma import backward as wgmma_backward, gradients_of_few
from attn.kernels.wgmma.backward import WgmmaBackward, WgmmaTrip
from attn.kernels.wgmma.gradients_of_few import WgmmaFewQueries, WgmmaFewQueriesTrip
from attn.ops import common as ops, hopper, nvidia
from attn.ops.renderers import render
from attn.problem import Count, Problem
from attn.reference import rounded, visible
from attn.tinygrad_compat import AxisType, Ops, UOp, dtypes
from attn.values import FLOATS, INTS, LOG2E
from backward_cases import check_backward_kernels, expected_gradients, loss_of, run_backward
from cases import (ARCHS, EVERY_ARCH, GPU, ONE_OPTION, Inputs, amd_in_turn, chip, chips_in_turn, count_products, floats, in_turn, ints, normal,
                   problem)
from test_forward import constants, huge_key

SMALL: dict[str, Any] = dict(H=1, Sq=40, Sk=65, D=16)

CASES: dict[str, dict[str, Any]] = {
  "full": dict(Sq=77, Sk=133, dtype="bfloat16"),
  "causal": dict(Sq=133, Sk=133, causal=True),
  "more keys, causal": dict(Sq=40, Sk=150, causal=True, dtype="bfloat16", dlse=True),
  "rows that see nothing": dict(Sq=150, Sk=40, causal=True),
  "top-left, bshd": dict(B=2, Sq=90, Sk=60, causal="top-left", layout="bshd"),
  "window, grouped heads": dict(H=6, Hkv=2, Sq=70, Sk=100, window=(20, 7), layout="nsd"),
  "D above Dv, fp16 out": dict(D=21, Dv=5, Sq=20, Sk=18, dtype="bfloat16", out_dtype="float16"),
  "one query": dict(Sq=1, Sk=70, D=1, Dv=24),
  "kv_lengths": dict(B=3, H=2, Hkv=1, Sk=70, causal=True, softcap=100.0, dtype="bfloat16", extras=dict(kv_lengths=ints(40, 0, 70))),
  "packed": dict(layout="thd", H=2, Hkv=1, Sq=70, Sk=90, causal=True, dlse=True,
                 extras=dict(cu_seqlens_q=ints(3, 20, 20, 60), cu_seqlens_k=ints(2, 30, 41, 80))),
  "packed, without keys": dict(layout="thd", H=1, Sq=60, Sk=70, window=(9, 4),
                               extras=dict(cu_seqlens_q=ints(0, 40, 60), cu_seqlens_k=ints(0, 70, 70))),
  "softcap": dict(softcap=3.0, causal=True),
  "alibi": dict(H=4, Hkv=2, causal=True, extras=dict(alibi_slopes=floats(4)**2)),
  "bias": dict(H=2, Hkv=1, Sk=64, softcap=4.0, dtype="bfloat16", bias_dtype="float16", extras=dict(bias=floats(1, 2, 40, 64))),
  "bias of a query": dict(B=2, H=2, causal=True, bias_dtype="bfloat16", extras=dict(bias=floats(2, 1, 40, 1), sinks=floats(2))),
  "scale, fp32 out": dict(softmax_scale=0.37, out_dtype="float32", size=1000.0),
}

BY_MMA = ("window, grouped heads", "D above Dv, fp16 out", "packed", "softcap", "bias of a query", "scale, fp32 out")
@pytest.mark.sample(5)
@chips_in_turn("case", CASES, BY_MMA)
def test_gradients(arch:str, case:str) -> None: check_backward_kernels(arch, **{**SMALL, **CASES[case]})

@pytest.mark.sample(2)
@pytest.mark.parametrize("arch", ("gfx942", "gfx1100", "sm_86", *(pytest.param(arch, marks=pytest.mark.thorough) for arch in ("gfx950", "gfx1201"))))
def test_long_rows(arch:str) -> None: check_backward_kernels(arch, H=1, Sq=20, Sk=40, D=128, causal=True)

@pytest.mark.thorough
@pytest.mark.parametrize("d", (64, 80, 192, 256))
@pytest.mark.parametrize("arch", (*EVERY_ARCH, "sm_86", "sm_90"))
def test_every_width(arch:str, d:int) -> None: check_backward_kernels(arch, H=1, Sq=70, Sk=90, D=d, causal=True, dtype="bfloat16")

def test_a_bias_of_float32_beside_wide_rows() -> None:
  # The mma.sync kernel of dK and dV is right at D=256 with a float32 bias. Its tiles have 16 queries with three numbers each (lse, the rounding error
  # of lse, and delta), which fill one and a half lines of shared memory. In an earlier version the next tile began inside a line, and the kernel read
  # wrong rows.
  check_backward_kernels("sm_80", H=1, Sq=40, Sk=20, D=256, extras=dict(bias=floats(1, 1, 40, 20)), only="dkdv")

@pytest.mark.parametrize("make", (dq_of, dkdv_of, dbias_of))
def test_a_variable_number_of_keys_is_refused(make:Callable[..., Any]) -> None:
  p = problem(Sk=64, sk_variable=Count((("n", 1, 64),)), extras=dict(bias=floats(1, 1, 1, 64)))
  chip = get_chip("gfx942")
  with pytest.raises(NotImplementedError, match=r"sk_variable=Count\(.*\): the backward kernels take no Variable"):
    make(p, chip, amd_backward_tile(p, chip, False))
  assert "sk_variable" in str(can_differentiate(p, chip))

# ***** inputs that break a wrong P or delta *****

def peaked(p:Problem) -> Inputs:
  x = normal(p)
  return Inputs(rounded(x.q*8, p.dtype), rounded(x.k*4, p.dtype), x.v)

def deep(p:Problem) -> Inputs:
  # inputs with such low scores that every lse is below -100
  x = normal(p)
  return Inputs(np.full_like(x.q, 4), rounded(x.k*0.125 - 12, p.dtype), x.v)

def level(p:Problem) -> Inputs:
  # inputs in which all elements of V are near 3. dP and delta then nearly cancel in dS = P*(dP - delta)
  x = normal(p)
  return Inputs(x.q, x.k, rounded(3 + 0.1*x.v, p.dtype))

ADVERSARIAL = (peaked, deep, huge_key, constants, level)

@pytest.mark.sample(3)
@chips_in_turn("make", ADVERSARIAL, (deep, level))
def test_adversarial(arch:str, make:Callable[[Problem], Inputs]) -> None:
  # Gradients are within their error limits on hard inputs, on which a wrong P or delta gives a large error. If dO is float32, the kernels round dO
  # for its matrix products, and must compute delta from the rounded dO.
  wide = dict(size=1000.0, out_dtype="float32") if make is level else {}
  check_backward_kernels(arch, make, H=1, Sq=70, Sk=90, D=32, causal=make in (peaked, level), **wide)

@pytest.mark.parametrize("arch", ("gfx942", "sm_80"))
def test_keys_beyond_kv_lengths_get_exactly_0(arch:str) -> None:
  # Keys beyond kv_lengths get a gradient of exactly 0. Without a mask their P would be exp(0 - lse), which overflows on these inputs.
  check_backward_kernels(arch, deep, B=2, H=1, Sq=20, Sk=40, D=16, dtype="bfloat16", extras=dict(kv_lengths=ints(20, 0)), only="dkdv")

# ***** NaN *****

class Reach(NamedTuple):
  # place of a NaN (a row of a tensor), and the gradient in which the NaN also reaches rows that do not see it
  # In the gradient `gradient` it reaches other rows whose workgroup reads the tile with the NaN: they multiply it by a weight of 0, and 0 times NaN
  # is NaN.
  tensor: str
  row: int
  gradient: str

REACHES = (Reach("q", 70, "dk"), Reach("k", 70, "dq"), Reach("do", 70, "dv"), Reach("v", 70, ""))

def same_tiles(p:Problem, tile:Any, row:int, of_queries:bool) -> np.ndarray:
  # which rows of a gradient have a workgroup that reads the tile with row number `row`
  # With `of_queries` the workgroups own queries, and `row` is a key; otherwise they own keys, and `row` is a query. A workgroup reads a tile if a
  # pair of one of its own rows and a row of the tile is visible.
  seen = visible(p.Sq, p.Sk, p.window, p.offset)
  if not of_queries: seen = seen.T                  # (own, walked)
  first = row//tile.block_n*tile.block_n
  meets = seen[:, first:first + tile.block_n].any(1)
  return np.array([meets[i//tile.block_m*tile.block_m:][:tile.block_m].any() for i in range(len(meets))])

@pytest.mark.sample(6)
@in_turn("nan, arch", REACHES, (*EVERY_ARCH, "sm_90"), among=2)
def test_nan_stays_where_it_belongs(nan:Reach, arch:str) -> None:
  # A NaN in an input reaches exactly the rows of the gradients that it reaches in attn/reference.py, where a query adds nothing for a hidden key. In
  # one gradient the NaN also reaches other rows of the tile, because 0 times NaN is NaN (docs/attention.md).
  p = problem(H=1, Sq=200, D=16, causal=True)
  x, loss = normal(p), loss_of(p)
  (loss.do if nan.tensor == "do" else getattr(x, nan.tensor))[..., nan.row, 3] = np.nan
  got, want = run_backward(p, x, loss, arch, {}), expected_gradients(p, x, loss, {})
  tiles = dict(zip(("dq", "dk", "dv"), (*(chosen := tiles_of(p, get_chip(arch))), chosen[1])))
  assert any(np.isnan(law.exact).any() for law in want.values())
  for name, law in want.items():
    out = got[name]
    if name == nan.gradient:
      beyond = np.isnan(out) & ~np.isnan(law.exact)
      assert not beyond[:, :, ~same_tiles(p, tiles[name], nan.row, name == "dq")].any(), f"{name}: the NaN reaches another tile"
      out = np.where(beyond, law.exact, out)
    assert (verdict := judge(out, law)).ok, f"{name}: {verdict}"

def test_nan_of_a_query_reaches_no_bias_that_it_does_not_see() -> None:
  p = problem(H=1, Sq=70, D=16, causal=True, extras=(extras := dict(bias=floats(1, 1, 70, 70))))
  x, loss = normal(p), loss_of(p)
  x.q[..., 40, 3] = np.nan
  for arch in ("gfx1201", "sm_80"):
    out = run_backward(p, x, loss, arch, extras, only="dbias")["dbias"]
    assert np.isnan(out[0, 0, 40, :41]).all() and np.isnan(out).sum() == 41

# ***** tiles *****

@amd_in_turn("prefetch", (0, 2))
def test_prefetch(arch:str, prefetch:int) -> None:
  check_backward_kernels(arch, H=2, Hkv=1, Sq=100, Sk=120, D=16, window=(40, 20), tiles=lambda t: replace(t, prefetch=prefetch))

@amd_in_turn("dv", (48,))
def test_two_passes(arch:str, dv:int) -> None:
  check_backward_kernels(arch, H=2, Hkv=1, Sq=70, Sk=65, D=32, Dv=dv, causal=True, only="dkdv", tiles=lambda t: replace(t, passes=1 + t.keys))

MMA_TILES: dict[str, dict[str, int]] = {"three stages": dict(stages=3, block_n=16, part_n=16), "two passes": dict(passes=2, block_n=16, part_n=16),
                                        "parts": dict(row_tiles=2, block_n=48, part_n=16)}
@pytest.mark.sample(2)
@pytest.mark.parametrize("fields", MMA_TILES)
def test_tiles_of_mma(fields:str) -> None:
  check_backward_kernels("sm_80", H=2, Hkv=1, Sq=100, Sk=70, D=16, Dv=24, window=(40, 20), tiles=lambda t: replace(t, **MMA_TILES[fields]))

@amd_in_turn("in_lds", ((True, True),))
def test_own_rows_in_lds(arch:str, in_lds:tuple[bool, bool]) -> None:
  check_backward_kernels(arch, H=1, Sq=40, Sk=65, D=48, tiles=lambda t: replace(t, own_in_lds=in_lds, fenced=2))

ROWS_OF_PLAIN = [(arch, c, keys, option) for arch in ("gfx90a", *ARCHS) for keys in (False, True)
                 for c in (get_chip(arch).unit.plain_dkdv if keys else get_chip(arch).unit.plain_dq) for option in c.options]

@amd_in_turn("read_ahead", (3,))
def test_tiles_of_few_registers(arch:str, read_ahead:int) -> None:
  # Tiles with all options that save registers give right gradients. The rows that a workgroup owns stay in LDS, and other rows are loaded 16 bytes at
  # a time. After each two 16-byte units of a row, a compiler fence keeps reads from LDS near the products that use them. With `read_ahead` = n, the
  # operands of n matrix tiles are read before the fence.
  few = dict(own_in_lds=(True, True), fenced=2, prefetch=0, sparing=True, by_item=True, read_ahead=read_ahead)
  check_backward_kernels(arch, H=1, Sq=40, Sk=65, D=53, Dv=46, causal=True, tiles=lambda t: replace(t, **few))

ONE_OPTION_BY_DEFAULT = {("gfx1201", 64, ""), ("gfx942", 128, "bias"), ("gfx950", 128, "softcap")}
def in_turn(arch:str, row:UpTo[BackwardShape], option:str) -> Any:
  return () if (arch, row.up_to, option) in ONE_OPTION_BY_DEFAULT else pytest.mark.thorough

@pytest.mark.parametrize("arch, row, keys, option", [
  pytest.param(arch, row, keys, option, marks=in_turn(arch, row, option), id=f"{arch}-{row.up_to}-{'dkdv' if keys else 'dq'}-{option or 'no option'}")
  for arch, row, keys, option in ROWS_OF_PLAIN])
def test_tiles_for_problems_with_at_most_one_option(arch:str, row:UpTo[BackwardShape], keys:bool, option:str) -> None:
  # Each tile in the tables for problems with at most one option gives right gradients, also with a last tile that is not full. For grids that are
  # small enough to emulate, dispatch itself would choose other tiles. The dtype is bf16, because the matrix instructions of CDNA2 take a float16 P
  # below 6.1e-5 as 0.
  p, chip = problem(D=row.up_to, Sq=300, Sk=300, dtype="bfloat16"), get_chip(arch)
  tile = backward_tile(p, chip, row, keys)
  check_backward_kernels(arch, H=1, Sq=150, Sk=200, D=row.up_to, causal=True, dtype="bfloat16", tiles=lambda t: tile if t.keys == keys else t,
                         only="dkdv" if keys else "dq", **ONE_OPTION[option])

def test_part_of_an_operand_is_refused() -> None:
  # Dispatch refuses a tile with fenced=1 on RDNA3. Such a tile puts a compiler fence after every 16-byte unit of a row, but an operand of RDNA3's
  # matrix instruction consists of two units. So no operand would be complete between two fences, and the kernel would compute no product.
  p, chip = problem(D=64), get_chip("gfx1100")
  one, two = (UpTo(64, BackwardShape(4, 16, fenced=n)) for n in (1, 2))
  assert "fenced=1 is less than the number of units in one operand" in str(misfit(p, chip, one, backward_tile(p, chip, one, False)))
  assert misfit(p, chip, two, backward_tile(p, chip, two, False)) is None

PARTS: dict[str, dict[str, Any]] = {
  "one head of keys for six": dict(H=6, Hkv=1, Sk=90, parts=12), "more parts than tiles": dict(B=2, causal=True, Sk=40, parts=5),
  "a window": dict(H=4, Hkv=2, Sq=90, Sk=70, window=(20, 7), D=24, Dv=8, layout="bshd", dlse=True, parts=2),
  "packed": {**CASES["packed"], "parts": 3}, "one part": dict(parts=1)}

@pytest.mark.sample(2)
@chips_in_turn("case", PARTS, ("one head of keys for six",))
def test_parts(arch:str, case:str) -> None: check_backward_kernels(arch, **{**SMALL, **PARTS[case]})

# ***** wgmma *****

LONG: dict[str, Any] = dict(H=1, Sq=100, Sk=133, D=16)      # a warpgroup has 64 rows

BY_WGMMA: dict[str, dict[str, Any]] = {
  "full": dict(dtype="bfloat16", dlse=True), "causal": dict(Sq=200, Sk=200, causal=True),
  "more queries, causal": dict(Sq=230, Sk=70, causal=True), "top-left, bshd": dict(B=2, causal="top-left", layout="bshd", dtype="bfloat16"),
  "window, grouped heads": dict(H=6, Hkv=2, Sq=150, window=(40, 20), layout="nsd"),
  "D above Dv": dict(D=24, Dv=8, H=2, Hkv=1), "softcap, kv_lengths": dict(B=3, H=2, Hkv=1, softcap=100.0, extras=dict(kv_lengths=ints(40, 0, 133))),
  "packed": dict(layout="thd", H=2, Hkv=1, Sq=130, Sk=190, causal=True, dlse=True,
                 extras=dict(cu_seqlens_q=ints(3, 20, 20, 110), cu_seqlens_k=ints(2, 30, 41, 180))),
  "alibi": dict(H=4, Hkv=2, causal=True, extras=dict(alibi_slopes=floats(4)**2)), "sinks": dict(H=2, extras=dict(sinks=floats(2))),
  "bias": dict(H=2, Hkv=1, softcap=4.0, extras=dict(bias=floats(1, 2, 100, 133))),
  "in parts": dict(H=6, Hkv=2, causal=True, parts=6),
  "long rows": dict(D=128, causal=True, dtype="bfloat16"), "two passes": dict(H=2, Hkv=1, D=136, Dv=40, window=(50, 9)),
  "few queries": dict(Sq=64, Sk=300, D=128, causal=True, parts=2),
}

RARE = ("two passes", "few queries", "sinks", "more queries, causal", "long rows")     # other cases cover these sizes
@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ("sm_90", GPU))
@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.thorough) if x in RARE else x for x in BY_WGMMA])
def test_wgmma(arch:str, case:str) -> None: check_backward_kernels(arch, **{**LONG, **BY_WGMMA[case]})

@pytest.mark.parametrize("make", ADVERSARIAL)
def test_wgmma_adversarial(make:Callable[[Problem], Inputs]) -> None:
  check_backward_kernels("sm_90", make, H=1, Sq=70, Sk=90, D=32, causal=make in (peaked, level), size=1000.0 if make is level else 1.0)

@pytest.mark.parametrize("groups, block_n, passes", ((3, 32, 2), *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((3, 16, 1), (1, 128, 1)))))
def test_tiles_of_wgmma(groups:int, block_n:int, passes:int) -> None:
  check_backward_kernels("sm_90", H=2, Hkv=1, Sq=110, Sk=130, D=16, window=(90, 30),
                         tiles=lambda t: replace(t, groups=groups, block_n=block_n, passes=passes if t.keys else 1))

def wrong(monkeypatch:pytest.MonkeyPatch, of:Any, name:str, make:Callable[[Any], Any]) -> None: monkeypatch.setattr(of, name, make(getattr(of, name)))

def a_ring_of_two(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaBackwardTile, "ring", 2)
def before_a_tile_is_there(m:pytest.MonkeyPatch) -> None:
  def early(work:Any) -> Any: return lambda s, tile: work(s, replace(tile, ring_place=replace(tile.ring_place, index=tile.ring_place.index + 1)))
  wrong(m, WgmmaBackward, "walk", lambda walk: lambda self, s, work: walk(self, s, early(work)))
def waits_for_one_less(m:pytest.MonkeyPatch) -> None:
  wrong(m, hopper, "wait_products", lambda wait: lambda acc, order, but=0: wait(acc, order, but + 1))
def numbers_of_the_next_tile(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaTrip, "query_values", lambda numbers: lambda self, s, kind: numbers(replace(self, ring_place=self.of.next(self.ring_place)), s, kind))
def another_head(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaBackward, "next", lambda next_: lambda self, place: replace(next_(self, place), loop=place.loop))
def mask_of_first_head(m:pytest.MonkeyPatch) -> None: m.setattr(WarpRows, "of_head", lambda self, head: self)

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, error, text", ((a_ring_of_two, LdsRace, "with no barrier between"), (another_head, AssertionError, "dk: "),
                                                (before_a_tile_is_there, UninitialisedRead, "LDS that nobody has written"),
                                                (waits_for_one_less, NotWaitedFor, "was not waited for"),
                                                (numbers_of_the_next_tile, EmulatorError, "not waited for|nobody has written"),
                                                (mask_of_first_head, AssertionError, "dk: ")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_wgmma(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception], text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text):
    check_backward_kernels("sm_90", H=2, Hkv=1, Sq=350, Sk=70, D=16, causal=True, only="dkdv", extras=dict(alibi_slopes=floats(2)**2))

def test_warpgroups_skip_tiles_that_they_do_not_see(monkeypatch:pytest.MonkeyPatch) -> None:
  # A warpgroup starts no products for a tile in which its rows see nothing. Two workgroups have two warpgroups each, and loop over two and four tiles
  # under this causal mask. In one tile of each workgroup, the rows of one warpgroup see nothing. This warpgroup starts none of the three products of
  # the dq kernel, and two of the four products of the kernel of dk and dv.
  started = count_products(monkeypatch)
  check_backward_kernels("sm_90", H=1, Sq=256, Sk=256, D=128, causal="top-left")
  assert sum(started) == 3*(12 - 2) + 4*12 - 2*2

def only_the_first_row_sees(m:pytest.MonkeyPatch) -> None:
  wrong(m, Scores, "seen_by", lambda seen: lambda self, first, last, tile: seen(self, first, first, tile))
def only_the_last_row_sees(m:pytest.MonkeyPatch) -> None:
  wrong(m, Scores, "seen_by", lambda seen: lambda self, first, last, tile: seen(self, last, last, tile))
def no_empty_group(m:pytest.MonkeyPatch) -> None: m.setattr(Frame, "start_nothing", lambda frame, acc: None)

@pytest.mark.parametrize("plant, error, text", ((only_the_first_row_sees, AssertionError, "dq: "), (only_the_last_row_sees, AssertionError, "dq: "),
                                                (no_empty_group, EmulatorError, "not waited for|no barrier between|still reads")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_skipped_tiles(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception],
                                        text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text):
    check_backward_kernels("sm_90", H=1, Sq=256, Sk=384, D=32, window=(60, 10), only="dq", tiles=lambda t: replace(t, groups=2, block_n=16))

# ***** all gradients at once *****

AT_ONCE: dict[str, dict[str, Any]] = {
  "full": dict(dtype="bfloat16", dlse=True), "causal": dict(Sq=200, Sk=200, causal=True), "long rows": dict(D=128, dtype="bfloat16", causal=True),
  "more queries, causal": dict(Sq=230, Sk=70, causal=True), "top-left, bshd": dict(B=2, causal="top-left", layout="bshd", dtype="bfloat16"),
  "window, grouped heads": dict(H=6, Hkv=2, Sq=150, window=(40, 20), layout="nsd"), "D above Dv": dict(D=32, Dv=8, H=2, Hkv=1),
  "softcap, kv_lengths": dict(B=3, H=2, Hkv=1, softcap=100.0, extras=dict(kv_lengths=ints(40, 0, 133))),
  "alibi": dict(H=4, Hkv=2, causal=True, extras=dict(alibi_slopes=floats(4)**2)), "sinks": dict(H=2, extras=dict(sinks=floats(2))),
  "in parts": dict(H=6, Hkv=2, causal=True, parts=6),
  "dropout": dict(dropout_p=0.2, extras=dict(dropout_seed=np.array([7, 9], np.uint32))),
  "packed": dict(layout="thd", H=2, Hkv=1, Sq=300, Sk=400, causal=True, dlse=True,
                 extras=dict(cu_seqlens_q=ints(70, 90, 90, 290), cu_seqlens_k=ints(2, 130, 141, 380))),
  "packed, without keys": dict(layout="thd", D=32, Sq=260, Sk=270, window=(99, 14),
                               extras=dict(cu_seqlens_q=ints(0, 140, 260), cu_seqlens_k=ints(0, 270, 270))),
}

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ("sm_90", GPU))
@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.thorough) if x in RARE else x for x in AT_ONCE])
def test_at_once(arch:str, case:str) -> None:
  check_backward_kernels(arch, **{**LONG, "D": 64, "deterministic": False, **AT_ONCE[case]}, only="all")

@pytest.mark.sample(3)
@pytest.mark.parametrize("make", ADVERSARIAL)
def test_at_once_adversarial(make:Callable[[Problem], Inputs]) -> None:
  size = 1000.0 if make is level else 1.0
  check_backward_kernels("sm_90", make, H=1, Sq=70, Sk=150, D=32, causal=make in (peaked, level), size=size, only="all")

def test_keys_beyond_kv_lengths_reach_no_query_at_once() -> None:
  check_backward_kernels("sm_90", deep, B=3, H=1, Sq=70, Sk=150, D=32, extras=dict(kv_lengths=ints(130, 0, 64)), only="all")

def no_barrier_after_ds(m:pytest.MonkeyPatch) -> None: m.setattr(wgmma_backward, "workgroup_barrier", lambda after: after)
def a_single_ds(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaBackward, "ds_in_shared", lambda ds_in_shared: lambda self, place: ds_in_shared(self, replace(place, index=place.index*2)))
def sums_that_begin_with_1(m:pytest.MonkeyPatch) -> None:
  m.setattr(gradient_sums, "nv", SimpleNamespace(F4=nvidia.F4, zero=lambda order: ops.splat(1.0, 4)))
def columns_of_first_warpgroup(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaTrip, "dq_part", (UOp.const(0), UOp.const(0)))

@pytest.mark.sample(2)
@pytest.mark.parametrize("plant, error, text", (
  *((plant, LdsRace, "with no barrier between") for plant in (no_barrier_after_ds, a_single_ds)),
  *((plant, AssertionError, "dq: ") for plant in (sums_that_begin_with_1, columns_of_first_warpgroup))))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_at_once(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception], text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text):
    check_backward_kernels("sm_90", H=1, Sq=350, Sk=140, D=64, deterministic=False, only="all")

# with tiles of 128 queries each warpgroup computes dQ of its own 64 queries
OF_128_QUERIES: dict[str, dict[str, Any]] = {
  "full": dict(Sq=350, Sk=140), "a last tile of 64 queries": dict(H=3, Sq=65, Sk=100, dtype="bfloat16"), "D 32": dict(D=32, Sq=130, Sk=70),
  "causal, in order": dict(H=2, Hkv=1, Sq=350, Sk=300, causal=True, deterministic=True),
  "packed": dict(layout="thd", H=2, Hkv=1, Sq=400, Sk=400, causal=True,
                 extras=dict(cu_seqlens_q=ints(70, 199, 199, 390), cu_seqlens_k=ints(2, 130, 141, 380)))}
def tiles_of_128_queries(tile:Any) -> Any: return replace(tile, block_n=128) if isinstance(tile, WgmmaBackwardTile) and tile.adds_dq else tile

@pytest.mark.parametrize("arch", ("sm_90", GPU))
@pytest.mark.parametrize("case", OF_128_QUERIES)
def test_at_once_with_tiles_of_128_queries(arch:str, case:str) -> None:
  check_backward_kernels(arch, **{**dict(H=1, D=64, deterministic=False), **OF_128_QUERIES[case]}, only="all", tiles=tiles_of_128_queries)

def queries_of_first_warpgroup(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaTrip, "dq_part", lambda dq_part: property(lambda self: (UOp.const(0), dq_part.fget(self)[1])))
def queries_that_do_not_exist(m:pytest.MonkeyPatch) -> None: m.setattr(wgmma_backward, "below", lambda x, end: UOp.const(True))

@pytest.mark.parametrize("plant, error", ((queries_of_first_warpgroup, AssertionError), (queries_that_do_not_exist, OutOfBounds)))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_with_tiles_of_128_queries(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None],
                                                 error:type[Exception]) -> None:
  plant(monkeypatch)
  with pytest.raises(error):
    check_backward_kernels("sm_90", H=1, Sq=170, Sk=130, D=64, deterministic=False, only="all", tiles=tiles_of_128_queries)

@pytest.mark.parametrize("groups, queries, D, reason", (
  (2, 96, 64, "2 warpgroups with tiles of 96 queries: the product dQ = dS K has whole 64 queries"),
  (3, 128, 64, "3 warpgroups with tiles of 128 queries: the warpgroups cannot share 2 times 64 queries of dQ equally"),
  (2, 128, 96, "each computes 96 of the D=96 columns of dQ; supported are 8, 16, 32 and whole 64"),
  (2, 64, 80, "each computes 40 of the D=80 columns"), (4, 64, 64, "there are counters of turns for 8 warps")))
def test_tiles_that_cannot_add_to_dq(groups:int, queries:int, D:int, reason:str) -> None:
  with pytest.raises(NotImplementedError, match=f"backward_all_wgmma: .*{reason}"):
    check_backward_kernels("sm_90", H=1, Sq=70, Sk=90, D=D, only="all",
                           tiles=lambda t: replace(t, groups=groups, block_n=queries) if getattr(t, "adds_dq", False) else t)

# ***** all gradients of few queries *****

FEW_QUERIES: dict[str, dict[str, Any]] = {
  "full": dict(H=2, Sk=300, dtype="bfloat16", parts=3), "more parts than tiles": dict(Sk=130, parts=4),
  "dlse": dict(H=2, B=2, Sq=60, Sk=233, causal=True, dlse=True),
  "keys that no query sees": dict(Sq=33, Sk=200, causal="top-left", layout="bshd"), "window": dict(Sk=400, window=(100, 20), layout="nsd", parts=2),
  "kv_lengths": dict(B=3, Sk=300, causal=True, dtype="bfloat16", extras=dict(kv_lengths=ints(130, 0, 300))),
  "dropout": dict(H=2, Sk=192, dropout_p=0.2, extras=dict(dropout_seed=np.array([7, 9], np.uint32))),
  "alibi": dict(H=2, Sk=200, causal=True, extras=dict(alibi_slopes=floats(2)**2)), "softcap": dict(Sk=200, softcap=3.0),
  "bias": dict(Sk=128, bias_dtype="float32", extras=dict(bias=floats(1, 1, 64, 128))), "sinks": dict(H=2, Sk=140, extras=dict(sinks=floats(2))),
  "D 64": dict(D=64, Sk=200), "fp32 out": dict(Sk=140, out_dtype="float32", size=1000.0)}
ONE_TILE: dict[str, Any] = dict(H=1, Sq=64, D=128)

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch", ("sm_90", GPU))
@pytest.mark.parametrize("case", FEW_QUERIES)
def test_few_queries(arch:str, case:str) -> None: check_backward_kernels(arch, **{**ONE_TILE, **FEW_QUERIES[case]}, only="few")

@pytest.mark.sample(2)
@pytest.mark.parametrize("make", ADVERSARIAL)
def test_few_queries_adversarial(make:Callable[[Problem], Inputs]) -> None:
  size = 1000.0 if make is level else 1.0
  check_backward_kernels("sm_90", make, **ONE_TILE, Sk=200, causal=make in (peaked, level), size=size, only="few", parts=2)

def test_nan_of_few_queries_stays_where_it_belongs() -> None:
  # Keys beyond the length of their batch are not read. A NaN of a query reaches no key that no query sees.
  for nan, parameters in (("k", dict(extras=dict(kv_lengths=ints(130)))), ("q", dict(causal="top-left"))):
    p = problem(**ONE_TILE, Sk=200, **parameters)
    x, loss, extras = normal(p), loss_of(p), parameters.get("extras", {})
    want = expected_gradients(p, x, loss, extras)
    getattr(x, nan)[..., 150 if nan == "k" else 3, 5] = np.nan
    got = run_backward(p, x, loss, "sm_90", extras, only="few")
    for name in ("dq", "dk", "dv") if nan == "k" else (): assert (verdict := judge(got[name], want[name])).ok, f"{name}: {verdict}"
    for name in ("dk", "dv"): assert (got[name][:, :, 130:] == 0).all(), name

def dq_of_the_last_tile(m:pytest.MonkeyPatch) -> None:
  wrong(m, hopper, "sums", lambda sums: lambda *args: sums(*args[:-1], more=False))
def copies_before_the_barrier(m:pytest.MonkeyPatch) -> None:
  m.setattr(WgmmaFewQueriesTrip, "start_dq", WgmmaTrip.start_dq)
  wrong(m, WgmmaFewQueriesTrip, "start", lambda start: lambda self, s: start(self, self.of.fetch(s, self.of.next(self.ring_place))))
def no_copies_of_the_next_tile(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaFewQueriesTrip, "start_dq", WgmmaTrip.start_dq)
def delta_of_no_query(m:pytest.MonkeyPatch) -> None:
  def put_0(to:UOp, x:UOp, gate:UOp) -> UOp: return nvidia.put(to, UOp.const(0.0, dtypes.float), gate)
  m.setattr(gradients_of_few, "nv", SimpleNamespace(put=put_0, copy_number=nvidia.copy_number, zero=nvidia.zero))
def dk_of_the_tile_before(m:pytest.MonkeyPatch) -> None:
  wrong(m, hopper, "output", lambda output: lambda *args: output(*args[:-1], True))
def keys_of_the_first_tiles(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaFewQueries, "keys_of_tile", lambda keys: lambda self, t, masked: keys(self, t.minimum(1), masked))

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, error, text", (
  *((plant, LdsRace, "with no barrier between") for plant in (no_barrier_after_ds, a_single_ds, copies_before_the_barrier)),
  (no_copies_of_the_next_tile, EmulatorError, "nobody has arrived"), (keys_of_the_first_tiles, UnwrittenOutput, "was never written"),
  (dk_of_the_tile_before, UninitialisedRead, "reads a register that nobody has written"), (dq_of_the_last_tile, AssertionError, "dq: "),
  (delta_of_no_query, AssertionError, "d[qk]: ")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_few_queries(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception],
                                      text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text): check_backward_kernels("sm_90", H=1, Sq=64, Sk=300, D=64, only="few")

FEW_WITHOUT_SPILLS: dict[str, dict[str, Any]] = {
  "full": {}, "causal": dict(causal=True, dtype="float16"), "kv_lengths": dict(extras=dict(kv_lengths=ints(65536))),
  "slopes": dict(causal=True, extras=dict(alibi_slopes=floats(8))),
  "dropout": dict(causal=True, dropout_p=0.1, extras=dict(dropout_seed=np.array([7, 9], np.uint32))),
  "softcap": dict(softcap=30.0), "odd sizes": dict(Sq=60, Sk=65500)}

@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("case", [x if x == "full" else pytest.param(x, marks=pytest.mark.thorough) for x in FEW_WITHOUT_SPILLS])
def test_few_queries_compile_without_spills(case:str, tmp_path:Path) -> None:
  # The kernel for few queries spills no registers, and two of its blocks fit on a multiprocessor: in registers and in shared memory.
  p = problem(**{**dict(B=1, H=8, Sq=64, Sk=65536, D=128, dtype="bfloat16"), **FEW_WITHOUT_SPILLS[case]})
  on, tile = get_chip("sm_90"), WgmmaFewQueriesTile(1, 64, matrix=MMA[p.dtype])
  text = compiled_by_nvcc("sm_90", few_arguments(p, False, 32), few_of(p, on, tile, False, 32), tmp_path)
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text and "serialized" not in text, text
  assert places_of(p, on, tile) == 2*on.cus

@pytest.mark.parametrize("power", (-1, 1))
@pytest.mark.usefixtures("without_places")
def test_the_scale_of_dq_alone_at_once(monkeypatch:pytest.MonkeyPatch, power:int) -> None:
  scale = 64**(-0.5*power)
  def of_dq_scaled(columns:Any) -> Any:     # dk and dv name the dtype and the width of their rows; dq has those of O
    return lambda self, accs, r, factor, share, *row: columns(self, accs, r, factor if row else factor*scale, share, *row)
  wrong(monkeypatch, Warps, "columns", of_dq_scaled)
  with pytest.raises(AssertionError, match="dq: "): check_backward_kernels("sm_90", H=1, Sq=70, Sk=90, D=64, only="all")

# ***** all gradients at once, dq in a fixed order *****

IN_TURN: dict[str, tuple[str, dict[str, Any]]] = {
  "full": ("sm_90", dict(D=32, Sq=200, Sk=300, dtype="bfloat16", dlse=True)),
  "causal": ("sm_90", dict(D=32, H=4, Hkv=2, Sq=200, Sk=300, causal=True)),
  "window, nsd": ("sm_90", dict(D=32, H=2, Sq=300, Sk=400, window=(140, 30), layout="nsd")),
  "kv_lengths": ("sm_90", dict(D=32, B=3, H=2, Hkv=1, Sq=150, Sk=300, causal=True, extras=dict(kv_lengths=ints(140, 0, 300)))),
  "in parts": ("sm_90", dict(D=32, H=6, Hkv=2, Sq=200, Sk=260, causal=True, parts=6)),
  "packed": ("sm_90", dict(D=32, H=2, layout="thd", Sq=330, Sk=330, max_seqlen_q=150, max_seqlen_k=150,
                           extras=dict(cu_seqlens_q=ints(70, 80, 150, 190, 320), cu_seqlens_k=ints(0, 10, 150, 190, 330)))),
  "CDNA3, full": ("gfx942", dict(Sq=150, Sk=300, dtype="bfloat16")), "CDNA4, causal": ("gfx950", dict(H=2, Sq=150, Sk=300, causal=True)),
  "CDNA3, window": ("gfx942", dict(H=1, Sq=300, Sk=300, window=(140, 30))),
}
ORDERS = ((0, 0), (1, 1), (2, 2), (0, 3))      # (resident workgroups, order of ATTN_EMU_ORDER); 0 resident: all
@pytest.mark.sample(1)
@pytest.mark.parametrize("case", [x if x in ("in parts", "packed", "CDNA4, causal") else pytest.param(x, marks=pytest.mark.thorough)
                                  for x in IN_TURN])
def test_dq_has_the_same_bits_in_every_order_of_workgroups(monkeypatch:pytest.MonkeyPatch, case:str) -> None:
  arch, parameters = IN_TURN[case]
  found = list[dict[str, np.ndarray]]()
  for resident, order in ORDERS:
    monkeypatch.setenv("ATTN_EMU_RESIDENT", str(resident))
    monkeypatch.setenv("ATTN_EMU_ORDER", str(order))
    found.append(check_backward_kernels(arch, **{"D": 64, **parameters}, only="all"))
  for other in found[1:]:
    for name, x in other.items(): np.testing.assert_array_equal(x, found[0][name], name)

@pytest.mark.gpu
@pytest.mark.parametrize("causal", (False, True))
def test_dq_has_the_same_bits_in_every_run(causal:bool) -> None:
  found = [check_backward_kernels("CUDA", B=2, H=16, Sq=1000, Sk=1024, D=128, causal=causal, only="all") for _ in range(3)]
  for other in found[1:]: np.testing.assert_array_equal(other["dq"], found[0]["dq"])

def turn_never_passed(m:pytest.MonkeyPatch) -> None:
  m.setattr(Turns, "end", lambda self, head, tile, done, last=False: hopper.publish(done))
def turn_passed_twice(m:pytest.MonkeyPatch) -> None:
  wrong(m, Turns, "end", lambda end: lambda self, head, tile, done, last=False: end(self, head, tile, end(self, head, tile, done, last), last))
def turn_not_awaited(m:pytest.MonkeyPatch) -> None: m.setattr(Turns, "begin", lambda self, head, tile, done: hopper.publish(done))
def additions_not_awaited(m:pytest.MonkeyPatch) -> None: m.setattr(hopper, "sent", hopper.publish)
def counters_not_zeroed(m:pytest.MonkeyPatch) -> None: m.setattr(gradient_sums, "first_turns", lambda group, thread: [])
def sums_not_zeroed(m:pytest.MonkeyPatch) -> None:
  m.setattr(gradient_sums.QueriesOfSums, "cleared", lambda self: [])

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, error, text", (
  (turn_never_passed, Deadlock, "waits until"), (turn_passed_twice, Deadlock, "waits until"), (turn_not_awaited, AssertionError, "not equal"),
  (additions_not_awaited, NotWaitedFor, "passes a turn, but additions that this wave has sent"),
  (counters_not_zeroed, Deadlock, "waits until"), (sums_not_zeroed, AssertionError, "dq: ")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_in_turn(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception], text:str) -> None:
  plant(monkeypatch)
  found = list[np.ndarray]()
  with pytest.raises(error, match=text):
    for order in range(4):
      monkeypatch.setenv("ATTN_EMU_ORDER", str(order))
      found.append(check_backward_kernels("sm_90", H=1, Sq=200, Sk=520, D=64, only="all")["dq"])
      np.testing.assert_array_equal(found[-1], found[0])

def sums_of_all_sequences_in_one_place(m:pytest.MonkeyPatch) -> None:
  wrong(m, Workgroup, "first_sums", lambda first: lambda self, head: first(replace(self, sequence=replace(self.sequence, q_start=0)), head))
def sequences_begin_in_the_same_tile(m:pytest.MonkeyPatch) -> None:
  wrong(m, Workgroup, "first_sums", lambda first: lambda self, head: first(self, head) - self.batch)
def sums_beyond_the_sequence_are_cleared(m:pytest.MonkeyPatch) -> None: m.setattr(Workgroup, "has_sums", UOp.const(True))

@pytest.mark.sample(2)
@pytest.mark.parametrize("plant, error, text", (
  (sums_of_all_sequences_in_one_place, AssertionError, "dq: "), (sequences_begin_in_the_same_tile, AssertionError, "dq: "),
  (sums_beyond_the_sequence_are_cleared, EmulatorError, "out of bounds")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_packed_sums(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception],
                                      text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text):
    check_backward_kernels("sm_90", H=1, D=32, layout="thd", Sq=250, Sk=250, max_seqlen_q=200, max_seqlen_k=200, deterministic=False, only="all",
                           extras=dict(cu_seqlens_q=ints(0, 100, 190, 250), cu_seqlens_k=ints(0, 100, 190, 250)))

# ***** planted faults: each is caught *****

NOTHING = UOp.const(0.0, dtypes.float)
def without_delta(m:pytest.MonkeyPatch) -> None:
  m.setattr(AmdBackward, "delta", NOTHING)
  m.setattr(WarpRows, "delta", lambda self, in_block, row: NOTHING)
def without_dlse(m:pytest.MonkeyPatch) -> None:
  wrong(m, Workgroup, "query_value", lambda value: lambda self, name, row: NOTHING if name == "dlse" else value(self, name, row))
def scaled(*names:str, power:int) -> Callable[[pytest.MonkeyPatch], None]:
  # a function that plants a fault: the gradients `names` get an additional factor softmax_scale^power
  # with power 1 the scale counts twice, with -1 not at all
  def plant(m:pytest.MonkeyPatch) -> None:
    def gradient(original:Any) -> Any:
      def store(self:Workgroup, name:str, row:Any, columns:Any) -> Any:
        return original(self, name, row, [(at, ops.mul(x, self.p.softmax_scale**power) if name in names else x) for at, x in columns])
      return store
    wrong(m, Workgroup, "gradient", gradient)
  plant.__name__ = f"scale_of_{names[0]}_{'twice' if power > 0 else 'never'}"
  return plant
def without_last_head(m:pytest.MonkeyPatch) -> None:
  wrong(m, Allocator, "range", lambda range_: lambda self, n, kind: range_(self, 2 if (n, kind) == (3, AxisType.LOOP) else n, kind))
def diagonal(over:str) -> Callable[[pytest.MonkeyPatch], None]:
  def plant(m:pytest.MonkeyPatch) -> None:
    def mask(original:Any) -> Any:
      return lambda self, x, row, *rest: original(self, x, replace(row, index=row.index + int(self.walk.over == over)), *rest)
    wrong(m, Scores, "_beyond", mask)
  plant.__name__ = f"diagonal_of_{over}"
  return plant
def unguarded(m:pytest.MonkeyPatch) -> None:
  m.setattr(Normaliser, "of", staticmethod(lambda p, log_sum, *rest: Normaliser(ops.mul(log_sum, -LOG2E))))
def of_head_0(wanted:str) -> Callable[[pytest.MonkeyPatch], None]:
  def plant(m:pytest.MonkeyPatch) -> None:
    wrong(m, Workgroup, "query_value_rows", lambda numbers: lambda self, name, head: numbers(self, name, UOp.const(0) if name == wanted else head))
  plant.__name__ = f"{wanted}_of_head_0"
  return plant
def lanes_swapped(m:pytest.MonkeyPatch) -> None:
  # plants a fault: a lane loads lse and delta of the queries in the order of the tile, not of its elements
  wrong(m, QueryValues, "fetch", lambda fetch: lambda self, rows, t: [x.load_number(t*self.block_n, self.block_n, self.thread,
                                                                                   self.thread < self.block_n) for x in rows.each])
def columns_swapped(m:pytest.MonkeyPatch) -> None:
  # plants a fault: a lane takes the query values (lse, delta) of its columns in reverse order
  for of in (MmaTrip, WgmmaTrip): wrong(m, of, "query_values", lambda values: lambda self, *args: values(self, *args)[::-1])
def unmasked(over:str) -> Callable[[pytest.MonkeyPatch], None]:
  def plant(m:pytest.MonkeyPatch) -> None:
    wrong(m, Scores, "_beyond", lambda mask: lambda self, x, *rest: x if self.walk.over == over else mask(self, x, *rest))
  plant.__name__ = f"unmasked_{over}"
  return plant
def unwritten(m:pytest.MonkeyPatch) -> None: m.setattr(Workgroup, "cleared_gradients", lambda self, names: [])

def blind_row(Sq:int) -> np.ndarray:
  # makes a bias that is -inf for all keys of query 7, so that the query sees no key
  bias = floats(1, 1, Sq, 1)
  bias[0, 0, 7] = -np.inf
  return bias

FAULTS: dict[Any, tuple[dict[str, Any], str]] = {   # fault: (the problem of the faulty kernel, the gradients that show the fault)
  without_delta: (SMALL, "dq: "), without_dlse: ({**SMALL, "dlse": True}, "dq: "),
  scaled("dq", power=1): (SMALL, "dq: "), scaled("dq", power=-1): (SMALL, "dq: "),
  scaled("dk", power=1): (SMALL, "dk: "), scaled("dk", power=-1): (SMALL, "dk: "),
  without_last_head: ({**SMALL, "H": 3, "Hkv": 1}, "dk: "),
  diagonal("keys"): ({**SMALL, "causal": True}, "dq: "), diagonal("queries"): ({**SMALL, "causal": True}, "dk: "),
  unguarded: ({**SMALL, "extras": dict(bias=blind_row(40))}, "dq: NaN"),
  of_head_0("lse"): ({**SMALL, "H": 2}, "dq: "), of_head_0("delta"): ({**SMALL, "H": 2}, "dk: "),
  lanes_swapped: (SMALL, "dk: "), columns_swapped: (SMALL, "dk: "),
  unmasked("keys"): ({**SMALL, "make": deep}, "dq: "), unmasked("queries"): ({**SMALL, "extras": dict(bias=floats(1, 1, 1, 65) + 200)}, "dk: "),
  unwritten: ({**SMALL, **CASES["packed"]}, "never written"),
}

ONLY_ON = {lanes_swapped: ("gfx942", "gfx950", "gfx1100"), columns_swapped: ("sm_80", "sm_90")}     # on RDNA4 the two orders are equal
FOR_WARPGROUPS: dict[str, dict[str, Any]] = {     # sizes that wgmma takes: it has at least 64 rows
  "unguarded": dict(Sq=100, Sk=133, extras=dict(bias=blind_row(100))), "unwritten": BY_WGMMA["packed"],
  "unmasked_queries": dict(Sq=100, Sk=133, extras=dict(bias=floats(1, 1, 1, 133) + 200))}

def fault_on(plant:Any, arch:str) -> Any:
  # makes the pytest case of a planted fault, which the function `plant` plants, on a chip
  by_default = arch == "gfx942" or (arch == "sm_80" and not plant.__name__.startswith(("scale_of", "unmasked", "lse_of")))
  return pytest.param(plant, arch, id=f"{plant.__name__}-{arch}", marks=() if by_default else pytest.mark.thorough)

@pytest.mark.sample(7)
@pytest.mark.parametrize("plant, arch", [fault_on(plant, arch) for plant in FAULTS for arch in (*EVERY_ARCH, "sm_90")
                                         if arch in ONLY_ON.get(plant, (arch,))])
def test_planted_fault(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], arch:str) -> None:
  parameters, text = FAULTS[plant]
  if arch == "sm_90": parameters = {**parameters, **FOR_WARPGROUPS.get(plant.__name__, dict(Sq=100, Sk=133))}
  plant(monkeypatch)
  only = "dq" if text.startswith("dq") else "dkdv"
  with pytest.raises(Exception, match=text) as found: check_backward_kernels(arch, only=only, **parameters)
  assert found.type is (UnwrittenOutput if plant is unwritten else AssertionError), found.value

@pytest.mark.parametrize("arch", ("gfx942", *(pytest.param(arch, marks=pytest.mark.thorough) for arch in ("gfx950", "gfx1100", "gfx1201"))))
@pytest.mark.parametrize("prefetch", (0, 1))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_no_barriers(monkeypatch:pytest.MonkeyPatch, prefetch:int, arch:str) -> None:
  monkeypatch.setattr(Plan, "barrier", lambda self, u: None)
  monkeypatch.setattr(plan, "_RULES", {**plan._RULES, Ops.BARRIER: Plan.barrier})
  with pytest.raises((LdsRace, UninitialisedRead)):
    check_backward_kernels(arch, **{**SMALL, "Sq": 100}, tiles=lambda t: replace(t, prefetch=prefetch))

@pytest.mark.parametrize("fault", ("barrier", "wait"))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_of_the_ring(monkeypatch:pytest.MonkeyPatch, fault:str) -> None:
  # The mma.sync kernel stores tiles in a ring buffer in shared memory. If one of its barriers or one of its waits for copies is left out, the
  # emulator reports a fault. The problem of this test is used nowhere else, because tinygrad's cache keeps the faulty program.
  if fault == "barrier":
    monkeypatch.setattr(Plan, "barrier", lambda self, u: None)
    monkeypatch.setattr(plan, "_RULES", {**plan._RULES, Ops.BARRIER: Plan.barrier})
  else: monkeypatch.setattr(nvidia, "wait_copies", lambda order, but: nvidia.commit(order))
  with pytest.raises((LdsRace, UninitialisedRead) if fault == "barrier" else NotWaitedFor):
    check_backward_kernels("sm_80", **{**SMALL, "Sq": 72}, only="dkdv")

def compiled_by_nvcc(arch:str, names:Shapes, program:Callable[..., UOp], to:Path) -> str:
  # compiles the kernel `program` with nvcc in the folder `to`, and returns the messages of ptxas
  target = "90a" if arch == "sm_90" else arch.removeprefix("sm_")
  placeholders = [UOp.placeholder(shape, (FLOATS | INTS)[kind], i) for i, (shape, kind) in enumerate(names.values())]
  source = to/"kernel.cu"
  source.write_text(render(program(*placeholders), arch))
  command = ["nvcc", f"-gencode=arch=compute_{target},code=sm_{target}", "-cubin", "-Xptxas", "-v", "-o", str(to/"kernel.cubin"), str(source)]
  return subprocess.run(command, capture_output=True, text=True, check=True).stderr

@pytest.mark.sample(1)
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("kernel, d, arch", [
  pytest.param(kernel, d, arch, marks=() if (kernel, d, arch) in (("dkdv", 128, "sm_90"), ("all", 128, "sm_90")) else pytest.mark.thorough)
  for kernel, d, arch in (*itertools.product(("dq", "dkdv", "dbias"), (64, 128), ("sm_80", "sm_86", "sm_90", "sm_120")), ("all", 128, "sm_90"),
                          ("all in order", 128, "sm_90"))])
def test_compiled_by_nvcc(kernel:str, d:int, arch:str, tmp_path:Path) -> None:
  # Compiled by nvcc, the wgmma backward kernels do not spill registers. ptxas also does not report that it makes each wgmma wait for the one before.
  for dtype, causal in (("float16", False), ("bfloat16", True)):
    extras, on = {"bias": np.zeros((1, 32, 1, 4096), np.float32)} if kernel == "dbias" else {}, get_chip(arch)
    p = problem(B=2, H=32, Sq=4096, D=d, dtype=dtype, causal=causal, extras=extras)
    def all_gradients(deterministic:bool) -> Any:
      tile, of = at_once(replace(p, deterministic=False), on), replace(p, deterministic=deterministic)
      return all_arguments(of), all_of(of, on, tile)
    names, program = {"all": lambda: all_gradients(False), "all in order": lambda: all_gradients(True),
                      "dq": lambda: (dq_arguments(p), dq_of(p, on, tiles_of(p, on)[0])),
                      "dkdv": lambda: (dkdv_arguments(p), dkdv_of(p, on, tiles_of(p, on)[1])),
                      "dbias": lambda: (dbias_arguments(p), dbias_of(p, on, choose_bias_tile(p, on)))}[kernel]()
    text = compiled_by_nvcc(arch, names, program, tmp_path)
    assert re.search(r"0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads", text) and "serialized" not in text, text

# problems with options for which one kernel for all gradients has enough registers on sm_90
WITH_OPTIONS: dict[str, dict[str, Any]] = {
  "window": dict(B=2, Hkv=8, Sq=4000, Sk=4000, window=(1500, 300)), "slopes": dict(B=2, Hkv=8, causal=True, extras=dict(alibi_slopes=floats(32))),
  "packed": dict(B=1, Hkv=8, layout="thd", Sq=8192, Sk=8192, max_seqlen_q=4096, max_seqlen_k=4096, causal=True,
                 extras=dict(cu_seqlens_q=ints(0, 4096, 8192), cu_seqlens_k=ints(0, 4096, 8192))),
  "kv_lengths": dict(B=2, Hkv=8, Sk=4000, causal=True, extras=dict(kv_lengths=ints(9, 4000))), "softcap": dict(B=2, softcap=30.0),
  "dropout": dict(B=2, dropout_p=0.1, causal=True, extras=dict(dropout_seed=np.array([7, 9], np.uint32))),
  "dropout in order": dict(B=2, dropout_p=0.1, causal=True, deterministic=True, extras=dict(dropout_seed=np.array([7, 9], np.uint32))),
  "dropout, D 64": dict(B=2, D=64, dropout_p=0.1, causal=True, extras=dict(dropout_seed=np.array([7, 9], np.uint32))),
  "softcap in order": dict(B=2, softcap=30.0, deterministic=True), "softcap, D 64": dict(B=2, D=64, Sk=4000, softcap=30.0, causal=True),
  "mask_mod": dict(B=2, causal=True, **functions_of(None, lambda b, h, i, j: ((i - j) % 4).eq(0), ()))}

@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("case", [x if x == "packed" else pytest.param(x, marks=pytest.mark.thorough) for x in WITH_OPTIONS])
def test_one_kernel_with_options_compiles_without_spills(case:str, tmp_path:Path) -> None:
  on, sizes = get_chip("sm_90"), dict(B=1, H=32, Sq=4096, D=128, dtype="bfloat16", deterministic=False)
  p = problem(**{**sizes, **WITH_OPTIONS[case]})
  tile = WgmmaBackwardTile(2, 64, matrix=MMA[p.dtype], keys=True, adds_dq=True)
  assert short_of_registers(p, tile) is None
  p = with_lists(p, listing(p, on, tile, "queries", p.deterministic))
  text = compiled_by_nvcc("sm_90", all_arguments(p), all_of(p, on, tile), tmp_path)
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text and "serialized" not in text, text

SPILLED_DKDV: dict[str, dict[str, Any]] = {"window": dict(window=(500, 300)), "grouped heads": dict(Hkv=8, causal=True),
                                             "fp32 out": dict(out_dtype="float32", causal=True)}

@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.thorough
@pytest.mark.parametrize("arch", ("sm_80", "sm_120"))
@pytest.mark.parametrize("d", (64, 128))
@pytest.mark.parametrize("option", SPILLED_DKDV)
def test_dkdv_on_mma_spills_under_no_option(option:str, d:int, arch:str, tmp_path:Path) -> None:
  # The mma.sync kernel of dk and dv spills no registers with the options with which an earlier version spilled.
  p, on = problem(B=2, H=32, Sq=4096, D=d, dtype="bfloat16", **SPILLED_DKDV[option]), get_chip(arch)
  text = compiled_by_nvcc(arch, dkdv_arguments(p), dkdv_of(p, on, tiles_of(p, on)[1]), tmp_path)
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text, text

@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.thorough
@pytest.mark.parametrize("arch", ("sm_80", "sm_90"))
def test_a_capped_bias_of_long_rows_compiles_without_spills(arch:str, tmp_path:Path) -> None:
  on = get_chip(arch)
  p = problem(B=2, H=32, Sq=4096, D=256, causal=True, softcap=30.0, extras={"bias": np.zeros((1, 32, 1, 4096), np.float32)})
  spilled = compiled_by_nvcc(arch, dbias_arguments(p), dbias_of(p, on, choose_bias_tile(p, on)), tmp_path)
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in spilled, spilled

@pytest.mark.parametrize("arch", ("gfx1201", "sm_80"))
def test_same_in_every_run(arch:str) -> None:
  first, second = (check_backward_kernels(arch, **{**SMALL, "only": "dkdv"}) for _ in range(2))
  for name, x in first.items(): np.testing.assert_array_equal(x, second[name])

# ***** the gradient of a bias *****

BIASES: dict[str, dict[str, Any]] = {     # bias: 1 if each batch, head, row, key has its own bias, 0 if all share it; parts None: dispatch chooses
  "of every score": dict(bias=(1, 1, 1, 1), causal=True, softcap=3.0),
  "of heads": dict(bias=(0, 1, 1, 1), H=4, Hkv=2, window=(30, 9), parts=2),
  "of batches": dict(bias=(1, 0, 1, 1), H=5, Hkv=1, D=24, Dv=8, layout="bshd", bias_dtype="bfloat16", parts=3),
  "of keys": dict(bias=(1, 0, 0, 1), H=1, Hkv=1, Sq=150, causal=True, parts=2),
  "of rows": dict(bias=(1, 1, 1, 0), Sk=77, causal="top-left", dlse=True),
  "of one head's rows": dict(bias=(0, 0, 1, 0), softcap=5.0, dlse=True, parts=4),
  "one for all": dict(bias=(0, 0, 0, 0), Sq=150, dlse=True),
  "one for all, causal": dict(bias=(0, 0, 0, 0), B=1, Sq=150, causal=True, parts=3),
  "of heads alone": dict(bias=(0, 1, 0, 0), bias_dtype="float16", layout="nsd", B=1, dlse=True),
  "of heads alone, window": dict(bias=(0, 1, 0, 0), B=1, Sq=150, window=(30, 9), parts=None),
  "of heads, lengths": dict(bias=(0, 1, 0, 0), Sk=20, extras=dict(kv_lengths=ints(2, 17)), causal=True),
  "of batches, lengths": dict(bias=(1, 0, 0, 0), Sq=70, Sk=20, extras=dict(kv_lengths=ints(2, 17)), causal=True),
  "of scores, lengths": dict(bias=(0, 0, 1, 1), extras=dict(kv_lengths=ints(20, 65)), causal=True),
  "with dropout": dict(bias=(0, 1, 0, 1), dropout_p=0.3, extras=dict(dropout_seed=np.array([3, 5], np.uint32)))}

def cap_slope_of_bias(m:pytest.MonkeyPatch) -> None:
  for of in (AmdTrip, WarpTrip): wrong(m, of, "ds", lambda ds: lambda self, *args: ds(self, *args[:-1]))
def without_first_trip(m:pytest.MonkeyPatch) -> None:
  wrong(m, BiasPart, "grid_of_trip", lambda grid: lambda self, i: grid(self, i.maximum(1)))
def of_rows_that_are_not_there(m:pytest.MonkeyPatch) -> None:
  m.setattr(Normaliser, "where", lambda self, there: self)

OF_BIAS: dict[Any, dict[str, Any]] = {
  cap_slope_of_bias: dict(softcap=3.0, extras=dict(bias=floats(1, 1, 40, 65))),
  without_first_trip: dict(H=3, Hkv=1, extras=dict(bias=floats(1, 1, 40, 65))),
  of_rows_that_are_not_there: dict(Sq=50, extras=dict(bias=floats(1, 1, 1, 65) + 100))}

@pytest.mark.parametrize("plant, arch", [
  pytest.param(plant, arch, marks=() if arch == "gfx942" or (arch == "sm_80" and plant is not cap_slope_of_bias) else pytest.mark.thorough)
  for plant in OF_BIAS for arch in EVERY_ARCH])
def test_planted_fault_of_a_bias(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], arch:str) -> None:
  plant(monkeypatch)
  with pytest.raises(AssertionError, match="dbias: "): check_backward_kernels(arch, only="dbias", **{**SMALL, **OF_BIAS[plant]})

@pytest.mark.parametrize("arch, d", [pytest.param(arch, 256, marks=pytest.mark.thorough) for arch in EVERY_ARCH] +
                                    [("gfx1100", 101), pytest.param("gfx1201", 101, marks=pytest.mark.thorough)])
def test_bias_of_long_rows(arch:str, d:int) -> None:
  # The gradient of a bias is right at D=256, and at D=101, where rows consist of pieces. There some kernels have no registers for the rows that a
  # workgroup owns, and load them from global memory in every iteration.
  check_backward_kernels(arch, only="dbias", H=2, Sq=40, Sk=50, D=d, extras=dict(bias=floats(1, 1, 40, 50)))

@pytest.mark.sample(3)
@chips_in_turn("case", BIASES, ("of keys",))
def test_gradient_of_a_bias(arch:str, case:str) -> None:
  # The gradient of a bias is right in both cases: the kernel writes the whole gradient, or it writes partial sums that are added afterwards.
  parameters = {**SMALL, "B": 2, "H": 2, **BIASES[case]}
  sizes = [parameters[n] if own else 1 for own, n in zip(parameters.pop("bias"), ("B", "H", "Sq", "Sk"))]
  extras, parts = {**parameters.pop("extras", {}), "bias": floats(*sizes)}, parameters.pop("parts", 1)
  if parts is None: parts = choose_parts(problem(extras=extras, **{x: y for x, y in parameters.items() if x != "dlse"}), chip(arch)).sums[0]
  for n in (0, parts): check_backward_kernels(arch, only="dbias", parts=n, extras=extras, **parameters)
