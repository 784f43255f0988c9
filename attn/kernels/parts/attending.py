"""What the forward kernels with AMD's matrix instructions have in common: a lane's query, the tiles in LDS, and the steps of the work on a tile."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Self
from attn.chips import Chip
from attn.chips.matrix import Matrix, contraction
from attn.kernels.parts.counts import round_up
from attn.kernels.parts.lanes import Lane, units_of
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.pipeline import Pipeline, TripState
from attn.kernels.parts.products import FENCE_UNITS, OwnRows, Products, zeros
from attn.kernels.parts.rows import GlobalRows
from attn.kernels.parts.softmax import Softmax, Sums
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Statements
from attn.kernels.parts.workgroup import Workgroup, head_fastest
from attn.kernels.tiles.amd import Tile
from attn.ops import common as ops
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp

APART_UP_TO = 64     # head dimension: up to it vector instructions are what a trip is short of

@dataclass(frozen=True)
class ForwardState(TripState):
  """What crosses trips: the softmax's registers and the tiles in LDS."""
  softmax: Softmax
  k: StagedTile
  v: StagedTile

@dataclass(frozen=True)
class Attending(Pipeline[ForwardState]):
  """The kernel of one problem, as a thread sees it: what is the same in all trips."""
  tile: Tile
  state: ForwardState
  group: Workgroup
  at: Lane
  sums: Sums
  dual: bool         # the chip issues two vector instructions at once
  apart: bool        # fp32 operations are not packed, for which the matrix unit of CDNA stands still
  q_lds: LdsTile

  @classmethod
  def of(cls, p:Problem, arch:Chip, tile:Tile, args:tuple[UOp, ...]) -> Self:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix)
    at, new, layouts = Lane(grid.lane, grid.wave, mat), grid.allocator, tile.layouts(p)
    k_lds, v_lds, q_lds = (LdsTile.of(new, x, n) for x, n in zip((layouts[1], layouts[2], layouts[0]), (tile.buffers, tile.buffers, 1)))
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, lies, turned) for lies, turned in ((k_lds, None), (None, v_lds)))
    statements = Statements.of(new)
    sums = Sums.of(arch, p.dtype, p.writes_lse)
    softmax = Softmax.create(mat, tile.q_tiles, round_up(p.Dv, mat.M)//mat.M, tile.block_n//mat.M, sums, new)
    group = Workgroup.of(p, arch, tile, args, grid, at)
    apart = p.dtype in arch.unit.apart and max(p.D, p.Dv) <= APART_UP_TO
    return cls(tile, new, statements, ForwardState(softmax, k, v), group, at, sums, arch.unit.dual_issue, apart, q_lds)

  # ***** sizes *****
  @property
  def mat(self) -> Matrix: return self.tile.matrix
  @property
  def k_tiles(self) -> int: return self.tile.block_n//self.mat.M
  @property
  def d_tiles(self) -> int: return round_up(self.group.p.Dv, self.mat.M)//self.mat.M
  @functools.cached_property
  def in_block(self) -> list[UOp]:
    """A lane's rows of the block: one for each query tile."""
    return [(self.at.wave*self.tile.q_tiles + t)*self.mat.N + self.at.n for t in range(self.tile.q_tiles)]
  @functools.cached_property
  def queries(self) -> list[Row]: return [self.group.row(i) for i in self.in_block]
  @functools.cached_property
  def q(self) -> OwnRows:
    """Operand B of S^T."""
    group, units = self.group, units_of(self.mat, contraction(self.mat, self.group.p.D), self.at.h)
    lds = self.q_lds if self.tile.q_in_lds else None
    return OwnRows(self.at, group.rows("q"), group.first_row, self.tile.block_m, self.in_block, units, lds)
  @property
  def products(self) -> Products: return Products(self.at, FENCE_UNITS if self.tile.fenced else 0, self.statements)

  def outputs(self, softmax:Softmax, qt:int, row:Row) -> list[UOp]:
    """O = O^T / l, LSE = m + ln l."""
    mat = self.mat
    factor, log_sum = self.group.normalised(row, softmax.m[qt].load(), softmax.totals(qt, mat))
    o = [(self.at.h*mat.accumulator + dt*mat.M, ops.mul(softmax.acc[qt*self.d_tiles + dt].load(), factor)) for dt in range(self.d_tiles)]
    return self.group.outputs(row, o, log_sum)

  @property
  def loaded(self) -> dict[str, GlobalRows]: return {name: self.group.rows(name) for name in ("k", "v")}

  # ***** one trip *****
  def raw_scores(self, s:ForwardState, t:UOp) -> list[list[UOp]]:
    """S^T = K Q^T of a key tile: for each query tile a column of C fragments."""
    k_tile = self.in_lds(s, t, "k").rows
    return self.products.with_rows(k_tile, self.k_tiles, self.q, t, zeros(self.mat, self.tile.q_tiles, self.k_tiles))

  def weigh(self, softmax:Softmax, tiles:list[list[UOp]]) -> Softmax:
    """P of a key tile, relative to a reference that it does not outgrow."""
    to_log2 = self.group.scores.to_log2
    softmax, biases = softmax.biases(self.dual)
    weights = [softmax.weights(x, bias, to_log2) for x, bias in zip(tiles, biases, strict=True)]
    return softmax.correct(weights, tiles, to_log2, self.mat, self.sums, self.tile.rescale_above, self.statements.do)
