"""Flash attention forward on Hopper's wgmma (sm_90): the algorithm of attn/kernels/forward_mma.py, with warpgroups that overlap by themselves.

A block owns one head and 64 queries for each of its warpgroups, and walks over the keys in tiles of BLOCK_N (FlashAttention-2, arXiv 2307.08691,
algorithm 1). Per trip a warpgroup starts S = Q K^T, turns S into P in registers and starts O += P V; the tensor cores do one group's products while
the others are in their softmax. Nothing holds the groups together but the tiles that they all copy, by cp.async, into a ring of three: all threads
arrive at an mbarrier when their part of a tile is there, one trip ahead, and who waits for it knows that every group has left the trip before.
"""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Callable, ClassVar
from attn.chips import Chip
from attn.chips.matrix import MMA
from attn.kernels.nvidia import UNIT, LINE, Block, InOrder, total_of
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.epilogue import finish
from attn.kernels.parts.rows import flat
from attn.kernels.parts.statements import workgroup_barrier
from attn.kernels.parts.tensors import check_range
from attn.kernels.parts.tiles import ceildiv, round_up
from attn.ops import common as ops, hopper as wgmma, nvidia as nv
from attn.ops.softmax import LANE, LOWEST, correct, first_bias, lane_sum
from attn.problem import Problem
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

STAGES = 3      # K and V tiles in shared memory

