"""Lists of the tiles in which a mask_mod leaves scores, for masks that leave a query more than one interval of keys. Two small kernels make the
lists."""
from __future__ import annotations
import functools, math, operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from attn.functions.spans import LEAST_INT, MOST_INT, ORDERED, Extremes, larger_of, one_sided_expressions, smaller_of, span_of
from attn.functions.symbols import BATCH, KEY, QUERY_HEAD, depends, elements_of, number_of_tensor
from attn.kernels.parts.grid.workgroup import by_name, in_order_of_start
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import OF_A_LIST, extent, list_length, over_keys, over_queries
from attn.kernels.parts.program.counts import bounded, ceildiv, left_alone
from attn.kernels.parts.weights.epilogue import OPTIMISED
from attn.ops import common as ops
from attn.ops.common import flat
from attn.ops.plain import plain
from attn.problem import Problem, Shapes
from attn.score.lifted import Lifted
from attn.score.masks import first_seen, last_seen, seen_each
from attn.score.places import Walk
from attn.score.term import NATURAL, Fragment, Row
from attn.tinygrad_compat import AxisType, DType, Estimates, KernelInfo, UOp, dtypes
from attn.values import cache_of_kernels


# A workgroup of attention owns a block of rows (queries or keys) and loops over tiles of columns (keys or queries). There is a list for each block.
#
# 1. `seen_in_tiles` makes a table: which tiles of queries and keys have visible and hidden scores. It looks at the expressions in the mask that
# depend on the query alone or on the key alone, such as i//64 and tokens[j] in the mask i//64 == tokens[j]. The kernel finds the lowest and the
# highest value of each of these expressions, in a block of queries and in each tile of keys. For most tiles these extremes already prove that the
# mask hides all of their scores, or none of them (attn/functions/spans.py). For the other tiles the kernel evaluates the mask for each score, as the
# kernels of attention do.
#
# 2. `tiles_in_order` puts the tiles of each block in order (`TileList`). If the mask hides all scores of a tile, the tile is not in the list. Lists
# over keys and lists over queries come from tables of the same form, so several kernels of attention can share one table.

THREADS_OF_A_LIST = 64
THREADS_OF_A_TILE = 4      # threads that look for the extremes of a tile together
TILES_TOGETHER = THREADS_OF_A_LIST//THREADS_OF_A_TILE      # tiles of a workgroup that says what a mask leaves of tiles
BANKED = THREADS_OF_A_LIST + 1      # numbers in LDS that belong to a tile: threads of other tiles read them in other banks
OF_A_STEP = 4              # rows, columns or tiles of one iteration of a thread
# bits of an entry of the table: of the scores that exist some are seen, some are hidden; some queries, some keys of the tile do not exist
SEEN, HIDDEN, NO_QUERY, NO_KEY = 1, 2, 4, 8
NOTHING_SEEN = UOp.const(0), UOp.const(-1)     # a row's first and last column

@dataclass(frozen=True)
class SeenTiles:
  """Table with an entry for each tile of `queries` queries by `keys` keys: whether the mask hides none, some or all of the tile's scores."""
  p: Problem
  queries: int
  keys: int
  batches: int     # batches that have tables of their own; 1 if the mask is the same for all batches
  heads: int       # query heads that have tables of their own; 1 if the mask is the same for all heads
  checked: bool    # whether the emulator checks indices of the tensors that the mask reads
  @property
  def shape(self) -> tuple[int, int, int]:
    """Shape of the table: (batches and heads, blocks of queries, tiles of keys)."""
    return self.batches*self.heads, ceildiv(self.p.Sq, self.queries), ceildiv(self.p.Sk, self.keys)
  @property
  def read(self) -> tuple[str, ...]:
    """Names of the tensors that the kernel reads to make the table, e.g. the mask's tensors and "kv_lengths"."""
    # those that the mask reads, those that say which queries and keys exist, and the one that says which batches and heads a device has
    mask = self.p.mask_mod
    assert mask is not None
    others = ["kv_lengths", "kv_starts", "cu_seqlens_q", "cu_seqlens_k"]
    if any(depends(mask.value, symbol) for symbol in (BATCH, QUERY_HEAD)): others.append("first_batch_and_head")
    return (*(f"mod_tensor{number_of_tensor(u)}" for u in elements_of(mask.value)), *(name for name in others if name in self.p.extras))

