"""Names attn's kernels, such as gfx942/128/float16/causal, and renders their source. Begin with `Spec` and `kernel_source`."""
from __future__ import annotations
import functools, hashlib, json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from attn.cache.user_cache import kept
from attn.chips import CHIPS, MODELLED, Chip, get_chip
from attn.chips.matrix import contraction
from attn.choose.backward import all_of, at_once, can_differentiate, dkdv_of, dq_of
from attn.choose.backward_tiles import AnyBackwardTile
from attn.choose.dispatch import KERNELS, choose
from attn.choose.mla_tiles import UP_TO
from attn.choose.refusals import MATRIX_DTYPES
from attn.choose.splits import AnyTile
from attn.compilers.clang import toolchain
from attn.compilers.found import NoCompiler
from attn.emulator.listing import Listing
from attn.isa.report import PRODUCTS, LoopProducts
from attn.kernels.parts.backward.gradients import gradients_of_passes
from attn.kernels.parts.grid.tensors import MAX_D, all_arguments, arguments, dkdv_arguments, dq_arguments
from attn.kernels.parts.program.counts import round_up
from attn.kernels.tiles.amd import BackwardTile, MlaTile, Tile
from attn.kernels.tiles.common import heads_of
from attn.ops.renderers import printer_of, render
from attn.problem import INPUT_SCALES, OF_8_BITS, Problem, Shapes, Strided
from attn.tinygrad_compat import TINYGRAD_VERSION, UOp
from attn.values import FLOATS, INTS

# A word such as gfx942/128/float16/causal names a forward kernel. gfx942/128/float16/causal/dq names a backward kernel.
# gfx942/128/float16/full/decode names the kernel of one query against a long cache; decode_int8 and decode_fp8 in place of decode name those that
# read a cache of 8 bits. Only this module of attn.isa knows the kernels.

MASKS = ("full", "causal")
WINDOW_KEYS = 1024     # the option "window": a query sees at most this many keys before its own place and, without a causal mask, as many behind it
ONE_OPTION: dict[str, dict[str, Any]] = {     # fields of the Problem of a kernel with one option
  "window": {}, "softcap": {"softcap": 30.0}, "alibi": {"alibi": (True,)}, "bias": {"bias": (False, False, True, True)},
  "dropout": {"dropout_p": 0.1}}
DTYPES_OF_KERNELS = (*MATRIX_DTYPES, *OF_8_BITS)
# kernels of a problem; decode: one query per sequence; all: gradients of q, k and v at once; mla: latent attention, where V is part of K
FORWARD, DECODE, BACKWARD, ALL, LATENT = "forward", "decode", ("dq", "dkdv"), "all", "mla"
DECODE_OF_8_BITS = {"decode_int8": "int8", "decode_fp8": "fp8"}      # decode against a cache of 8 bits: the format, or fp8 for the chip's own floats
DECODING = (DECODE, *DECODE_OF_8_BITS)
KNOWN = (*MODELLED, *(name for name, chip in CHIPS.items() if chip.unit.mma))   # NVIDIA's chips have a source, but no report

