"""Division of the gradient of a bias over workgroups: each workgroup sums dS for one block of the bias, over all scores that use this block."""
from __future__ import annotations
import functools, math
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.kernels.parts.grid.tensors import size_of_sum
from attn.kernels.parts.grid.workgroup import Grid, Workgroup, in_order_of_start
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import Blocks, trip_count
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.diagonals import Diagonals
from attn.kernels.parts.weights.epilogue import store_row
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.masks import hiding
from attn.score.term import Row
from attn.score.sums import Summed, sum_over_scores
from attn.tinygrad_compat import AxisType, UOp

# The same kernels sum the gradients of the tensors that a caller's score_mod reads (attn/score/sums.py). Such a sum is divided like the gradient of a
# bias of the same shape. If scores with equal i - j (query number minus key number) are added up, each workgroup owns a diagonal of tiles instead of
# a block.

@dataclass(frozen=True)
class BiasShare:
  """How workgroups divide the gradient of a bias: each owns a block of `block_m` queries by `block_n` keys of it."""
  # a workgroup loops over the batches, heads, queries and keys that share its block
  p: Problem
  block_m: int
  block_n: int

  @functools.cached_property
  def summed(self) -> Summed: return sum_over_scores(self.p)
  @property
  def shape(self) -> tuple[int, ...]:
    """Shape of the fp32 sum that the kernel writes: that of the bias, or, if a bias depends on i - j only, one tile for each diagonal."""
    return size_of_sum(self.p, self.block_m, self.block_n)
  @functools.cached_property
  def diagonals(self) -> Diagonals|None:
    """The diagonals of tiles of scores, if each workgroup owns one; None if each workgroup owns a block of queries and keys."""
    return Diagonals(self.p.Sq, self.p.Sk, self.block_m, self.block_n) if self.summed.diagonals else None
  @property
  def broadcast(self) -> tuple[bool, ...]:
    """Four bools: whether the bias is the same for all batches, all heads, all queries, all keys."""
    # true if the bias has the size 1 along this axis, and the problem a larger size
    found = tuple(size == 1 and n > 1 for size, n in zip(self.summed.sizes, (self.p.B, self.p.H, self.p.Sq, self.p.Sk)))
    return (*found[:2], False, False) if self.summed.diagonals else found
  @property
  def blocks(self) -> int: return ceildiv(self.p.Sq, self.block_m)
  @property
  def walked(self) -> tuple[int, int, int]:
    """Returns how many (batches, heads, blocks of queries) one workgroup loops over: the same block of the bias is added to all their scores."""
    batches, heads, rows, _ = self.broadcast
    # if workgroups own diagonals of tiles, the last number is that of the longest diagonal
    if self.diagonals is not None: blocks = self.diagonals.most
    else: blocks = self.blocks if rows else 1
    return self.p.B if batches else 1, self.p.H if heads else 1, blocks
  @property
  def trips(self) -> int: return math.prod(self.walked)
  @property
  def owned(self) -> tuple[int, int, int]:
    """Returns how many (batches, heads, blocks of queries or diagonals) of the bias the workgroups divide among themselves."""
    blocks = self.diagonals.count if self.diagonals is not None else self.blocks//self.walked[2]
    return self.p.B//self.walked[0], self.p.H//self.walked[1], blocks
  @property
  def owns_keys(self) -> bool:
    """Whether a workgroup owns one tile of keys. Otherwise each iteration of its loop goes over all tiles of keys."""
    return self.summed.diagonals or (any(self.broadcast[:3]) and not self.broadcast[3])
  @property
  def uneven(self) -> bool:
    """Whether a workgroup's iterations need different tiles of keys, e.g. because a causal mask hides other keys from other queries."""
    # Their queries see different keys, or batches have different numbers of keys. If each iteration looped over just the tiles that it needs, the
    # length of this inner loop would depend on the outer loop, and tinygrad's linearizer finds no order for such loops. So each iteration then loops
    # over all tiles of keys.
    batches, _, blocks = self.walked
    ends = self.p.kv_lengths or self.p.varlen
    return not self.owns_keys and ((blocks > 1 and any(hiding(self.p))) or (batches*blocks > 1 and ends))
  @property
  def key_tiles(self) -> int:
    """Number of tiles of keys that different workgroups own; 1 if each workgroup reads all keys, or owns a diagonal."""
    return ceildiv(self.p.Sk, self.block_n) if self.owns_keys and not self.summed.diagonals else 1
  @property
  def stored_at_once(self) -> bool:
    """Whether dS itself is the gradient of the bias: each element of the bias belongs to one score, and nothing is summed."""
    # each tile of dS is then stored as it is
    return not any(self.broadcast) and not self.summed.diagonals
  @property
  def workgroups(self) -> int: return math.prod(self.owned)*self.key_tiles

  def check_parts(self, parts:int) -> None:
    """Raises ValueError if a workgroup's loop has too few iterations to be divided among `parts` workgroups."""
    most = 1 if self.summed.diagonals else self.trips
    if not 0 <= parts <= most:
      raise ValueError(f"parts={parts}: must be from 0 (no parts) to {most}, the number of blocks of queries that a workgroup loops over")

