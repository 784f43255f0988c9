"""Flash attention forward: one program for every AMD matrix unit.

A workgroup owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N, with the online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). It computes S^T = K Q^T and O^T = V^T P^T: a query is a lane, see
attn/chips/matrix.py.
K and V tiles come through registers to LDS, V transposed on the way; by default the loads of the next tile start before this one's matrix work.
"""
from __future__ import annotations
import functools, itertools
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.chips.matrix import Matrix
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.lanes import Lane, contraction, operands, units_of
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.scores import Row
from attn.kernels.parts.softmax import Softmax, Sums
from attn.kernels.parts.staging import Staging, key_row, transpose, v_columns
from attn.kernels.parts.statements import Carried, Statements, store_all, workgroup_barrier
from attn.kernels.parts.tensors import check_problem
from attn.kernels.parts.tiles import Tile
from attn.kernels.parts.workgroup import Workgroup, head_fastest
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp

FENCE_UNITS = 8  # units of K between two fences of a fenced tile

def forward(p:Problem, arch:Chip, tile:Tile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders, which are those of `tensors.arguments(p)` in that order: (o, q, k, v),
  (o, lse, q, k, v) when p.return_lse, (o_partial, lse_partial, q, k, v) when p.num_splits > 1; then the optional tensors there are, in the order of
  `problem.EXTRAS`.

  With p.num_splits = G > 1 each workgroup takes one of G key ranges and writes the O and LSE of those keys alone, which `combine.combine` merges.
  With p.sk_variable the kernel has that Variable as a further parameter: `kernel(*placeholders).call(*tensors, variable.bind(n))`.
  Raises ValueError where p.num_splits is still 0, and NotImplementedError for tensors beyond what a buffer descriptor addresses.
  """
  check_problem(p, tile)
  return lambda *args: Forward.of(p, arch, tile, args).program()

@dataclass(frozen=True)
class ForwardState(Carried):
  """What crosses trips: the softmax's registers and the tiles in LDS."""
  softmax: Softmax
  k_lds: LdsTile
  v_lds: LdsTile
  def lds_after(self, *deps:UOp) -> ForwardState:
    """The tiles in LDS alone: a barrier where `deps` store to them."""
    return ForwardState(self.softmax, self.k_lds.after(*deps), self.v_lds.after(*deps))

@dataclass(frozen=True)
class Forward:
  """The kernel of one problem, as a thread sees it: what is the same in all trips."""
  group: Workgroup
  tile: Tile
  at: Lane
  sums: Sums
  state: ForwardState      # at the start
  q_lds: LdsTile
  k_stage: Staging
  v_stage: Staging
  statements: Statements

  @staticmethod
  def of(p:Problem, arch:Chip, tile:Tile, args:tuple[UOp, ...]) -> Forward:
    mat, columns, grid = tile.matrix, v_columns(tile.block_n), head_fastest(p, tile, tile.matrix)
    at, new, layouts = Lane(grid.lane, grid.wave, mat), grid.allocator, tile.layouts(p)
    k_lds, v_lds, q_lds = (LdsTile(new.lds(n*x.size), x) for x, n in zip((layouts[1], layouts[2], layouts[0]), (tile.buffers, tile.buffers, 1)))
    units = round_up(p.Dv, mat.M)//mat.unit
    k_stage = Staging(tile.block_n, k_lds.layout.units, tile.threads, at.thread)
    v_stage = Staging(tile.block_n, units, tile.threads, at.thread, 4, *((columns, 2) if units % (2*columns) == 0 else (1, 1)))
    statements = Statements.of(new)
    sums = Sums.of(arch, p.dtype, p.writes_lse)
    softmax = Softmax.create(mat, tile.q_tiles, round_up(p.Dv, mat.M)//mat.M, tile.block_n//mat.M, sums, new)
    state = ForwardState(softmax, k_lds, v_lds)
    return Forward(Workgroup.of(p, arch, tile, args, grid, at), tile, at, sums, state, q_lds, k_stage, v_stage, statements)

  # ***** sizes *****
  @property
  def mat(self) -> Matrix: return self.tile.matrix
  @property
  def k_tiles(self) -> int: return self.tile.block_n//self.mat.M
  @property
  def d_tiles(self) -> int: return round_up(self.group.p.Dv, self.mat.M)//self.mat.M
  @functools.cached_property
  def in_block(self) -> list[UOp]:
    """A lane's rows of the block: one for each query tile."""
    return [(self.at.wave*self.tile.q_tiles + t)*self.mat.N + self.at.n for t in range(self.tile.q_tiles)]
  @functools.cached_property
  def queries(self) -> list[Row]: return [self.group.row(i) for i in self.in_block]
  @functools.cached_property
  def depth_units(self) -> list[UOp]:
    """The units of a row of Q or K that a lane reads."""
    return units_of(self.mat, contraction(self.mat, self.group.p.D), self.at.h)

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, keys = self.group, self.group.keys
    s = self.state.after(self.state.softmax.start())
    if self.tile.prefetch: s = s.lds_after(self.to_lds(s, keys.begin, *self.fetch(keys.begin)))
    if group.p.window[0] >= 0: s = self.trips(s, keys.begin, keys.full_begin, masked=True)
    s = self.trips(s, keys.full_begin, keys.full_end, masked=False)
    s = self.trips(s, keys.full_end, keys.end, masked=True)
    return group.kernel("forward", [x for qt, row in enumerate(self.queries) for x in self.outputs(s.softmax, qt, row)])

  def trips(self, s:ForwardState, first:UOp, last:UOp, masked:bool) -> ForwardState:
    if (count := trip_count(last - first)) is None: return s
    r = self.group.grid.allocator.range(count, AxisType.LOOP)
    return s.after(self.trip(s.after(r), first + r, masked).end(r))

  def trip(self, s:ForwardState, t:UOp, masked:bool) -> UOp:
    """The work on tile t while the next one is on its way to registers, and then that one's way to LDS. With two buffers there no wave has to wait
    for others before it stores: the barrier at the end of the trip is the only one. Without prefetch a trip takes its own tile to LDS first."""
    if not self.tile.prefetch: return self.work(s.lds_after(self.to_lds(s, t, *self.fetch(t))), t, masked)
    parts = self.fetch(t + 1)
    under_way = self.statements.do(amd.sched_barrier(*itertools.chain(*parts)))     # the compiler would put loads off
    worked = self.work(s.lds_after(under_way), t, masked)
    free = worked if self.tile.buffers > 1 else workgroup_barrier(worked)
    return UOp.group(worked, self.to_lds(s.lds_after(free), t + 1, *parts))

  def work(self, s:ForwardState, t:UOp, masked:bool) -> UOp:
    """S of a key tile, its softmax, and its part of O."""
    tiles = [self.group.scores.finished(x, [row], t, masked) for x, row in zip(self.raw_scores(s, t), self.queries)]
    softmax = self.weigh(s.softmax, tiles)
    return self.add_to_o(softmax, s.v_lds.number(t%self.tile.buffers))

  def outputs(self, softmax:Softmax, qt:int, row:Row) -> list[UOp]:
    """O = O^T / l, LSE = m + ln l."""
    mat = self.mat
    factor, log_sum = self.group.normalised(row, softmax.m[qt].load(), softmax.totals(qt, mat))
    o = [(dt*mat.M + self.at.h*mat.accumulator, ops.mul(softmax.acc[qt*self.d_tiles + dt].load(), factor)) for dt in range(self.d_tiles)]
    return self.group.outputs(row, o, log_sum)

  # ***** global -> registers -> LDS *****
  def fetch(self, t:UOp) -> tuple[list[UOp], list[UOp]]:
    """This thread's parts of the K and the V tile."""
    k_rows, v_rows, n = self.group.rows("k"), self.group.rows("v"), self.tile.block_n
    k_parts = [k_rows.load_units(t*n, n, *self.k_stage.item(j)) for j in range(self.k_stage.items)]
    v_items = [self.v_stage.item(j) for j in range(self.v_stage.items)]
    v_parts = [v_rows.load_units(t*n, n, key_row(self.mat, quad, i), unit, gate) for quad, unit, gate in v_items for i in range(4)]
    return k_parts, v_parts

  def to_lds(self, s:ForwardState, t:UOp, k_parts:list[UOp], v_parts:list[UOp]) -> UOp:
    k_lds, v_lds = s.k_lds.number(t%self.tile.buffers), s.v_lds.number(t%self.tile.buffers)
    k_items = [self.k_stage.item(j) for j in range(self.k_stage.items)]
    stores = [k_lds.store(row, unit, part, gate) for part, (row, unit, gate) in zip(k_parts, k_items)]
    for j in range(self.v_stage.items):
      quad, unit, gate = self.v_stage.item(j)
      transposed = enumerate(transpose(v_parts[4*j:4*j + 4]))
      stores += [v_lds.store_half(self.mat.row_of(unit*self.mat.unit + i), quad, column, gate) for i, column in transposed]
    return UOp.group(*stores)

  # ***** Q: the B operand of S^T, kept in registers, or in LDS where they would not hold it *****
  @functools.cached_property
  def q_units(self) -> list[list[UOp]]:
    group = self.group
    return [[group.rows("q").load_units(group.first_row, self.tile.block_m, i, u) for u in self.depth_units] for i in self.in_block]

  @functools.cached_property
  def q_kept(self) -> LdsTile:
    own = self.at.h.eq(0) if self.mat.duplicated else UOp.const(True)
    stores = [self.q_lds.store(i, u, x, own) for i, xs in zip(self.in_block, self.q_units) for u, x in zip(self.depth_units, xs)]
    return self.q_lds.after(UOp.group(*stores))

  def q_operands(self, t:UOp, steps:slice, *after:UOp) -> list[list[UOp]]:
    """The operands of each query tile for some of the units of the contraction."""
    if not self.tile.q_in_lds: return [operands(self.mat, units[steps]) for units in self.q_units]
    rows = [amd.opaque(i, t) for i in self.in_block]
    return [operands(self.mat, [self.q_kept.after(*after).load(row, u) for u in self.depth_units[steps]]) for row in rows]

  # ***** one trip *****
  def raw_scores(self, s:ForwardState, t:UOp) -> list[list[UOp]]:
    """S^T = K Q^T of a key tile: for each query tile a column of C fragments."""
    mat, k_tile = self.mat, s.k_lds.number(t%self.tile.buffers)
    tiles = [[ops.splat(0.0, mat.accumulator)]*self.k_tiles for _ in range(self.tile.q_tiles)]
    for kt, first in itertools.product(range(self.k_tiles), range(0, len(self.depth_units), FENCE_UNITS)):
      steps, before = slice(first, first + FENCE_UNITS), tiles[-1][kt - (first == 0)]
      fence = [self.statements.do(amd.sched_barrier(before))] if self.tile.fenced and (kt or first) else []
      k_operands = operands(mat, [k_tile.after(*fence).load(kt*mat.M + self.at.n, u) for u in self.depth_units[steps]])
      for a, *bs in zip(k_operands, *self.q_operands(t, steps, *fence)):
        for qt, b in enumerate(bs): tiles[qt][kt] = amd.shaped_wmma(mat, a, b, tiles[qt][kt])
    return tiles

  def weigh(self, softmax:Softmax, tiles:list[list[UOp]]) -> Softmax:
    """P of a key tile, relative to a reference that it does not outgrow."""
    to_log2 = self.group.scores.to_log2
    weights = [softmax.weights(x, qt, to_log2) for qt, x in enumerate(tiles)]
    return softmax.correct(weights, tiles, to_log2, self.mat, self.sums, self.tile.rescale_above, self.statements.do)

  def add_to_o(self, softmax:Softmax, v_tile:LdsTile) -> UOp:
    """O^T += V^T P^T."""
    mat, d_tiles, q_tiles = self.mat, self.d_tiles, range(self.tile.q_tiles)
    weights = [softmax.operands(self.at, qt, self.k_tiles) for qt in q_tiles]
    accs = [[softmax.acc[qt*d_tiles + dt].load() for dt in range(d_tiles)] for qt in q_tiles]
    for dt in range(d_tiles):
      before = accs[-1][dt - 1] if dt else weights[-1][-1]
      if self.tile.fenced or not dt: v_tile = v_tile.after(self.statements.do(amd.sched_barrier(before)))
      v_operands = operands(mat, [v_tile.load(dt*mat.M + self.at.n, u) for u in units_of(mat, self.tile.block_n, self.at.h)])
      for a, *bs in zip(v_operands, *weights):
        for qt, b in enumerate(bs): accs[qt][dt] = amd.shaped_wmma(mat, a, b, accs[qt][dt])
    o_tiles = [acc for column in accs for acc in column]
    return UOp.group(self.statements.do(amd.made_here(*o_tiles)), *store_all(softmax.acc, o_tiles))
