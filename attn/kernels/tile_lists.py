"""Lists of the tiles in which a mask_mod leaves scores, for masks that leave a query more than one interval of keys.

A workgroup of attention owns a block of rows (queries or keys) and loops over tiles of columns (keys or queries). Three small kernels make the list
of tiles for each block.

1. `extremes_of_expressions` looks at the expressions in the mask that depend on the row alone or on the column alone, such as i//64 and tokens[j] in
the mask i//64 == tokens[j]. The kernel finds the lowest and the highest value of each of these expressions, in each block of rows and in each tile of
columns.

2. `seen_in_tiles` says which tiles have visible and hidden scores. For most tiles the extremes already prove that the mask hides all of their scores,
or none of them (attn/functions/spans.py). For the other tiles the kernel evaluates the mask for each score, as the kernels of attention do.

3. `tiles_in_order` puts the tiles of each block in order. Tiles of which the mask hides some scores come first, and then the tiles of which it hides
none. If the mask hides all scores of a tile, the tile is not in the list."""
from __future__ import annotations
import functools, math, operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from attn.functions.spans import LEAST_INT, MOST_INT, ORDERED, Extremes, one_sided_expressions, span_of
from attn.functions.symbols import BATCH, KEY, QUERY, QUERY_HEAD, depends, elements_of, number_of_tensor
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

THREADS_OF_A_LIST = 64
OF_A_STEP = 4              # columns of a row, or tiles, of one iteration
# rows of a block, or columns of a tile, of one iteration that looks for extremes. With 32 a kernel runs as long, and takes 0.4 s more to compile
OF_A_SIDE = 16
SEEN, HIDDEN = 1, 2        # bits of what a mask leaves of a tile: some scores are seen, some are hidden
NOTHING_SEEN = UOp.const(0), UOp.const(-1)     # a row's first and last column

@dataclass(frozen=True)
class ListedBlocks:
  """Describes the lists of tiles that are made: one list for each block of `block_m` rows, with tiles of `block_n` columns. If `over` is "keys",
  columns are keys and rows are queries; if it is "queries", the other way round.

    heads: (number of heads that have lists of their own, number of query heads that share a list); (1, 1) if the mask is the same for all heads
    batches: number of batches that have lists of their own; 1 if the mask is the same for all batches
    checked: whether the emulator checks indices of the tensors that the mask reads
    with_turns: whether a list also says when the block has its turn (attn/kernels/parts/backward/turns.py): for each of the list's tiles, how many
      blocks that start before this block have the tile in their lists"""
  p: Problem
  over: str
  block_m: int
  block_n: int
  batches: int
  heads: tuple[int, int]
  checked: bool
  with_turns: bool = False
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
  def read(self) -> tuple[str, ...]:
    """Names of the tensors on which the lists depend: those that the mask reads, those that say which queries and keys exist, and the one that says
    which batches and heads a device has."""
    mask = self.p.mask_mod
    assert mask is not None
    others = ["kv_lengths", "kv_starts", "cu_seqlens_q", "cu_seqlens_k"]
    if any(depends(mask.value, symbol) for symbol in (BATCH, QUERY_HEAD)): others.append("first_batch_and_head")
    return (*(f"mod_tensor{number_of_tensor(u)}" for u in elements_of(mask.value)), *(name for name in others if name in self.p.extras))
  @property
  def shape(self) -> tuple[int, int, int, int]:
    """Shape of the tensor with all lists: (batches, heads, blocks, entries of a list)."""
    return self.batches, self.heads[0], self.blocks, list_length(self.tiles, self.with_turns)

def list_arguments(x:ListedBlocks) -> dict[str, Shapes]:
  """Returns the tensors of the kernels that make lists of tiles: for each kernel (shape, dtype) of its tensors by name, in the order in which the
  kernels run. The key of a kernel in the dictionary is the name of its first tensor, which the kernel writes. The kernel that writes "extremes" is
  left out if no expression of the mask depends on the row alone or on the column alone."""
  in_tiles: Shapes = {"in_tiles": ((x.lists, x.blocks, x.tiles), "uint8")}
  read: Shapes = {name: of for name, of in x.p.extras.items() if name in x.read}
  length = Sides.of(x).length
  extremes: Shapes = {"extremes": ((x.lists, length), "int32")} if length else {}
  found = {"extremes": extremes | read} if length else {}
  return found | {"in_tiles": in_tiles | extremes | read, "tile_list": {"tile_list": (x.shape, "int32"), **in_tiles}}