@dataclass(frozen=True)
class Panels:
  """A tile of rows in shared memory as wgmma reads it, from unit `base` on: see attn/ops/hopper.py."""
  rows: int                # a multiple of 8
  width: int               # elements of a row, a multiple of 16
  base: UOp|int = 0
  @property
  def units(self) -> int: return self.width//UNIT
  @property
  def across(self) -> int: return 1 << (self.units - 1).bit_length()
  @property
  def pitch(self) -> int: return LINE
  @property
  def panel(self) -> int: return self.rows*LINE
  @property
  def size(self) -> int: return ceildiv(self.units, LINE)*self.panel
  def place(self, row:UOp, unit:UOp) -> UOp:
    """Where a 16-byte unit lies."""
    return (self.base + unit//LINE*self.panel + row*LINE).cast(dtypes.int) + ((unit%LINE).cast(dtypes.int) ^ (row%LINE).cast(dtypes.int))

@dataclass(frozen=True)
class WgmmaTile:
  """How the kernel divides the work."""
  groups: int                  # warpgroups of a block, each with 64 queries
  block_n: int                 # keys of a trip
  rescale_above: float = 8.0   # accumulators are rescaled when the P of a lane, in one trip, add up to more than this power of two

  pack_gqa: ClassVar[bool] = False
  @property
  def waves(self) -> int: return self.groups*4
  @property
  def block_m(self) -> int: return self.groups*wgmma.M
  @property
  def threads(self) -> int: return self.groups*wgmma.GROUP
  def __str__(self) -> str: return f"{self.block_m}x{self.block_n} {self.waves} waves m64n{self.block_n}k16 {STAGES} stages"

def panels_of(p:Problem, tile:WgmmaTile) -> tuple[Panels, Panels, Panels]:
  """The tiles of Q, K and V."""
  depth, width = round_up(p.D, wgmma.K), round_up(p.Dv, wgmma.K)
  return Panels(tile.block_m, depth), Panels(tile.block_n, depth), Panels(tile.block_n, width)

def lds_bytes(p:Problem, tile:WgmmaTile) -> int:
  q, k, v = panels_of(p, tile)
  return 16*(q.size + STAGES*(k.size + v.size) + 1)

@dataclass(frozen=True)
class State(InOrder):
  """What crosses trips: the accumulators of O; the reference m of a lane's two rows, bias = -m*Scores.to_log2 and the row sums l. Within a trip: its
  part of l, the scores, and P as the A operand of O. Shared memory, and a dummy that statements are stored to."""
  acc: UOp
  m: UOp
  bias: UOp
  l: UOp
  part: UOp
  scores: UOp
  p: UOp
  shared: UOp
  nothing: UOp
  def do(self, statement:UOp) -> State: return self.after(self.nothing[0].store(statement))

def forward_wgmma(p:Problem, arch:Chip, tile:WgmmaTile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders, those of `tensors.arguments(p)`, and with p.sk_variable of that Variable: called as
  `forward.forward`. Raises ValueError where p.num_splits is still 0, and NotImplementedError for a bias beyond what 31 bits address."""
  if p.num_splits == 0: raise ValueError("num_splits=0: splits.resolve chooses the number of splits before there can be a kernel")
  check_range(p, tile)
  mat, block_n, (left, _) = MMA[p.dtype], tile.block_n, p.window
  q_tile, k_tile, v_tile = panels_of(p, tile)

  def kernel(*args:UOp) -> UOp:
    block = Block.of(p, arch, tile, mat, args)
    scores, keys, group = block.scores, block.keys, wgmma.group(block.at.wave)
    queries = block.queries(block.at.wave*mat.M)

    # ***** placeholders *****
    def registers(n:int, slot:int, dtype:DType=dtypes.float) -> UOp: return UOp.placeholder((n,), dtype, slot, AddrSpace.REG)
    units = lds_bytes(p, tile)//16
    start = State(registers(v_tile.width//mat.N, 2, nv.F4), registers(1, 3, nv.F2), registers(1, 4, nv.F2), registers(1, 5, nv.F2),
                  registers(1, 9, nv.F2), registers(block_n//mat.N, 6, nv.F4), registers(block_n//mat.K, 7, nv.U4),
                   UOp.placeholder((units,), nv.U4, 0, AddrSpace.LOCAL),
                  registers(1, 8))
    def stage(t:UOp) -> UOp: return (t - keys.begin)%STAGES
    def k_panels(t:UOp) -> Panels: return Panels(block_n, k_tile.width, q_tile.size + stage(t)*k_tile.size)
    def v_panels(t:UOp) -> Panels: return Panels(block_n, v_tile.width, q_tile.size + STAGES*k_tile.size + stage(t)*v_tile.size)
    def arrivals(s:State) -> UOp: return s.shared[units - 1]
    def fetch(s:State, copies:list[UOp]) -> State: return s.after(UOp.group(*[s.nothing[0].store(x) for x in copies]))
    def fetch_tile(s:State, t:UOp) -> State:
      s = fetch(s, block.copies("k", s.shared, t*block_n, block_n, k_panels(t)) + block.copies("v", s.shared, t*block_n, block_n, v_panels(t)))
      return s.do(wgmma.arrive(arrivals(s), s.order))

    # ***** one trip *****
    def trip(s:State, t:UOp, masked:bool) -> State:
      # S = Q K^T; meanwhile the next tile starts on its way
      s = s.do(wgmma.arrived(arrivals(s), t - keys.begin, s.order))
      s = s.do(wgmma.scores(s.scores, s.shared[group*(wgmma.M*LINE)], s.shared[k_panels(t).base], s.order, k_tile.width//mat.K,
                            (16*q_tile.panel, 16*k_tile.panel), p.dtype))
      s = fetch_tile(s, t + 1)
      s = s.do(wgmma.wait(s.scores, s.order))
      tiles = [s.scores[kt].load() for kt in range(block_n//mat.N)]
      if masked or not scores.raw:
        tiles = block.finished(tiles, queries, t, masked)
        s = s.after(UOp.group(*[s.scores[kt].store(y) for kt, y in enumerate(tiles)]))
      # P = exp2(S - m)
      weights = [ops.weights(y, s.bias[0].load(), scores.to_log2) for y in tiles]
      total = functools.reduce(lambda l, y: lane_sum(l, y, nv.ROWS), weights, ops.splat(0.0, 2))
      s = s.after(UOp.group(*[s.p[i].store(nv.pack_a(weights[2*i], weights[2*i + 1], p.dtype)) for i in range(block_n//mat.K)]))
      s = s.after(s.part[0].store(total))
      s = s.do(correct(s.m, s.bias, s.l, s.acc, s.p, s.scores, s.part, rows=nv.ROW_LANES, dtype=p.dtype, sums=(LANE,), matrix=mat,
                       scale=scores.to_log2, above=tile.rescale_above))
      s = s.after(s.l[0].store(ops.add(s.l[0].load(), s.part[0].load())))
      # O += P V
      s = s.do(wgmma.output(s.acc, s.p, s.shared[v_panels(t).base], s.order, 16*v_tile.panel, p.dtype))
      return s.do(wgmma.wait(s.acc, s.order))

    def trips(s:State, first:UOp, last:UOp, masked:bool) -> State:
      if (count := trip_count(last - first)) is None: return s
      r = UOp.range(count, next(block.axes), AxisType.LOOP)
      return s.after(trip(s.after(r), first + r, masked).order.end(r))

    # ***** all of it *****
    nought = UOp.const(0.0, dtypes.float)
    zero = [start.nothing[0].store(nought)] + [start.acc[i].store(nv.zero(nought)) for i in range(start.acc.max_numel())]
    zero += [y[0].store(ops.splat(value, 2)) for y, value in ((start.m, LOWEST), (start.bias, first_bias(scores.to_log2)), (start.l, 0.0))]
    s = start.after(UOp.group(*zero))
    s = s.do(wgmma.init(arrivals(s), block.at.thread.eq(0), tile.threads))
    s = s.after(workgroup_barrier(s.order))
    s = fetch_tile(fetch(s, block.copies("q", s.shared, block.first_row, tile.block_m, q_tile)), keys.begin)
    if left >= 0: s = trips(s, keys.begin, keys.full_begin, masked=True)
    s = trips(s, keys.full_begin, keys.full_end, masked=False)
    s = trips(s, keys.full_end, keys.end, masked=True)

    # ***** O = O / l, LSE = m + ln l *****
    factors, log_sums = [], []
    for r, row in enumerate(queries):
      sink = flat(block.given["sinks"])[row.head].load() if "sinks" in block.given else None
      factor, log_sum = finish(ops.extract(s.m[0].load(), r), total_of(s.l[0].load(), r), scores, sink)
      factors.append(factor)
      log_sums.append(log_sum)
    accs = [s.acc[dt].load() for dt in range(start.acc.max_numel())]
    return block.kernel("wgmma", block.outputs(queries, accs, factors, log_sums), lds_bytes(p, tile))
  return kernel
