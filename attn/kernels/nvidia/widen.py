"""A kernel that converts keys and values of 8 bits to 16 bits before the attention kernel runs."""
from __future__ import annotations
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar
from attn.chips import Chip
from attn.chips.matrix import MMA, UNIT_BYTES
from attn.kernels.nvidia.stored import StoredKeys, kinds_of_scales
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.grid.workgroup import Workgroup, scale_as_float
from attn.kernels.parts.program.blocks import blocks_seen, over_keys
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.parts.weights.epilogue import store_row
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import BYTES, KINDS_OF_SCALES, WIDENED, Problem, Shapes, Strided
from attn.tinygrad_compat import Estimates, UOp

# In a chunk of a prompt, many blocks of queries read each key. If the attention kernel converts K and V, each block converts them again. This kernel
# converts each row once: it writes K and V in the dtype of q to two buffers, and the attention kernel reads these as it reads any K and V. Numbers
# keep their exact values, because scales stay apart: a third buffer gets the kinds of scales that the attention kernel uses (`kinds_of_scales`).

NUMBERS_AT_ONCE = UNIT_BYTES//BYTES["float16"]     # numbers of 8 bits that become 16 bytes
OF_LENGTHS = ("kv_lengths", "kv_starts", "block_table")     # optional tensors that say which rows there are, and where they lie
WIDENED_TENSORS = {"k": "wide_k", "v": "wide_v", "k_scales": "wide_scales"}     # inputs of the attention kernel, and the buffers that they get

def widened_problem(p:Problem) -> Problem:
  """Returns `p` with 16-bit keys and values in new buffers, as the attention kernel reads them after the conversion."""
  # the rows lie in buffers of layout "bhsd", without pages
  def whole(width:int) -> Strided: return Strided(p.B*p.Hkv*p.Sk*width, 0, p.Hkv*p.Sk*width, p.Sk*width, width)
  of_scales = replace(whole(KINDS_OF_SCALES), row=1)
  return replace(p, stored=WIDENED, scale_dtype="float32", pages=None, k_view=whole(p.D), v_view=whole(p.Dv), k_scale_view=of_scales,
                 v_scale_view=None)

def widen_arguments(p:Problem) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that the kernel `widen_rows` takes, in order."""
  # the three buffers that it writes; K, V and their scales; and tensors that say which rows there are
  rows = (p.B, p.Hkv, p.Sk)
  written = {"wide_k": ((*rows, p.D), p.dtype), "wide_v": ((*rows, p.Dv), p.dtype), "wide_scales": ((*rows[:2], KINDS_OF_SCALES, p.Sk), "float32")}
  return written | {name: x for name, x in p.shapes.items() if name in ("k", "v", "k_scales", "v_scales", *OF_LENGTHS)}

@dataclass(frozen=True)
class PreparingTile:
  """Tile description of a kernel that prepares K or V for the attention kernel: a block owns `block_m` rows of K and of V."""
  block_m: int
  queries: int   # queries of a block of the attention kernel
  waves: ClassVar[int] = 8
  threads: ClassVar[int] = 256
  pack_gqa: ClassVar[bool] = False
  @property
  def block_n(self) -> int: return self.block_m
  def lds_bytes(self, p:Problem) -> int: return 0

def rows_read(group:Workgroup) -> UOp:
  """Returns how many rows of this block of K and V the attention kernel reads. Only these rows must be prepared."""
  # The attention kernel reads whole tiles of keys: those that any row of its blocks of queries sees. Rows of the last block may be padding.
  tile = group.tile
  assert isinstance(tile, PreparingTile)
  last = round_up(group.p.Sq, tile.queries) - 1
  tiles = blocks_seen(over_keys(group.p, group.sequence), UOp.const(0), UOp.const(last), tile.block_m)
  read = (group.grid.block >= tiles.begin) & (group.grid.block < tiles.end)
  return read.where((group.sequence.n_k - group.first_row).maximum(0).minimum(tile.block_m), 0)

@dataclass(frozen=True)
class Widening:
  """A block of rows of K and V that is converted from 8 to 16 bits: where it is read and where it is stored."""
  warps: Warps
  to: Workgroup   # the same block in the attention kernel's problem

  @staticmethod
  def of(p:Problem, arch:Chip, tile:PreparingTile, args:tuple[UOp, ...]) -> Widening:
    warps = Warps.of_keys(p, arch, tile, MMA[p.dtype], args, widen_arguments(p))
    given = warps.group.given
    return Widening(warps, replace(warps.group, p=widened_problem(p), given={name: given[wide] for name, wide in WIDENED_TENSORS.items()}))

  @functools.cached_property
  def end(self) -> UOp: return rows_read(self.warps.group)

  def numbers(self, name:str) -> list[UOp]:
    """Returns the stores of this thread's part of the rows of the tensor `name`, "k" or "v", in 16 bits."""
    # neighbouring threads convert neighbouring pieces of eight numbers
    group, to, stores = self.warps.group, self.to.rows_of(name), list[UOp]()
    given, across = group.rows_of(name, unit_bytes=NUMBERS_AT_ONCE), to.width//NUMBERS_AT_ONCE
    for j in range(ceildiv(group.tile.block_m*across, group.tile.threads)):
      item = self.warps.at.thread + j*group.tile.threads
      row, column = item//across, item%across*NUMBERS_AT_ONCE
      words = ops.load_where(given.buffer[given.start(group.first_row, row) + column], there := row < self.end, NUMBERS_AT_ONCE)
      wide, begin = StoredKeys(self.warps).widened_unit(words), to.start(group.first_row, row)
      stores += store_row(group.arch, to.buffer, group.p.dtype, to.width, begin, column, wide, there)
    return stores

  def scales(self) -> list[UOp]:
    """Returns the stores of all four kinds of scales (`kinds_of_scales`) of this thread's rows."""
    group, to, stores = self.warps.group, self.to.rows_of("k_scales", unit_bytes=4), list[UOp]()
    size, first = BYTES[group.p.scale_dtype], group.first_row
    for j in range(ceildiv(group.tile.block_m, group.tile.threads)):
      row = self.warps.at.thread + j*group.tile.threads
      there = row < self.end
      def load(name:str) -> UOp:
        return scale_as_float(group.rows_of(name, unit_bytes=size).load_units(first, group.tile.block_m, row, UOp.const(0), there), size)
      kinds = kinds_of_scales(group.scores.to_log2, load("k_scales"), load("v_scales"))
      stores += [flat(to.buffer)[(to.start(first, row) + kind*group.p.Sk).valid(there)].store(x) for kind, x in enumerate(kinds)]
    return stores

def widen_rows(p:Problem, arch:Chip, keys:int, queries:int) -> Callable[..., UOp]:
  """Returns the kernel that converts keys and values to 16 bits, for an attention kernel with tiles of `keys` keys."""
  # it takes the tensors of `widen_arguments(p)`, in this order; the attention kernel has blocks of `queries` queries, and rows that it does not read
  # are not written
  def kernel(*args:UOp) -> UOp:
    x, rows = Widening.of(p, arch, PreparingTile(keys, queries), args), p.B*p.Hkv*p.Sk
    stores, written = [*x.numbers("k"), *x.numbers("v"), *x.scales()], rows*((p.D + p.Dv)*BYTES[p.dtype] + KINDS_OF_SCALES*BYTES["float32"])
    counted = Estimates(0, written, written + rows*p.key_bytes)
    return x.warps.group.named(f"attn_widen_{arch.name}_{p.stored}_{p.dtype}_{keys}_{p.D}", stores, counted)
  return kernel
