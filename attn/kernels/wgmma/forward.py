"""Forward with Hopper's wgmma (sm_90): the steps of `online_softmax`. The warpgroups overlap products and softmax without a fixed schedule. Begin
with `WgmmaForward.scores`."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Any
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.functions.spans import may_be_whole
from attn.kernels.nvidia.ring import Arrivals
from attn.kernels.nvidia.warp_forward import SoftmaxState, WarpsForward
from attn.kernels.nvidia.stored import FACTORS_OF_K, OF_K, OF_V, OF_V_WITHOUT_NANS
from attn.kernels.nvidia.warps import Warps, always
from attn.kernels.parts.memory.layouts import LINE, SwizzledPanels, SwizzledRows, WholeRows
from attn.kernels.parts.program.counts import below, ceildiv, round_up
from attn.kernels.parts.program.statements import Optional, Statements, store_all, workgroup_barrier
from attn.kernels.parts.weights.dropout import kept_scores
from attn.kernels.parts.weights.softmax import nans_of_scales
from attn.kernels.tiles.mma import fragments
from attn.kernels.tiles.wgmma import MOST_OF_PART, ONES_ROWS, STAGES, WGMMA, WgmmaTile
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.ops.numerics import ONES_OF, ROUNDOFF
from attn.ops.pairs import keep_seen
from attn.ops.softmax import FACTORS, LANE, ONES, SMALLEST_SCALE, UNSCALED, ScalesAt, correct, weigh
from attn.ops.stored import zero_or_nan
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# A warpgroup computes 64 queries of its block. For each tile of keys a warpgroup starts S = Q K^T, turns S into P in registers and starts O += P V.
# The tensor cores compute the products of one warpgroup while the other warpgroups compute the softmax. The warpgroups wait for each other only when
# they change tiles: all warpgroups copy each tile together, by cp.async, into a ring buffer of three tiles. In each iteration a thread copies its
# part of the next iteration's tile, and arrives at an mbarrier when its part is complete. A warpgroup that has waited for the mbarrier of its tile
# knows two things: the tile is complete, and all warpgroups have finished with the tile of two iterations ago. The next copies overwrite that tile.
#
# Keys and values that are stored in 8 bits come to registers as they are, an iteration earlier. While the tensor cores compute S, each thread
# converts the part of the next tile that it has loaded, and stores it to the ring buffer in 16 bits.

def sums_of(p:Problem) -> tuple[str, ...]:
  """Returns the names of the sums of P that the kernel computes for each row, e.g. LANE: the sum of P before rounding."""
  # The sum of P as rounded to 16 bits is computed only if O is stored in a finer type than P. Dividing O by this sum avoids an error as large as the
  # rounding error of P. If O is stored in a coarser type, the rounding of O hides that error anyway. (On an H200 this sum costs 2 to 8 % of the speed
  # by vector additions, and 4 to 15 % by mma.sync. Kernels for the other matrix units always compute it.) If V is stored in 8 bits, the first sum is
  # FACTORS: it shows whether P times V's scales is too large. If q, k and v are 8-bit floats, the sum of rounded P is a column of the product of P
  # and V (`WgmmaForward.ones`), and is not listed here.
  if p.of_8_bits: return (LANE,)*p.writes_lse
  stored = "float32" if p.num_splits > 1 else p.out_dtype
  kind = LANE if ROUNDOFF[stored] >= ROUNDOFF[p.dtype] else UNSCALED if p.stored else ONES
  return (*[FACTORS]*bool(p.stored), kind, *[LANE]*(kind != LANE and p.writes_lse))

def parts_of_o(p:Problem) -> list[range]:
  """Returns the C fragments of O as ranges of indices. Fragments of one range are neighbouring columns, and are computed together."""
  # The last fragment has the row sums of P. Parts have equal sizes if possible: with different sizes ptxas may make the products wait for each other
  # (its warning C7511).
  whole = fragments(p.Dv, WGMMA[p.dtype]) + ONES_ROWS//WGMMA[p.dtype].N
  each = ceildiv(whole, next(n for n in (1, 3, 2) if whole <= n*MOST_OF_PART and (n == 2 or whole % n == 0)))
  return [range(first, min(first + each, whole)) for first in range(0, whole, each)]

@dataclass(frozen=True)
class WgmmaState(Arrivals, SoftmaxState):
  """The values that the loop over keys carries from iteration to iteration: those of the softmax, Q, and tiles of 8-bit K and V in registers."""
  pieces: Optional     # this thread's part of the next tile of K and V, if they are stored in 8 bits
  q: Optional     # the warpgroup's rows of Q as A fragments, if registers keep them
  sums: Optional     # a part of P V of one tile, if the tensor cores add with few bits: it is then added to O in fp32

@dataclass(frozen=True)
class WgmmaForward(WarpsForward[WgmmaTile, WgmmaState]):
  """Builder of the forward kernel with wgmma for one problem: its methods return the UOps of the kernel's steps, as one thread runs them."""
  parts = (None,)        # a tile's keys are not divided

  @staticmethod
  def of(p:Problem, arch:Chip, tile:WgmmaTile, args:tuple[UOp, ...]) -> WgmmaForward:
    mat, kinds = WGMMA[p.dtype], max(1, len(sums_of(p)))
    of_o = parts_of_o(p)[-1].stop if p.of_8_bits else fragments(p.Dv, mat)
    warps = Warps.of(p, arch, tile, mat, args)
    new = warps.group.grid.allocator
    state = WgmmaState(new.lds(tile.lds_bytes(p)//UNIT_BYTES), new.registers(of_o, nv.F4), new.registers(1, nv.F2),
                       new.registers(1, nv.F2), new.registers(kinds, nv.F2), new.registers(tile.block_n//mat.N, nv.F4),
                       new.registers(tile.block_n//mat.K, nv.U4), Statements.of(new), new.registers(kinds, nv.F2),
                       Optional(new.registers(tile.pieces(p), nv.U4) if tile.converts(p) else None),
                       Optional(new.registers(round_up(p.D, mat.K)//mat.K, nv.U4) if tile.keeps_q and p.stored else None),
                       Optional(new.registers(len(parts_of_o(p)[0]), nv.F4) if arch.short_sums and p.of_8_bits and not p.fast_accumulate else None))
    return WgmmaForward(warps, tile, state)

  @functools.cached_property
  def queries(self) -> list[Row]: return self.warps.queries(self.warps.at.wave*self.mat.M)

  @functools.cached_property
  def there(self) -> UOp:
    """Whether this warpgroup owns any query; a warpgroup without queries only copies tiles, and skips the products."""
    # a product that may be skipped needs registers for its old results, and there are not enough
    if self.p.of_8_bits: return wgmma.EVERYWHERE
    group, n_q, front = self.warps.group, self.warps.group.sequence.n_q, 0 if self.p.dealt is None else self.p.dealt.front
    def full(rows:int) -> bool: return round_up(rows, wgmma.M) % group.tile.block_m == 0
    if isinstance(n_q, int) and full(front) and full(n_q - front): return wgmma.EVERYWHERE
    return below(group.first_row + wgmma.group(self.warps.at.wave)*wgmma.M, group.end_row)

  # ***** the steps *****
  def begin(self) -> WgmmaState:
    warps, s = self.warps, self.state
    s = s.store([s.statements.first], warps.first_values(s.m, s.addend, s.l))
    s = s.do(nv.clear(s.acc, s.done))
    if self.there is not wgmma.EVERYWHERE:      # a warpgroup without queries computes no products
      s = s.do(nv.clear(s.scores, s.done))
    if self.p.turned: s = s.do(*self.ones(s.shared))
    twice = self.transposes and not self.tile.ahead(self.p)
    s, first = s.expected(warps.at, self.tile.threads*(1 + twice)), warps.group.walked.begin
    s = s.do(*warps.copies_of_q(s.shared, self.tile.layouts(self.p)[0]))
    if self.converts: return self.fetch(self.with_q(self.loaded(s, first)), first)
    if not self.transposes: return self.fetch(self.with_q(s), first)
    s = s.do(*warps.copies_of("v", s.shared, first, self.given_v(first)), *self.ones(s.shared))
    s = s.do(nv.commit(s.done))
    s = s.after(workgroup_barrier(s.statements.do(nv.wait_copies(s.done, 0))))
    return self.fetch_bytes(self.copied_bytes(s, first) if self.tile.ahead(self.p) else s, first)

  def with_q(self, s:WgmmaState) -> WgmmaState:
    """Loads this warp's rows of Q from shared memory to registers, if the kernel keeps Q in registers, and returns the state."""
    if (own := s.q.value) is None: return s
    s = s.do(nv.commit(s.done))
    s = s.after(workgroup_barrier(s.statements.do(nv.wait_copies(s.done, 0))))
    (lane, wave), q = (self.warps.at.lane, self.warps.at.wave), self.tile.layouts(self.p)[0]
    row, unit = wave*self.mat.M + lane%self.mat.M, lane//self.mat.M
    steps = range(own.max_numel())
    return s.store(store_all(own, [nv.ldmatrix(s.shared[q.place(row, 2*step + unit)], 0) for step in steps]))

  @property
  def in_one_loop(self) -> bool:
    # An operation decides in each iteration whether the mask is computed. With one loop the kernel has half of the code, and the compiler takes less
    # time. Two loops are faster if the mask hides a part of every tile, as a dilated window does: the operation overlaps nothing else.
    scores, mask = self.warps.group.scores, self.p.mask_mod
    if scores.condition is None or mask is None or self.p.stored or self.p.of_8_bits: return False
    return bool(scores.condition.loaded) or may_be_whole(mask.value)

  def scores(self, s:WgmmaState, t:UOp, masked:bool) -> tuple[WgmmaState, None]:
    # Starts the copies of the next tile only if the ring buffer holds several tiles.
    q, k, _ = self.tile.layouts(self.p)
    s = s.do(wgmma.arrived(s.arrivals, t - self.warps.group.walked.begin, s.done, published=self.converts or self.tile.ahead(self.p)))
    group, of_k = wgmma.group(self.warps.at.wave), s.shared[self.k_panels(t).base]
    steps = round_up(self.p.D, self.mat.K)//self.mat.K
    if s.q.value is None:
      s = s.do(wgmma.scores(s.scores, s.shared[group*(wgmma.M*LINE)], of_k, s.done, steps, (UNIT_BYTES*q.panel, UNIT_BYTES*k.panel), self.p.dtype,
                            self.there))
    else: s = s.do(wgmma.output(s.scores, s.q.value, of_k, s.done, UNIT_BYTES*k.panel, self.p.dtype, None, self.there, more=False, by_rows=True))
    s = self.turn_passed(s, group.eq(self.tile.groups - 1) | (t > self.warps.group.walked.begin))
    if self.transposes: return self.fetch_bytes(s, t + 1), None
    return (self.fetch(s, t + 1) if self.stages > 1 else s), None

  def weigh(self, s:WgmmaState, x:None, t:UOp, part:None, masked:bool) -> tuple[WgmmaState, None]:
    s = s.do(wgmma.wait_products(s.scores, s.done))
    s = self.finished(self.with_scales(s, t, masked) if self.p.stored else s, t, masked)
    scores, mat = self.warps.group.scores, self.mat
    how: dict[str, Any] = {"rows": nv.ROW_LANES, "dtype": self.p.dtype, "sums": sums_of(self.p), "matrix": mat, "scale": scores.to_log2}
    if self.p.stored: how |= self.scales_at(s, t, masked)
    if (factor := self.factor(masked)) is not None: how["factor"] = factor
    s = s.do(weigh(s.m, s.addend, s.p, s.scores, s.l_of_trip, s.done, **how))
    s = s.do(correct(s.m, s.addend, s.l, s.acc, s.p, s.scores, s.l_of_trip, **how, above=self.tile.rescale_above))
    if sums_of(self.p): s = s.summed()
    if not self.p.dropout_p: return s, None
    left = kept_scores(scores, self.queries, t)
    return s.store(store_all(s.p, [left.packed(s.p[i].load(), 2*i) for i in range(s.p.max_numel())])), None

  def with_scales(self, s:WgmmaState, t:UOp, masked:bool) -> WgmmaState:
    """Multiplies S by the scales of K's 8-bit rows in tile t, unless the later operation `weigh` does that; returns the state."""
    of_k, of_v = (self.stored.scales(s.shared, self.first_scale(t), kind, UOp.const(0), self.tile.block_n) for kind in (OF_K, OF_V))
    if not self.weighs_keys(masked): s = s.store(store_all(s.scores, [ops.mul(s.scores[i].load(), ops.concat(x, x)) for i, x in enumerate(of_k)]))
    # in a masked tile, if a query sees a key whose scale of V is NaN, one of the query's row sums (number `of_nans`) becomes NaN, and so does its O
    if not masked: return s
    nan = nans_of_scales(self.warps.group.scores, of_v, self.queries, t, masked)
    return s.store([s.l[self.of_nans].store(ops.add(s.l[self.of_nans].load(), nan))])

  @property
  def of_nans(self) -> int:
    """Index (0 or 1) of the sum of P that becomes NaN for a query that sees a key whose scale of V is NaN."""
    # see `nans_apart`
    return 0 if self.nans_apart else 1
  @property
  def nans_apart(self) -> bool:
    """Whether a NaN scale of V goes to sum 0 of a query's P, which makes only O NaN, instead of sum 1, which other results may need."""
    # The first row sum has no other use in the results. It is needed if an LSE is written, which must stay finite, or if dropout may remove the
    # weight with the NaN.
    return bool(self.p.writes_lse or self.p.dropout_p)
  def weighs_keys(self, masked:bool) -> bool:
    """Whether the operation `weigh` multiplies S by the scales of K's rows, so that `with_scales` need not do so."""
    # in the same step as by softmax_scale*log2(e); masks and score terms need S with these scales
    scores = self.warps.group.scores
    return not masked and scores.in_place and scores.to_log2 > SMALLEST_SCALE
  def scales_at(self, s:WgmmaState, t:UOp, masked:bool) -> dict[str, Any]:
    """Returns {"scales": ..., "at": ...}, arguments of the operations `weigh` and `correct`: where the scales of tile t lie in shared memory."""
    # If the tile is not masked, all queries see all keys, and a scale of V that is NaN may simply make P NaN. In a masked tile NaN scales are
    # replaced, and `with_scales` passes the NaN on to the queries that see its key.
    def first(kind:int) -> UOp: return self.stored.first_scales(self.first_scale(t), kind, UOp.const(0))
    of_v, of_kind = OF_V_WITHOUT_NANS if masked else OF_V, self.tile.block_n//2
    factors = (FACTORS_OF_K - of_v)*of_kind if self.weighs_keys(masked) else 0
    return {"scales": s.shared.bitcast(nv.F2)[first(of_v)], "at": ScalesAt(self.stored.apart, factors)}

  def factor(self, masked:bool) -> UOp|None:
    """Returns the factor by which `weigh` multiplies scores: the product of the scales of q and k, if they are 8-bit floats, or None."""
    # Masks and score terms need S with these scales: there `finished` multiplies S earlier.
    return None if masked or not self.warps.group.scores.in_place else self.warps.group.scale_of_scores

  def finished(self, s:WgmmaState, t:UOp, masked:bool) -> WgmmaState:
    """Applies score terms (bias, softcap, ...) and masks to the scores S of tile t, and returns the state."""
    scores, raw = self.warps.group.scores, [s.scores[kt].load() for kt in range(s.scores.max_numel())]
    if self.in_one_loop:
      if not scores.unchanged: s = s.store(store_all(s.scores, scores.finished(raw, self.queries, t, False)))
      return s.do(keep_seen(s.scores, t < self.warps.group.walked.full_begin, scores.pairs(self.queries, t), s.done))
    if not scores.in_place or ((self.p.q_scale or self.p.k_scale) and self.factor(masked) is None):
      tiles, = self.warps.group.scaled([raw])
      return s.store(store_all(s.scores, scores.finished(tiles, self.queries, t, masked)))
    return s.do(*scores.masks(s.scores, self.queries, t, s.done)) if masked else s

  def turn_passed(self, s:WgmmaState, gate:UOp) -> WgmmaState:
    """Lets the next warpgroup start its products, if warpgroups take turns and `gate` is true; returns the state."""
    # A turn is P V of a tile and S of the next tile. The first warpgroup gets its first turn when the last warpgroup has started S of the first tile.
    if not self.tile.turns: return s
    return s.do(wgmma.end_turn(wgmma.group(self.warps.at.wave), self.tile.groups, gate, s.done))

  def add_to_o(self, s:WgmmaState, p:None, t:UOp, part:None, masked:bool) -> UOp:
    if self.tile.turns: s = s.do(wgmma.begin_turn(wgmma.group(self.warps.at.wave), self.tile.groups, s.done))
    if self.p.of_8_bits: return self.add_in_parts(s, t)
    v = self.v_panels(t)
    s = s.do(wgmma.output(s.acc, s.p, s.shared[v.base], s.done, UNIT_BYTES*v.panel, self.p.dtype, there=self.there))
    return s.do(wgmma.wait_products(s.acc, s.done)).done

  def add_in_parts(self, s:WgmmaState, t:UOp) -> UOp:
    """Adds the product P V of tile t, whose elements are 8-bit floats, to O, one group of columns at a time; returns the last operation."""
    # if the tensor cores add with too few bits, each part of the columns is computed separately, and then added to O in fp32
    v = self.v_panels(t)
    for columns in parts_of_o(self.p):
      def to(s:WgmmaState) -> UOp: return s.acc if s.sums.value is None else s.sums.value
      place = columns if s.sums.value is None else range(len(columns))
      s = s.do(wgmma.output(to(s), s.p, s.shared[v.base + columns.start*self.mat.N*LINE], s.done, UNIT_BYTES*v.panel, self.p.dtype, place, self.there,
                            more=s.sums.value is None))
      s = s.do(wgmma.wait_products(to(s), s.done))
      if s.sums.value is not None: s = s.store([s.acc[i].store(ops.add(s.acc[i].load(), s.sums.value[j].load())) for j, i in enumerate(columns)])
    return s.done

  def kernel(self, s:WgmmaState) -> UOp:
    s = self.turn_passed(s, wgmma.group(self.warps.at.wave) < self.tile.groups - 1)
    return self.warps.group.kernel("wgmma", self.outputs(s), self.tile.lds_bytes(self.p))

  def outputs(self, s:WgmmaState) -> list[UOp]:
    accs = [s.acc[dt].load() for dt in range(s.acc.max_numel())]
    kinds, sums = sums_of(self.p), [s.l[i].load() for i in range(s.l.max_numel())]
    if self.p.of_8_bits:
      *accs, rounded = accs
      kinds, sums = (ONES, *kinds), [ops.build(*[ops.extract(rounded, nv.ROWS*r) for r in range(nv.ROWS)]), *sums[:len(kinds)]]
    if self.p.stored:     # with `nans_apart`, O is NaN by a scale, lse is not
      divisor = ops.add(sums[1], zero_or_nan(sums[0])) if self.nans_apart else sums[1]
      kinds, sums = (kinds[1], *kinds[1:]), [divisor, *sums[1:]]
    return self.warps.outputs(self.queries, accs, s.m[0].load(), sums, kinds, alternating=self.transposes)

  # ***** global -> shared memory *****
  @property
  def stages(self) -> int: return self.tile.stages(self.p)
  @property
  def transposes(self) -> bool: return self.tile.transposes(self.p)
  def stage(self, t:UOp, of:int) -> UOp: return (t - self.warps.group.walked.begin)%of
  def k_panels(self, t:UOp) -> SwizzledPanels:
    q, k, _ = self.tile.layouts(self.p)
    return k.moved_to(q.size + self.stage(t, self.tile.key_stages(self.p))*k.size)
  def v_panels(self, t:UOp) -> SwizzledPanels:
    _, _, v = self.tile.layouts(self.p)
    return v.moved_to(self.tile.first_v(self.p) + self.stage(t, self.stages)*v.size)
  def panels(self, t:UOp) -> dict[str, SwizzledPanels]: return {"k": self.k_panels(t), "v": self.v_panels(t)}
  def given_v(self, t:UOp) -> SwizzledRows:
    _, _, v = self.tile.layouts(self.p)
    rows = self.tile.given_v(self.p)
    return rows.moved_to(self.tile.first_v(self.p) + self.stages*v.size + self.stage(t, self.tile.given_stages(self.p))*rows.size)

  def copied_bytes(self, s:WgmmaState, t:UOp) -> WgmmaState:
    """Starts this thread's copies of K in tile t and of V in tile t + 1, both in 8-bit floats, and returns the state."""
    s = s.do(*self.warps.copies_of("k", s.shared, t, self.k_panels(t)), *self.warps.copies_of("v", s.shared, t + 1, self.given_v(t + 1)))
    return s.do(nv.commit(s.done))

  def fetch_bytes(self, s:WgmmaState, t:UOp) -> WgmmaState:
    """Starts the next copies, and transposes this warp's part of V in tile t, in 8-bit floats, in shared memory. Returns the state."""
    # First starts the next copies: of tile t + 1 if shared memory has room (`ahead`), otherwise of tile t. Then transposes this warp's part of V of
    # tile t, which has arrived. With `ahead`, waits for the copies of tile t. Arrives at the mbarrier.
    ahead = self.tile.ahead(self.p)
    s = self.copied_bytes(s, t + 1 if ahead else t)
    s = self.transposed(s, t)
    if not ahead: return s.do(wgmma.arrive_twice(s.arrivals, s.done))
    s = s.do(nv.wait_copies(s.done, 1))
    s = s.do(wgmma.publish(s.done))
    return s.do(wgmma.arrive_stored(s.arrivals, s.done))

  def ones(self, shared:UOp) -> list[UOp]:
    """Returns stores of ones that extend each transposed tile of V by rows of ones: the product P V then has columns with the row sums of P."""
    # with them, the last C fragment of the product P V has the row sums of P
    ones = ops.build(*[UOp.const(ONES_OF[self.p.dtype], dtypes.uint)]*(UNIT_BYTES//4))
    across, stores = self.tile.block_n//self.mat.unit, list[UOp]()
    places = self.stages*ONES_ROWS*across
    for i in range(ceildiv(places, self.tile.threads)):
      item = self.warps.at.thread + i*self.tile.threads
      to = self.v_panels(self.warps.group.walked.begin + item//(ONES_ROWS*across))
      place = to.place(to.rows - ONES_ROWS + item//across%ONES_ROWS, item%across)
      stores.append(nv.put(shared[place], ones, item < places))
    return stores

  def transposed(self, s:WgmmaState, t:UOp) -> WgmmaState:
    """Transposes this warp's part of V in tile t, in 8-bit floats, in shared memory, and returns the state."""
    # wgmma can read 8-bit floats only with the keys of a column side by side. A warp's part consists of pieces of 32 keys by 16 columns. The even
    # columns of a piece come before the odd ones. The keys get the order in which `nv.pack_a` packs their weights.
    (lane, wave), mat, rows, to = (self.warps.at.lane, self.warps.at.wave), self.mat, self.given_v(t), self.v_panels(t)
    across, steps = round_up(self.p.Dv, mat.K)//mat.unit, self.tile.block_n//mat.K
    together = self.tile.waves//steps      # parts of the same keys that warps transpose at the same time
    matrix, step, stores = lane//8, wave//together, list[UOp]()
    for first in range(0, across, together):
      unit, there = wave%together + first, (step < steps) & (wave%together + first < across)
      words = nv.columns_apart(nv.ldmatrix(s.shared[rows.place(there.where(step, 0)*mat.K + lane, there.where(unit, 0))], 0, transposed=True))
      place = to.place(unit*mat.unit + matrix//2*8 + lane%8, step*2 + matrix%2)
      stores.append(nv.stmatrix_where(s.shared[place], words, there))
    return s.do(*stores)

  def fetch(self, s:WgmmaState, t:UOp) -> WgmmaState:
    """Starts this thread's copies of tile t, and returns the state."""
    # The thread arrives at the mbarrier when its copies are complete. Tile t may not exist, because the last iteration has no next tile. If the
    # sequence has at least STAGES tiles, zeros are then copied to the ring buffer. If it has fewer, the ring buffer has room for these tiles only,
    # and nothing is copied.
    if self.converts: return self.widened(s, t)
    # The compiler must not know the last tile: ptxas 13.0 derives from `t < 2` that t is 1, and then computes the place of tile 1, (~0 & 1), as 0
    there = None if self.stages == STAGES else t < ops.opaque_uniform(self.warps.group.walked.end)
    s = s.do(*self.copies_of_tile(s.shared, t, there),
             *(self.stored.checked_copies(s.shared, t, self.first_scale(t), always(there)) if self.p.stored else []))
    return s.do(wgmma.arrive(s.arrivals, s.done))

  def copies_of_tile(self, shared:UOp, t:UOp, gate:UOp|None) -> list[UOp]:
    """Returns the statements that start this thread's copies of tile t of K and V, where `gate` is true."""
    if not self.p.turned: return self.warps.copies_of_keys(shared, t, self.k_panels(t), self.v_panels(t), gate)
    to = self.v_panels(t)
    columns = WholeRows(to.rows - ONES_ROWS, to.units, base=to.base)
    return [*self.warps.copies_of("k", shared, t, self.k_panels(t), gate),
            *self.warps.copies(self.warps.group.turned_rows(t), shared, UOp.const(0), columns, gate)]

  # ***** keys and values that are stored in 8 bits *****
  @property
  def converts(self) -> bool: return self.tile.converts(self.p)
  def first_scale(self, t:UOp) -> UOp:
    """Returns the index in shared memory, counted in floats, of the first scale of the 8-bit rows of tile t."""
    _, _, v = self.tile.layouts(self.p)
    place = (t - self.warps.group.walked.begin)%self.tile.scale_stages(self.p)
    return (self.tile.first_v(self.p) + self.stages*v.size + place*self.tile.scales(self.p))*(UNIT_BYTES//4)
  def loaded(self, s:WgmmaState, t:UOp) -> WgmmaState:
    """Loads this thread's part of tile t, 8-bit numbers, to registers, starts copies of the tile's scales, and returns the state."""
    assert s.pieces.value is not None
    s = s.store(store_all(s.pieces.value, self.stored.loaded(t, self.panels(t))))
    s = s.do(*self.stored.copies(s.shared, t, self.first_scale(t)))
    return s.do(nv.commit(s.done))
  def widened(self, s:WgmmaState, t:UOp) -> WgmmaState:
    """Stores this thread's part of tile t, converted to 16 bits, to shared memory, and loads its part of tile t+1; returns the state."""
    # the scales that the thread has copied are checked; then it arrives at the mbarrier
    own, s = s.pieces.value, s.do(nv.wait_copies(s.done, 0))
    assert own is not None
    pieces = [own[i].load() for i in range(own.max_numel())]
    s = s.do(*self.stored.widened_stores(s.shared, self.panels(t), pieces),
             *self.stored.checked_scales(s.shared, self.first_scale(t), self.warps.group.scores.to_log2))
    s = s.do(wgmma.publish(s.done))
    return self.loaded(s.do(wgmma.arrive_stored(s.arrivals, s.done)), t + 1)
