"""Tests that every command in README.md runs, and that the samples of output in README.md have the form of the real output."""
import os, re, subprocess, sys, tomllib
from pathlib import Path
import pytest
import test_examples
from attn.chips import CHIPS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT/"README.md").read_text()
BLOCKS = [text for kind, text in re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL) if not kind]
COMMANDS = [line[2:] for block in BLOCKS for line in block.splitlines() if line.startswith("$ ")]
TESTS, GPU_TESTS, INSTALL = "python -m pytest -n 2", "python -m pytest -m gpu", "python -m pip install -e '.[dev]'"
# Smaller settings for long commands, and emulators in place of GPUs.
SMALL = {"N=4096": "N=96", "B=4 H=16": "B=1 H=2", "DEV=AMD": "DEV=EMU::gfx942", "DEV=CUDA": "DEV=EMU::sm_90",
         "SWEEP=1": "SWEEP=1 H=2 HKV=1 N=64 SK=64 D=32"}

def run(command:str, folder:Path) -> str:
  for long, short in SMALL.items(): command = command.replace(long, short)
  command = command.replace("CSV=", f"CSV={folder}/")
  environment = {k: v for k, v in os.environ.items() if k not in ("DEV", "ATTN_EMU_CHECKS")}
  path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
  environment |= {"PATH": path, "PYTHONPATH": str(ROOT)}
  done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=120, cwd=ROOT, env=environment)
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout

def shape(line:str) -> str:
  # Removes figures and widths from a line of output, so that lines of README.md and of a real run can be compared.
  return " ".join(re.sub(r"[\d.]+", "#", line).split())

def test_the_main_commands_are_there() -> None:
  assert f"$ {TESTS}" in README.splitlines() and COMMANDS.index(INSTALL) < COMMANDS.index("python bench.py") < COMMANDS.index(TESTS)
  assert len(COMMANDS) > 10

