"""Latent attention with mma.sync (sm_80 and later): the steps of `online_softmax`, with queries as the rows of the matrices. Begin with
`MmaLatent.scores`."""
from __future__ import annotations
import functools, itertools
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.nvidia.ring import CopyGroups
from attn.kernels.nvidia.warp_forward import WarpsForward
from attn.kernels.nvidia.warps import Warps, sum_over_quad
from attn.kernels.parts.grid.shared_rows import RowScalars, Share
from attn.kernels.parts.memory.layouts import LINE, LongRows, SwizzledRows
from attn.kernels.parts.program.counts import round_up
from attn.kernels.parts.program.statements import Statements, load_all, store_all
from attn.kernels.parts.weights.softmax import sum_of_unscaled, compared_scores
from attn.kernels.tiles.common import ScalarPlaces
from attn.kernels.tiles.mma import MlaMmaTile
from attn.ops import common as ops, nvidia as nv
from attn.ops.softmax import LOWEST, ONES, lane_sum, raised, rescale, rounded_sum, scaled_weights, weights_from
from attn.ops.stored import scale_in_range
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# The warps divide the work as the waves do in attn/kernels/amd/latent.py. A block owns the queries of many heads and reads each key once for all
# these queries. For the scores S = Q K^T of a tile of keys, each warp computes 16 queries and a part of the keys. For O += P V each warp computes
# some columns of all queries. The warps exchange P through shared memory. cp.async copies K into a ring of `stages` tiles. V is read from the tile of
# K and transposed by ldmatrix, as in attn/kernels/mma/forward.py.
#
# If the latent columns of K are stored in 8 bits, cp.async copies them to shared memory in 8 bits. There are two ways to convert them to 16 bits
# (`MlaMmaTile.widens`, attn/kernels/nvidia/stored.py). With one matrix tile of queries, each warp converts what it reads. With several, several warps
# read the same keys: then the threads convert each tile once, and store it to shared memory in 16 bits. The sum of a score over the latent columns is
# multiplied by the scale of the key's row, before the other columns are added. P is multiplied by this scale before P is rounded.

# Number of matrix instructions that add to one partial sum of a score. The tensor cores do not round an fp32 sum: they truncate it, always towards 0.
# With one sum over 576 columns, 36 instructions, the LSE of peaked rows showed this: its error was 1.13 times the limit of an earlier error law, on
# an H200. A model of the truncation predicts a third of this error for partial sums of 12 instructions.
ADDED_UP = 12

@dataclass(frozen=True)
class LatentMmaState(CopyGroups):
  """The values that the loop over keys carries from iteration to iteration: contents of shared memory, sums of O, m, l, and the scores."""
  shared: UOp
  acc: UOp                 # the warp's columns of O for all queries
  m: UOp                   # of the queries whose scores the warp computes: the number that the softmax subtracts from the scores of a row
  l: UOp                   # of the same queries: sums over the warp's part of the keys, of rounded P, and, if an LSE is written, of unrounded P
  scores: UOp              # within an iteration
  factors: UOp             # within an iteration: by which the rows of O are rescaled
  statements: Statements

