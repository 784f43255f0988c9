"""Tests of test/night.py, and with it: a few random calls with fixed seeds by default, many more with `-m thorough`."""
from __future__ import annotations
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
import night
from night import Outcome, drawn, run
from night_draw import CHIPS, DrawnCall
from night_oracle import Facts, hold
from night_script import base, on, turned_back, view
from attn.tinygrad_compat import AddrSpace, AxisType, KernelInfo, Tensor, UOp, dtypes

def emulated_seeds(first:int, count:int) -> list[int]:
  # Returns the first `count` seeds, counting from `first`, whose random calls run on emulated chips.
  return [seed for seed in range(first, first + 3*count) if drawn(seed).on in CHIPS][:count]

CHEAP = (1003, 1004)     # each takes about a second

@pytest.mark.parametrize("seed", [*CHEAP, *(pytest.param(n, marks=pytest.mark.thorough) for n in emulated_seeds(200, 100))])
def test_a_call(seed:int) -> None:
  outcome = run(drawn(seed))
  assert outcome.state != "failed", f"{outcome.why}\n{drawn(seed).script}"

def test_a_seed_is_a_call() -> None:
  assert drawn(5) == drawn(5) and drawn(5).script != drawn(6).script
  assert all(drawn(seed, "gfx942").on == "gfx942" for seed in range(9))

def test_views_have_the_numbers_of_their_array() -> None:
  for seed in range(40):
    p, a = DrawnCall(random.Random(seed), "CPU", False), np.random.default_rng(seed).standard_normal((2, 3, 4, 5)).astype(np.float32)
    steps = p.steps("q", a.shape, "float32")
    np.testing.assert_array_equal(view(Tensor(base(a, *steps), device="PYTHON"), *steps).numpy(), a, err_msg=str(steps))

def test_rows_before_a_rotary_embedding() -> None:
  # `turned_back` inverts a rotary embedding: rotating its rows by the angles, with pairs of columns as complex numbers, gives the original rows.
  rng = np.random.default_rng(0)
  a, quarters, at = rng.standard_normal((2, 3, 4, 8)).astype(np.float32), rng.integers(4, size=(9, 3)), (5, 2)
  for interleaved, moving in ((True, True), (False, True), (True, False)):
    back = turned_back(a, quarters, at, interleaved, moving)
    first, second = ([0, 2, 4], [1, 3, 5]) if interleaved else ([0, 1, 2], [3, 4, 5])
    places = np.array([[start + j*moving for j in range(4)] for start in at])
    turned = (back[..., first] + 1j*back[..., second])*1j**quarters[places][:, None]
    np.testing.assert_allclose(turned, a[..., first] + 1j*a[..., second], atol=1e-6)
    np.testing.assert_array_equal(back[..., 6:], a[..., 6:])

# ***** what counts as a failure *****

def changed(call:Any, line:str) -> Any:
  # Returns a copy of a random call whose script ends in the additional code `line`.
  return night.Call(call.seed, call.on, call.direction, call.kind, call.script + line, call.facts)

def a_right_call() -> Any:
  return next(call for seed in range(100, 200) if (call := drawn(seed, "gfx942")).kind == "dense" and run(call).state == "right")

def test_wrong_numbers_and_errors_are_failures() -> None:
  call = a_right_call()
  name = call.facts.wanted[0]
  for line, state, why in ((f"found[{name!r}].flat[0] += 1", "failed", name), (f"found[{name!r}].flat[0] = np.nan", "failed", "NaN pattern differs"),
                           (f"found[{name!r}] = found[{name!r}][:0]", "failed", "has shape"), ("{}[0]", "failed", "KeyError"),
                           ("raise ValueError('mine')", "failed", "ValueError of a stranger"), ("assert False", "failed", "AssertionError"),
                           ("attn.attention(None, None, None)", "refused", "q=None")):
    outcome = run(changed(call, line + "\n"))
    assert outcome.state == state and why in outcome.why, outcome

def with_values(*of:float) -> dict[str, np.ndarray]:
  # Returns the arrays of a call in which both rows of v have the numbers `of` and all weights are equal, so that o is `of`, too.
  q, v = np.zeros((1, 1, 2, 2), np.float32), np.float32([[[of, of]]])
  return {"q": q, "k": q, "v": v}

