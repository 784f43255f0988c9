"""Forward with AMD's matrix instructions, MFMA and WMMA: the steps of `online_softmax`. Begin with `AmdForward.scores`."""
from __future__ import annotations
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import Matrix, contraction
from attn.kernels.amd.products import FENCE_UNITS, OwnRows, Products, zeros
from attn.kernels.amd.staging import StagedTile
from attn.kernels.parts.grid.workgroup import Workgroup, head_fastest
from attn.kernels.parts.memory.lanes import Lane, units_of
from attn.kernels.parts.memory.layouts import LdsTile
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import round_up
from attn.kernels.parts.program.statements import Statements, store_all
from attn.kernels.parts.program.trips import StagedTrips, TileLoop, TripState
from attn.kernels.parts.weights.dropout import kept_scores
from attn.kernels.parts.weights.softmax import Softmax, Sums, nans_of_scales
from attn.kernels.tiles.amd import Tile
from attn.ops import amd, common as ops
from attn.ops.stored import scale_in_range, widen_all
from attn.problem import Problem
from attn.score.masks import scattered
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# The matrix unit computes S^T = K Q^T and O^T = V^T P^T, so that each lane holds only scores of one query (attn/chips/matrix.py). K and V tiles are
# loaded from global memory to registers and then stored to LDS; V is transposed in registers. By default the loads of the next tile start before the
# products of the current tile.

APART_UP_TO = 64     # largest head dimension at which vector instructions limit the speed of an iteration

@dataclass(frozen=True)
class ForwardState(TripState):
  """The values that the loop over keys carries from iteration to iteration: registers of the softmax, and tiles of K and V in LDS."""
  softmax: Softmax
  k: StagedTile
  v: StagedTile

