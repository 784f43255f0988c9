"""Tests of bench.py from the outside: its output, its exit status, and one clear line for a bad setting."""
import csv, os, re, subprocess, sys
from collections.abc import Callable, Iterator
from pathlib import Path
import numpy as np
import pytest
import bench
from attn.measure import backward, verdicts
from attn.problem import Problem
from attn.reference import exact
from attn.tinygrad_compat import Context

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = {"DEV": "EMU::gfx942", "H": "2", "N": "64", "D": "32"}
CLEAN = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "TMPDIR", "LANG", "VIRTUAL_ENV", "XDG_CACHE_HOME")}

def run(*program:str, **settings:str) -> subprocess.CompletedProcess[str]:
  return subprocess.run([sys.executable, *(program or ["bench.py"])], capture_output=True, text=True, timeout=120, cwd=ROOT, env=CLEAN | settings)

@pytest.fixture
def bench_here(monkeypatch:pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
  # Returns a function that runs bench.py with the given settings in this process, and returns the exit status.
  monkeypatch.setattr(bench, "find_device", lambda: os.environ["DEV"])
  def with_settings(**settings:str) -> int:
    for name, value in settings.items(): monkeypatch.setenv(name, value)
    bench.getenv.cache_clear()
    return bench.main()
  yield with_settings
  monkeypatch.undo()
  bench.getenv.cache_clear()

def rows(path:Path) -> list[dict[str, str]]:
  with path.open() as f: return list(csv.DictReader(f))

def test_without_settings() -> None:
  # bench.py without settings on a machine without a GPU reports this, emulates gfx942, and checks the results.
  result = run()
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith("no DEV is set and no AMD GPU was found: emulating one, DEV=EMU::gfx942\n") or "TFLOP/s" in result.stdout
  assert re.search(r"gfx942 .*128x32 4 waves.*100%.* ok ", result.stdout) and "emulated s" in result.stdout and "limit" in result.stdout

@pytest.mark.parametrize(("settings", "shape", "tile"), [
  ({"DEV": "EMU::gfx950", "DTYPE": "bf16", "CAUSAL": "1", "HKV": "1", "LSE": "1"}, "B1 H2/1 64x64 D32 bfloat16 bhsd causal lse", "32x32x16"),
  ({"DEV": "EMU::gfx1100", "LAYOUT": "bshd", "SK": "99", "OUT_DTYPE": "float"}, "B1 H2 64x99 D32 float16->float32 bshd", "16x16x16"),
  ({"DEV": "EMU::gfx1201", "LAYOUT": "nsd", "B": "2", "DV": "48", "CAUSAL": "top-left", "SEED": "3", "LSE": "1"},
   "B2 H2 64x64 D32/48 float16 nsd causal top-left lse", "16x16x16"),
  ({"WINDOW": "16,-1", "CNT": "2", "VERIFY": "2"}, "B1 H2 64x64 D32 float16 bhsd window 16,-1", "32x32x8"),
])
def test_settings(bench_here:Callable[..., int], settings:dict[str, str], shape:str, tile:str, tmp_path:Path) -> None:
  assert bench_here(**SMALL | settings, CSV=str(tmp_path/"table.csv")) == 0
  row, = rows(tmp_path/"table.csv")
  assert row["shape"] == shape and tile in row["tile"] and row["verdict"] == "ok" and 0 < float(row["error"]) <= float(row["limit"])
  assert float(row["lowering s"]) > 0 and float(row["emulated s"]) > 0

@pytest.mark.parametrize("settings", (
  {"HKV": "1", "CAUSAL": "1", "DTYPE": "bf16"}, {"DEV": "EMU::gfx1201", "OUT_DTYPE": "float", "LAYOUT": "bshd", "SK": "40", "DV": "48"}))
def test_backward(bench_here:Callable[..., int], settings:dict[str, str], tmp_path:Path, capsys:pytest.CaptureFixture[str]) -> None:
  assert bench_here(**SMALL | settings, BWD="1", CSV=str(tmp_path/"table.csv")) == 0
  assert "flash attention backward" in capsys.readouterr().out
  row, = rows(tmp_path/"table.csv")
  assert row["verdict"] == "ok" and 0 < float(row["error"]) <= float(row["limit"]) and row["tiles"].count("waves") == 2
  assert row["heads checked"] == "100%"

def test_sweep_shows_progress(bench_here:Callable[..., int], tmp_path:Path, capsys:pytest.CaptureFixture[str]) -> None:
  # bench.py with SWEEP=1 runs every shape of its list, writes a row for each shape to a CSV file, and shows its progress.
  assert bench_here(**SMALL, SWEEP="1", CSV=str(tmp_path/"table.csv"), VERIFY="0", HKV="1", CAUSAL="0", DTYPE="half", OUT_DTYPE="half",
                    WINDOW="-1,-1", SK="64") == 0
  assert len(rows(tmp_path/"table.csv")) == len(bench.SWEEP) and f"{len(bench.SWEEP)}/{len(bench.SWEEP)}" in capsys.readouterr().err

def test_bounds(bench_here:Callable[..., int], capsys:pytest.CaptureFixture[str]) -> None:
  pytest.importorskip("ziglang")
  assert bench_here(**SMALL | {"DEV": "EMU::gfx1201", "D": "64"}, ISA="1") == 0
  said = capsys.readouterr().out
  assert "bound, not measured" in said and "RX 9070 XT" in said and "overlap" in said

@pytest.mark.parametrize(("settings", "line"), [
  ({"B": "x"}, "B='x': must be a whole number, at least 1"),
  ({"N": "0"}, "N=0: must be at least 1"),
  ({"D": "600"}, "D=600"),
  ({"H": "4", "HKV": "3"}, "HKV=3: must divide H=4"),
  ({"DTYPE": "float64"}, "DTYPE='float64': must be one of half, fp16, float16, bf16, bfloat16"),
  ({"OUT_DTYPE": "int8"}, "OUT_DTYPE='int8': must be one of"),
  ({"CAUSAL": "maybe"}, "CAUSAL='maybe': must be one of 0, 1, bottom-right, top-left"),
  ({"LAYOUT": "dhsb"}, "LAYOUT='dhsb': must be one of bhsd, bshd, nsd"),
  ({"WINDOW": "3"}, "WINDOW='3': must be left,right"),
  ({"VERIFY": "yes"}, "VERIFY='yes': must be one of 0, 1, 2"),
  ({"CNT": "0"}, "CNT=0: must be at least 1"),
  ({"SEED": "-1"}, "SEED=-1: must be at least 0"),
  ({"LSE": "2"}, "LSE='2': must be one of 0, 1"),
  ({"BWD": "2"}, "BWD='2': must be one of 0, 1"),
  ({"BWD": "1", "LSE": "1"}, "LSE=1 with BWD=1: the gradient is that of o"),
  ({"BWD": "1", "ISA": "1"}, "BWD=1 with ISA=1: it is for forward"),
  ({"BWD": "1", "COMPARE": "1"}, "COMPARE=1 on EMU: it is for DEV=CUDA"),
  ({"BWD": "1", "N": "16384", "SK": "16384"}, "VERIFY=1 with BWD=1: a key head has 268435456 scores"),
  ({"BWD": "1", "D": "600"}, "D=600"),
  ({"CSV": "/no/such/folder/x.csv"}, "CSV='/no/such/folder/x.csv': must be a file"),
  ({"CSV": "."}, "CSV='.': must be a file"),
  ({"ISA": "x"}, "ISA='x': must be one of 0, 1"),
  ({"ISA": "1", "DEV": "EMU::sm_80"}, "ISA=1: there are bounds for AMD's chips"),
  ({"ISA": "1", "COMPARE": "1"}, "COMPARE=1 and ISA=1: only one of them may be set"),
  ({"PLOT": "x.png"}, "PLOT='x.png': needs COMPARE=1"),
  ({"FIGURES": "1", "CSV": "x.csv"}, "CSV='x.csv' with FIGURES=1"),
])
def test_bad_setting(bench_here:Callable[..., int], settings:dict[str, str], line:str, capsys:pytest.CaptureFixture[str]) -> None:
  # bench.py refuses a bad setting before anything runs. The message has the setting's name, its value and what is supported.
  with pytest.raises((bench.BadSetting, ValueError, NotImplementedError)) as e: bench_here(**SMALL | settings)
  assert line in str(e.value) and "\n" not in str(e.value) and not capsys.readouterr().out

@pytest.mark.sample(2)
@pytest.mark.parametrize(("settings", "line"), [
  ({"B": "x"}, "B='x': must be a whole number, at least 1"),
  ({"D": "600"}, "D=600"),
  ({"DEV": "PYTHON"}, "DEV='PYTHON': must be one of AMD, HIP"),
  ({"DEV": "EMU::gfx906"}, "EMU does not emulate 'gfx906'"),
])
def test_a_bad_setting_is_one_line(settings:dict[str, str], line:str) -> None:
  result = run(**SMALL | settings)
  assert result.returncode == 2 and result.stderr.startswith("bench.py: ") and line in result.stderr and result.stderr.count("\n") == 1, result.stderr

WRONG = """
import sys, bench, attn.reference
right = bench.to_array
bench.to_array = lambda t: right(t)*1.01
sys.exit(bench.main())
"""

@pytest.mark.parametrize("backward", ("0", "1"))
def test_a_wrong_result_fails(backward:str) -> None:
  result = run("-c", WRONG, **SMALL, BWD=backward)
  assert result.returncode == 1 and "WRONG" in result.stdout, result.stdout + result.stderr

def problem(**sizes:int) -> Problem:
  return Problem(**{"B": 1, "H": 2, "Hkv": 1, "Sq": 64, "Sk": 64, "D": 16, "Dv": 16} | sizes, softmax_scale=0.25)

def test_verify_looks_at_a_sample_of_a_large_problem() -> None:
  sample = 4*64*8   # eight rows at a time, in four of sixteen blocks
  p, rng = problem(), np.random.default_rng(0)
  q, k, v = (rng.standard_normal((1, h, 64, 16)) for h in (2, 1, 1))
  o, lse = exact(q, k, v, 0.25)
  for most, part in ((sample, 0.25), (None, 1.0)):
    verdict, looked_at = verdicts.verify(p, (q, k, v), (o, lse), most)
    assert verdict.ok and looked_at == part
  wrong = o.copy()
  wrong[0, 1, 63, 5] += 1
  assert not verdicts.verify(p, (q, k, v), (wrong, lse), None)[0].ok and verdicts.verify(p, (q, k, v), (wrong, lse), sample)[0].ok

def test_verify_judges_lse_too() -> None:
  p, rng = problem(), np.random.default_rng(0)
  q, k, v = (rng.standard_normal((1, h, 64, 16)) for h in (2, 1, 1))
  o, lse = exact(q, k, v, 0.25)
  assert not verdicts.verify(p, (q, k, v), (o, lse + 1), None)[0].ok

def test_every_shape_of_the_comparison_is_one_that_bench_takes() -> None:
  # bench.py accepts every shape for the comparison with other libraries (COMPARE=1 and SWEEP=1). The comparison itself needs PyTorch and a GPU; this
  # test does not.
  from attn.measure import peers
  problems = [bench.settings({**bench.ON_A_GPU, **x}).problem for x in (*peers.sweep("float16"), *peers.sweep("float32"))]
  assert len({(p, p.dtype, p.window) for p in problems}) == len(problems) == 4*len(peers.SHAPES) + 2*len(peers.SHAPES_FP32)
  assert all(p.layout == "bhsd" and (p.Sq, p.D) == (p.Sk, p.Dv) and p.dtype in peers.ULPS for p in problems)

def test_the_comparison_without_pytorch_is_one_clear_line(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setitem(sys.modules, "torch", None)
  with Context(DEV="CUDA"), pytest.raises(bench.BadSetting, match="COMPARE=1 needs PyTorch, which is not installed"): bench.compare_all(True)

def test_the_sweep_of_the_backward_is_written(monkeypatch:pytest.MonkeyPatch, tmp_path:Path) -> None:
  # bench.py with BWD=1, COMPARE=1 and SWEEP=1 writes a table and a picture of all its shapes, also of shapes whose gradients are too large to be
  # checked against float64. Here stand-ins replace the device and PyTorch.
  pytest.importorskip("matplotlib")
  def row(p:Problem, causal:bool) -> dict[str, object]:
    theirs = {"TFLOP/s cuDNN": 2.0} if p.D < 256 else {}
    return {"shape": backward.shape_of(p), "causal": causal, "dtype": p.dtype, "TFLOP/s ours": 1.0, **theirs, "verdict": "ok"}
  monkeypatch.setattr(backward, "compare_backward", row)
  monkeypatch.setattr(bench, "compare_all", lambda task: bench.compare_all_backward(task, "a card"))
  monkeypatch.setattr(bench, "find_device", lambda: "EMU::gfx942")
  table, picture = tmp_path/"bwd.csv", tmp_path/"bwd.png"
  for name, value in {"BWD": 1, "COMPARE": 1, "SWEEP": 1, "CSV": table, "PLOT": picture}.items(): monkeypatch.setenv(name, str(value))
  bench.getenv.cache_clear()
  try: assert bench.main() == 0
  finally: bench.getenv.cache_clear()
  found = rows(table)
  assert len(found) == len(backward.problems([])) and picture.stat().st_size > 10000
  assert {x["shape"] for x in found if not x["TFLOP/s cuDNN"]} == {"2x16x4096x256"}

def test_problems_of_the_backward() -> None:
  # Words on the command line select the problems that `python -m attn.measure.backward` measures.
  both = backward.problems(["32/8", "bfloat16"])
  assert [(p.H, p.Hkv, p.D, causal) for p, causal in both] == [(32, 8, 128, False), (32, 8, 128, True)]
  assert [backward.name_of(*x) for x in both] == ["4x32/8x4096x128 full bfloat16", "4x32/8x4096x128 causal bfloat16"]
  assert backward.name_of(*backward.problems(["65536"])[0]).startswith("1x8x64x65536x128 full") and len(backward.problems([])) == 30

def test_the_backwards_peers_take_every_setting_before_anything_runs(monkeypatch:pytest.MonkeyPatch) -> None:
  # bench.py with BWD=1 compares backward kernels with those of other libraries. Its settings describe the problems. Settings that this comparison
  # does not support, such as WINDOW, are refused before anything runs, also without PyTorch.
  compared: list[tuple[Problem, bool]] = []
  from attn.measure import backward
  monkeypatch.setattr(backward, "compare_backward", lambda p, causal: compared.append((p, causal)) or {"shape": "one"})
  def rows_of(sweep:bool=False, **environment:str) -> list[dict[str, object]]:
    for name, value in {"BWD": "1", **environment}.items(): monkeypatch.setenv(name, value)
    bench.getenv.cache_clear()
    task = bench.Task(False, sweep, False, True, False, "", "", True)
    try: return bench.compare_all_backward(task, "a card")
    finally:
      bench.getenv.cache_clear()
      for name in environment: monkeypatch.delenv(name)
  assert rows_of(CAUSAL="1", VERIFY="0") == [{"shape": "one"}] and compared[0][1] and compared[0][0].return_lse
  assert len(rows_of(sweep=True)) == len(backward.problems([])) == len(backward.problems([]))
  for settings, said in (({"WINDOW": "3,0"}, "no WINDOW"), ({"DV": "64"}, "D = DV"), ({"CAUSAL": "1", "SK": "100"}, "needs N = SK")):
    with pytest.raises(bench.BadSetting, match=said): rows_of(**settings, VERIFY="0")