@dataclass(frozen=True)
class MmaLatent(WarpsForward[MlaMmaTile, LatentMmaState]):
  """Builder of the forward kernel of latent attention with mma.sync: its methods return the UOps of the kernel's steps, as one thread runs them."""
  share: Share
  parts = (None,)    # a tile's keys are not divided

  @staticmethod
  def of(p:Problem, arch:Chip, tile:MlaMmaTile, args:tuple[UOp, ...]) -> MmaLatent:
    warps = Warps.of(p, arch, tile, tile.matrix, args)
    new = warps.group.grid.allocator
    state = LatentMmaState(new.lds(tile.lds_bytes(p)//UNIT_BYTES), new.registers(tile.row_tiles*tile.columns(p), nv.F4), new.registers(1, nv.F2),
                        new.registers(tile.scalar_places(p).kinds, nv.F2), new.registers(tile.block_n//tile.key_parts//tile.matrix.N, nv.F4),
                        new.registers(tile.row_tiles, nv.F2), Statements.of(new))
    return MmaLatent(warps, tile, state, Share(warps.at.wave, tile.row_tiles, tile.block_n, tile.key_parts))

  # ***** sizes *****
  @property
  def names(self) -> ScalarPlaces: return self.tile.scalar_places(self.p)
  @property
  def columns(self) -> int: return self.tile.columns(self.p)
  @property
  def latent_steps(self) -> int:
    """Number of matrix instructions of S = Q K^T that multiply columns which K stores in 8 bits; the others multiply rotary columns."""
    return self.p.k_width//self.mat.K if self.p.stored else 0
  @property
  def converts(self) -> bool:
    """Whether each warp itself converts the 8-bit numbers that it reads from shared memory to 16-bit operands."""
    return bool(self.p.stored) and not self.tile.widens(self.p)
  @property
  def row_tiles(self) -> range: return range(self.tile.row_tiles)
  @functools.cached_property
  def own(self) -> UOp:
    """Index, among the rows that the block owns, of the first of the 16 rows whose scores this warp computes."""
    return self.share.tile*self.mat.M
  @functools.cached_property
  def queries(self) -> list[Row]: return self.warps.queries(self.own)
  def in_block(self, first:int|UOp) -> list[UOp]:
    """Returns the indices, among the rows that the block owns, of this lane's two rows of the 16 that begin at row `first`."""
    return [first + self.mat.c_row(self.warps.at.lane, r) for r in range(nv.ROWS)]

  # ***** the steps *****
  def begin(self) -> LatentMmaState:
    warps, s = self.warps, self.state
    begin = ((s.acc, 0.0), (s.m, LOWEST), (s.l, 0.0))
    s = s.store([s.statements.first], *[store_all(to, [ops.splat(value, ops.length(to))]*to.max_numel()) for to, value in begin])
    s = s.started(warps.copies_of_q(s.shared, self.tile.layouts(self.p)[0]))
    for i in range(self.tile.stages - 1): s = self.fetch(s, warps.group.walked.begin + i)
    return s

  def scores(self, s:LatentMmaState, t:UOp, masked:bool) -> tuple[LatentMmaState, list[UOp]]:
    # Also starts the copies of a later tile.
    s = s.arrived(self.tile.stages - 2)
    if self.tile.widens(self.p):
      to = {"k": self.k_rows(t)}
      s = s.do(*self.stored.widened_stores(s.shared, to, self.stored.copied(s.shared, to, self.first_raw))).after_barrier()
    s = self.raw_scores(s, t)
    raw = load_all(s.scores)
    scores = self.share.scores(self.warps.group.scores).finished(raw, self.queries, self.share.tile_number(t), masked)
    return self.fetch(s, t + self.tile.stages - 1), scores

  def weigh(self, s:LatentMmaState, x:list[UOp], t:UOp, part:None, masked:bool) -> tuple[LatentMmaState, None]:
    # P, and the factor by which a row of O must be rescaled, go to shared memory, where all warps read them.
    to_log2, m, p, zero = self.warps.group.scores.to_log2, s.m[0].load(), self.p, ops.splat(0.0, nv.ROWS)
    of_v = [scale_in_range(y) for y in self.scales(s, t)] if p.stored else []
    compared = compared_scores(x, [ops.concat(y, y) for y in of_v], to_log2) if p.stored else x
    s, top = self.highest(s, compared, m)
    reference = raised(m, top, to_log2, self.tile.rescale_above)
    factor = ops.exp2(ops.mul(ops.sub(m, reference), to_log2))
    weights = [weights_from(y, reference, to_log2) for y in x]
    factors = [scaled_weights(y, scale, nv.ROWS) for y, scale in zip(weights, of_v)] if p.stored else weights
    packed = [nv.pack_a([*pair], p.dtype) for pair in zip(factors[0::2], factors[1::2])]
    exact = functools.reduce(lambda l, y: lane_sum(l, y, nv.ROWS), weights, zero)
    if p.stored: rounded = sum_of_unscaled([ops.slice_(y, i, 2) for y in packed for i in (0, 2)], weights, of_v, p.dtype, nv.ROWS)
    else: rounded = rounded_sum(packed, ONES, self.mat, p.dtype, nv.ROWS, nv.zero(s.done))
    sums = (rounded, exact)[:self.names.kinds]
    s = s.store([s.m[0].store(reference)], store_all(s.l, [ops.add(ops.mul(s.l[i].load(), factor), y) for i, y in enumerate(sums)]))
    return s.do(*self.put_weights(s, packed), *self.put_row_values(s, self.names.factor, factor, self.share.part.eq(0))).after_barrier(), None

  def add_to_o(self, s:LatentMmaState, p:None, t:UOp, part:None, masked:bool) -> UOp:
    # `p` is None, because `weigh` has put P in shared memory. `part` is None, because this kernel does not divide a tile.
    mat, lane = self.mat, self.warps.at.lane
    s = s.store(store_all(s.factors, [self.load_row_values(s, self.names.factor, tile*mat.M) for tile in self.row_tiles]))
    s = s.do(rescale(s.acc, s.factors, s.done))
    a_row, a_unit = mat.a_address(lane)
    accs = [[s.acc[tile*self.columns + i].load() for i in range(self.columns)] for tile in self.row_tiles]
    for step in range(self.tile.block_n//mat.K):
      weights = [s.read(self.weight_rows, a_row, a_unit, tile*mat.M, 2*step) for tile in self.row_tiles]
      for pair in range(self.columns//2):
        b = self.v_operand(s, t, step, pair)
        for row, a in zip(accs, weights):
          for half in range(2): row[2*pair + half] = nv.mma(mat, a, b, half, row[2*pair + half])
    return UOp.group(*store_all(s.acc, itertools.chain(*accs)))

  def kernel(self, s:LatentMmaState) -> UOp:
    s = self.totals(s)
    return self.warps.group.kernel("mla", [x for tile in self.row_tiles for x in self.outputs(s, tile)], self.tile.lds_bytes(self.p))

  # ***** shared memory *****
  def k_rows(self, t:UOp) -> LongRows:
    """Returns the layout of K's rows of tile t in shared memory, from which matrix operands are read."""
    # If threads convert K from 8 to 16 bits in shared memory (`widens`), this is the place of the converted tile. If K is stored in 8 bits, the
    # rotary columns lie elsewhere (`rotary_rows`).
    q, k, _, _ = self.tile.layouts(self.p)
    return k.moved_to(q.size + self.tile.stages*self.tile.stage(self.p) if self.tile.widens(self.p) else self.first_of(t))
  @property
  def first_raw(self) -> int:
    """Index of the 16-byte unit of shared memory at which a tile's 8-bit numbers begin before they are converted."""
    return self.tile.weights_at(self.p) - self.tile.raw(self.p)
  def rotary_rows(self, t:UOp) -> LongRows:
    """Returns the layout, in shared memory, of the rotary columns of tile t."""
    # if the latent columns of K are stored in 8 bits, the rotary columns keep 16 bits and have a layout of their own
    _, k, rotary, _ = self.tile.layouts(self.p)
    return rotary.moved_to(self.first_of(t) + (0 if self.tile.widens(self.p) else k.size))
  def first_of(self, t:UOp) -> UOp:
    """Returns the index of the 16-byte unit of shared memory at which tile t begins in the ring buffer."""
    return self.tile.layouts(self.p)[0].size + t%self.tile.stages*self.tile.stage(self.p)
  def first_scale(self, t:UOp) -> UOp:
    """Returns the index in shared memory, counted in floats, at which the scales of tile t's 8-bit rows begin."""
    # the scales come last in the tile's part of the ring buffer
    return (self.first_of(t) + self.tile.stage(self.p))*(UNIT_BYTES//4) - self.tile.block_n
  def scales(self, s:LatentMmaState, t:UOp) -> list[UOp]:
    """Returns the scales of K's 8-bit rows for the keys in tile t whose scores this lane holds: two scales for each C fragment."""
    # V, the first columns of K, has the same scales
    return self.stored.scales(s.shared, self.first_scale(t), 0, self.share.part*self.share.keys, self.share.keys)
  @property
  def weight_rows(self) -> SwizzledRows:
    *_, weights = self.tile.layouts(self.p)
    return weights.moved_to(self.tile.weights_at(self.p))
  def row_scalars(self, s:LatentMmaState) -> RowScalars:
    return RowScalars(s.shared, self.tile.block_m, int(self.weight_rows.base) + self.weight_rows.size)
  def put_row_values(self, s:LatentMmaState, i:int|UOp, values:UOp, gate:UOp) -> list[UOp]:
    """Returns stores to shared memory of one number for each of this lane's two queries. The index `i` says which number it is, e.g. the maximum."""
    # to a table in shared memory; `i` says what the number is, such as the maximum of a row: an index that `ScalarPlaces` defines; where `gate` is
    # false, nothing is stored
    told, to = self.row_scalars(s), s.shared.bitcast(dtypes.float)
    return [nv.put(to[told.place(i, row)], ops.extract(values, r), gate & self.warps.at.h.eq(0)) for r, row in enumerate(self.in_block(self.own))]
  def load_row_values(self, s:LatentMmaState, i:int|UOp, first:int|UOp) -> UOp:
    """Loads the numbers that `put_row_values` stored with the index `i`, for this lane's two of the 16 queries from row `first` on."""
    return ops.build(*[self.row_scalars(s).load(i, row) for row in self.in_block(first)])
  def fetch(self, s:LatentMmaState, t:UOp) -> LatentMmaState:
    group, block_n = self.warps.group, self.tile.block_n
    there = (group.walked.end*block_n).minimum(group.sequence.n_k)
    def copies(name:str, to:LongRows) -> list[UOp]:
      return self.warps.copies(replace(group.rows_of(name), count=there), s.shared, t*block_n, to)
    found = self.stored.staged(s.shared, t, {"k": self.k_rows(t)}, self.first_raw) if self.tile.widens(self.p) else copies("k", self.k_rows(t))
    if self.p.k_rotary_view is not None: found += copies("k_rotary", self.rotary_rows(t))
    return s.started(found + (self.stored.copies(s.shared, t, self.first_scale(t)) if self.p.stored else []))

  # ***** products *****
  def raw_scores(self, s:LatentMmaState, t:UOp) -> LatentMmaState:
    """Computes S = Q K^T of this warp's queries and keys, without score terms and masks, and returns the state with S."""
    mat, steps = self.mat, range(round_up(self.p.D, self.mat.K)//self.mat.K)
    for some in (piece[i:i + ADDED_UP] for piece in (steps[:self.latent_steps], steps[self.latent_steps:]) for i in range(0, len(piece), ADDED_UP)):
      tiles = [nv.zero(s.done)]*s.scores.max_numel()
      for step in some:
        a = self.q_operand(s, step)
        for pair in range(len(tiles)//2):
          b = self.k_operand(s, t, step, pair)
          for half in range(2): tiles[2*pair + half] = nv.mma(mat, a, b, half, tiles[2*pair + half])
      found = [ops.add(s.scores[i].load(), x) for i, x in enumerate(tiles)] if some.start else tiles
      if some.stop == self.latent_steps: found = [ops.mul(x, ops.concat(y, y)) for x, y in zip(found, self.scales(s, t))]
      s = s.store(store_all(s.scores, found))
    return s

  def q_operand(self, s:LatentMmaState, step:int) -> UOp:
    """Returns operand A of S = Q K^T, read from shared memory: step `step` (16 columns) of this warp's 16 queries."""
    q, (row, unit) = self.tile.layouts(self.p)[0], self.mat.a_address(self.warps.at.lane)
    if self.converts and step < self.latent_steps: return self.stored.q_operand(s.shared, q, self.own, step)
    return s.read(q, self.own + row, unit, 0, 2*step)
  def k_operand(self, s:LatentMmaState, t:UOp, step:int, pair:int) -> UOp:
    """Returns operand B of S = Q K^T, read from tile t: step `step` (16 columns) of keys 16*`pair` to 16*`pair` + 15 of this warp."""
    row, unit = self.mat.b_address(self.warps.at.lane)
    def read(rows:LongRows, units:int) -> UOp: return s.read(rows, self.share.part*self.share.keys + row, unit, pair*self.mat.K, units)
    if self.converts and step < self.latent_steps: return self.stored.k_operand(read(self.k_rows(t), step//2*2), step)
    if self.p.stored and step >= self.latent_steps: return read(self.rotary_rows(t), 2*(step - self.latent_steps))
    return read(self.k_rows(t), 2*step)
  def v_operand(self, s:LatentMmaState, t:UOp, step:int, pair:int) -> UOp:
    """Returns operand B of O += P V, read from tile t: step `step` (16 keys) of columns 16*`pair` to 16*`pair` + 15 of this warp."""
    (row, unit), in_line = self.mat.b_transposed_address(self.warps.at.lane), LINE//2
    if not self.converts: return s.read(self.v_rows(t, pair//in_line), row, unit, step*self.mat.K, 2*(pair%in_line), transposed=True)
    first = (self.warps.at.wave*(self.columns//2) + pair//in_line*in_line).minimum(self.k_rows(t).units - in_line)
    return self.stored.v_operand(s.read(self.k_rows(t), row, first + unit, step*self.mat.K, pair%in_line//2*2, transposed=True), pair)

  def highest(self, s:LatentMmaState, scores:list[UOp], m:UOp) -> tuple[LatentMmaState, UOp]:
    """Returns (state, vector of the largest of m and all scores for each of this lane's two rows, compared over all lanes and warps)."""
    tops = []
    for r in range(nv.ROWS):
      top = functools.reduce(ops.max_, [ops.extract(x, 2*r + i) for x in scores for i in range(2)], ops.extract(m, r))
      for step in (1, 2): top = ops.max_(top, nv.xor_lane(top, step))
      tops.append(top)
    if self.share.key_parts == 1: return s, ops.build(*tops)
    s = s.do(*self.put_row_values(s, self.names.top(self.share.part), ops.build(*tops), UOp.const(True))).after_barrier()
    heard = [self.load_row_values(s, self.names.top(part), self.own) for part in range(self.share.key_parts)]
    return s, ops.build(*[functools.reduce(ops.max_, [ops.extract(x, r) for x in heard]) for r in range(nv.ROWS)])

  def put_weights(self, s:LatentMmaState, packed:list[UOp]) -> list[UOp]:
    """Returns the statements that store P, given as A operands `packed`, to shared memory."""
    # An operand has four dwords, and each dword two neighbouring keys of one row. Dwords 0 and 2 belong to the first of the lane's two rows, dwords 1
    # and 3 to the second. Dwords 0 and 1 have keys of the operand's first 8 keys, dwords 2 and 3 of its last 8.
    to, first, statements = s.shared.bitcast(dtypes.float), self.share.part*(self.share.keys//self.mat.N), []
    for step, x in enumerate(packed):
      for i in range(4):
        place = self.weight_rows.place(self.in_block(self.own)[i%2], first + 2*step + i//2)
        statements.append(nv.put(to[place*4 + self.warps.at.h], ops.as_float(ops.extract(x, i)), UOp.const(True)))
    return statements

  def v_rows(self, t:UOp, line:int) -> LongRows:
    """Returns the layout in shared memory of 128 bytes of each row of V in tile t: the `line`-th 128 bytes that this warp computes."""
    # V is the first columns of K, so this is the layout of K, moved to the line. The last warp may have fewer lines. In place of a missing line it
    # reads the last line of V, and the results are not stored.
    k = self.k_rows(t)
    return k.moved_to(k.base + (self.warps.at.wave*(self.columns//LINE) + line).minimum(k.panels - 1)*LINE)

  # ***** after the last iteration *****
  def totals(self, s:LatentMmaState) -> LatentMmaState:
    """Stores m and this warp's sums of P for each query to shared memory, where all warps read them, and returns the state."""
    # m: the number that the softmax subtracts from the row's scores
    sums = [s.l[kind].load() for kind in range(self.names.kinds)]
    own = 0 if self.p.stored else 1      # the first kind of sum that has only this lane's P: four lanes are then added up
    sums[own:] = [ops.build(*[sum_over_quad(ops.extract(x, r)) for r in range(nv.ROWS)]) for x in sums[own:]]
    told = [x for kind, total in enumerate(sums) for x in self.put_row_values(s, self.names.total(kind, self.share.part), total, UOp.const(True))]
    return s.do(*told, *self.put_row_values(s, self.names.reference, s.m[0].load(), self.share.part.eq(0))).after_barrier()

  def outputs(self, s:LatentMmaState, tile:int) -> list[UOp]:
    """Returns the stores of O / l for this warp's columns and matrix tile `tile` of queries, and of LSE."""
    # the first warp stores LSE = m + ln l
    group, mat, names, stores = self.warps.group, self.mat, self.names, list[UOp]()
    accs, first = [s.acc[tile*self.columns + i].load() for i in range(self.columns)], self.warps.at.wave*(self.columns*mat.N)
    for r, (row, in_block) in enumerate(zip(self.warps.queries(UOp.const(tile*mat.M)), self.in_block(tile*mat.M))):
      def load(name:int|UOp, in_block:UOp=in_block) -> UOp: return self.row_scalars(s).load(name, in_block)
      totals = [functools.reduce(ops.add, [load(names.total(kind, part)) for part in range(self.tile.key_parts)]) for kind in range(names.kinds)]
      factor, log_sum = group.normalised(row, load(names.reference), totals)
      o = [(first + i*mat.N + self.warps.at.h*mat.block, ops.mul(ops.slice_(acc, 2*r, 2), factor)) for i, acc in enumerate(accs)]
      if self.converts: o = self.warps.alternating_columns(accs, r, factor, self.warps.at.wave)
      stores += group.outputs(row, o, None) + group.outputs(replace(row, there=row.there & self.warps.at.wave.eq(0)), [], log_sum)
    return stores
