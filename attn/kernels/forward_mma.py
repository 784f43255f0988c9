"""Flash attention forward on NVIDIA's mma.sync (sm_80 and later): the algorithm of attn/kernels/forward.py with the query on the rows.

A block owns one head and BLOCK_M queries, a warp 16 or 32 of them, and walks over the keys in tiles of BLOCK_N: S = Q K^T, the online softmax,
O += P V (FlashAttention-2, arXiv 2307.08691, algorithm 1). K and V tiles come by cp.async into a ring of `stages` in shared memory, so that one
barrier a trip is enough: it says that a tile is there and that the one before it is no longer read. Operands are read by ldmatrix, V transposed on
the way, from rows that are swizzled against bank conflicts. The softmax takes no maxima but in a rare branch: see attn/ops/softmax.py.
"""
from __future__ import annotations
import functools, itertools
from dataclasses import dataclass
from typing import Callable
from attn.chips import Chip
from attn.chips.matrix import Mma
from attn.kernels.nvidia import UNIT, LINE, Block, InOrder, total_of
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.epilogue import finish
from attn.kernels.parts.rows import flat
from attn.kernels.parts.statements import workgroup_barrier
from attn.kernels.parts.tensors import check_range
from attn.kernels.parts.tiles import round_up
from attn.ops import common as ops, nvidia as nv
from attn.ops.softmax import LANE, LOWEST, ONES, correct, first_bias, lane_sum
from attn.problem import Problem
from attn.tinygrad_compat import AddrSpace, AxisType, DType, UOp, dtypes

@dataclass(frozen=True)
class MmaTile:
  """How the kernel divides the work on one chip."""
  matrix: Mma
  waves: int                   # warps of a block, each with its own queries
  q_tiles: int                 # tiles of 16 queries of a warp: they share the K and V operands
  block_n: int                 # keys of a trip
  stages: int = 2              # K and V tiles in shared memory
  q_in_lds: bool = False       # Q is read from shared memory in every trip instead of being kept in registers
  pack_gqa: bool = False       # a tile's rows are the queries of all the heads that share a key/value head: K and V are read once for them
  parts: int = 2               # of a trip's keys, whose P is computed and used by turns
  rescale_above: float = 8.0   # accumulators are rescaled when a row's sum of P over a part is more than this, in powers of two

  @property
  def block_m(self) -> int: return self.waves*self.q_tiles*self.matrix.M
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} {self.waves} waves {self.matrix.M}x{self.matrix.N}x{self.matrix.K} {self.stages} stages"

@dataclass(frozen=True)
class Rows:
  """How rows of `width` elements (a multiple of 16) lie in shared memory from unit `base` on: whole lines of 128 bytes, whose units are permuted by
  xor with the row's number. Then neither the eight rows of an 8x8 matrix nor the eight units of a line that is copied share a bank."""
  width: int
  base: UOp|int = 0
  @property
  def units(self) -> int: return self.width//UNIT
  @property
  def stride(self) -> int: return round_up(self.units, LINE)
  @property
  def across(self) -> int: return self.stride
  @property
  def pitch(self) -> int: return self.stride
  def place(self, row:UOp, unit:UOp) -> UOp:
    """Where a 16-byte unit lies."""
    return (self.base + row*self.stride).cast(dtypes.int) + (unit.cast(dtypes.int) ^ (row%LINE).cast(dtypes.int))
  def further(self, row:UOp, unit:UOp, rows:int, units:int) -> tuple[UOp, int]:
    """Where a unit lies that is `rows` (a multiple of 8) rows and `units` (even) units on from `unit` (0 or 1) of `row`: a part for a register, of
    which there are few different ones, and a constant."""
    return self.place(row, unit) ^ units%LINE, rows*self.stride + units//LINE*LINE

def lds_bytes(p:Problem, tile:MmaTile) -> int:
  k_rows, v_rows = (Rows(round_up(d, tile.matrix.K)) for d in (p.D, p.Dv))
  return 16*(tile.block_m*k_rows.stride + tile.stages*tile.block_n*(k_rows.stride + v_rows.stride))

@dataclass(frozen=True)
class State(InOrder):
  """What crosses trips: the accumulators of O and, per query tile, the reference m of its rows, bias = -m*Scores.to_log2 and the row sums l, of P as
  it is rounded: O divided by those is a mean of V, whatever the rounding did. For the LSE, l has the lane's part of the exact sums besides. Within a
  trip: the scores, P as the A operand of O, and its part of l. Shared memory, and a dummy that statements are stored to."""
  acc: UOp
  m: UOp
  bias: UOp
  l: UOp
  scores: UOp
  weights: UOp
  part: UOp
  shared: UOp
  nothing: UOp
  def do(self, statement:UOp) -> UOp: return self.nothing[0].store(statement)

