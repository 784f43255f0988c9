"""The fixed order in which workgroups that own keys add to the sums of dQ in memory.

Several blocks of keys add to dQ of one tile of queries: all blocks with keys that these queries see. These blocks add one after another, in ascending
order of the blocks, or in descending order if a mask hides keys after a query, as a causal mask does. So each sum is added up in the same order in
every run, on every chip. The period in which a block may add is its turn. Each wave of a workgroup has its own counter, and adds only in its turn
(attn/ops/atomics.py). A turn takes two neighbouring tiles, because waiting for a turn and passing it on take time. If
workgroups loop over lists of tiles, a turn is a single tile.

A workgroup waits only for blocks of its own head that add before its own block. Workgroups draw their blocks by tickets, numbers that they get in the
order in which they start (`workgroup.drawn`). Blocks that add first have the lower tickets. So the workgroup with the lowest ticket never waits, and
no workgroup waits forever.

Without lists, all workgroups loop over the tiles of queries in ascending order. Under a causal mask the last block of keys has the lowest ticket, and
the fewest tiles. Each further block begins two tiles earlier than the block before it (two tiles are as long as a block of keys). So blocks that
start together work on different tiles at any time, and seldom wait."""
from __future__ import annotations
from dataclasses import dataclass
from attn.kernels.parts.grid.tensors import QUERIES_OF_SUMS, TURNS_OF_SUMS, dq_sums
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.program.blocks import TileList, blocks_seen, over_keys
from attn.ops import atomics
from attn.ops.common import flat
from attn.score.masks import hiding
from attn.tinygrad_compat import UOp, dtypes

TILES_OF_TURN = 2

@dataclass(frozen=True)
class Turns:
  """The turns of one wave, the periods in which the wave may add to the sums of dQ. A turn takes `tiles` neighbouring tiles of queries, or those of
  them over which the workgroup loops. `first` is true in lane 0 of the wave."""
  group: Workgroup
  wave: UOp
  first: UOp
  tiles: int

  @staticmethod
  def of(group:Workgroup, wave:UOp, lane:UOp) -> Turns|None:
    """Makes the turns of a wave. Returns None if workgroups add to the sums of dQ in no fixed order. If the queries are divided into parts, a turn
    takes a single tile, because neighbouring tiles may belong to different parts. It also takes a single tile if workgroups loop over lists, because
    the neighbouring tile may not be in a list."""
    if "dq_turns" not in group.given: return None
    return Turns(group, wave, lane.eq(0), 1 if group.split or isinstance(group.scores.order, TileList) else TILES_OF_TURN)

  def turn(self, tile:UOp) -> UOp:
    """Returns the first tile of the turn that takes `tile`."""
    return tile//self.tiles*self.tiles
  def counter(self, head:UOp, tile:UOp) -> UOp:
    """Returns the wave's counter for the turn that takes `tile`, as a UOp that indexes the tensor of counters. The counter counts the blocks of keys
    that have ended this turn."""
    group = self.group
    return flat(group.given["dq_turns"])[group.first_sums(head)*TURNS_OF_SUMS + self.turn(tile)*group.tile.waves + self.wave]
  def number(self, i:UOp, tile:UOp) -> UOp:
    """Returns how many blocks of keys have their turn before the workgroup's own block, for `tile`, the tile of iteration i."""
    group, n, order = self.group, self.group.scores.block_n, self.group.scores.order
    if isinstance(order, TileList): return order.turn(i)
    first, block = self.turn(tile)*n, group.grid.block
    seen = blocks_seen(over_keys(group.p, group.sequence), first, first + (self.tiles*n - 1), group.tile.block_m)
    return seen.end - 1 - block if hiding(group.p).after else block - seen.begin

  def begin(self, head:UOp, i:UOp, done:UOp) -> UOp:
    """Waits until all blocks that add first have ended their turn, if the workgroup's turn begins with the tile of iteration i. Comes after the
    operation `done`. Returns a statement."""
    tile = self.group.scores.tile(i)
    begins = tile.eq(self.turn(tile)) | i.eq(self.group.walked.begin)
    return atomics.await_turn(self.counter(head, tile), self.number(i, tile), self.first & begins, done)
  def end(self, head:UOp, i:UOp, done:UOp, last:bool=False) -> UOp:
    """Ends the workgroup's turn and lets the next block add, if the turn ends with the tile of iteration i. Does nothing if the workgroup's loop
    begins after iteration i. `last` says that the iteration is the workgroup's last one. Comes after the operation `done`, after which the wave's
    additions to the tile must be complete. Returns a statement."""
    tile = self.group.scores.tile(i)
    ends = UOp.const(True) if last else (tile + 1).eq(self.turn(tile + 1))
    return atomics.pass_turn(self.counter(head, tile), self.first & ends & (i >= self.group.walked.begin), done)

def first_turns(group:Workgroup, thread:UOp) -> list[UOp]:
  """Returns the stores that set to 0 the counters of turns for the tile of dQ's sums that the workgroup owns. The workgroup that owns the first tile
  also sets the counter of tickets to 0."""
  if (counters := group.given.get("dq_turns")) is None: return []
  heads, tiles = dq_sums(group.p)[0][:2]
  head, tile, ticket = group.batch*group.p.H + group.first_head, group.first_row//QUERIES_OF_SUMS, thread.eq(TURNS_OF_SUMS)
  own = (group.first_sums(group.first_head) + tile)*TURNS_OF_SUMS + thread.minimum(TURNS_OF_SUMS - 1)
  there = (thread < TURNS_OF_SUMS) & group.has_sums | ticket & head.eq(0) & tile.eq(0)
  return [flat(counters)[ticket.where(UOp.const(heads*tiles*TURNS_OF_SUMS), own).valid(there)].store(UOp.const(0, dtypes.int))]