@dataclass(frozen=True, order=True)
class Spec:
  """Name of a kernel of attn: its chip, head dimension, dtype, mask (with an option, as in causal+softcap) and kind."""
  arch: str
  d: int
  dtype: str = "float16"
  mask: str = "full"
  kernel: str = FORWARD
  option: str = ""

  def __post_init__(self) -> None:
    for name, value, known in (("arch", self.arch, KNOWN), ("dtype", self.dtype, DTYPES_OF_KERNELS), ("mask", self.mask, MASKS),
                               ("kernel", self.kernel, (FORWARD, *DECODING, *BACKWARD, ALL, LATENT)), ("option", self.option, ("", *ONE_OPTION))):
      if value not in known: raise ValueError(f"{name} {value!r} is not one of {', '.join(filter(None, known))}")
    if self.option and (self.kernel in (*DECODING, LATENT) or self.dtype in OF_8_BITS):
      raise ValueError(f"{self}: an option such as {self.option} is named only for forward and backward kernels with {' or '.join(MATRIX_DTYPES)}")
    if self.kernel == "decode_fp8" and not get_chip(self.arch).fp8: raise ValueError(f"{self}: {self.arch} does not convert 8-bit floats")
    if self.kernel != LATENT and not 1 <= self.d <= MAX_D:
      raise ValueError(f"D={self.d}: must be within D=1 to {MAX_D}, or for kernel {LATENT} within D={MAX_D + 1} to {UP_TO['D']}")
    if self.kernel == LATENT and not MAX_D < self.d <= UP_TO["D"]: raise ValueError(f"{self}: {LATENT} is for D={MAX_D + 1} to {UP_TO['D']}")

  def __str__(self) -> str:
    return f"{self.arch}/{self.d}/{self.dtype}/{self.mask}" + f"+{self.option}"*(self.option != "") + f"/{self.kernel}"*(self.kernel != FORWARD)
  @property
  def together(self) -> tuple[Spec, ...]:
    """The kernels whose times are added to one result: both backward kernels if this is a backward kernel, otherwise this kernel alone."""
    return (self,) if self.kernel not in BACKWARD else tuple(replace(self, kernel=kernel) for kernel in BACKWARD)

  @classmethod
  def parse(cls, word:str) -> Spec:
    """Returns the kernel that a word such as gfx942/128[/float16[/causal[+softcap][/dq]]] names."""
    arch, d, *rest = word.split("/")
    if not d.isdigit() or len(rest) > 3:
      raise ValueError(f"{word!r} is no kernel: must be ARCH/D[/DTYPE[/MASK[+OPTION][/KERNEL]]], such as gfx942/128/bfloat16/causal or .../causal/dq")
    dtype, mask, kernel = (*rest, *("float16", "full", FORWARD)[len(rest):])
    mask, plus, option = mask.partition("+")
    if plus and not option: raise ValueError(f"{word!r} names no option after the +: must be one of {', '.join(ONE_OPTION)}")
    return cls(arch, int(d), dtype, mask, kernel, option)

PythonLine = tuple[str, int]    # file and line

@dataclass(frozen=True)
class Source:
  """A kernel's HIP or CUDA text, and facts about the kernel that its machine code doesn't show."""
  text: str
  d: int         # head dimension of q and k as computed (padded)
  dv: int        # head dimension of v as computed (padded)
  queries: int   # queries of a wave in one iteration
  block_m: int   # queries of a workgroup, or keys of a workgroup that owns keys
  products: LoopProducts = PRODUCTS
  heads: int = 1       # query heads whose rows a workgroup has
  splits: int = 1      # number of key ranges (KV splits); each range has its own workgroups
  python: Mapping[int, PythonLine] = field(default_factory=dict)   # line of the text -> line of Python that emitted it, if `lines` was given

@dataclass(frozen=True)
class Shape:
  """Size of a problem: `b` batches, `h` query heads, `hkv` key/value heads, `n` keys, and `queries`."""
  b: int
  h: int
  hkv: int
  n: int
  # None: n queries, or 1 in decoding
  queries: int|None = None
  # whether the forward kernel writes an lse, which backward kernels read
  lse: bool = False

# Problems of whole tiles that are large enough to fill every chip. More heads or keys would not change the loop that is counted.
SHAPE = Shape(1, 32, 32, 4096)
SHAPE_OF_DECODE = Shape(8, 32, 8, 16384)
SHAPE_OF_LATENT = Shape(32, 128, 1, 4096)
# a problem whose last tiles of queries and of keys are partial with most tiles
UNEVEN = Shape(1, 32, 8, 4133, 4000)
ROTARY, DECODED = 64, 2     # latent attention: number of columns of K that are not V; number of queries (a token and a draft of the next)

def usual_shape(spec:Spec) -> Shape: return {**dict.fromkeys(DECODING, SHAPE_OF_DECODE), LATENT: SHAPE_OF_LATENT}.get(spec.kernel, SHAPE)
def uneven_shape(spec:Spec) -> Shape:
  """Returns a problem size for a kernel, in which the numbers of queries and keys are no powers of two."""
  # dispatch does not choose the kernel of all gradients at once for one batch
  if spec.kernel == ALL: return replace(UNEVEN, b=2)
  # the number of queries is fixed
  return replace(usual_shape(spec), n=UNEVEN.n) if spec.kernel in (*DECODING, LATENT) else UNEVEN

