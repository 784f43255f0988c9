"""What the emulator itself has to know about each target, from the documents and not from attn/chips: that the two agree is a test."""
from __future__ import annotations
from dataclasses import dataclass

@dataclass(frozen=True)
class EmulatedChip:
  """What the emulator itself has to know about a target."""
  family: str   # of the matrix unit, where there is one
  wave: int
  lds: int      # bytes a workgroup may have
  multiplies: bool = True    # has a matrix unit

EMULATED: dict[str, EmulatedChip] = {
  "gfx90a": EmulatedChip("cdna2", 64, 65536),
  "gfx942": EmulatedChip("cdna3", 64, 65536),
  "gfx950": EmulatedChip("cdna4", 64, 163840),
  **dict.fromkeys(("gfx1100", "gfx1101", "gfx1102", "gfx1103", "gfx1150", "gfx1151", "gfx1152"), EmulatedChip("rdna3", 32, 65536)),
  **dict.fromkeys(("gfx1200", "gfx1201"), EmulatedChip("rdna4", 32, 65536)),
  "gfx1010": EmulatedChip("rdna1", 32, 65536, multiplies=False),
  "gfx1030": EmulatedChip("rdna2", 32, 65536, multiplies=False),
  "sm_80": EmulatedChip("nvidia", 32, 166912),
  **dict.fromkeys(("sm_86", "sm_89"), EmulatedChip("nvidia", 32, 101376)),
  "sm_90": EmulatedChip("nvidia", 32, 232448),
  "sm_120": EmulatedChip("nvidia", 32, 101376),
}

def emulated_chip(arch:str) -> EmulatedChip:
  if arch not in EMULATED: raise ValueError(f"EMU does not emulate {arch!r}; DEV=EMU::<arch> with arch one of {', '.join(EMULATED)}")
  return EMULATED[arch]
