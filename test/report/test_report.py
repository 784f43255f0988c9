"""Tests of attn.report, which checks and times attn's kernels on one GPU and writes a report: reports made on the emulator, damaged report files, the
GPU's sensors, the picture, and the table of docs/reports."""
from __future__ import annotations
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
import numpy as np
import pytest
from attn.chips import get_chip
from attn.chips.matrix import Matrix
from attn.compilers.found import NoCompiler
from attn.isa.timing import kernels
from attn.reference import rounded
from attn.report import __main__ as command, measured, predicted, system
from attn.report.drawing import comparison
from attn.report.matrix_loop import LOOP_STEPS, LOOP_WAVES, matrix_loop
from attn.report.rates import SIZES_OF_RATES, copied_by_threads
from attn.report.schema import BY_EMULATOR, CardReport, PredictedTime, SensorReading, checked_report, report_json
from attn.report.shapes import REPORT_SHAPES, ReportedShape
from attn.report.tables import markdown, page_with_table, table_of_folder
from attn.tinygrad_compat import CompileError, Context, Tensor
from cases import count_products, in_turn

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT/"docs/reports"
FEW = tuple(next(x for x in REPORT_SHAPES["small"] if x.kind == kind) for kind in ("forward", "backward", "decode"))

@pytest.fixture
def few(monkeypatch:pytest.MonkeyPatch) -> None: monkeypatch.setitem(REPORT_SHAPES, "small", FEW)

def run(device:str, *words:str) -> int:
  with Context(DEV=device): return command.main(words)

# ***** on the emulator *****

@pytest.mark.sample(2)
@pytest.mark.parametrize("device", ("EMU::gfx1201", "EMU::sm_90", "EMU::gfx1030"))
def test_on_the_emulator(device:str, few:None, tmp_path:Path, capsys:pytest.CaptureFixture[str]) -> None:
  # A report made on the emulator is marked as emulated: it says which results are right, calls its times "emulated s", and has no TFLOP/s. It has
  # predicted times only for a chip that attn's timing model supports.
  assert run(device, "--out", str(tmp_path/"r.json")) == 0
  said = capsys.readouterr()
  report = checked_report(json.loads((tmp_path/"r.json").read_text()))
  assert report.emulated and report.how == BY_EMULATOR and report.right and not report.rates and report.card.name == "emulated"
  assert said.out.index("| verdict |") < said.out.index("emulated s") and "measured ms" not in said.out and "TFLOP/s" not in said.out
  kernels = [kernel for row in report.rows for kernel in row.kernels]
  assert [x.name for x in kernels] == ["forward", "dq", "dkdv", "decode"]
  modelled = device == "EMU::gfx1201"
  assert any(x.predicted for x in kernels) == modelled and ("No predictions: the timing model has no data for" in said.out) == (not modelled)
  assert command.main(["check", str(tmp_path/"r.json")]) == 0 and "all results are right" in capsys.readouterr().out

def test_without_the_extra(few:None, tmp_path:Path, monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]) -> None:
  monkeypatch.setattr(predicted, "PACKAGES", ("no_such_package",))
  assert run("EMU::gfx1201", "--out", str(tmp_path/"r.json")) == 0
  assert f"No predictions: {predicted.WITHOUT_ISA}" in capsys.readouterr().out

def test_a_wrong_result_is_reported(few:None, tmp_path:Path, monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]) -> None:
  right = measured.to_array
  def wrong(t:Tensor) -> np.ndarray:
    x = right(t).copy()
    if t.shape[-2] == 1: x[..., 3] = np.nan
    return x
  monkeypatch.setattr(measured, "to_array", wrong)
  assert run("EMU::gfx942", "--out", str(tmp_path/"r.json")) == 1
  report = checked_report(json.loads((tmp_path/"r.json").read_text()))
  assert [row.right for row in report.rows] == [True, True, False]
  verdict = report.rows[2].verdict
  assert verdict is not None and verdict.text.startswith("NaN pattern differs") and verdict.error is None
  assert "1 of 3 results are WRONG" in capsys.readouterr().out

