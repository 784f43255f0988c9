"""Tests of the measurement programs of attn/measure without a GPU: which problems they measure, how often, and with which other libraries they
compare."""
from __future__ import annotations
import importlib.util, itertools, json, os, subprocess, sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
import numpy as np
import pytest
from attn import attention
from attn.choose.dispatch import choose, single_kernel
from attn.chips import get_chip
from attn.functions.trace import functions_of
from attn.measure import at_once, inputs, later_calls, latency, machine, short
from attn.measure.backward import computed_gradients, launches_of_call, outputs_of
from attn.measure.latency import FIRST_CALLS, FirstCall
from attn.measure.inputs import NUMBERS_DRAWN, normal_numbers
from attn.measure.rounds import GRAPH_LAUNCHES, ROUND_SECONDS, ROUNDS, in_turn, timed_rounds
from attn.reference import rounded
from attn.tinygrad_compat import Context, Device, GlobalCounters, Tensor, realize_counters
from api_cases import emulated, lists
from cases import problem

@pytest.mark.parametrize("documents", (False, pytest.param(True, marks=pytest.mark.thorough)))
def test_ways_of_backward_give_the_same_gradients(documents:bool) -> None:
  # attn.measure.at_once compares three ways to compute gradients: by two kernels, by one kernel that adds to dq in no order, and by one kernel that
  # adds to dq in a fixed order. All three give the same gradients up to rounding, also with a mask_mod, where the kernels loop over lists of tiles.
  numbers = np.arange(128, dtype=np.int32)//60
  traced = functions_of(None, lambda b, h, i, j, n: n[i].eq(n[j]), (((128,), "int32"),)) if documents else {"causal": "top-left"}
  p = problem(H=2, Sq=100, Sk=128, D=64, dtype="float16", extras={"mod_tensor0": numbers} if documents else {}, **traced)
  with emulated("sm_90"), lists(documents):
    have = {name: Tensor.randn(1, 2, rows, 64, device="EMU").half().realize() for name, rows in (("q", 100), ("k", 128), ("v", 128), ("do", 100))}
    if documents: have["mod_tensor0"] = Tensor(numbers, device="EMU").realize()
    arch = get_chip("sm_90")
    have |= {name: t.realize() for name, t in outputs_of(p.shapes, single_kernel(p, arch)[0], have).items()}
    ways = [at_once.launches_of(p, arch, way) for way in (at_once.TWO, at_once.NO_ORDER, at_once.IN_ORDER)]
    found = [computed_gradients(x, have) for x in ways]
    for x in found: Tensor.realize(*x.values())
    two, *others = [{name: t.float().numpy() for name, t in x.items()} for x in found]
  assert [len(x) for x in ways] == [2, 3, 3] and ["dq_turns" in x[1][0].shapes for x in ways] == [False, False, True]
  assert [[lists is not None for _, lists in x] for x in ways] == [[documents]*2, *[[False, documents, False]]*2]
  for other in others:
    for name, x in two.items(): np.testing.assert_allclose(other[name], x, atol=5e-3*np.abs(x).max())

@pytest.mark.parametrize("rows,names", ((100, ["dq", "dkdv"]), (64, ["few"])))
def test_the_timed_launches_are_those_of_a_call(rows:int, names:list[str]) -> None:
  # attn.measure.backward times the launches that the gradients of a call of attention run: both give the same bits.
  keys = 100 if rows == 100 else 2**15
  p, arch = problem(H=8, Sq=rows, Sk=keys, D=64, dtype="float16"), get_chip("sm_90")
  launches = launches_of_call(p, arch)
  assert list(launches) == names
  if names == ["few"]: return      # too large for the emulator
  with emulated("sm_90"):
    have = {name: Tensor.randn(1, 8, n, 64, device="EMU").half().realize() for name, n in (("q", rows), ("k", keys), ("v", keys), ("do", rows))}
    with Context(TRAINING=1): o = attention(have["q"], have["k"], have["v"])
    of_call = o.gradient(have["q"], have["k"], have["v"], gradient=have["do"])
    have |= {name: t.realize() for name, t in outputs_of(p.shapes, single_kernel(p, arch)[0], have).items()}
    timed = computed_gradients([(x, None) for x in launches.values()], have)
    Tensor.realize(*of_call, *timed.values())
    for one, other in zip(of_call, timed.values()): np.testing.assert_array_equal(one.numpy(), other.numpy())