def problem_of_spec(spec:Spec, shape:Shape|None=None) -> Problem:
  x = shape or usual_shape(spec)
  reach = WINDOW_KEYS if spec.option == "window" else -1
  window = (reach, 0 if spec.mask == "causal" else reach)
  if spec.kernel == LATENT:
    return Problem(x.b, x.h, x.hkv, DECODED, x.n, spec.d, spec.d - ROTARY, dtype=spec.dtype, out_dtype=spec.dtype, window=window,
                   offset=x.n - DECODED, softmax_scale=spec.d**-0.5, v_in_k=True)
  queries, splits = (1, 0) if spec.kernel in DECODING else (x.queries or x.n, 1)
  of_bytes = {"out_dtype": "bfloat16", **dict.fromkeys(INPUT_SCALES, 1)} if spec.dtype in OF_8_BITS else {"out_dtype": spec.dtype}
  return Problem(x.b, x.h, x.hkv, queries, x.n, spec.d, spec.d, dtype=spec.dtype, **of_bytes, window=window,
                 offset=x.n - queries if x.queries else 0, softmax_scale=spec.d**-0.5, num_splits=splits, deterministic=spec.kernel != ALL,
                 return_lse=x.lse, **stored_fields(spec, x), **ONE_OPTION.get(spec.option, {}))

def stored_fields(spec:Spec, x:Shape) -> dict[str, Any]:
  """Returns the fields of a Problem that describe a cache of 8 bits; none if the kernel reads a cache of 16 bits."""
  if spec.kernel not in DECODE_OF_8_BITS: return {}
  def view(width:int) -> Strided: return Strided(x.b*x.hkv*x.n*width, 0, x.hkv*x.n*width, x.n*width, width)
  format = DECODE_OF_8_BITS[spec.kernel]
  return {"stored": get_chip(spec.arch).fp8 if format == "fp8" else format, "k_view": view(spec.d), "v_view": view(spec.d),
          "k_scale_view": view(1), "v_scale_view": view(1)}

def _placeholders(shapes:Shapes) -> list[UOp]:
  return [UOp.placeholder(shape, (FLOATS | INTS)[dtype], slot) for slot, (shape, dtype) in enumerate(shapes.values())]

def _chip(spec:Spec, llvm:int|None=None) -> Chip:
  """Returns the record of the chip that `spec` names, for compilers of the LLVM release `llvm`."""
  # the choice of tile descriptions depends on the release: by default that of the clang in use for reports, or without a clang the one in the chip's
  # table
  if llvm is not None: return replace(get_chip(spec.arch), llvm=llvm)
  try: return replace(get_chip(spec.arch), llvm=toolchain().llvm)
  except NoCompiler: return get_chip(spec.arch)

def _ast(spec:Spec, p:Problem, kernel:str, tile:AnyTile|AnyBackwardTile) -> UOp:
  arch = get_chip(spec.arch)
  if not isinstance(tile, AnyTile):
    if spec.kernel == "dq": return dq_of(p, arch, tile)(*_placeholders(dq_arguments(p)))
    if spec.kernel == ALL: return all_of(p, arch, tile)(*_placeholders(all_arguments(p)))
    return dkdv_of(p, arch, tile)(*_placeholders(dkdv_arguments(p)))
  program, before = KERNELS[kernel].program, KERNELS[kernel].before
  assert program is not None
  return program(p, arch, tile)(*_placeholders(arguments(p if before is None else before.problem(p, tile))))

@functools.cache
def _text(spec:Spec, p:Problem, kernel:str, tile:AnyTile|AnyBackwardTile) -> str: return render(_ast(spec, p, kernel, tile), spec.arch)

@functools.cache
def _made_by() -> str:
  """Returns a hash of everything on which a kernel's source depends: the files of this package and tinygrad's release."""
  files = sorted(Path(__file__).resolve().parent.parent.rglob("*.py"))
  return TINYGRAD_VERSION + hashlib.sha256(b"".join(x.read_bytes() for x in files)).hexdigest()