@dataclass(frozen=True)
class BiasPart:
  """What one workgroup computes of the gradient of a bias: its block of the bias, and the iterations of its loop."""
  share: BiasShare
  grid: Grid             # with indices of a head and a block among the owned heads and the owned blocks of queries
  key_tile: UOp          # index of the owned tile of keys; 0 where a workgroup loops over all tiles, or over a diagonal
  part: UOp              # index of the part of the sum that this workgroup computes
  parts: int             # number of parts in which the sum is left; 0: the sum is complete

  @staticmethod
  def of(share:BiasShare, parts:int, lanes:int, waves:int, new:Allocator) -> BiasPart:
    block = new.range(share.owned[2]*share.key_tiles, AxisType.GLOBAL)
    head = new.range(share.owned[0]*share.owned[1], AxisType.GLOBAL)
    lane, wave = new.range(lanes, AxisType.WARP), new.range(waves, AxisType.WARP)
    split = (new.range(parts, AxisType.GLOBAL),) if parts > 1 else ()
    grid = Grid(new, (block, head, lane, wave, *split), head, block//share.key_tiles, lane, wave)
    return BiasPart(share, grid, block%share.key_tiles, split[0] if split else UOp.const(0), parts)

  # ***** the iterations *****
  @property
  def one_trip(self) -> bool:
    """Whether the workgroup's loop has a single iteration, so that the kernel contains no loop."""
    return self.share.trips == max(self.parts, 1)

  @property
  def first_place(self) -> Grid:
    """Grid position (indices of head and block of queries) that the workgroup reads in the first iteration of its loop."""
    return self.grid_of_trip(self.first_trip)
  @property
  def first_trip(self) -> UOp: return self.part if self.one_trip else UOp.const(0)

  @property
  def own_trips(self) -> tuple[UOp, UOp]:
    """Returns (index of the first iteration that this workgroup computes, number of its iterations)."""
    trips, (batches, heads, _) = self.share.trips, self.share.walked
    if self.share.diagonals is not None: return UOp.const(0), self.share.diagonals.range(self.grid.block)[1]*(batches*heads)
    if self.parts <= 1: return UOp.const(0), UOp.const(trips)
    each = ceildiv(trips, self.parts)
    first = self.part*each
    return first, (trips - first).maximum(0).minimum(each)

  def grid_of_trip(self, i:UOp) -> Grid:
    """Returns the grid position (indices of head and block of queries) that the workgroup reads in iteration i."""
    heads = self.share.walked[1]
    of_heads, block, _ = self.place_of_trip(i)
    batch, head = self.grid.head//self.share.owned[1] + of_heads//heads, self.grid.head%self.share.owned[1] + of_heads%heads
    return replace(self.grid, head=batch*self.share.p.H + head, block=block)

  def key_tile_of(self, i:UOp) -> UOp:
    """Returns the index of the tile of keys that the workgroup reads in iteration i."""
    return self.place_of_trip(i)[2]

  def place_of_trip(self, i:UOp) -> tuple[UOp, UOp, UOp]:
    """Returns (index of the head, of the block of queries, of the tile of keys) that the workgroup reads in iteration i."""
    # the head among the heads that the workgroup loops over; the block in the order in which blocks start
    (batches, heads, most), diagonals = self.share.walked, self.share.diagonals
    if diagonals is None: return i//most, self.grid.block + i%most, self.key_tile
    first, count = diagonals.range(self.grid.block)
    head, n = (UOp.const(0), i) if batches*heads == 1 else (i//count.maximum(1), i%count.maximum(1))
    block, key_tile = diagonals.place(self.grid.block, first + n)
    return head, in_order_of_start(self.share.p, block, self.share.blocks), key_tile

  def walked(self, group:Workgroup) -> Blocks:
    """Returns the tiles of keys over which one iteration loops: those that the queries of `group` see, or all tiles."""
    if self.one_trip or not self.share.uneven: return group.walked
    # tiles in which a mask may hide scores
    none = UOp.const(0)
    return Blocks(none, none, none, UOp.const(ceildiv(self.share.p.Sk, self.share.block_n)), False)

  # ***** the stores *****
  def stored(self, row:Row) -> UOp:
    """Returns whether the sums for row `row` are stored: false for rows beyond the last query."""
    # a workgroup that sums along diagonals of the scores stores all its sums
    return UOp.const(True) if self.share.diagonals is not None else row.there

  def row_start(self, group:Workgroup, row:Row) -> UOp:
    """Returns the flat index, in the gradient of the bias, of the first element of row `row`."""
    batches, heads, rows, keys = self.share.shape
    batch, head = self.grid.head//self.share.owned[1], self.grid.head%self.share.owned[1]
    own = 0 if rows == 1 else row.index   # all queries share one row of the bias: the index of this row
    if self.share.diagonals is not None: own = self.grid.block*self.share.block_m + (row.index - group.first_row)
    elif self.share.walked[2] > 1: own = 0
    return self.part*(batches*heads*rows*keys) + ((batch*heads + head)*rows + own)*keys

  def stores(self, group:Workgroup, row:Row, column:UOp, values:UOp, there:UOp) -> list[UOp]:
    """Returns the stores of `values` to a row of the bias's gradient, from column `column` on, where `there` is true."""
    found, gradient = self.share.summed, flat(group.given[f"d{self.share.summed.name}"])
    dtype = "float32" if self.parts else found.dtype
    return store_row(group.arch, gradient, dtype, self.share.shape[3], self.row_start(group, row), column, values, there)

  def outside(self, walked:Blocks, stores:Callable[[UOp], list[UOp]]) -> list[UOp]:
    """Returns loops that make `stores(tile)` for each tile of keys that is not in `walked`, e.g. stores of 0 where no query sees a key."""
    tiles, found = ceildiv(self.share.p.Sk, self.share.block_n), []
    for begin, end in ((UOp.const(0), walked.begin), (walked.end, UOp.const(tiles))):
      if (count := trip_count(end - begin)) is None: continue
      # `stores(t)` makes the stores of the loop's body for tile t
      r = self.grid.allocator.range(count, AxisType.LOOP)
      found.append(UOp.group(*stores(begin + r)).end(r))
    return found
