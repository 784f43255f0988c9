"""The two kinds of matrix product of a trip, between a tile in LDS and what each lane has of the rows of its own."""
from __future__ import annotations
import functools, itertools
from dataclasses import dataclass, replace
from attn.chips.matrix import UNIT_BYTES, Matrix, contraction
from attn.kernels.parts.memory.lanes import Lane, operands, units_of
from attn.kernels.parts.memory.layouts import LdsTile
from attn.kernels.parts.memory.rows import Rows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import bounded
from attn.kernels.parts.program.statements import Statements, workgroup_barrier
from attn.kernels.tiles.amd import row_layout
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp, dtypes

FENCE_UNITS = 8  # units of a contraction that are read together
WAITED_FOR = 4   # units of own rows that come from global memory together, where registers are short

@dataclass(frozen=True)
class OwnRows:
  """The workgroup's own rows of a tensor, one a lane in each of its tiles: operand B of products that contract over their elements. A lane keeps the
  units that it reads in registers, or in LDS where those would not hold them."""
  at: Lane
  source: Rows
  first: UOp               # row of the tensor
  block_m: int
  in_block: list[UOp]      # a lane's rows, counted from there
  units: list[UOp]
  lds: LdsTile|None
  anew: bool = False                    # they are not kept either, but read from global memory in every trip
  statements: Statements|None = None    # where so few registers are left that no more than WAITED_FOR are on their way at a time

  @staticmethod
  def of(at:Lane, rows:Rows, first:UOp, block_m:int, new:Allocator, in_lds:bool, sparing:bool, statements:Statements) -> OwnRows:
    """One tile of rows for each wave."""
    mat, layout = at.matrix, row_layout(at.matrix, block_m, rows.width)
    lds, units = LdsTile.of(new, layout) if in_lds else None, units_of(mat, contraction(mat, rows.width), at.h)
    return OwnRows(at, rows, first, block_m, [at.wave*mat.N + at.n], units, lds, statements=statements if sparing else None)

  def load(self, units:list[UOp], in_block:list[UOp], *after:UOp) -> list[list[UOp]]:
    rows = self.source.after(*after) if after else self.source
    return [[rows.load_units(self.first, self.block_m, i, u) for u in units] for i in in_block]

  @functools.cached_property
  def loaded(self) -> list[list[UOp]]: return self.load(self.units, self.in_block)

  def held(self, row:UOp) -> UOp:
    """A row of the block that the compiler, and tinygrad, know nothing of."""
    return bounded(row, 0, self.block_m - 1)

  @property
  def together(self) -> list[list[UOp]]:
    """The units in parts that may be on their way at a time."""
    n = WAITED_FOR if self.statements is not None else len(self.units)
    return [self.units[i:i + n] for i in range(0, len(self.units), n)]

  @functools.cached_property
  def kept(self) -> LdsTile:
    assert self.lds is not None
    own, stores = self.at.h.eq(0) if self.at.matrix.duplicated else UOp.const(True), list[UOp]()
    rows, sparing = self.in_block, self.statements is not None and self.source.in_units
    for units in self.together:
      fence = [self.statements.do(amd.sched_barrier(), *stores)] if self.statements is not None and stores else []
      found = self.load(units, rows, *fence)
      # Told anew, so that clang does not keep a tensor's addresses for those of another. (Rows in pieces have too many for tinygrad.)
      if sparing and not stores: rows = [self.held(amd.opaque(i, ops.extract(found[0][0], 0))) for i in rows]
      stores += [self.lds.store(i, u, x, own) for i, xs in zip(self.in_block, found) for u, x in zip(units, xs)]
    # A barrier by name: what is after the stores without one (delta's fences) would have tinygrad put one before each later read.
    return self.lds.after(workgroup_barrier(UOp.group(*stores)))

  def operands(self, t:UOp, steps:slice, *after:UOp) -> list[list[UOp]]:
    """The operands of each tile for some of the units of the contraction, in trip t."""
    mat = self.at.matrix
    if self.lds is None and not self.anew: return [operands(mat, units[steps]) for units in self.loaded]
    rows = [amd.opaque(i, t) for i in self.in_block]
    if self.anew: return [operands(mat, units) for units in self.load(self.units[steps], [self.held(i) for i in rows], *after)]
    return [operands(mat, [self.kept.after(*after).load(row, u) for u in self.units[steps]]) for row in rows]

