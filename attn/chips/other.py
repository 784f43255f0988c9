"""Chips without a matrix unit, and chips that are not in attn's table of chips. Only the kernels of plain UOps run on them."""
from __future__ import annotations
from attn.chips.family import Card, Chip, Family

OTHER = Family("other", wave=32, vgprs=255, busy_waves=8)
RDNA1 = Family("rdna1", wave=32, vgprs=256, busy_waves=2)
RDNA2 = Family("rdna2", wave=32, vgprs=256, busy_waves=2)

CHIPS_WITHOUT_A_MATRIX_UNIT = (
  Chip("gfx1010", RDNA1, 65536, (Card("RX 5700 XT", 40), Card("RX 5700", 36))),
  Chip("gfx1030", RDNA2, 65536, (Card("RX 6900 XT", 80), Card("RX 6800 XT", 72))),)

def other_chip(name:str, lds:int, serial:bool=False) -> Chip:
  """Returns a table row for a device whose chip is not in the table, with `lds` bytes of local memory for a workgroup."""
  # `serial`: the device has no workgroups and computes one block after another, as a CPU does. The number of compute units is 0, because it is not
  # known.
  return Chip(name, OTHER, lds, (Card(name, 0),), serial=serial)