@dataclass(frozen=True)
class AmdForward:
  """Builder of the forward kernel on AMD for one problem: its methods return the UOps of the steps of `online_softmax`, for one thread."""
  # no field changes during the loop over tiles of keys
  tile: Tile
  new: Allocator
  statements: Statements
  state: ForwardState      # before the first iteration
  group: Workgroup
  at: Lane
  sums: Sums
  dual: bool         # the chip issues two vector instructions at once
  apart: bool        # fp32 operations are not packed: packed ones stop the matrix unit of CDNA
  q_lds: LdsTile
  parts = (None,)    # a tile's keys are not divided

  @staticmethod
  def of(p:Problem, arch:Chip, tile:Tile, args:tuple[UOp, ...]) -> AmdForward:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix, arch)
    at, new, layouts = Lane(grid.lane, grid.wave, mat), grid.allocator, tile.layouts(p)
    k_lds, v_lds, q_lds = (LdsTile.of(new, x, n) for x, n in zip((layouts[1], layouts[2], layouts[0]), (tile.buffers, tile.buffers, 1)))
    convert = functools.partial(widen_all, kind=p.stored, dtype=p.dtype) if p.stored else None
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, lies, turned, convert=convert)
            for lies, turned in ((k_lds, None), (None, v_lds)))
    statements = Statements.of(new)
    sums = Sums.of(arch, p.dtype, p.writes_lse, bool(p.stored))
    softmax = Softmax.create(mat, tile.q_tiles, round_up(p.Dv, mat.M)//mat.M, tile.block_n//mat.M, sums, new)
    group = Workgroup.of(p, arch, tile, args, grid, at)
    apart = p.dtype in arch.unit.apart and max(p.D, p.Dv) <= APART_UP_TO
    return AmdForward(tile, new, statements, ForwardState(softmax, k, v), group, at, sums, arch.unit.dual_issue, apart, q_lds)

  # ***** sizes *****
  @property
  def mat(self) -> Matrix: return self.tile.matrix
  @property
  def k_tiles(self) -> int: return self.tile.block_n//self.mat.M
  @property
  def d_tiles(self) -> int: return round_up(self.group.p.Dv, self.mat.M)//self.mat.M
  @functools.cached_property
  def in_block(self) -> list[UOp]:
    """Indices, among the queries that the workgroup owns, of the queries whose scores this lane holds: one for each matrix tile of queries."""
    return [(self.at.wave*self.tile.q_tiles + t)*self.mat.N + self.at.n for t in range(self.tile.q_tiles)]
  @functools.cached_property
  def queries(self) -> list[Row]: return [self.group.row(i) for i in self.in_block]
  @functools.cached_property
  def q(self) -> OwnRows:
    """The rows of Q whose scores this lane holds, as operand B of S^T = K Q^T."""
    group, units = self.group, units_of(self.mat, contraction(self.mat, self.group.p.D), self.at.h)
    lds = self.q_lds if self.tile.q_in_lds else None
    return OwnRows(self.at, group.rows_of("q"), group.first_row, self.tile.block_m, self.in_block, units, lds)
  @property
  def products(self) -> Products: return Products(self.at, FENCE_UNITS if self.tile.fenced else 0, self.statements)

  @functools.cached_property
  def trips(self) -> StagedTrips[ForwardState]:
    unit_bytes = self.mat.unit*self.group.p.key_itemsize       # in memory; in LDS a unit has 16 bytes
    rows = {name: self.group.rows_of(name, unit_bytes=unit_bytes) for name in ("k", "v")}
    return StagedTrips(self.tile, self.new, self.statements, self.state, rows, self.group.scores.tile)

  # ***** the steps *****
  def begin(self) -> ForwardState:
    s = self.state.after(self.state.softmax.start(self.group.scores), *[self.statements.do(amd.fp32_apart())]*self.apart)
    return self.trips.first(s, self.group.walked)

  def loops(self) -> Iterator[TileLoop[ForwardState]]: return self.trips.loops(self.group.walked)

  def scores(self, s:ForwardState, t:UOp, masked:bool) -> tuple[ForwardState, list[list[UOp]]]:
    raw = self.group.scaled(self.raw_scores(s, t, masked))
    if self.group.p.stored:
      scales = self.group.scales("k_scales", t)
      raw = [[ops.mul(x, y) for x, y in zip(column, scales)] for column in raw]
    return s, [self.group.scores.finished(x, [row], t, masked) for x, row in zip(raw, self.queries)]

  def weigh(self, s:ForwardState, x:list[list[UOp]], t:UOp, part:None, masked:bool) -> tuple[ForwardState, None]:
    if not self.group.p.stored: return replace(s, softmax=self.weighed(s.softmax, x)), None
    scales = self.group.scales("v_scales", t)
    softmax = self.weighed(s.softmax, x, [scale_in_range(y) for y in scales])
    nans = [nans_of_scales(self.group.scores, scales, [row], t, masked) for row in self.queries]
    return replace(s, softmax=softmax.spoiled(nans)), None

  def add_to_o(self, s:ForwardState, p:None, t:UOp, part:None, masked:bool) -> UOp:
    # `p` is None, because `weigh` has put P in the state. `part` is None, because this kernel computes a tile's keys all at once.
    q_tiles, softmax, renewed = range(self.tile.q_tiles), s.softmax, not masked      # masked: no register is free for this
    left = [kept_scores(self.group.scores, [row], t) for row in self.queries]
    weights = [softmax.operands(self.at, qt, self.k_tiles, left[qt], renewed) for qt in q_tiles]
    accs = [[softmax.acc[qt*self.d_tiles + dt].load() for dt in range(self.d_tiles)] for qt in q_tiles]
    v_tile = self.trips.in_lds(s, t, "v").column_tile
    o_tiles = [acc for column in self.products.with_columns(v_tile, self.tile.block_n, weights, accs) for acc in column]
    return UOp.group(self.statements.do(amd.made_here(*o_tiles)), *store_all(softmax.acc, o_tiles))

  def kernel(self, s:ForwardState) -> UOp:
    return self.group.kernel("forward", self.outputs(s.softmax))

  # ***** parts of the steps *****
  def raw_scores(self, s:ForwardState, t:UOp, masked:bool=False) -> list[list[UOp]]:
    """Returns S^T = K Q^T of tile t before score terms and masks: for each matrix tile of queries a list of C fragments."""
    k_tile = self.trips.in_lds(s, t, "k").row_tile
    # iterations that compute mask_mod lack registers to read ahead
    products = replace(self.products, fenced=FENCE_UNITS) if masked and scattered(self.group.p) else self.products
    return products.with_rows(k_tile, self.k_tiles, self.q, t, zeros(self.mat, self.tile.q_tiles, self.k_tiles))

  def weighed(self, softmax:Softmax, scores:list[list[UOp]], scales:list[UOp]|None=None) -> Softmax:
    """Computes P = exp2(scores - m) of a tile of keys, adds the sums of P to l, and returns the state of the softmax with P."""
    # m is the number that the softmax subtracts from the scores of a row. `softmax` is the state before, and `scores` has a list of C fragments for
    # each of the wave's matrix tiles of queries. If P of a row becomes too large, m is raised and P computed again. If the rows of V have `scales`, P
    # is multiplied by them.
    to_log2 = self.group.scores.to_log2
    softmax, addends = softmax.addends(self.dual)
    weights = [softmax.weights(x, addend, to_log2) for x, addend in zip(scores, addends, strict=True)]
    return softmax.correct(weights, scores, to_log2, self.mat, self.sums, self.tile.rescale_above, self.statements.do,
                           scales=scales)

  def outputs(self, softmax:Softmax) -> list[UOp]:
    mat, stores = self.mat, list[UOp]()
    for qt, row in enumerate(self.queries):
      factor, log_sum = self.group.normalised(row, softmax.m[qt].load(), softmax.totals(qt, mat))
      o = [(self.at.h*mat.accumulator + dt*mat.M, ops.mul(softmax.acc[qt*self.d_tiles + dt].load(), factor)) for dt in range(self.d_tiles)]
      stores += self.group.outputs(row, o, log_sum)
    return stores