@dataclass(frozen=True)
class LdsColumns:
  """The columns of a tile that lies in LDS by rows, from column `first` on: what `LdsTile` is of the transposed tile in the order of
  `staging.key_rows`. Columns beyond the rows' end are their last one."""
  tile: LdsTile
  matrix: Matrix
  first: UOp
  def after(self, *deps:UOp) -> LdsColumns: return replace(self, tile=self.tile.after(*deps))
  def load(self, row:UOp, unit:UOp) -> UOp:
    mat, layout = self.matrix, self.tile.layout
    column = (self.first + mat.column_of(row)).minimum(layout.units*mat.unit - 1)
    place = layout.place(mat.key_of(unit%mat.groups, unit//mat.groups*mat.unit), column//mat.unit)*mat.unit + column%mat.unit
    steps = tuple(mat.key_of(0, i)*(layout.units | 1)*UNIT_BYTES for i in range(mat.unit))
    return amd.load_column(self.tile.buffer.bitcast(dtypes.ushort)[place], steps)

@dataclass(frozen=True)
class Products:
  """`fenced`: work on so many units of operand A, or on a tile, is done before the next ones are read from LDS, which takes fewer registers; 0: the
  compiler reads ahead."""
  at: Lane
  fenced: int
  statements: Statements
  read_ahead: int = 0      # so many tiles of columns are read while one before them is worked on, in spite of fences
  @property
  def matrix(self) -> Matrix: return self.at.matrix

  def with_rows(self, tile:LdsTile, count:int, own:OwnRows, t:UOp, start:list[list[UOp]]) -> list[list[UOp]]:
    """`start` + A B of `count` matrix tiles of rows in LDS, for each tile of own rows a column of C fragments."""
    mat, tiles, together = self.matrix, [list(column) for column in start], self.fenced or FENCE_UNITS
    for kt, first in itertools.product(range(count), range(0, len(own.units), together)):
      steps, before = slice(first, first + together), tiles[-1][kt - (first == 0)]
      fence = [self.statements.do(amd.sched_barrier(before))] if self.fenced and (kt or first) else []
      a_operands = operands(mat, [tile.after(*fence).load(self.at.n + kt*mat.M, u) for u in own.units[steps]])
      for a, *bs in zip(a_operands, *own.operands(t, steps, *fence)):
        for i, b in enumerate(bs): tiles[i][kt] = amd.shaped_wmma(mat, a, b, tiles[i][kt])
    return tiles

  def column_operands(self, tile:LdsTile, block_n:int, dt:int) -> list[UOp]:
    """Operand A of one matrix tile of columns."""
    mat = self.matrix
    return operands(mat, [tile.load(self.at.n + dt*mat.M, u) for u in units_of(mat, block_n, self.at.h)])

  def with_columns(self, tile:LdsTile, block_n:int, weights:list[list[UOp]], accs:list[list[UOp]],
                   first:list[UOp]|None=None) -> list[list[UOp]]:
    """`accs` + A B of a tile that lies transposed in LDS, whose `block_n` columns meet the `weights`, operands of each tile of own rows. `first` is
    A of the first matrix tile where it has been read already."""
    mat, accs = self.matrix, [list(column) for column in accs]
    for dt in range(len(accs[0])):
      done = dt - 1 - self.read_ahead      # the tile that is waited for, and not before the weights are there
      before = accs[-1][done] if done >= 0 else weights[-1][-1]
      fenced = self.fenced and (done >= 0 or not dt)
      if fenced or (not dt and first is None): tile = tile.after(self.statements.do(amd.sched_barrier(before)))
      a_operands = self.column_operands(tile, block_n, dt) if dt or first is None else first
      for a, *bs in zip(a_operands, *weights):
        for i, b in enumerate(bs): accs[i][dt] = amd.shaped_wmma(mat, a, b, accs[i][dt])
    return accs

def zeros(mat:Matrix, columns:int, tiles:int) -> list[list[UOp]]:
  """C fragments to begin with."""
  return [[ops.splat(0.0, mat.accumulator)]*tiles for _ in range(columns)]
