"""Runs the backward kernels of a problem one by one, so that each can be timed."""
from __future__ import annotations
from dataclasses import dataclass, replace
import numpy as np
from attn.calls.gradient import BackwardLaunch, added, backward_kernels
from attn.chips import Chip
from attn.choose.backward import can_differentiate, parts_of_chosen
from attn.measure.inputs import normal_numbers, random_operands, tensors_of_kernel, to_tensor
from attn.problem import Problem
from attn.reference import arrange
from attn.tinygrad_compat import Tensor

GRADIENT_NAMES = ("dq", "dk", "dv")

@dataclass(frozen=True)
class Backward:
  """The backward kernels of a problem, ready to be run one by one: tensors and launches by name."""
  arrays: list[np.ndarray]       # q, k, v and dO, (B, H, S, D)
  tensors: dict[str, Tensor]     # the inputs, o and lse
  launches: dict[str, BackwardLaunch]
  def run(self, name:str) -> dict[str, Tensor]:
    """Launches the kernel `name`, and returns its outputs by name, as lazy tensors."""
    shapes = self.launches[name].shapes
    written = Tensor.custom_kernel(*tensors_of_kernel(shapes, self.tensors), fxn=self.launches[name].kernel)
    found = {n: t for n, t in zip(shapes, written) if n not in self.tensors}
    # If the kernel writes a gradient in parts, this is the sum of the parts.
    return {n: Tensor(added(t.uop, self.tensors[n[1:]].uop)) if n in GRADIENT_NAMES else t for n, t in found.items()}

def backward_of(p:Problem, arch:Chip, seed:int) -> Backward:
  """Runs the forward kernel of a problem on random inputs, and prepares the backward kernels."""
  # Raises NotImplementedError if no kernel computes the gradients.
  p = replace(p, return_lse=True)
  if isinstance(reason := can_differentiate(p, arch), str): raise NotImplementedError(f"no kernels compute the gradients: {reason}")
  inputs, tensors, _ = random_operands(p, seed)
  do = normal_numbers(np.random.default_rng(seed + 1), (p.B, p.H, p.Sq, p.Dv), p.dtype)
  found = Backward([*inputs, do], dict(zip(("q", "k", "v"), tensors)), backward_kernels(p, arch, False, parts_of_chosen(p, arch)))
  found.tensors["do"] = to_tensor(arrange(do, p.layout), p.out_dtype)
  found.tensors.update({n: t.realize() for n, t in found.run("forward").items()})
  return found