def test_what_fails_is_told_and_the_rest_is_measured(few:None, tmp_path:Path, monkeypatch:pytest.MonkeyPatch,
                                                     capsys:pytest.CaptureFixture[str]) -> None:
  # If a compiler fails, if the card fails while a kernel is timed, or if a prediction fails, the report says so in the row of the problem, and
  # measures all other rows.
  timed, first = measured.kernel_time, measured.judge_forward
  def at_fault(x:measured.ReportedKernel, *rest:Any) -> Any:
    if x.name == "dkdv": raise OSError("device lost")
    return timed(x, *rest)
  def stopped(found:measured.JudgedShape, arch:Any) -> Any:
    if found.shape.kind == "decode": raise CompileError("comgr: a|b\nmore")
    return first(found, arch)
  def without(*_:Any, **__:Any) -> Any: raise AssertionError("no such tile")
  monkeypatch.setattr(measured, "kernel_time", at_fault)
  monkeypatch.setattr(measured, "judge_forward", stopped)
  monkeypatch.setattr(kernels, "predicted_kernel", without)
  assert run("EMU::gfx1201", "--out", str(tmp_path/"r.json")) == 1
  forward, backward, decode = checked_report(json.loads((tmp_path/"r.json").read_text())).rows
  assert forward.right and forward.kernels[0].unpredicted is not None and "AssertionError" in forward.kernels[0].unpredicted
  assert backward.verdict is not None and backward.verdict.text == "failed while it was timed: OSError: device lost"
  assert decode.verdict is not None and decode.verdict.text == "CompileError: comgr: a|b" and not decode.kernels
  assert "CompileError: comgr: a\\|b |" in capsys.readouterr().out

def test_no_compiler_ends_the_report(few:None, monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]) -> None:
  def none(*_:Any) -> Any: raise NoCompiler("no compiler here; install one")
  monkeypatch.setattr(measured, "judge_forward", none)
  assert run("EMU::gfx1201", "--out", "never.json") == 2 and "no compiler here; install one" in capsys.readouterr().err

@pytest.mark.parametrize(("device", "words", "said"), (
  ("EMU::gfx942", ("--shapes", "full"), "--shapes full: the emulator would need hours"),
  ("EMU::gfx942", ("--card", "RX 9070"), "--card 'RX 9070': the cards with gfx942 are MI300X"),
  ("EMU::gfx942", ("check", "no_such.json"), "no_such.json: No such file")))
def test_bad_arguments(device:str, words:tuple[str, ...], said:str, capsys:pytest.CaptureFixture[str]) -> None:
  assert run(device, *words) == 2
  assert said in capsys.readouterr().err

def test_the_full_shapes_fit_into_the_memory_that_the_help_names() -> None:
  # The tensors of all problems of a report stay on the GPU at the same time. Together with the tensors of the memory copy that the report times, they
  # take at most the "about 3 GB" that the help text names.
  assert "about 3 GB" in command.DESCRIPTION.replace("\n", " ")
  def elements(x:ReportedShape) -> int:
    q, k = x.B*x.H*x.Sq*x.D, x.B*x.Hkv*x.Sk*x.D
    return 4*q + 4*k if x.kind == "backward" else 2*q + 2*k
  for sizes, most in (("full", 3.1e9), ("small", 8e6)):
    assert 2*sum(map(elements, REPORT_SHAPES[sizes])) + 2*SIZES_OF_RATES[sizes][2] < most

# ***** files *****

@pytest.fixture
def example() -> dict[str, Any]:
  # Returns a valid report: one of docs/reports.
  data: dict[str, Any] = json.loads(sorted(FOLDER.glob("*.json"))[0].read_text())
  return data

def put(*path:str|int, to:Any) -> Callable[[Any], None]:
  # Returns a function that changes one value of a report. `path` leads to the value: keys and indices, from the outside in.
  def change(data:Any) -> None:
    for name in path[:-1]: data = data[name]
    data[path[-1]] = to
  return change

def drop(*path:str|int) -> Callable[[Any], None]:
  def change(data:Any) -> None:
    for name in path[:-1]: data = data[name]
    del data[path[-1]]
  return change

