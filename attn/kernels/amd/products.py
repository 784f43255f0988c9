"""The matrix products of one loop iteration: a tile's rows times the rows that the workgroup owns give S or dP; a tile's columns times P or dS give O
or gradients."""
from __future__ import annotations
import functools, itertools
from dataclasses import dataclass, replace
from attn.chips.matrix import UNIT_BYTES, Matrix, contraction
from attn.kernels.parts.memory.lanes import Lane, operands, units_of
from attn.kernels.parts.memory.layouts import LdsTile, PaddedRows
from attn.kernels.parts.memory.rows import Rows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import bounded
from attn.kernels.parts.program.statements import Statements, workgroup_barrier
from attn.kernels.tiles.amd import row_layout
from attn.ops import amd, common as ops
from attn.tinygrad_compat import UOp, dtypes

FENCE_UNITS = 8  # 16-byte units of a row that are read between two fences
READS_OF_TURNED = 2      # reads from LDS with which `TurnedColumns` loads a unit
TURNED_TOGETHER = 16     # lanes among which a load transposes
WAITED_FOR = 4   # units of own rows that are loaded at the same time, if registers are short

@dataclass(frozen=True)
class OwnRows:
  """The rows of a tensor that a workgroup owns, as operand B of products that sum over the elements of a row."""
  # The rows form matrix tiles, and a lane has one row of each. The lane keeps its 16-byte units of these rows in registers, or in LDS if there are
  # too few registers.
  at: Lane
  source: Rows
  first: UOp               # the block's first row in the tensor
  block_m: int
  in_block: list[UOp]      # the lane's rows, counted from `first`
  units: list[UOp]
  lds: LdsTile|None
  reloaded: bool = False                # the rows are not kept: every iteration loads them from global memory
  statements: Statements|None = None    # given if registers are short: then at most WAITED_FOR units are loaded at the same time

  @staticmethod
  def of(at:Lane, rows:Rows, first:UOp, block_m:int, new:Allocator, in_lds:bool, sparing:bool, statements:Statements) -> OwnRows:
    """Makes the object for the `block_m` rows from row `first` on, one matrix tile for each wave, which LDS or registers keep."""
    # `sparing`: registers are short, so at most WAITED_FOR units are loaded at the same time, and `statements` orders the loads
    mat, layout = at.matrix, row_layout(at.matrix, block_m, rows.width)
    lds, units = LdsTile.of(new, layout) if in_lds else None, units_of(mat, contraction(mat, rows.width), at.h)
    return OwnRows(at, rows, first, block_m, [at.wave*mat.N + at.n], units, lds, statements=statements if sparing else None)

  def load(self, units:list[UOp], in_block:list[UOp], *after:UOp) -> list[list[UOp]]:
    rows = self.source.after(*after) if after else self.source
    return [[rows.load_units(self.first, self.block_m, i, u) for u in units] for i in in_block]

  @functools.cached_property
  def loaded(self) -> list[list[UOp]]: return self.load(self.units, self.in_block)

  def clamped(self, row:UOp) -> UOp:
    # changes no index in the block, but tells tinygrad its bounds, which `amd.opaque` has hidden
    return bounded(row, 0, self.block_m - 1)

  @property
  def together(self) -> list[list[UOp]]:
    """Indices of the 16-byte units that this lane loads of a row, in a list of groups: the units of a group are loaded at the same time."""
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
      # The row numbers are made opaque, so that clang keeps no addresses of one tensor in registers for the next tensor. This is not done for rows
      # that are loaded element by element: they have too many addresses for tinygrad.
      if sparing and not stores: rows = [self.clamped(amd.opaque(i, ops.extract(found[0][0], 0))) for i in rows]
      stores += [self.lds.store(i, u, x, own) for i, xs in zip(self.in_block, found) for u, x in zip(units, xs)]
    # An explicit barrier is needed: delta's fences come after these stores, and without it tinygrad would put a barrier before each later read.
    return self.lds.after(workgroup_barrier(UOp.group(*stores)))

  def operands(self, t:UOp, steps:slice, *after:UOp) -> list[list[UOp]]:
    """Returns operand B for each matrix tile of rows that the workgroup owns, made of the 16-byte units `steps` that this lane has of a row."""
    # Rows that do not stay in registers are read again in each iteration t, after the operations `after`.
    mat = self.at.matrix
    if self.lds is None and not self.reloaded: return [operands(mat, units[steps]) for units in self.loaded]
    rows = [amd.opaque(i, t) for i in self.in_block]
    if self.reloaded: return [operands(mat, units) for units in self.load(self.units[steps], [self.clamped(i) for i in rows], *after)]
    return [operands(mat, [self.kept.after(*after).load(row, u) for u in self.units[steps]]) for row in rows]