def _with_lines(spec:Spec, p:Problem, kernel:str, tile:AnyTile|AnyBackwardTile) -> tuple[str, dict[int, PythonLine]]:
  """Returns a kernel's source, and {line of the source: (file, line) of the Python code that emitted it}, as far as known."""
  # The result is kept in the user's cache: it takes a second or more to make a kernel while the place of every operation is recorded.
  def made() -> bytes:
    found = Listing.of(lambda: _ast(spec, p, kernel, tile), printer_of(spec.arch))
    return json.dumps([found.source, list(found.python_lines().items())]).encode()
  text, lines = json.loads(kept("lines", (_made_by(), repr((spec, p, kernel, tile))), made))
  return text, {line: (file, number) for line, (file, number) in lines}

def _chosen(spec:Spec, p:Problem, llvm:int|None) -> tuple[str, AnyTile|AnyBackwardTile, int]:
  """Returns the name of the kernel that dispatch chooses for `p`, its tile description, and the number of key ranges."""
  arch = _chip(spec, llvm)
  if spec.kernel in (*BACKWARD, ALL):
    if isinstance(found := can_differentiate(p, arch), str): raise NotImplementedError(f"{spec}: {found}")
    if spec.kernel == ALL:
      one = at_once(p, arch)
      if one is None or isinstance(one, str): raise NotImplementedError(f"{spec}: {one or 'two kernels compute the gradients'}")
      return f"backward_{spec.kernel}", one, 1
    return f"backward_{spec.kernel}", found[BACKWARD.index(spec.kernel)], 1
  choice = choose(p, arch)
  assert choice.work.tile is not None
  return choice.kernel, choice.work.tile, choice.work.splits

def chosen(spec:Spec, llvm:int|None=None, shape:Shape|None=None) -> tuple[str, AnyTile|AnyBackwardTile]:
  """Returns the name and tile description of the kernel that dispatch chooses for compilers of the LLVM release `llvm`."""
  # by default the release of the clang that reports use; `shape` replaces the usual size of the problem
  return _chosen(spec, problem_of_spec(spec, shape), llvm)[:2]

def text_of(spec:Spec) -> str:
  """Returns the HIP or CUDA text of the kernel that `spec` names, with the tile description that dispatch chooses."""
  p = problem_of_spec(spec)
  name, tile, splits = _chosen(spec, p, None)
  return _text(spec, replace(p, num_splits=splits), name, tile)

def kernel_source(spec:Spec, tile:Tile|BackwardTile|None=None, llvm:int|None=None, shape:Shape|None=None, lines:bool=False) -> Source:
  """Returns the source of the kernel that `spec` names, with `tile`; without `tile`, of the kernel and tile that dispatch chooses."""
  # Dispatch chooses for compilers of the LLVM release `llvm` (by default the clang in use for reports). `shape` replaces the usual size of the
  # problem. `lines` also asks for the line of Python that emitted each line of the source.
  p = problem_of_spec(spec, shape)
  name, used, splits = (spec.kernel, tile, max(1, p.num_splits)) if tile is not None else _chosen(spec, p, llvm)
  assert isinstance(used, Tile|BackwardTile|MlaTile)
  p = replace(p, num_splits=splits)
  text, python = _with_lines(spec, p, name, used) if lines else (_text(spec, p, name, used), {})
  d, dv = contraction(used.matrix, spec.d), round_up(p.Dv, used.matrix.M)
  if isinstance(used, MlaTile): return Source(text, d, dv, used.matrix.N, used.block_m, python=python)
  if isinstance(used, Tile):
    return Source(text, d, dv, used.q_tiles*used.matrix.N, used.block_m, heads=heads_of(p, used), splits=splits, python=python)
  loops = (("dq",),) if spec.kernel == "dq" else gradients_of_passes(used.passes, used.adds_dq)
  products = tuple(products_of(wanted) for wanted in loops)
  return Source(text, d, dv, used.block_n if used.keys else used.matrix.N, used.block_m, products, python=python)

def products_of(wanted:Iterable[str]) -> tuple[int, int]:
  """Returns how many matrix products of a backward loop for the gradients `wanted` have D as a dimension, and how many have Dv."""
  # D: S, dQ, dK; Dv: dP, dV
  of_scores = {"dq", "dk"}.intersection(wanted)       # gradients that need dS, and therefore dP
  return 1 + len(of_scores), bool(of_scores) + ("dv" in wanted)
