"""Probes that show values inside a kernel: `probe("scores", x)` returns x, and the emulator shows the value of x.

    from attn.emulator import probe, probes
    s = probe("scores", s)              # in the kernel
    with probes() as found: o.numpy()   # found["scores"]: one array for each execution; without `probes()` they are printed

On hardware a probe has no effect: it is x with a comment in the source."""
from __future__ import annotations
from collections.abc import Iterator
from typing import Any
import contextlib, re
import numpy as np
from numpy.typing import NDArray
from attn.ops.language import instruction
from attn.ops.operation import emit
from attn.tinygrad_compat import AddrSpace, UOp, dtypes

Array = NDArray[Any]

def _seen(printer:Any, out:str, name:str) -> str: return f"/* probe {name} */ {{0}}"

instruction("probe", lambda lanes, x, name: lanes.probe(name, x), _seen, _seen)

def probe(name:str, x:UOp) -> UOp:
  """Returns x, a number or a vector of a lane. The emulator shows the value of x in each thread when it runs the kernel: it prints the values, or
  collects them under `name` if `probes()` is active. `name` consists of letters, digits and "_ . -". The returned UOp must be used in the kernel,
  because a value that nothing depends on is not computed. Raises ValueError for a name with other characters, and if x is a buffer or an address."""
  if not isinstance(name, str) or not re.fullmatch(r"[\w.\-]+", name):
    raise ValueError(f"name={name!r}: must consist of letters, digits, '_', '.' and '-'")
  if x.addrspace is not None and x.addrspace is not AddrSpace.ALU: raise ValueError(f"probe {name!r} is given an address: .load() the value")
  if x.dtype in dtypes.weaks: x = x.cast(dtypes.int if x.dtype == dtypes.weakint else dtypes.float)   # a number without a type yet, such as an index
  return emit("probe", x.dtype, x, name=name)

_collecting: list[dict[str, list[Array]]] = []

@contextlib.contextmanager
def probes() -> Iterator[dict[str, list[Array]]]:
  """Context manager that collects the values of probes instead of printing them. A probe is a call of `probe` in a kernel. Yields {name of the probe:
  arrays}, with one structured array for each execution of the probe. An array has a row for each active thread and the fields "workgroup" (x, y, z),
  "wave", "lane" and "values" (one number, or the numbers of a vector). A grid that is too large to run at once runs in ranges of workgroups; each
  range executes the probe separately."""
  found: dict[str, list[Array]] = {}
  _collecting.append(found)
  try: yield found
  finally: _collecting.remove(found)

def note_probe(name:str, workgroup:Array, wave:Array, lane:Array, values:Array) -> None:
  """Prints the values that n threads have at the probe `name`, or adds them to the innermost `probes()`; arrays have n as an axis."""
  # `workgroup` has the shape (n, 3), `wave` and `lane` (n,), `values` (n,), or (elements, n) for vectors
  kind = np.dtype([("workgroup", np.int32, (3,)), ("wave", np.int32), ("lane", np.int32), ("values", values.dtype, values.shape[:-1])])
  rows = np.empty(len(lane), kind)
  rows["workgroup"], rows["wave"], rows["lane"], rows["values"] = workgroup, wave, lane, values.T
  if _collecting: _collecting[-1].setdefault(name, []).append(rows)
  else: print(text(name, rows))

def text(name:str, rows:Array) -> str:
  """Returns the text that is printed for the values at the probe `name`: a paragraph for each wave, a line for each lane."""
  lines, before = list[str](), None
  for row in rows:
    if (here := (tuple(int(i) for i in row["workgroup"]), int(row["wave"]))) != before:
      lines.append(f"{name}: workgroup {here[0]}, wave {here[1]}")
      before = here
    values = np.array2string(np.atleast_1d(row["values"]), precision=6, max_line_width=10**6, suppress_small=True)
    lines.append(f"  lane {int(row['lane']):2d}: {values[1:-1]}")
  return "\n".join(lines)
