"""Flash attention forward for CDNA4, D = 128: two groups of waves take turns, one computing while the other reads LDS.

The same algorithm and orientation as forward.py. Eight waves of 32 queries; the second four run one barrier behind the first, so that of the two
waves on a SIMD one is in a compute cluster while the other is in a memory cluster. Per key tile t four clusters, a barrier after each:

  C1  S(t+1) = K(t+1) Q^T on the matrix unit, while the vector unit turns S(t) into P(t)
  M1  V(t) from LDS, transposed on the way; K(t+3) starts on its way to LDS
  C2  O += V(t) P(t)
  M2  K(t+2) from LDS; V(t+2) starts on its way to LDS

K and V tiles go from global memory straight to LDS, two buffers each (so a trip is two tiles: buffers are then known at compile time). A load is
waited for one cluster earlier than its own wave would have to: the barrier after that is the one which the other group has passed when it reads.
"""
from __future__ import annotations
import itertools
from dataclasses import dataclass
from typing import Any, Callable
from attn.chips import Chip
from attn.chips.families import CDNA4
from attn.kernels.parts.blocks import extent, key_blocks, trip_count
from attn.kernels.parts.epilogue import OPTIMISED, estimates, finish, store_row
from attn.kernels.parts.lanes import Lane, units_of
from attn.kernels.parts.rows import Rows, flat, strides
from attn.kernels.parts.scores import Row, Scores
from attn.kernels.parts.softmax import Softmax
from attn.kernels.parts.statements import Carried
from attn.kernels.parts.tiles import Tile, ceildiv
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AddrSpace, AxisType, KernelInfo, UOp, dtypes

HEAD, BLOCK_N, WAVES = 128, 64, 8
UNIT = CDNA4.matrix["float16"][0].unit          # elements of 16 bytes, the same in both input types
ROW = HEAD//UNIT                                 # units of a row of K or V
LOADS = BLOCK_N*ROW//(WAVES*64)                  # direct loads of a wave per tile
UNDER_WAY = 2*LOADS                              # loads issued after the one that is waited for

# ***** where a tile lies in LDS *****
# One direct load of a wave fills 64 units without a gap: a chunk of 4 rows. Chunks are padded apart, and units within them exchanged, so that eight
# lanes of 16 bytes, or sixteen of 8, never meet in a bank. Few exchanges keep the addresses few: the rest is in the instructions' offsets.

@dataclass(frozen=True)
class Layout:
  exchange: int      # row r of a chunk has its unit u at place u ^ r*exchange
  def place(self, row:UOp, unit:UOp) -> UOp: return row//CHUNK*STRIDE + row%CHUNK*ROW + (unit ^ (row%CHUNK*self.exchange))

CHUNK, STRIDE = 64//ROW, 64 + 4                  # rows, and units from one to the next
K_LAYOUT = Layout(1)                             # sixteen neighbouring rows are read at the same unit
V_LAYOUT = Layout(4)                             # a transposing load reads four rows of four units

@dataclass(frozen=True)
class State(Carried):
  """What crosses tiles: the softmax's registers, S(t) and K(t+1) in registers, and the LDS buffers."""
  softmax: Softmax
  s: UOp
  k: UOp
  k0: UOp
  k1: UOp
  v0: UOp
  v1: UOp
  def k_lds(self, i:int) -> UOp: return (self.k0, self.k1)[i%2]
  def v_lds(self, i:int) -> UOp: return (self.v0, self.v1)[i%2]

class Order:
  """Keeps statements in the order in which they are given, as a program would be read: each takes what the one before left in a register."""
  def __init__(self, register:UOp):
    self.register, self.last = register, register
    self.open: list[list[UOp]] = [[]]   # the effects of each loop around
  def do(self, statement:Callable[..., UOp], *args:Any, **options:Any) -> UOp:
    before = [] if self.last is self.register else [self.last[0].load()]
    stored = self.note(self.register[0].store(statement(*args, *before, **options)))
    self.last = self.register.after(stored)
    return stored
  def note(self, effect:UOp) -> UOp:
    """An effect that is to happen before the end of the loop it is in."""
    self.open[-1].append(effect)
    return effect
  @property
  def noted(self) -> UOp: return UOp.group(*self.open[-1])
  def enter(self, r:UOp) -> None:
    self.open.append([])
    self.last = self.last.after(r)
  def leave(self, r:UOp) -> UOp:
    end = self.note(UOp.group(*self.open.pop()).end(r))
    self.last = self.register.after(end)
    return end

