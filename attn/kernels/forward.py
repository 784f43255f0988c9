"""Flash attention forward: one program for every AMD matrix unit.

A workgroup owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N, with the online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). It computes S^T = K Q^T and O^T = V^T P^T: a query is a lane, see
attn/chips/matrix.py.
K and V tiles come through registers to LDS, V transposed on the way; by default the loads of the next tile start before this one's matrix work.
"""
from __future__ import annotations
import itertools, math
from dataclasses import dataclass
from typing import Any, Callable
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Matrix
from attn.kernels.parts.blocks import extent, key_blocks, trip_count
from attn.kernels.parts.epilogue import OPTIMISED, clear_outside, estimates, finish, place_of_row, store_row
from attn.kernels.parts.lanes import Lane, contraction, operands, units_of
from attn.kernels.parts.rows import PackedRows, Rows, flat, strides
from attn.kernels.parts.scores import Row, Scores
from attn.kernels.parts.shared import LdsTile
from attn.kernels.parts.softmax import Softmax
from attn.kernels.parts.statements import Carried, workgroup_barrier
from attn.kernels.parts.tensors import arguments, check_range
from attn.kernels.parts.tiles import Tile, ceildiv, round_up
from attn.ops import amd, common as ops
from attn.problem import Problem
from attn.tinygrad_compat import AddrSpace, AxisType, KernelInfo, UOp, dtypes

FENCE_UNITS = 8  # units of K between two fences of a fenced tile

