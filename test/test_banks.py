"""LDS bank conflicts of our kernels, counted by the emulator."""
from __future__ import annotations
import pytest
from attn.emulator import last_run
from cases import ARCHS, normal, problem, run
from test_dual_wave import run as run_dual_wave

def conflicts() -> dict[tuple[str, str], float]:
  """(buffer, read or write) -> cycles per conflict-free cycle of the kernel that ran last."""
  launch = last_run()
  assert launch is not None and launch.bank_conflicts
  return {(use.buffer, use.verb): use.cycles/use.phases for use in launch.bank_conflicts}

@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("D", (64, 128))
def test_forward(monkeypatch, arch:str, D:int) -> None:
  """Only RDNA's stores of V^T, 8 bytes wide, take two cycles where one would do."""
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=128, Sk=128, D=D)
  run(p, normal(p), arch)
  slow = {access: factor for access, factor in conflicts().items() if factor > 1}
  assert slow == ({} if arch.startswith("gfx9") else {("lds1", "write"): 2.0})

def test_dual_wave(monkeypatch) -> None:
  monkeypatch.setenv("ATTN_EMU_BANKS", "1")
  p = problem(H=1, Sq=256, Sk=256, D=128)
  run_dual_wave(p, normal(p))
  assert all(factor == 1 for factor in conflicts().values()), conflicts()