def list_kernels(x:ListedBlocks) -> list[tuple[Callable[..., UOp], Shapes]]:
  """Returns the kernels that make lists of tiles, in the order in which they run, each with (shape, dtype) of its tensors by name."""
  kernels = {"extremes": extremes_of_expressions, "in_tiles": seen_in_tiles, "tile_list": tiles_in_order}
  return [(kernels[written](x), shapes) for written, shapes in list_arguments(x).items()]

# ***** items of work *****

@dataclass(frozen=True)
class Items:
  """How a kernel that makes lists of tiles divides its work. The work consists of items, for example tiles. Either each thread computes an item
  alone, or all threads of a workgroup compute an item together."""
  new: Allocator
  ranges: tuple[UOp, ...]
  @property
  def thread(self) -> UOp: return self.ranges[-1]
  @staticmethod
  def of_workgroups(*sizes:int) -> tuple[Items, tuple[UOp, ...]]:
    """Divides the work such that each workgroup computes one item. There are as many items as the product of `sizes`. Returns the object, and the
    position of this workgroup's item along each of `sizes`."""
    new = Allocator()
    outer = tuple(new.range(n, AxisType.GLOBAL) for n in sizes)
    return Items(new, (*outer, new.range(THREADS_OF_A_LIST, AxisType.LOCAL))), outer
  @staticmethod
  def of_threads(*sizes:int) -> tuple[Items, UOp, list[UOp]]:
    """Divides the work such that each thread computes one item. There are as many items as the product of `sizes`; a workgroup's threads take
    neighbouring items along the last of them. Returns the object, whether this thread's item exists, and its position along each of `sizes`."""
    items, outer = Items.of_workgroups(*sizes[:-1], ceildiv(sizes[-1], THREADS_OF_A_LIST))
    index = outer[-1]*THREADS_OF_A_LIST + items.thread
    return items, left_alone(index < sizes[-1]), [*outer[:-1], index.minimum(sizes[-1] - 1)]
  def totals(self, count:int|UOp, begin:list[UOp], work:Callable[[list[UOp], UOp], list[UOp]], *after:UOp) -> list[UOp]:
    """Loops `count` times over `work(results, i)`, which returns new results, given the results so far and the index of the iteration. `begin` are
    the results before the first iteration. The loop runs after the stores `after`. Returns the last results."""
    registers = [self.new.registers(1, x.dtype) for x in begin]
    begun = [r.after(*self.ranges, *after)[0].store(x) for r, x in zip(registers, begin)]
    i = self.new.range(count, AxisType.LOOP)
    now = [r.after(*begun, i) for r in registers]
    end = UOp.group(*[r[0].store(x) for r, x in zip(now, work([r[0].load() for r in now], i))]).end(i)
    return [r.after(end)[0].load() for r in registers]
  def kernel(self, name:str, stores:list[UOp], operations:int) -> UOp:
    """Returns the kernel with the name `name`, which ends with `stores`. `operations` is an upper estimate of the kernel's number of operations.
    tinygrad needs this number, and cannot estimate loops whose length a kernel loads from memory."""
    info = KernelInfo(name, opts_to_apply=(), estimates=Estimates(ops=operations, lds=operations, mem=operations))
    return UOp.group(*stores).end(*self.ranges).sink(arg=info, tag=OPTIMISED)

def int32(n:int) -> UOp: return UOp.const(n, dtypes.int)

# ***** extremes of the one-sided expressions of a mask *****

LOW_END, HIGH_END = 0, 1

@dataclass(frozen=True)
class Side:
  """The expressions in a mask that depend on the row alone, or those that depend on the column alone: one of the two. The kernel finds the extremes
  (the lowest and the highest value) of each of these expressions: in each block of rows, or in each tile of columns.

      begin: position of the first of these extremes, among all extremes that belong to a list
      count: number of blocks, or of tiles
      size: rows of a block, or columns of a tile"""
  expressions: tuple[UOp, ...]
  over: str
  begin: int
  count: int
  size: int
  def index(self, nth:int, which:int, n:UOp) -> UOp:
    """Returns the position of an extreme among all extremes that belong to a list. The extreme is the lowest (`which` is LOW_END) or the highest
    value (HIGH_END) of the expression with index `nth`, in block or tile number `n`."""
    return self.begin + (2*nth + which)*self.count + n

