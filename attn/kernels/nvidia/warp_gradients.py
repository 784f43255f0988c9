"""What the backward kernels with mma.sync and with wgmma have in common: lse, delta, P and dS of the rows that a warp owns; stores of gradients."""
from __future__ import annotations
import functools
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar
from attn.chips.matrix import Mma
from attn.kernels.nvidia.warps import Warps, sum_over_quad
from attn.kernels.parts.backward.gradients import (Normaliser, Weights, gradients_of, normaliser_of, scaled_delta, weights_of_rows)
from attn.kernels.parts.memory.lanes import element_sum
from attn.kernels.parts.memory.layouts import CopiedLayout
from attn.kernels.parts.memory.rows import Rows
from attn.kernels.parts.program.counts import below, round_up
from attn.kernels.parts.weights.dropout import Kept, kept_scores
from attn.kernels.parts.weights.epilogue import place_of_row
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.common import OF_KEYS, OF_QUERIES, BlockTile
from attn.kernels.tiles.mma import fragments
from attn.ops import common as ops, nvidia as nv
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# A warp owns queries and loops over tiles of keys, or owns keys and loops over tiles of queries. The rows of these tiles are the walked rows.

L = TypeVar("L", bound=CopiedLayout)
L_co = TypeVar("L_co", bound=CopiedLayout, covariant=True)

class WarpsTile(BlockTile, Protocol[L_co]):
  """The tile description of a backward kernel on NVIDIA."""
  @property
  def matrix(self) -> Mma: """The matrix instruction of the kernel, with the shapes of its fragments."""
  @property
  def row_tiles(self) -> int: """Number of tiles of 16 rows that each warp owns."""
  @property
  def keys(self) -> bool: """Whether a thread block owns keys. If not, it owns queries."""
  def layouts(self, p:Problem, rows:int) -> tuple[L_co, L_co]:
    """Returns (layout for rows of q or k, layout for rows of do or v) in shared memory, each for `rows` rows."""

Normalisers = list[list[Normaliser]]     # for each own row of a lane: one for each vector of scores of this row
Lse = list[Normalisers]                  # one entry for each tile of own rows

@dataclass(frozen=True)
class OwnQueryValues:
  """lse (as the numbers that turn scores into P) and delta of the queries that this lane owns: one list for each tile of 16 rows."""
  normalisers: list[list[Normaliser]]
  deltas: list[list[UOp]]

