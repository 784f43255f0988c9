"""Forward with mma.sync (sm_80 and later): the steps of `online_softmax`, with queries as the rows of the matrices. Begin with
`MmaForward.scores`."""
from __future__ import annotations
import functools, itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.nvidia.ring import CopyGroups
from attn.kernels.nvidia.warp_forward import SoftmaxState, WarpsForward
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.kernels.parts.program.statements import Optional, add_all, store_all
from attn.kernels.parts.weights.dropout import kept_scores
from attn.kernels.parts.weights.softmax import nans_of_scales
from attn.kernels.tiles.mma import MmaTile, fragments
from attn.ops import common as ops, nvidia as nv
from attn.ops.softmax import LANE, ONES, UNSCALED, correct, lane_sum, rounded_sum, scaled_weights, sum_without_scales
from attn.ops.stored import scale_in_range
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

# A warp computes 16 or 32 queries of its block. cp.async copies K and V tiles into a ring of `stages` tiles in shared memory. One barrier in each
# iteration is enough: after it, the iteration's tile has arrived, and no warp reads the previous tile any more. ldmatrix reads the operands from rows
# that are swizzled against bank conflicts, and transposes V. The softmax looks for the maximum of a row only in a rare branch: see
# attn/ops/softmax.py.

EXACT_PRODUCTS = 128     # products of 8-bit floats that are added in a short sum of the matrix unit; a longer one would lose small products

@dataclass(frozen=True)
class Operands:
  """Operands A of S = Q K^T that registers keep during the loop over keys; none if Q stays in shared memory."""
  # a tuple for each matrix tile of queries, with one operand for each step of the product; empty if Q stays in shared memory
  of_tiles: tuple[tuple[UOp, ...], ...] = ()
  def after(self, *deps:UOp) -> Operands: return self

@dataclass(frozen=True)
class MmaState(CopyGroups, SoftmaxState):
  """The values that the loop over keys carries from iteration to iteration: those of the softmax, Q as operands A, and scales of V."""
  # `MmaForward.kinds` names the sums of P that l holds
  q: Operands
  scales: Optional     # of the iteration's rows of V, if V is stored in 8 bits