@dataclass(frozen=True)
class Sides:
  rows: Side
  columns: Side
  @staticmethod
  def of(x:ListedBlocks) -> Sides:
    mask = x.p.mask_mod
    assert mask is not None
    walked, other = (KEY, "queries") if x.over == "keys" else (QUERY, "keys")
    both = one_sided_expressions(mask.value)
    of_columns = tuple(u for u in both if depends(u, walked))
    rows = Side(tuple(u for u in both if u not in of_columns), other, 0, x.blocks, x.block_m)
    return Sides(rows, Side(of_columns, x.over, 2*len(rows.expressions)*x.blocks, x.tiles, x.block_n))
  @property
  def length(self) -> int:
    """Number of extremes (lowest and highest values of expressions) that belong to a list."""
    return self.columns.begin + 2*len(self.columns.expressions)*self.columns.count

def extreme_of_all(dtype:DType, which:int) -> UOp:
  """Returns the highest number of the dtype if `which` is HIGH_END, and its lowest number if `which` is LOW_END. For floats these are inf and -inf.
  """
  if dtype == dtypes.float: return UOp.const(math.inf if which == HIGH_END else -math.inf, dtype)
  return UOp.const(MOST_INT if which == HIGH_END else LEAST_INT, dtype)

def extended(extremes:list[UOp], value:UOp, there:UOp) -> list[UOp]:
  """Returns the minimum and the maximum of some values and of one more, `value`. `extremes` are the minimum and the maximum without it. If `there` is
  false, `value` does not count. A NaN counts as both -inf and inf."""
  low, high = value, value
  if value.dtype == dtypes.float: low, high = (value.ne(value).where(extreme_of_all(value.dtype, which), value) for which in (LOW_END, HIGH_END))
  return [(there & (low < extremes[LOW_END])).where(low, extremes[LOW_END]), (there & (extremes[HIGH_END] < high)).where(high, extremes[HIGH_END])]

def walk_over(x:ListedBlocks, over:str, batch:UOp, given:Mapping[str, UOp]) -> Walk:
  return (over_keys if over == "keys" else over_queries)(x.p, extent(x.p, batch, given))

