"""Tests of CDNA's kernel that computes dq, dk and dv at once: each element agrees with float64 within its error limit (docs/contract.md), and planted
faults are found."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any
import numpy as np
import pytest
from attn.chips.shapes import BackwardShape
from attn.emulator.checks import EmulatorError
from attn.kernels.amd import gradient_sums
from attn.kernels.amd.backward import AmdTrip, DqOfTile
from attn.kernels.amd.products import TurnedColumns
from attn.kernels.parts.memory.layouts import LdsTile
from attn.ops import common as ops
from attn.problem import Problem
from attn.tinygrad_compat import UOp
from backward_cases import check_backward_kernels
from cases import Inputs, floats, in_turn, ints
from test_backward import ADVERSARIAL, LONG, deep, level, peaked, wrong

CASES: dict[str, tuple[str, dict[str, Any]]] = {
  "full": ("gfx942", dict(D=128, dtype="bfloat16", dlse=True)),
  "rows that do not fill tiles": ("gfx950", dict(Sq=100, Sk=70, D=64, dtype="bfloat16")),
  "causal": ("gfx950", dict(H=2, Hkv=1, Sq=150, Sk=170, D=128, causal=True)),
  "more queries, causal": ("gfx942", dict(Sq=230, Sk=70, causal=True)),
  "top-left, bshd": ("gfx942", dict(B=2, causal="top-left", layout="bshd", dtype="bfloat16")),
  "window, grouped heads": ("gfx950", dict(H=6, Hkv=2, Sq=100, window=(40, 20), layout="nsd")),
  "kv_lengths": ("gfx942", dict(B=3, H=2, Hkv=1, extras=dict(kv_lengths=ints(40, 0, 133)))),
  "alibi": ("gfx950", dict(H=4, Hkv=2, causal=True, extras=dict(alibi_slopes=floats(4)**2))),
  "sinks": ("gfx942", dict(H=2, extras=dict(sinks=floats(2)))),
  "softcap": ("gfx942", dict(H=2, Hkv=1, softcap=4.0, causal=True)),
  "dropout": ("gfx942", dict(dropout_p=0.2, extras=dict(dropout_seed=np.array([7, 9], np.uint32)))),
  "float32 o": ("gfx942", dict(out_dtype="float32", dlse=True)),
  "in parts": ("gfx942", dict(H=6, Hkv=2, causal=True, parts=6)),
  "full, loads that transpose": ("gfx950", dict(dlse=True)),
  "dropout, loads that transpose": ("gfx950", dict(D=128, dtype="bfloat16", dropout_p=0.2, extras=dict(dropout_seed=np.array([7, 9], np.uint32)))),
  "lengths, loads that transpose": ("gfx950", dict(B=3, H=4, Hkv=2, Sq=97, Sk=131, extras=dict(kv_lengths=ints(40, 0, 131)))),
}

@pytest.mark.sample(3)
@pytest.mark.parametrize("case", CASES)
def test_at_once_on_cdna(case:str) -> None:
  arch, parameters = CASES[case]
  check_backward_kernels(arch, **{**LONG, "D": 64, "deterministic": False, **parameters}, only="all")

@pytest.mark.thorough
@pytest.mark.parametrize("case", ("kv_lengths", "softcap", "dropout"))
def test_at_once_on_cdna_with_128_columns(case:str) -> None:
  arch, parameters = CASES[case]
  check_backward_kernels(arch, **{**LONG, "D": 128, "deterministic": False, **parameters}, only="all")

@pytest.mark.parametrize("D, shape", ((128, BackwardShape(4, 64, fenced=8)), (64, BackwardShape(8, 32, fenced=2, prefetch=2))))
def test_tiles_at_once(D:int, shape:BackwardShape) -> None:
  # The kernel that computes dq, dk and dv at once gives right gradients for two unusual tiles. With one, a wave computes two matrix tiles of dQ in
  # each iteration. With the other, a workgroup has more waves than a row of dQ has matrix tiles.
  check_backward_kernels("gfx950", H=1, Sq=100, Sk=150, D=D, causal=True, deterministic=False, only="all",
                         tiles=lambda t: replace(t, **vars(shape)) if t.adds_dq else t)

@pytest.mark.sample(2)
@in_turn("make, arch", ADVERSARIAL, ("gfx942", "gfx950"))
def test_at_once_adversarial_on_cdna(make:Callable[[Problem], Inputs], arch:str) -> None:
  size = 1000.0 if make is level else 1.0
  check_backward_kernels(arch, make, H=1, Sq=70, Sk=150, D=64, causal=make in (peaked, level), size=size, only="all")

@pytest.mark.parametrize("resident, order", ((1, 1), (3, 2)))
def test_at_once_in_any_order_of_workgroups(monkeypatch:pytest.MonkeyPatch, resident:int, order:int) -> None:
  monkeypatch.setenv("ATTN_EMU_RESIDENT", str(resident))
  monkeypatch.setenv("ATTN_EMU_ORDER", str(order))
  check_backward_kernels("gfx942", H=2, Sq=100, Sk=400, D=64, causal=True, deterministic=False, only="all")

@pytest.mark.sample(2)
@in_turn("resident, kernel", ((1, 2), (3, 1), (0, 2)), (("gfx942", 64), ("gfx950", 64), ("gfx950", 128)))
def test_at_once_in_a_fixed_order_on_cdna(monkeypatch:pytest.MonkeyPatch, resident:tuple[int, int], kernel:tuple[str, int]) -> None:
  # If workgroups add to dq in a fixed order, dq is right and has the same bits, however many workgroups run at the same time, and in whatever order
  # they start. `resident` is the number of workgroups that run at the same time (0: all), and which order of workgroups the emulator takes.
  arch, D = kernel
  case: dict[str, Any] = dict(H=2, Sq=100, Sk=400, D=D, causal=True, deterministic=True, only="all")
  usual = check_backward_kernels(arch, **case)
  if resident[0]: monkeypatch.setenv("ATTN_EMU_RESIDENT", str(resident[0]))
  monkeypatch.setenv("ATTN_EMU_ORDER", str(resident[1]))
  np.testing.assert_array_equal(check_backward_kernels(arch, **case)["dq"], usual["dq"])

def keys_beyond_the_last(m:pytest.MonkeyPatch) -> None: m.setattr(AmdTrip, "zero_for_missing_keys", lambda self, weights: weights)
def test_keys_beyond_the_last_reach_no_query(monkeypatch:pytest.MonkeyPatch) -> None:
  # The kernel that computes dq, dk and dv at once gives the right dq with kv_lengths. For a key beyond the length, P = exp(0 - lse) is inf if all
  # scores are far below 0. The kernel sets this P to 0; a kernel without this step fails the check.
  case: dict[str, Any] = dict(B=3, H=1, Sq=70, Sk=150, D=64, extras=dict(kv_lengths=ints(130, 0, 64)), only="all")
  check_backward_kernels("gfx942", deep, **case)
  keys_beyond_the_last(monkeypatch)
  with pytest.raises(AssertionError, match="dq: "): check_backward_kernels("gfx942", deep, **case)

def no_barrier_before_dq(m:pytest.MonkeyPatch) -> None:
  wrong(m, AmdTrip, "add_dq", lambda add: lambda self, s: add(self, replace(s, ds=Bare(s.ds))))
def begins_with_1(m:pytest.MonkeyPatch) -> None:
  def splat(x:float, n:int) -> UOp: return ops.splat(1.0 if n == gradient_sums.NUMBERS_OF_PIECE else x, n)
  m.setattr(gradient_sums, "ops", SimpleNamespace(**{**vars(ops), "splat": splat}))
def columns_of_first_wave(m:pytest.MonkeyPatch) -> None:
  wrong(m, DqOfTile, "of", lambda of: lambda *args: replace(of(*args), column=UOp.const(0)))
def other_columns(m:pytest.MonkeyPatch) -> None:
  m.setattr(TurnedColumns, "load", lambda self, row, unit, load=TurnedColumns.load: load(replace(self, weighted=not self.weighted), row, unit))
def scale_of_dq(m:pytest.MonkeyPatch) -> None:
  m.setattr(gradient_sums, "ops", SimpleNamespace(**{**vars(ops), "mul": lambda x, y: x if isinstance(y, float) else ops.mul(x, y)}))

@dataclass(frozen=True)
class Bare:
  # planted fault: a wrapper of a tile in LDS that drops the order of operations
  lds: LdsTile
  # reads may then run before the stores and barriers that they depend on
  def after(self, *deps:UOp) -> LdsTile: return self.lds

@pytest.mark.sample(3)
@pytest.mark.parametrize("arch, plant, error, text", (
  *((arch, no_barrier_before_dq, EmulatorError, "no barrier between|nobody has written") for arch in ("gfx942", "gfx950")),
  *(("gfx942", plant, AssertionError, "dq: ") for plant in (begins_with_1, columns_of_first_wave, scale_of_dq)),
  ("gfx950", other_columns, AssertionError, "d[qkv]: ")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_at_once_on_cdna(monkeypatch:pytest.MonkeyPatch, arch:str, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception],
                                       text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text): check_backward_kernels(arch, H=1, Sq=150, Sk=140, D=64, deterministic=False, only="all")
