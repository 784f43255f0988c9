"""Counter of LDS bank conflicts, for ATTN_EMU_BANKS=1. Counts are kept for each buffer and for each number of bytes that a lane accesses."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
import functools, sys
import numpy as np
from numpy.typing import NDArray

# LDS has 32 banks of 4 bytes; CDNA4 has 64 for reads. LDS serves the lanes of a wave in groups, the phases. A phase has just enough lanes to use all
# banks once. In each cycle of a phase every bank gives one dword, and lanes that read the same dword share it. So a phase takes as many cycles as
# there are different dwords in its busiest bank. A phase consists of consecutive lanes, except for 16-byte reads on CDNA. Sources: AMD's article
# "Avoiding LDS bank conflicts on AMD GPUs using CK-Tile" (2025) for CDNA3 (CDNA2 is assumed to be the same); HipKittens (arXiv 2511.08083), which
# measured the phases of MI355X, for CDNA4. For RDNA and NVIDIA phases of consecutive lanes are assumed.

Array = NDArray[Any]

@dataclass
class BankUse:
  """Counts of LDS accesses and of the cycles that they took: of reads or of writes of one buffer, with equal numbers of bytes per lane."""
  buffer: str
  verb: str
  nbytes: int
  # phases (groups of lanes that LDS serves together) with an active lane, and the cycles that they took: the difference is lost to bank conflicts
  phases: int = 0
  cycles: int = 0
  @property
  def conflicts(self) -> int: return self.cycles - self.phases
  def __str__(self) -> str:
    return f"{self.buffer}: {self.verb}s of {self.nbytes} bytes take {self.cycles} cycles, {self.conflicts} of them for bank conflicts"

def _runs(*starts:int) -> list[int]: return [s + i for s in starts for i in range(4)]

_READ_B128: dict[str, tuple[list[int], ...]] = {   # family with waves of 64 lanes -> the phases of half a wave
  "cdna3": (_runs(0, 20), _runs(4, 16), _runs(8, 28), _runs(12, 24)),
  "cdna4": (_runs(0, 12, 20, 24), _runs(4, 8, 16, 28)),
}

@functools.cache
def phases(family:str, wave:int, read:bool, nbytes:int) -> tuple[int, Array]:
  """Returns (number of LDS banks, groups of lanes that LDS serves at the same time, an array with one group in each row) for accesses of `nbytes`
  bytes per lane."""
  banks = 64 if family == "cdna4" and read else 32
  if read and nbytes == 16 and wave == 64:
    groups = _READ_B128.get(family, _READ_B128["cdna3"])
    return banks, np.array([[half + lane for lane in group] for half in (0, 32) for group in groups])
  return banks, np.arange(wave).reshape(-1, min(wave, banks*4//max(nbytes, 4)))

class BankCounter:
  def __init__(self, family:str, wave:int):
    self.family, self.wave, self.uses = family, wave, dict[tuple[str, str, int], BankUse]()
  def show(self, kernel:str, arch:str) -> None:
    """Prints the counted LDS accesses and bank conflicts of a kernel to stderr."""
    for use in self.uses.values(): print(f"{kernel} on {arch}: {use}", file=sys.stderr)
  def count(self, buffer:str, read:bool, address:Array, nbytes:int, active:Array|None) -> None:
    """Counts an access of `nbytes` bytes per thread to `buffer`, at the byte address of each thread, `address` (threads,)."""
    verb = "read" if read else "write"
    use = self.uses.setdefault((buffer, verb, nbytes), BankUse(buffer, verb, nbytes))
    banks, groups = phases(self.family, self.wave, read, nbytes)
    def by_phase(x:Array) -> Array: return x.reshape(-1, self.wave)[:, groups].reshape(-1, groups.shape[1])
    dwords = (by_phase(address)[:, :, None]//4 + np.arange(max(1, nbytes//4))).reshape(-1, groups.shape[1]*max(1, nbytes//4))
    if active is not None: dwords = np.where(np.repeat(by_phase(active), max(1, nbytes//4), axis=1), dwords, -1)
    dwords = np.sort(dwords, axis=1)
    first = dwords >= 0
    first[:, 1:] &= dwords[:, 1:] != dwords[:, :-1]                                   # each dword counts once
    slot = np.arange(len(dwords))[:, None]*banks + dwords % banks
    busiest = np.bincount(slot[first], minlength=len(dwords)*banks).reshape(-1, banks).max(axis=1)
    use.phases += int((busiest > 0).sum())
    use.cycles += int(busiest.sum())
