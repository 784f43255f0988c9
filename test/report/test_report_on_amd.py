"""Tests of a report of an AMD GPU, made on a machine without one: a stand-in plays the GPU and tinygrad's runtime for it."""
from __future__ import annotations
import getpass, json, os, socket, subprocess, sys
from pathlib import Path
from typing import Any
import pytest
from attn.measure.rounds import ROUND_SECONDS, ROUNDS
from attn.report.schema import BY_LAUNCH, CardReport, checked_report
from attn.report.shapes import REPORT_SHAPES, ReportedShape
import stand_in_amd

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
import stand_in_amd
stand_in_amd.install()
from pathlib import Path
from attn.report import __main__, measured, system
system.SYS = Path(sys.argv[1])
{change}
status = __main__.main(["--shapes", "small", "--out", sys.argv[2]])
counted = {{"programs": stand_in_amd.programs, "launches": stand_in_amd.launches, "most": stand_in_amd.memory["most"]}}
Path(sys.argv[3]).write_text(json.dumps(counted))
sys.exit(status)
"""
# fewer shapes, a decode step that is wrong by 1 %, and a kernel that the runtime stops
WRONG = """
from attn.report.shapes import REPORT_SHAPES
REPORT_SHAPES["small"] = tuple(x for x in REPORT_SHAPES["small"] if x.D == 128 and x.B == 1 and x.Hkv == 2 or x.kind == "decode" and x.B == 1)
right = measured.to_array
measured.to_array = lambda t: right(t)*1.01 if t.shape[-2] == 1 else right(t)
made = measured.backward_of
def stopped(p, arch, seed):
  if p.window[1] == 0: raise RuntimeError("wait timeout in /home/someone/tinygrad/runtime/ops_amd.py")
  return made(p, arch, seed)
measured.backward_of = stopped
"""
SERIAL = "9c5d1f0c77e1a2b3"

def files_of_the_card(folder:Path) -> None:
  # Writes the files in which the driver amdgpu shows a card in sysfs, with the card's serial number.
  card = folder/"class/drm/renderD128/device"
  sensors = {"freq1_input": 2700000000, "freq2_input": 1000000000, "power1_average": 54000000, "temp1_input": 61000}
  for name, text in {**{f"hwmon/hwmon3/{name}": x for name, x in sensors.items()}, "serial_number": SERIAL, "unique_id": SERIAL}.items():
    (card/name).parent.mkdir(parents=True, exist_ok=True)
    (card/name).write_text(f"{text}\n")
  (folder/"module/amdgpu").mkdir(parents=True)
  (folder/"module/amdgpu/version").write_text("6.10.5\n")

def run(folder:Path, change:str="") -> tuple[subprocess.CompletedProcess[str], str, dict[str, Any]]:
  # Runs attn.report in a new process with a stand-in for the GPU; returns the process, the report, and what the stand-in counted.
  # `change` is Python code that runs first.
  files_of_the_card(folder/"sys")
  environment = os.environ | {"DEV": "AMD", "XDG_CACHE_HOME": str(folder), "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
  files = [str(folder/name) for name in ("sys", "report.json", "counted.json")]
  done = subprocess.run([sys.executable, "-c", SCRIPT.format(change=change), *files], capture_output=True, text=True, env=environment, timeout=280)
  assert (folder/"report.json").exists(), done.stderr
  return done, (folder/"report.json").read_text(), json.loads((folder/"counted.json").read_text())

@pytest.fixture(scope="module")
def right(tmp_path_factory:pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], str, dict[str, Any]]:
  pytest.importorskip("ziglang")
  return run(tmp_path_factory.mktemp("report"))

def report_of(text:str) -> CardReport: return checked_report(json.loads(text))

def test_what_is_asked_of_the_card(right:tuple[Any, str, dict[str, Any]]) -> None:
  # A report launches each kernel once to check its result, and then in rounds of ROUND_SECONDS seconds to time it. It launches nothing else, except
  # what measures the GPU's own rates: a memory copy, tinygrad's GEMM, and loops of matrix instructions.
  done, text, counted = right
  assert done.returncode == 0, done.stderr
  report, runs = report_of(text), round(ROUND_SECONDS/stand_in_amd.SECONDS)
  timed = 1 + 3 + ROUNDS*runs        # a first run, three runs that say how many fill a round, the rounds
  by_name = {kind: sum(n for name, n in counted["launches"].items() if f"attn_{kind}" in name) for kind in ("backward_dq", "backward_dkdv", "copy")}
  backward = sum(x.kind == "backward" for x in REPORT_SHAPES["small"])
  assert by_name["backward_dq"] == by_name["backward_dkdv"] == backward*(1 + timed) and by_name["copy"] == 1 + timed
  for kernel in (kernel for row in report.rows for kernel in row.kernels if kernel.name != "decode"):      # decode also merges: two launches
    assert kernel.runs == runs and kernel.rounds == pytest.approx((stand_in_amd.SECONDS,)*ROUNDS)
  products = sum(n for name, n in counted["launches"].items() if "attn_products" in name)
  assert products == 2*(1 + 1 + timed)          # two dtypes: the short loop once, the long one before the rounds and in them
  assert counted["most"] < 16 << 20

def test_the_report_of_the_card(right:tuple[Any, str, dict[str, Any]]) -> None:
  done, text, _ = right
  report = report_of(text)
  assert report.how == BY_LAUNCH and report.right and not report.emulated
  assert (report.card.kind, report.card.chip, report.card.name, report.card.compute_units) == ("AMD", "gfx1103", "Radeon 780M", 12)
  assert report.card.driver == "amdgpu 6.10.5" and "clang" in report.software.compiler
  assert report.card.before == report.card.after == report.rates[0].during
  assert report.card.before is not None and (report.card.before.core_mhz, report.card.before.watts, report.card.before.celsius) == (2700, 54, 61)
  assert [x.unit for x in report.rates] == ["TFLOP/s"]*3 + ["GB/s"] and "wmma" in report.rates[0].what
  ratios = [kernel.ratio for row in report.rows for kernel in row.kernels if kernel.ratio is not None]
  assert len(ratios) > 6 and all(x > 1 for x in ratios)
  printed = done.stdout
  assert printed.index("| verdict |") < printed.index("measured ms") < printed.index("rate of the card") and "2700 MHz" in printed

def test_no_names(right:tuple[Any, str, dict[str, Any]]) -> None:
  done, text, _ = right
  for name in {socket.gethostname(), getpass.getuser(), str(Path.home()), str(ROOT), SERIAL}:
    for where in (text, done.stdout): assert f" {name}" not in where and f'"{name}' not in where and f"{name}/" not in where, name

def test_wrong_results_are_reported(tmp_path:Path, monkeypatch:pytest.MonkeyPatch) -> None:
  # If some results are wrong or a kernel fails, the report says which, everything else is still measured, and the exit status is 1.
  pytest.importorskip("ziglang")
  done, text, _ = run(tmp_path, WRONG)
  monkeypatch.setitem(REPORT_SHAPES, "small", tuple(ReportedShape(**row["shape"]) for row in json.loads(text)["rows"]))
  report = report_of(text)
  assert done.returncode == 1 and not report.right
  for row in report.rows:
    assert row.verdict is not None
    stopped = row.shape.kind == "backward" and row.shape.causal
    assert row.verdict.ok == (row.shape.kind != "decode" and not stopped), row
    if stopped: assert row.verdict.text == "RuntimeError: wait timeout in ops_amd.py" and not row.kernels
  assert "2 of 5 results are WRONG" in done.stdout.splitlines()[0]