DAMAGED: tuple[tuple[Callable[[Any], None], str], ...] = (
  (put("version", to=99), "version: is 99"),
  (drop("rows"), "rows: is missing"),
  (drop("rows", 3), "rows: there is none for forward (8, 16, 2048 x 2048, 64) bfloat16 causal"),
  (drop("rows", 2, "kernels", 0, "tile"), "rows[2].kernels[0].tile: is missing"),
  (put("rows", 2, "kernels", to=[]), "rows[2].kernels: must name at least one kernel"),
  (put("rows", 0, "kernels", 0, "rounds", to=[]), "rows[0].kernels[0].rounds: must have at least one round"),
  (put("rows", 0, "kernels", 0, "rounds", 1, to="fast"), "rows[0].kernels[0].rounds[1]: must be a number, not 'fast'"),
  (put("rows", 0, "kernels", 0, "rounds", 1, to=-1.0), "rows[0].kernels[0].rounds: must be at least 0, not -1.0"),
  (put("rows", 0, "kernels", 0, "rounds", 1, to=float("nan")), "rows[0].kernels[0].rounds[1]: must be a finite number, not nan"),
  (put("rows", 0, "kernels", 0, "runs", to=2.5), "rows[0].kernels[0].runs: must be a whole number, not 2.5"),
  (put("rows", 0, "kernels", 0, "unpredicted", to=None), "rows[0].kernels[0].unpredicted: must be there exactly if nothing is predicted"),
  (put("rows", 0, "verdict", "ok", to=1), "rows[0].verdict.ok: must be true or false, not 1"),
  (put("rows", 0, "verdict", "error", to=1.0), "rows[0].verdict.ok: is true, but the error 1 is above the limit"),
  (put("rows", 0, "verdict", "error", to=None), "rows[0].verdict.ok: is true, but there is no error and limit"),
  (put("rows", 0, "verdict", to=None), "rows[0].verdict: must be there exactly if the shape was not refused"),
  (put("rows", 0, "shape", "dtype", to="int8"), "rows[0].shape: dtype: must be bfloat16 or float16, not 'int8'"),
  (put("rows", 0, "shape", "D", to=96), "rows: there is none for forward (4, 16, 4096 x 4096, 128)"),
  (put("card", "host", to="mine"), "card.host: is no field of a report"),
  (put("card", "kind", to="amd"), "card.kind: must match"),
  (put("card", "compute_units", to=0), "card.compute_units: must be at least 1, not 0"),
  (put("card", "before", to="hot"), "card.before: must be an object, not 'hot'"),
  (put("rates", 0, "unit", to="GFLOPS"), "rates[0].unit: must be one of 'TFLOP/s', 'GB/s', not 'GFLOPS'"),
  (put("rates", to=None), "rates: must be a list, not None"),
  (put("made", to="yesterday"), "made: must match"),
  (put("sizes", to="large"), "sizes: must be one of 'full', 'small', not 'large'"),
  (put("how", to="a stopwatch"), "how: must be one of"))

@pytest.mark.parametrize(("damage", "said"), DAMAGED, ids=[said for _, said in DAMAGED])
def test_a_damaged_file_is_refused_by_field(damage:Callable[[Any], None], said:str, example:dict[str, Any], tmp_path:Path,
                                            capsys:pytest.CaptureFixture[str]) -> None:
  damage(example)
  (tmp_path/"r.json").write_text(json.dumps(example))
  assert command.main(["check", str(tmp_path/"r.json")]) == 2
  error = capsys.readouterr().err
  assert f"{tmp_path/'r.json'}: {said}" in error and error.count("\n") == 1, error

@pytest.mark.parametrize("text", ("", "{", "[]", "3"))
def test_a_file_that_is_no_report(text:str, tmp_path:Path, capsys:pytest.CaptureFixture[str]) -> None:
  (tmp_path/"r.json").write_text(text)
  assert command.main(["check", str(tmp_path/"r.json")]) == 2
  error = capsys.readouterr().err
  assert str(tmp_path/"r.json") in error and error.count("\n") == 1

def test_text_and_back(example:dict[str, Any]) -> None:
  report = checked_report(example)
  assert checked_report(json.loads(report_json(report))) == report and json.loads(report_json(report)) == example

