"""Tests of the kernel of dk and dv whose two warpgroups divide the products and share P, for head dimensions above 128 on sm_90."""
from __future__ import annotations
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.choose.backward import dkdv_of, tiles_of
from attn.emulator.checks import LdsRace, NotWaitedFor, UninitialisedRead, UnwrittenOutput
from attn.functions.trace import functions_of
from attn.kernels.nvidia.warp_gradients import WarpRows
from attn.kernels.parts.grid.tensors import dkdv_arguments
from attn.kernels.parts.program.statements import store_all
from attn.kernels.tiles.wgmma import WgmmaHalvesTile
from attn.kernels.wgmma import gradients_in_halves
from attn.kernels.wgmma.backward import WgmmaBackward
from attn.kernels.wgmma.gradients_in_halves import HalfRows, WgmmaHalves, WgmmaHalvesTrip
from attn.ops import nvidia
from attn.score.term import Row
from attn.tinygrad_compat import UOp
from backward_cases import check_backward_kernels
from cases import GPU, floats, ints, problem
from test_backward import ADVERSARIAL, compiled_by_nvcc, level, peaked, wrong

CASES: dict[str, dict[str, Any]] = {
  "full": dict(Sk=133, dtype="bfloat16", dlse=True), "D 256": dict(Sq=90, D=256), "D 200": dict(Sq=70, Sk=64, D=200, layout="bshd"),
  "D 192, causal": dict(B=2, Sq=150, Sk=150, D=192, causal=True, dtype="bfloat16"),
  "more queries, top-left": dict(Sq=230, Sk=70, causal="top-left"), "window, grouped heads": dict(H=6, Hkv=2, Sq=150, window=(40, 20), layout="nsd"),
  "kv_lengths": dict(B=3, H=2, Hkv=1, causal=True, extras=dict(kv_lengths=ints(40, 0, 133))),
  "alibi": dict(H=4, Hkv=2, causal=True, extras=dict(alibi_slopes=floats(4)**2)),
  "packed": dict(layout="thd", H=2, Hkv=1, Sq=300, Sk=400, causal=True,
                 extras=dict(cu_seqlens_q=ints(70, 90, 90, 290), cu_seqlens_k=ints(2, 130, 141, 380))),
  "in parts": dict(H=6, Hkv=2, causal=True, parts=6)}
LONG_ROWS: dict[str, Any] = dict(H=1, Sq=100, Sk=133, D=136)

def shares(tile:Any) -> Any:
  """Returns the tile `tile`, having checked that the kernel of dk and dv is the one of these tests."""
  assert not tile.keys or isinstance(tile, WgmmaHalvesTile), tile
  return tile

@pytest.mark.sample(4)
@pytest.mark.parametrize("arch", ("sm_90", GPU))
@pytest.mark.parametrize("case", CASES)
def test_in_halves(arch:str, case:str) -> None: check_backward_kernels(arch, **{**LONG_ROWS, **CASES[case]}, only="dkdv", tiles=shares)

@pytest.mark.sample(2)
@pytest.mark.parametrize("make", ADVERSARIAL)
def test_in_halves_adversarial(make:Callable[..., Any]) -> None:
  check_backward_kernels("sm_90", make, H=1, Sq=70, Sk=90, D=136, causal=make in (peaked, level), size=1000.0 if make is level else 1.0, only="dkdv",
                         tiles=shares)

def without_barrier(of:Any, name:str) -> Callable[[pytest.MonkeyPatch], None]:
  """Returns a function that plants a fault: the method `name` of the class `of` has no barrier."""
  def plant(m:pytest.MonkeyPatch) -> None:
    def make(method:Any) -> Any:
      def faulty(*args:Any, **given:Any) -> Any:
        with pytest.MonkeyPatch.context() as inside:
          inside.setattr(gradients_in_halves, "workgroup_barrier", lambda after: after)
          return method(*args, **given)
      return faulty
    wrong(m, of, name, make)
  plant.__name__ = f"no_barrier_in_{name}"
  return plant
def a_ring_of_two(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaHalvesTile, "ring", 2)
def copies_not_awaited(m:pytest.MonkeyPatch) -> None: m.setattr(nvidia, "wait_copies", lambda after, but: nvidia.commit(after))
def copies_of_another_tile(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaHalves, "next", lambda next_: lambda self, place: next_(self, next_(self, place)))
def operand_overwritten(m:pytest.MonkeyPatch) -> None:
  m.setattr(WgmmaHalvesTrip, "add_half", lambda self, s, operand: s.store(store_all(s.p, operand)))
