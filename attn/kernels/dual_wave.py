"""Flash attention forward for CDNA4, D = 128: two groups of waves take turns. While one group computes, the other group reads LDS."""
from __future__ import annotations
import functools, itertools
from dataclasses import dataclass, replace
from typing import Callable
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Matrix
from attn.kernels.parts.grid.workgroup import Workgroup, head_fastest
from attn.kernels.parts.memory.lanes import Lane, units_of
from attn.kernels.parts.memory.layouts import ExchangedChunks, LdsTile
from attn.kernels.parts.memory.rows import GlobalRows
from attn.kernels.parts.program.blocks import trip_count
from attn.kernels.parts.program.counts import bounded
from attn.kernels.parts.program.statements import InOrder, Statements, store_all
from attn.kernels.parts.weights.dropout import Kept
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.parts.weights.softmax import Softmax, Sums
from attn.kernels.tiles.amd import Tile
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.score.masks import hides_some
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, UOp, dtypes

# The algorithm comes from attn/kernels/amd/forward.py. In this file S, P and O name the transposed matrices S^T, P^T and O^T. K(t) and V(t) are the
# rows of tile t of keys, and S(t) and P(t) are the scores and weights of these keys. A workgroup has eight waves of 32 queries. The second four waves
# run one barrier behind the first four. Each SIMD runs one wave of each group: while one wave is in a compute cluster (C1 or C2 below), the other
# wave is in a memory cluster (M1 or M2). A cluster is the code between two barriers. Each tile takes four clusters:
#
#   C1  S(t+1) = K(t+1) Q^T on the matrix unit, while the vector unit turns S(t) into P(t)
#   M1  reads V(t) from LDS to registers, transposed; starts the load of K(t+3) from global memory to LDS
#   C2  O += V(t) P(t)
#   M2  reads K(t+2) from LDS to registers; starts the load of V(t+2) from global memory to LDS
#
# LDS has two buffers for K and two for V. An iteration of the loop computes two tiles, so that the buffer of each tile is known at compile time. A
# wave waits for its load one cluster before it reads the tile. A barrier follows this wait, and the other group reads the tile only after this
# barrier.

HEAD, BLOCK_N, WAVES = 128, 64, 8
TRIP_KEYS = 2*BLOCK_N                            # two tiles
ROW_UNITS = 2*HEAD//UNIT_BYTES                   # units of a row of K or V: equal for float16 and bfloat16
LOADS = BLOCK_N*ROW_UNITS//(WAVES*64)            # loads of a wave, straight to LDS, for each tile
BEHIND = 2*LOADS                                 # loads that may still run when a wait ends: issued after the awaited load

# Layouts of tiles in LDS: sixteen lanes that read 16 bytes each, or 32 that read 8, never use the same bank (gfx950 has 64 for reads).
K_LAYOUT = ExchangedChunks(BLOCK_N, ROW_UNITS, 1)   # sixteen neighbouring rows are read at the same unit
V_LAYOUT = ExchangedChunks(BLOCK_N, ROW_UNITS, 4)   # a transposing load reads four rows of four units

def dual_wave(p:Problem, arch:Chip, tile:Tile) -> Callable[..., UOp]:
  """Returns the kernel of problem `p` as a function of its tensors: (o, q, k, v), or with p.return_lse (o, lse, q, k, v)."""
  # for the problems for which `dispatch.dual_wave_refuses` returns None
  return lambda *args: DualWave.of(p, arch, tile, args).program()

