"""Lists of the tiles in which a mask leaves scores, for masks that leave a query more than one interval of keys.

A workgroup of attention owns a block of rows (queries or keys) and loops over tiles of columns (keys or queries). Three small kernels make the list
of each block: `seen_in_rows` says what a mask leaves of each row in each tile, `seen_in_blocks` says the same of each block, and `tiles_in_order`
puts the tiles of each block in order. Tiles of which the mask hides some scores come first, and then the tiles of which it hides none.
If the mask hides all scores of a tile, the tile is not in the list. The kernels evaluate masks for each score, as the kernels of attention do."""
from __future__ import annotations
import functools, math, operator
from collections.abc import Callable
from dataclasses import dataclass
from attn.kernels.parts.grid.workgroup import by_name
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import OF_A_LIST, extent, list_length, over_keys, over_queries
from attn.kernels.parts.program.counts import ceildiv, left_alone
from attn.ops.common import flat
from attn.ops.plain import plain
from attn.problem import MOD_TENSORS, Problem, Shapes
from attn.score.masks import first_seen, last_seen, seen_each
from attn.score.term import NATURAL, Fragment, Row
from attn.tinygrad_compat import AxisType, KernelInfo, UOp, dtypes
from attn.values import cache_of_kernels

THREADS_OF_A_LIST = 64
OF_A_STEP = 4              # columns, or rows, of one iteration
SEEN, HIDDEN = 1, 2       # bits of what a mask leaves of a row in a tile: some scores are seen, some are hidden. No bit: the row does not exist

@dataclass(frozen=True)
class ListedBlocks:
  """Lists of tiles to make: one list for each block of `block_m` rows, of tiles of `block_n` columns. Columns are keys if `over` is "keys", and
  queries if `over` is "queries".

    heads: heads of the lists, and query heads that share a list. 1 and 1 if the mask is the same for all heads
    batches: batches of the lists, 1 if the mask is the same for all batches
    checked: whether the emulator checks indices of the tensors that the mask reads"""
  p: Problem
  over: str
  block_m: int
  block_n: int
  batches: int
  heads: tuple[int, int]
  checked: bool
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
  def shape(self) -> tuple[int, int, int, int]:
    """Shape of the tensor with all lists."""
    return self.batches, self.heads[0], self.blocks, list_length(self.tiles)

def list_kernels(x:ListedBlocks) -> list[tuple[Callable[..., UOp], Shapes]]:
  """Returns the kernels that make lists, in order, each with the (shape, dtype) of its tensors by name. A kernel writes its first tensor."""
  in_rows, in_blocks = ((x.lists, x.tiles, x.rows), "uint8"), ((x.lists, x.tiles, x.blocks), "uint8")
  read: Shapes = {name: of for name, of in x.p.extras.items() if name in (*MOD_TENSORS, "first_batch_and_head")}
  return [(seen_in_rows(x), {"in_rows": in_rows, **read}), (seen_in_blocks(x), {"in_blocks": in_blocks, "in_rows": in_rows}),
          (tiles_in_order(x), {"tile_list": (x.shape, "int32"), "in_blocks": in_blocks})]

@dataclass(frozen=True)
class Items:
  """The items of work of a kernel that makes lists, such as one row of one tile. Each thread does one item."""
  new: Allocator
  ranges: tuple[UOp, ...]
  @staticmethod
  def of(*sizes:int) -> tuple[Items, UOp, list[UOp]]:
    """Makes the items: there are as many as the product of `sizes`. The last of the sizes is divided among threads. Returns the items, whether this
    thread's item exists, and the item's numbers."""
    new, last = Allocator(), sizes[-1]
    outer = [new.range(n, AxisType.GLOBAL) for n in (*sizes[:-1], ceildiv(last, THREADS_OF_A_LIST))]
    thread = new.range(THREADS_OF_A_LIST, AxisType.LOCAL)
    index = outer[-1]*THREADS_OF_A_LIST + thread
    return Items(new, (*outer, thread)), left_alone(index < last), [*outer[:-1], index.minimum(last - 1)]
  def total(self, count:int, work:Callable[[UOp, UOp], UOp]) -> UOp:
    """Returns the result of a loop of `count` iterations. `work` gets the result so far, first 0, and the number of the iteration. It returns a new
    result."""
    register = self.new.registers(1, dtypes.int)
    begun = register.after(*self.ranges)[0].store(UOp.const(0, dtypes.int))
    i = self.new.range(count, AxisType.LOOP)
    now = register.after(begun, i)
    return register.after(now[0].store(work(now[0].load(), i)).end(i))[0].load()
  def kernel(self, name:str, stores:list[UOp]) -> UOp:
    return UOp.group(*stores).end(*self.ranges).sink(arg=KernelInfo(name, opts_to_apply=()))

