"""Our kernels by name: which source a word such as gfx942/128/float16/causal stands for. The one place where attn.isa meets the kernels."""
from __future__ import annotations
import functools
from dataclasses import dataclass, replace
from attn.chips import CHIPS, MODELLED, Chip, get_chip
from attn.choose.dispatch import KERNELS, MATRIX_DTYPES, choose
from attn.choose.splits import AnyTile
from attn.compilers.clang import toolchain
from attn.compilers.found import NoCompiler
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.lanes import contraction
from attn.kernels.parts.tiles import Tile
from attn.ops.renderers import render
from attn.problem import Problem
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

def _chip(spec:Spec, llvm:int|None=None) -> Chip:
  """The chip of a kernel, compiled by this release of LLVM or by that of the clang for reports. Where there is none its source can be printed all the
  same."""
  if llvm is not None: return replace(get_chip(spec.arch), llvm=llvm)
  try: return replace(get_chip(spec.arch), llvm=toolchain().llvm)
  except NoCompiler: return get_chip(spec.arch)

@functools.cache
def _text(spec:Spec, kernel:str, tile:AnyTile) -> str:
  p = problem_of_spec(spec)
  program = KERNELS[kernel].program
  assert program is not None
  return render(program(p, get_chip(spec.arch), tile)(*_tensors(p)), spec.arch)

def chosen(spec:Spec, llvm:int|None=None) -> tuple[str, AnyTile]:
  """The kernel and tile that dispatch chooses for the clang of reports, or for this release of LLVM."""
  choice = choose(replace(problem_of_spec(spec), num_splits=1), _chip(spec, llvm))
  assert choice.work.tile is not None
  return choice.kernel, choice.work.tile

def text_of(spec:Spec) -> str:
  """The HIP or CUDA that tinygrad's renderer prints for the kernel and tile that dispatch chooses."""
  return _text(spec, *chosen(spec))

def kernel_source(spec:Spec, tile:Tile|None=None, llvm:int|None=None) -> Source:
  """The source that tinygrad's renderer prints for the kernel and tile that dispatch chooses, or for the forward kernel with `tile`."""
  name, used = ("forward", tile) if tile is not None else chosen(spec, llvm)
  assert isinstance(used, Tile)
  return Source(_text(spec, name, used), contraction(used.matrix, spec.d), round_up(spec.d, used.matrix.M), used.q_tiles*used.matrix.N, used.block_m)