def dual_wave(p:Problem, arch:Chip, tile:Tile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders (o, q, k, v), or (o, lse, q, k, v) when p.return_lse, of the problems that
  `dispatch.dual_wave_refuses` has nothing against."""
  mat = tile.matrix
  k_tiles, d_tiles, q_blocks, right = BLOCK_N//mat.M, HEAD//mat.M, ceildiv(p.Sq, tile.block_m), p.window[1]

  def kernel(o:UOp, *args:UOp) -> UOp:
    lse, q, k, v = args if p.return_lse else (o, *args)

    # ***** ranges *****
    axes = itertools.count(4)
    q_block = UOp.range(q_blocks, 0, AxisType.GLOBAL)
    head = UOp.range(p.B*p.H, 1, AxisType.GLOBAL)
    lane, wave = UOp.range(mat.wave, 2, AxisType.WARP), UOp.range(WAVES, 3, AxisType.WARP)
    wave_number = ops.uniform(wave.cast(dtypes.int))
    at, batch, q_head = Lane(lane, wave, mat), head//p.H, head%p.H
    first_query = (q_blocks - 1 - q_block if right >= 0 else q_block)*tile.block_m
    in_block = wave*mat.N + at.n
    def late() -> tuple[Lane, Row]:
      """The lane and its query once more, worked out where they are needed: not kept in registers through the loops before."""
      here = Lane(amd.opaque(lane, order.last[0].load()).cast(dtypes.weakint).maximum(0).minimum(mat.wave - 1), wave, mat)
      query = first_query + wave_number.cast(dtypes.weakint).maximum(0).minimum(WAVES - 1)*mat.N + here.n
      return here, Row(batch, q_head, query, query < p.Sq)

    def rows(buffer:UOp, h:UOp, heads:int, length:int) -> Rows:
      sb, sh, ss = strides(p.layout, heads, length, HEAD)
      return Rows(flat(buffer), batch*sb + h*sh, ss, length, HEAD, p.itemsize)
    kv_head = q_head//(p.H//p.Hkv)
    q_rows, k_rows, v_rows = rows(q, q_head, p.H, p.Sq), rows(k, kv_head, p.Hkv, p.Sk), rows(v, kv_head, p.Hkv, p.Sk)
    sequence = extent(p, batch, {})
    def scores_of(here:Lane) -> Scores:
      return Scores(p, here, BLOCK_N, sequence, Row(batch, q_head, first_query, UOp.const(True)), None, None)
    scores = scores_of(at)
    blocks = key_blocks(p, sequence, first_query, first_query + tile.block_m - 1, BLOCK_N)

    # ***** placeholders *****
    order = Order(UOp.placeholder((1,), dtypes.float, 20, AddrSpace.REG))
    lds = [UOp.placeholder((BLOCK_N//CHUNK*STRIDE,), ops.u32(4), slot, AddrSpace.LOCAL) for slot in range(4)]
    state = State(Softmax.create(mat, 1, d_tiles, k_tiles, 10), UOp.placeholder((k_tiles,), ops.f32(mat.accumulator), 8, AddrSpace.REG),
                  UOp.placeholder((k_tiles*HEAD//UNIT//mat.groups,), ops.u32(4), 9, AddrSpace.REG), *lds)

    # ***** the steps that clusters are made of *****
    units = units_of(mat, HEAD, at.h)
    q_operands = [q_rows.load_units(first_query, tile.block_m, in_block, u) for u in units]

    def start(source:Rows, layout:Layout, buffer:UOp, t:UOp) -> None:
      """A wave's part of tile t starts on its way to LDS: a lane fetches the unit whose place is its own."""
      unit = lane%ROW ^ (lane//ROW*layout.exchange)
      for j in range(LOADS):
        chunk = j*WAVES + wave_number
        first = t*BLOCK_N + chunk*CHUNK
        records = (((source.count - first).minimum(CHUNK) - 1)*source.stride + source.width).maximum(0)*source.size
        order.do(amd.load_to_lds, source.buffer[source.base + first*source.stride], records, (lane//ROW*source.stride + unit*UNIT)*source.size,
                 buffer[chunk*STRIDE])

    def read_k(buffer:UOp) -> list[UOp]: return [buffer[K_LAYOUT.place(kt*mat.M + at.n, u)].load() for kt in range(k_tiles) for u in units]

    def read_v(buffer:UOp) -> list[list[UOp]]:
      """The A operands of O^T: per tile of d and unit of P, two transposing loads of four keys each."""
      halves, member = buffer.bitcast(ops.u32(2)), lane%16
      m = lane//16%2*16 + member%4*4                                         # the row of V^T that the lane's first element goes to, and its d:
      d = mat.accumulator*(m//mat.block%mat.groups) + m//(mat.block*mat.groups)*mat.block
      def load(dt:int, n:int) -> UOp:
        key, at_d = mat.key_of(at.h, n) + member//4, dt*mat.M + d
        return amd.load_transposed(halves[V_LAYOUT.place(key, at_d//UNIT)*2 + at_d//4%2])
      return [[ops.concat(load(dt, n), load(dt, n + 4)) for n in range(0, BLOCK_N//mat.groups, UNIT)] for dt in range(d_tiles)]

    def products(k_operands:list[UOp]) -> list[UOp]:
      """S = K Q^T."""
      tiles = []
      for kt in range(len(k_operands)//len(units)):
        x = ops.splat(0.0, mat.accumulator)
        for a, b in zip(k_operands[kt*len(units):], q_operands): x = amd.shaped_wmma(mat, a, b, x)
        tiles.append(x)
      return tiles

    def keep(buffer:UOp, values:list[UOp]) -> UOp: return order.note(UOp.group(*[buffer[i].store(x) for i, x in enumerate(values)]))

    # ***** one tile *****
    def step(s:State, t:UOp, i:int, mask:Callable[[list[UOp], UOp], list[UOp]]|None) -> State:
      # C1: S(t) -> P(t) on the vector unit, S(t+1) on the matrix unit
      s = s.after(order.do(amd.priority, 1))
      x = [s.s[kt].load() for kt in range(k_tiles)]
      if mask is not None: x = mask(x, t)
      following, exps = [], []
      for kt in range(k_tiles):
        following += products([s.k[j].load() for j in range(kt*len(units), (kt + 1)*len(units))])
        exps += s.softmax.weights([x[kt]], 0, scores.to_log2)
        s = s.after(order.do(amd.sched_barrier, following[-1], exps[-1]))
      softmax = s.softmax.correct([exps], [x], scores.to_log2, mat, p.dtype, tile.rescale_above, order.do)
      weights = softmax.operands(at, 0, k_tiles)
      keep(s.s, following)
      order.do(amd.priority, 0, *weights, *following)
      s = s.after(order.do(amd.barrier), order.noted)
      # M1: V(t) out of LDS, K(t+3) into it
      values = read_v(s.v_lds(i))
      start(k_rows, K_LAYOUT, s.k_lds(i + 1), t + 3)
      order.do(amd.wait_loads, UNDER_WAY, *[y for ys in values for y in ys])
      s = s.after(order.do(amd.barrier))
      # C2: O += V(t) P(t)
      s = s.after(order.do(amd.priority, 1))
      accs = [s.softmax.acc[dt].load() for dt in range(d_tiles)]
      for dt, v_operands in enumerate(values):
        for a, b in zip(v_operands, weights): accs[dt] = amd.shaped_wmma(mat, a, b, accs[dt])
      keep(s.softmax.acc, accs)
      order.do(amd.priority, 0, *accs)
      s = s.after(order.do(amd.barrier), order.noted)
      # M2: K(t+2) out of LDS, V(t+2) into it
      keys = read_k(s.k_lds(i))
      keep(s.k, keys)
      start(v_rows, V_LAYOUT, s.v_lds(i), t + 2)
      order.do(amd.wait_loads, UNDER_WAY, *keys)
      return s.after(order.do(amd.barrier), order.noted)

    def trips(s:State, first:UOp, count:UOp, mask:Callable[[list[UOp], UOp], list[UOp]]|None=None) -> State:
      """`count` trips of two tiles."""
      if (n := trip_count(count)) is None: return s
      r = UOp.range(n, next(axes), AxisType.LOOP)
      order.enter(r)
      inside = s.after(r)
      for i in range(2): inside = step(inside, first + r*2 + i, i, mask)
      return s.after(order.leave(r))

    # ***** all of it *****
    begin, s = blocks.begin, state.after(order.note(state.softmax.start()))
    start(k_rows, K_LAYOUT, s.k0, begin)
    start(v_rows, V_LAYOUT, s.v0, begin)
    start(k_rows, K_LAYOUT, s.k1, begin + 1)
    order.do(amd.wait_loads, 0)
    s = s.after(order.do(amd.barrier))
    keep(s.s, first_scores := products(read_k(s.k0)))
    keep(s.k, keys := read_k(s.k1))
    s = s.after(order.do(amd.barrier, *first_scores, *keys), order.noted)
    start(k_rows, K_LAYOUT, s.k0, begin + 2)
    start(v_rows, V_LAYOUT, s.v1, begin + 1)
    s = s.after(order.do(amd.barrier_of, wave_number//(WAVES//2)))                 # the second group falls a barrier behind
    pairs = (blocks.full_end - begin)//2
    s = trips(s, begin, pairs)
    here, row = late()
    s = trips(s, begin + pairs*2, (blocks.end - begin - pairs*2 + 1)//2, lambda x, t: scores_of(here).mask(x, row, t))
    s = s.after(order.do(amd.barrier_of, 1 - wave_number//(WAVES//2)), order.do(amd.wait_loads, 0))

    # ***** O = O^T / l, LSE = m + ln l *****
    here, row = late()
    factor, log_sum = finish(s.softmax.m[0].load(), s.softmax.total(0, mat), scores, None)
    number, (sb, sh, ss) = head*p.Sq + row.query, strides(p.layout, p.H, p.Sq, HEAD)
    outputs = [] if not p.return_lse else [flat(lse)[number.valid(here.h.eq(0) & row.there)].store(log_sum)]
    for dt in range(d_tiles):
      outputs += store_row(arch, flat(o), p.out_dtype, HEAD, batch*sb + q_head*sh + row.query*ss, dt*mat.M + here.h*mat.accumulator,
                           ops.mul(s.softmax.acc[dt].load(), factor), row.there)
    name = f"attn_dual_wave_{arch.name}_{p.dtype}"
    return UOp.group(*outputs).end(q_block, head, lane, wave).sink(arg=KernelInfo(name, opts_to_apply=(), estimates=estimates(p)), tag=OPTIMISED)
  return kernel