def lds_bytes(p:Problem, tile:Tile) -> int:
  """LDS that `forward` takes for the K and V^T tiles, and for Q where it is kept there."""
  depth = contraction(tile.matrix, p.D)//tile.matrix.unit
  v_size = LdsTile.size(round_up(p.Dv, tile.matrix.M), tile.block_n//tile.matrix.unit, v_skew(tile.matrix, tile.block_n))
  kv = LdsTile.size(tile.block_n, depth) + v_size
  return UNIT_BYTES*(max(1, tile.prefetch)*kv + (LdsTile.size(tile.block_m, depth) if tile.q_in_lds else 0))

# Sixteen lanes at a time store 8 bytes each to `v_columns` columns of V (rows of V^T), which must not meet in a bank.
def v_columns(block_n:int) -> int: return 16//math.gcd(block_n//4, 8)
def v_skew(mat:Matrix, block_n:int) -> int:
  """Columns two units apart lie in different matrix tiles where these have 16 rows: a gap after each tile puts them into different banks."""
  return 8//v_columns(block_n) if mat.M == 16 and mat.accumulator == mat.unit else 0

# ***** the parts of a trip *****

@dataclass(frozen=True)
class State(Carried):
  """What crosses trips: the softmax's registers and the tiles in LDS."""
  softmax: Softmax
  k_lds: LdsTile
  v_lds: LdsTile
  def lds_after(self, *deps:UOp) -> State:
    """The tiles in LDS alone: a barrier where `deps` store to them."""
    return State(self.softmax, self.k_lds.after(*deps), self.v_lds.after(*deps))

@dataclass(frozen=True)
class Staging:
  """Which part of a K or V tile a thread carries from global memory to LDS: its `items`, each (row or rows, unit, gate)."""
  rows: int
  units: int
  threads: int
  thread: UOp
  group: int = 1       # rows that one item takes, to be transposed
  together: int = 1    # so many neighbouring items of a row group take units `apart`: their columns then go to different banks
  apart: int = 1
  @property
  def items(self) -> int: return ceildiv(self.rows//self.group*self.units, self.threads)
  def item(self, j:int) -> tuple[UOp, UOp, UOp]:
    """(row group, unit, whether there is such an item). Up to eight row groups run fastest when rows are transposed: their stores fill a row."""
    index, groups = self.thread + j*self.threads, self.rows//self.group
    gate = index < groups*self.units
    if self.group == 1: return index//self.units, index%self.units, gate
    fast, block = math.gcd(groups, 8), self.together*self.apart
    unit = index//fast%self.units
    return index//(fast*self.units)*fast + index%fast, unit//block*block + unit%self.together*self.apart + unit%block//self.together, gate

def transpose(rows:list[UOp]) -> list[UOp]:
  """Four rows of eight 16-bit elements -> eight columns of four (dword pairs)."""
  columns = []
  for w in range(4):
    r0, r1, r2, r3 = [ops.extract(r, w) for r in rows]
    for selector in (0x05040100, 0x07060302): columns.append(ops.build(amd.byte_perm(r1, r0, selector), amd.byte_perm(r3, r2, selector)))
  return columns

def forward(p:Problem, arch:Chip, tile:Tile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders, which are those of `arguments(p)` in that order: (o, q, k, v), (o, lse, q, k, v)
  when p.return_lse, (o_partial, lse_partial, q, k, v) when p.num_splits > 1; then the optional tensors there are, in the order of `problem.EXTRAS`.

  With p.num_splits = G > 1 each workgroup takes one of G key ranges and writes the O and LSE of those keys alone, which `combine.combine` merges.
  With p.sk_variable the kernel has that Variable as a further parameter: `kernel(*placeholders).call(*tensors, variable.bind(n))`.
  Raises ValueError where p.num_splits is still 0, and NotImplementedError for tensors beyond what a buffer descriptor addresses.
  """
  if p.num_splits == 0: raise ValueError("num_splits=0: splits.resolve chooses the number of splits before there can be a kernel")
  mat, waves, q_tiles, block_n, splits = tile.matrix, tile.waves, tile.q_tiles, tile.block_n, p.num_splits
  depth, width = contraction(mat, p.D), round_up(p.Dv, mat.M)
  k_tiles, d_tiles, columns = block_n//mat.M, width//mat.M, v_columns(block_n)
  group = p.H//p.Hkv if tile.pack_gqa else 1             # query heads of a workgroup: row r of its block is query r//group of head r%group
  buffers = max(1, tile.prefetch)                        # of LDS, for a K and a V tile each
  q_blocks, (left, right), names = ceildiv(p.Sq*group, tile.block_m), p.window, arguments(p)
  check_range(p, tile)

  def kernel(*args:UOp) -> UOp:
    if len(args) != len(names): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(names)})")
    given = dict(zip(names, args))
    o, lse, q, k, v = args[0], given.get("lse", given.get("lse_partial")), given["q"], given["k"], given["v"]
    o_dtype = p.out_dtype if splits == 1 else "float32"

    # ***** ranges *****
    axes = itertools.count(4)                            # ids of the loops
    q_block = UOp.range(q_blocks, 0, AxisType.GLOBAL)    # heads vary fastest over workgroups: the blocks of a head share an XCD's cache
    head = UOp.range(p.B*p.H//group, 1, AxisType.GLOBAL)
    lane = UOp.range(mat.wave, 2, AxisType.WARP)
    wave = UOp.range(waves, 3, AxisType.WARP)              # as a LOCAL axis tinygrad would split it where % divides it
    split = [UOp.range(splits, next(axes), AxisType.GLOBAL)] if splits > 1 else []
    at, batch, first_head = Lane(lane, wave, mat), head//(p.H//group), head%(p.H//group)*group
    kv_head = first_head//(p.H//p.Hkv)
    first_row = (q_blocks - 1 - q_block if right >= 0 else q_block)*tile.block_m   # under a causal mask the long blocks start first
    first_query, last_query = first_row//group, (first_row + tile.block_m - 1)//group
    in_block = [(wave*q_tiles + t)*mat.N + at.n for t in range(q_tiles)]

    # ***** the sequence, its rows, and the key tiles that a block sees *****
    sequence = extent(p, batch, given)
    def rows(buffer:UOp, h:UOp, heads:int, length:int, columns:int, start:int|UOp, count:int|UOp) -> Rows:
      sb, sh, ss = strides(p.layout, heads, length, columns)
      pin = splits > 1 or isinstance(sequence.n_k, UOp)
      return Rows(flat(buffer), batch*sb + h*sh + start*ss, ss, count, columns, p.itemsize, pin)
    q_rows = rows(q, first_head, p.H, p.Sq, p.D, sequence.q_start, sequence.n_q)
    k_rows = rows(k, kv_head, p.Hkv, p.Sk, p.D, sequence.k_start, sequence.n_k)
    v_rows = rows(v, kv_head, p.Hkv, p.Sk, p.Dv, sequence.k_start, sequence.n_k)
    if group > 1:
      head_stride = strides(p.layout, p.H, p.Sq, p.D)[1]
      reach = ((UOp.const(0) + sequence.n_q - 1)*q_rows.stride + (group - 1)*head_stride + p.D).maximum(0)*p.itemsize
      q_rows = PackedRows(q_rows.buffer, q_rows.base, q_rows.stride, sequence.n_q*group, p.D, p.itemsize, False, group, head_stride,
                          reach)
    queries = [Row(batch, first_head + (first_row + i)%group, (first_row + i)//group, first_row + i < sequence.n_q*group) for i in in_block]
    first = Row(batch, first_head, first_query, UOp.const(True))
    scores = Scores(p, at, block_n, sequence, first, given.get("alibi_slopes"), given.get("bias"))
    blocks = key_blocks(p, sequence, first_query, last_query, block_n)
    for s in split: blocks = blocks.share(s, splits)

    # ***** placeholders *****
    q_lds = LdsTile.create(tile.block_m, depth//mat.unit, 7)
    k_stage = Staging(block_n, depth//mat.unit, tile.threads, at.thread)
    v_stage = Staging(block_n, width//mat.unit, tile.threads, at.thread, 4, *((columns, 2) if width//mat.unit % (2*columns) == 0 else (1, 1)))
    nothing = UOp.placeholder((1,), dtypes.float, 9, AddrSpace.REG)
    state = State(Softmax.create(mat, q_tiles, d_tiles, k_tiles, 10), LdsTile.create(block_n, depth//mat.unit, 0, buffers),
                  LdsTile.create(width, block_n//mat.unit, 1, buffers, v_skew(mat, block_n)))

    # ***** Q: the B operand of S^T, kept in registers, or in LDS where they would not hold it *****
    q_units = [[q_rows.load_units(first_row, tile.block_m, i, u) for u in units_of(mat, depth, at.h)] for i in in_block]
    if tile.q_in_lds:
      own = at.h.eq(0) if mat.duplicated else UOp.const(True)
      stores = [q_lds.store(i, u, x, own) for i, xs in zip(in_block, q_units) for u, x in zip(units_of(mat, depth, at.h), xs)]
      q_kept = q_lds.after(UOp.group(*stores))
    def q_operands(t:UOp, steps:slice, *after:UOp) -> list[list[UOp]]:
      """The operands of each query tile for some of the units of the contraction."""
      if not tile.q_in_lds: return [operands(mat, units[steps]) for units in q_units]
      units = units_of(mat, depth, at.h)[steps]
      return [operands(mat, [q_kept.after(*after).load(row, u) for u in units]) for row in (amd.opaque(i, t) for i in in_block)]

    def do(statement:Callable[..., UOp], *args:Any, **options:Any) -> UOp: return nothing[0].store(statement(*args, **options))

    # ***** global -> registers -> LDS *****
    def fetch(t:UOp) -> tuple[list[UOp], list[UOp]]:
      """This thread's parts of the K and the V tile."""
      k_parts = [k_rows.load_units(t*block_n, block_n, *k_stage.item(j)) for j in range(k_stage.items)]
      v_parts = []
      for quad, unit, gate in (v_stage.item(j) for j in range(v_stage.items)):
        for i in range(4):    # slot quad*4 + i of a row of V^T: unit quad//2 belongs to lane group quad//2 % groups
          slot_unit, slot = quad//2, quad%2*4 + i
          n = slot_unit//mat.groups*mat.unit + slot
          row = n//mat.accumulator*mat.M + mat.c_row(slot_unit%mat.groups, n%mat.accumulator)
          v_parts.append(v_rows.load_units(t*block_n, block_n, row, unit, gate))
      return k_parts, v_parts

    def to_lds(s:State, t:UOp, k_parts:list[UOp], v_parts:list[UOp]) -> UOp:
      k_lds, v_lds = s.k_lds.number(t%buffers), s.v_lds.number(t%buffers)
      stores = [k_lds.store(row, unit, part, gate) for part, (row, unit, gate) in zip(k_parts, (k_stage.item(j) for j in range(k_stage.items)))]
      for j in range(v_stage.items):
        quad, unit, gate = v_stage.item(j)
        transposed = enumerate(transpose(v_parts[4*j:4*j + 4]))
        stores += [v_lds.store_half(mat.row_of(unit*mat.unit + i), quad, column, gate) for i, column in transposed]
      return UOp.group(*stores)

    # ***** one trip *****
    def trip(s:State, t:UOp, masked:bool) -> UOp:
      """The work on tile t while the next one is on its way to registers, and then that one's way to LDS. With two buffers there no wave has to wait
      for others before it stores: the barrier at the end of the trip is the only one. Without prefetch a trip takes its own tile to LDS first."""
      if not tile.prefetch: return work(s.lds_after(to_lds(s, t, *fetch(t))), t, masked)
      parts = fetch(t + 1)
      under_way = do(amd.sched_barrier, *itertools.chain(*parts))     # the compiler would put loads off
      worked = work(s.lds_after(under_way), t, masked)
      return UOp.group(worked, to_lds(s.lds_after(workgroup_barrier(worked) if buffers == 1 else worked), t + 1, *parts))

    def work(s:State, t:UOp, masked:bool) -> UOp:
      """S of a key tile, its softmax, and its part of O."""
      k_tile, v_tile = s.k_lds.number(t%buffers), s.v_lds.number(t%buffers)
      s_tiles = [[ops.splat(0.0, mat.accumulator)]*k_tiles for _ in range(q_tiles)]
      k_units = units_of(mat, depth, at.h)
      for kt, first in itertools.product(range(k_tiles), range(0, len(k_units), FENCE_UNITS)):
        steps = slice(first, first + FENCE_UNITS)
        fence = [do(amd.sched_barrier, s_tiles[-1][kt - (first == 0)])] if tile.fenced and (kt or first) else []
        k_operands = operands(mat, [k_tile.after(*fence).load(kt*mat.M + at.n, u) for u in k_units[steps]])
        for a, *bs in zip(k_operands, *q_operands(t, steps, *fence)):
          for qt, b in enumerate(bs): s_tiles[qt][kt] = amd.shaped_wmma(mat, a, b, s_tiles[qt][kt])
      for qt, row in enumerate(queries):
        s_tiles[qt] = scores.modify(s_tiles[qt], row, t)
        if masked: s_tiles[qt] = scores.mask(s_tiles[qt], row, t)
      x = s.softmax.correct([s.softmax.weights(x, qt, scores.to_log2) for qt, x in enumerate(s_tiles)], s_tiles, scores.to_log2, mat, p.dtype,
                            tile.rescale_above, do)
      weights = [x.operands(at, qt, k_tiles) for qt in range(q_tiles)]
      accs = [[x.acc[qt*d_tiles + dt].load() for dt in range(d_tiles)] for qt in range(q_tiles)]
      for dt in range(d_tiles):
        if tile.fenced or not dt: v_tile = v_tile.after(do(amd.sched_barrier, accs[-1][dt - 1] if dt else weights[-1][-1]))
        v_operands = operands(mat, [v_tile.load(dt*mat.M + at.n, u) for u in units_of(mat, block_n, at.h)])
        for a, *bs in zip(v_operands, *weights):
          for qt, b in enumerate(bs): accs[qt][dt] = amd.shaped_wmma(mat, a, b, accs[qt][dt])
      o_tiles = [acc for column in accs for acc in column]
      return UOp.group(do(amd.made_here, *o_tiles), *[x.acc[i].store(acc) for i, acc in enumerate(o_tiles)])

    def trips(s:State, first:UOp, last:UOp, masked:bool) -> State:
      if (count := trip_count(last - first)) is None: return s
      r = UOp.range(count, next(axes), AxisType.LOOP)
      inside = s.after(r)
      return s.after(trip(inside, first + r, masked).end(r))

    # ***** all of it *****
    done = state.after(state.softmax.start())
    if tile.prefetch: done = done.lds_after(to_lds(done, blocks.begin, *fetch(blocks.begin)))
    if left >= 0: done = trips(done, blocks.begin, blocks.full_begin, masked=True)
    done = trips(done, blocks.full_begin, blocks.full_end, masked=False)
    done = trips(done, blocks.full_end, blocks.end, masked=True)

    # ***** O = O^T / l, LSE = m + ln l *****
    outputs = []
    for qt, row in enumerate(queries):
      sink = flat(given["sinks"])[row.head].load() if "sinks" in given else None
      factor, log_sum = finish(done.softmax.m[qt].load(), done.softmax.total(qt, mat), scores, sink)
      number, begin = place_of_row(p, sequence, row, *split)
      if lse is not None: outputs.append(flat(lse)[number.valid(at.h.eq(0) & row.there)].store(log_sum))
      for dt in range(d_tiles):
        values = ops.mul(done.softmax.acc[qt*d_tiles + dt].load(), factor)
        outputs += store_row(arch, flat(o), o_dtype, p.Dv, begin, dt*mat.M + at.h*mat.accumulator, values, row.there)
    outputs += clear_outside(p, arch, sequence, given, batch, [first_head + i for i in range(group)], (q_block, q_blocks),
                             (at.thread, tile.threads), next(axes), *split)
    name = f"attn_forward_{arch.name}_{p.dtype}_{tile.block_m}x{block_n}_{p.D}" + f"_split{splits}"*(splits > 1)
    info = KernelInfo(name, opts_to_apply=(), estimates=estimates(p))
    return UOp.group(*outputs).end(q_block, head, lane, wave, *split).sink(arg=info, tag=OPTIMISED)
  return kernel