def no_products_of_the_last_tile(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaHalves, "walk", WgmmaBackward.walk)
def each_half_its_own_p(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaHalvesTrip, "share", lambda share: lambda self, s, weights: (share(self, s, weights)[0], weights))
def p_of_the_second_half(m:pytest.MonkeyPatch) -> None:
  def put(to:UOp, value:UOp, gate:UOp) -> UOp: return nvidia.put(to, value, gate.logical_not())
  m.setattr(gradients_in_halves, "nv", type("faulty", (), {**vars(nvidia), "put": staticmethod(put)}))
def lse_in_both_halves(m:pytest.MonkeyPatch) -> None: m.setattr(WgmmaHalvesTrip, "numbers", lambda self, s: self.query_values(s, 0))
def gradients_swapped(m:pytest.MonkeyPatch) -> None:
  def stores(self:HalfRows, accs:Any, name:str, own:list[Row], known:Any) -> list[UOp]:
    mine = self.half.eq(("dk", "dv").index(name))
    return WarpRows.stores(self, accs, name, [replace(row, there=row.there & mine) for row in own], known)
  m.setattr(HalfRows, "stores", stores)
def q_in_both_halves(m:pytest.MonkeyPatch) -> None:
  wrong(m, WgmmaHalves, "of_half", lambda of: lambda self, names, half, place: of(self, names, UOp.const(0) if names[0] == "q" else half, place))
def rows_of_another_warpgroup(m:pytest.MonkeyPatch) -> None:
  m.setattr(HalfRows, "in_block", property(lambda self: [self.warps.at.wave*self.mat.M]))

@pytest.mark.sample(3)
@pytest.mark.parametrize("plant, error, text", (
  (without_barrier(WgmmaHalvesTrip, "start"), LdsRace, "with no barrier between"),
  (without_barrier(WgmmaHalves, "arrived"), LdsRace, "with no barrier between"),
  (a_ring_of_two, LdsRace, "with no barrier between"),
  *((plant, NotWaitedFor, "was not waited for") for plant in (copies_not_awaited, operand_overwritten)),
  (copies_of_another_tile, UninitialisedRead, "nobody has written"), (no_products_of_the_last_tile, AssertionError, "dk: "),
  *((plant, AssertionError, "dk: ") for plant in (each_half_its_own_p, p_of_the_second_half, lse_in_both_halves, gradients_swapped)),
  (q_in_both_halves, AssertionError, "d[kv]: "), (rows_of_another_warpgroup, UnwrittenOutput, "was never written")))
@pytest.mark.usefixtures("without_places")
def test_planted_fault_in_halves(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], error:type[Exception],
                               text:str) -> None:
  plant(monkeypatch)
  with pytest.raises(error, match=text): check_backward_kernels("sm_90", H=1, Sq=350, Sk=70, D=136, only="dkdv", tiles=shares)

WITHOUT_SPILLS: dict[str, dict[str, Any]] = {
  "full": {}, "causal": dict(causal=True, dtype="float16", Hkv=2), "window": dict(Sq=4000, Sk=4000, window=(500, 300)), "D 192": dict(D=192),
  "kv_lengths": dict(Sk=4000, causal=True, extras=dict(kv_lengths=ints(9, 4000))),
  "slopes": dict(Hkv=8, causal=True, extras=dict(alibi_slopes=floats(16)**2)),
  "packed": dict(B=1, layout="thd", Sq=8192, Sk=8192, max_seqlen_q=4096, max_seqlen_k=4096, causal=True,
                 extras=dict(cu_seqlens_q=ints(0, 4096, 8192), cu_seqlens_k=ints(0, 4096, 8192))),
  "mask_mod": dict(causal=True, **functions_of(None, lambda b, h, i, j: ((i - j) % 4).eq(0), ()))}

@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
@pytest.mark.parametrize("case", [x if x == "causal" else pytest.param(x, marks=pytest.mark.thorough) for x in WITHOUT_SPILLS])
def test_kernel_in_halves_compiles_without_spills(case:str, tmp_path:Path) -> None:
  p, on = problem(**{**dict(B=2, H=16, Sq=4096, Sk=4096, D=256, dtype="bfloat16"), **WITHOUT_SPILLS[case]}), get_chip("sm_90")
  text = compiled_by_nvcc("sm_90", dkdv_arguments(p), dkdv_of(p, on, shares(tiles_of(p, on)[1])), tmp_path)
  assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in text and "serialized" not in text, text

@pytest.mark.parametrize("given", (
  dict(D=128), dict(Dv=64), dict(softcap=3.0), dict(dropout_p=0.1, extras=dict(dropout_seed=np.array([1, 2], np.uint32))),
  dict(extras=dict(bias=floats(1, 2, 512, 512)))))
def test_problems_that_have_no_kernel_in_halves(given:dict[str, Any]) -> None:
  p = problem(**{**dict(H=2, Sq=512, Sk=512, D=256, dtype="bfloat16"), **given})
  assert not isinstance(tiles_of(p, get_chip("sm_90"))[1], WgmmaHalvesTile)
