"""Tests of dual_wave, a forward kernel of CDNA4 in which two groups of waves take turns. The results agree with float64, and the emulator finds a
missing wait or barrier."""
from __future__ import annotations
import pytest
from attn.chips import get_chip
from attn.choose.dispatch import choose
from attn.choose.tiles import dual_wave_tile
from attn.emulator.checks import LdsRace, NotWaitedFor
from attn.kernels import dual_wave
from attn.ops import amd
from cases import check_kernel, normal, problem
from test_forward import ADVERSARIAL, huge_key

GFX950 = get_chip("gfx950")

def check(make=normal, **parameters) -> None:
  p = problem(D=128, **parameters)
  check_kernel(dual_wave.dual_wave(p, GFX950, dual_wave_tile(p, GFX950)), p, make(p), "gfx950")

CASES = {
  "whole tiles": dict(H=1, Sq=256, Sk=256), "an odd number of tiles": dict(H=1, Sq=256, Sk=192, dtype="bfloat16"), "one key": dict(H=2, Sq=3, Sk=1),
  "odd lengths": dict(H=2, Sq=100, Sk=333, dtype="bfloat16"), "grouped heads": dict(B=2, H=6, Hkv=2, Sq=70, Sk=130, layout="bshd"),
  "fp32 out": dict(H=1, Sq=256, Sk=520, out_dtype="float32"), "causal": dict(H=1, Sq=300, causal=True),
  "causal, more keys": dict(H=2, Sq=150, Sk=500, causal=True),
  "causal, rows that see nothing": dict(H=1, Sq=300, Sk=40, causal=True, dtype="bfloat16"),
  "causal top-left": dict(H=1, Sq=400, Sk=150, causal="top-left"),
  "nsd": dict(B=1, H=3, Sq=40, Sk=70, layout="nsd"), "right window": dict(H=1, Sq=300, window=(-1, 20)),
}

@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES)
def test_contract(case:str) -> None: check(**CASES[case])

@pytest.mark.sample(3)
@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda f: f.__name__)
def test_adversarial(make) -> None: check(make, H=2, Sq=70, Sk=400, dtype="bfloat16" if make is huge_key else "float16")

# ***** the pipeline's order *****

@pytest.mark.usefixtures("without_places")
def test_loads_waited_for_too_little(monkeypatch) -> None:
  monkeypatch.setattr(dual_wave, "BEHIND", dual_wave.BEHIND + 1)
  with pytest.raises(NotWaitedFor, match=r"attn_dual_wave.*reads lds"): check(H=1, Sq=256, Sk=512)

@pytest.mark.sample(2)
@pytest.mark.parametrize("left_out", (3, 4, 5, 6))
@pytest.mark.usefixtures("without_places")
def test_a_barrier_left_out(monkeypatch, left_out:int) -> None:
  # The dual_wave kernel needs every barrier: if one is left out, the emulator reports a race. The kernel has two barriers before the loop over tiles,
  # and four in the loop for each tile.
  count, barrier = iter(range(10**6)), amd.barrier
  monkeypatch.setattr(amd, "barrier", lambda *done: amd.sched_barrier(*done) if next(count) == left_out else barrier(*done))
  with pytest.raises(LdsRace): check(H=1, Sq=256, Sk=768)

def test_dispatch() -> None:
  plain = {"B": 4, "H": 32, "Sq": 4096, "D": 128, "dtype": "bfloat16", "causal": True, "lse": False}
  p = problem(**plain)
  assert choose(p, GFX950).kernel == "dual_wave" == choose(problem(**plain | {"causal": False, "lse": True}), GFX950).kernel
  for change, why in (({"D": 64}, "D=64"), ({"Sq": 100}, "compute units idle"), ({"window": (64, 0), "causal": False}, "window"),
                      ({"lse": True}, "an lse, and a mask"),
                      ({"causal": False, "lse": True, "Sk": 4000}, "no multiple of 128")):
    other = problem(**plain | change)
    assert why in (choose(other, GFX950).why_not("dual_wave") or "")
  assert "gfx942" in (choose(p, get_chip("gfx942")).why_not("dual_wave") or "")