@cache_of_kernels
def seen_in_rows(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that says for each row and tile whether some scores are seen and some are hidden. If several heads share a list, the kernel
  says this of the scores of all these heads together."""
  def kernel(*args:UOp) -> UOp:
    given = by_name(list_kernels(x)[0][1], args)
    items, there, (number, tile, row) = Items.of(x.lists, x.tiles, x.rows)
    batch, first_head = number//x.heads[0], number%x.heads[0]*x.heads[1]
    sequence, width = extent(x.p, batch, given), math.gcd(x.block_n, OF_A_STEP)
    walk = (over_keys if x.over == "keys" else over_queries)(x.p, sequence)
    parts = x.block_n//width
    def work(found:UOp, i:UOp) -> UOp:
      part, of = tile*parts + i%parts, Row(batch, first_head + i//parts, row, there)
      begin = part*width
      first, last = first_seen(walk, row), last_seen(walk, row) - begin
      first = None if first is None else first - begin
      at = Fragment(x.p, given, of, of, walk, part, width, UOp.const(0), width, [tuple(range(width))], width, NATURAL, (first, last))
      each = (seen_each(at) or [[UOp.const(True)]*width])[0]
      seen = [c & (last >= n) & (UOp.const(True) if first is None else first <= n) for n, c in enumerate(each)]
      bits = [c.where(UOp.const(SEEN, dtypes.int), UOp.const(HIDDEN, dtypes.int)) for c in seen]
      return functools.reduce(operator.or_, bits, found)
    found = items.total(parts*x.heads[1], work)
    to = flat(given["in_rows"])[((number*x.tiles + tile)*x.rows + row).valid(there)]
    return plain(items.kernel(f"attn_tiles_seen_{x.over}_{x.block_m}x{x.block_n}", [to.store(found.cast(dtypes.uchar))]), x.checked)
  return kernel

@cache_of_kernels
def seen_in_blocks(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that joins what `seen_in_rows` says about the rows of each block."""
  def kernel(in_blocks:UOp, in_rows:UOp) -> UOp:
    items, there, (number, tile, block) = Items.of(x.lists, x.tiles, x.blocks)
    width, line = math.gcd(x.block_m, OF_A_STEP), number*x.tiles + tile
    def work(found:UOp, i:UOp) -> UOp:
      rows = [(block*x.block_m + i*width + n).minimum(x.rows - 1) for n in range(width)]
      return functools.reduce(operator.or_, [flat(in_rows)[line*x.rows + row].load().cast(dtypes.int) for row in rows], found)
    found = items.total(x.block_m//width, work)
    return items.kernel(f"attn_tiles_blocks_{x.block_m}", [flat(in_blocks)[(line*x.blocks + block).valid(there)].store(found.cast(dtypes.uchar))])
  return kernel

def below_group(n:int, group:UOp, tile:UOp) -> UOp: return group < n

@cache_of_kernels
def tiles_in_order(x:ListedBlocks) -> Callable[..., UOp]:
  """Returns the kernel that puts the tiles of each block in order. The place of a tile is the number of tiles that come before it; one thread for
  each tile counts them. Tiles that are not in the list come last, and their places hold the number of all tiles."""
  def kernel(tile_list:UOp, in_blocks:UOp) -> UOp:
    items, there, (number, block, tile) = Items.of(x.lists, x.blocks, x.tiles)
    def group(t:UOp) -> UOp:
      """Returns 0 for a tile of which the mask hides some scores, 1 for a tile of which it hides none, and 2 for a tile of which it hides all."""
      bits = flat(in_blocks)[(number*x.tiles + t)*x.blocks + block].load()
      return bits.eq(SEEN | HIDDEN).where(UOp.const(0, dtypes.int), bits.eq(SEEN).where(UOp.const(1, dtypes.int), UOp.const(2, dtypes.int)))
    mine, one = group(tile), UOp.const(1, dtypes.int)
    def count(condition:Callable[[UOp, UOp], UOp]) -> UOp:
      """Returns the number of tiles for which `condition`, a function of the tile's group and number, is true."""
      return items.total(x.tiles, lambda n, t: n + condition(group(t), t).where(one, one*0))
    before = count(lambda other, t: (other < mine) | (other.eq(mine) & (t < tile)))
    partly, seen = (count(functools.partial(below_group, n)) for n in (1, 2))
    to, begin, once = flat(tile_list), (number*x.blocks + block)*list_length(x.tiles), there & tile.eq(0)
    place = before.cast(dtypes.weakint).maximum(0).minimum(x.tiles - 1)
    last = UOp.const(x.tiles, dtypes.int)
    stores = [to[(begin + OF_A_LIST + place).valid(there)].store((mine < 2).where(tile.cast(dtypes.int), last)),
              to[(begin + OF_A_LIST + x.tiles).valid(once)].store(last),
              *[to[(begin + i).valid(once)].store(n) for i, n in enumerate((partly, seen))]]
    return items.kernel(f"attn_tiles_listed_{x.over}_{x.tiles}", stores)
  return kernel
