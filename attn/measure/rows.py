"""What is measured, a row of a table each: attention of so many queries against so many keys, and how that is written."""
from __future__ import annotations
from dataclasses import dataclass

def heads_text(H:int, Hkv:int) -> str:
  """16, or 32 on 8 where query heads share those of the keys."""
  return f"{H} on {Hkv}" if Hkv < H else f"{H}"

@dataclass(frozen=True)
class MeasuredRow:
  B: int
  H: int
  Hkv: int
  Sq: int
  Sk: int
  D: int
  causal: bool = False
  @property
  def heads(self) -> str: return heads_text(self.H, self.Hkv)
