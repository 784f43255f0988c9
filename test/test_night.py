"""Calls at random, of test/night.py: a few by default, whose seeds stay the same, and more among the thorough ones; and what a night notices."""
from __future__ import annotations
import os, random, time
from typing import Any
import numpy as np
import pytest
import night
from night import Outcome, drawn, run
from night_draw import CHIPS, Posed
from night_script import base, view
from attn.tinygrad_compat import Tensor

def emulated_seeds(first:int, count:int) -> list[int]:
  """The first seeds from there on whose calls run on emulated chips."""
  return [seed for seed in range(first, first + 3*count) if drawn(seed).on in CHIPS][:count]

CHEAP = (1003, 1004)     # of a second or so each

@pytest.mark.parametrize("seed", [*CHEAP, *(pytest.param(n, marks=pytest.mark.thorough) for n in emulated_seeds(200, 100))])
def test_a_call(seed:int) -> None:
  outcome = run(drawn(seed))
  assert outcome.state != "failed", f"{outcome.why}\n{drawn(seed).script}"

def test_a_seed_is_a_call() -> None:
  assert drawn(5) == drawn(5) and drawn(5).script != drawn(6).script
  assert all(drawn(seed, "gfx942").on == "gfx942" for seed in range(9))

def test_views_have_the_numbers_of_their_array() -> None:
  for seed in range(40):
    p, a = Posed(random.Random(seed), "CPU", False), np.random.default_rng(seed).standard_normal((2, 3, 4, 5)).astype(np.float32)
    steps = p.steps("q", a.shape, "float32")
    np.testing.assert_array_equal(view(Tensor(base(a, *steps), device="PYTHON"), *steps).numpy(), a, err_msg=str(steps))

# ***** what a night notices *****

def changed(call:Any, line:str) -> Any:
  """A call whose script has one more line."""
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

def dies(call:Any) -> Outcome: os.abort()
def hangs(call:Any) -> Outcome: time.sleep(100)    # type: ignore[return-value]

@pytest.mark.parametrize("does, why", ((dies, "the process ended with -6"), (hangs, "no end after 2 s")))
def test_a_crash_and_a_call_that_hangs_have_a_seed(does:Any, why:str) -> None:
  worker = night.Worker(2.0 if does is hangs else 60.0, does)
  assert worker.run(7, "") == Outcome(7, "failed", why, worker.limit) and worker.process is None
