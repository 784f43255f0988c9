"""Predicted times of the kernels of a report, by the timing model of attn/isa/timing."""
from __future__ import annotations
import importlib.util
from attn.chips import MODELLED, Card, Chip
from attn.report.schema import PredictedTime
from attn.report.shapes import ReportedShape
from attn.report.system import first_line

PACKAGES = ("click", "rich", "ziglang")     # what the extra isa installs and the model needs
WITHOUT_ISA = "predictions need the extra isa: run pip install '.[isa]' in a clone of attn"

def predicted(shape:ReportedShape, kernel:str, tile:str, arch:Chip, may_be:tuple[Card, ...]) -> tuple[PredictedTime, ...]|str:
  """Returns predicted times of a kernel (forward, dq, dkdv or decode) with `tile`, or the reason why there are none."""
  if arch.name not in MODELLED: return f"the timing model has no data for {arch.name}"
  if any(importlib.util.find_spec(name) is None for name in PACKAGES): return WITHOUT_ISA
  # for the first card whose rated clock is known: at this clock, and at the clock that GEMMs sustain if it is known
  rated = [card for card in may_be if card.ghz]
  if not rated: return f"attn knows no card with {arch.name} and this number of compute units; name the card by --card"
  from attn.isa import source
  from attn.isa.timing.kernels import predicted_kernel
  mask = "causal" if shape.causal else "full"
  try:
    spec = source.Spec(arch.name, shape.D, shape.dtype, mask, kernel)
    size = source.Shape(shape.B, shape.H, shape.Hkv, shape.Sk)
    if (modelled := str(source.chosen(spec, shape=size)[1])) != tile: return f"the kernel ran with another tile than the model has ({modelled})"
    found = predicted_kernel(spec, size, lines=False).on_cards(rated[0].name)
  # a failed prediction does not end the measurements
  except Exception as e: return first_line(e)
  return tuple(PredictedTime(x.card.name, x.ghz, x.seconds, x.limit) for x in found)