def test_rows_of_ways_have_the_options_that_they_name() -> None:
  # attn.measure.at_once measures a list of problems. The name of each problem says its options, and the problem has exactly these options and their
  # tensors.
  rows = at_once.rows_of_ways([])
  assert len({row.name for row in rows}) == len(rows) and len(at_once.rows_of_ways(["packed", "32/8"])) == 2
  for row in rows:
    p = row.p
    for word, there in (("dropout", p.dropout_p), ("packed", p.varlen), ("softcap", p.softcap), ("ALiBi", p.alibi), ("causal", p.window == (-1, 0)),
                        ("window", p.window[0] >= 0)): assert (word in row.told) == bool(there), row.name
    assert {name: x.shape for name, x in row.extras.items()} == {name: shape for name, (shape, _) in p.extras.items()}, row.name
  packed = at_once.rows_of_ways(["packed"])[0].p
  with emulated("sm_90"):
    x = Tensor(np.arange(120.0).reshape(2, 3, 4, 5), device="EMU").realize()
    np.testing.assert_array_equal(at_once.as_laid(x, packed).numpy(), x.numpy().swapaxes(1, 2).reshape(8, 3, 5))

def test_first_calls_are_timed() -> None:
  # attn.measure.latency times a first call, here on the emulator. For the time of the call it replaces a method of the compiler, to measure how long
  # compiling takes; afterwards the compiler has its own method again.
  with Context(DEV="EMU::gfx942"):
    compiler = Device["EMU"].renderer.compiler
    found = latency.first_call(FirstCall(1, 2, 1, 33, 40, 16, True))
    alone = latency.first_call(FirstCall(1, 2, 1, 33, 40, 16, False, True, "documents", True))
  for x in (found, alone): assert 0 < x["compiling"] < x["seconds"] and "compile" not in vars(compiler)
  assert len({str(row) for row in FIRST_CALLS}) == len(FIRST_CALLS) and any(row.backward for row in FIRST_CALLS)

def test_later_calls_are_timed(capsys) -> None:
  # attn.measure.later_calls times calls and their gradients on the host without launching a kernel. It also times tinygrad's own attention, if
  # tinygrad has the options of the call.
  rows = {row.name: row for row in later_calls.LATER_CALLS}
  assert len(rows) == len(later_calls.LATER_CALLS)
  with Context(DEV="EMU::gfx942"):
    realize_counters()      # other tests may have left draws of random numbers that are not computed yet
    GlobalCounters.reset()
    full = later_calls.later_call(rows["full"], calls=1)
    assert not GlobalCounters.kernel_count
    pages = later_calls.later_call(rows["decode, pages"], calls=1)
    shared = later_calls.later_call(rows["rows on two devices, zigzag"], calls=1)
    later_calls.main(["no row"])
  columns = {f"{name}{gradients}" for name in ("call", "scheduled") for gradients in ("", " with gradients")}
  assert set(full) == columns | {f"tinygrad's {name}" for name in columns} and set(pages) == {"call", "scheduled"}
  assert set(shared) == columns and all(x > 0 for x in (full | pages | shared).values())
  assert not capsys.readouterr().out

def test_first_calls_have_empty_caches(monkeypatch, capsys) -> None:
  # attn.measure.latency starts two processes in each run. The two share caches that are new and empty.
  seen = []
  def run(command:list[str], env:dict[str, str], **kwargs:object) -> SimpleNamespace:
    row, caches = FirstCall(**json.loads(command[-1])), [env[name] for name in ("XDG_CACHE_HOME", "CACHEDB", "CUDA_CACHE_PATH")]
    assert command[:4] == [sys.executable, "-m", "attn.measure.latency", "--here"] and str(row) == "(1, 32 on 8, 1 x 2048, 128)"
    seen.append(caches)
    return SimpleNamespace(returncode=0, stdout=f"noise\n{json.dumps({'seconds': float(len(seen)), 'compiling': 0.5})}", stderr="")
  monkeypatch.setattr(subprocess, "run", run)
  latency.main(["32 on 8", "2048"])
  assert seen[0] == seen[1] and seen[2] == seen[3] and len({x for caches in seen for x in caches}) == 3*latency.RUNS
  assert capsys.readouterr().out == "row (1, 32 on 8, 1 x 2048, 128) | first s 3 | compiling s 0.5 | second s 4 | first 1 3 5 | second 2 4 6\n"
  monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: SimpleNamespace(returncode=1, stdout="", stderr="what was wrong"))
  with pytest.raises(RuntimeError, match="what was wrong"): latency.main(["32 on 8", "2048"])

def test_launches_of_a_tinyjit(monkeypatch) -> None:
  # The timer of attn.measure.short runs attention under TinyJit, `steps` times in each of TinyJit's first two calls. Every run writes the same output
  # tensor.
  calls = []
  monkeypatch.setattr(short, "attention", lambda *args, **options: calls.append(options) or attention(*args, **options))
  rng = np.random.default_rng(0)
  with Context(DEV="EMU::sm_80"):
    q, k, v = (Tensor(rng.standard_normal((1, 1, n, 16)).astype(np.float16), device="EMU").realize() for n in (20, 33, 33))
    timer, out = short.jit_timer(q, k, v, False, steps=3)
    assert 0 < timer() < 60 and len(calls) == 6 and all(options["out"] is out for options in calls)
    np.testing.assert_array_equal(out.numpy(), attention(q, k, v).numpy())

