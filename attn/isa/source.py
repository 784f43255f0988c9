"""Our kernels by name: which source a word such as gfx942/128/float16/causal stands for, or gfx942/128/float16/causal/dq of the backward kernels. The
one place where attn.isa meets the kernels."""
from __future__ import annotations
import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from attn.chips import CHIPS, MODELLED, Chip, get_chip
from attn.choose.backward import can_differentiate, dkdv_of, dq_of
from attn.choose.backward_tiles import AnyBackwardTile
from attn.choose.dispatch import KERNELS, MATRIX_DTYPES, choose
from attn.choose.mla_tiles import UP_TO
from attn.choose.splits import AnyTile
from attn.compilers.clang import toolchain
from attn.compilers.found import NoCompiler
from attn.emulator.listing import Listing
from attn.isa.report import PRODUCTS, LoopProducts
from attn.kernels.mla import MlaTile
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.gradients import PASSES
from attn.kernels.parts.lanes import contraction
from attn.kernels.parts.tensors import MAX_D, Shapes, dkdv_arguments, dq_arguments
from attn.kernels.parts.tiles import BackwardTile, Tile
from attn.ops.renderers import printer_of, render
from attn.problem import Problem
from attn.tinygrad_compat import UOp
from attn.values import FLOATS

MASKS = ("full", "causal")
FORWARD, BACKWARD, LATENT = "forward", ("dq", "dkdv"), "mla"    # which kernel of a problem; of latent attention, whose V is part of K
KNOWN = (*MODELLED, *(name for name, chip in CHIPS.items() if chip.family == "nvidia"))   # NVIDIA's have a source, and no report

@dataclass(frozen=True, order=True)
class Spec:
  """A kernel of ours."""
  arch: str
  d: int
  dtype: str = "float16"
  mask: str = "full"
  kernel: str = FORWARD

  def __post_init__(self) -> None:
    for name, value, known in (("arch", self.arch, KNOWN), ("dtype", self.dtype, MATRIX_DTYPES), ("mask", self.mask, MASKS),
                               ("kernel", self.kernel, (FORWARD, *BACKWARD, LATENT))):
      if value not in known: raise ValueError(f"{name} {value!r} is not one of {', '.join(known)}")
    if self.kernel == LATENT and not MAX_D < self.d <= UP_TO["D"]: raise ValueError(f"{self}: {LATENT} is for D={MAX_D + 1} to {UP_TO['D']}")

  def __str__(self) -> str: return f"{self.arch}/{self.d}/{self.dtype}/{self.mask}" + f"/{self.kernel}"*(self.kernel != FORWARD)
  @property
  def together(self) -> tuple[Spec, ...]:
    """The kernels that do the work together: forward by itself, the two backward kernels both."""
    return (self,) if self.kernel not in BACKWARD else tuple(replace(self, kernel=kernel) for kernel in BACKWARD)

  @classmethod
  def parse(cls, word:str) -> Spec:
    """gfx942/128[/float16[/causal[/dq]]]"""
    arch, d, *rest = word.split("/")
    if not d.isdigit() or len(rest) > 3:
      raise ValueError(f"{word!r} is no kernel: expected ARCH/D[/DTYPE[/MASK[/KERNEL]]], as gfx942/128/bfloat16/causal or .../causal/dq")
    return cls(arch, int(d), *rest)

@dataclass(frozen=True)
class Source:
  """A kernel's HIP text, and what its machine code doesn't say."""
  text: str
  d: int         # head dimension of q and k as computed (padded)
  dv: int        # of v
  queries: int   # of a wave, in a trip
  block_m: int   # queries of a workgroup, or keys where it owns keys
  products: LoopProducts = PRODUCTS

LENGTH, HEADS = 4096, 32   # whole tiles, and enough of them to fill every chip: what is counted is the loop, which no further head or key changes

ROTARY, DECODED = 64, 2     # of K of latent attention the columns that are not V, and the queries that decode a token and a draft of the next one

