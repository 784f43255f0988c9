"""Forward of multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) with AMD's matrix instructions: V is the first columns of K. Begin with
`AmdLatent.scores`."""
from __future__ import annotations
import functools, itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Matrix, contraction
from attn.kernels.amd.products import LdsColumns, OwnRows, Products, zeros
from attn.kernels.amd.staging import StagedTile
from attn.kernels.parts.grid.shared_rows import RowScalars, Share
from attn.kernels.parts.grid.workgroup import Workgroup, head_fastest
from attn.kernels.parts.memory.lanes import Lane, operands, sum_over_groups, units_of
from attn.kernels.parts.memory.layouts import LINE, LdsTile
from attn.kernels.parts.memory.rows import LatentRows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.statements import Statements, store_all
from attn.kernels.parts.program.trips import StagedTrips, TileLoop, TripState
from attn.kernels.parts.weights.softmax import Sums, row_sum, sum_of_unscaled, compared_scores
from attn.kernels.tiles.amd import MlaTile
from attn.kernels.tiles.common import ScalarPlaces
from attn.ops import amd, common as ops
from attn.ops.softmax import LANE, LOWEST, raised, rescale, scaled_weights, weights_from
from attn.ops.stored import scale_in_range, widen_all
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# In decoding, K has 576 columns, V has 512, and many query heads share one key head.
#
# A row of O is too long for the registers of one wave, and all heads share the keys. So a workgroup owns the queries of many heads and reads each key
# once for all these queries. The waves of the workgroup divide the two products differently. For the scores S^T = K Q^T of a tile of keys, each wave
# computes one matrix tile of queries; if there are more waves than matrix tiles of queries, each wave computes only a part of the keys. For O^T = V^T
# P^T, each wave computes some columns of V for all queries. The waves exchange P through LDS. The waves also exchange the factors by which the
# softmax rescales O, and the largest score of each query whose scores several waves compute. V^T is read by columns from the tile of K in LDS, so LDS
# holds no tile of V.
#
# If the latent columns of K (those that are V, too) are stored in 8 bits, they are converted to 16 bits on their way to LDS. They are not multiplied
# by the scale of their row there. Instead, the sum of a score over these columns is multiplied by the scale of the key's row, before the other
# columns are added. P is multiplied by this scale before P is rounded.

def latent_rows(group:Workgroup, mat:Matrix) -> LatentRows:
  """Returns the rows of K that a workgroup reads from a latent cache with 8-bit elements."""
  p = group.p
  rotary = group.rows_of("k_rotary") if p.k_rotary_view is not None else None
  return LatentRows(group.rows_of("k", unit_bytes=mat.unit), rotary, functools.partial(widen_all, kind=p.stored, dtype=p.dtype, in_order=True))

@dataclass(frozen=True)
class LatentState(TripState):
  """The values that the loop over keys carries from iteration to iteration: sums of O, m, l, and in LDS the tile of K and P."""
  acc: UOp           # a wave computes some columns of O for all queries of the workgroup: these columns, as rows of O^T
  m: UOp             # of the query whose scores the lane computes: the number that the softmax subtracts from the scores
  l: UOp             # of the same query: sums of P over the wave's part of the keys
  factors: UOp       # within an iteration: the factors by which O is rescaled, one for each matrix tile of queries
  k: StagedTile
  weights: LdsTile   # P
  told: RowScalars   # the numbers that waves exchange

