"""The fixed order in which workgroups that own keys add to the sums of dQ in memory.

Several blocks of keys add to dQ of one tile of queries: all blocks with keys that these queries see. These blocks add one after another, in ascending
order of the blocks, or in descending order if a mask hides keys after a query, as a causal mask does. So each sum is added up in the same order in
every run, on every chip. The period in which a block may add is its turn. Each wave of a workgroup has its own counter, and adds only in its turn
(attn/ops/atomics.py). A turn takes two neighbouring tiles, because waiting for a turn and passing it on take time.

A workgroup waits only for blocks of its own head that add before its own block. Workgroups draw their blocks by tickets, numbers that they get in the
order in which they start (`workgroup.drawn`). Blocks that add first have the lower tickets. So the workgroup with the lowest ticket never waits, and
no workgroup waits forever.

All workgroups loop over the tiles of queries in ascending order. Under a causal mask the last block of keys has the lowest ticket, and the fewest
tiles. Each further block begins two tiles earlier than the block before it (two tiles are as long as a block of keys). So blocks that start together
work on different tiles at any time, and seldom wait."""
from __future__ import annotations
from dataclasses import dataclass
from attn.kernels.parts.grid.tensors import QUERIES_OF_SUMS, TURNS_OF_SUMS, dq_sums
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.program.blocks import blocks_seen, over_keys
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
    takes a single tile, because neighbouring tiles may belong to different parts."""
    if "dq_turns" not in group.given: return None
    return Turns(group, wave, lane.eq(0), 1 if group.split else TILES_OF_TURN)

  def turn(self, tile:UOp) -> UOp:
    """Returns the first tile of the turn that takes `tile`."""
    return tile//self.tiles*self.tiles
  def counter(self, head:UOp, tile:UOp) -> UOp:
    """Returns the wave's counter for the turn that takes `tile`, as a UOp that indexes the tensor of counters. The counter counts the blocks of keys
    that have ended this turn."""
    of_head = (self.group.batch*self.group.p.H + head)*(dq_sums(self.group.p)[0][1]*TURNS_OF_SUMS)
    return flat(self.group.given["dq_turns"])[of_head + self.turn(tile)*self.group.tile.waves + self.wave]
  def number(self, tile:UOp) -> UOp:
    """Returns how many blocks of keys have their turn before the workgroup's own block."""
    group, n, block = self.group, self.group.scores.block_n, self.group.grid.block
    first = self.turn(tile)*n
    seen = blocks_seen(over_keys(group.p, group.sequence), first, first + (self.tiles*n - 1), group.tile.block_m)
    return seen.end - 1 - block if hiding(group.p).after else block - seen.begin

  def begin(self, head:UOp, tile:UOp, done:UOp) -> UOp:
    """Waits until all blocks that add first have ended their turn, if the workgroup's turn begins with `tile`. Comes after the operation `done`.
    Returns a statement."""
    begins = tile.eq(self.turn(tile)) | tile.eq(self.group.walked.begin)
    return atomics.await_turn(self.counter(head, tile), self.number(tile), self.first & begins, done)
  def end(self, head:UOp, tile:UOp, done:UOp, last:bool=False) -> UOp:
    """Ends the workgroup's turn and lets the next block add, if the turn ends with `tile`. Does nothing if the workgroup's loop begins after `tile`.
    `last` says that `tile` is the workgroup's last one. Comes after the operation `done`, after which the wave's additions to the tile must be
    complete. Returns a statement."""
    ends = UOp.const(True) if last else (tile + 1).eq(self.turn(tile + 1))
    return atomics.pass_turn(self.counter(head, tile), self.first & ends & (tile >= self.group.walked.begin), done)

def first_turns(group:Workgroup, thread:UOp) -> list[UOp]:
  """Returns the stores that set to 0 the counters of turns for the tile of dQ's sums that the workgroup owns. The workgroup that owns the first tile
  also sets the counter of tickets to 0."""
  if (counters := group.given.get("dq_turns")) is None: return []
  heads, tiles = dq_sums(group.p)[0][:2]
  tile = (group.batch*group.p.H + group.first_head)*tiles + group.first_row//QUERIES_OF_SUMS
  ticket = thread.eq(TURNS_OF_SUMS)
  at = ticket.where(UOp.const(heads*tiles*TURNS_OF_SUMS), tile*TURNS_OF_SUMS + thread.minimum(TURNS_OF_SUMS - 1))
  return [flat(counters)[at.valid((thread < TURNS_OF_SUMS) | (ticket & tile.eq(0)))].store(UOp.const(0, dtypes.int))]
