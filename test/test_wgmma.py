"""wgmma on Hopper: the kernel against float64, on the emulator and, with `python -m pytest -m gpu`, on the GPU that is there."""
from __future__ import annotations
import pytest
from attn import dispatch
from attn.kernels import forward_wgmma
from cases import check
from test_forward import ADVERSARIAL, MASKS, SHAPES

GPU = pytest.param("CUDA", marks=pytest.mark.gpu)
either = pytest.mark.parametrize("chip", ("sm_90", GPU))

@pytest.fixture(autouse=True)
def always(monkeypatch) -> None:
  """The kernel takes small problems too."""
  monkeypatch.setattr(forward_wgmma, "too_small", lambda p, arch, tile: None)
  monkeypatch.setattr(dispatch, "_choose", dispatch._choose.__wrapped__)

@either
@pytest.mark.parametrize("case", SHAPES)
def test_shapes(chip:str, case:str) -> None: check(chip, **SHAPES[case])

@either
@pytest.mark.parametrize("case", MASKS)
def test_masks(chip:str, case:str) -> None: check(chip, **MASKS[case])

@either
@pytest.mark.parametrize("make", ADVERSARIAL, ids=lambda f: f.__name__)
def test_adversarial(chip:str, make) -> None:
  check(chip, make, H=2, Sq=40, Sk=200, D=64, dtype="bfloat16" if make.__name__ == "huge_key" else "float16")
  check(chip, make, H=2, Sq=70, Sk=90, D=32, dtype="bfloat16", causal=True)