@dataclass(frozen=True)
class LdsColumns:
  """Operand A of a product that sums over a tile's rows: columns of the tile, which lies in LDS row by row."""
  # Each operand is read across the rows. The rows come in the order in which the lanes hold their weights (`staging.key_rows`). In place of a column
  # beyond the tile's last column, the last column is read.
  tile: LdsTile
  matrix: Matrix
  first: UOp   # the columns begin at this one
  def after(self, *deps:UOp) -> LdsColumns: return replace(self, tile=self.tile.after(*deps))
  def load(self, row:UOp, unit:UOp) -> UOp:
    mat, layout = self.matrix, self.tile.layout
    column = (self.first + mat.column_of(row)).minimum(layout.units*mat.unit - 1)
    place = layout.place(mat.key_of(unit%mat.groups, unit//mat.groups*mat.unit), column//mat.unit)*mat.unit + column%mat.unit
    steps = tuple(mat.key_of(0, i)*(layout.units | 1)*UNIT_BYTES for i in range(mat.unit))
    return amd.load_column(self.tile.buffer.bitcast(dtypes.ushort)[place], steps)

@dataclass(frozen=True)
class TurnedColumns:
  """Operand A of a product that sums over a tile's rows: columns of the tile, which lies in LDS row by row and is transposed by load instructions."""
  # LDS needs no transposed copy
  tile: LdsTile
  at: Lane
  # A lane gets columns and rows in the order that fits weights in registers: it sums the rows whose weights it holds, and gets consecutive columns of
  # the result. Otherwise both are in their natural order.
  weighted: bool
  def after(self, *deps:UOp) -> TurnedColumns: return replace(self, tile=self.tile.after(*deps))
  def load(self, row:UOp, unit:UOp) -> UOp:
    mat, layout, (member, n) = self.at.matrix, self.tile.layout, (self.at.lane%TURNED_TOGETHER, self.at.n)
    assert isinstance(layout, PaddedRows)
    # each lane gives the address of four columns of one row, and gets one column of four rows
    column = row - n + (n//TURNED_TOGETHER*TURNED_TOGETHER + member%4*4)
    def four(i:int) -> UOp:
      first = mat.key_of(unit%mat.groups, unit//mat.groups*mat.unit + i) if self.weighted else unit*mat.unit + i
      quad = (mat.column_of(column) if self.weighted else column)//4
      return amd.load_transposed(self.tile.halves[layout.place(first + member//4, quad, 2)])
    return ops.concat(four(0), four(4))

@dataclass(frozen=True)
class Products:
  """The matrix products of an iteration, with fences between them that keep the compiler from reading too many operands at once."""
  # Operand A is read from LDS to registers. Without a limit, the compiler would read many units of A before it multiplies them, and run out of
  # registers. A read of A after a fence waits for the products before the fence. `with_rows` has a fence after every `fenced` 16-byte units of a row
  # of A, `with_columns` after each matrix tile of A. With `fenced` = 0 there are no fences.
  at: Lane
  fenced: int
  statements: Statements
  read_ahead: int = 0      # matrix tiles of columns that are read during the product of an earlier tile, in spite of fences
  free: bool = False       # whether there are no fences at all, because `amd.interleave` orders reads and products
  @property
  def matrix(self) -> Matrix: return self.at.matrix

  def with_rows(self, tile:LdsTile, count:int, own:OwnRows, t:UOp, start:list[list[UOp]]) -> list[list[UOp]]:
    """Returns `start` + A B, where A is `count` matrix tiles of rows in LDS, and B the rows that the workgroup owns."""
    # The result and `start` are lists of C fragments, one list for each matrix tile of own rows. Own rows that do not stay in registers are read
    # again in each iteration t.
    mat, tiles, together = self.matrix, [list(column) for column in start], self.fenced or FENCE_UNITS
    for kt, first in itertools.product(range(count), range(0, len(own.units), together)):
      steps, before = slice(first, first + together), tiles[-1][kt - (first == 0)]
      fence = [self.statements.do(amd.sched_barrier(before))] if self.fenced and (kt or first) else []
      a_operands = operands(mat, [tile.after(*fence).load(self.at.n + kt*mat.M, u) for u in own.units[steps]])
      for a, *bs in zip(a_operands, *own.operands(t, steps, *fence)):
        for i, b in enumerate(bs): tiles[i][kt] = amd.shaped_wmma(mat, a, b, tiles[i][kt])
    return tiles

  def column_operands(self, tile:LdsTile|TurnedColumns, block_n:int, dt:int) -> list[UOp]:
    """Returns operand A, read from LDS, of matrix tile number `dt` of columns of a tile with `block_n` rows."""
    # M is the matrix instruction's number of rows; a product with these operands sums over the tile's rows
    mat = self.matrix
    return operands(mat, [tile.load(self.at.n + dt*mat.M, u) for u in units_of(mat, block_n, self.at.h)])

  def with_columns(self, tile:LdsTile|TurnedColumns, block_n:int, weights:list[list[UOp]], accs:list[list[UOp]],
                   first:list[UOp]|None=None) -> list[list[UOp]]:
    """Returns `accs` + A B, where A is the transpose of a tile in LDS, and B holds P or dS of the tile's rows (`weights`)."""
    # `weights`, `accs` and the result have a list for each matrix tile of own rows: of B operands, or of C fragments. `first` is operand A of the
    # first matrix tile, if it has been read already.
    mat, accs = self.matrix, [list(column) for column in accs]
    for dt in range(len(accs[0])):
      done = dt - 1 - self.read_ahead      # index of the tile whose product comes before this read; if negative, only the weights come before
      before = accs[-1][done] if done >= 0 else weights[-1][-1]
      fenced = self.fenced and (done >= 0 or not dt)
      fence = amd.written_here if self.free else amd.sched_barrier
      if fenced or (not dt and first is None): tile = tile.after(self.statements.do(fence(before)))
      a_operands = self.column_operands(tile, block_n, dt) if dt or first is None else first
      for a, *bs in zip(a_operands, *weights):
        for i, b in enumerate(bs): accs[i][dt] = amd.shaped_wmma(mat, a, b, accs[i][dt])
    return accs

def zeros(mat:Matrix, columns:int, tiles:int) -> list[list[UOp]]:
  """Returns C fragments of zeros: `columns` lists of `tiles` fragments each."""
  return [[ops.splat(0.0, mat.accumulator)]*tiles for _ in range(columns)]