@dataclass(frozen=True)
class ListedBlocks:
  """Shape of the lists of tiles that a mask needs. A block of `block_m` rows of scores has one list: the tiles of `block_n` columns with visible
  scores."""
  p: Problem
  over: str                  # "keys": columns are keys and rows are queries; "queries": the other way round
  block_m: int
  block_n: int
  batches: int               # batches that have lists of their own; 1 if the mask is the same for all batches
  heads: tuple[int, int]     # (heads that have lists of their own, query heads that share a list); (1, 1) if the mask is the same for all heads
  checked: bool              # whether the emulator checks indices of the tensors that the mask reads
  # whether a list also says when the block has its turn (attn/kernels/parts/backward/turns.py): for each of the list's tiles, how many blocks that
  # start before this block have the tile in their lists
  with_turns: bool = False
  # queries and keys of a tile of the table from which the lists are made; both divide the sizes of blocks and tiles. None: as large as these
  of_table: tuple[int, int]|None = None
  @property
  def rows(self) -> int: return self.p.Sq if self.over == "keys" else self.p.Sk
  @property
  def columns(self) -> int: return self.p.Sk if self.over == "keys" else self.p.Sq
  @property
  def blocks(self) -> int: return ceildiv(self.rows, self.block_m)
  @property
  def tiles(self) -> int: return ceildiv(self.columns, self.block_n)
  @property
  def lists(self) -> int: return self.batches*self.heads[0]
  @property
  def sizes(self) -> tuple[int, int]:
    """Returns (queries, keys) that a tile of the list has."""
    return (self.block_m, self.block_n) if self.over == "keys" else (self.block_n, self.block_m)
  @property
  def table(self) -> SeenTiles: return SeenTiles(self.p, *(self.of_table or self.sizes), self.batches, math.prod(self.heads), self.checked)
  @property
  def read(self) -> tuple[str, ...]: return self.table.read
  @property
  def shape(self) -> tuple[int, int, int, int]:
    """Shape of the tensor with all lists: (batches, heads, blocks, entries of a list)."""
    return self.batches, self.heads[0], self.blocks, list_length(self.tiles, self.with_turns)

def sharing_a_table(x:ListedBlocks, y:ListedBlocks) -> tuple[ListedBlocks, ListedBlocks]:
  """Returns copies of `x` and `y` with tiles of a common size, so that one table of tiles serves both."""
  sizes = math.gcd(x.sizes[0], y.sizes[0]), math.gcd(x.sizes[1], y.sizes[1])
  return replace(x, of_table=sizes), replace(y, of_table=sizes)

