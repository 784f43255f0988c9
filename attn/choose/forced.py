"""What ATTN_KERNEL asks for: the kernel that computes attention, what computes its gradient, or both, with a comma between them."""
from __future__ import annotations
import functools, os
from collections.abc import Sequence
from dataclasses import dataclass

BACKWARD_KERNELS = ("backward_dq", "backward_dkdv")
BIAS_KERNEL = "backward_dbias"           # runs beside them, where the gradient of a bias is asked for
BY_TINYGRAD = "backward_three_pass"      # the gradient by tinygrad, from three_pass, whatever kernel computed attention

ON_AMD, ON_MMA, ON_WGMMA = MATRIX_UNITS = "", "_mma", "_wgmma"      # the matrix unit that a backward kernel is for, as its name ends
ON_ANY = "_tiled"                  # of plain UOps, for none
UNITS = (*MATRIX_UNITS, ON_ANY)
# The backward kernels by name, and the units of those that run together with each. AMD's names stand for the same kernels on any unit.
WAYS: dict[str, tuple[str, ...]] = dict.fromkeys(BACKWARD_KERNELS, UNITS) | {BIAS_KERNEL: MATRIX_UNITS} | \
  {name + unit: (unit,) for unit in (ON_MMA, ON_WGMMA, ON_ANY) for name in BACKWARD_KERNELS} | {BIAS_KERNEL + ON_MMA: (ON_MMA, ON_WGMMA)}

@dataclass(frozen=True)
class Forced:
  """The kernels by name, "" where dispatch is to choose. One backward kernel stands for all that run together with it, on one of `units`."""
  forward: str
  backward: str
  units: tuple[str, ...] = UNITS

def forced(kernels:Sequence[str]) -> Forced:
  """Of the environment; `kernels` are those of the forward. Raises ValueError for a name that there is not, and for two that exclude each other."""
  return _parsed(os.environ.get("ATTN_KERNEL", ""), tuple(kernels))

@functools.cache
def _parsed(text:str, kernels:tuple[str, ...]) -> Forced:
  names = [x.strip() for x in text.split(",")] if text else []
  if unknown := [x for x in names if x not in (*kernels, *WAYS, BY_TINYGRAD)]:
    which = f"{unknown[0]!r} "*(unknown[0] != text)
    raise ValueError(f"ATTN_KERNEL={text!r}: {which}must be one of {', '.join(kernels)}; or of the backward, after a comma perhaps, "
                     f"one of {', '.join((*WAYS, BY_TINYGRAD))}")
  forward, backward = ([x for x in dict.fromkeys(names) if (x in kernels) == first] for first in (True, False))
  units = tuple(unit for unit in UNITS if all(unit in WAYS.get(name, ()) for name in backward))
  for chosen, together in ((forward, len(forward) == 1), (backward, bool(units) or len(backward) == 1)):
    if chosen and not together: raise ValueError(f"ATTN_KERNEL={text!r}: {' and '.join(chosen)} exclude each other")
  return Forced("".join(forward), backward[0] if backward else "", units)
