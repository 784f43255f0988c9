"""Base class of the problems that the measurements print as rows of tables: the sizes of the problem, and their text in the table."""
from __future__ import annotations
from dataclasses import dataclass

def heads_text(H:int, Hkv:int) -> str:
  """Returns the text for the numbers of heads: "16", or "32 on 8" if 32 query heads share 8 key/value heads."""
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
