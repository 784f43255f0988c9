"""Copies a tile of rows from global memory through registers to LDS, where rows can be transposed on the way."""
from __future__ import annotations
import functools, math
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.chips.matrix import Matrix
from attn.kernels.parts.memory.layouts import LdsTile
from attn.kernels.parts.memory.rows import LatentRows, Rows
from attn.kernels.parts.memory.transposed import TURNED_ROWS, transpose, transpose_bytes
from attn.kernels.parts.program.allocator import InLds
from attn.kernels.parts.program.counts import bounded, ceildiv, left_alone
from attn.kernels.tiles.amd import v_columns
from attn.ops import amd
from attn.tinygrad_compat import UOp

# If a tile is transposed, an item is one unit of each of four rows, a quad. Of each column the item stores four elements, a half or a quarter of a
# unit.
UNITS_APART = 2                   # units between an item and its neighbour, if this puts their columns into different banks
FAST_QUADS = 8                    # quads that vary fastest over threads: their stores fill a row of V^T

@dataclass(frozen=True)
class Staging:
  """The part of a tile that one thread copies from global memory to LDS, as a list of items: 16 bytes of one row, or of each of four rows."""
  # An item is 16 bytes of one row. If the tile is transposed on the way, an item is the same 16 bytes of a quad, four neighbouring rows. Each entry
  # of `items` is (row or quad, which 16 bytes of the row, whether the item exists).
  rows: int
  units: int
  threads: int
  thread: UOp
  group: int = 1       # rows of one item; more than one if the tile is transposed
  together: int = 1    # `together` neighbouring items of the same rows are `apart` units apart: their columns then lie in different banks
  apart: int = 1
  across: int = 0      # threads that copy each long row: each unit of a thread then has a constant distance from the thread's first unit
  clamped: bool = False    # items that do not exist are computed as the last one. Otherwise tinygrad may make negative summands of an address
  @functools.cached_property
  def items(self) -> list[tuple[UOp, UOp, UOp]]: return [self.item(j) for j in range(self.count)]
  @property
  def count(self) -> int:
    if self.across: return ceildiv(self.rows, self.threads//self.across)*ceildiv(self.units, self.across)
    return ceildiv(self.rows//self.group*self.units, self.threads)
  def item(self, j:int) -> tuple[UOp, UOp, UOp]:
    """Returns (row, index of 16 bytes in the row, whether the item exists) of this thread's j-th item. For a transposed tile, `row` is the index of a
    group of four rows."""
    if self.across:
      rows, parts = self.threads//self.across, ceildiv(self.units, self.across)
      row, unit = self.thread//self.across + j//parts*rows, self.thread%self.across + j%parts*self.across
      return row, unit, left_alone(((row < self.rows) & (unit < self.units)).simplify())
    index, groups = self.thread + j*self.threads, self.rows//self.group
    gate = left_alone((index < groups*self.units).simplify())
    if self.group == 1: return index//self.units, index%self.units, gate
    if self.clamped and j and index.vmax >= groups*self.units: index = index.minimum(groups*self.units - 1)
    # if the tile is transposed, neighbouring threads, up to FAST_QUADS of them, copy the same 16 bytes of neighbouring quads
    fast, block = math.gcd(groups, FAST_QUADS), self.together*self.apart
    row, unit = index%fast, index//fast
    if groups > fast: row, unit = row + unit//self.units*fast, unit%self.units      # otherwise all quads lie in the first FAST_QUADS
    return row, unit//block*block + unit%self.together*self.apart + unit%block//self.together, gate

def quads_of_unit(matrix:Matrix) -> int:
  """Returns how many groups of four neighbouring rows a 16-byte unit of V^T contains: 2 for 16-bit elements."""
  return matrix.unit//TURNED_ROWS

def key_rows(matrix:Matrix, quad:UOp) -> list[UOp]:
  """Returns which four keys lie at elements 4*`quad` to 4*`quad` + 3 of a row of V^T in LDS."""
  # The keys of a row are not in ascending order: each lane group reads units of its own, and finds there exactly the keys whose weights it holds in
  # registers, in the same order. With g lane groups, group h reads units h, h + g, h + 2*g, ...
  unit, part = quad//quads_of_unit(matrix), quad%quads_of_unit(matrix)
  n = unit//matrix.groups*matrix.unit + part*TURNED_ROWS
  first = n//matrix.accumulator*matrix.M + matrix.c_row(unit%matrix.groups, n%matrix.accumulator)
  return [first + matrix.c_row(0, i) for i in range(TURNED_ROWS)]

@dataclass(frozen=True)
class StagedTile(InLds):
  """A tile of `block_n` rows that a workgroup copies to LDS: row by row (field `lies`), transposed (field `turned`), or both."""
  # for both forms, a thread loads its part of the tile only once
  matrix: Matrix
  block_n: int
  carried: Staging
  lies: LdsTile|None
  turned: LdsTile|None
  only: int|None = None      # index of the only item that each thread copies; None: all items
  convert: Callable[[UOp], UOp]|None = None     # converts units of 8-bit numbers to units of 16-bit numbers, on their way to LDS

  @staticmethod
  def of(mat:Matrix, block_n:int, threads:int, thread:UOp, lies:LdsTile|None, turned:LdsTile|None, across:int=0,
         convert:Callable[[UOp], UOp]|None=None) -> StagedTile:
    """Makes a tile that `threads` threads copy to LDS: row by row to `lies` and transposed to `turned`. One of the two may be None."""
    # `across` is the number of threads that copy a row together; 0 means that this number does not matter. `convert` converts a unit of a row that is
    # stored in 8 bits to a unit of 16-bit numbers.
    units, fast = lies.layout.units if lies is not None else 0, v_columns(block_n)
    if turned is None: return StagedTile(mat, block_n, Staging(block_n, units, threads, thread, across=across), lies, None, convert=convert)
    units = max(units, turned.layout.rows//mat.unit)
    spread = (fast, UNITS_APART) if units % (UNITS_APART*fast) == 0 else (1, 1)
    return StagedTile(mat, block_n, Staging(block_n, units, threads, thread, TURNED_ROWS, *spread, clamped=mat.size == 1), lies, turned,
                      convert=convert)

  def after(self, *deps:UOp) -> StagedTile:
    lies, turned = (x.after(*deps) if x is not None else None for x in (self.lies, self.turned))
    return replace(self, lies=lies, turned=turned)
  def nth(self, i:UOp) -> StagedTile:
    """Returns this tile at its address in LDS buffer number `i`."""
    lies, turned = (x.nth(i) if x is not None else None for x in (self.lies, self.turned))
    return replace(self, lies=lies, turned=turned)
  @property
  def row_tile(self) -> LdsTile:
    """This tile in LDS, not transposed: operand A of products that sum over the elements of a row."""
    assert self.lies is not None
    return self.lies
  @property
  def column_tile(self) -> LdsTile:
    """This tile in LDS, transposed: operand A of products that sum over the tile's rows."""
    assert self.turned is not None
    return self.turned
  @property
  def items(self) -> list[tuple[UOp, UOp, UOp]]: return self.carried.items if self.only is None else [self.carried.item(self.only)]
  @property
  def single(self) -> list[StagedTile]:
    """This tile as a list of smaller tiles, copied one after another: a thread copies one item (16 bytes of one or four rows) per smaller tile."""
    # saves registers
    return [replace(self, only=i) for i in range(self.carried.count)]

  def with_new_addresses(self, t:UOp) -> StagedTile:
    """Returns this tile with addresses that iteration t computes again, so that no registers hold them between iterations."""
    # else registers would hold the addresses during the whole loop
    thread = bounded(amd.opaque(self.carried.thread, t), 0, self.carried.threads - 1)
    return replace(self, carried=replace(self.carried, thread=thread))

  def fetch(self, rows:Rows|LatentRows, t:UOp) -> list[UOp]:
    """Loads this thread's part of the t-th tile of `rows` from global memory, and returns the registers."""
    first, n = t*self.block_n, self.block_n
    if self.turned is None: return [rows.load_units(first, n, *item) for item in self.items]
    return [rows.load_units(first, n, row, unit, gate) for quad, unit, gate in self.items for row in key_rows(self.matrix, quad)]

  def store(self, parts:list[UOp]) -> list[UOp]:
    """Returns the stores of `parts`, the registers that `fetch` returned, to this tile in LDS, row by row, transposed, or both."""
    if self.convert is not None: parts = [self.convert(x) for x in parts]
    if self.turned is None:
      return [self.row_tile.store(row, unit, part, gate) for part, (row, unit, gate) in zip(parts, self.items)]
    stores = []
    for j, (quad, unit, gate) in enumerate(self.items):
      four = parts[TURNED_ROWS*j:TURNED_ROWS*(j + 1)]
      if self.lies is not None:
        inside = gate & (unit < self.lies.layout.units).simplify()
        stores += [self.lies.store(row, unit, part, inside) for row, part in zip(key_rows(self.matrix, quad), four)]
        gate = gate & (unit*self.matrix.unit < self.turned.layout.rows).simplify()
      row = self.matrix.row_of(unit*self.matrix.unit)
      columns, pieces = (transpose if self.matrix.size == 2 else transpose_bytes)(four), quads_of_unit(self.matrix)
      stores += [self.turned.store_piece(row + self.matrix.row_of(i), quad, pieces, column, gate) for i, column in enumerate(columns)]
    return stores
