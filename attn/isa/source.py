"""Our kernels by name: which source a word such as gfx942/128/float16/causal stands for. The one place where attn.isa meets the kernels."""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips import CHIPS, MODELLED, get_chip
from attn.choose.dispatch import MATRIX_DTYPES
from attn.choose.dispatch import single_kernel
from attn.kernels.forward import forward
from attn.kernels.tiles import Tile, contraction, round_up
from attn.problem import Problem
from attn.ops.renderers import render
from attn.tinygrad_compat import UOp
from attn.values import FLOATS

MASKS = ("full", "causal")
KNOWN = (*MODELLED, *(name for name, chip in CHIPS.items() if chip.family == "nvidia"))   # NVIDIA's have a source, and no report

@dataclass(frozen=True, order=True)
class Spec:
  """A kernel of ours."""
  arch: str
  d: int
  dtype: str = "float16"
  mask: str = "full"

  def __post_init__(self) -> None:
    for name, value, known in (("arch", self.arch, KNOWN), ("dtype", self.dtype, MATRIX_DTYPES), ("mask", self.mask, MASKS)):
      if value not in known: raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")

  def __str__(self) -> str: return f"{self.arch}/{self.d}/{self.dtype}/{self.mask}"

  @classmethod
  def parse(cls, word:str) -> Spec:
    """gfx942/128[/float16[/causal]]"""
    arch, d, *rest = word.split("/")
    if not d.isdigit() or len(rest) > 2: raise ValueError(f"{word!r} is no kernel: expected ARCH/D[/DTYPE[/MASK]], as gfx942/128/bfloat16/causal")
    return cls(arch, int(d), *rest)

@dataclass(frozen=True)
class Source:
  """A kernel's HIP text, and what its machine code doesn't say."""
  text: str
  d: int         # head dimension of q and k as computed (padded)
  dv: int        # of v
  queries: int   # of a wave
  block_m: int   # queries of a workgroup

LENGTH, HEADS = 4096, 32   # whole tiles, and enough of them to fill every chip: what is counted is the loop, which no further head or key changes

def problem_of_spec(spec:Spec) -> Problem:
  return Problem(1, HEADS, HEADS, LENGTH, LENGTH, spec.d, spec.d, dtype=spec.dtype, out_dtype=spec.dtype,
                 window=(-1, 0 if spec.mask == "causal" else -1), softmax_scale=spec.d**-0.5)

def _tensors(p:Problem) -> list[UOp]: return [UOp.placeholder((p.B, p.H, p.Sq, p.D), FLOATS[p.dtype], slot) for slot in range(4)]

def text_of(spec:Spec) -> str:
  """The HIP or CUDA that tinygrad's renderer prints for the kernel and tile that dispatch chooses."""
  kernel, _ = single_kernel(p := problem_of_spec(spec), get_chip(spec.arch))
  return render(kernel(*_tensors(p)), spec.arch)

def kernel_source(spec:Spec, tile:Tile|None=None) -> Source:
  """The source that tinygrad's renderer prints for the kernel and tile that dispatch chooses, or for the forward kernel with `tile`."""
  p, arch = problem_of_spec(spec), get_chip(spec.arch)
  kernel, used = single_kernel(p, arch) if tile is None else (forward(p, arch, tile), tile)
  assert isinstance(used, Tile)
  return Source(render(kernel(*_tensors(p)), spec.arch), contraction(used.matrix, p.D), round_up(p.Dv, used.matrix.M),
                used.q_tiles*used.matrix.N, used.block_m)
