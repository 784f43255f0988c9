"""Tests, without a GPU, of the command that runs attn's kernels under NVIDIA's compute-sanitizer: its table of calls, its planted faults, and how it
reads the tool's output."""
from __future__ import annotations
import contextlib, json, os, re, subprocess, sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
import pytest
from attn.chips import get_chip
from attn.choose.dispatch import KERNELS
from attn.choose.gradient_kernels import AT_ONCE_KERNELS, BACKWARD_KERNELS, BIAS_KERNEL, FEW_KERNEL, GRADIENT_KERNELS
from attn.emulator.checks import LdsRace, OutOfBounds
from attn.measure import sanitize
from attn.measure.sanitize import FAULTS, SMALL_CALLS, TOOLS, ToolReport, reports_in
from attn.tinygrad_compat import Context

@contextlib.contextmanager
def on_sm_90() -> Iterator[None]:
  with Context(DEV="EMU::sm_90"), sanitize.at_any_size(): yield

# ***** the calls *****

SEVERAL_DEVICES = {"merge", "in_order"}      # kernels of tensors that are sharded along rows
WITHOUT_CUDA = {"dual_wave", "textbook"}

def kernels_for_nvidia() -> set[str]:
  # Returns the beginnings of the names of all kernels that an NVIDIA GPU may run.
  # The names of forward and backward kernels come from dispatch's tables. Other names are quoted texts in attn/kernels that begin with "attn_".
  chip = get_chip("sm_90")
  programs = {"forward_wgmma": "wgmma", "widened_wgmma": "wgmma", "turned_wgmma": "wgmma", "forward_mma": "mma", "mla_mma": "mla"}
  found = {programs.get(name, name) for name, kernel in KERNELS.items()
           if kernel.program is not None and kernel.lacks(chip) is None and name != "split_kv"}
  for suffix, row in GRADIENT_KERNELS.items():
    if row.lacks(chip) is not None: continue
    found |= {name + suffix for name in (*BACKWARD_KERNELS, *AT_ONCE_KERNELS*(row.at_once is not None), *[FEW_KERNEL]*(row.few is not None))}
    if row.bias is not None: found.add(BIAS_KERNEL + row.bias.suffix)
  texts = (path.read_text() for path in (Path(sanitize.__file__).parent.parent/"kernels").rglob("*.py"))
  return found | {name for text in texts for name in re.findall(r'"attn_(\w+?)[_"](?=\{|$|,|\))', text)} - SEVERAL_DEVICES - WITHOUT_CUDA

def test_the_calls_have_every_kernel() -> None:
  # Each call of attention that attn.measure.sanitize runs launches at least one attn kernel. Together the calls launch every kernel that an NVIDIA
  # GPU may run.
  wanted, seen = kernels_for_nvidia(), set[str]()
  assert {"wgmma", "mma", "mla", "tiled", "combine", "append", "tiles_seen", "backward_all_wgmma", "backward_dkdv_tiled"} <= wanted
  with on_sm_90():
    for call in SMALL_CALLS:
      with sanitize.with_kernel(call.kernel): names = sanitize.kernels_in((outputs := call.outputs())[0].schedule_linear(*outputs[1:]))
      assert names, call.name
      seen |= {kernel for kernel in wanted for name in names if re.match(rf"attn_{kernel}_(sm_90|keys|queries|\d)", name)}
  assert seen == wanted

def test_names_of_calls_differ() -> None: assert len({call.name for call in SMALL_CALLS} | set(FAULTS)) == len(SMALL_CALLS) + len(FAULTS)

@pytest.mark.usefixtures("without_places")
@pytest.mark.parametrize("name, error", (("a barrier less", LdsRace), ("a store out of bounds", OutOfBounds)))
def test_the_emulator_catches_planted_faults(name:str, error:type[Exception]) -> None:
  with on_sm_90(), pytest.raises(error): sanitize.with_fault(name)

def test_the_calls_of_planted_faults_are_right_without_them() -> None:
  with on_sm_90():
    for fault in FAULTS.values(): assert len(sanitize.run_call(fault.call)) == 1

# ***** the tools' output *****

CLEAN = "========= COMPUTE-SANITIZER\nkernels run: [\"attn_mma_sm_90\"]\n========= ERROR SUMMARY: 0 errors\n"
CLEAN_RACECHECK = CLEAN.replace("ERROR SUMMARY: 0 errors", "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)")
RACE = """========= COMPUTE-SANITIZER
========= Error: Potential RAW hazard detected at __shared__ 0x400 in block (0,0,0) :
=========     Write Thread (0,0,0) at attn_mma_sm_90_float16+0x42b0
=========     Read Thread (0,3,0) at attn_mma_sm_90_float16+0x4350
=========     Current Value : 253
=========
========= Warning: Race reported between Read access at attn_tiled_sm_90+0x10
=========     and Write access at attn_tiled_sm_90+0x20 [4 hazards]
=========
kernels run: ["attn_mma_sm_90_float16"]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
OUTSIDE = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 16 bytes
=========     at attn_mma_sm_90_float16+0x2f0
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f0000000000 is out of bounds
=========         Host Frame: cuLaunchKernel [0x2f00] in libcuda.so.1
=========
========= Program hit CUDA_ERROR_LAUNCH_FAILED (error 719) due to "unspecified launch failure" on CUDA API call to cuCtxSynchronize.
=========     Saved host backtrace up to driver entry point at error
=========
========= ERROR SUMMARY: 2 errors
"""