def problem_of_spec(spec:Spec) -> Problem:
  window = (-1, 0 if spec.mask == "causal" else -1)
  if spec.kernel == LATENT:
    return Problem(HEADS, 128, 1, DECODED, LENGTH, spec.d, spec.d - ROTARY, dtype=spec.dtype, out_dtype=spec.dtype, window=window,
                   offset=LENGTH - DECODED, softmax_scale=spec.d**-0.5, v_in_k=True)
  return Problem(1, HEADS, HEADS, LENGTH, LENGTH, spec.d, spec.d, dtype=spec.dtype, out_dtype=spec.dtype,
                 window=window, softmax_scale=spec.d**-0.5)

def _placeholders(shapes:Shapes) -> list[UOp]:
  return [UOp.placeholder(shape, FLOATS[dtype], slot) for slot, (shape, dtype) in enumerate(shapes.values())]

def _chip(spec:Spec, llvm:int|None=None) -> Chip:
  """The chip of a kernel, compiled by this release of LLVM or by that of the clang for reports. Where there is none its source can be printed all the
  same."""
  if llvm is not None: return replace(get_chip(spec.arch), llvm=llvm)
  try: return replace(get_chip(spec.arch), llvm=toolchain().llvm)
  except NoCompiler: return get_chip(spec.arch)

def _ast(spec:Spec, kernel:str, tile:AnyTile|AnyBackwardTile) -> UOp:
  p, arch = problem_of_spec(spec), get_chip(spec.arch)
  if not isinstance(tile, AnyTile):
    if spec.kernel == "dq": return dq_of(p, arch, tile)(*_placeholders(dq_arguments(p)))
    return dkdv_of(p, arch, tile)(*_placeholders(dkdv_arguments(p)))
  program = KERNELS[kernel].program
  assert program is not None
  return program(p, arch, tile)(*_placeholders(p.shapes))

@functools.cache
def _text(spec:Spec, kernel:str, tile:AnyTile|AnyBackwardTile) -> str: return render(_ast(spec, kernel, tile), spec.arch)

def python_lines(spec:Spec) -> dict[int, tuple[str, int]]:
  """For each line of a kernel's source the file and line of Python that it comes from, where that is known."""
  return Listing.of(lambda: _ast(spec, *chosen(spec)), printer_of(spec.arch)).python_lines()

def chosen(spec:Spec, llvm:int|None=None) -> tuple[str, AnyTile|AnyBackwardTile]:
  """The kernel and tile that dispatch chooses for the clang of reports, or for this release of LLVM."""
  p, arch = replace(problem_of_spec(spec), num_splits=1), _chip(spec, llvm)
  if spec.kernel in BACKWARD:
    if isinstance(found := can_differentiate(p, arch), str): raise NotImplementedError(f"{spec}: {found}")
    return f"backward_{spec.kernel}", found[BACKWARD.index(spec.kernel)]
  choice = choose(p, arch)
  assert choice.work.tile is not None
  return choice.kernel, choice.work.tile

def text_of(spec:Spec) -> str:
  """The HIP or CUDA that tinygrad's renderer prints for the kernel and tile that dispatch chooses."""
  return _text(spec, *chosen(spec))

def kernel_source(spec:Spec, tile:Tile|BackwardTile|None=None, llvm:int|None=None) -> Source:
  """The source that tinygrad's renderer prints for the kernel and tile that dispatch chooses, or for forward or the backward kernel of `spec` with
  `tile`."""
  name, used = (spec.kernel, tile) if tile is not None else chosen(spec, llvm)
  assert isinstance(used, Tile|BackwardTile|MlaTile)
  d, dv, text = contraction(used.matrix, spec.d), round_up(problem_of_spec(spec).Dv, used.matrix.M), _text(spec, name, used)
  if isinstance(used, MlaTile): return Source(text, d, dv, used.matrix.N, used.block_m)
  if isinstance(used, Tile): return Source(text, d, dv, used.q_tiles*used.matrix.N, used.block_m)
  loops = [("dq",)] if spec.kernel == "dq" else PASSES[used.passes]
  return Source(text, d, dv, used.block_n if used.keys else used.matrix.N, used.block_m, tuple(products_of(wanted) for wanted in loops))

def products_of(wanted:Iterable[str]) -> tuple[int, int]:
  """Of a loop of the backward that computes some gradients, the products that go over D, which are S, dQ and dK, and over Dv, which are dP and dV."""
  of_scores = {"dq", "dk"}.intersection(wanted)       # those that take dS, and with it dP
  return 1 + len(of_scores), bool(of_scores) + ("dv" in wanted)