@dataclass(frozen=True)
class DualWaveState(InOrder):
  """The values that pass from one cluster of the kernel to the next, where a cluster is the code between two barriers."""
  k0: LdsTile
  k1: LdsTile
  v0: LdsTile
  v1: LdsTile
  s: UOp   # scores of the current tile of keys
  k: UOp   # rows K of the next tile
  softmax: Softmax
  statements: Statements
  def k_lds(self, i:int) -> LdsTile: return (self.k0, self.k1)[i%2]
  def v_lds(self, i:int) -> LdsTile: return (self.v0, self.v1)[i%2]

  # Statements keep their order. A statement waits only for the values that it is given.
  def begin(self, statement:UOp) -> DualWaveState:
    """Returns the state after a new `statement`, executed after all earlier ones. Loads of values in the state may move across it."""
    # other operations of the program may run before or after it
    return replace(self, statements=self.statements.begin(statement))
  def keep(self, *stores:UOp) -> DualWaveState:
    """Returns the state after `stores` to registers. The stored values may be read only in a state that `settled` has returned."""
    return replace(self, statements=self.statements.note(UOp.group(*stores)))
  def values_after(self, *deps:UOp) -> DualWaveState: return replace(self.after(*deps), statements=self.statements)
  def sync(self, statement:UOp) -> DualWaveState:
    """Returns the state after a new `statement`. All values of this state are read after the statement."""
    s = self.begin(statement)
    return s.values_after(s.statements.effects[-1])
  def settled(self, statement:UOp) -> DualWaveState:
    """Returns the state after a new `statement`. All values of this state are read after the statement, and after all earlier ones and stores."""
    s = self.begin(statement)
    return s.values_after(s.statements.effects[-1], UOp.group(*s.statements.effects))

