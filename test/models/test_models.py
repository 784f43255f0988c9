"""Tests of tinygrad's models under `attn.installed()`: attn's kernels compute every call of attention, and the results agree with tinygrad's own."""
from __future__ import annotations
import warnings
from typing import Any
import numpy as np
import pytest
import attn
from attn.tinygrad_compat import Tensor, dtypes
from api_cases import computed_on
from cases import array
from program_calls import PROGRAMS, Clip, Gpt2, Mla, Unet, Vae, Vit

pytestmark = pytest.mark.usefixtures("not_unrolled")

TYPES = {"half": dtypes.half, "bfloat16": dtypes.bfloat16, "float": dtypes.float}
DEVICES = ("EMU::gfx942", "EMU::gfx1100", "EMU::sm_80", "CPU")

def results(program:Any, dtype:str, exact:bool=False) -> list[np.ndarray]:
  Tensor.manual_seed(1)
  return [array(x.float()) for x in program(TYPES[dtype], exact).run()]

NEVER_BY_DEFAULT = (Clip, Vit, Unet, Vae, Gpt2, Mla)      # whose calls other tests make as well

def by_default(place:int, dtype:str, device:str) -> bool:
  # Returns whether a case (a program, a dtype and a chip) runs without `-m thorough`.
  # One case of each program does, except for programs in NEVER_BY_DEFAULT: float16 in every other program and bfloat16 in the rest, with the emulated
  # chips taking turns. `place` is the program's index in PROGRAMS.
  return PROGRAMS[place] not in NEVER_BY_DEFAULT and dtype == ("half", "bfloat16")[place % 2] and device == DEVICES[place % 3]

OWN = Tensor.scaled_dot_product_attention

def own_of_rounded(q:Tensor, k:Tensor, v:Tensor, *args:Any, **kwargs:Any) -> Tensor:
  # Computes tinygrad's own attention, of inputs rounded to 16 bits if some of q, k and v have 16 bits, as attn does it.
  types = {t.dtype for t in (q, k, v)}
  if len(types) == 1: return OWN(q, k, v, *args, **kwargs)
  narrow = next(iter(types - {dtypes.float}))
  return OWN(*(t.cast(narrow) for t in (q, k, v)), *args, **kwargs).float()

@pytest.mark.sample(2)
@pytest.mark.parametrize("program, dtype, device", [
  pytest.param(program, dtype, device, marks=() if by_default(place, dtype, device) else pytest.mark.thorough)
  for place, program in enumerate(PROGRAMS) for dtype in TYPES for device in DEVICES])
def test_a_program_of_tinygrad(program:Any, dtype:str, device:str) -> None:
  # attn's kernels are as accurate in a small program that calls attention like one of tinygrad's models: the error against float32 is at most twice
  # that of tinygrad's own attention. Tensors are rounded in the same way for both.
  with computed_on(device), warnings.catch_warnings():
    warnings.simplefilter("error")       # a call that goes to tinygrad's own warns
    exact = results(program, dtype, exact=True)
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(Tensor, "scaled_dot_product_attention", own_of_rounded)
      own = results(program, dtype)
    with attn.installed() as decisions:
      decisions.clear()
      ours = results(program, dtype)
      assert len(decisions) == program.calls and all(x.kernel not in (None, "three_pass") for x in decisions), list(decisions)
  for x, y, z in zip(exact, own, ours, strict=True): assert np.abs(z - x).max() <= 2*np.abs(y - x).max() + 1e-5*np.abs(x).max()
