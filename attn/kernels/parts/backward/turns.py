"""The fixed order in which workgroups that own keys add to dQ in memory: each waits for its turn."""
from __future__ import annotations
from dataclasses import dataclass
from attn.kernels.parts.grid.tensors import dq_sums, set_by_first
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.program.blocks import TileList, blocks_seen, over_keys
from attn.kernels.parts.program.counts import below
from attn.kernels.tiles.common import QUERIES_OF_SUMS, TILES_OF_TURN, TURNS_OF_SUMS, BlockTile
from attn.ops import atomics
from attn.ops.common import flat
from attn.score.masks import hiding
from attn.tinygrad_compat import UOp, dtypes

# Several blocks of keys add to dQ of one tile of queries: all blocks with keys that these queries see. These blocks add one after another, in
# ascending order of the blocks, or in descending order if a mask hides keys after a query, as a causal mask does. So each sum is added up in the same
# order in every run, on every chip. The period in which a block may add is its turn. Each wave of a workgroup has a counter of its own, waits for its
# block's turn, and passes the turn on, separately from the other waves (attn/ops/atomics.py). A turn is for two neighbouring tiles, because waiting
# for a turn and passing it on take time. If workgroups loop over lists of tiles, a tile of the list is as long as a turn.
#
# A workgroup waits only for blocks of its own head that add before its own block. Workgroups get their blocks by tickets (`by_ticket`): numbers that
# count the workgroups in the order in which they start. Blocks that add first have the lower tickets. So the workgroup with the lowest ticket never
# waits, and no workgroup waits forever.
#
# Without lists, all workgroups loop over the tiles of queries in ascending order. Under a causal mask the lowest ticket gives the last block of keys,
# which the fewest tiles of queries see. Each next ticket gives the block of keys before it. This block's loop begins nearer to the first query, by as
# many queries as a block has keys: by two tiles of 64 queries, or by one tile of 128. So blocks that start together work on different tiles at any
# time, and seldom wait.
#
# With lists, workgroups loop over tiles in descending order if blocks add in ascending order, and the other way round. For example, a block of keys
# may have the end of one document and the beginning of the next. This block comes first to the tiles of the second document, where the blocks after
# it wait for it, and then to the tiles of the first document, where no block waits for it. Tiles of which a mask hides some scores come after the
# others. A list also says which block adds first to a tile. This block sets the sums instead, so that no kernel needs to set them to 0 before
# (`tensors.set_by_first`).