@dataclass(frozen=True)
class WarpRows(Generic[L]):
  """The rows that the warps of a thread block own: queries if the block loops over keys, keys if the block loops over queries."""
  warps: Warps
  tile: WarpsTile[L]
  wanted: tuple[str, ...]   # the gradients (dq, dk, dv) that the warps compute, in the order of their accumulators
  head: UOp                 # the query head over whose rows the block is looping

  @property
  def mat(self) -> Mma: return self.tile.matrix
  @property
  def p(self) -> Problem: return self.warps.group.p
  @property
  def own(self) -> tuple[str, str]: return OF_KEYS if self.tile.keys else OF_QUERIES
  @property
  def walked(self) -> tuple[str, str]: return OF_QUERIES if self.tile.keys else OF_KEYS
  @property
  def scores(self) -> Scores: return self.warps.group.scores.of_head(self.head) if self.tile.keys else self.warps.group.scores

  def of_head(self, head:UOp) -> WarpRows[L]:
    """Returns a copy for the loop over the rows of query head `head`; the rows that the block owns stay the same."""
    return replace(self, head=head)

  @functools.cached_property
  def in_block(self) -> list[UOp]:
    """Indices of the first row of each tile of 16 rows that this warp owns, counted from the first row of the thread block."""
    return [(self.warps.at.wave*self.tile.row_tiles + i)*self.mat.M for i in range(self.tile.row_tiles)]
  @functools.cached_property
  def of_lane(self) -> list[list[Row]]:
    """The rows that this lane owns: for each tile of 16 rows, a list of the two rows of which the lane holds elements."""
    if not self.tile.keys: return [self.warps.queries(first) for first in self.in_block]
    group = self.warps.group
    there = group.sequence.n_k if self.p.varlen else self.p.Sk
    numbers = [[group.first_row + first + self.mat.c_row(self.warps.at.lane, r) for r in range(nv.ROWS)] for first in self.in_block]
    return [[Row(group.batch, self.head, key, below(key, there)) for key in own] for own in numbers]

  # ***** registers *****
  def accs(self, name:str) -> int:
    """Returns the number of accumulators that a lane needs for the gradient `name` of 16 rows."""
    return fragments(self.p.Dv if name == "dv" else self.p.D, self.mat)
  def accumulators(self, name:str, i:int=0) -> range:
    """Returns which of a lane's accumulators hold the gradient `name` of the warp's i-th tile of 16 rows, as a range of indices."""
    before = sum(map(self.accs, self.wanted[:self.wanted.index(name)]))
    first = i*sum(map(self.accs, self.wanted)) + before
    return range(first, first + self.accs(name))

  # ***** shared memory: own rows, then tiles of walked rows *****
  def layout_of(self, name:str, rows:int, first:UOp|int) -> L:
    """Returns where `rows` rows of the tensor `name` (q, k, v or do) lie in shared memory, as a layout."""
    # the memory from the 16-byte unit `first` on holds `rows` rows of q or k, followed by `rows` rows of do or v
    of_d, of_dv = self.tile.layouts(self.p, rows)
    return of_d.moved_to(first) if name in ("q", "k") else of_dv.moved_to(first + of_d.size)
  def kept(self, name:str) -> L:
    """Returns the layout, in shared memory, of those rows of the tensor `name` that the thread block owns."""
    return self.layout_of(name, self.tile.block_m, 0)
  @property
  def size(self) -> int:
    """Number of 16-byte units of shared memory for the rows that the thread block owns: rows of q and dO, or of k and v."""
    return sum(x.size for x in self.tile.layouts(self.p, self.tile.block_m))
  def copies(self, shared:UOp) -> list[UOp]:
    """Returns the statements by which this thread copies its part of the rows that the block owns to shared memory."""
    group = self.warps.group
    return [x for name in self.own for x in self.warps.copies(group.operand_rows(name), shared, group.first_row, self.kept(name))]
  def walked_rows(self, name:str, head:UOp, count:UOp) -> Rows:
    """Returns the rows of the tensor `name` for query head `head`, over which the block loops; rows from `count` on are read as zeros."""
    return self.warps.group.operand_rows(name, head).up_to(count)

  # ***** values of own queries *****
  @property
  def normalisers(self) -> list[list[Normaliser]]: return [[normaliser_of(self.warps.group, row) for row in own] for own in self.of_lane]
  @functools.cached_property
  def deltas(self) -> list[list[UOp]]:
    return [[self.delta(first + self.mat.c_row(self.warps.at.lane, r), row) for r, row in enumerate(own)]
            for first, own in zip(self.in_block, self.of_lane)]

  def delta(self, in_block:UOp, row:Row) -> UOp:
    """Returns delta of the query `row`: the sum of dO * O over all columns, minus the gradient of the query's lse, if there is one."""
    # `in_block` is the index of the query in the block. dO is first rounded to the inputs' dtype, because the product dP = dO V^T uses rounded dO.
    group, mat = self.warps.group, self.mat
    rows = (group.rows_of("o"), self.p.out_dtype), (group.operand_rows("do"), self.p.dtype)
    total = ops.splat(0.0, 4)
    for first in range(0, round_up(self.p.Dv, mat.K)//mat.unit, mat.groups):
      quads = [x.load_quads(group.first_row, self.tile.block_m, in_block, first + self.warps.at.h, dtype) for x, dtype in rows]
      for o, do in zip(*quads): total = ops.add(total, ops.mul(o, do))
    total = sum_over_quad(element_sum(total))
    return ops.sub(total, group.query_value("dlse", row)) if "dlse" in group.given else total

  # ***** the stores at the end *****
  def gradient(self, acc:UOp, name:str) -> list[UOp]:
    """Returns the stores of the gradient `name` to global memory; `acc` is the register array with this lane's C fragments."""
    # for keys beyond a batch's length (kv_lengths), 0 is stored
    def known(row:Row) -> UOp|None: return row.index < self.warps.group.sequence.n_k if self.tile.keys and self.p.kv_lengths else None
    return [x for i, own in enumerate(self.of_lane)
            for x in self.stores([acc[j].load() for j in self.accumulators(name, i)], name, own, list(map(known, own)))]

  def stores(self, accs:list[UOp], name:str, own:list[Row], known:list[UOp|None]) -> list[UOp]:
    """Returns the stores of two rows of the gradient `name`, given as C fragments `accs`; zeros where the row's condition in `known` is false."""
    # `own` are the two rows of this lane
    group, factor = self.warps.group, UOp.const(1.0 if name == "dv" else self.p.softmax_scale, dtypes.float)
    dtype, width = self.p.dtype if group.part is None else "float32", self.p.Dv if name == "dv" else self.p.D
    found = list[UOp]()
    for r, (row, there) in enumerate(zip(own, known)):
      columns = self.warps.columns(accs, r, factor, None, dtype, width)
      if there is not None: columns = [(first, where_there(there, x)) for first, x in columns]
      found += group.gradient(name, row, columns)
    return found

  def kept_deltas(self) -> list[UOp]:
    """Returns the stores of delta to global memory, for the queries that this lane owns."""
    group = self.warps.group
    to, x, first = flat(group.given["delta"]), group.sequence, self.warps.at.h.eq(0) & group.is_first_part
    both = [pair for own, deltas in zip(self.of_lane, self.deltas) for pair in zip(own, deltas)]
    return [to[place_of_row(self.p, x, row)[0].valid(row.there & first)].store(delta) for row, delta in both]

def where_there(there:UOp, x:UOp) -> UOp:
  """Returns `x`, numbers or packed numbers, where the condition `there` is true, and zeros elsewhere."""
  return ops.build(*[there.where(ops.extract(x, i), 0) for i in range(ops.length(x))])

@dataclass(frozen=True)
class WarpTrip(Generic[L]):
  """Base class for one iteration of a backward kernel: the computations between the matrix products."""
  warp_rows: WarpRows[L]
  score: Scores
  tile_number: UOp   # counts the tiles over which the block loops; a tile has `score.block_n` rows
  masked: bool

  @property
  def columns(self) -> range:
    """Indices of a warp's C fragments for 16 queries: each holds their scores with 8 keys (or the scores of 16 keys with 8 queries)."""
    return range(self.score.block_n//self.warp_rows.mat.N)
  @functools.cached_property
  def left(self) -> list[Kept]: return [kept_scores(self.score, own, self.tile_number) for own in self.warp_rows.of_lane]

  def lse_of_own(self, numbers:OwnQueryValues) -> Lse:
    return [[[e.each(lambda x: ops.splat(x, 2))]*len(self.columns) for e in own] for own in numbers.normalisers]
  def lse_of_walked(self, normalisers:list[Normaliser]) -> Lse: return [[normalisers]*nv.ROWS for _ in self.warp_rows.of_lane]
  def minus_delta_of_own(self, numbers:OwnQueryValues) -> list[list[UOp]]:
    """Returns -delta of the queries that this lane owns, repeated so that it can be added to C fragments of dP; one list for each 16 queries."""
    # with dropout -delta*(1 - dropout_p); there is a list for each tile of 16 rows
    return [[ops.concat(*[ops.splat(scaled_delta(x, self.warp_rows.p), nv.ROWS) for x in own])]*len(self.columns) for own in numbers.deltas]
  def minus_delta_of_walked(self, columns:list[UOp]) -> list[list[UOp]]: return [[ops.concat(x, x) for x in columns] for _ in self.warp_rows.of_lane]

  def weights(self, scores:list[list[UOp]], lse:Lse) -> list[Weights]:
    tiles = zip(scores, lse, self.warp_rows.of_lane)
    return [weights_of_rows(self.score, x, normalisers, rows, self.tile_number, self.masked) for x, normalisers, rows in tiles]
  def ds(self, weights:list[Weights], dp:list[list[UOp]], derivatives:Collection[str]|None=None) -> list[list[UOp]]:
    return [gradients_of(w, x, derivatives) for w, x in zip(weights, dp)]
  def packed(self, x:list[UOp]) -> list[UOp]:
    """Returns the C fragments `x` of 16 rows, rounded to 16 bits, as operands A: each operand is made of two fragments."""
    return [nv.pack_a([a, b], self.warp_rows.p.dtype) for a, b in zip(x[0::2], x[1::2])]
  def rounded(self, ds:list[list[UOp]]) -> list[list[UOp]]: return [self.packed(x) for x in ds]
  def kept(self, weights:list[Weights]) -> list[list[UOp]]:
    return [[left.packed(x, 2*i) for i, x in enumerate(self.packed(w.p))] for left, w in zip(self.left, weights)]
