"""Base class of the problems in the tables that measurements print, and functions that make text of a table row."""
from __future__ import annotations
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

def line_of_row(row:Mapping[str, Any], digits:int=4) -> str:
  """Returns a row of a table as one line: each name with its value, floats with `digits` significant digits."""
  def shown(x:Any) -> str:
    if isinstance(x, list): return " ".join(map(shown, x))
    return f"{x:.{digits}g}" if isinstance(x, float) else str(x)
  return " | ".join(f"{name} {shown(x)}" for name, x in row.items())

def write_rows(rows:Sequence[Mapping[str, Any]], path:str) -> None:
  """Writes rows to a CSV file; a row may lack some of the columns."""
  with open(path, "w", newline="") as file:
    table = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)

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