def test_names_are_removed(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(system.socket, "gethostname", lambda: "kiste.example.org")
  monkeypatch.setattr(system.getpass, "getuser", lambda: "berta")
  said = system.without_names("clang version 22.1.0 (/home/berta/.venv/bin/clang), on kiste by berta: TFLOP/s of ~/x/y.py, berta2")
  assert said == "clang version 22.1.0 (clang), on … by …: TFLOP/s of y.py, berta2"

# ***** sensors *****

def test_sensors_of_amdgpu(tmp_path:Path) -> None:
  # `amd_sensors` reads the clock and the power of an AMD GPU from files of the driver amdgpu. If a file is missing or damaged, its value is None. If
  # all files are missing, there is no reading.
  read = system.amd_sensors(tmp_path)
  assert read() is None
  (tmp_path/"pp_dpm_sclk").write_text("0: 500Mhz\n1: 2371Mhz *\n")
  (tmp_path/"hwmon/hwmon0").mkdir(parents=True)
  (tmp_path/"hwmon/hwmon0/power1_input").write_text("303500000\n")
  (tmp_path/"hwmon/hwmon0/temp1_input").write_text("nonsense\n")
  assert read() == SensorReading(core_mhz=2371, watts=303.5)
  (tmp_path/"hwmon/hwmon0/freq1_input").write_text("2412000000\n")
  assert read() == SensorReading(core_mhz=2412, watts=303.5)

def test_sensors_of_nvidia(tmp_path:Path, monkeypatch:pytest.MonkeyPatch) -> None:
  program = tmp_path/"nvidia-smi"
  monkeypatch.setenv("PATH", str(tmp_path))
  assert system.nvidia_sensors("0000:01:00.0")() is None
  program.write_text("#!/bin/sh\ncase \"$*\" in *driver*) echo 580.1;; *'-i 0000:01:00.0'*) echo '1980, [N/A], 700.2, 56';; *) exit 9;; esac\n")
  program.chmod(0o755)
  assert system.nvidia_sensors("0000:01:00.0")() == SensorReading(1980, None, 700.2, 56)
  assert system.nvidia_sensors("0000:02:00.0")() is None and system.nvidia_driver("CUDA 13.0") == "NVIDIA 580.1, CUDA 13.0"

def test_median_of_readings() -> None:
  readings = [SensorReading(core_mhz=x, watts=None) for x in (3.0, 1.0, 2.0)]
  assert system.median_reading(readings) == SensorReading(core_mhz=2) and system.median_reading([]) is None

# ***** the card's own rates *****

@in_turn("arch, dtype", ("gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90"), ("float16", "bfloat16"))
def test_the_matrix_loop_computes_what_it_counts(arch:str, dtype:str, monkeypatch:pytest.MonkeyPatch) -> None:
  # A matrix loop, the kernel that measures the rate of a matrix instruction alone, computes as many products as its `flops` counts. The operands are
  # random, and the sum of all results must equal the sum over k of (sum of A's column k) times (sum of B's row k). On sm_90 the test instead compares
  # `flops` with the number of wgmma products that the emulator counts.
  loop = matrix_loop(get_chip(arch), dtype)
  assert loop is not None
  started = count_products(monkeypatch)
  with Context(DEV=f"EMU::{arch}"): few, many = (loop.outputs(2, trips, dtype).numpy().astype(np.float64) for trips in (4, 8))
  np.testing.assert_allclose(many, 2*few, rtol=1e-3, atol=1e-3*np.abs(few).max())
  data = rounded(np.random.default_rng(0).standard_normal(loop.operands, np.float32), dtype).astype(np.float64)
  if arch == "sm_90":
    assert loop.flops*2*(4 + 8) == sum(started)*2*64*256*128
    return
  mat = get_chip(arch).unit.mma[dtype] if get_chip(arch).unit.mma else get_chip(arch).matrix[dtype][0]
  of_a, of_b, products = sums_of_operands(mat, data)
  assert loop.flops == products*LOOP_WAVES*2*mat.M*mat.N*mat.K
  expected = 4*2*LOOP_WAVES*sum(float(a @ b) for a, b in zip(of_a, of_b))
  assert abs(few.sum() - expected) < 1e-5*np.abs(few).sum(), (few.sum(), expected)

def sums_of_operands(mat:Any, data:np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], int]:
  # Adds up the operands `data` of the kernel that measures the rate of a matrix instruction alone.
  # The results are: for each step of an iteration, and each k, the sum of A over its rows and the sum of B over its columns; and the number of
  # products that a wave computes in an iteration.
  if isinstance(mat, Matrix):
    words, lanes = mat.operand, mat.wave
    fragments = data.reshape(-1, lanes, words)
    if mat.duplicated: fragments = fragments[:, :mat.N]
    of = fragments.reshape(len(fragments), -1, mat.N, words).sum(2).reshape(len(fragments), -1)
    count = max(4, 64//(mat.M*mat.N//mat.wave))
    rows = 1 << count.bit_length()//2
    columns = count//rows
    a, b = of[:LOOP_STEPS*rows].reshape(LOOP_STEPS, rows, -1), of[LOOP_STEPS*rows:].reshape(LOOP_STEPS, columns, -1)
    return list(a.sum(1)), list(b.sum(1)), count*LOOP_STEPS
  # mma.sync (PTX ISA 9.7.14.5.8): register r of A holds k = 2*(lane%4) + e + 8*(r//2); B of two tiles: k = 2*(lane%4) + e + 8*(r%2)
  fragments = data.reshape(-1, 8, 4, 4, 2)      # fragment, lane//4, lane%4, register, e
  rows = columns = 4
  a = fragments[:LOOP_STEPS*rows].reshape(LOOP_STEPS, rows, 8, 4, 2, 2, 2).sum((1, 2, 5))       # step, lane%4, register//2, e
  b = fragments[LOOP_STEPS*rows:].reshape(LOOP_STEPS, columns//2, 8, 4, 2, 2, 2).sum((1, 2, 4))
  return [x.reshape(-1) for x in a], [x.reshape(-1) for x in b], rows*columns*LOOP_STEPS

@pytest.mark.parametrize("arch", ("gfx942", "gfx1201", "sm_90"))
def test_the_copy_copies(arch:str) -> None:
  with Context(DEV=f"EMU::{arch}"):
    x = Tensor(np.random.default_rng(0).standard_normal(8192, np.float32)).realize()
    np.testing.assert_array_equal(Tensor.custom_kernel(Tensor.empty(8192), x, fxn=copied_by_threads)[0].numpy(), x.numpy())

# ***** the picture and the table *****

def with_predictions(report:CardReport) -> CardReport:
  # Returns a copy of a report in which every kernel has a predicted time: half of its measured time.
  def halved(x:Any) -> Any: return replace(x, predicted=(PredictedTime("a card", 1.0, x.seconds/2, "compute"),), unpredicted=None)
  return replace(report, rows=tuple(replace(row, kernels=tuple(map(halved, row.kernels))) for row in report.rows))

def test_the_picture(example:dict[str, Any], tmp_path:Path) -> None:
  report = checked_report(example)
  drawn = ET.fromstring(comparison([("one", report), ("two", with_predictions(report))]))
  def found(tag:str) -> list[ET.Element]: return list(drawn.iter(f"{{http://www.w3.org/2000/svg}}{tag}"))
  marks = [x.get("fill") for x in found("rect") if x.get("width") == "8"]
  shapes = len(report.rows)
  assert len(marks) == 3*shapes and marks.count("#ffffff") == shapes      # measured twice, predicted once
  assert [x.text for x in found("text")].count("2.00") == shapes
  emulated = replace(report, how=BY_EMULATOR)
  with pytest.raises(ValueError, match="no report has a measured or a predicted time"): comparison([("one", emulated)])
  with pytest.raises(ValueError, match="9 reports: at most 7"): comparison([("one", report)]*9)
  path = sorted(FOLDER.glob("*.json"))[0]
  assert command.main(["compare", str(path), "--svg", str(tmp_path/"x.svg")]) == 0 and (tmp_path/"x.svg").read_text().startswith("<svg")

def test_the_ratio_is_in_the_table(example:dict[str, Any]) -> None:
  report = with_predictions(checked_report(example))
  assert markdown(report).count("| 2.00 |") == sum(len(row.kernels) for row in report.rows)
  assert "| 2.00 |" not in markdown(replace(report, how=BY_EMULATOR))

def test_the_reports_of_the_project_are_valid_and_in_their_table() -> None:
  page = (FOLDER/"README.md").read_text()
  assert page_with_table(page, table_of_folder(FOLDER)) == page, "run python -m attn.report table --write"
  for path in FOLDER.glob("*.json"): assert command.main(["check", str(path)]) == 0

def test_the_table_is_written(tmp_path:Path, example:dict[str, Any]) -> None:
  (tmp_path/"one.json").write_text(json.dumps(example))
  (tmp_path/"README.md").write_text((FOLDER/"README.md").read_text())
  assert command.main(["table", str(tmp_path), "--write"]) == 0
  written = (tmp_path/"README.md").read_text()
  assert "[one.json](one.json)" in written and written.startswith((FOLDER/"README.md").read_text()[:40])
  with pytest.raises(ValueError, match="the page has no lines"): page_with_table("# no table", "x")

def test_the_issue_template_names_commands_that_exist() -> None:
  text = (ROOT/".github/ISSUE_TEMPLATE/report.md").read_text()
  assert text.startswith("---\nname: ") and "python -m attn.report" in text and "docs/reports" in text