IN_TILES = "in_tiles"      # name of the table
def table_arguments(x:SeenTiles) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors of the kernel that makes the table, first the table itself."""
  return {IN_TILES: (x.shape, "uint8")} | {name: of for name, of in x.p.extras.items() if name in x.read}
def list_arguments(x:ListedBlocks) -> Shapes:
  """Returns {name: (shape, dtype)} of the tensors of the kernel that makes lists from a table, first the lists."""
  return {"tile_list": (x.shape, "int32"), IN_TILES: (x.table.shape, "uint8")}

# ***** items of work *****

@dataclass(frozen=True)
class Items:
  """Division of items (such as tiles) over workgroups and threads, in a kernel that makes lists of tiles."""
  # either each thread computes an item alone, or all threads of a workgroup compute an item together
  new: Allocator
  ranges: tuple[UOp, ...]
  @property
  def thread(self) -> UOp: return self.ranges[-1]
  @staticmethod
  def of_workgroups(*sizes:int) -> tuple[Items, tuple[UOp, ...]]:
    """Divides prod(`sizes`) items, one for each workgroup; returns (the `Items`, the workgroup's index along each of `sizes`)."""
    new = Allocator()
    outer = tuple(new.range(n, AxisType.GLOBAL) for n in sizes)
    return Items(new, (*outer, new.range(THREADS_OF_A_LIST, AxisType.LOCAL))), outer
  @staticmethod
  def of_threads(*sizes:int) -> tuple[Items, UOp, list[UOp]]:
    """Divides prod(`sizes`) items, one for each thread; returns (the `Items`, whether the thread has an item, its index along each of `sizes`)."""
    # a workgroup's threads take neighbouring items along the last of `sizes`
    items, outer = Items.of_workgroups(*sizes[:-1], ceildiv(sizes[-1], THREADS_OF_A_LIST))
    index = outer[-1]*THREADS_OF_A_LIST + items.thread
    return items, left_alone(index < sizes[-1]), [*outer[:-1], index.minimum(sizes[-1] - 1)]
  def totals(self, count:int|UOp, begin:list[UOp], work:Callable[[list[UOp], UOp], list[UOp]], *outer:UOp) -> list[UOp]:
    """Loops `count` times over `results = work(results, i)`, where `begin` are the first `results`; returns the last `results`."""
    # `begin` are the results before the first iteration; `outer` are the ranges of the loops around this loop
    if isinstance(count, int) and count == 1: return work(begin, UOp.const(0))      # tinygrad would lose what a loop of one iteration begins with
    registers = [self.new.registers(1, x.dtype) for x in begin]
    begun = [r.after(*self.ranges, *outer)[0].store(x) for r, x in zip(registers, begin)]
    i = self.new.range(count, AxisType.LOOP)
    now = [r.after(*begun, i) for r in registers]
    results = work([r[0].load() for r in now], i)
    end = UOp.group(*[r[0].store(x) for r, x in zip(now, results)]).end(i)
    return [r.after(end)[0].load() for r in registers]
  def kernel(self, name:str, stores:list[UOp], operations:int) -> UOp:
    """Returns the kernel named `name`, which ends with the operations `stores`."""
    # `operations` is an upper estimate: tinygrad needs the number, and cannot estimate loops whose length a kernel loads from memory
    info = KernelInfo(name, opts_to_apply=(), estimates=Estimates(ops=operations, lds=operations, mem=operations))
    return UOp.group(*stores).end(*self.ranges).sink(arg=info, tag=OPTIMISED)

def int32(n:int) -> UOp: return UOp.const(n, dtypes.int)

# ***** extremes of the one-sided expressions of a mask *****

LOW_END, HIGH_END = 0, 1

@dataclass(frozen=True)
class Side:
  """The expressions in a mask function whose values depend only on the query, or only on the key, e.g. segment[query]."""
  expressions: tuple[UOp, ...]
  over: str   # what the rows or columns are: "keys" or "queries"
  size: int   # rows of a block, or columns of a tile

def sides_of(x:SeenTiles) -> tuple[Side, Side]:
  """Returns two parts of the mask function: (expressions that depend only on the query, those that depend only on the key)."""
  mask = x.p.mask_mod
  assert mask is not None
  both = one_sided_expressions(mask.value)
  of_keys = tuple(u for u in both if depends(u, KEY))
  return Side(tuple(u for u in both if u not in of_keys), "queries", x.queries), Side(of_keys, "keys", x.keys)

def extreme_of_all(dtype:DType, which:int) -> UOp:
  """Returns the largest number of a dtype if `which` is HIGH_END, or its smallest if LOW_END."""
  if dtype == dtypes.float: return UOp.const(math.inf if which == HIGH_END else -math.inf, dtype)
  return UOp.const(MOST_INT if which == HIGH_END else LEAST_INT, dtype)

def extended(extremes:list[UOp], value:UOp, there:UOp) -> list[UOp]:
  """Returns [smallest, largest] of all numbers seen: `extremes` is [smallest, largest] so far, and `value` counts if `there` is true."""
  # a NaN counts as both -inf and inf
  low, high = value, value
  if value.dtype == dtypes.float: low, high = (value.ne(value).where(extreme_of_all(value.dtype, which), value) for which in (LOW_END, HIGH_END))
  return [(there & (low < extremes[LOW_END])).where(low, extremes[LOW_END]), (there & (extremes[HIGH_END] < high)).where(high, extremes[HIGH_END])]

# ***** what a mask leaves of a tile *****

@dataclass(frozen=True)
class TilesTogether:
  """What one workgroup examines: a block of queries with TILES_TOGETHER neighbouring tiles of keys, to find the tiles in which the mask hides
  scores."""
  # THREADS_OF_A_TILE neighbouring threads belong to each tile
  x: SeenTiles
  items: Items
  given: Mapping[str, UOp]
  of_table: UOp  # index of the table among those of all batches and heads
  block: UOp     # index of the block of queries
  group: UOp     # index of the tiles, counted in groups of TILES_TOGETHER
  @property
  def all_tiles(self) -> int: return self.x.shape[-1]
  @property
  def batch(self) -> UOp: return self.of_table//self.x.heads
  @property
  def head(self) -> UOp: return self.of_table%self.x.heads
  @property
  def tiles(self) -> int: return min(self.all_tiles, TILES_TOGETHER)
  @property
  def own(self) -> UOp:
    """Index of this thread's tile among the tiles of the workgroup."""
    return self.items.thread//THREADS_OF_A_TILE
  @property
  def leads(self) -> UOp: return (self.items.thread%THREADS_OF_A_TILE).eq(0)
  @property
  def there(self) -> UOp:
    """Whether the thread's tile exists: the last workgroup of a block may have fewer tiles."""
    return self.group*TILES_TOGETHER + self.own < self.all_tiles
  def tile(self, n:UOp) -> UOp:
    """Returns the index, among all tiles of the block of queries, of the workgroup's n-th tile, or of the last tile if there are fewer."""
    return (self.group*TILES_TOGETHER + n).minimum(self.all_tiles - 1)
  def walk(self, over:str) -> Walk:
    return (over_keys if over == "keys" else over_queries)(self.x.p, extent(self.x.p, self.batch, self.given))
  def with_missing(self, left:UOp) -> UOp:
    """Returns the table's entry for this thread's tile: the bits `left` (SEEN, HIDDEN), and NO_QUERY or NO_KEY if queries or keys are missing."""
    # if none of the scores exist, the bits `left` are not used
    exist, missing = UOp.const(True), int32(0)
    for over, n, size, flag in (("queries", self.block, self.x.queries, NO_QUERY), ("keys", self.tile(self.own), self.x.keys, NO_KEY)):
      count = self.walk(over).count
      exist, missing = exist & (n*size < count), missing | ((n + 1)*size > count).where(int32(flag), int32(0))
    return exist.where(left, int32(0)) | missing

  # ***** extremes *****
  def extremes(self, side:Side, n:UOp, threads:int) -> dict[UOp, Extremes]:
    """Returns {expression: (smallest, largest value)} for the expressions in `side`, over the queries of block `n` or the keys of tile `n`."""
    # `threads` neighbouring threads look for them together, and each of these threads gets them
    kinds = [ORDERED.get(u.dtype, dtypes.int) for u in side.expressions for _ in (LOW_END, HIGH_END)]
    if not kinds: return {}
    begin, width = [extreme_of_all(kind, 1 - place % 2) for place, kind in enumerate(kinds)], math.gcd(side.size, OF_A_STEP)
    items = side.size//width
    mine = self.items.totals(ceildiv(items, threads), begin, functools.partial(self.evaluated, side, n, width, threads))
    shared = [self.items.new.lds(THREADS_OF_A_LIST, kind) for kind in kinds]
    stored = UOp.group(*[to[self.items.thread].store(x) for to, x in zip(shared, mine)])
    first, together = self.items.thread//threads*threads, [to.after(stored) for to in shared]
    def joined(now:list[UOp], i:UOp) -> list[UOp]:
      for n in range(OF_A_STEP):
        others = [x[first + i*OF_A_STEP + n].load() for x in together]
        now = [smaller_of(y, x) if place % 2 == LOW_END else larger_of(x, y) for place, (x, y) in enumerate(zip(now, others))]
      return now
    found, walk = self.items.totals(ceildiv(min(threads, items), OF_A_STEP), begin, joined), self.walk(side.over)
    if isinstance(walk.count, UOp):     # a block or tile beyond its sequence has no extremes: 0 in their place, with which sums do not overflow
      found = [(n*side.size < walk.count).where(extreme, UOp.const(0, extreme.dtype)) for extreme in found]
    def of_expression(u:UOp, low:UOp, high:UOp) -> Extremes:
      return Extremes(low, high) if u.dtype in ORDERED else Extremes(low.ne(0), high.ne(0))      # conditions were compared as integers
    return {u: of_expression(u, *found[2*nth:2*nth + 2]) for nth, u in enumerate(side.expressions)}
  def evaluated(self, side:Side, n:UOp, width:int, threads:int, now:list[UOp], i:UOp) -> list[UOp]:
    """Returns `now`, the smallest and the largest value so far of each expression in `side`, updated with the values of loop iteration i."""
    # this thread evaluates the expressions for `width` neighbouring rows or columns
    pieces, walk = side.size//width, self.walk(side.over)
    piece = n*pieces + (i*threads + self.items.thread%threads).minimum(pieces - 1)
    of = Row(self.batch, self.head, UOp.const(0), UOp.const(True))
    at = Fragment(self.x.p, self.given, of, of, walk, piece, width, UOp.const(0), width, [tuple(range(width))], width, NATURAL, NOTHING_SEEN)
    lifted, found = Lifted(at, "mask_mod"), list[UOp]()
    for nth, u in enumerate(side.expressions):
      pair = now[2*nth:2*nth + 2]
      for column, value in enumerate(lifted.each(u)[0]): pair = extended(pair, value.cast(pair[0].dtype), piece*width + column < walk.count)
      found += pair
    return found

  # ***** scores *****
  def interval(self, query:UOp, tile:UOp) -> tuple[UOp, UOp]:
    """Returns (first, last) key that a query sees, counted from the first key of the tile `tile`."""
    walk, before = self.walk("keys"), tile*self.x.keys
    first = first_seen(walk, query)
    return (UOp.const(0) if first is None else first - before), last_seen(walk, query) - before
  def by_extremes(self) -> UOp:
    """Returns SEEN if the mask hides no score of this thread's tile, HIDDEN if it hides all, or 0 if the least and largest values of its expressions
    do not decide."""
    x, tile, (of_queries, of_keys) = self.x, self.tile(self.own), sides_of(self.x)
    extremes = self.extremes(of_queries, self.block, THREADS_OF_A_LIST) | self.extremes(of_keys, tile, THREADS_OF_A_TILE)
    rows = self.block*x.queries, (self.block*x.queries + (x.queries - 1)).minimum(x.p.Sq - 1)
    (begin, first_end), (last_begin, end) = (self.interval(row, tile) for row in rows)      # neither end decreases from one query to the next
    assert x.p.mask_mod is not None
    always, possibly = span_of(x.p.mask_mod.value, extremes.__getitem__)
    # HIDDEN for a tile that does not exist
    hidden = self.there.logical_not() | (begin >= x.keys) | (end < 0) | possibly.logical_not()
    seen = (last_begin <= 0) & (first_end >= x.keys - 1) & always
    return hidden.where(int32(HIDDEN), seen.where(int32(SEEN), int32(0)))
  def looked(self, tile:UOp, now:list[UOp], i:UOp) -> list[UOp]:
    """Returns now[0], the bits SEEN (some score is visible) and HIDDEN (some score is hidden), updated with the scores that loop iteration i
    evaluates."""
    # this thread evaluates the mask for a few neighbouring scores of one query
    x, index, width = self.x, i*THREADS_OF_A_LIST + self.items.thread, math.gcd(self.x.keys, OF_A_STEP)
    pieces, walk = x.keys//width, self.walk("keys")
    query, piece = self.block*x.queries + index%x.queries, (index//x.queries).minimum(pieces - 1)
    of = Row(self.batch, self.head, query.minimum(x.p.Sq - 1), query < self.walk("queries").count)
    first, last = (end - piece*width for end in self.interval(of.index, tile))
    piece = tile*pieces + piece
    at = Fragment(x.p, self.given, of, of, walk, piece, width, UOp.const(0), width, [tuple(range(width))], width, NATURAL, (first, last))
    conditions, = seen_each(at) or [[UOp.const(True)]*width]
    def bit(n:int, c:UOp) -> UOp:
      exists = piece*width + n < walk.count
      return (c & (last >= n) & (first <= n)).where(int32(SEEN), exists.where(int32(HIDDEN), int32(0)))
    return [now[0] | of.there.where(functools.reduce(operator.or_, map(bit, range(width), conditions)), int32(0))]
  def by_scores(self, known:UOp) -> UOp:
    """Evaluates the mask for every score of this thread's tile if `known` is 0; returns the bits SEEN (some score is visible) and HIDDEN (some score
    is hidden)."""
    # `known` is the result of `by_extremes`. If it is 0, all threads evaluate the mask for the scores of the tile; if not, the returned number is not
    # defined.
    new, thread, of_tiles = self.items.new, self.items.thread, self.items.new.lds(THREADS_OF_A_LIST, dtypes.int)
    told = of_tiles[thread].store(known)
    def count(now:list[UOp], i:UOp) -> list[UOp]:
      # counts the tiles that are to be evaluated, and those of them that come before this thread's tile
      wanted = of_tiles.after(told)[i*THREADS_OF_A_TILE].load().eq(0)
      return [n + c.where(int32(1), int32(0)) for n, c in zip(now, (wanted, wanted & (i < self.own)))]
    wanted, before = self.items.totals(self.tiles, [int32(0), int32(0)], count)
    wanted, before = bounded(ops.uniform(wanted), 0, self.tiles).simplify(), bounded(before, 0, self.tiles - 1).simplify()
    order, bits = new.lds(TILES_TOGETHER, dtypes.int), new.lds(TILES_TOGETHER*BANKED, dtypes.int)
    listed = order[before.valid(left_alone(known.eq(0) & self.leads))].store(self.own.cast(dtypes.int))
    n = new.range(wanted, AxisType.LOOP)
    tile = self.tile(bounded(ops.uniform(order.after(listed)[n].load()), 0, self.tiles - 1))
    trips = ceildiv(self.x.queries*self.x.keys, math.gcd(self.x.keys, OF_A_STEP)*THREADS_OF_A_LIST)
    mine = self.items.totals(trips, [int32(0)], functools.partial(self.looked, tile), n)[0]
    stored = bits[n*BANKED + thread].store(mine).end(n)
    def joined(now:list[UOp], i:UOp) -> list[UOp]:
      first = before.minimum((wanted - 1).maximum(0))*BANKED + i*OF_A_STEP
      return [functools.reduce(operator.or_, [bits.after(stored)[first + other].load() for other in range(OF_A_STEP)], now[0])]
    return self.items.totals(wanted.minimum(1)*(THREADS_OF_A_LIST//OF_A_STEP), [int32(0)], joined)[0]

@cache_of_kernels
def seen_in_tiles(x:SeenTiles) -> Callable[..., UOp]:
  """Returns the kernel that writes for each tile of the table whether the mask leaves some scores visible, and whether it hides some."""
  def kernel(*args:UOp) -> UOp:
    given, (tables, blocks, tiles) = by_name(table_arguments(x), args), x.shape
    items, (of_table, block, group) = Items.of_workgroups(tables, blocks, ceildiv(tiles, TILES_TOGETHER))
    here = TilesTogether(x, items, given, of_table, block, group)
    # Simplified here, as other numbers on which counts of iterations depend: `Allocator.range` simplifies a count, and would make a simplified copy
    # of the stores that the count depends on, beside the stores themselves.
    known = here.by_extremes().simplify()
    found = here.with_missing(known.eq(0).where(here.by_scores(known), known))
    there = left_alone(here.leads & here.there)
    to = flat(given[IN_TILES])[((of_table*blocks + block)*tiles + here.tile(here.own)).valid(there)]
    name, pairs = f"attn_tiles_seen_{x.queries}x{x.keys}", tables*x.p.Sq*x.p.Sk
    return plain(items.kernel(name, [to.store(found.cast(dtypes.uchar))], pairs), x.checked)
  return kernel

# ***** the order of tiles *****

def entry_of_table(x:ListedBlocks, table:UOp, of_list:UOp, block:UOp, tile:UOp) -> UOp:
  """Returns the bitwise or of the entries in `table` for all small tiles of which tile number `tile` of block number `block` consists."""
  (queries, keys), (_, blocks, tiles) = (x.of_table or x.sizes), x.table.shape
  row, column = (block, tile) if x.over == "keys" else (tile, block)
  def places(first:UOp, size:int, part:int, count:int) -> list[UOp]: return [(first*(size//part) + n).minimum(count - 1) for n in range(size//part)]
  entries = [((of_list*x.heads[1] + head)*blocks + i)*tiles + j for head in range(x.heads[1])
             for i in places(row, x.sizes[0], queries, blocks) for j in places(column, x.sizes[1], keys, tiles)]
  return functools.reduce(operator.or_, [table[i].load().cast(dtypes.int) for i in entries])

@cache_of_kernels
def tiles_in_order(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that writes, for each block of rows, the list of tiles in which the mask leaves visible scores."""
  # There is one thread for each tile of a block. The thread counts the tiles that come before its tile: the count is the tile's position in the list.
  # Unused entries at the end of a list get the number of all tiles. If lists have turns, the thread also counts the blocks that start before its
  # block and have the tile in their lists.
  some_hidden, none_hidden = (1, 0) if x.with_turns else (0, 1)      # numbers of groups of tiles, in their order
  def kernel(tile_list:UOp, in_tiles:UOp) -> UOp:
    items, there, (of_list, block, tile) = Items.of_threads(x.lists, x.blocks, x.tiles)
    def group(t:UOp, block:UOp=block) -> UOp:
      # the group of tile t of a block: whether the mask hides some of its scores, none, or all (2)
      bits = entry_of_table(x, flat(in_tiles), of_list, block, t)
      hidden = (bits & (HIDDEN | (NO_KEY if x.over == "keys" else NO_QUERY))).ne(0)
      if x.columns % x.block_n: hidden = hidden | t.eq(x.tiles - 1)
      return (bits & SEEN).eq(0).where(int32(2), hidden.where(int32(some_hidden), int32(none_hidden)))
    def number(t:UOp) -> UOp:
      # the number of tile t in the order in which a group is sorted: with turns, opposite to the order in which blocks start
      return (x.tiles - 1) - in_order_of_start(x.p, t, x.tiles) if x.with_turns else t
    mine, own = group(tile), number(tile)
    def work(now:list[UOp], i:UOp) -> list[UOp]:
      # counts the tiles that come before this thread's tile, those of the first group, and those in the list; `now` has the counts so far
      for n in range(OF_A_STEP):
        t = i*OF_A_STEP + n
        other = (t < x.tiles).where(group(t.minimum(x.tiles - 1)), int32(3))
        conditions = (other < mine) | (other.eq(mine) & (number(t) < own)), other < 1, other < 2
        now = [count + c.where(int32(1), int32(0)) for count, c in zip(now, conditions)]
      return now
    def turn() -> UOp:
      # how many blocks start before this block and have this thread's tile in their lists
      started = functools.partial(in_order_of_start, x.p, blocks=x.blocks)
      def earlier(b:UOp) -> UOp:
        listed = group(tile, b.minimum(x.blocks - 1)) < 2
        return ((b < x.blocks) & (started(b) < started(block)) & listed).where(int32(1), int32(0))
      def work(now:list[UOp], i:UOp) -> list[UOp]: return [sum((earlier(i*OF_A_STEP + n) for n in range(OF_A_STEP)), now[0])]
      return items.totals(ceildiv(x.blocks, OF_A_STEP), [int32(0)], work)[0]
    before, in_first, seen = items.totals(ceildiv(x.tiles, OF_A_STEP), [int32(0)]*3, work)
    to, begin, once = flat(tile_list), (of_list*x.blocks + block)*x.shape[-1], there & tile.eq(0)
    place = before.cast(dtypes.weakint).maximum(0).minimum(x.tiles - 1)
    last = int32(x.tiles)
    stores = [to[(begin + OF_A_LIST + place).valid(there)].store((mine < 2).where(tile.cast(dtypes.int), last)),
              to[(begin + OF_A_LIST + x.tiles).valid(once)].store(last),
              *[to[(begin + i).valid(once)].store(n) for i, n in enumerate((in_first, seen))]]
    if x.with_turns: stores.append(to[(begin + list_length(x.tiles) + place).valid(there)].store(turn()))
    return items.kernel(f"attn_tiles_listed_{x.over}_{x.tiles}", stores, x.lists*x.blocks*x.tiles*x.tiles)
  return kernel
