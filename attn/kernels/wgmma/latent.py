"""Latent attention with Hopper's wgmma (sm_90): the steps of `online_softmax`. Begin with `WgmmaLatent.scores`."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Any
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.nvidia.ring import Arrivals
from attn.kernels.nvidia.warp_forward import SoftmaxState, WarpsForward
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.memory.layouts import LongPanels
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.parts.program.statements import load_all, store_all
from attn.kernels.tiles.wgmma import PANEL_COLUMNS, MlaWgmmaTile
from attn.kernels.wgmma.forward import sums_of
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.ops.softmax import correct, rescale, weigh
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# A block has two warpgroups, and owns 64 rows: the queries of many heads. It reads each key once for all these queries. O has too many columns for
# the registers of one warpgroup, so each warpgroup computes half of the columns of O += P V. The first warpgroup also computes the scores S = Q K^T
# and P. It hands P to the second warpgroup through shared memory, with the factors by which the rows of O must be rescaled. V is read from the tile
# of K: wgmma reads its rows transposed.
#
# All threads copy K, by cp.async, into a ring buffer of two tiles. While the first warpgroup multiplies Q and K of a tile, the tensor cores may still
# multiply P and V of the tile before. When both warpgroups have these products, the threads start the copies of the next tile, which overwrite the
# tile before.

# Most matrix instructions that add to one partial sum of a score. The tensor cores truncate an fp32 sum at each instruction: see ADDED_UP in
# attn/kernels/mma/latent.py. There are registers for two partial sums of 18 instructions.
ADDED_UP_BY_WGMMA = 18

def steps_of_scores(p:Problem) -> int: return round_up(p.D, wgmma.K)//wgmma.K
def sums_of_scores(p:Problem) -> int: return ceildiv(steps_of_scores(p), ADDED_UP_BY_WGMMA)

@dataclass(frozen=True)
class LatentWgmmaState(Arrivals, SoftmaxState):
  """The values that the loop over keys carries from iteration to iteration: those of the softmax, partial sums of S, and factors for O."""
  # each warpgroup has its own columns of O; only the first one has m, `addend` and l
  factors: UOp     # by which the rows of O are rescaled in an iteration
  sums: UOp        # partial sums of the scores

@dataclass(frozen=True)
class WgmmaLatent(WarpsForward[MlaWgmmaTile, LatentWgmmaState]):
  """Builder of the forward kernel of latent attention with wgmma: its methods return the UOps of the kernel's steps, as one thread runs them."""
  parts = (None,)    # a tile's keys are not divided

  @staticmethod
  def of(p:Problem, arch:Chip, tile:MlaWgmmaTile, args:tuple[UOp, ...]) -> WgmmaLatent:
    warps = Warps.of(p, arch, tile, tile.matrix, args)
    new, mat, kinds = warps.group.grid.allocator, tile.matrix, len(sums_of(p))
    of_tile = tile.block_n//mat.N
    state = LatentWgmmaState.of(new, tile.lds_bytes(p), accs=tile.columns(p)//mat.N, scores=of_tile, operands=tile.block_n//mat.K, kinds=kinds,
                                factors=new.registers(1, nv.F2), sums=new.registers(sums_of_scores(p)*of_tile, nv.F4))
    return WgmmaLatent(warps, tile, state)

  @property
  def group(self) -> UOp: return wgmma.group(self.warps.at.wave)
  @property
  def in_first(self) -> UOp:
    """Whether this thread is in the first warpgroup, which computes the scores and P."""
    return self.group.eq(0)
  @property
  def queries(self) -> list[Row]: return self.warps.queries(self.own)
  @property
  def own(self) -> UOp:
    """Index, among the rows that the block owns, of the first of the 16 rows that this warp computes."""
    return self.warps.at.wave%(wgmma.M//self.mat.M)*self.mat.M

  # ***** the steps *****
  def begin(self) -> LatentWgmmaState:
    warps, s = self.warps, self.state
    zero = ops.build(*[UOp.const(0, dtypes.uint)]*(UNIT_BYTES//4))
    s = s.store([s.statements.first], warps.first_values(s.m, s.addend, s.l), store_all(s.p, [zero]*s.p.max_numel()))
    for registers in (s.acc, s.sums): s = s.do(nv.clear(registers, s.done))
    s = s.expected(warps.at, self.tile.threads)
    return self.fetch(s.do(*warps.copies_of_q(s.shared, self.tile.layouts(self.p)[0])), warps.group.walked.begin)

  def scores(self, s:LatentWgmmaState, t:UOp, masked:bool) -> tuple[LatentWgmmaState, None]:
    # The first warpgroup alone starts S. The copies of the next tile start when both warpgroups have O of the tile before.
    s = s.do(wgmma.arrived(s.arrivals, t - self.warps.group.walked.begin, s.done))
    (q, *_), k = self.tile.layouts(self.p), self.k_panels(t)
    s = s.do(wgmma.scores(s.sums, s.shared[0], s.shared[k.base], s.done, steps_of_scores(self.p), (UNIT_BYTES*q.panel, UNIT_BYTES*k.panel),
                          self.p.dtype, self.in_first, sums_of_scores(self.p)))
    return self.fetch(s.after_barrier(), t + 1), None

  def weigh(self, s:LatentWgmmaState, x:None, t:UOp, part:None, masked:bool) -> tuple[LatentWgmmaState, None]:
    # The first warpgroup computes P, and hands it to the second. The second one has no reference m and no sums of P, so its `weigh` and `correct`
    # compute nothing.
    s, scores = self.finished(self.added_up(s), t, masked), self.warps.group.scores
    how: dict[str, Any] = {"rows": nv.ROW_LANES, "dtype": self.p.dtype, "sums": sums_of(self.p), "matrix": self.mat, "scale": scores.to_log2}
    s = s.store([s.factors[0].store(s.m[0].load())])
    s = s.do(weigh(s.m, s.addend, s.p, s.scores, s.l_of_trip, s.done, **how))
    s = s.store(store_all(s.l_of_trip, [self.if_first(x) for x in load_all(s.l_of_trip)]))
    s = s.do(correct(s.m, s.addend, s.l, s.acc, s.p, s.scores, s.l_of_trip, s.done, **how, above=self.tile.rescale_above)).summed()
    factors = ops.exp2(ops.mul(ops.sub(s.factors[0].load(), s.m[0].load()), scores.to_log2))
    s = s.do(*self.put_weights(s), self.put(s, self.tile.factors_at(self.p), factors))
    return s.do(wgmma.publish(s.done)).after_barrier(), None

  def add_to_o(self, s:LatentWgmmaState, p:None, t:UOp, part:None, masked:bool) -> UOp:
    # The second warpgroup rescales its columns first; in the first one, `correct` has done so.
    found = self.load(s, self.tile.factors_at(self.p))
    s = s.store([s.factors[0].store(ops.build(*[self.in_first.where(1.0, ops.extract(found, r)) for r in range(nv.ROWS)]))])
    s = s.do(rescale(s.acc, s.factors, s.done))
    weights, v = s.shared[int(self.tile.weights(self.p).base)], self.v_panels(t)
    s = s.do(wgmma.shared_output(s.acc, weights, s.shared[v.base], s.done, self.tile.block_n, UNIT_BYTES*v.panel, self.p.dtype))
    s = s.do(nv.clear(s.sums, s.done))      # in the second warpgroup no product writes them: without this, they would hold registers everywhere
    return s.do(wgmma.wait_products(s.acc, s.done)).done

  def kernel(self, s:LatentWgmmaState) -> UOp:
    s = s.after_barrier()
    return self.warps.group.kernel("mla_wgmma", self.outputs(s), self.tile.lds_bytes(self.p))

  def outputs(self, s:LatentWgmmaState) -> list[UOp]:
    # The first warpgroup also stores the LSE. It hands m and l to the second one, in the place of P.
    first, values = int(self.tile.weights(self.p).base), [s.m[0].load(), *load_all(s.l)]
    places = [first + i*self.tile.handed for i in range(len(values))]
    s = s.do(*[self.put(s, place, x) for place, x in zip(places, values)]).after_barrier()
    m, *sums = [self.load(s, place) for place in places]
    accs = load_all(s.acc)
    return self.warps.outputs(self.queries, accs, m, sums, sums_of(self.p), self.group)

  # ***** scores *****
  def added_up(self, s:LatentWgmmaState) -> LatentWgmmaState:
    """Waits for the product S = Q K^T, adds up the partial sums in which it was computed, and returns the state."""
    s, n = s.do(wgmma.wait_products(s.sums, s.done)), s.scores.max_numel()
    sums = load_all(s.sums)
    return s.store(store_all(s.scores, [functools.reduce(ops.add, sums[i::n]) for i in range(n)]))

  def finished(self, s:LatentWgmmaState, t:UOp, masked:bool) -> LatentWgmmaState:
    """Applies score terms (bias, softcap, ...) and masks to S, and returns the state."""
    scores = self.warps.group.scores
    if scores.in_place: return s.do(*scores.masks(s.scores, self.queries, t, s.done)) if masked else s
    return s.store(store_all(s.scores, scores.finished(load_all(s.scores), self.queries, t, masked)))

  # ***** shared memory *****
  def k_panels(self, t:UOp) -> LongPanels:
    """Returns the layout of K's rows of tile t in the ring buffer, which lies behind Q in shared memory."""
    q, k, _ = self.tile.layouts(self.p)
    return k.moved_to(q.size + (t - self.warps.group.walked.begin)%self.tile.stages*k.size)
  def v_panels(self, t:UOp) -> LongPanels:
    """Returns the layout, in shared memory, of those columns of V in tile t that this warpgroup multiplies."""
    # V is the first columns of K: the layout of K's rows, moved to these columns
    k = self.k_panels(t)
    return k.moved_to(k.base + self.group*(self.tile.columns(self.p)//PANEL_COLUMNS*k.panel))
  def fetch(self, s:LatentWgmmaState, t:UOp) -> LatentWgmmaState:
    """Starts this thread's copies of tile t of keys, and returns the state."""
    # rows beyond the last key become zeros; the thread arrives at the mbarrier when its copies are complete
    s = s.do(*self.warps.copies_of("k", s.shared, t, self.k_panels(t)))
    return s.do(wgmma.arrive(s.arrivals, s.done))
  def put_weights(self, s:LatentWgmmaState) -> list[UOp]:
    """Returns the statements by which the first warpgroup stores P to shared memory."""
    to, lane = self.tile.weights(self.p), self.warps.at.lane
    row, unit = self.own + lane%self.mat.M, lane//self.mat.M
    return [nv.stmatrix_where(s.shared[to.place(row, unit + 2*i)], s.p[i].load(), self.in_first) for i in range(s.p.max_numel())]
  def put(self, s:LatentWgmmaState, place:int, values:UOp) -> UOp:
    """Returns the store of `values`, one number for each of two rows, by which a thread of the first warpgroup sends them to the second."""
    # It hands the numbers to the thread of the second warpgroup that has the same rows. `place` is the 16-byte unit of shared memory at which such
    # numbers of all threads begin.
    return nv.put(s.shared[place + self.warps.at.thread%wgmma.GROUP], ops.concat(values, values), self.in_first)
  def load(self, s:LatentWgmmaState, place:int) -> UOp:
    """Returns the two numbers that a thread of the first warpgroup has stored by `put`."""
    return ops.slice_(ops.as_float(s.shared[place + self.warps.at.thread%wgmma.GROUP].load()), 0, nv.ROWS)
  def if_first(self, x:UOp) -> UOp:
    """Returns `x`, one number for each of the thread's two rows, in threads of the first warpgroup, and 0 in the second."""
    return ops.build(*[self.in_first.where(ops.extract(x, r), 0.0) for r in range(nv.ROWS)])
