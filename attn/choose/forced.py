"""Parser of the environment variable ATTN_KERNEL: the name of a forward kernel, a name that says what computes gradients, or both with a comma
between them."""
from __future__ import annotations
import functools, os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from attn.choose.gradient_kernels import BACKWARD_KERNELS, BIAS_KERNEL, GRADIENT_KERNELS

BY_TINYGRAD = "backward_three_pass"      # tinygrad computes the gradient from three_pass, whatever kernel computed attention
UNITS = tuple(GRADIENT_KERNELS)          # units that have backward kernels, as the endings of the kernels' names

def together_on(unit:str) -> Iterator[str]:
  """Yields the names of a matrix unit's backward kernels that ATTN_KERNEL may contain, such as "backward_dq_mma" and "backward_dq"."""
  # `unit` is the ending of the kernels' names. A name without an ending allows every unit that has such a kernel.
  for suffix in ("", unit): yield from (name + suffix for name in BACKWARD_KERNELS)
  if (bias := GRADIENT_KERNELS[unit].bias) is not None:
    for suffix in ("", bias.suffix): yield BIAS_KERNEL + suffix

# name of a backward kernel -> the units on which kernels run together under this name
NAMES_ON = {unit: tuple(together_on(unit)) for unit in UNITS}
WAYS = {name: tuple(unit for unit in UNITS if name in NAMES_ON[unit]) for names in NAMES_ON.values() for name in names}

@dataclass(frozen=True)
class Forced:
  """The kernels that ATTN_KERNEL demands: a forward and a backward kernel, by name; the name is "" where attn may choose freely."""
  forward: str
  backward: str
  # Matrix units that ATTN_KERNEL allows for the gradients, as endings of kernels' names, such as "_mma". All backward kernels of a gradient are for
  # the same unit.
  units: tuple[str, ...] = UNITS

def forced(kernels:Sequence[str]) -> Forced:
  """Returns the kernels that ATTN_KERNEL demands. `kernels` has the names of all forward kernels. Raises ValueError for a name that no kernel has."""
  return _parsed(os.environ.get("ATTN_KERNEL", ""), tuple(kernels))

@functools.cache
def _parsed(text:str, kernels:tuple[str, ...]) -> Forced:
  names = [x.strip() for x in text.split(",")] if text else []
  if unknown := [x for x in names if x not in (*kernels, *WAYS, BY_TINYGRAD)]:
    which = f"{unknown[0]!r} "*(unknown[0] != text)
    raise ValueError(f"ATTN_KERNEL={text!r}: {which}must be one of {', '.join(kernels)}; or for the gradients, alone or after a comma, "
                     f"one of {', '.join((*WAYS, BY_TINYGRAD))}")
  forward = [x for x in dict.fromkeys(names) if x in kernels]
  backward = [x for x in dict.fromkeys(names) if x not in kernels]
  units = tuple(unit for unit in UNITS if all(unit in WAYS.get(name, ()) for name in backward))
  for chosen, together in ((forward, len(forward) == 1), (backward, bool(units) or len(backward) == 1)):
    if chosen and not together: raise ValueError(f"ATTN_KERNEL={text!r}: {' and '.join(chosen)} exclude each other")
  return Forced("".join(forward), backward[0] if backward else "", units)
