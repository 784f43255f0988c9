"""Flash attention forward: one program for every AMD matrix unit.

A workgroup owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N, with the online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). It computes S^T = K Q^T and O^T = V^T P^T: a query is a lane, see
attn/chips/matrix.py.
K and V tiles come through registers to LDS, V transposed on the way; by default the loads of the next tile start before this one's matrix work.
"""
from __future__ import annotations
import itertools, math
from dataclasses import dataclass
from dataclasses import replace
from typing import Any, Callable
from typing import Mapping
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Matrix
from attn.kernels.blocks import Extent, extent, key_blocks, strides, trip_count
from attn.kernels.blocks import outside
from attn.kernels.scores import LN2, LOG2E, MAX_RECORDS, NEG_INF, Row, Scores
from attn.kernels.softmax import Softmax
from attn.kernels.tiles import (Carried, Lane, LdsTile, PackedRows, Rows, Tile, ceildiv, contraction, flat, operands, round_up,
                                units_of)
from attn.ops import amd, common as ops
from attn.problem import BYTES, Problem
from attn.tinygrad_compat import AddrSpace, AxisType, Estimates, KernelInfo, Ops, UOp, dtypes

OPTIMISED = "attn"   # a tag on the SINK: tinygrad leaves its ranges as they are, and its KernelInfo with our estimates
MAX_D = 256      # the longest row of O that registers hold
OF_NO_SEQUENCE = (2 - 2.0**-23)*2.0**127   # as the lse of a row among packed sequences: beside it everything vanishes
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

def arguments(p:Problem) -> dict[str, tuple[tuple[int, ...], str]]:
  """(shape, dtype) of the tensors that `forward` takes, by name and in order: those of `p.shapes`, or for a part of the keys (p.num_splits > 1)
  float32 o_partial (G, B, H, Sq, Dv) and lse_partial (G, B, H, Sq) in place of o and lse, whatever the layout ("thd": (G, H, total_q, Dv)), and no
  sinks."""
  if p.num_splits == 1: return p.shapes
  rows = (p.num_splits, p.H, p.total_q) if p.varlen else (p.num_splits, p.B, p.H, p.Sq)
  return {"o_partial": ((*rows, p.Dv), "float32"), "lse_partial": (rows, "float32"),
          **{name: x for name, x in p.shapes.items() if name not in ("o", "lse", "sinks")}}

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
      return UOp.group(worked, to_lds(s.lds_after(barrier(worked) if buffers == 1 else worked), t + 1, *parts))

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

def barrier(after:UOp) -> UOp:
  """A workgroup barrier; tinygrad's own ones go by LOCAL stores that it sees."""
  return UOp(Ops.BARRIER, dtypes.void, (after,))

def too_wide(p:Problem) -> str|None:
  """Why the rows of a problem are too long for a kernel that holds one of O in registers, or None."""
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: a row is held in registers, up to {MAX_D}" for name, value in widths if value > MAX_D), None)

def check_range(p:Problem, tile:Any) -> None:
  """Raises NotImplementedError where what a workgroup reads of one tensor, from its first row on, is more than a buffer descriptor's range."""
  heads = p.H//p.Hkv if tile.pack_gqa else 1
  queries = min(p.Sq, tile.block_m) if heads == 1 else p.Sq
  reads = {"q": heads*queries*strides(p.layout, p.H, p.Sq, p.D)[2]*p.itemsize, "bias": heads*queries*p.Sk*4 if p.bias is not None else 0}
  for name, nbytes in reads.items():
    if nbytes > MAX_RECORDS:
      raise NotImplementedError(f"{name}: {queries} queries of {heads} heads reach over {nbytes} bytes, at most {MAX_RECORDS} are addressed")

def finish(m:UOp, total:UOp, scores:Scores, sink:UOp|None) -> tuple[UOp, UOp]:
  """(what O^T is to be multiplied by, LSE) of a row with sum `total` relative to the reference `m`. A sink is one more term of the sum."""
  if sink is None:
    inverse = total.eq(0.0).where(0.0, ops.rcp(total))
    return inverse, total.eq(0.0).where(NEG_INF, ops.add(ops.mul(m, scores.to_natural), ops.mul(ops.log2(total), LN2)))
  m = ops.mul(m, scores.to_natural)
  top = ops.max_(m, sink)
  safe = top.eq(NEG_INF).where(0.0, top)
  weight = ops.exp2(ops.mul(ops.sub(m, safe), LOG2E))
  total = ops.add(ops.mul(total, weight), ops.exp2(ops.mul(ops.sub(sink, safe), LOG2E)))
  return total.eq(0.0).where(0.0, ops.mul(weight, ops.rcp(total))), total.eq(0.0).where(NEG_INF, ops.add(safe, ops.mul(ops.log2(total), LN2)))

