"""What the backward kernels on NVIDIA's mma.sync share: the ring of tiles in shared memory and the way over it, and the two kinds of
product of a trip.

A block owns rows, queries or keys, 16 or 32 for each warp, and walks over the others in tiles. Two tensors of each lie in shared memory: of the own
rows Q and dO, or K and V, and of those walked over the other two. A tile is read in both ways from where it lies: as B of products that contract
over the elements of its rows, and, transposed by ldmatrix, as B of products that contract over its rows. P and dS, whose rows are the own ones, are
operand A of those and never leave their lanes.
"""
from __future__ import annotations
import itertools
from dataclasses import dataclass, replace
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.backward_warps import QueriesOfWarps, WarpsBackward
from attn.kernels.parts.blocks import Blocks
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import dp_start, gradients_of, weights_of_rows
from attn.kernels.parts.layouts import SwizzledRows
from attn.kernels.parts.ring import CopyGroups
from attn.kernels.parts.scores import Scores
from attn.kernels.parts.statements import Statements, store_all
from attn.kernels.parts.trips import over_tiles
from attn.kernels.parts.warps import Warps
from attn.kernels.tiles.common import numbers_of_queries
from attn.kernels.tiles.mma import MmaBackwardTile
from attn.ops import common as ops, nvidia as nv
from attn.score.term import ScoreTerm
from attn.tinygrad_compat import UOp, dtypes

