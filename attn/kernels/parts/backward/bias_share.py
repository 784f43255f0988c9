"""The gradient of a bias (a tensor that is added to the scores), divided over workgroups: the block of the bias that each workgroup owns, and the
loop in which the workgroup sums the gradient of this block."""
from __future__ import annotations
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.kernels.parts.grid.workgroup import Grid, Workgroup
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.blocks import Blocks, trip_count
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.weights.epilogue import store_row
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.masks import hiding
from attn.score.term import Row
from attn.score.terms import summed_tensor
from attn.tinygrad_compat import AxisType, UOp

@dataclass(frozen=True)
class BiasShare:
  """How the gradient of a bias is divided over workgroups: the block of the bias that each workgroup owns, and the batches, heads, queries and keys
  over which it loops to sum the gradient of this block."""
  p: Problem
  block_m: int
  block_n: int

  @property
  def tensor(self) -> tuple[tuple[int, ...], str]:
    """(shape, dtype) of the bias."""
    return self.p.extras[summed_tensor(self.p).name]
  @property
  def broadcast(self) -> tuple[bool, ...]:
    """Whether all batches, all heads, all queries and all keys share one bias: four bools. Each is True if the bias has size 1 along this axis and
    the problem has a larger size."""
    return tuple(size == 1 and n > 1 for size, n in zip(self.tensor[0], (self.p.B, self.p.H, self.p.Sq, self.p.Sk)))
  @property
  def blocks(self) -> int: return ceildiv(self.p.Sq, self.block_m)
  @property
  def walked(self) -> tuple[int, int, int]:
    """Numbers of batches, heads and blocks of queries over which one workgroup loops."""
    batches, heads, rows, _ = self.broadcast
    return self.p.B if batches else 1, self.p.H if heads else 1, self.blocks if rows else 1
  @property
  def trips(self) -> int: return math.prod(self.walked)
  @property
  def owned(self) -> tuple[int, int, int]:
    """Numbers of batches, heads and blocks of queries that are divided among the workgroups."""
    return self.p.B//self.walked[0], self.p.H//self.walked[1], self.blocks//self.walked[2]
  @property
  def owns_keys(self) -> bool:
    """Whether a workgroup owns one tile of keys. If not, it loops over all tiles of keys."""
    return any(self.broadcast[:3]) and not self.broadcast[3]
  @property
  def uneven(self) -> bool:
    """Whether iterations of the outer loop need different tiles of keys, because queries see different keys or batches have different numbers of
    keys. The bound of the inner loop over tiles would then depend on the outer loop. tinygrad's linearizer finds no order for such loops."""
    batches, _, blocks = self.walked
    return not self.owns_keys and ((blocks > 1 and any(hiding(self.p))) or (batches*blocks > 1 and self.p.kv_lengths))
  @property
  def key_tiles(self) -> int: return ceildiv(self.p.Sk, self.block_n) if self.owns_keys else 1
  @property
  def stored_at_once(self) -> bool:
    """Whether nothing has to be summed, because each number of the bias is added to only one score. Each tile of dS is then stored unchanged."""
    return not any(self.broadcast)
  @property
  def workgroups(self) -> int: return math.prod(self.owned)*self.key_tiles

  def check_parts(self, parts:int) -> None:
    """Raises ValueError if the number of parts is negative, or larger than the number of iterations that are divided."""
    if not 0 <= parts <= self.trips:
      raise ValueError(f"parts={parts}: must be 0 (no parts) to {self.trips}, the blocks of queries that a workgroup loops over")

@dataclass(frozen=True)
class BiasPart:
  """The part of a bias's gradient that one workgroup computes."""
  share: BiasShare
  grid: Grid             # with numbers of a head and a block among the owned heads and the owned blocks of queries
  key_tile: UOp          # number of the owned tile of keys; 0 where a workgroup loops over all tiles
  part: UOp              # number of the part of the sum that this workgroup computes
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
    """Whether the workgroup needs only one iteration, so that there is no loop over batches, heads and blocks of queries."""
    return self.share.trips == max(self.parts, 1)

  @property
  def first_place(self) -> Grid:
    """Position in the grid (head and block of queries) at which this workgroup's loop begins."""
    return self.grid_of_trip(self.part if self.one_trip else UOp.const(0))

  @property
  def own_trips(self) -> tuple[UOp, UOp]:
    """Number of the first loop iteration of this workgroup, and number of its iterations."""
    trips = self.share.trips
    if self.parts <= 1: return UOp.const(0), UOp.const(trips)
    each = ceildiv(trips, self.parts)
    first = self.part*each
    return first, (trips - first).maximum(0).minimum(each)

  def grid_of_trip(self, i:UOp) -> Grid:
    """Returns the position in the grid for iteration i: the head and the block of queries that the workgroup works on."""
    _, heads, blocks = self.share.walked
    batch, head = self.grid.head//self.share.owned[1] + i//(heads*blocks), self.grid.head%self.share.owned[1] + i//blocks%heads
    return replace(self.grid, head=batch*self.share.p.H + head, block=self.grid.block + i%blocks)

  def walked(self, group:Workgroup) -> Blocks:
    """Returns the tiles of keys that an iteration loops over: the tiles that its queries see. If iterations need different tiles (`uneven`), returns
    all tiles that may exist and treats all of them as masked."""
    if self.one_trip or not self.share.uneven: return group.walked
    none = UOp.const(0)
    return Blocks(none, none, none, UOp.const(ceildiv(self.share.p.Sk, self.share.block_n)), False)

  # ***** the stores *****
  def row_start(self, row:Row) -> UOp:
    """Returns the flat index, in the gradient of the bias, at which a row begins. If all queries share one row, returns the index of this shared
    row."""
    batches, heads, rows, keys = self.share.tensor[0]
    batch, head = self.grid.head//self.share.owned[1], self.grid.head%self.share.owned[1]
    return self.part*(batches*heads*rows*keys) + ((batch*heads + head)*rows + (0 if self.share.walked[2] > 1 or rows == 1 else row.index))*keys

  def stores(self, group:Workgroup, row:Row, column:UOp, values:UOp, there:UOp) -> list[UOp]:
    """Returns the stores of consecutive elements to a row of the gradient, in the order of the keys."""
    (shape, own), gradient = self.share.tensor, flat(group.given[f"d{summed_tensor(self.share.p).name}"])
    return store_row(group.arch, gradient, "float32" if self.parts else own, shape[3], self.row_start(row), column, values, there)

  def outside(self, walked:Blocks, stores:Callable[[UOp], list[UOp]]) -> list[UOp]:
    """Returns loops over the tiles of keys that no query of the block sees. `stores` makes the stores to one such tile."""
    tiles, found = ceildiv(self.share.p.Sk, self.share.block_n), []
    for begin, end in ((UOp.const(0), walked.begin), (walked.end, UOp.const(tiles))):
      if (count := trip_count(end - begin)) is None: continue
      r = self.grid.allocator.range(count, AxisType.LOOP)
      found.append(UOp.group(*stores(begin + r)).end(r))
    return found