@dataclass(frozen=True)
class AmdLatent:
  """Builder of the forward kernel of latent attention on AMD: its methods return the UOps of the steps of `online_softmax`, for one thread."""
  # no field changes during the loop over tiles of keys
  tile: MlaTile
  new: Allocator
  statements: Statements
  state: LatentState      # before the first iteration
  group: Workgroup
  at: Lane
  sums: Sums
  share: Share
  parts = (None,)    # a tile's keys are not divided

  @staticmethod
  def of(p:Problem, arch:Chip, tile:MlaTile, args:tuple[UOp, ...]) -> AmdLatent:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix, arch)
    at, new, (of_k, of_weights) = Lane(grid.lane, grid.wave, mat), grid.allocator, tile.layouts(p)
    sums, share = Sums.of(arch, p.dtype, p.writes_lse), Share(grid.wave, tile.row_tiles, tile.block_n, tile.key_parts)
    group = Workgroup.of(p, arch, tile, args, grid, at)
    widened = latent_rows(group, mat).widened if p.stored else None
    k = StagedTile.of(mat, tile.block_n, tile.threads, at.thread, LdsTile.of(new, of_k), None, LINE, widened)
    state = LatentState(new.registers(tile.row_tiles*tile.columns(p), ops.f32(mat.accumulator)), new.registers(1), new.registers(len(sums.kinds)),
                     new.registers(tile.row_tiles), k, LdsTile.of(new, of_weights), RowScalars.of(new, tile.block_m, tile.scalar_places(p)))
    return AmdLatent(tile, new, Statements.of(new), state, group, at, sums, share)

  # ***** sizes *****
  @property
  def mat(self) -> Matrix: return self.tile.matrix
  @property
  def row_tiles(self) -> range: return range(self.tile.row_tiles)
  @property
  def columns(self) -> int: return self.tile.columns(self.group.p)
  @property
  def names(self) -> ScalarPlaces: return self.tile.scalar_places(self.group.p)
  def in_block(self, tile:int|UOp) -> UOp:
    """Returns the index, among the queries that the workgroup owns, of the query that this lane has in matrix tile `tile`."""
    return tile*self.mat.N + self.at.n
  @functools.cached_property
  def own(self) -> UOp:
    """Index, among the queries that the workgroup owns, of the query whose scores this lane computes."""
    return self.in_block(self.share.tile)
  @functools.cached_property
  def query(self) -> Row: return self.group.row(self.own)
  @functools.cached_property
  def q(self) -> OwnRows:
    """The row of Q whose scores this lane computes, as operand B of S^T = K Q^T."""
    group, units = self.group, units_of(self.mat, contraction(self.mat, self.group.p.D), self.at.h)
    return OwnRows(self.at, group.rows_of("q"), group.first_row, self.tile.block_m, [self.own], units, None, self.tile.q_reloaded)
  @property
  def products(self) -> Products: return Products(self.at, self.tile.fenced, self.statements)
  @functools.cached_property
  def trips(self) -> StagedTrips[LatentState]:
    rows = latent_rows(self.group, self.mat) if self.group.p.stored else self.group.rows_of("k")
    return StagedTrips(self.tile, self.new, self.statements, self.state, {"k": rows})
  def scales(self, t:UOp) -> list[UOp]:
    """Loads the scales of K's 8-bit rows for the keys in tile t whose scores this lane holds: one vector of scales for each vector of scores."""
    # V, the first columns of K, has the same scales
    return self.group.scales("k_scales", t, self.share)

  # ***** the steps *****
  def begin(self) -> LatentState:
    begin = ((self.state.acc, 0.0), (self.state.m, LOWEST), (self.state.l, 0.0))
    s = self.state.after(UOp.group(*[x for to, value in begin for x in store_all(to, [ops.splat(value, ops.length(to))]*to.max_numel())]))
    return self.trips.first(s, self.group.walked)

  def loops(self) -> Iterator[TileLoop[LatentState]]: return self.trips.loops(self.group.walked)

  def scores(self, s:LatentState, t:UOp, masked:bool) -> tuple[LatentState, list[UOp]]:
    return s, self.share.scores(self.group.scores).finished(self.raw_scores(s, t), [self.query], self.share.tile_number(t), masked)

  def weigh(self, s:LatentState, x:list[UOp], t:UOp, part:None, masked:bool) -> tuple[LatentState, None]:
    # P, and the factor by which a row of O must be rescaled, go to LDS, where all waves read them.
    to_log2, m, p = self.group.scores.to_log2, s.m[0].load(), self.group.p
    of_v = [scale_in_range(y) for y in self.scales(t)] if p.stored else []
    compared = compared_scores(x, of_v, to_log2) if p.stored else x
    top = self.highest(s, functools.reduce(ops.max_, [ops.extract(y, i) for y in compared for i in range(ops.length(y))], m))
    reference = raised(m, top, to_log2, self.tile.rescale_above)
    factor = ops.exp2(ops.mul(ops.sub(m, reference), to_log2))
    weights = [weights_from(y, reference, to_log2) for y in x]
    packed = [ops.pack_weights(y, p.dtype) for y in (map(scaled_weights, weights, of_v) if p.stored else weights)]
    parts = [sum_of_unscaled(packed, weights, of_v, p.dtype)] if p.stored else self.sums.rounded([packed])
    if LANE in self.sums.kinds: parts.append(row_sum(weights, self.mat.wave == 64))
    sums = [ops.add(ops.mul(s.l[i].load(), factor), y) for i, y in enumerate(parts)]
    known, first = s.after(UOp.group(s.m[0].store(reference), *store_all(s.l, sums))), self.at.h.eq(0) & self.share.part.eq(0)
    told = UOp.group(*self.store_weights(known, packed), known.told.store(self.names.factor, self.own, factor, first))
    return replace(known.lds_after(told), k=s.k), None      # reads of K need no barrier: K was complete in LDS before

  def add_to_o(self, s:LatentState, p:None, t:UOp, part:None, masked:bool) -> UOp:
    # A few keys at a time, to save registers. `p` is None, because `weigh` has put P in LDS. `part` is None, because this kernel does not divide a
    # tile.
    keys, v, done = self.tile.block_n//self.tile.weight_parts, LdsColumns(self.k_tile(s, t), self.mat, self.first_column), list[UOp]()
    s = s.after(UOp.group(*store_all(s.factors, [s.told.load(self.names.factor, self.in_block(tile)) for tile in self.row_tiles])))
    s = s.after(self.statements.do(rescale(s.acc, s.factors)))
    accs = [[s.acc[tile*self.columns + i].load() for i in range(self.columns)] for tile in self.row_tiles]
    for some in range(self.tile.weight_parts):
      units = [some*keys//self.mat.unit + u for u in units_of(self.mat, keys, self.at.h)]
      lies = s.weights.after(self.fence(done)) if done else s.weights
      weights = [operands(self.mat, [lies.load(self.in_block(tile), u) for u in units]) for tile in self.row_tiles]
      for i in range(self.columns):
        if self.tile.fenced or not done: v = v.after(self.fence(done or [weights[-1][-1]]))
        a_operands = operands(self.mat, [v.load(i*self.mat.M + self.at.n, u) for u in units])
        for a, *bs in zip(a_operands, *weights):
          for row, b in zip(accs, bs): row[i] = amd.shaped_wmma(self.mat, a, b, row[i])
        done = [row[i] for row in accs]
    return UOp.group(*store_all(s.acc, itertools.chain(*accs)))

  def kernel(self, s:LatentState) -> UOp:
    s = self.totals(s)
    return self.group.kernel("mla", [x for tile in self.row_tiles for x in self.outputs(s, tile)])

  # ***** parts of the steps *****
  def k_tile(self, s:LatentState, t:UOp) -> LdsTile: return self.trips.in_lds(s, t, "k").row_tile

  def raw_scores(self, s:LatentState, t:UOp) -> list[UOp]:
    """Returns S^T = K Q^T for the keys and queries of tile t that this wave computes, as C fragments, without score terms and masks."""
    tiles, p = self.share.keys//self.mat.M, self.group.p
    k = self.k_tile(s, t).from_row(self.share.part*self.share.keys)
    def added(start:list[list[UOp]], units:slice) -> list[list[UOp]]:
      return self.products.with_rows(k, tiles, replace(self.q, units=self.q.units[units]), t, start)
    if not p.stored: return added(zeros(self.mat, 1, tiles), slice(None))[0]
    latent = len(self.q.units)*p.k_width//contraction(self.mat, p.D)
    found = [ops.mul(x, y) for x, y in zip(added(zeros(self.mat, 1, tiles), slice(latent))[0], self.scales(t))]
    return added([found], slice(latent, None))[0]

  def highest(self, s:LatentState, top:UOp) -> UOp:
    """Returns the largest score of this lane's query, compared over all lanes and waves; `top` is the largest in this lane."""
    for step in self.mat.group_steps:
      pair = amd.pair(top, step, self.mat)
      top = ops.max_(ops.extract(pair, 0), ops.extract(pair, 1))
    if self.share.key_parts == 1: return top
    told = s.told.after(s.told.store(self.names.top(self.share.part), self.own, top, self.at.h.eq(0)))
    return functools.reduce(ops.max_, [told.load(self.names.top(part), self.own) for part in range(self.share.key_parts)])

  def store_weights(self, s:LatentState, packed:list[UOp]) -> list[UOp]:
    """Returns the stores of P, packed to 16 bits (`packed`), to LDS."""
    # 16 bytes at a time; a row of P in LDS has the keys in the order in which the lanes hold them in registers, not in ascending order
    # (`staging.key_rows`)
    mat, words = self.mat, UNIT_BYTES//4
    if mat.accumulator < mat.unit: packed = [ops.concat(a, b) for a, b in zip(packed[0::2], packed[1::2])]
    units = [ops.slice_(x, i, words) for x in packed for i in range(0, ops.length(x), words)]
    before = self.share.part*(self.share.keys//mat.unit)
    return [s.weights.store(self.own, before + i*mat.groups + self.at.h, x, UOp.const(True)) for i, x in enumerate(units)]

  def fence(self, done:list[UOp]) -> UOp: return self.statements.do(amd.sched_barrier(*done))

  @property
  def first_column(self) -> UOp:
    """The first column of O that this wave computes."""
    return self.at.wave*(self.columns*self.mat.M)

  # ***** after the last iteration *****
  def totals(self, s:LatentState) -> LatentState:
    """Stores m and the sums of P for each query to LDS, where all waves can read them, and returns the state."""
    # m: the number that the softmax subtracts from the row's scores
    first = self.at.h.eq(0)
    sums = [sum_over_groups(s.l[kind].load(), self.mat) for kind in range(s.l.max_numel())]
    stores = [s.told.store(self.names.total(kind, self.share.part), self.own, x, first) for kind, x in enumerate(sums)]
    return s.lds_after(UOp.group(*stores, s.told.store(self.names.reference, self.own, s.m[0].load(), first & self.share.part.eq(0))))

  def outputs(self, s:LatentState, tile:int) -> list[UOp]:
    """Returns the stores of O (divided by l) for this wave's columns and matrix tile number `tile` of queries, and of LSE."""
    # the first wave stores LSE = m + ln l
    mat, names, in_block = self.mat, self.names, self.in_block(tile)
    def total(kind:int) -> UOp:
      return functools.reduce(ops.add, [s.told.load(names.total(kind, part), in_block) for part in range(self.share.key_parts)])
    row = self.group.row(in_block)
    factor, log_sum = self.group.normalised(row, s.told.load(names.reference, in_block), [*map(total, range(names.kinds))])
    o = [(self.first_column + i*mat.M + self.at.h*mat.accumulator, ops.mul(s.acc[tile*self.columns + i].load(), factor)) for i in range(self.columns)]
    return self.group.outputs(row, o, None) + self.group.outputs(replace(row, there=row.there & self.at.wave.eq(0)), [], log_sum)