@dataclass(frozen=True)
class Turns:
  """The turns of one wave to add to dQ in memory. A turn is the period in which only this wave may add to certain queries."""
  group: Workgroup
  wave: UOp
  first: UOp   # true in lane 0 of the wave
  tiles: int   # neighbouring tiles of queries of a turn: the wave adds to those of them that its workgroup loops over

  @staticmethod
  def of(group:Workgroup, wave:UOp, lane:UOp) -> Turns|None:
    """Makes the object for a wave, or returns None if workgroups may add to dQ in any order."""
    # if the queries are divided into parts, a turn is for a single tile, because the next tile can belong to another part
    return Turns(group, wave, lane.eq(0), 1 if group.split else TILES_OF_TURN) if "dq_turns" in group.given else None

  def turn(self, tile:UOp) -> UOp:
    """Returns the first of the neighbouring tiles of queries that share one turn with tile `tile`."""
    return tile//self.tiles*self.tiles
  def counter(self, head:UOp, tile:UOp) -> UOp:
    """Returns the int32 in memory that counts how many workgroups have ended their turn to add to dQ of tile `tile`."""
    group = self.group
    return flat(group.given["dq_turns"])[group.first_sums(head)*TURNS_OF_SUMS + self.turn(tile)*group.tile.waves + self.wave]
  def exists(self, tile:UOp) -> UOp:
    """Returns whether tile `tile` has any queries: the last tiles in a list may lie beyond the sequence."""
    # an entry of a list stands for several tiles, and the last ones of them may lie beyond the sequence
    if self.tiles > 1 or not isinstance(self.group.scores.order, TileList): return UOp.const(True)
    return below(tile*self.group.scores.block_n, self.group.sequence.n_q)
  def number(self, i:UOp, tile:UOp) -> UOp:
    """Returns how many workgroups add to dQ of tile `tile` before this workgroup, which computes the tile in iteration `i`."""
    group, n, order = self.group, self.group.scores.block_n, self.group.scores.order
    if isinstance(order, TileList): return order.turn(i)
    first, block = self.turn(tile)*n, group.grid.block
    seen = blocks_seen(over_keys(group.p, group.sequence), first, first + (self.tiles*n - 1), group.tile.block_m)
    return seen.end - 1 - block if hiding(group.p).after else block - seen.begin

  def begin(self, head:UOp, i:UOp, done:UOp) -> UOp:
    """Returns a statement that, after the operation `done`, waits for the wave's turn to add to dQ of the tile of iteration i."""
    tile = self.group.scores.tile(i)
    # only the first tile of the turn, or the workgroup's first tile, waits
    begins = tile.eq(self.turn(tile)) | i.eq(self.group.walked.begin)
    return atomics.await_turn(self.counter(head, tile), self.number(i, tile), self.first & begins & self.exists(tile), done)
  def end(self, head:UOp, i:UOp, done:UOp, last:bool=False) -> UOp:
    """Returns a statement that, after the operation `done`, ends the wave's turn to add to dQ of the tile of iteration i."""
    tile = self.group.scores.tile(i)
    # It adds 1 to the counter for which the next block waits, after the last tile of the turn, or if `last` says that it is the workgroup's last
    # iteration; for an `i` before the workgroup's first iteration it adds nothing. At `done` the wave's additions to this tile are complete.
    ends = UOp.const(True) if last else (tile + 1).eq(self.turn(tile + 1))
    return atomics.pass_turn(self.counter(head, tile), self.first & ends & (i >= self.group.walked.begin) & self.exists(tile), done)

  def sets(self, i:UOp) -> UOp|None:
    """Returns whether the wave is the first to add to dQ of the tile of iteration i, and so overwrites it; None if every wave adds."""
    return self.number(i, self.group.scores.tile(i)).eq(0) if set_by_first(self.group.p) else None

def some_turn_ended(group:Workgroup, tile:BlockTile) -> UOp:
  """Returns whether any workgroup has added to dQ of the queries that `group` owns. If none has, memory holds no dQ for them."""
  # `tile` describes the workgroups that add. They loop over lists, so whoever adds to a tile of a turn adds to all its tiles.
  first_tile = group.first_row//(tile.block_n*TILES_OF_TURN)*TILES_OF_TURN
  return flat(group.given["dq_turns"])[group.first_sums(group.first_head)*TURNS_OF_SUMS + first_tile*tile.waves].load() > 0

def first_turns(group:Workgroup, thread:UOp) -> list[UOp]:
  """Returns the stores of 0 to the counters of turns, on which workgroups that add to dQ later wait."""
  # The kernel that sets dQ to 0 makes these stores: each workgroup stores to the counters of its own tile of queries, with its first threads. The
  # workgroup of the very first tile also sets the counter of tickets to 0.
  if (counters := group.given.get("dq_turns")) is None: return []
  heads, tiles = dq_sums(group.p)[0][:2]
  head, tile, ticket = group.batch*group.p.H + group.first_head, group.first_row//QUERIES_OF_SUMS, thread.eq(TURNS_OF_SUMS)
  own = (group.first_sums(group.first_head) + tile)*TURNS_OF_SUMS + thread.minimum(TURNS_OF_SUMS - 1)
  there = (thread < TURNS_OF_SUMS) & group.has_sums | ticket & head.eq(0) & tile.eq(0)
  return [flat(counters)[ticket.where(UOp.const(heads*tiles*TURNS_OF_SUMS), own).valid(there)].store(UOp.const(0, dtypes.int))]