def forward_mma(p:Problem, arch:Chip, tile:MmaTile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders, those of `tensors.arguments(p)`, and with p.sk_variable of that Variable: called as
  `forward.forward`. Raises ValueError where p.num_splits is still 0, and NotImplementedError for a bias beyond what 31 bits address."""
  if p.num_splits == 0: raise ValueError("num_splits=0: splits.resolve chooses the number of splits before there can be a kernel")
  check_range(p, tile)
  mat, q_tiles, block_n, stages, (left, _) = tile.matrix, tile.q_tiles, tile.block_n, tile.stages, p.window
  depth, width = round_up(p.D, mat.K), round_up(p.Dv, mat.K)
  k_tiles, d_tiles = block_n//mat.N, width//mat.N
  steps, n_parts = block_n//mat.K, min(tile.parts, block_n//mat.K)   # of O += P V
  parts = [range(i*steps//n_parts, (i + 1)*steps//n_parts) for i in range(n_parts)]

  def kernel(*args:UOp) -> UOp:
    block = Block.of(p, arch, tile, mat, args)
    lane, scores, keys = block.at.lane, block.scores, block.keys
    in_block = [(block.at.wave*q_tiles + t)*mat.M for t in range(q_tiles)]    # first rows of the warp's query tiles
    queries = [block.queries(first) for first in in_block]

    # ***** placeholders *****
    def registers(n:int, slot:int, dtype:DType=dtypes.float) -> UOp: return UOp.placeholder((n,), dtype, slot, AddrSpace.REG)
    kinds = 1 if block.lse is None else 2                       # of row sums
    start = State(registers(q_tiles*d_tiles, 2, nv.F4), registers(q_tiles, 3, nv.F2), registers(q_tiles, 4, nv.F2),
                  registers(kinds*q_tiles, 5, nv.F2), registers(q_tiles*k_tiles, 6, nv.F4), registers(q_tiles*k_tiles//2, 7, nv.U4),
                  registers(kinds*q_tiles, 8, nv.F2), UOp.placeholder((lds_bytes(p, tile)//16,), nv.U4, 0, AddrSpace.LOCAL), registers(1, 9))
    q_rows, k_size, v_size = Rows(depth), block_n*Rows(depth).stride, block_n*Rows(width).stride
    k_base, v_base = tile.block_m*q_rows.stride, tile.block_m*q_rows.stride + stages*k_size
    def k_rows(t:UOp) -> Rows: return Rows(depth, k_base + t%stages*k_size)
    def v_rows(t:UOp) -> Rows: return Rows(width, v_base + t%stages*v_size)

    def fetch(s:State, copies:list[UOp]) -> UOp:
      s = s.after(UOp.group(*map(s.do, copies)))
      return s.do(nv.commit(s.order))
    def fetch_tile(s:State, t:UOp) -> UOp:
      return fetch(s, block.copies("k", s.shared, t*block_n, block_n, k_rows(t)) + block.copies("v", s.shared, t*block_n, block_n, v_rows(t)))

    # ***** Q: the A operand of S, kept in registers or read anew in every trip *****
    def read(s:State, rows:Rows, row:UOp, unit:UOp, row_step:int, unit_step:int, transposed:bool=False) -> UOp:
      place, step = rows.further(row, unit, row_step, unit_step)
      return nv.ldmatrix(s.shared[place], step, transposed)
    def q_operand(s:State, qt:int, step:int) -> UOp:
      row, unit = mat.a_address(lane)
      return read(s, q_rows, in_block[0] + row, unit, qt*mat.M, 2*step)

    # ***** one trip *****
    def arrived(s:State, but:int) -> State:
      """All threads' copies are there, the last `but` groups excepted, and what was read before is read."""
      return s.after(workgroup_barrier(s.do(nv.wait(s.order, but))))

    def score(s:State, t:UOp) -> list[list[UOp]]:
      """S of one key tile: for each query tile its C fragments."""
      tiles, (row, unit) = [[nv.zero(s.order)]*k_tiles for _ in range(q_tiles)], mat.b_address(lane)
      for step in range(depth//mat.K):
        a = [q_operand(s, qt, step) if tile.q_in_lds else q_kept[qt][step] for qt in range(q_tiles)]
        for pair in range(k_tiles//2):
          b = read(s, k_rows(t), row, unit, pair*mat.K, 2*step)
          for qt, half in itertools.product(range(q_tiles), range(2)):
            tiles[qt][2*pair + half] = nv.mma(mat, a[qt], b, half, tiles[qt][2*pair + half])
      return tiles

    def trip(s:State, t:UOp, masked:bool) -> UOp:
      tiles = [block.finished(y, rows, t, masked) for y, rows in zip(score(s, t), queries)]
      s = s.after(UOp.group(*[s.scores[qt*k_tiles + kt].store(y) for qt, ys in enumerate(tiles) for kt, y in enumerate(ys)]))
      s = s.after(fetch_tile(s, t + stages - 1))      # while the tensor cores work
      for steps in parts:
        done = product(weigh(s, steps), t, steps)
        s = s.after(done)
      return done

    def weigh(s:State, steps:range) -> State:
      """P of some of the keys, relative to a reference that it does not outgrow."""
      stores = []
      for qt in range(q_tiles):
        total, exact = nv.zero(s.order), ops.splat(0.0, 2)
        for step in steps:
          pair = [ops.weights(s.scores[qt*k_tiles + 2*step + i].load(), s.bias[qt].load(), scores.to_log2) for i in range(2)]
          a = nv.pack_a(pair[0], pair[1], p.dtype)
          total, exact = nv.times_ones(mat, a, total, p.dtype), functools.reduce(lambda l, y: lane_sum(l, y, nv.ROWS), pair, exact)
          stores.append(s.weights[qt*k_tiles//2 + step].store(a))
        stores += [s.part[kind*q_tiles + qt].store(y) for kind, y in enumerate((nv.row_sums(total), exact)[:kinds])]
      s = s.after(UOp.group(*stores))
      s = s.after(s.do(correct(s.m, s.bias, s.l, s.acc, s.weights, s.scores, s.part, rows=nv.ROW_LANES, dtype=p.dtype, sums=(ONES, LANE)[:kinds],
                               matrix=mat, scale=scores.to_log2, above=tile.rescale_above, first=2*steps.start, count=2*len(steps))))
      return s.after(UOp.group(*[s.l[i].store(ops.add(s.l[i].load(), s.part[i].load())) for i in range(kinds*q_tiles)]))

    def product(s:State, t:UOp, steps:range) -> UOp:
      """O += P V over those keys."""
      accs, (row, unit) = [[s.acc[qt*d_tiles + i].load() for i in range(d_tiles)] for qt in range(q_tiles)], mat.b_transposed_address(lane)
      for step, d_pair in itertools.product(steps, range(d_tiles//2)):
        b = read(s, v_rows(t), row, unit, step*mat.K, 2*d_pair, transposed=True)
        for qt, half in itertools.product(range(q_tiles), range(2)):
          accs[qt][2*d_pair + half] = nv.mma(mat, s.weights[qt*k_tiles//2 + step].load(), b, half, accs[qt][2*d_pair + half])
      return UOp.group(*[s.acc[qt*d_tiles + i].store(y) for qt, ys in enumerate(accs) for i, y in enumerate(ys)])

    def trips(s:State, first:UOp, last:UOp, masked:bool) -> State:
      if (count := trip_count(last - first)) is None: return s
      r = UOp.range(count, next(block.axes), AxisType.LOOP)
      return s.after(trip(arrived(s.after(r), stages - 2), first + r, masked).end(r))

    # ***** all of it *****
    nought = UOp.const(0.0, dtypes.float)
    zero = [start.nothing[0].store(nought)] + [start.acc[i].store(nv.zero(nought)) for i in range(q_tiles*d_tiles)]
    zero += [y[i].store(ops.splat(value, 2)) for y, value in ((start.m, LOWEST), (start.bias, first_bias(scores.to_log2)), (start.l, 0.0))
             for i in range(y.max_numel())]
    s = start.after(UOp.group(*zero))
    s = s.after(fetch(s, block.copies("q", s.shared, block.first_row, tile.block_m, q_rows)))
    for i in range(stages - 1): s = s.after(fetch_tile(s, keys.begin + i))
    s = arrived(s, stages - 1)
    q_kept = [] if tile.q_in_lds else [[q_operand(s, qt, step) for step in range(depth//mat.K)] for qt in range(q_tiles)]
    if left >= 0: s = trips(s, keys.begin, keys.full_begin, masked=True)
    s = trips(s, keys.full_begin, keys.full_end, masked=False)
    s = trips(s, keys.full_end, keys.end, masked=True)

    # ***** O = O / l, LSE = m + ln l *****
    outputs = []
    for qt, rows in enumerate(queries):
      factors, log_sums = [], []
      for r, row in enumerate(rows):
        m, sink = ops.extract(s.m[qt].load(), r), flat(block.given["sinks"])[row.head].load() if "sinks" in block.given else None
        factors.append(finish(m, ops.extract(s.l[qt].load(), r), scores, sink)[0])
        if kinds == 2: log_sums.append(finish(m, total_of(s.l[q_tiles + qt].load(), r), scores, sink)[1])
      outputs += block.outputs(rows, [s.acc[qt*d_tiles + dt].load() for dt in range(d_tiles)], factors, log_sums)
    return block.kernel("mma", outputs, lds_bytes(p, tile))
  return kernel
