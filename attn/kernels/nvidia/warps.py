"""Code that all kernels for NVIDIA's matrix units share: copies of rows to shared memory, and the softmax's registers and outputs of a warp's 16
queries."""
from __future__ import annotations
import math
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Mma
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import Grid, Workgroup, head_in_group_fastest, kv_head_in_group_fastest
from attn.kernels.parts.memory.lanes import MmaLane
from attn.kernels.parts.memory.layouts import LINE, CopiedLayout
from attn.kernels.parts.memory.rows import GlobalRows, Rows
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.statements import store_all
from attn.kernels.tiles.common import BlockTile
from attn.ops import common as ops, nvidia as nv
from attn.ops.softmax import LOWEST, ONES, first_addend
from attn.problem import BYTES, Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# A warp's tile of C has 16 queries. A lane holds parts of two of these rows (attn/chips/matrix.py, Mma), in vectors of four numbers: two numbers from
# each row.

def always(gate:UOp|None) -> UOp: return UOp.const(True) if gate is None else gate

@dataclass(frozen=True)
class Warps:
  """The warps of a thread block: the part of the problem that the block computes, and this thread's position."""
  group: Workgroup   # the part of the problem that the block computes
  at: MmaLane        # position of this thread in the block

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BlockTile, mat:Mma, args:tuple[UOp, ...], shapes:Shapes|None=None, parts:int=0) -> Warps:
    """Makes the object for a thread block that owns queries, in a kernel that takes the tensors `args`."""
    # the parameters as in `Workgroup.of`
    grid = head_in_group_fastest(p, tile, mat)
    at = MmaLane(grid.lane, grid.wave, mat)
    return Warps(Workgroup.of(p, arch, tile, args, grid, at, shapes, parts), at)

  @staticmethod
  def of_keys(p:Problem, arch:Chip, tile:BlockTile, mat:Mma, args:tuple[UOp, ...], shapes:Shapes, parts:int=0, grid:Grid|None=None,
              lds:UOp|None=None) -> Warps:
    """Makes the object for a thread block that owns keys, in a kernel that takes the tensors `args`."""
    # `grid` is given if the caller has made it already; the other parameters as in `Workgroup.of_keys`
    if grid is None: grid = kv_head_in_group_fastest(p, tile, mat)
    at = MmaLane(grid.lane, grid.wave, mat)
    return Warps(Workgroup.of_keys(p, arch, tile, args, grid, at, shapes, parts, lds), at)

  def with_keys(self, keys:int) -> Warps:
    """Returns a copy for tiles of `keys` keys, where one warp computes only these `keys` keys of each larger tile."""
    return replace(self, group=replace(self.group, scores=replace(self.group.scores, block_n=keys)))

  def queries(self, first:UOp) -> list[Row]:
    """Returns the two queries of which this lane holds scores, among the 16 queries that begin at query `first` of the block."""
    return [self.group.row(first, self.at.matrix.c_row(self.at.lane, r)) for r in range(nv.ROWS)]

  # ***** global -> shared memory *****
  def copies_of_q(self, shared:UOp, to:CopiedLayout) -> list[UOp]:
    """Returns the statements by which this thread copies its share of the block's rows of Q to shared memory."""
    return self.copies(self.group.rows_of("q"), shared, self.group.first_row, to)

  def copies_of_keys(self, shared:UOp, t:UOp, k:CopiedLayout, v:CopiedLayout, gate:UOp|None=None) -> list[UOp]:
    """Returns the statements by which this thread copies its share of tile t of K and V to shared memory."""
    # in the layouts `k` and `v`; where `gate` is false, nothing is copied
    return [x for name, to in (("k", k), ("v", v)) for x in self.copies_of(name, shared, t, to, gate)]

  def copies_of(self, name:str, shared:UOp, t:UOp, to:CopiedLayout, gate:UOp|None=None) -> list[UOp]:
    """Returns the statements by which this thread copies its share of tile t of the tensor `name` to shared memory."""
    # in the layout `to`; where `gate` is false, nothing is copied
    group = self.group
    return self.copies(replace(group.rows_of(name), count=group.walked_end), shared, group.scores.row(t*group.tile.block_n), to, gate)

  def copies(self, source:Rows, shared:UOp, first:UOp, to:CopiedLayout, gate:UOp|None=None) -> list[UOp]:
    """Returns the statements by which this thread copies its share of the tile that begins at row `first` of `source` to shared memory."""
    # In the layout `to`. Rows that do not exist, and columns beyond the last column, become zero. Rows that need a conversion are loaded to
    # registers, converted, and stored. Where `gate` is false, nothing is copied.
    if isinstance(source, GlobalRows): return self.started(source, shared, first, to, gate)
    items = [(self.at.thread + j*self.group.tile.threads) for j in range(ceildiv(to.rows*to.across, self.group.tile.threads))]
    places = [(i//to.across, i%to.across) for i in items]
    return [nv.put(shared[to.place(row, unit)], source.load_units(first, to.rows, row, unit), (row < to.rows) & (unit < to.units) & always(gate))
            for row, unit in places]

  def started(self, source:GlobalRows, shared:UOp, first:UOp, to:CopiedLayout, gate:UOp|None) -> list[UOp]:
    """Returns the statements that start this thread's asynchronous copies to shared memory of the tile that begins at row `first` of `source`."""
    # in the layout `to`, without conversion; where `gate` is false, nothing is copied
    threads, apart, width, size = self.group.tile.threads, self.group.tile.threads//to.across, source.width, source.size
    regular = threads % to.across == 0 and apart % LINE == 0 and source.regular
    statements = []
    whole = width % (2*source.unit) == 0 and to.units*source.unit == width
    for j in range(ceildiv(to.rows*to.across, threads)):
      moved = j*apart if regular else 0                # rows between this copy and the first copy: a constant in the instruction
      if j == 0 or not regular:
        index = self.at.thread + (0 if regular else j*threads)
        row, unit = index//to.across, index%to.across
        at, begin = shared[to.place(row, unit)], source.buffer[source.start(first, row) + unit*source.unit]
      there, inside = first + row + moved < source.count, row + moved < to.rows
      for panel in range(to.panels):
        apart_units = panel*LINE
        left_over = UOp.const(UNIT_BYTES) if whole else ((width - (apart_units + unit)*source.unit)*size).maximum(0).minimum(UNIT_BYTES)
        further = UNIT_BYTES*(moved*to.pitch + panel*to.panel), size*(moved*source.stride + apart_units*source.unit)
        statements.append(nv.copy(at, begin, further, there.where(left_over, 0), inside & (apart_units + unit < to.units) & always(gate),
                                  UNIT_BYTES if source.in_units else size))
    return statements

  # ***** the softmax's registers, O and LSE *****
  def first_values(self, m:UOp, addend:UOp, l:UOp) -> list[UOp]:
    """Returns the stores with which the softmax's registers begin: m below every score, `addend` = -m times the scores' scale, l = 0."""
    # m: the number that the softmax subtracts from scores; addend: -m*c if scores are multiplied by c; l: the row sums of P. `nv.clear` sets O to 0.
    scores = self.group.scores
    begin = ((m, LOWEST), (addend, math.nan if scores.natural else first_addend(scores.to_log2)), (l, 0.0))
    return [x for y, value in begin for x in store_all(y, [ops.splat(value, 2)]*y.max_numel())]

  def outputs(self, queries:list[Row], accs:list[UOp], m:UOp, sums:list[UOp], kinds:tuple[str, ...], share:UOp|None=None,
              alternating:bool=False) -> list[UOp]:
    """Returns the stores of O / l and LSE = m + ln l for 16 queries, of which this lane holds elements of two."""
    # `accs`: the C fragments of O. `m`: for each query, the number that the softmax subtracts from scores. `sums`: one or two vectors of sums l; O is
    # divided by the first one, and the LSE is computed from the last one. `kinds`: for each vector of `sums`, ONES if each lane has the sum of the
    # whole row, or LANE if it has the sum of its own elements only. `share`: index of this warp among the warps that compute the same queries; each
    # stores its part of the columns of O, and the first stores the LSE. `alternating`: whether, of two neighbouring C fragments, the first one has
    # even columns of O and the second one odd columns.
    group, stores = self.group, []
    for r, row in enumerate(queries):
      parts = [ops.extract(total, r) for total in sums]
      totals = [part if kind == ONES else sum_over_quad(part) for part, kind in zip(parts, kinds)]
      factor, log_sum = group.normalised(row, ops.extract(m, r), totals)
      columns = (self.alternating_columns if alternating else self.columns)(accs, r, factor, share)
      stores += group.outputs(row, columns, None if share is not None else log_sum)
      if share is not None: stores += group.outputs(replace(row, there=row.there & share.eq(0)), [], log_sum)
    return stores

  def columns(self, accs:list[UOp], r:int, factor:UOp, share:UOp|None, dtype:str="", width:int=0) -> list[tuple[UOp, UOp]]:
    """Returns (first column, neighbouring elements) for each vector that this lane stores in the first (`r` 0) or second (`r` 1) of its rows of O."""
    # `r` is 0 or 1: which of the lane's two rows. `accs` are the C fragments of the row; if several warps divide the columns of O, those of warp
    # `share` only. `dtype` and `width` are the dtype and the number of columns of the row that is stored; by default those of O. Four lanes share a
    # row, and each has two of its elements in each fragment. If a row consists of whole 16-byte units, the four lanes first exchange elements, so
    # that each lane stores whole units.
    mat, dtype, whole = self.at.matrix, dtype or self.group.out_dtype, 0
    unit = mat.groups*mat.block       # elements of 16 bits in a unit of O
    first = UOp.const(0) if share is None else share*(len(accs)*mat.N)
    if BYTES[dtype] == 2 and (width or self.group.p.Dv) % unit == 0: whole = len(accs)//mat.groups*mat.groups
    units = [nv.transposed(nv.row_unit(accs[i:i + mat.groups], r, factor, dtype), self.at.h) for i in range(0, whole, mat.groups)]
    return [*[(first + self.at.h*unit + i*(mat.groups*unit), x) for i, x in enumerate(units)],
            *[(first + self.at.h*mat.block + (whole + i)*mat.N, ops.mul(ops.slice_(x, nv.ROWS*r, 2), factor)) for i, x in enumerate(accs[whole:])]]

  def alternating_columns(self, accs:list[UOp], r:int, factor:UOp, share:UOp|None) -> list[tuple[UOp, UOp]]:
    """Returns (first column, four elements) for each vector that this lane stores in the first (`r` 0) or second (`r` 1) of its two rows of O."""
    # The parameters as in `columns`. Two neighbouring fragments have 16 columns of O together: the first one has the even columns, and the second one
    # the odd columns.
    mat, first = self.at.matrix, UOp.const(0) if share is None else share*(len(accs)*self.at.matrix.N)
    def values(even:UOp, odd:UOp) -> UOp: return ops.build(*[ops.extract(x, nv.ROWS*r + i) for i in range(mat.block) for x in (even, odd)])
    return [(first + self.at.h*(2*mat.block) + i*mat.N, ops.mul(values(*accs[i:i + 2]), factor)) for i in range(0, len(accs), 2)]

def sum_over_quad(x:UOp) -> UOp:
  """Returns the sum of `x` over the four lanes that share a row."""
  for step in (1, 2): x = x + nv.xor_lane(x, step)
  return x