def place_of_row(p:Problem, x:Extent, row:Row, *split:UOp) -> tuple[UOp, UOp]:
  """Of a row: its number in lse, and where it begins in o; or in lse_partial and o_partial, of a key range."""
  number = row.head*p.total_q + x.q_start + row.query if p.varlen else (row.batch*p.H + row.head)*p.Sq + row.query
  for s in split: number = s*p.rows + number
  sb, sh, ss = strides(p.layout, p.H, p.Sq, p.Dv)
  return number, number*p.Dv if split else row.batch*sb + row.head*sh + (x.q_start + row.query)*ss

def clear_outside(p:Problem, arch:Chip, x:Extent, given:Mapping[str, UOp], batch:UOp, heads:list[UOp], block:tuple[UOp, int], thread:tuple[UOp, int],
                  axis:int, *split:UOp) -> list[UOp]:
  """Of packed sequences: the stores, in a loop numbered `axis`, of o = 0 and lse = -inf to the rows that are of none (`blocks.outside`), for some
  heads of a sequence, shared out over `block` (number, of how many) and `thread` likewise. In the result of a key range their lse is
  OF_NO_SEQUENCE, for `combine` to know them from rows that see no key: a sink is no part of theirs."""
  if not p.varlen: return []
  rows, vec = outside(p, x, batch, given), math.gcd(p.Dv, 4)
  o, lse, dtype = (given["o_partial"], given["lse_partial"], "float32") if split else (given["o"], given.get("lse"), p.out_dtype)
  columns, together = p.Dv//vec, block[1]*thread[1]
  if (count := trip_count((rows.count*columns + (together - 1))//together)) is None: return []
  trip = UOp.range(count, axis, AxisType.LOOP)
  item = (trip*block[1] + block[0])*thread[1] + thread[0]
  there, column, row = item < rows.count*columns, item%columns*vec, rows.row(item//columns).minimum(p.total_q - 1)
  zero, nothing = ops.splat(0.0, vec), UOp.const(OF_NO_SEQUENCE if split else NEG_INF, dtypes.float)
  stores = []
  for head in heads:
    number, begin = place_of_row(p, replace(x, q_start=0), Row(batch, head, row, there), *split)
    stores += store_row(arch, flat(o), dtype, p.Dv, begin, column, zero, there)
    if lse is not None: stores.append(flat(lse)[number.valid(there & column.eq(0))].store(nothing))
  return [UOp.group(*stores).end(trip)]

def store_row(arch:Chip, o:UOp, dtype:str, length:int, begin:UOp, column:UOp, values:UOp, there:UOp) -> list[UOp]:
  """Stores consecutive elements of a row of O (`length` elements from index `begin` on), from `column` on, converted to `dtype`: 16 (or 8) bytes at
  a time where rows are so aligned."""
  index, n, size = begin + column, ops.length(values), BYTES[dtype]
  words = values if size == 4 else ops.pack(values if n > 1 else ops.build(values, values), dtype)   # dwords of the row
  wide = min(UNIT_BYTES//size, n)                                                          # elements of a store
  if length % wide == 0 and wide*size >= 4:
    kind = ops.f32 if size == 4 else ops.u32
    view, per = o.bitcast(kind(wide*size//4)), wide*size//4
    return [view[((index + i)//wide).valid(there & (column + i < length))].store(ops.slice_(words, i*size//4, per)) for i in range(0, n, wide)]
  if size == 4: return [o[(index + i).valid(there & (column + i < length))].store(ops.extract(values, i)) for i in range(n)]
  stores = []
  for i in range(n):
    half = (ops.extract(words, i//2) >> (16*(i % 2))).cast(dtypes.ushort).bitcast(o.dtype)
    stores.append(o[(index + i).valid(there & (column + i < length))].store(half))
  return stores

def estimates(p:Problem) -> Estimates:
  """What tinygrad's DEBUG=2 line needs: floating-point operations, and bytes moved when every tensor is touched once."""
  size, out = p.itemsize, p.out_itemsize
  memory = p.B*(p.H*p.Sq*(p.D*size + p.Dv*out) + p.Hkv*p.Sk*(p.D + p.Dv)*size)
  return Estimates(ops=p.flops, lds=memory, mem=memory)
