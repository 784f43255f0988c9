"""A workgroup's part of a problem: its head, queries and keys, its position in the grid, and the stores that end its kernel."""
from __future__ import annotations
import functools, math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES, Matrix, Mma
from attn.kernels.parts.grid.shared_rows import Share
from attn.kernels.parts.grid.tensors import Shapes, arguments, dq_sums
from attn.kernels.parts.memory.lanes import Lane, MmaLane, ThreadPlace
from attn.kernels.parts.memory.rows import ConvertedRows, GlobalRows, PackedRows, PagedRows, Rows, Table, strides
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import (Blocks, Descending, Extent, TileList, blocks_seen, extent, outside, over_keys, over_queries,
                                               tiles_of_list)
from attn.kernels.parts.program.counts import below, bounded, ceildiv
from attn.kernels.parts.weights.epilogue import OPTIMISED, LogSum, clear_outside, clear_rows, estimates, finish, place_of_row, store_row
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.common import QUERIES_OF_SUMS, TILES_OF_TURN, BlockTile, blocks_of_queries, heads_of
from attn.ops import common as ops
from attn.ops.atomics import ticket
from attn.ops.common import flat
from attn.problem import BYTES, INVARIANT_KEYS, Problem, Strided
from attn.score.masks import as_index, cuts_some, hiding, nearest_first, scattered
from attn.score.places import Walk
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, Estimates, KernelInfo, UOp, dtypes, dynamic_shared_name

CACHED = 16 << 20   # bytes of K and V that concurrently running blocks should share in NVIDIA's L2
HEADS_IN_ORDER = 32   # key/value heads whose blocks run together if they loop over lists of tiles and add to dQ in a fixed order

@dataclass(frozen=True)
class Grid:
  """The work and the position of one thread: the workgroup's head and block of rows, and the thread's wave and lane."""
  allocator: Allocator
  ranges: tuple[UOp, ...]     # the ranges over the grid and over a workgroup's threads
  head: UOp                   # index of the workgroup's head, or group of heads, among all that are computed
  block: UOp                  # index of the workgroup's block of queries, or of keys
  lane: UOp
  wave: UOp

def by_ticket(grid:Grid, split:tuple[UOp, ...], counter:UOp, lds:UOp) -> tuple[Grid, tuple[UOp, ...]]:
  """Returns (grid position, indices of the parts of a divided sum) that this workgroup computes: the n-th workgroup to start takes the n-th
  position."""
  # A ticket counts the workgroups in the order in which they start (attn/ops/atomics.py). So work begins in the order of the grid, even if the
  # hardware starts workgroups in another order. `split` is the range over the parts of a divided sum, or empty; `counter` counts the tickets; through
  # `lds`, an int32, the waves of a workgroup learn its ticket.
  axes = [*grid.ranges[:-2], *split]
  number = functools.reduce(lambda n, axis: n*(axis.vmax + 1) + axis, axes, UOp.const(0))
  left, digits = bounded(ticket(counter, number, grid.lane.eq(0) & grid.wave.eq(0), lds=lds), 0, number.vmax), dict[UOp, UOp]()
  for axis in reversed(axes): left, digits[axis] = left//(axis.vmax + 1), left%(axis.vmax + 1)
  head, block = (x.substitute(digits, walk=True) for x in (grid.head, grid.block))
  return replace(grid, head=head, block=block), tuple(digits[axis] for axis in split)