@dataclass(frozen=True)
class BackwardState(CopyGroups):
  """What crosses trips: the accumulators of each tile of own rows, one tile after another, and the numbers of queries on their way to shared memory;
  shared memory, and where statements are stored."""
  shared: UOp
  acc: UOp
  numbers: UOp
  statements: Statements

  @staticmethod
  def of(warps:Warps, tile:MmaBackwardTile, accs:int) -> BackwardState:
    """With so many accumulators for each tile of rows."""
    new = warps.group.grid.allocator
    return BackwardState(new.lds(tile.lds_bytes(warps.group.p)//UNIT_BYTES), new.registers(tile.row_tiles*accs, nv.F4),
                         new.registers(len(numbers_of_queries(warps.group.p))*tile.carried), Statements.of(new))

@dataclass(frozen=True)
class MmaBackward(WarpsBackward[SwizzledRows]):
  """A backward kernel by mma.sync."""
  tile: MmaBackwardTile
  state: BackwardState
  new_state = staticmethod(BackwardState.of)

  @property
  def parts(self) -> int: return self.tile.block_n//self.tile.part_n
  def of_part(self, scores:Scores) -> Scores:
    """Those of a part of a trip's rows, which `t*parts + i` is the number of."""
    return replace(scores, block_n=self.tile.part_n)

  # ***** shared memory *****
  def walked(self, name:str, t:UOp) -> SwizzledRows:
    """Tile t of this tensor."""
    return self.lies(name, self.tile.block_n, self.stage(t))
  def stage(self, t:UOp) -> UOp: return t%self.tile.stages*self.tile.stage(self.p) + self.own_size
  def numbers(self, t:UOp) -> UOp:
    """Where those of tile t begin."""
    return self.stage(t) + sum(x.size for x in self.tile.layouts(self.p, self.tile.block_n))

  # ***** the way over tiles *****
  def fetch(self, s:BackwardState, t:UOp) -> BackwardState:
    """Tile t is on its way."""
    raise NotImplementedError
  def settle(self, s:BackwardState, t:UOp) -> BackwardState:
    """What of it came to registers goes to shared memory."""
    return s
  def work(self, s:BackwardState, t:UOp, part:int, masked:bool) -> BackwardState:
    """What is done on a part of tile t."""
    raise NotImplementedError

  def cleared(self, s:BackwardState) -> BackwardState:
    return s.store([s.statements.first], store_all(s.acc, [nv.zero(UOp.const(0.0, dtypes.float))]*s.acc.max_numel()))

  def walk(self, s:BackwardState, tiles:Blocks) -> BackwardState:
    for i in range(self.tile.stages - 1): s = self.settle(self.fetch(s, tiles.begin + i), tiles.begin + i)
    return over_tiles(s, tiles, self.warps.group.grid.allocator, self.trip)

  def trip(self, s:BackwardState, t:UOp, masked:bool) -> UOp:
    ahead = t + self.tile.stages - 1
    s = self.fetch(s.arrived(self.tile.stages - 2), ahead)
    for part in range(self.parts): s = self.work(s, t, part, masked)
    return self.settle(s, ahead).done

  # ***** products *****
  def with_rows(self, s:BackwardState, own:SwizzledRows, tile:SwizzledRows, part:int, start:list[list[UOp]]) -> list[list[UOp]]:
    """`start` + A B: own rows times rows of a part of a tile, the contraction over their elements; C fragments of each tile of own rows."""
    mat, tiles, first = self.mat, [list(row) for row in start], part*self.tile.part_n
    (a_row, a_unit), (b_row, b_unit) = mat.a_address(self.warps.at.lane), mat.b_address(self.warps.at.lane)
    for step in range(own.units*mat.unit//mat.K):
      a = [s.read(own, self.in_block[0] + a_row, a_unit, i*mat.M, 2*step) for i in range(self.tile.row_tiles)]
      for pair in range(self.tile.part_n//mat.K):
        b = s.read(tile, b_row, b_unit, first + pair*mat.K, 2*step)
        for i, half in itertools.product(range(self.tile.row_tiles), range(2)):
          tiles[i][2*pair + half] = nv.mma(mat, a[i], b, half, tiles[i][2*pair + half])
    return tiles

  def packed(self, x:list[UOp]) -> list[UOp]:
    """C fragments of a tile of own rows as operand A."""
    return [nv.pack_a(a, b, self.p.dtype) for a, b in zip(x[0::2], x[1::2])]

  def add_product(self, s:BackwardState, name:str, weights:list[list[UOp]], tile:SwizzledRows, part:int) -> BackwardState:
    """Adds A B to the gradient `name`: weights, operands of each tile of own rows, times the rows of a part of a tile."""
    mat, first = self.mat, part*self.tile.part_n
    row, unit = mat.b_transposed_address(self.warps.at.lane)
    accs = [[s.acc[j].load() for j in self.place(name, i)] for i in range(self.tile.row_tiles)]
    for step, pair in itertools.product(range(self.tile.part_n//mat.K), range(self.accs(name)//2)):
      b = s.read(tile, row, unit, first + step*mat.K, 2*pair, transposed=True)
      for i, half in itertools.product(range(self.tile.row_tiles), range(2)):
        accs[i][2*pair + half] = nv.mma(mat, weights[i][step], b, half, accs[i][2*pair + half])
    return s.store([s.acc[j].store(x) for i, xs in enumerate(accs) for j, x in zip(self.place(name, i), xs)])

@dataclass(frozen=True)
class QueriesByMma(MmaBackward, QueriesOfWarps[SwizzledRows]):
  """One that owns queries and walks over keys."""
  def fetch(self, s:BackwardState, t:UOp) -> BackwardState:
    return s.started(self.warps.copies_of_keys(s.shared, t, self.walked("k", t), self.walked("v", t)))

  def ds(self, s:BackwardState, t:UOp, part:int, masked:bool, added:ScoreTerm|None=None) -> list[list[UOp]]:
    """dS of some keys of a tile, C fragments of each tile of queries, of raw scores (what it lacks is softmax_scale), or of what the term `added`
    adds."""
    scores, columns, number = self.of_part(self.warps.group.scores), self.tile.part_n//self.mat.N, t*self.parts + part
    left = [kept_scores(scores, rows, number) for rows in self.queries]
    minus_deltas = [self.minus_deltas(i, columns) for i in range(len(self.queries))]
    raw = self.with_rows(s, self.own("q"), self.walked("k", t), part, [[nv.zero(s.done)]*columns for _ in self.queries])
    dp = self.with_rows(s, self.own("do"), self.walked("v", t), part, [dp_start(x, kept) for x, kept in zip(minus_deltas, left)])
    found = []
    for i, rows in enumerate(self.queries):
      weights = weights_of_rows(scores, raw[i], [[e.each(lambda x: ops.splat(x, 2))]*columns for e in self.exponents[i]], rows, number, masked)
      found.append(gradients_of(weights, dp[i], left[i], minus_deltas[i], added))
    return found