def test_short_rows() -> None:
  # The wgmma kernel computes every problem in attn.measure.short's table of short sequences. The problems have a causal mask or no mask, so PyTorch
  # can compute the same.
  for row in short.SHORT_ROWS:
    assert choose(row.problem, get_chip("sm_90")).kernel == "forward_wgmma" and (row.causal or row.problem.window == (-1, -1))
  assert len({str(row) for row in short.SHORT_ROWS}) == 8

def test_peers_take_turns() -> None:
  # `in_turn` measures kernels of several libraries in rounds. Each library runs once in a round, in another order in each round, and its median time
  # counts.
  called = list[str]()
  def timer(name:str, *seconds:float) -> Callable[[], float]:
    left = iter(seconds)
    return lambda: called.append(name) or next(left)
  assert in_turn({"a": timer("a", 5, 1, 9, 2, 3), "b": timer("b", 1, 1, 1, 1, 8), "c": timer("c", *range(5))}) == {"a": 3, "b": 1, "c": 2}
  rounds = ["".join(called[i:i + 3]) for i in range(0, 15, 3)]
  assert all(sorted(order) == ["a", "b", "c"] for order in rounds) and {order[0] for order in rounds} == {"a", "b", "c"}
  behind = list(itertools.pairwise(called))
  assert {("b", "a"), ("c", "a"), ("a", "b"), ("c", "b"), ("a", "c"), ("b", "c")} <= set(behind)

NEEDS = {"decode": "needs torch, and an NVIDIA GPU", "backward": "needs torch, and an NVIDIA GPU", "short": "needs torch, and an NVIDIA GPU",
         "context": "needs a GPU", "latency": "needs a GPU",
         "functions": "needs torch, and an NVIDIA GPU", "later_calls": "needs a device", "peers": "FILE.csv PICTURE.png TITLE",
         "at_once": "needs torch, and an NVIDIA GPU", "rounding": "needs a device", "eight_bits": "needs a GPU"}

def test_the_needs_of_every_program_are_here() -> None:
  programs = {file.stem for file in Path(machine.__file__).parent.glob("*.py") if 'if __name__ == "__main__"' in file.read_text()}
  assert programs - {"sanitize"} == NEEDS.keys()      # sanitize: test_sanitize.py

@pytest.mark.sample(5)
@pytest.mark.parametrize("program", NEEDS)
def test_a_program_says_what_it_needs(program:str) -> None:
  # A measurement on a machine without a GPU ends in one sentence and not in a traceback.
  if NEEDS[program].startswith("needs torch") and importlib.util.find_spec("torch") is not None: pytest.skip("torch is here")
  env = {**os.environ, "DEV": "CUDA", "CUDA_PATH": "/nothing"} if "peers" not in program else dict(os.environ)
  if "CUDA" in env.get("DEV", "") and cuda_is_there(): pytest.skip("a GPU is here")
  done = subprocess.run([sys.executable, "-m", f"attn.measure.{program}"], capture_output=True, text=True, env=env)
  assert done.returncode == 1 and NEEDS[program] in done.stderr and "Traceback" not in done.stderr

def cuda_is_there() -> bool:
  try: return bool(Device["CUDA"])
  except Exception: return False

def test_timed_rounds_fill_their_time() -> None:
  # `timed_rounds` measures in rounds of a fixed length: a round has as many runs as fill it. Something that takes longer than a round runs once.
  asked: list[int] = []
  def seconds(each:float) -> Callable[[int], float]:
    def run(count:int) -> float:
      asked.append(count)
      return each
    return run
  assert timed_rounds(seconds(ROUND_SECONDS/7)) == (7, (ROUND_SECONDS/7,)*ROUNDS) and asked == [1]*4 + [7]*ROUNDS
  asked.clear()
  assert timed_rounds(seconds(2*ROUND_SECONDS)) == (1, (2*ROUND_SECONDS,)) and asked == [1]
  assert timed_rounds(seconds(1e-5))[0] > GRAPH_LAUNCHES

def test_random_numbers_repeat_but_heads_differ(monkeypatch:pytest.MonkeyPatch) -> None:
  small = normal_numbers(np.random.default_rng(1), (2, 3, 5, 7), "float16")
  np.testing.assert_array_equal(small, rounded(np.random.default_rng(1).standard_normal((2, 3, 5, 7), np.float32), "float16"))
  monkeypatch.setattr(inputs, "NUMBERS_DRAWN", 1021)
  large = normal_numbers(np.random.default_rng(1), (2, 4, 16, 64), "bfloat16")
  assert len(np.unique(large)) <= 1021 and all(abs(np.corrcoef(large[0, 0].ravel(), x.ravel())[0, 1]) < 0.2 for x in large.reshape(8, -1)[1:])
  assert all(NUMBERS_DRAWN % n for n in range(2, 4097))