def head_fastest(p:Problem, tile:BlockTile, mat:Matrix, arch:Chip) -> Grid:
  """Returns the grid of an AMD kernel whose workgroups own queries. Consecutive workgroups compute consecutive heads."""
  # The hardware gives neighbouring workgroups to different XCDs (dies of the GPU), in turn. So the blocks of one head share the cache of one XCD.
  # After a group of heads comes the next block. A group has as many heads as fit, with K and V, into the cache that all XCDs share.
  heads = heads_of(p, tile)
  return _in_group_fastest((1, math.prod(blocks_of_queries(p, tile))), p.all_heads//heads, heads_together(p, arch, heads), tile, mat)

def kv_head_fastest(p:Problem, tile:BlockTile, mat:Matrix, arch:Chip) -> Grid:
  """Returns the grid of an AMD kernel whose workgroups own keys. Consecutive workgroups compute consecutive key/value heads."""
  # as in `head_fastest`; a group has as many heads as fit, with their rows of q and dO, into the cache that all XCDs share
  return _in_group_fastest((1, ceildiv(p.Sk, tile.block_m)), p.B*p.Hkv, heads_together(p, arch), tile, mat)

def heads_together(p:Problem, arch:Chip, heads:int=0) -> int:
  """Returns how many heads form a group. Workgroups of a group run at about the same time, because the rows that they read fit into an AMD chip's
  cache."""
  # `heads` is the number of query heads of a workgroup that owns queries, or 0 if workgroups own keys. A group has as many heads as the cache of the
  # chip has room for, with the rows over which workgroups loop: K and V, or q and dO. On a chip that needs no groups, all heads are one group.
  n, room = (p.all_heads//heads if heads else p.B*p.Hkv), arch.caches.group
  row, group = p.key_bytes if heads else (p.D + p.Dv)*p.itemsize, p.H//p.Hkv
  most = room*(group//heads)//(row*p.Sk) if heads else room//(row*p.Sq*group)
  return largest_divisor(n, most) if room else n

def largest_divisor(n:int, most:int) -> int:
  """Returns the largest divisor of `n` that is at most `most`, or 1 if there is none."""
  pairs = ((i, n//i) for i in range(1, math.isqrt(n) + 1) if n % i == 0)
  return max(divisor for pair in pairs for divisor in pair if divisor <= max(1, most))

def head_in_group_fastest(p:Problem, tile:BlockTile, mat:Mma) -> Grid:
  """Returns the grid of an NVIDIA kernel whose blocks own queries: all blocks of a group of heads start before those of the next group."""
  # Under a causal mask a group has as many heads as fit, with K and V, into the cache; otherwise a group is a single head. If a device holds two
  # pieces of a sequence, the blocks of one piece come before all blocks of the other piece, so that blocks with many keys start early.
  heads = heads_of(p, tile)
  sharing = p.H//p.Hkv//heads      # if several heads share K and V, only half of the cache is left for K and V: Q and O take the rest
  cached = CACHED*sharing//(min(sharing, 2)*p.key_itemsize*p.Sk*(p.D + p.Dv)) if hiding(p).after else 1
  return _in_group_fastest(blocks_of_queries(p, tile), p.all_heads//heads, cached, tile, mat)

def kv_head_in_group_fastest(p:Problem, tile:BlockTile, mat:Mma, fixed_order:bool=False) -> Grid:
  """Returns the grid of an NVIDIA kernel whose blocks own keys: all blocks of a group of key/value heads start before those of the next group."""
  # Usually a group is a single head. Under a causal mask a group has as many heads as fit, with their queries, into the cache. If the blocks of a
  # head add to dQ in a fixed order (`fixed_order`), groups are as large, so that fewer of the blocks that run at the same time wait for each other.
  # With lists of tiles, neighbouring blocks of a head loop over the same few tiles: groups then have at least HEADS_IN_ORDER heads, if there are as
  # many.
  cached = CACHED//(p.itemsize*p.Sq*(p.D + p.Dv)*(p.H//p.Hkv)) if fixed_order or hiding(p).after else 1
  if fixed_order and p.tile_list is not None: cached = max(cached, HEADS_IN_ORDER)
  return _in_group_fastest((1, ceildiv(p.Sk, tile.block_m)), p.B*p.Hkv, cached, tile, mat)

def _in_group_fastest(pieces_of_blocks:tuple[int, int], n:int, cached:int, tile:BlockTile, mat:Matrix|Mma) -> Grid:
  new, (pieces, blocks) = Allocator(), pieces_of_blocks
  together = largest_divisor(n, cached)
  outer, groups = ([new.range(size, AxisType.GLOBAL)] if size > 1 else [] for size in (pieces, n//together))
  block = new.range(blocks, AxisType.GLOBAL)
  in_group = new.range(together, AxisType.GLOBAL)
  lane = new.range(mat.wave, AxisType.WARP)
  wave = new.range(tile.waves, AxisType.WARP)       # WARP: tinygrad would split a LOCAL range that is used with %
  head = functools.reduce(lambda head, group: group*together + head, groups, in_group)
  number = functools.reduce(lambda block, piece: piece*blocks + block, outer, block)
  return Grid(new, (*outer, *groups, block, in_group, lane, wave), head, number, lane, wave)

KEY_TENSORS = ("k", "v", "k_scales", "v_scales", "k_rotary", "dk", "dv")    # tensors whose rows are keys

def by_name(shapes:Shapes, args:tuple[UOp, ...]) -> dict[str, UOp]:
  if len(args) != len(shapes): raise ValueError(f"{len(args)} tensors given: this kernel takes ({', '.join(shapes)})")
  return dict(zip(shapes, args))

def scale_as_float(word:UOp, size:int) -> UOp:
  """Returns the scale in the loaded dword `word`, a float32 if `size` is 4 bytes or a float16 if 2, as fp32."""
  return ops.as_float(word) if size == 4 else ops.widen_to_float(word, 1, "float16")

def ranges_of(grid:Grid, parts:int) -> tuple[UOp, ...]:
  """Returns (a new axis of the grid,), of size `parts`, or an empty tuple if `parts` is at most 1."""
  return (grid.allocator.range(parts, AxisType.GLOBAL),) if parts > 1 else ()

def part_of(split:tuple[UOp, ...], parts:int) -> UOp|None:
  """Returns the index of the part of the work that this workgroup computes, or None if the work is not divided (`parts` is 0)."""
  # `split` is what `ranges_of` returned
  if not parts: return None
  return split[0] if split else UOp.const(0)

@dataclass(frozen=True)
class BlockRows:
  """The rows of queries that a workgroup owns: `first` to `last`, without those from `end` on, which do not exist."""
  first: UOp
  last: UOp
  end: int|UOp
  further: int|UOp   # if devices share a sequence: row r of the device's tensor is query r + further of the sequence; otherwise 0

def in_order_of_start(p:Problem, number:UOp, blocks:int) -> UOp:
  """Converts a block's position in the sequence to its position in the order of start, or back: under a causal mask the last block starts first."""
  # Under a causal mask the last block starts first, otherwise the first block. So blocks of queries with many keys start early. Blocks of keys start
  # in this order only if they add to dQ in a fixed order (attn/kernels/parts/backward/turns.py): those with few queries start early.
  return blocks - 1 - number if hiding(p).after else number

def rows_of_block(p:Problem, tile:BlockTile, x:Extent, number:UOp, buffers:bool) -> BlockRows:
  """Returns the rows of queries that a workgroup owns if it is the `number`-th to start."""
  heads, (pieces, blocks), size = heads_of(p, tile), blocks_of_queries(p, tile), tile.block_m
  block, end, before = in_order_of_start(p, number, pieces*blocks), x.n_q*heads, UOp.const(0)
  further: int|UOp = 0 if p.dealt is None else p.dealt.start
  if p.dealt is not None and pieces > 1:
    in_front, front = block < blocks, p.dealt.front*heads
    block, before = in_front.where(block, block - blocks), in_front.where(0, front)
    end, further = in_front.where(front, end), in_front.where(p.dealt.start, p.dealt.start + p.dealt.jump)
  # a kernel with buffer instructions: their offsets must not be negative
  if buffers: block = ops.not_negative(block, blocks - 1)
  first = block*size + before
  last = first + size - 1
  return BlockRows(first, last if p.dealt is None else last.minimum(end - 1), end, further)

def list_of(p:Problem, tile:BlockTile, given:Mapping[str, UOp], batch:UOp, head:UOp, block:UOp) -> TileList|None:
  """Returns the list of the tiles over which a workgroup loops, or None if the kernel reads no such list."""
  # `block` is the index of the workgroup's block of rows, and `given` has the kernel's tensors by name
  if p.tile_list is None or "tile_list" not in given: return None
  batches, heads, blocks, length = p.tile_list
  number = (batch if batches > 1 else UOp.const(0))*heads + (head if heads > 1 else UOp.const(0))
  turns = "dq_turns" in given
  size = tile.block_n*TILES_OF_TURN if turns else tile.block_n
  return TileList(flat(given["tile_list"]), (number*blocks + block)*length, tiles_of_list(length, turns), size, tile.block_n, turns)

def cut_off(walk:Walk, tile:BlockTile) -> bool:
  """Returns whether a limit on keys, such as the diagonal of a causal mask, may lie inside a tile. If not, only mask_mod hides scores."""
  # if not, only mask_mod hides scores within tiles, and the kernel need not compare key numbers
  return not scattered(walk.p) or cuts_some(walk, tile.block_n)

@dataclass(frozen=True)
class Workgroup:
  """The part of a problem that one workgroup computes: its tensors, head, rows, and the tiles over which it loops."""
  p: Problem
  arch: Chip
  tile: BlockTile
  given: dict[str, UOp]       # the kernel's tensors, by name
  grid: Grid
  split: tuple[UOp, ...]      # the range over parts of the walked rows; empty where they are not divided
  batch: UOp
  first_head: UOp
  kv_head: UOp
  first_row: UOp              # a row is a key or a query; if a workgroup has several heads, each query has neighbouring rows, one for each head
  end_row: int|UOp            # the workgroup owns no row from this one on
  sequence: Extent
  scores: Scores
  walked: Blocks              # the tiles of keys, or of queries, that the workgroup loops over
  part: UOp|None = None       # where the sum of a gradient is divided: index of the fp32 part that the workgroup writes
  walked_heads: int = 1       # query heads that the workgroup loops over

  @staticmethod
  def of(p:Problem, arch:Chip, tile:BlockTile, args:tuple[UOp, ...], grid:Grid, at:Lane|MmaLane|ThreadPlace,
         shapes:Shapes|None=None, parts:int=0) -> Workgroup:
    """Makes the object for a workgroup that owns the block of queries at `grid`, in a kernel that takes the tensors `args`."""
    # `shapes` has the names, shapes and dtypes of `args`, in the same order; by default they are `arguments(p)`. If `parts` is above 1, the keys are
    # divided into `parts` parts, and each workgroup loops over one part.
    heads, given = heads_of(p, tile), by_name(shapes or arguments(p), args)
    groups = p.H//heads
    split = ranges_of(grid, number := max(p.num_splits, parts))
    group = grid.head + p.first_head//heads
    batch, first_head = group//groups, group%groups*heads
    sequence = extent(p, batch, given)
    own = rows_of_block(p, tile, sequence, grid.block, heads > 1 and arch.unit.descriptor != 0)
    sequence = replace(sequence, offset=sequence.offset + own.further)
    first_query, last_query = own.first//heads, own.last//heads
    # the terms' tensors are addressed relative to this row. With several heads in a tile it is query 0: a lane's offset from the first query could
    # have a negative part
    first = Row(batch, first_head, first_query if heads == 1 else UOp.const(0), UOp.const(True))
    walk = over_keys(p, sequence)
    listed = list_of(p, tile, given, batch, first_head, own.first//tile.block_m)
    walked = blocks_seen(walk, first_query, last_query, tile.block_n) if listed is None else listed.blocks
    order: TileList|Descending|None = listed
    forward = "do" not in given
    if forward and listed is None and not split and nearest_first(walk):
      order = Descending(walked, as_index(walk.count), tile.block_n)
      walked = order.blocks
    scores = Scores(p, at, tile.block_n, walk, first, given, natural=p.wide_scores, order=order, cut=cut_off(walk, tile))
    for n in split: walked = walked.range(n, ceildiv(INVARIANT_KEYS, tile.block_n)) if p.batch_invariant else walked.share(n, number)
    return Workgroup(p, arch, tile, given, grid, split, batch, first_head, first_head//(p.H//p.Hkv), own.first, own.end, sequence, scores,
                     walked, part_of(split, parts))

  @staticmethod
  def of_keys(p:Problem, arch:Chip, tile:BlockTile, args:tuple[UOp, ...], grid:Grid, at:Lane|MmaLane|ThreadPlace, shapes:Shapes,
              parts:int=0, lds:UOp|None=None) -> Workgroup:
    """Makes the object for a workgroup that owns the block of keys at `grid`, and loops over the queries of all heads that share these keys."""
    # If `parts` is above 0, the queries are divided into `parts` parts, first by heads, then by queries of a head, and each workgroup loops over one
    # part. If workgroups add to dQ in a fixed order, a workgroup takes a ticket (`by_ticket`): the ticket, not its position in the grid, then decides
    # the block and the head. `lds` is an int32 in LDS through which the waves of the workgroup learn the ticket.
    given, split, group = by_name(shapes, args), ranges_of(grid, parts), p.H//p.Hkv
    own_part = split
    if (turns := given.get("dq_turns")) is not None and lds is not None:
      grid, own_part = by_ticket(grid, split, turns[turns.max_numel() - 1], lds)
      grid = replace(grid, block=in_order_of_start(p, grid.block, ceildiv(p.Sk, tile.block_m)))
    batch, kv_head, first_key = grid.head//p.Hkv, grid.head%p.Hkv, grid.block*tile.block_m
    of_heads = math.gcd(group, max(parts, 1))
    heads, part = group//of_heads, part_of(own_part, parts)
    first_head, sequence = kv_head*group + (0 if part is None else part%of_heads*heads), extent(p, batch, given)
    first, walk = Row(batch, first_head, first_key, UOp.const(True)), over_queries(p, sequence)
    listed = list_of(p, tile, given, batch, kv_head, grid.block)
    walked = blocks_seen(walk, first_key, first_key + tile.block_m - 1, tile.block_n) if listed is None else listed.blocks
    scores = Scores(p, at, tile.block_n, walk, first, given, natural=p.wide_scores, order=listed, cut=cut_off(walk, tile))
    if part is not None and parts > of_heads: walked = walked.share(part//of_heads, parts//of_heads)
    return Workgroup(p, arch, tile, given, grid, split, batch, first_head, kv_head, first_key, sequence.n_k, sequence, scores, walked,
                     part, heads)

  def moved(self, grid:Grid) -> Workgroup:
    """Returns a copy of this workgroup at another grid position, where it owns queries and loops over keys."""
    return Workgroup.of(self.p, self.arch, self.tile, tuple(self.given.values()), grid, self.scores.at, dict.fromkeys(self.given, ((), "")))

  @property
  def heads(self) -> int: return heads_of(self.p, self.tile)
  @property
  def walked_end(self) -> UOp:
    """Index of the first row (key or query) after those over which the workgroup loops."""
    count = self.scores.walk.count
    return as_index(count) if self.scores.order is not None else (self.walked.end*self.tile.block_n).minimum(count)
  @property
  def thread(self) -> UOp: return self.scores.at.thread
  @property
  def lse(self) -> UOp|None: return self.given.get("lse", self.given.get("lse_partial"))
  @property
  def lse_rest(self) -> UOp|None: return self.given.get("lse_rest", self.given.get("lse_rest_partial"))

  def row(self, *i:UOp) -> Row:
    """Returns the row (query or key) whose index among the rows that the workgroup owns is the sum of `i`."""
    row = functools.reduce(UOp.__add__, i, self.first_row)
    return Row(self.batch, self.first_head + row%self.heads, row//self.heads, below(row, self.end_row))

  def rows_of(self, name:str, head:UOp|None=None, unit_bytes:int=UNIT_BYTES) -> GlobalRows:
    """Returns the rows of tensor `name` for the workgroup's sequence and head, or for query head `head`."""
    # For q, returns the rows of all heads of the workgroup. The rows are loaded in units of `unit_bytes` bytes. In a tensor of scales, each row is a
    # single number.
    p, x = self.p, self.sequence
    views = {"k": p.k_view, "v": p.v_view, "k_rotary": p.k_rotary_view, **p.scale_views}
    widths = {"q": p.D, "k": p.k_width, "k_rotary": p.D - p.Dv, "dq": p.D, "dk": p.D, **dict.fromkeys(p.scale_views, 1)}
    within = {"v": "k", "v_scales": "k_scales"}.get(name, name) if p.v_in_k else name      # the tensor that holds these rows
    width, whole_row = (widths.get(tensor, p.Dv) for tensor in (name, within))
    if name in KEY_TENSORS: head, heads, length, start, count = self.kv_head, p.Hkv, p.Sk, x.k_start, x.n_k
    else: head, heads, length, start, count = self.first_head if head is None else head, p.H, p.Sq, x.q_start, x.n_q
    view = views.get(within)
    if p.pages is not None and view is not None: return self.paged_rows(within, width, view, unit_bytes)
    sb, sh, ss = strides(p.layout, heads, length, whole_row)
    if view is not None: sb, sh, ss = view.batch, view.head, view.row
    start = start*ss + (0 if view is None else view.start)
    if name == "q" and p.layout != "bshd": start = start - p.rows_before*ss
    pin, size = bool(self.split) or isinstance(x.n_k, UOp), self.given[within].dtype.itemsize
    whole = view is None or view.whole(unit_bytes//size)
    rows = GlobalRows(flat(self.given[within]), self.batch*sb + head*sh + start, ss, count, width, size, pin, whole, unit_bytes)
    return PackedRows.of(rows, self.heads, sh) if name == "q" and self.heads > 1 else rows

  def turned_rows(self, t:UOp) -> GlobalRows:
    """Returns the rows of V^T in global memory for tile t of the keys. Each of these rows holds one column of V."""
    # a tile that the workgroup does not walk over has no rows
    p, keys = self.p, self.p.turned
    _, _, tiles, columns, _ = p.turned_shape(keys)
    number = (self.batch*p.Hkv + self.kv_head)*tiles + self.scores.row(t*keys)//keys
    return GlobalRows(flat(self.given["v"]), number*(columns*keys), keys, (t < self.walked.end).where(columns, 0), keys, 1)

  def paged_rows(self, name:str, width:int, view:Strided, unit_bytes:int) -> PagedRows:
    """Returns the rows of tensor `name`, stored in pages, for the workgroup's sequence and head, but only their first `width` columns."""
    pages, buffer = self.p.pages, flat(self.given[name])
    assert pages is not None
    size, begin = buffer.dtype.itemsize, self.sequence.k_start
    whole = (pages.size % self.tile.block_n == 0 or pages.most == 1) and isinstance(begin, int)
    table = Table(flat(self.given["block_table"]), self.batch*pages.most, pages.size, pages.count, view.batch, whole)
    return PagedRows(buffer, self.kv_head*view.head + view.start, view.row, self.sequence.n_k, width, size, True, view.whole(unit_bytes//size),
                     unit_bytes, table, begin)

  def scales(self, name:str, t:UOp, share:Share|None=None) -> list[UOp]:
    """Loads the scales of K ("k_scales") or V ("v_scales") for tile t: for each vector of this lane's scores, an fp32 vector with the scales of its
    keys."""
    # One vector for each vector of scores. `name` is "k_scales" or "v_scales". If several waves divide the keys of a tile among them, `share` says
    # which keys belong to this wave.
    size, scores = BYTES[self.p.scale_dtype], self.scores
    rows, first, lane = self.rows_of(name, unit_bytes=size), scores.tile(t)*scores.block_n, scores.at.h*scores.at.matrix.block
    walked = scores.walked if share is None else share.scores(scores).walked
    if share is not None: lane = lane + share.part*share.keys
    def load(n:int) -> UOp: return scale_as_float(rows.load_units(first, scores.block_n, lane + n, UOp.const(0)), size)
    return [ops.build(*map(load, columns)) for columns in walked]

  def input_scale(self, name:str) -> UOp|None:
    """Returns the loaded scale of q, k or v (`name` is "q_scale", ...), or None if the problem has no such scale."""
    if name not in self.given: return None
    # the number for the workgroup's key/value head, or the only number if all heads share it
    numbers = flat(self.given[name])
    return numbers[self.batch*self.p.Hkv + self.kv_head if numbers.max_numel() > 1 else 0].load()

  def scaled(self, raw:list[list[UOp]]) -> list[list[UOp]]:
    """Returns the raw scores multiplied by the scales of q and k, if the problem has these scales."""
    if (factor := self.scale_of_scores) is None: return raw
    return [[ops.mul(x, factor) for x in row] for row in raw]
  @property
  def scale_of_scores(self) -> UOp|None:
    """Product of the scales of q and k, by which raw scores must be multiplied, or None if the problem has no such scales."""
    factors = [x for name in ("q_scale", "k_scale") if (x := self.input_scale(name)) is not None]
    return functools.reduce(ops.mul, factors) if factors else None

  def operand_rows(self, name:str, head:UOp|None=None) -> Rows:
    """Returns the rows of tensor `name` for the workgroup's sequence and head, converted to the dtype of the matrix products when they are loaded."""
    rows, dtype = self.rows_of(name, head), self.p.shapes["o"][1]
    return ConvertedRows(rows, dtype, self.p.dtype) if name == "do" and dtype != self.p.dtype else rows

  def query_value_rows(self, name:str, head:UOp) -> GlobalRows:
    """Returns tensor `name`, which has one fp32 number (such as lse) for each query, as rows of one number."""
    first = place_of_row(self.p, self.sequence, Row(self.batch, head, UOp.const(0), UOp.const(True)))[0]
    return GlobalRows(flat(self.given[name]), first, 1, self.sequence.n_q, 1, 4, isinstance(self.sequence.n_q, UOp))

  def query_value(self, name:str, row:Row) -> UOp:
    """Loads the number of query `row` from tensor `name`, such as its lse: 0 if the query does not exist."""
    rows = self.query_value_rows(name, row.head)
    return rows.buffer[(rows.base + row.index).valid(row.there)].load()

  # ***** O and LSE *****
  @property
  def out_dtype(self) -> str:
    """Dtype in which O is stored."""
    # fp32 if the keys are divided into parts, because this O is then a partial result
    return "float32" if self.split else self.p.out_dtype

  def normalised(self, row:Row, m:UOp, totals:list[UOp]) -> tuple[UOp, LogSum]:
    """Returns (factor 1/l by which the row's O is multiplied, LSE of the row), made from m and the row's sums of P."""
    # `m` is the number that the softmax subtracts from the row's scores. `totals` has one or two sums of P over the row. O is divided by the first
    # one, the sum of P after rounding. The LSE is computed from the last one.
    sink = flat(self.given["sinks"])[row.head].load() if "sinks" in self.given else None
    factor, log_sum = finish(m, totals, self.scores, sink)
    if (of_v := self.input_scale("v_scale")) is not None: factor = ops.mul(factor, of_v)
    return (ops.mul(factor, 1/self.p.kept) if self.p.dropout_p else factor), log_sum

  def outputs(self, row:Row, o:list[tuple[UOp, UOp]], log_sum:LogSum|None) -> list[UOp]:
    """Returns the stores of this lane's elements of a row of O, and of the row's LSE. `o` lists pairs (first column, values from this column on)."""
    p, to = self.p, flat(self.given["o_partial" if self.split else "o"])
    number, begin = place_of_row(p, self.sequence, row, *self.split)
    stores = []
    for to_rows, x in zip((self.lse, self.lse_rest), (log_sum.rounded, log_sum.rest) if log_sum is not None else ()):
      if to_rows is not None: stores.append(flat(to_rows)[number.valid(self.scores.at.h.eq(0) & row.there)].store(x))
    for column, values in o:
      stores += store_row(self.arch, to, self.out_dtype, p.Dv, begin, column, values, row.there)
    return stores

  def cleared(self) -> list[UOp]:
    """Returns the stores that this workgroup makes to rows of the outputs that belong to no sequence: 0 in o, -inf in lse."""
    blocks, threads = (self.grid.block, math.prod(blocks_of_queries(self.p, self.tile))), (self.thread, self.tile.threads)
    heads = [self.first_head + i for i in range(self.heads)]
    return clear_outside(self.p, self.arch, self.sequence, self.given, self.batch, heads, blocks, threads, self.grid.allocator, *self.split)

  def kernel(self, kind:str, outputs:list[UOp], dynamic_shared:int=0) -> UOp:
    """Returns the finished forward kernel, which ends with the stores `outputs`. `kind` is a part of the kernel's name."""
    tile, p = self.tile, self.p
    name = f"attn_{kind}_{self.arch.name}_{p.dtype}_{tile.block_m}x{tile.block_n}_{p.D}" + f"_split{p.num_splits}"*len(self.split)
    # bytes of shared memory on NVIDIA, 0 on other chips: a size that is too large for static shared memory becomes a part of the name
    if dynamic_shared: name = dynamic_shared_name(name, dynamic_shared)
    return self.named(name, [*outputs, *self.cleared()])

  # ***** gradients *****
  def first_sums(self, head:UOp) -> UOp:
    """Returns the index of the first tile of dQ sums in global memory that belongs to the workgroup's sequence and to query head `head`."""
    # the accumulator is `tensors.dq_sums`
    p, tiles = self.p, dq_sums(self.p)[0][1]
    if not p.varlen: return (self.batch*p.H + head)*tiles
    return head*tiles + self.sequence.q_start//QUERIES_OF_SUMS + self.batch

  @property
  def has_sums(self) -> UOp:
    """Whether memory has dQ sums for the queries that the workgroup owns: false beyond the end of a short sequence."""
    # in the grid, each packed sequence has as many workgroups as the longest one; a shorter sequence has fewer tiles
    return below(self.first_row, self.sequence.n_q) if self.p.varlen else UOp.const(True)

  def gradient(self, name:str, row:Row, columns:list[tuple[UOp, UOp]]) -> list[UOp]:
    """Returns the stores of this lane's elements of a row of the gradient `name`. `columns` lists pairs (first column, values from this column
    on)."""
    to = self.rows_of(name)
    begin = self.in_part(name) + to.start(UOp.const(0), row.index)
    return [x for column, values in columns for x in self.store_gradient(to, begin, column, values, row.there)]

  def in_part(self, name:str) -> UOp|int:
    """Returns the index, in the flat tensor of the gradient `name`, of the first element of this workgroup's partial sum."""
    return 0 if self.part is None else self.part*(math.prod(self.given[name].shape[1:]))

  def store_gradient(self, to:GlobalRows, begin:UOp, column:UOp, values:UOp, there:UOp) -> list[UOp]:
    return store_row(self.arch, to.buffer, self.p.dtype if self.part is None else "float32", to.width, begin, column, values, there)

  def gradient_kernel(self, kind:str, names:tuple[str, ...], outputs:list[UOp], count:int, dynamic_shared:int=0) -> UOp:
    """Returns the finished backward kernel, which stores `outputs`, and zeros to rows of the gradients `names` that belong to no sequence."""
    # `count` is the kernel's number of floating-point operations
    tile, p = self.tile, self.p
    nbytes = sum(math.prod(x.shape)*x.dtype.itemsize for x in self.given.values())
    name = f"attn_{kind}_{self.arch.name}_{p.dtype}_{tile.block_m}x{tile.block_n}_{p.D}"
    # as in `kernel`
    if dynamic_shared: name = dynamic_shared_name(name, dynamic_shared)
    return self.named(name, [*outputs, *self.cleared_gradients(names)], Estimates(ops=count, lds=nbytes, mem=nbytes))

  @property
  def is_first_part(self) -> UOp:
    """Whether this workgroup computes the first part of a sum that several workgroups divide among them."""
    # results that all parts compute equally, such as delta, are stored by the first part only
    return UOp.const(True) if self.part is None else self.part.eq(0)

  def cleared_gradients(self, names:tuple[str, ...]) -> list[UOp]:
    if not self.p.varlen or not names: return []
    p, of_keys = self.p, names[0] in KEY_TENSORS
    block = (self.grid.block, ceildiv(p.Sk if of_keys else p.Sq, self.tile.block_m))
    def stores(row:UOp, column:UOp, there:UOp) -> list[UOp]:
      found = []
      for name in names:
        if name == "delta":
          there = there & self.is_first_part
          number = place_of_row(p, replace(self.sequence, q_start=0), Row(self.batch, self.first_head, row, there))[0]
          found.append(flat(self.given[name])[number.valid(there & column.eq(0))].store(UOp.const(0.0, dtypes.float)))
        else:
          to = self.rows_of(name)
          head = (self.kv_head if of_keys else self.first_head)*to.width
          found += self.store_gradient(to, self.in_part(name) + row*to.stride + head, column, ops.splat(0.0, vec), there)
      return found
    vec = math.gcd(p.D, p.Dv, 4) if of_keys else math.gcd(p.D, 4)
    columns = (max(p.D, p.Dv) if of_keys else p.D)//vec
    rows = outside(p, self.sequence, self.batch, self.given, of_keys)
    return clear_rows(rows, columns, vec, block, (self.thread, self.tile.threads), self.grid.allocator, stores)

  def named(self, name:str, outputs:list[UOp], counted:Estimates|None=None) -> UOp:
    info = KernelInfo(name, opts_to_apply=(), estimates=counted or estimates(self.p))
    return UOp.group(*outputs).end(*self.grid.ranges, *self.split).sink(arg=info, tag=OPTIMISED)
