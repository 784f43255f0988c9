"""Table of the chips: one row for each chip, with all facts about it. Begin with `get_chip`."""
from __future__ import annotations
from attn.chips.cdna2 import CHIPS_OF_CDNA2
from attn.chips.cdna3 import CHIPS_OF_CDNA3
from attn.chips.cdna4 import CHIPS_OF_CDNA4
from attn.chips.family import LLVM as LLVM, Card as Card, Chip, Family, Pipes as Pipes
from attn.chips.nvidia import CHIPS_OF_NVIDIA
from attn.chips.other import CHIPS_WITHOUT_A_MATRIX_UNIT, other_chip as other_chip
from attn.chips.rdna3 import CHIPS_OF_RDNA3
from attn.chips.rdna4 import CHIPS_OF_RDNA4

# Kernels, dispatch, the search for tile descriptions, the report on machine code, the disassembler, the roofline and error messages read this table.
# Only the emulator has its own tables. A test checks that the emulator's tables agree with this table.

CHIPS: dict[str, Chip] = {chip.name: chip for chip in (
  *CHIPS_OF_CDNA2, *CHIPS_OF_CDNA3, *CHIPS_OF_CDNA4, *CHIPS_OF_RDNA3, *CHIPS_OF_RDNA4, *CHIPS_WITHOUT_A_MATRIX_UNIT, *CHIPS_OF_NVIDIA)}
FAMILIES: dict[str, Family] = {chip.family: chip.unit for chip in CHIPS.values()}
MODELLED = tuple(name for name, chip in CHIPS.items() if chip.unit.pipes is not None)   # chips with bounds from machine code
SEARCHED = tuple(name for name, chip in CHIPS.items() if chip.searched)                 # one chip of each of AMD's families

def get_chip(name:str) -> Chip:
  """Returns the chip with a name such as "gfx942" or "gfx942:sramecc+:xnack-". Raises ValueError for an unknown name."""
  if (chip := CHIPS.get(name.split(":")[0])) is None:
    plain = [chip.name for chip in CHIPS_WITHOUT_A_MATRIX_UNIT]
    units = [x for x in CHIPS if x not in plain]
    raise ValueError(f"arch={name!r} is not known; supported with a matrix unit: {', '.join(units)}; without one: {', '.join(plain)}")
  return chip

def modelled(name:str) -> Chip:
  """Returns the chip `name`. Raises ValueError if attn does not know how many cycles the chip's instructions take."""
  # cycles of instructions and bandwidths, from which lower bounds of a kernel's time are computed
  if name not in MODELLED: raise ValueError(f"no rates of instructions are known for {name!r}; they are known for {', '.join(MODELLED)}")
  return CHIPS[name]
