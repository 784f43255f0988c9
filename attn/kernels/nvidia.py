"""What the forward kernels for NVIDIA's matrix units share: who works on what, the way of Q, K and V to shared memory, and of O back.

A warp's tile of C has 16 queries, of which a lane holds part of two rows (attn/chips/matrix.py, Mma): vectors of four numbers, two a row.
"""
from __future__ import annotations
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol
from attn.chips import Chip
from attn.chips.matrix import MMA, UNIT_BYTES, Mma
from attn.kernels.parts.blocks import Extent, KeyBlocks, extent, key_blocks
from attn.kernels.parts.epilogue import OPTIMISED, clear_outside, estimates, place_of_row, store_row
from attn.kernels.parts.lanes import MmaLane
from attn.kernels.parts.rows import flat, strides
from attn.kernels.parts.scores import Row, Scores
from attn.kernels.parts.statements import Carried
from attn.kernels.parts.tensors import arguments
from attn.kernels.parts.tiles import ceildiv
from attn.ops import common as ops, nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, KernelInfo, UOp, dynamic_shared_name

UNIT = MMA["float16"].unit   # elements of 16 bytes, the same in both input types
LINE = 8            # units of 128 bytes: all banks
CACHED = 16 << 20   # bytes of K and V that the blocks which run at a time should share in L2

class BlockTile(Protocol):
  """What a kernel's tile says of how its blocks divide the work."""
  @property
  def block_m(self) -> int: ...
  @property
  def block_n(self) -> int: ...
  @property
  def waves(self) -> int: ...
  @property
  def threads(self) -> int: ...
  @property
  def pack_gqa(self) -> bool: ...

class SharedRows(Protocol):
  """How the rows of a tile lie in shared memory."""
  @property
  def units(self) -> int: """16-byte units of a row."""
  @property
  def across(self) -> int: """Threads that copy a row, a unit each."""
  @property
  def pitch(self) -> int: """Units from a row to the one eight further on, over eight."""
  def place(self, row:UOp, unit:UOp) -> UOp: """Where a unit lies."""