@dataclass(frozen=True)
class MmaForward(WarpsForward[MmaTile, MmaState]):
  """Builder of the forward kernel with mma.sync for one problem: its methods return the UOps of the kernel's steps, as one thread runs them."""
  @staticmethod
  def of(p:Problem, arch:Chip, tile:MmaTile, args:tuple[UOp, ...]) -> MmaForward:
    warps, mat = Warps.of(p, arch, tile, tile.matrix, args).with_keys(tile.warp_keys), tile.matrix
    new, kinds = warps.group.grid.allocator, 1 + bool(p.stored) + (warps.group.lse is not None)       # kinds of row sums
    q_tiles, k_tiles, d_tiles = tile.q_tiles, tile.warp_keys//mat.N, fragments(p.Dv, mat)
    state = MmaState.of(new, tile.lds_bytes(p), accs=q_tiles*d_tiles, scores=q_tiles*k_tiles, operands=q_tiles*k_tiles//mat.together, kinds=kinds,
                        row_tiles=q_tiles, q=Operands(), scales=Optional(new.registers(k_tiles, nv.F2) if p.stored else None))
    return MmaForward(warps, tile, state)

  # ***** sizes *****
  @property
  def kinds(self) -> tuple[str, ...]:
    """Names of the sums of P that registers hold for each row, e.g. ONES (the sum after rounding) and LANE (before rounding)."""
    # ONES: the sum of P in the form that is multiplied by V: rounded, and times the scales of V's rows if V is stored in 8 bits. UNSCALED, only if V
    # is stored in 8 bits: the sum of rounded P without these scales. LANE, only if an LSE is written: the sum of P before rounding.
    return (ONES, *[UNSCALED]*bool(self.p.stored), *[LANE]*(self.warps.group.lse is not None))
  @property
  def kinds_of_result(self) -> tuple[str, ...]:
    """Names of the sums of P that the results need: O is divided by the first sum, and LSE is the logarithm of the last one."""
    # not ONES if V is stored in 8 bits, because this sum includes the scales of V's rows
    return self.kinds[1:] if self.p.stored else self.kinds
  @property
  def of_bytes(self) -> bool: return self.mat.size == 1
  @property
  def alternating(self) -> bool:
    """Whether, of two neighbouring C fragments of O, the first has the 8 even and the second the 8 odd columns of 16 columns."""
    # so if V is stored in 8 bits
    return self.p.key_itemsize == 1
  @property
  def exact_steps(self) -> int:
    """Number of matrix instructions that may add to one accumulator before the kernel adds it to an fp32 sum; 0: any number."""
    # some chips add products of 8-bit floats with fewer bits than fp32; the kernel adds such partial sums in fp32
    return EXACT_PRODUCTS//self.mat.K if self.of_bytes and self.warps.group.arch.short_sums and not self.p.fast_accumulate else 0
  @property
  def k_tiles(self) -> int: return self.tile.warp_keys//self.mat.N
  @property
  def d_tiles(self) -> int: return fragments(self.p.Dv, self.mat)
  @property
  def depth_steps(self) -> range:
    """Indices of the steps of S = Q K^T, each of which multiplies 16 (of 8-bit floats: 32) columns."""
    return range(round_up(self.p.D, self.mat.K)//self.mat.K)
  @property
  def parts(self) -> list[range]:
    """The parts of a tile of keys that are computed one after another, each as a range of the matrix instructions of O += P V."""
    # P of a part is computed and multiplied by V before P of the next part; in each step one matrix instruction multiplies 16 (of 8-bit floats: 32)
    # keys
    steps = self.tile.warp_keys//self.mat.K
    n = min(self.tile.parts, steps)
    return [range(i*steps//n, (i + 1)*steps//n) for i in range(n)]
  @functools.cached_property
  def in_block(self) -> list[UOp]:
    """Indices, among the rows that the block owns, of the first row of each matrix tile of queries that this warp computes."""
    return [(self.warps.at.wave//self.tile.key_waves*self.tile.q_tiles + t)*self.mat.M for t in range(self.tile.q_tiles)]
  @property
  def share(self) -> UOp:
    """Index of this warp among the warps that compute the same queries with different keys of a tile."""
    return self.warps.at.wave%self.tile.key_waves
  @property
  def first_key(self) -> UOp:
    """Index, in the tile of keys, of the first key that this warp computes."""
    return self.share*self.tile.warp_keys
  def own_tile(self, t:UOp) -> UOp:
    """Returns the index of the group of `warp_keys` keys that this warp computes in iteration t, counted over the whole sequence."""
    # for example, if four warps compute the same queries, iteration 0 has the groups 0 to 3, one for each of these warps
    return t*self.tile.key_waves + self.share
  @functools.cached_property
  def queries(self) -> list[list[Row]]: return [self.warps.queries(first) for first in self.in_block]

  # ***** the steps *****
  def begin(self) -> MmaState:
    warps, s = self.warps, self.state
    s = s.store([s.statements.first], warps.first_values(s.m, s.addend, s.l))
    s = s.do(nv.clear(s.acc, s.done))
    s = s.started(warps.copies_of_q(s.shared, self.tile.layouts(self.p)[0]))
    for i in range(self.tile.stages - 1): s = self.fetch(s, warps.group.walked.begin + i)
    s = s.arrived(self.tile.stages - 1)
    if self.tile.q_in_lds: return s
    def of_tile(qt:int) -> tuple[UOp, ...]: return tuple(self.q_operand(s, qt, step) for step in self.depth_steps)
    return replace(s, q=Operands(tuple(map(of_tile, range(self.tile.q_tiles)))))

  def scores(self, s:MmaState, t:UOp, masked:bool) -> tuple[MmaState, None]:
    # S goes to registers of the state. Also starts the copies of a later tile.
    s = s.arrived(self.tile.stages - 2)
    raw = self.warps.group.scaled(self.raw_scores(s, t))
    if self.p.stored:
      of_k = [ops.concat(x, x) for x in self.scales(s, t, 0)]
      raw = [[ops.mul(x, y) for x, y in zip(row, of_k)] for row in raw]
    tiles = [self.warps.group.scores.finished(x, rows, self.own_tile(t), masked) for x, rows in zip(raw, self.queries)]
    s = s.store(store_all(s.scores, itertools.chain(*tiles)))
    if self.p.stored: s = self.with_scales(s, t, masked)
    return self.fetch(s, t + self.tile.stages - 1), None

  def with_scales(self, s:MmaState, t:UOp, masked:bool) -> MmaState:
    """Loads the scales of V's rows in tile t to registers, makes l NaN for queries that see a NaN scale, and returns the state."""
    # If a scale is NaN, the row sums l become NaN for the queries that see its key; `masked`: whether masks may hide keys of the tile.
    q_tiles, scales = self.tile.q_tiles, self.scales(s, t, 1)
    nans = [nans_of_scales(self.warps.group.scores, scales, rows, self.own_tile(t), masked) for rows in self.queries]
    first = q_tiles*self.kinds.index(UNSCALED)
    assert s.scales.value is not None
    return s.store(store_all(s.scales.value, map(scale_in_range, scales)), add_all(s.l, nans, range(first, first + q_tiles)))

  def factors(self, s:MmaState, p:UOp, tile:int) -> UOp:
    """Returns `p`, a C fragment of P, multiplied by the scales of V, if V has scales. `tile` is the fragment's index along the keys."""
    # `tile` is the index of the fragment in its row of fragments
    return p if s.scales.value is None else scaled_weights(p, s.scales.value[tile].load(), nv.ROWS)

  def weigh(self, s:MmaState, x:None, t:UOp, steps:range, masked:bool) -> tuple[MmaState, None]:
    stores, q_tiles, kinds, to_log2 = [], self.tile.q_tiles, self.kinds, self.warps.group.scores.to_log2
    n, dtype = self.mat.together, self.p.dtype
    for qt in range(q_tiles):
      packed = list[UOp]()
      sums: dict[str, UOp] = dict.fromkeys((LANE, UNSCALED), ops.splat(0.0, 2))
      for step in steps:
        found = [ops.weights(s.scores[qt*self.k_tiles + n*step + i].load(), s.addend[qt].load(), to_log2) for i in range(n)]
        packed.append(nv.pack_a([self.factors(s, y, n*step + i) for i, y in enumerate(found)], dtype))
        for i, y in enumerate(found):
          sums[LANE] = lane_sum(sums[LANE], y, nv.ROWS)
          if (of_v := s.scales.value) is not None:
            sums[UNSCALED] = sum_without_scales(sums[UNSCALED], ops.slice_(packed[-1], 2*i, 2), y, of_v[n*step + i].load(), dtype)
        stores.append(s.p[qt*self.k_tiles//n + step].store(packed[-1]))
      sums[ONES] = rounded_sum(packed, ONES, self.mat, dtype, nv.ROWS, nv.zero(s.done))
      stores += [s.l_of_trip[i*q_tiles + qt].store(sums[kind]) for i, kind in enumerate(kinds)]
    s = s.store(stores)
    s = s.do(correct(s.m, s.addend, s.l, s.acc, s.p, s.scores, s.l_of_trip, rows=nv.ROW_LANES, dtype=dtype, sums=kinds,
                     matrix=self.mat, scale=to_log2, above=self.tile.rescale_above, first=n*steps.start, count=n*len(steps), scales=s.scales.value))
    return s.summed(), None

  def add_to_o(self, s:MmaState, p:None, t:UOp, steps:range, masked:bool) -> UOp:
    # `steps` says which keys of the tile: a step is a matrix instruction, for 16 keys (32 of 8-bit floats). `p` is None, because `weigh` has put P in
    # the state.
    left = [kept_scores(self.warps.group.scores, rows, self.own_tile(t)) for rows in self.queries]
    n, q_tiles = self.mat.together, range(self.tile.q_tiles)
    accs = [[s.acc[qt*self.d_tiles + i].load() for i in range(self.d_tiles)] for qt in q_tiles]
    weights = {(qt, step): left[qt].packed(s.p[qt*self.k_tiles//n + step].load(), n*step) for qt in q_tiles for step in steps}
    accs = self.multiplied(s, accs, steps, lambda qt, step: weights[qt, step], lambda step, pair: self.v_operand(s, t, step, pair))
    return UOp.group(*store_all(s.acc, itertools.chain(*accs)))

  def kernel(self, s:MmaState) -> UOp:
    if self.tile.key_waves > 1: s = self.stored_results(s.arrived(0))
    return self.warps.group.kernel("mma", [x for qt in range(self.tile.q_tiles) for x in self.outputs(s, qt)], self.tile.lds_bytes(self.p))

  def outputs(self, s:MmaState, qt:int) -> list[UOp]:
    m, sums, accs = self.merged_results(s, qt) if self.tile.key_waves > 1 else self.results_of_warp(s, qt)
    return self.warps.outputs(self.queries[qt], accs, m, sums, self.kinds_of_result, self.share if self.tile.key_waves > 1 else None,
                              self.alternating)

  # ***** sums over warps with the same queries *****
  def results_of_warp(self, s:MmaState, qt:int) -> tuple[UOp, list[UOp], list[UOp]]:
    """Returns (m, row sums of P, C fragments of O) that this warp has computed for matrix tile `qt` of queries."""
    # m: the number that the softmax subtracts from a row's scores
    sums = [s.l[self.kinds.index(kind)*self.tile.q_tiles + qt].load() for kind in self.kinds_of_result]
    return s.m[qt].load(), sums, [s.acc[qt*self.d_tiles + dt].load() for dt in range(self.d_tiles)]

  def place_of_result(self, share:UOp|int, qt:int, i:UOp|int) -> UOp:
    """Returns the index of the 16-byte unit of shared memory that holds this lane's i-th vector of the results of warp `share`."""
    # `share` is the index of the warp among the warps that compute the same queries
    wave = self.warps.at.wave//self.tile.key_waves*self.tile.key_waves + share
    per = self.d_tiles + 2
    return (wave*self.tile.q_tiles*per + qt*per + i)*self.mat.wave + self.warps.at.lane

  def stored_results(self, s:MmaState) -> MmaState:
    """Stores this warp's results to shared memory, waits until all warps have stored theirs, and returns the state."""
    puts = []
    for qt in range(self.tile.q_tiles):
      m, sums, accs = self.results_of_warp(s, qt)
      for i, x in enumerate((ops.concat(m, sums[0]), ops.concat(sums[-1], sums[-1]), *accs)):
        puts.append(nv.put(s.shared[self.place_of_result(self.share, qt, i)], x, UOp.const(True)))
    return s.do(*puts).after_barrier()

  def merged_results(self, s:MmaState, qt:int) -> tuple[UOp, list[UOp], list[UOp]]:
    """Returns (m, row sums of P, C fragments of O) for matrix tile `qt` of queries, merged over the warps that compute these queries."""
    # Each of these warps has results for other keys. m is the largest m of these warps. The row sums and O of each warp are rescaled to this m, and
    # added in the order of the warps' keys. The warps divide the columns of O: each warp returns only its columns.
    def unit(share:int, i:UOp|int) -> UOp: return ops.as_float(s.shared[self.place_of_result(share, qt, i)].load())
    shares, to_log2 = range(self.tile.key_waves), self.warps.group.scores.to_log2
    heads = [unit(n, 0) for n in shares]
    m = functools.reduce(ops.max_, [ops.slice_(x, 0, 2) for x in heads])
    factors = [ops.exp2(ops.mul(ops.sub(ops.slice_(x, 0, 2), m), to_log2)) for x in heads]
    def total(parts:list[UOp], factors:list[UOp]) -> UOp: return functools.reduce(ops.add, [ops.mul(x, y) for x, y in zip(parts, factors)])
    sums = [total([ops.slice_(x, 2, 2) for x in heads], factors)]
    if len(self.kinds_of_result) > 1: sums.append(total([ops.slice_(unit(n, 1), 0, 2) for n in shares], factors))
    columns = round_up(ceildiv(self.d_tiles, self.tile.key_waves), 2 if self.alternating else 1)
    wide = [ops.build(*[ops.extract(x, r) for r in (0, 0, 1, 1)]) for x in factors]      # for a C fragment: two numbers of each row
    places = [(self.share*columns + i).minimum(self.d_tiles - 1) + 2 for i in range(columns)]
    return m, sums, [total([unit(n, i) for n in shares], wide) for i in places]

  # ***** global -> shared memory -> operands *****
  def k_rows(self, t:UOp) -> SwizzledRows:
    q, k, _ = self.tile.layouts(self.p)
    return k.moved_to(q.size + t%self.tile.stages*k.size)
  def v_rows(self, t:UOp) -> SwizzledRows:
    q, k, v = self.tile.layouts(self.p)
    return v.moved_to(q.size + self.tile.stages*k.size + t%self.tile.stages*v.size)

  def first_scale(self, t:UOp) -> UOp:
    """Returns the index in shared memory, counted in floats, at which the scales of tile t's 8-bit rows begin."""
    # those of keys first, then those of values
    q, k, v = self.tile.layouts(self.p)
    return (q.size + self.tile.stages*(k.size + v.size) + t%self.tile.stages*self.tile.scales(self.p))*(UNIT_BYTES//4)
  def scales(self, s:MmaState, t:UOp, kind:int) -> list[UOp]:
    return self.stored.scales(s.shared, self.first_scale(t), kind, self.first_key, self.tile.warp_keys)

  def fetch(self, s:MmaState, t:UOp) -> MmaState:
    copies = self.warps.copies_of_keys(s.shared, t, self.k_rows(t), self.v_rows(t))
    return s.started(copies + (self.stored.copies(s.shared, t, self.first_scale(t)) if self.p.stored else []))
  def q_operand(self, s:MmaState, qt:int, step:int) -> UOp:
    """Returns operand A of S = Q K^T, read from shared memory: step `step` (16 columns) of matrix tile `qt` of queries."""
    if self.p.stored: return self.stored.q_operand(s.shared, self.tile.layouts(self.p)[0], self.in_block[qt], step)
    row, unit = self.mat.a_address(self.warps.at.lane)
    return s.read(self.tile.layouts(self.p)[0], self.in_block[0] + row, unit, qt*self.mat.M, 2*step)

  def k_operand(self, s:MmaState, t:UOp, step:int, pair:int) -> UOp:
    """Returns operand B of S = Q K^T, read from tile t: step `step` (16 columns) of keys 16*`pair` to 16*`pair` + 15 of this warp."""
    row, unit = self.mat.b_address(self.warps.at.lane)
    def read(units:int) -> UOp: return s.read(self.k_rows(t), self.first_key + row, unit, pair*2*self.mat.N, units)
    return self.stored.k_operand(read(step//2*2), step) if self.p.stored else read(2*step)
  def v_operand(self, s:MmaState, t:UOp, step:int, pair:int) -> UOp:
    """Returns operand B of O += P V, read from tile t: step `step` (16 keys) of C fragments 2*`pair` and 2*`pair` + 1 of O."""
    # A step is one matrix instruction, for 16 keys (32 of 8-bit floats). If V is stored in 8 bits, one fragment has the even columns and the other
    # the odd columns; otherwise they are neighbours.
    row, unit = self.mat.b_transposed_address(self.warps.at.lane)
    def read(units:int) -> UOp: return s.read(self.v_rows(t), self.first_key + row, unit, step*self.mat.K, units, transposed=True)
    if self.p.stored: return self.stored.v_operand(read(pair//2*2), pair)
    words = read(2*self.mat.N//self.mat.unit*pair)
    return nv.columns_apart(words) if self.of_bytes else words

  # ***** products *****
  def raw_scores(self, s:MmaState, t:UOp) -> list[list[UOp]]:
    """Returns S = Q K^T of tile t before score terms and masks: for each matrix tile of queries a list of C fragments."""
    def a(qt:int, step:int) -> UOp: return self.q_operand(s, qt, step) if self.tile.q_in_lds else s.q.of_tiles[qt][step]
    zeros = [[nv.zero(s.done)]*self.k_tiles for _ in range(self.tile.q_tiles)]
    return self.multiplied(s, zeros, self.depth_steps, a, lambda step, pair: self.k_operand(s, t, step, pair), empty=True)

  def multiplied(self, s:MmaState, tiles:list[list[UOp]], steps:range, a:Callable[[int, int], UOp], b:Callable[[int, int], UOp],
                 empty:bool=False) -> list[list[UOp]]:
    """Returns `tiles` + A B, the sum over the matrix instructions `steps`, whose operands are a(tile, step) and b(step, pair)."""
    # `a(tile of queries, step)` returns an operand A, and `b(step, pair)` an operand B for two neighbouring C fragments. If the matrix unit adds with
    # too few bits (`exact_steps`), its sums over a few steps are added in fp32. `empty` says that `tiles` are 0, and few enough to be computed all at
    # once.
    queries, pairs = range(self.tile.q_tiles), range(len(tiles[0])//2)
    def add(into:list[list[UOp]], run:range, pairs:Iterable[int]) -> None:
      for step, pair in itertools.product(run, pairs):
        operand = b(step, pair)
        for qt, half in itertools.product(queries, range(2)):
          into[qt][2*pair + half] = nv.mma(self.mat, a(qt, step), operand, half, into[qt][2*pair + half])
    if not self.exact_steps:
      add(tiles, steps, pairs)
      return tiles
    runs = [steps[i:i + self.exact_steps] for i in range(0, len(steps), self.exact_steps)]
    further: list[tuple[Iterable[int], range]] = [((pair,), run) for pair in pairs for run in runs]
    if empty:
      add(tiles, runs[0], pairs)       # the sums of the first run are those of all fragments
      further = [(pairs, run) for run in runs[1:]]
    for some, run in further:
      sums = [[nv.zero(s.done)]*len(row) for row in tiles]
      add(sums, run, some)
      for qt, pair, half in itertools.product(queries, some, range(2)):
        tiles[qt][2*pair + half] = ops.add(tiles[qt][2*pair + half], sums[qt][2*pair + half])
    return tiles
