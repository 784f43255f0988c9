"""What ATTN_KERNEL asks for: the kernel that computes attention, what computes its gradient, or both, with a comma between them."""
from __future__ import annotations
import functools, os
from collections.abc import Sequence
from dataclasses import dataclass

BACKWARD_KERNELS = ("backward_dq", "backward_dkdv")
BIAS_KERNEL = "backward_dbias"           # runs beside them, where the gradient of a bias is asked for
BY_TINYGRAD = "backward_three_pass"      # the gradient by tinygrad, from three_pass, whatever kernel computed attention

@dataclass(frozen=True)
class Forced:
  """The kernels by name, "" where dispatch is to choose. One backward kernel stands for all: the others take the delta that comes with dQ."""
  forward: str
  backward: str

def forced(kernels:Sequence[str]) -> Forced:
  """Of the environment; `kernels` are those of the forward. Raises ValueError for a name that there is not, and for two that exclude each other."""
  return _parsed(os.environ.get("ATTN_KERNEL", ""), tuple(kernels))

@functools.cache
def _parsed(text:str, kernels:tuple[str, ...]) -> Forced:
  names = [x.strip() for x in text.split(",")] if text else []
  if unknown := [x for x in names if x not in (*kernels, *BACKWARD_KERNELS, BIAS_KERNEL, BY_TINYGRAD)]:
    which = f"{unknown[0]!r} "*(unknown[0] != text)
    raise ValueError(f"ATTN_KERNEL={text!r}: {which}must be one of {', '.join(kernels)}; or of the backward, after a comma perhaps, "
                     f"one of {', '.join((*BACKWARD_KERNELS, BIAS_KERNEL, BY_TINYGRAD))}")
  forward = [x for x in names if x in kernels]
  backward = ["" if x in kernels else BACKWARD_KERNELS[0] if x in (*BACKWARD_KERNELS, BIAS_KERNEL) else x for x in names]
  for chosen in (forward, backward := [x for x in dict.fromkeys(backward) if x]):
    if len(chosen) > 1: raise ValueError(f"ATTN_KERNEL={text!r}: {' and '.join(chosen)} exclude each other")
  return Forced("".join(forward), "".join(backward))