def test_small_numbers_where_float16_is_emulated() -> None:
  # The check of random calls accepts 0 in place of 3e-5 in float16, if tinygrad may emulate float16 on the device: the emulation reads and writes
  # 3e-5 as 0. The check refuses 0 on other devices and in place of larger numbers.
  small = float(np.float16(3e-5))
  f, x = Facts("float16", "float16", 1.0, ("o",), emulates=True), with_values(small, 1.0)
  def held(f:Facts, *of:float) -> bool: return not hold(x, f, {"o": with_values(*of)["v"]})
  assert held(f, 0, 1) and held(f, small, 1) and held(replace(f, emulates=False), small, 1)
  assert not held(replace(f, emulates=False), 0, 1) and not held(replace(f, out_dtype="float32"), 2*small, 1) and not held(f, 0, 0)
  assert held(replace(f, out_dtype="float32"), 0, 1)                       # v was read as 0
  assert not held(replace(f, dtype="bfloat16", out_dtype="bfloat16"), 0, 1)

def test_v_has_no_gradient_through_lse() -> None:
  # lse does not depend on v, so the check of random calls expects the gradient 0 for v if the loss uses only lse. It also accepts NaN if weights are
  # NaN, because a kernel may multiply them by 0. If the loss also uses o, it accepts only NaN there.
  f, x = Facts("float16", "float16", 1.0, ("v",)), with_values(1.0, 2.0)
  x |= {"q": np.full_like(x["q"], np.nan), "dlse": np.ones((1, 1, 2), np.float32)}
  nothing, unknown, wrong = (np.full_like(x["v"], n) for n in (0, np.nan, 1))
  assert not hold(x, f, {"v": nothing}) and not hold(x, f, {"v": unknown}) and hold(x, f, {"v": wrong})
  assert hold(x | {"do": x["v"]}, f, {"v": nothing})

def dies(call:Any) -> Outcome: os.abort()
def hangs(call:Any) -> Outcome: time.sleep(100)    # type: ignore[return-value]

@pytest.mark.parametrize("does, why", ((dies, "the process ended with -6"), (hangs, "no end after 2 s")))
def test_a_crash_and_a_call_that_hangs_have_a_seed(does:Any, why:str) -> None:
  worker = night.Worker(2.0 if does is hangs else 60.0, does)
  assert worker.run(7, "") == Outcome(7, "failed", why, worker.limit) and worker.process is None

# ***** memory that a kernel on a CPU must not touch *****

def of_a_number(o:UOp, x:UOp) -> UOp:
  # Test kernel that reads element x[x[0]].
  return o[0].store(x[x[0].load().cast(dtypes.int)].load()).sink(arg=KernelInfo("of_a_number", opts_to_apply=()))

def of_its_own(o:UOp, x:UOp) -> UOp:
  # Test kernel that copies x into a private array of eight elements, and reads element x[0] of this array.
  own, i = UOp.placeholder((8,), dtypes.float, 3, AddrSpace.REG), UOp.range(8, 0, AxisType.LOOP)
  filled = own.after(own[i].store(x[i].load()).end(i))
  return o[0].store(filled[x[0].load().cast(dtypes.int)].load()).sink(arg=KernelInfo("of_its_own", opts_to_apply=()))

BEYOND = {"end": (of_a_number, 8, -signal.SIGSEGV), "begin": (of_a_number, -1, -signal.SIGSEGV), "array": (of_its_own, 8, -signal.SIGILL)}

def reads(call:Any) -> Outcome:
  # Runs a kernel of the table BEYOND that reads element 7 of an array of eight, or, if `call.seed` is 1, an element outside.
  with on("CPU", guard="begin" if call.on == "begin" else "end"):
    x = Tensor(np.full(8, BEYOND[call.on][1] if call.seed else 7, np.float32), device="CPU").realize()
    return Outcome(call.seed, str(Tensor.empty(8, device="CPU").custom_kernel(x, fxn=BEYOND[call.on][0])[0].numpy()[0]))

@pytest.mark.thorough
@pytest.mark.parametrize("where", BEYOND)
def test_a_kernel_on_a_cpu_that_goes_too_far_dies(monkeypatch:pytest.MonkeyPatch, tmp_path:Path, where:str) -> None:
  pytest.importorskip("ziglang")
  for name, value in {**night.SETTINGS, "CACHEDB": str(tmp_path/"cache.db"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}.items():
    monkeypatch.setenv(name, value)
  worker = night.Worker(200.0, reads)
  assert worker.run(0, where).state == "7.0"
  assert worker.run(1, where).why == f"the process ended with {BEYOND[where][2]}"
  worker.stop()
