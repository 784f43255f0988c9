"""A kernel that transposes V of 8-bit floats once, before the attention kernel runs. Begin with `turn_values`."""
from __future__ import annotations
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import MMA_OF_8_BITS, UNIT_BYTES, Mma
from attn.kernels.nvidia.warps import Warps
from attn.kernels.nvidia.widen import OF_LENGTHS, PreparingTile, rows_read
from attn.kernels.parts.memory.transposed import TURNED_ROWS, transpose_dwords
from attn.kernels.parts.program.counts import ceildiv
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Problem, Shapes
from attn.tinygrad_compat import Estimates, UOp

# wgmma reads 8-bit floats only with the keys of a column side by side. If the attention kernel transposes V, each block of queries transposes all of
# V again. This kernel writes V in tiles: a tile has as many keys as a tile of the attention kernel, and a row for each column of V. Each 32 keys of a
# row lie in the order in which `nv.pack_a` packs their weights.

TURNED_TENSORS = {"v": "turned_v"}     # input of the attention kernel, and the buffer that it gets

def turned_problem(p:Problem, keys:int) -> Problem:
  """Returns `p` with V transposed in tiles of `keys` keys, as the attention kernel reads it."""
  return replace(p, turned=keys)

def turn_arguments(p:Problem, keys:int) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors that the kernel `turn_values` takes, in order."""
  written = {"turned_v": (p.turned_shape(keys), p.bits_dtype)}
  return written | {name: x for name, x in p.shapes.items() if name in ("v", *OF_LENGTHS)}

def key_in_unit(mat:Mma, h:int, n:int) -> int:
  """Returns which of 16 neighbouring keys lies at byte 4*`h` + `n` of the 16 bytes that a row of V^T has for these keys."""
  return mat.key_of(h, n)      # the n-th key whose weights lane h of a row holds

@dataclass(frozen=True)
class Turning:
  """A tile of V that a block transposes: 8-bit floats are loaded from V, and stored as rows of V^T."""
  # A piece is 16 keys, which fill 16 bytes of a row of the result, and four columns, which fill a dword of a row of V.
  warps: Warps

  @staticmethod
  def of(p:Problem, arch:Chip, tile:PreparingTile, args:tuple[UOp, ...]) -> Turning:
    return Turning(Warps.of_keys(p, arch, tile, MMA_OF_8_BITS[p.dtype], args, turn_arguments(p, tile.block_m)))

  def stores(self) -> list[UOp]:
    """Returns the stores of this thread's part of the transposed tile to global memory."""
    # neighbouring threads have neighbouring keys, so what they store at the same time is side by side
    group, (_, _, tiles, columns, keys), stores = self.warps.group, self.warps.group.p.turned_shape(self.warps.group.tile.block_m), list[UOp]()
    across, end, to = keys//UNIT_BYTES, rows_read(group), flat(group.given["turned_v"]).bitcast(ops.u32(4))
    tile = (group.batch*group.p.Hkv + group.kv_head)*tiles + group.grid.block
    for j in range(ceildiv(across*(columns//TURNED_ROWS), group.tile.threads)):
      item = self.warps.at.thread + j*group.tile.threads
      unit, quad, inside = item%across, item//across, item < across*(columns//TURNED_ROWS)
      for i, words in enumerate(self.piece(unit, quad, inside, end)):
        place = (tile*columns + quad*TURNED_ROWS + i)*across + unit
        stores.append(to[place.valid(inside & (end > 0))].store(words))
    return stores

  def piece(self, unit:UOp, quad:UOp, inside:UOp, end:UOp) -> list[UOp]:
    """Loads V for the `unit`-th 16 keys and the `quad`-th four columns of the tile; returns four vectors, the 16 keys of each column."""
    # Keys from key `end` of the tile on are zeros. Where `inside` is false, there is no such piece.
    group, mat = self.warps.group, self.warps.at.matrix
    rows, fours = group.rows_of("v", unit_bytes=TURNED_ROWS), []
    for h, n in itertools.product(range(mat.groups), range(TURNED_ROWS)):
      row = unit*UNIT_BYTES + key_in_unit(mat, h, n)
      there = inside & (row < end)
      fours.append(ops.load_where(rows.buffer[rows.start(group.first_row, row) + quad*TURNED_ROWS], there, TURNED_ROWS))
    turned = [transpose_dwords(fours[i:i + TURNED_ROWS]) for i in range(0, len(fours), TURNED_ROWS)]
    return [ops.build(*column) for column in zip(*turned)]

def turn_values(p:Problem, arch:Chip, keys:int, queries:int) -> Callable[..., UOp]:
  """Returns the kernel that transposes V for an attention kernel with tiles of `keys` keys and blocks of `queries` queries."""
  # tiles that the attention kernel does not read are not written
  def kernel(*args:UOp) -> UOp:
    x, size = Turning.of(p, arch, PreparingTile(keys, queries), args), p.B*p.Hkv*p.Sk*p.Dv
    return x.warps.group.named(f"attn_turn_{arch.name}_{p.dtype}_{keys}_{p.Dv}", x.stores(), Estimates(0, size, 2*size))
  return kernel
