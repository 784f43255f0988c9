"""The fixed order in which workgroups that own keys add to the sums of dQ.

The blocks of keys that see a tile of queries add to its sums one after another: in ascending order, or in descending order if a mask hides keys after
a query, as a causal mask does. So each sum is added up in the same order in every run, on every chip. Each wave of a workgroup has a counter of its
own, and adds only in its turn (attn/ops/atomics.py). A turn takes two neighbouring tiles, because waiting for a turn and passing it take time.

A workgroup waits only for blocks of its own head that come before its own block. It draws its work by a ticket (`workgroup.drawn`), and these blocks
have lower tickets. So the workgroup with the lowest ticket never waits, and no workgroup waits forever.

All workgroups loop over the tiles in ascending order. Under a causal mask the last block of keys comes first. It sees the fewest tiles, and each
following block begins two tiles (a block of keys) earlier: blocks that start together meet no tile at the same time."""
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
  """The turns of one wave of a workgroup. `first` is true in lane 0 of the wave. A turn takes `tiles` tiles, or those of them that the workgroup
  sees."""
  group: Workgroup
  wave: UOp
  first: UOp
  tiles: int

  @staticmethod
  def of(group:Workgroup, wave:UOp, lane:UOp) -> Turns|None:
    """Returns None if workgroups add to the sums of dQ in no order. If the queries are divided into parts, a turn is a single tile, which belongs to
    one part."""
    if "dq_turns" not in group.given: return None
    return Turns(group, wave, lane.eq(0), 1 if group.split else TILES_OF_TURN)

  def turn(self, tile:UOp) -> UOp:
    """Returns the first tile of the turn to which a tile belongs."""
    return tile//self.tiles*self.tiles
  def counter(self, head:UOp, tile:UOp) -> UOp:
    """Returns the INDEX of the wave's counter for a tile."""
    of_head = (self.group.batch*self.group.p.H + head)*(dq_sums(self.group.p)[0][1]*TURNS_OF_SUMS)
    return flat(self.group.given["dq_turns"])[of_head + self.turn(tile)*self.group.tile.waves + self.wave]
  def number(self, tile:UOp) -> UOp:
    """Returns how many blocks of keys have their turn before the workgroup's own block."""
    group, n, block = self.group, self.group.scores.block_n, self.group.grid.block
    first = self.turn(tile)*n
    seen = blocks_seen(over_keys(group.p, group.sequence), first, first + (self.tiles*n - 1), group.tile.block_m)
    return seen.end - 1 - block if hiding(group.p).after else block - seen.begin

  def begin(self, head:UOp, tile:UOp, done:UOp) -> UOp:
    """Waits for the wave's turn, if the workgroup's turn begins with this tile. Returns a statement."""
    begins = tile.eq(self.turn(tile)) | tile.eq(self.group.walked.begin)
    return atomics.await_turn(self.counter(head, tile), self.number(tile), self.first & begins, done)
  def end(self, head:UOp, tile:UOp, done:UOp, last:bool=False) -> UOp:
    """Passes the turn, if it ends with this tile and the workgroup sees the tile. `last` says that the tile is the workgroup's last one. The wave's
    additions to the tile must be complete. Returns a statement."""
    ends = UOp.const(True) if last else (tile + 1).eq(self.turn(tile + 1))
    return atomics.pass_turn(self.counter(head, tile), self.first & ends & (tile >= self.group.walked.begin), done)

def first_turns(group:Workgroup, thread:UOp) -> list[UOp]:
  """Returns the stores with which a workgroup that owns a tile of the sums begins the counters of the tile with 0. The workgroup of the first tile
  also begins the counter of tickets."""
  if (counters := group.given.get("dq_turns")) is None: return []
  heads, tiles = dq_sums(group.p)[0][:2]
  tile = (group.batch*group.p.H + group.first_head)*tiles + group.first_row//QUERIES_OF_SUMS
  ticket = thread.eq(TURNS_OF_SUMS)
  at = ticket.where(UOp.const(heads*tiles*TURNS_OF_SUMS), tile*TURNS_OF_SUMS + thread.minimum(TURNS_OF_SUMS - 1))
  return [flat(counters)[at.valid((thread < TURNS_OF_SUMS) | (ticket & tile.eq(0)))].store(UOp.const(0, dtypes.int))]
