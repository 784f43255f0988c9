"""Predicted times of decoding over caches of 16 and of 8 bits on AMD's chips: the table docs/data/decode_amd.csv."""
from __future__ import annotations
from collections.abc import Sequence
from attn.chips import MODELLED, get_chip
from attn.chips.matrix import MMA
from attn.isa.costs import report_of
from attn.isa.source import DECODING, Shape, Spec, chosen
from attn.isa.timing.kernels import predicted_kernel

# Each row is one kernel on the first card of its chip, at the rated clock, for 64 sequences of 4096 keys, with 32 query heads on 8 key heads, D =
# 128. VALU per element is the number of vector operations of all lanes in a loop iteration, divided by the elements of K and V that the iteration
# reads.

DECODE_WIDTH, DECODE_STEP = 128, Shape(64, 32, 8, 4096)
OF_DECODING = ("kernel", "card", "GHz", "tile", "key ranges", "VALU per element", "registers", "spills", "us of compute units", "us of memory", "us")

def decoding_specs(arch:str) -> list[Spec]:
  able = [kernel for kernel in DECODING if kernel != "decode_fp8" or get_chip(arch).fp8]
  return [Spec(arch, DECODE_WIDTH, dtype, "full", kernel) for dtype in MMA for kernel in able]

def decoding_line(spec:Spec) -> str:
  """Compiles the kernel that `spec` names, and returns its row of the table of predicted decoding times."""
  found, report, tile = predicted_kernel(spec, DECODE_STEP, lines=False), report_of(spec, 0, False), chosen(spec, shape=DECODE_STEP)[1]
  assert found.division is not None and report.loop is not None
  timing, predicted = found.timing, found.on_cards()[0]
  valu = report.loop.valu*timing.chip.wave*timing.waves/(found.division.walked*2*DECODE_WIDTH)
  us = {level: 1e6*seconds for level, seconds in predicted.times.items()}
  numbers = (f"{predicted.ghz:g}", str(tile), found.division.splits, f"{valu:.2f}", timing.resources.vgpr, timing.resources.vgpr_spills,
             f"{us['compute']:.0f}", f"{us['memory']:.0f}", f"{1e6*predicted.seconds:.0f}")
  return ",".join(map(str, (spec, predicted.card.name, *numbers)))

def decoding_table(archs:Sequence[str]=MODELLED) -> str:
  return "\n".join([",".join(OF_DECODING), *(decoding_line(spec) for arch in archs for spec in decoding_specs(arch))]) + "\n"
