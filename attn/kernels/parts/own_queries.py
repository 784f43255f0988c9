"""What the backward kernels that own queries share: a lane's query, and dS of a tile of keys."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import Generic, TypeVar
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.dropout import kept_scores
from attn.kernels.parts.gradients import Exponent, dp_start, exponent_of, gradients_of, scaled_delta, weights_of
from attn.kernels.parts.lanes import Lane
from attn.kernels.parts.layouts import LdsTile
from attn.kernels.parts.products import OwnRows, Products, zeros
from attn.kernels.parts.staging import StagedTile
from attn.kernels.parts.statements import Statements
from attn.kernels.parts.trips import StagedTrips, TripState
from attn.kernels.parts.workgroup import Workgroup
from attn.kernels.tiles.amd import BackwardTile
from attn.ops import common as ops
from attn.score.term import Row, ScoreTerm
from attn.tinygrad_compat import UOp

@dataclass(frozen=True)
class KeysState(TripState):
  """What crosses the trips of all of them."""
  k: StagedTile
  v: StagedTile

KS = TypeVar("KS", bound=KeysState)

@dataclass(frozen=True)
class OwnQueries(Generic[KS]):
  """A kernel whose lanes are queries and that walks over keys, as a thread sees it."""
  tile: BackwardTile
  new: Allocator
  statements: Statements
  state: KS      # at the start
  group: Workgroup
  at: Lane
  q: OwnRows
  do: OwnRows

  @functools.cached_property
  def row(self) -> Row: return self.group.row(self.q.in_block[0])
  @property
  def products(self) -> Products: return Products(self.at, self.tile.fenced, self.statements, self.tile.read_ahead)
  @functools.cached_property
  def trips(self) -> StagedTrips[KS]:
    return StagedTrips(self.tile, self.new, self.statements, self.state, {name: self.group.rows(name) for name in ("k", "v")})

  # ***** what a query has *****
  @functools.cached_property
  def exponent(self) -> Exponent: return exponent_of(self.group, self.row)

  @functools.cached_property
  def delta(self) -> UOp: return self.group.number("delta", self.row)

  # ***** a tile of keys *****
  def trip_number(self, t:UOp) -> UOp:
    """What differs from trip to trip: by it own rows that are not kept in registers are read anew."""
    return t

  def ds(self, k:LdsTile, v:LdsTile, t:UOp, masked:bool, added:ScoreTerm|None=None) -> list[UOp]:
    """dS^T, a column of C fragments, of raw scores (what it lacks is softmax_scale), or of what the term `added` adds."""
    mat, n, trip = self.tile.matrix, self.tile.block_n//self.tile.matrix.M, self.trip_number(t)
    scores = self.products.with_rows(k, n, self.q, trip, zeros(mat, 1, n))[0]
    kept, minus_delta = kept_scores(self.group.scores, [self.row], t), [ops.splat(scaled_delta(self.delta, self.group.p), mat.accumulator)]*n
    dp = self.products.with_rows(v, n, self.do, trip, [dp_start(minus_delta, kept)])[0]
    exponents = [self.exponent.each(lambda x: ops.splat(x, mat.accumulator))]*n
    weights = weights_of(self.group.scores, scores, exponents, self.row, t, masked)
    return gradients_of(weights, dp, kept, minus_delta, added)