@dataclass(frozen=True)
class Block:
  """A block's part of a problem, as a thread sees it."""
  p: Problem
  arch: Chip
  tile: BlockTile
  given: dict[str, UOp]       # the placeholders by name
  axes: Iterator[int]         # numbers for the kernel's loops
  ranges: tuple[UOp, ...]     # those of the grid and of the threads
  split: tuple[UOp, ...]      # the range over parts of the keys, where there is one
  at: MmaLane
  batch: UOp
  first_head: UOp
  kv_head: UOp
  first_row: UOp              # a row is a query, with `group` heads in a tile each query's heads in turn
  x: Extent
  scores: Scores
  keys: KeyBlocks

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BlockTile, mat:Mma, args:tuple[UOp, ...]) -> Block:
    """Divides the problem: heads and blocks of queries (and key ranges) over the grid, lanes and warps over a block's threads."""
    names, group = arguments(p), p.H//p.Hkv if tile.pack_gqa else 1
    if len(args) != len(names): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(names)})")
    given, axes, right = dict(zip(names, args)), itertools.count(5), p.window[1]
    q_blocks, heads = ceildiv(p.Sq*group, tile.block_m), p.B*p.H//group
    # under a causal mask the long blocks start first, over as many heads at a time as the cache holds
    cached = CACHED*(p.H//p.Hkv//group)//(p.itemsize*p.Sk*(p.D + p.Dv))
    together = max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(1, cached if right >= 0 else 1))

    # ***** ranges *****
    head_group = UOp.range(heads//together, 0, AxisType.GLOBAL)
    q_block = UOp.range(q_blocks, 1, AxisType.GLOBAL)
    head_in_group = UOp.range(together, 2, AxisType.GLOBAL)          # varies fastest over blocks
    lane = UOp.range(mat.wave, 3, AxisType.WARP)
    wave = UOp.range(tile.waves, 4, AxisType.WARP)
    split = (UOp.range(p.num_splits, next(axes), AxisType.GLOBAL),) if p.num_splits > 1 else ()
    at, head = MmaLane(lane, wave, mat), head_group*together + head_in_group
    batch, first_head = head//(p.H//group), head%(p.H//group)*group
    first_row = (q_blocks - 1 - q_block if right >= 0 else q_block)*tile.block_m

    # ***** the sequence, and the key tiles that the block sees *****
    x, first_query = extent(p, batch, given), first_row//group
    first = Row(batch, first_head, first_query, UOp.const(True))
    scores = Scores(p, at, tile.block_n, x, first, given.get("alibi_slopes"), given.get("bias"))
    keys = key_blocks(p, x, first_query, (first_row + tile.block_m - 1)//group, tile.block_n)
    for n in split: keys = keys.share(n, p.num_splits)
    return Block(p, arch, tile, given, axes, (head_group, q_block, head_in_group, lane, wave), split, at, batch, first_head,
                 first_head//(p.H//p.Hkv), first_row, x, scores, keys)

  @property
  def group(self) -> int: return self.p.H//self.p.Hkv if self.tile.pack_gqa else 1
  @property
  def lse(self) -> UOp|None: return self.given.get("lse", self.given.get("lse_partial"))
  def queries(self, first:UOp) -> list[Row]:
    """A lane's rows of the 16 that begin at `first` of the block."""
    rows = [self.first_row + first + self.at.matrix.c_row(self.at.lane, r) for r in range(nv.ROWS)]
    return [Row(self.batch, self.first_head + row%self.group, row//self.group, row < self.x.n_q*self.group) for row in rows]

  # ***** global -> shared memory *****
  def copies(self, name:str, shared:UOp, first:UOp, rows:int, to:SharedRows) -> list[UOp]:
    """The thread's part in copying `rows` rows of the tensor `name` from `first` on: those that there are not, and columns beyond the last, become
    zero. Statements."""
    p, tile, query = self.p, self.tile, name == "q"
    head, heads, length, start = (self.first_head, p.H, p.Sq, self.x.q_start) if query else (self.kv_head, p.Hkv, p.Sk, self.x.k_start)
    there = self.x.n_q*self.group if query else (self.keys.end*tile.block_n).minimum(self.x.n_k)
    columns, packed, apart = p.Dv if name == "v" else p.D, query and self.group > 1, tile.threads//to.across
    sb, sh, ss = strides(p.layout, heads, length, columns)
    base, statements = self.batch*sb + head*sh + start*ss, []
    regular = tile.threads % to.across == 0 and apart % LINE == 0 and not packed
    for j in range(ceildiv(rows*to.across, tile.threads)):
      moved = j*apart if regular else 0                # rows further on: in the instruction
      index = self.at.thread + (0 if regular else j*tile.threads)
      row, unit = index//to.across, index%to.across
      begin = base + ((first + row)//self.group*ss + (first + row)%self.group*sh if packed else first*ss + row*ss)
      left_over = UOp.const(UNIT_BYTES) if columns % (2*UNIT) == 0 else ((columns - unit*UNIT)*p.itemsize).maximum(0).minimum(UNIT_BYTES)
      nbytes = (first + row + moved < there).where(left_over, 0)
      further = UNIT_BYTES*moved*to.pitch, p.itemsize*moved*ss
      statements.append(nv.copy(shared[to.place(row, unit)], flat(self.given[name])[begin + unit*UNIT], further, nbytes,
                                (row + moved < rows) & (unit < to.units), columns % UNIT == 0))
    return statements

  # ***** scores *****
  def finished(self, tiles:list[UOp], queries:list[Row], t:UOp, masked:bool) -> list[UOp]:
    """What the softmax takes, of the raw scores of 16 queries: row by row."""
    if self.scores.raw and not masked: return tiles
    rows = [[ops.slice_(y, 2*r, 2) for y in tiles] for r in range(nv.ROWS)]
    rows = [self.scores.modify(row, query, t) for row, query in zip(rows, queries)]
    if masked: rows = [self.scores.mask(row, query, t) for row, query in zip(rows, queries)]
    return [ops.concat(low, high) for low, high in zip(*rows)]

  # ***** O and LSE *****
  def outputs(self, queries:list[Row], accs:list[UOp], factors:list[UOp], log_sums:list[UOp]) -> list[UOp]:
    """Stores accs*factors, and the LSE of each row where it is wanted."""
    p, o, at, stores = self.p, self.given["o_partial" if self.split else "o"], self.at, []
    for r, row in enumerate(queries):
      number, begin = place_of_row(p, self.x, row, *self.split)
      if self.lse is not None: stores.append(flat(self.lse)[number.valid(at.h.eq(0) & row.there)].store(log_sums[r]))
      for dt, acc in enumerate(accs):
        values = ops.mul(ops.slice_(acc, 2*r, 2), factors[r])
        stores += store_row(self.arch, flat(o), "float32" if self.split else p.out_dtype, p.Dv, begin, dt*at.matrix.N + at.h*at.matrix.block, values,
                            row.there)
    return stores

  def kernel(self, kind:str, outputs:list[UOp], shared_bytes:int) -> UOp:
    """The kernel that ends in these stores."""
    tile, p, group = self.tile, self.p, self.group
    blocks, threads = (self.ranges[1], ceildiv(p.Sq*group, tile.block_m)), (self.at.thread, tile.threads)
    heads = [self.first_head + i for i in range(group)]
    outputs = outputs + clear_outside(p, self.arch, self.x, self.given, self.batch, heads, blocks, threads, next(self.axes), *self.split)
    name = f"attn_{kind}_{self.arch.name}_{p.dtype}_{tile.block_m}x{tile.block_n}_{p.D}" + f"_split{p.num_splits}"*len(self.split)
    info = KernelInfo(dynamic_shared_name(name, shared_bytes), opts_to_apply=(), estimates=estimates(p))
    return UOp.group(*outputs).end(*self.ranges, *self.split).sink(arg=info, tag=OPTIMISED)

class InOrder(Carried):
  """A kernel's state with a dummy register `nothing`, to which its statements are stored one after another."""
  nothing: UOp
  @property
  def order(self) -> UOp:
    """A value that is there when all statements before are done."""
    return self.nothing[0].load()

def total_of(part:UOp, r:int) -> UOp:
  """The sum of row r, of the parts of it that the lanes which share it have."""
  total = ops.extract(part, r)
  for step in (1, 2): total = total + nv.xor_lane(total, step)
  return total