def test_findings_are_read() -> None:
  assert not reports_in(CLEAN) and not reports_in(CLEAN_RACECHECK)
  assert reports_in(RACE) == [ToolReport("Error: Potential RAW hazard detected at __shared__ 0x400 in block (0,0,0) :", "attn_mma_sm_90_float16"),
                            ToolReport("Warning: Race reported between Read access at attn_tiled_sm_90+0x10", "attn_tiled_sm_90")]
  first, second = reports_in(OUTSIDE)
  assert str(first) == "Invalid __global__ write of size 16 bytes, in attn_mma_sm_90_float16"
  assert second.text.startswith("Program hit CUDA_ERROR_LAUNCH_FAILED") and not second.kernel

@pytest.mark.parametrize("output, text", (("", "no summary"), ("kernels run: []\n========= COMPUTE-SANITIZER\n", "no summary"),
                                          ("========= ERROR SUMMARY: 3 errors\n", "counted 3 findings")))
def test_output_that_is_not_whole_is_refused(output:str, text:str) -> None:
  with pytest.raises(ValueError, match=text): reports_in(output)

# ***** the exit code *****

Answer = Callable[[str, list[str]], tuple[str, int]]     # the output and the exit code of a process, by tool and by the names of calls

def well(tool:str, names:list[str]) -> tuple[str, int]:
  if names[0] in FAULTS: return (RACE, 0) if tool == "racecheck" else (OUTSIDE, 1)
  return (CLEAN_RACECHECK if tool == "racecheck" else CLEAN, 0)

def but(tool:str, name:str, answer:tuple[str, int]) -> Answer:
  return lambda t, names: answer if t == tool and name in names else well(t, names)

@pytest.mark.parametrize("answer, told", (
  (well, ""), (but("racecheck", "decode", (RACE, 0)), "racecheck: Error: Potential RAW hazard"),
  (but("initcheck", "decode", ("", 0)), "initcheck: compute-sanitizer printed no summary"),
  (but("", "decode", ("no GPU", 1)), "without a tool: exit code 1: no GPU"), (but("synccheck", "decode", (CLEAN, 3)), "synccheck: exit code 3"),
  (but("racecheck", "a barrier less", (CLEAN_RACECHECK, 0)), "racecheck does not report the planted fault, a barrier less"),
  (but("memcheck", "a store out of bounds", (CLEAN, 0)), "memcheck does not report the planted fault, a store out of bounds")))
def test_exit_code(answer:Answer, told:str, monkeypatch:pytest.MonkeyPatch, capsys:pytest.CaptureFixture[str]) -> None:
  # The exit code of `python -m attn.measure.sanitize` is 0 only if every process ends well, compute-sanitizer reports no error in attn's kernels, and
  # it reports both planted faults.
  seen = list[tuple[str, str]]()
  def run(command:list[str], env:dict[str, str], **kwargs:Any) -> SimpleNamespace:
    tool, names = command[2] if command[0] == "the tool" else "", json.loads(command[-1])
    assert not tool or tuple(command[3:-5]) == TOOLS[tool]
    assert env["DEV"] == "CUDA" and command[-5:-1] == [sys.executable, "-m", "attn.measure.sanitize", "--here"]
    seen.extend((tool, name) for name in names)
    output, code = answer(tool, names)
    return SimpleNamespace(returncode=code, stdout=output, stderr="")
  monkeypatch.setattr(subprocess, "run", run)
  monkeypatch.setattr(sanitize, "compute_sanitizer", lambda: "the tool")
  monkeypatch.setattr(sanitize, "lacking", lambda sanitizer: None)
  assert sanitize.main([]) == int(bool(told))
  shown = capsys.readouterr().out
  assert told in shown and all(re.search(rf"^{tool} ", shown, re.MULTILINE) for tool in TOOLS)
  assert set(seen) == {(tool, call.name) for tool in ("", *TOOLS) for call in SMALL_CALLS} | {(fault.tool, name) for name, fault in FAULTS.items()}

def test_it_says_what_it_needs() -> None:
  # `python -m attn.measure.sanitize` prints one sentence and ends with exit code 2 on a machine without compute-sanitizer or without an NVIDIA GPU.
  env = {**os.environ, "CUDA_PATH": "/nothing", "CUDA_VISIBLE_DEVICES": ""}
  done = subprocess.run([sys.executable, "-m", "attn.measure.sanitize"], capture_output=True, text=True, env=env)
  assert done.returncode == 2 and not done.stdout
  assert re.fullmatch(r"python -m attn.measure.sanitize: needs (NVIDIA's compute-sanitizer, which .*|an NVIDIA GPU, but CUDA does not open .*)\n",
                      done.stderr, re.DOTALL)