def test_the_gate_runs_the_test_command() -> None:
  # .ci/run finds the right test command in README.md, by a sed expression, and executes it.
  script = (ROOT/".ci/run").read_text()
  expression = re.search(r"sed -n '([^']*)' README.md", script)
  assert expression is not None
  found = subprocess.run(["sed", "-n", expression[1], "README.md"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
  assert found.splitlines()[0] == TESTS and "head -n 1" in script and 'eval "$test_command"' in script

def test_install_names_every_extra() -> None:
  project = tomllib.loads((ROOT/"pyproject.toml").read_text())["project"]
  assert "dev" in project["optional-dependencies"]
  named = re.findall(r"pip install '\.\[(\w+)\]'", README)
  assert set(named) == set(project["optional-dependencies"])

def test_the_test_commands_collect(tmp_path:Path) -> None:
  assert "test_readme.py" in run(TESTS.replace("-n 2", "--collect-only test/test_readme.py"), tmp_path)
  assert GPU_TESTS in COMMANDS and "test_nvidia.py" in run(f"{GPU_TESTS} --collect-only test/kernels/test_nvidia.py", tmp_path)

@pytest.mark.parametrize("command", [c for c in COMMANDS if "COMPARE=1" in c])
def test_a_comparison_needs_a_gpu(command:str, tmp_path:Path) -> None:
  # Each command in README.md that compares attn with other libraries has valid settings. On this machine it stops only because there is no GPU to
  # compare on.
  with pytest.raises(AssertionError, match=r"bench\.py: COMPARE=1 on EMU: it is for DEV=CUDA"): run(command, tmp_path)

@pytest.mark.parametrize("command", [c for c in COMMANDS if c not in (TESTS, GPU_TESTS, INSTALL) and "examples/" not in c and "COMPARE=1" not in c])
def test_command(command:str, tmp_path:Path) -> None:
  output = run(command, tmp_path)
  assert output.strip()
  if command == "python bench.py" and not output.startswith("no DEV"): pytest.skip("the sample is from a machine without an AMD GPU")
  _, sample = next(b for b in BLOCKS if f"$ {command}\n" in b).split(f"$ {command}\n")
  printed = {shape(line) for line in output.splitlines()}
  for line in sample.split("$ ")[0].splitlines():   # compares all lines but the rows of tables
    if not line.startswith(("│", "┏", "┡", "└")): assert shape(line) in printed, f"the sample of {command!r} has {line!r}"

def test_every_example_is_shown_and_tested() -> None:
  shown = {re.search(r"examples/(\w+)\.py", c)[1] for c in COMMANDS if "examples/" in c}   # type: ignore[index]
  assert shown == set(test_examples.SAYS)

def test_it_stays_short() -> None:
  # README.md has at most 100 lines of prose. Tables and blocks of commands do not count: they grow with the number of chips and examples.
  prose = re.sub(r"^```.*?^```$", "", README, flags=re.MULTILINE | re.DOTALL)
  assert 20 < len([line for line in prose.splitlines() if line and not line.startswith("|")]) <= 100

def test_the_table_of_chips_is_the_one_in_code() -> None:
  # README.md says that a chip was measured only if attn's table of chips says so, too.
  table = re.search(r"^\| chip \|.*\n.*\n((?:\|.*\n)+)", README, re.MULTILINE)
  assert table is not None
  rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]
  assert {name: cards for name, cards, _, _ in rows} == {name: chip.products for name, chip in CHIPS.items()} and len(rows) == len(CHIPS)
  assert [name for name, *_, state in rows if "**runs on silicon**" in state] == ["sm_90"]
  costed = {line.split("/")[0] for line in (ROOT/"docs"/"costs.txt").read_text().splitlines() if line.startswith("gfx")}
  for name, _, unit, state in rows:
    assert "emulated" in state and (("wgmma" in unit) == CHIPS[name].wgmma) and ("compiled" in state) == (name in costed), name

def test_what_is_predicted_for_amd_follows_from_the_costs() -> None:
  # README.md's table about AMD repeats docs/costs.txt: the range of `useful` (share of the matrix unit's peak rate that goes to necessary products)
  # over both dtypes and masks at D = 128, and the ranges of the predicted rates. The rates follow from the predicted times for a batch of 4, 16
  # heads, and 8192 queries and keys, at the clock that the GPU sustains in its fastest GEMM and at its rated clock.
  costs, scores = costs_by_kernel(), 4*16*8192
  for name, useful, sustained, rated, gemm in table_after("docs/costs.txt also has predicted times"):
    chip, card = next((chip, card) for chip in CHIPS.values() for card in chip.cards if card.name == name)
    assert card is next(c for c in chip.cards if c.ghz)
    uses, rates = [], [list[float](), list[float]()]
    for dtype in ("float16", "bfloat16"):
      for mask, keys in (("full", 8192), ("causal", 8193/2)):
        row = costs[f"{chip.name}/128/{dtype}/{mask}"]
        uses.append(int(row["useful"].rstrip("%")))
        for found, column in zip(rates, ("ms at GEMM's clock", "ms")): found.append(4*scores*keys*128/float(row[column])*1e-9)
    assert (sustained, rated) == tuple(f"{min(x):.0f} to {max(x):.0f}" for x in rates), name
    assert (useful, gemm) == (f"{min(uses)} to {max(uses)}%", f"{card.gemm:.0f}"), name

def costs_by_kernel() -> dict[str, dict[str, str]]:
  header, *rows = [[cell.strip() for cell in line.split("|")] for line in (ROOT/"docs"/"costs.txt").read_text().splitlines()[1:]]
  return {row[0]: dict(zip(header, row, strict=True)) for row in rows}

def table_after(words:str) -> list[list[str]]:
  # Returns the rows of the first table in README.md that follows the text `words`, without the table's header.
  found = re.search(re.escape(words) + r"[^|]*?\n\n\|.*\n\|[-|]+\n((?:\|.*\n)+)", README)
  assert found is not None, words
  return [[cell.strip() for cell in line.strip("|").split("|")] for line in found[1].splitlines()]