@dataclass(frozen=True)
class DualWave:
  """Builder of the kernel that `dual_wave` returns: its methods make the UOps of clusters, as one thread runs them."""
  # the methods write the parts of the program; no field changes during the loop over tiles
  group: Workgroup
  tile: Tile
  at: Lane
  sums: Sums
  state: DualWaveState      # before the first tile

  @staticmethod
  def of(p:Problem, arch:Chip, tile:Tile, args:tuple[UOp, ...]) -> DualWave:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix, arch)
    at, new, k_tiles = Lane(grid.lane, grid.wave, mat), grid.allocator, BLOCK_N//mat.M
    k0, k1, v0, v1 = (LdsTile(new.lds(layout.size), layout) for layout in (K_LAYOUT, K_LAYOUT, V_LAYOUT, V_LAYOUT))
    s, k = new.registers(k_tiles, ops.f32(mat.accumulator)), new.registers(k_tiles*ROW_UNITS//mat.groups, ops.u32(4))
    sums = Sums.of(arch, p.dtype, p.writes_lse)
    softmax = Softmax.create(mat, 1, HEAD//mat.M, k_tiles, sums, new)
    state = DualWaveState(k0, k1, v0, v1, s, k, softmax, Statements.of(new))
    return DualWave(Workgroup.of(p, arch, tile, args, grid, at), tile, at, sums, state)

  # ***** sizes *****
  @property
  def mat(self) -> Matrix: return self.tile.matrix
  @property
  def k_tiles(self) -> int: return BLOCK_N//self.mat.M
  @property
  def d_tiles(self) -> int: return HEAD//self.mat.M
  @functools.cached_property
  def wave(self) -> UOp: return ops.uniform(self.at.wave.cast(dtypes.int))
  @functools.cached_property
  def units(self) -> list[UOp]:
    """Indices of the 16-byte units of a row of Q or K that this lane reads."""
    return units_of(self.mat, HEAD, self.at.h)
  @functools.cached_property
  def q_operands(self) -> list[UOp]:
    in_block = self.at.wave*self.mat.N + self.at.n
    return [self.group.rows_of("q").load_units(self.group.first_row, self.tile.block_m, in_block, u) for u in self.units]

  # ***** the algorithm *****
  def program(self) -> UOp:
    keys, second = self.group.walked, self.wave//(WAVES//2)
    begin, pairs = keys.begin, (keys.full_end - keys.begin)//2
    s = self.first_tiles(self.started(), begin)
    s = s.sync(amd.barrier_of(second, s.done))                      # only the second group waits: now it is one barrier behind
    s = self.trips(s, begin, pairs, self.group.scores, None)
    here, row = self.late(s)
    s = self.trips(s, begin + pairs*2, (keys.end - begin - pairs*2 + 1)//2, replace(self.group.scores, at=here), row)
    s = s.sync(amd.barrier_of(1 - second, s.done))
    s = s.sync(amd.wait_loads(0, s.done))
    name = f"attn_dual_wave_{self.group.arch.name}_{self.group.p.dtype}"
    return self.group.named(name, self.outputs(s))

  def started(self) -> DualWaveState:
    """Returns the state before the first key."""
    # If no mask hides scores, packed fp32 instructions (two numbers in one instruction) are switched off: they would stop the matrix unit while the
    # other group of waves uses it. With a mask, packed instructions are used: they need fewer registers, and the mask needs some.
    s = self.state if hides_some(self.group.scores.walk, TRIP_KEYS) else self.state.begin(amd.fp32_apart())
    start = s.softmax.start(self.group.scores)
    return s.keep(start).values_after(start)

  def first_tiles(self, s:DualWaveState, begin:UOp) -> DualWaveState:
    """Loads the first tiles of K and V to LDS, computes the scores of tile `begin`, and returns the state."""
    s = self.load_k(s, s.k0, begin)
    s = self.load_v(s, s.v0, begin)
    s = self.load_k(s, s.k1, begin + 1)
    s = s.begin(amd.wait_loads(0, s.done))
    s = s.sync(amd.barrier(s.done))
    # K of the second tile is read from LDS to registers
    scores, keys = self.products(self.read_k(s.k0)), self.read_k(s.k1)
    s = s.keep(*store_all(s.s, scores)).keep(*store_all(s.k, keys))
    s = s.settled(amd.barrier(*scores, *keys, s.done))
    # the loads of the third tile of K and the second tile of V start
    s = self.load_k(s, s.k0, begin + 2)
    return self.load_v(s, s.v1, begin + 1)

  def trips(self, s:DualWaveState, first:UOp, count:UOp, scores:Scores, masked:Row|None) -> DualWaveState:
    """Computes 2*`count` tiles of keys, from tile `first` on, two in each iteration of a loop; returns the state after the loop."""
    # `masked` is this lane's query if masks may hide keys of these tiles, and None otherwise
    if (n := trip_count(count)) is None: return s
    r = self.group.grid.allocator.range(n, AxisType.LOOP)
    inside = replace(s, statements=replace(s.statements, effects=())).after(r)
    for i in range(2):
      t = first + r*2 + i
      inside, weights = self.compute_scores(inside, t, scores, masked)
      inside, values = self.read_values(inside, t, i)
      inside = self.compute_output(inside, values, weights)
      inside = self.read_keys(inside, t, i)
    return s.after(UOp.group(*inside.statements.effects).end(r))

  def late(self, s:DualWaveState) -> tuple[Lane, Row]:
    """Returns (this lane's position in its wave, its query), computed again after a loop, so that no register keeps them during the loop."""
    lane = bounded(amd.opaque(self.at.lane, s.done), 0, self.mat.wave - 1)
    here, wave = replace(self.at, lane=lane), bounded(self.wave, 0, WAVES - 1)
    return here, self.group.row(wave*self.mat.N, here.n)

  def outputs(self, s:DualWaveState) -> list[UOp]:
    """Returns the stores of O / l and of LSE = m + ln l, for this lane's query."""
    (here, row), mat = self.late(s), self.mat
    factor, log_sum = self.group.normalised(row, s.softmax.m[0].load(), s.softmax.totals(0, mat))
    o = [(here.h*mat.accumulator + dt*mat.M, ops.mul(s.softmax.acc[dt].load(), factor)) for dt in range(self.d_tiles)]
    return replace(self.group, scores=replace(self.group.scores, at=here)).outputs(row, o, log_sum)

  # ***** the four clusters of tile t, the i-th of its iteration *****
  def compute_scores(self, s:DualWaveState, t:UOp, scores:Scores, masked:Row|None) -> tuple[DualWaveState, list[UOp]]:
    """Computes P of tile t on the vector unit and the scores of tile t+1 on the matrix unit; returns (state, P)."""
    # Cluster C1: P on the vector unit, the scores on the matrix unit. `masked` is this lane's query if masks may hide keys, and None otherwise.
    s = s.sync(amd.priority(1, s.done))
    x = [s.s[kt].load() for kt in range(self.k_tiles)]
    if masked is not None: x = scores.mask(x, masked, t)
    following, exps, units = list[UOp](), list[UOp](), len(self.units)
    for kt in range(self.k_tiles):
      following += self.products([s.k[j].load() for j in range(kt*units, (kt + 1)*units)])
      exps += s.softmax.weights([x[kt]], s.softmax.addend[0].load(), scores.to_log2)
      # The fence makes the compiler pack P early, which saves half of P's registers. With a mask, registers suffice only without a fence.
      if masked is None and kt < self.k_tiles - 1: s = s.sync(amd.sched_barrier(following[-1], ops.pack_weights(exps[-1], self.sums.dtype), s.done))
    # the row sum is computed during the last products; the branch on the row sum comes after these products
    s, weights = self.weigh(s, x, exps, scores, *(following[-1:] if masked is None else []))
    s = s.keep(*store_all(s.s, following)).begin(amd.priority(0, *weights, *following, s.done))
    return s.settled(amd.barrier(s.done)), weights

  def read_values(self, s:DualWaveState, t:UOp, i:int) -> tuple[DualWaveState, list[list[UOp]]]:
    """Reads V of tile t from LDS, starts to load K of tile t+3 to LDS; returns (state, V as operands of matrix instructions)."""
    # cluster M1; `i` is 0 for the first of the two tiles of an iteration and 1 for the second: the two lie in different LDS buffers
    values = self.read_v(s.v_lds(i))
    s = self.load_k(s, s.k_lds(i + 1), t + 3)
    s = s.begin(amd.wait_loads(BEHIND, *itertools.chain(*values), s.done))
    return s.sync(amd.barrier(s.done)), values

  def compute_output(self, s:DualWaveState, values:list[list[UOp]], weights:list[UOp]) -> DualWaveState:
    """Adds the product of V and P of a tile of keys to O, and returns the state."""
    # cluster C2, on the matrix unit; `values` are the operands of V, and `weights` those of P
    s = s.sync(amd.priority(1, s.done))
    accs = [s.softmax.acc[dt].load() for dt in range(self.d_tiles)]
    for dt, v_operands in enumerate(values):
      for a, b in zip(v_operands, weights): accs[dt] = amd.shaped_wmma(self.mat, a, b, accs[dt])
    s = s.keep(*store_all(s.softmax.acc, accs)).begin(amd.priority(0, *accs, s.done))
    return s.settled(amd.barrier(s.done))

  def read_keys(self, s:DualWaveState, t:UOp, i:int) -> DualWaveState:
    """Reads K of tile t+2 from LDS to registers, starts to load V of tile t+2 to LDS, and returns the state."""
    # cluster M2; `i` as in `read_values`
    keys = self.read_k(s.k_lds(i))
    s = self.load_v(s.keep(*store_all(s.k, keys)), s.v_lds(i), t + 2)
    s = s.begin(amd.wait_loads(BEHIND, *keys, s.done))
    return s.settled(amd.barrier(s.done))

  # ***** the steps of clusters *****
  def weigh(self, s:DualWaveState, x:list[UOp], exps:list[UOp], scores:Scores, *deps:UOp) -> tuple[DualWaveState, list[UOp]]:
    """Adds `exps`, P of the scores `x`, to the row sums; returns (state, P as operands of the product with V)."""
    # `exps` is P for the present m. After the operations `deps`, a branch checks whether m is high enough. If m is too low, the branch raises m and
    # computes P again.
    corrected = list[UOp]()
    def correct(statement:UOp) -> UOp:
      corrected.append(s.statements.do(statement))
      return corrected[0]
    softmax = s.softmax.correct([exps], [x], scores.to_log2, self.mat, self.sums, self.tile.rescale_above, correct, *deps, s.done)
    return replace(s, statements=s.statements.ran(corrected[0])), softmax.operands(self.at, 0, self.k_tiles, Kept(self.at))

  def load_k(self, s:DualWaveState, to:LdsTile, t:UOp) -> DualWaveState: return self.load(s, self.group.rows_of("k"), K_LAYOUT, to.buffer, t)
  def load_v(self, s:DualWaveState, to:LdsTile, t:UOp) -> DualWaveState: return self.load(s, self.group.rows_of("v"), V_LAYOUT, to.buffer, t)
  def load(self, s:DualWaveState, source:GlobalRows, layout:ExchangedChunks, buffer:UOp, t:UOp) -> DualWaveState:
    """Starts the load of this wave's part of tile t of `source` to the LDS buffer `buffer`, and returns the state."""
    # One load instruction fills LDS in the order of the lanes, 16 bytes for each lane. So each lane loads those 16 bytes of the tile that `layout`
    # puts at its position (`layout.exchanged`).
    lane, rows = self.at.lane, layout.chunk
    unit = layout.exchanged(lane//ROW_UNITS, lane%ROW_UNITS)
    offset = (lane//ROW_UNITS*source.stride + unit*source.unit)*source.size
    for j in range(LOADS):
      chunk = j*WAVES + bounded(self.wave, 0, WAVES - 1)
      first = t*BLOCK_N + chunk*rows
      records = (((source.count - first).minimum(rows) - 1)*source.stride + source.width).maximum(0)*source.size
      start, to = source.buffer[source.base + first*source.stride], buffer[chunk*layout.stride]
      s = s.begin(amd.load_to_lds(start, records, offset, to, *s.statements.before))
    return s

  def read_k(self, tile:LdsTile) -> list[UOp]: return [tile.load(kt*self.mat.M + self.at.n, u) for kt in range(self.k_tiles) for u in self.units]

  def read_v(self, tile:LdsTile) -> list[list[UOp]]:
    """Returns V of the LDS tile `tile` as A operands of O^T = V^T P^T, a list for each matrix tile of columns."""
    # an operand has a lane's elements of eight keys: two loads read and transpose four keys each
    mat, member = self.mat, self.at.lane%16
    m = self.at.lane//16%2*16 + member%4*4                                 # m: row of V^T in the operand; d: column of V of that row
    d = mat.accumulator*(m//mat.block%mat.groups) + m//(mat.block*mat.groups)*mat.block
    def load(dt:int, n:int) -> UOp:
      key, at_d = mat.key_of(self.at.h, n) + member//4, dt*mat.M + d
      return amd.load_transposed(tile.halves[V_LAYOUT.place(key, at_d//mat.unit)*2 + at_d//4%2])
    return [[ops.concat(load(dt, n), load(dt, n + 4)) for n in range(0, BLOCK_N//mat.groups, mat.unit)] for dt in range(self.d_tiles)]

  def products(self, k_operands:list[UOp]) -> list[UOp]:
    """Returns S^T = K Q^T as a C fragment for each matrix tile of keys; `k_operands` are the operands of K."""
    tiles, units = [], len(self.units)
    for first in range(0, len(k_operands), units):
      x = ops.splat(0.0, self.mat.accumulator)
      for a, b in zip(k_operands[first:first + units], self.q_operands): x = amd.shaped_wmma(self.mat, a, b, x)
      tiles.append(x)
    return tiles