@cache_of_kernels
def extremes_of_expressions(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that finds the lowest and the highest value of each one-sided expression of a mask (an expression of the row alone or of the
  column alone), in blocks of rows and in tiles of columns. If several query heads share one list of tiles, the values for all these heads count."""
  def kernel(*args:UOp) -> UOp:
    given, sides = by_name(list_arguments(x)["extremes"], args), Sides.of(x)
    items, _, (of_list, n) = Items.of_threads(x.lists, max(x.blocks, x.tiles))
    batch, first_head = of_list//x.heads[0], of_list%x.heads[0]*x.heads[1]
    def stores(side:Side) -> list[UOp]:
      walk, width, there = walk_over(x, side.over, batch, given), math.gcd(side.size, OF_A_SIDE), left_alone(n < side.count)
      pieces, which = side.size//width, n.minimum(side.count - 1)
      def work(now:list[UOp], i:UOp) -> list[UOp]:
        piece, of = which*pieces + i%pieces, Row(batch, first_head + i//pieces, UOp.const(0), UOp.const(True))
        at = Fragment(x.p, given, of, of, walk, piece, width, UOp.const(0), width, [tuple(range(width))], width, NATURAL, NOTHING_SEEN)
        lifted = Lifted(at, "mask_mod")
        for nth, u in enumerate(side.expressions):
          pair = now[2*nth:2*nth + 2]
          for column, value in enumerate(lifted.each(u)[0]):
            pair = extended(pair, value.cast(ORDERED.get(u.dtype, dtypes.int)), piece*width + column < walk.count)
          now[2*nth:2*nth + 2] = pair
        return now
      begin = [extreme_of_all(ORDERED.get(u.dtype, dtypes.int), 1 - which) for u in side.expressions for which in (LOW_END, HIGH_END)]
      found = items.totals(pieces*x.heads[1], begin, work) if begin else []
      at = [of_list*sides.length + side.index(nth, which, n) for nth in range(len(side.expressions)) for which in (LOW_END, HIGH_END)]
      bits = [extreme.bitcast(dtypes.int) for extreme in found]
      if isinstance(walk.count, UOp):     # a block or tile beyond its sequence has no extremes: 0 in their place, with which sums do not overflow
        bits = [(which*side.size < walk.count).where(extreme, int32(0)) for extreme in bits]
      return [flat(given["extremes"])[place.valid(there)].store(x) for place, x in zip(at, bits)]
    name, both = f"attn_tiles_extremes_{x.over}_{x.block_m}x{x.block_n}", stores(sides.rows) + stores(sides.columns)
    return plain(items.kernel(name, both, x.lists*x.heads[1]*(x.rows + x.columns)))
  return kernel

# ***** what a mask leaves of a tile *****

@cache_of_kernels
def seen_in_tiles(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that finds, for each block of rows and each tile of columns, whether the mask leaves some of their scores visible, and whether
  it hides some. If several query heads share one list of tiles, the scores of all these heads count."""
  mask, width = x.p.mask_mod, math.gcd(x.block_n, OF_A_STEP)
  assert mask is not None
  pieces = x.block_n//width
  def kernel(*args:UOp) -> UOp:
    given, sides = by_name(list_arguments(x)["in_tiles"], args), Sides.of(x)
    items, (of_list, block, tile) = Items.of_workgroups(x.lists, x.blocks, x.tiles)
    batch, first_head = of_list//x.heads[0], of_list%x.heads[0]*x.heads[1]
    walk = walk_over(x, x.over, batch, given)
    def extremes(u:UOp) -> Extremes:
      # the lowest and the highest value of u in this block of rows or, for an expression of the columns, in this tile
      side, n = (sides.rows, block) if u in sides.rows.expressions else (sides.columns, tile)
      to = ORDERED.get(u.dtype, dtypes.bool)
      at = [of_list*sides.length + side.index(side.expressions.index(u), which, n) for which in (LOW_END, HIGH_END)]
      found = [flat(given["extremes"])[place].load() for place in at]
      return Extremes(*[y.ne(0) if to == dtypes.bool else y.bitcast(to) for y in found])
    def interval(row:UOp) -> tuple[UOp, UOp]:
      # the first and the last column that the row sees, counted from the first column of the tile
      first = first_seen(walk, row)
      return (UOp.const(0) if first is None else first - tile*x.block_n), last_seen(walk, row) - tile*x.block_n
    first_row, last_row = block*x.block_m, (block*x.block_m + x.block_m - 1).minimum(x.rows - 1)
    (begin, first_end), (last_begin, end) = interval(first_row), interval(last_row)      # neither end decreases from one row to the next
    always, possibly = span_of(mask.value, extremes)
    hidden = (begin >= x.block_n) | (end < 0) | possibly.logical_not()
    seen = (last_begin <= 0) & (first_end >= x.block_n - 1) & always
    unsure = ops.uniform((hidden | seen).where(int32(0), int32(1)))
    def work(now:list[UOp], i:UOp) -> list[UOp]:
      # evaluates the mask for `width` neighbouring scores of one row, and adds what they show to the bits SEEN and HIDDEN found so far, `now`
      index = i*THREADS_OF_A_LIST + items.thread
      row, piece, head = first_row + index%x.block_m, index//x.block_m%pieces, (first_head + index//x.block_m//pieces)
      of = Row(batch, head.minimum(first_head + x.heads[1] - 1), row.minimum(x.rows - 1), row < x.rows)
      first, last = (n - piece*width for n in interval(of.index))
      at = Fragment(x.p, given, of, of, walk, tile*pieces + piece, width, UOp.const(0), width, [tuple(range(width))], width, NATURAL, (first, last))
      each = [c & (last >= n) & (first <= n) for n, c in enumerate((seen_each(at) or [[UOp.const(True)]*width])[0])]
      bits = functools.reduce(operator.or_, [c.where(int32(SEEN), int32(HIDDEN)) for c in each])
      return [now[0] | of.there.where(bits, int32(0))]
    mine = items.totals(bounded(unsure, 0, 1)*ceildiv(x.block_m*pieces*x.heads[1], THREADS_OF_A_LIST), [int32(0)], work)[0]
    shared = items.new.lds(THREADS_OF_A_LIST, dtypes.int)
    stored = shared[items.thread].store(mine)
    def joined(now:list[UOp], i:UOp) -> list[UOp]:
      others = [shared.after(stored)[i*OF_A_STEP + n].load() for n in range(OF_A_STEP)]
      return [functools.reduce(operator.or_, others, now[0])]
    looked = items.totals(bounded(unsure, 0, 1)*(THREADS_OF_A_LIST//OF_A_STEP), [int32(0)], joined, stored)[0]
    found = hidden.where(int32(HIDDEN), seen.where(int32(SEEN), looked))
    to = flat(given["in_tiles"])[((of_list*x.blocks + block)*x.tiles + tile).valid(left_alone(items.thread.eq(0)))]
    name, pairs = f"attn_tiles_seen_{x.over}_{x.block_m}x{x.block_n}", x.lists*x.heads[1]*x.rows*x.columns
    return plain(items.kernel(name, [to.store(found.cast(dtypes.uchar))], pairs), x.checked)
  return kernel

# ***** the order of tiles *****

@cache_of_kernels
def tiles_in_order(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that writes each block's list of tiles, in order. There is one thread for each tile of a block. The thread counts the tiles
  that come before its tile: the count is the tile's position in the list. Unused entries at the end of a list get the number of all tiles. If lists
  have turns, the thread also counts the blocks that start before its block and have the tile in their lists."""
  def kernel(tile_list:UOp, in_tiles:UOp) -> UOp:
    items, there, (of_list, block, tile) = Items.of_threads(x.lists, x.blocks, x.tiles)
    line = (of_list*x.blocks + block)*x.tiles
    def group(t:UOp, line:UOp=line) -> UOp:
      # 0 for a tile of which the mask hides some scores, 1 if it hides none, 2 if it hides all; `line` is where the block's tiles begin in `in_tiles`
      bits = flat(in_tiles)[line + t].load()
      return bits.eq(SEEN | HIDDEN).where(int32(0), bits.eq(SEEN).where(int32(1), int32(2)))
    mine = group(tile)
    def work(now:list[UOp], i:UOp) -> list[UOp]:
      # counts the tiles that come before this thread's tile, those of which some scores are hidden, and those in the list; `now` has the counts so
      # far
      for n in range(OF_A_STEP):
        t = i*OF_A_STEP + n
        other = (t < x.tiles).where(group(t.minimum(x.tiles - 1)), int32(3))
        conditions = (other < mine) | (other.eq(mine) & (t < tile)), other < 1, other < 2
        now = [count + c.where(int32(1), int32(0)) for count, c in zip(now, conditions)]
      return now
    def turn() -> UOp:
      # how many blocks start before this block and have this thread's tile in their lists
      if x.blocks == 1: return int32(0)      # a loop of one iteration that adds nothing: tinygrad would lose the 0 with which it begins
      started = functools.partial(in_order_of_start, x.p, blocks=x.blocks)
      def earlier(b:UOp) -> UOp:
        listed = group(tile, (of_list*x.blocks + b.minimum(x.blocks - 1))*x.tiles) < 2
        return ((b < x.blocks) & (started(b) < started(block)) & listed).where(int32(1), int32(0))
      def work(now:list[UOp], i:UOp) -> list[UOp]: return [sum((earlier(i*OF_A_STEP + n) for n in range(OF_A_STEP)), now[0])]
      return items.totals(ceildiv(x.blocks, OF_A_STEP), [int32(0)], work)[0]
    before, partly, seen = items.totals(ceildiv(x.tiles, OF_A_STEP), [int32(0)]*3, work)
    to, begin, once = flat(tile_list), (of_list*x.blocks + block)*x.shape[-1], there & tile.eq(0)
    place = before.cast(dtypes.weakint).maximum(0).minimum(x.tiles - 1)
    last = int32(x.tiles)
    stores = [to[(begin + OF_A_LIST + place).valid(there)].store((mine < 2).where(tile.cast(dtypes.int), last)),
              to[(begin + OF_A_LIST + x.tiles).valid(once)].store(last),
              *[to[(begin + i).valid(once)].store(n) for i, n in enumerate((partly, seen))]]
    if x.with_turns: stores.append(to[(begin + list_length(x.tiles) + place).valid(there)].store(turn()))
    return items.kernel(f"attn_tiles_listed_{x.over}_{x.tiles}", stores, x.lists*x.blocks*x.tiles*x.tiles)
  return kernel
