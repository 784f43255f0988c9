"""LDS bank conflicts of our kernels, counted by the emulator."""
from __future__ import annotations
from dataclasses import replace
import pytest
from attn.chips import get_chip
from attn.choose.candidates import Candidate
from attn.choose.tiles import CANDIDATES, amd_tile
from attn.emulator import last_run
from cases import ARCHS, check_kernels, normal, problem, run
from test_dual_wave import run as run_dual_wave

def conflicts() -> dict[tuple[str, str], float]:
  """(buffer, read or write) -> cycles per conflict-free cycle of the kernel that ran last."""
  launch = last_run()
  assert launch is not None and launch.bank_conflicts
  return {(use.buffer, use.verb): use.cycles/use.phases for use in launch.bank_conflicts}

@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("D", (64, 128))
def test_forward(monkeypatch, arch:str, D:int) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=128, Sk=128, D=D)
  run(p, normal(p), arch)
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("block_n", (16, 32, 64, 128))
def test_tiles(monkeypatch, arch:str, block_n:int) -> None:
  """Every length of a row of V^T, and a second buffer."""
  if block_n < get_chip(arch).matrix["float16"][0].M: pytest.skip("no tile of the matrix instruction")
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  check_kernels(arch, tile=lambda t: replace(t, block_n=block_n, waves=4, prefetch=1 if block_n > 64 else 2), H=1, Sq=128, Sk=300, D=64)
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

def test_dual_wave(monkeypatch) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=256, Sk=256, D=128)
  run_dual_wave(p, normal(p))
  assert all(factor == 1 for factor in conflicts().values()), conflicts()

@pytest.mark.parametrize(("arch", "c"), [(arch, c) for arch in ARCHS for c in CANDIDATES[get_chip(arch).family]], ids=str)
def test_table(monkeypatch, arch:str, c:Candidate) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=256, Sk=128, D=c.up_to)
  check_kernels(arch, tile=lambda _: amd_tile(p, get_chip(arch), c), H=1, Sq=256, Sk=128, D=c.up_to)
  assert all(factor == 1 for factor in conflicts().values()), conflicts()
