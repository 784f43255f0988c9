"""Backward with AMD's matrix instructions, MFMA and WMMA: each tile's scores, P and dS, and the sums of dQ, dK and dV. Begin with `AmdTrip`."""
from __future__ import annotations
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any, Self
from attn.chips import Chip
from attn.chips.matrix import Matrix
from attn.kernels.amd.gradient_sums import delta_of_row, place_of_tile
from attn.kernels.amd.products import READS_OF_TURNED, OwnRows, Products, TurnedColumns, zeros
from attn.kernels.amd.staging import StagedTile
from attn.kernels.parts.backward.gradients import (WEIGHTED, Normaliser, QueryValues, QueryValueTensors, Weights, dp_start, gradients_of,
                                                   gradients_of_passes, less_delta, normaliser_of, scaled_delta, weights_of, where_known)
from attn.kernels.parts.backward.turns import Turns
from attn.kernels.parts.grid.tensors import Shapes
from attn.kernels.parts.grid.workgroup import Workgroup, head_fastest, kv_head_fastest
from attn.kernels.parts.memory.lanes import Lane, fragment_operands, operands, units_of
from attn.kernels.parts.memory.layouts import LdsTile, SharedLayout
from attn.kernels.parts.memory.rows import columns_of_rows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import below, round_up
from attn.kernels.parts.program.statements import Statements, store_all, workgroup_barrier
from attn.kernels.parts.program.trips import StagedTrips, TripState
from attn.kernels.parts.weights.dropout import Kept, kept_scores
from attn.kernels.parts.weights.epilogue import place_of_row
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.amd import BackwardTile, both_ways_layout, column_layout
from attn.kernels.tiles.common import OF_KEYS, OF_QUERIES, query_value_names
from attn.ops import amd, atomics, common as ops
from attn.ops.atomics import atomic_add
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, Ops, UOp, dtypes

# A workgroup owns queries and loops over tiles of keys, or it owns keys and loops over tiles of queries. The rows of these tiles are the walked rows.
# Each lane has one own row, a row that the workgroup owns (attn/chips/matrix.py). A workgroup that owns queries computes S^T = K Q^T and dP^T = V
# dO^T. A workgroup that owns keys computes S = Q K^T and dP = dO V^T. P and dS then already lie in registers as operand B of the gradients' products:
# dQ^T = K^T dS^T, dV^T = dO^T P and dK^T = Q^T dS. Tiles of walked rows lie in LDS row by row. LDS also holds the transposed tile if a gradient's
# product reads it. If the walked rows are queries, each score of a lane belongs to another query: LDS then also holds lse and delta of the tile's
# queries.

@dataclass(frozen=True)
class TripStores:
  """The stores (to registers, LDS or memory) that one iteration of a loop has made so far."""
  # all of them are done when the iteration ends, and, if the workgroup adds to dQ, before the product for dQ
  found: tuple[UOp, ...] = ()
  # an iteration begins without stores
  def after(self, *deps:UOp) -> TripStores: return TripStores()

@dataclass(frozen=True)
class KeysState(TripState):
  """The values that the loop over keys carries from iteration to iteration: tiles of K and V in LDS, and sums of a gradient."""
  k: StagedTile
  v: StagedTile
  acc: UOp   # sums of the gradient, as C fragments
  stores: TripStores

@dataclass(frozen=True)
class QueriesState(TripState):
  """The values that the loop over queries carries from iteration to iteration: tiles of Q and dO, lse and delta in LDS, and sums of gradients."""
  q: StagedTile
  do: StagedTile
  query_values: QueryValues   # lse and delta of the tile's queries
  acc: UOp                    # sums of the gradients, as C fragments
  stores: TripStores

@dataclass(frozen=True)
class AllState(QueriesState):
  """The values that the loop over queries carries in a kernel that adds to dQ: those of the base class, and dS in LDS."""
  ds: LdsTile   # through this tile waves exchange dS

@dataclass(frozen=True)
class AmdBackward:
  """Builder of a backward kernel on AMD for one problem: its methods return the UOps of the kernel's steps, as one thread runs them."""
  # if the kernel loops over the tiles twice (two passes), there is one object for each pass; no field changes during the loop over the tiles of one
  # head
  tile: BackwardTile
  new: Allocator
  statements: Statements
  state: Any      # before the first iteration
  group: Workgroup
  at: Lane
  own: tuple[OwnRows, OwnRows]   # the rows that the workgroup owns: of q and dO, or of k and v
  wanted: tuple[str, ...]
  head: UOp   # the query head whose tiles the loop reads
  known: tuple[Normaliser, UOp]|None = None      # normaliser and delta of the lane's query, if queries are owned
  outer_trip: UOp|None = None      # index of the outer iteration, if all outer iterations read the same tile of keys
  sharing: DqOfTile|None = None    # what the workgroup needs to add its part of dQ to memory, if it owns keys and does so

  @staticmethod
  def of_queries(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> AmdBackward:
    mat, grid = tile.matrix, head_fastest(p, tile, tile.matrix, arch)
    at, new = Lane(grid.lane, grid.wave, mat), grid.allocator
    k_rows, v_rows = (LdsTile.of(new, both_ways_layout(mat, tile.block_n, width), tile.buffers) for width in (p.D, p.Dv))
    k_columns = LdsTile.of(new, column_layout(mat, tile.block_n, p.D), tile.buffers)
    k, v = (StagedTile.of(mat, tile.block_n, tile.threads, at.thread, lies, turned) for lies, turned in ((k_rows, k_columns), (v_rows, None)))
    group, statements = Workgroup.of(p, arch, tile, args, grid, at, shapes, parts), Statements.of(new)
    own = own_rows(group, tile, at, statements, tile.own_in_lds)
    dq = new.registers(round_up(p.D, mat.M)//mat.M, ops.f32(mat.accumulator))
    self = AmdBackward(tile, new, statements, KeysState(k, v, dq, TripStores()), group, at, own, ("dq",), group.first_head)
    return replace(self, known=(normaliser_of(group, self.row), self.delta))

  @staticmethod
  def of_keys(p:Problem, arch:Chip, tile:BackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> list[AmdBackward]:
    # The objects of two passes use the same LDS.
    if "dq_turns" in shapes and tile.prefetch > 1:
      raise NotImplementedError(f"prefetch={tile.prefetch}: a kernel that adds to dq in a fixed order supports only prefetch 0 and 1")
    mat, n, grid = tile.matrix, tile.block_n, kv_head_fastest(p, tile, tile.matrix, arch)
    at, new = Lane(grid.lane, grid.wave, mat), grid.allocator
    q_rows, do_rows = (LdsTile.of(new, tile.row_layout(width), tile.buffers) for width in (p.D, p.Dv))
    q_columns, do_columns = transposed_tiles(new, tile, *[column_layout(mat, n, width) for width in (p.D, p.Dv)])
    numbers, statements = QueryValues.of(p, mat, n, new, tile.buffers, at.thread), Statements.of(new)
    group = Workgroup.of_keys(p, arch, tile, args, grid, at, shapes, parts, new.lds(1, dtypes.int)[0] if "dq_turns" in shapes else None)
    own = own_rows(group, tile, at, statements, tile.own_in_lds)
    sharing = DqOfTile.of(group, tile, at) if tile.adds_dq else None
    def one(wanted:tuple[str, ...]) -> AmdBackward:
      q = StagedTile.of(mat, n, tile.threads, at.thread, q_rows, q_columns if "dk" in wanted else None)
      do = StagedTile.of(mat, n, tile.threads, at.thread, do_rows if "dk" in wanted or tile.turning else None, do_columns if "dv" in wanted else None)
      acc = new.registers(sum(round_up(group.rows_of(name).width, mat.M)//mat.M for name in wanted if name != "dq"), ops.f32(mat.accumulator))
      state = QueriesState(q, do, numbers, acc, TripStores())
      if sharing is not None: state = AllState(q, do, numbers, acc, TripStores(), LdsTile.of(new, tile.ds))
      return AmdBackward(tile, new, statements, state, group, at, own, wanted, group.first_head, sharing=sharing)
    return [one(wanted) for wanted in gradients_of_passes(tile.passes, tile.adds_dq)]

  # ***** rows and registers *****
  @property
  def walked(self) -> tuple[str, str]: return OF_QUERIES if self.tile.keys else OF_KEYS
  @functools.cached_property
  def row(self) -> Row:
    """The query or key that this lane owns."""
    group, in_block = self.group, self.own[0].in_block[0]
    if not self.tile.keys: return group.row(in_block)
    key = group.first_row + in_block
    return Row(group.batch, self.head, key, below(key, group.sequence.n_k if group.p.varlen else group.p.Sk))
  @property
  def scores(self) -> Scores: return self.group.scores.of_head(self.head) if self.tile.keys else self.group.scores
  @property
  def products(self) -> Products: return Products(self.at, self.tile.fenced, self.statements, self.tile.read_ahead, self.tile.ahead > 0)
  def accumulators(self, name:str) -> range:
    """Returns which accumulators of this pass belong to the gradient `name` ("dq", "dk" or "dv"), as a range of indices."""
    names = self.wanted[:self.wanted.index(name) + 1]
    *before, own = [round_up(self.group.rows_of(x).width, self.tile.matrix.M)//self.tile.matrix.M for x in names]
    return range(sum(before), sum(before) + own)
  @functools.cached_property
  def delta(self) -> UOp:
    """Returns delta of this lane's query: the sum of dO * O over all columns, minus the gradient of the query's lse, if there is one."""
    # dO is first rounded to the inputs' dtype, because the product dP = dO V^T uses rounded dO
    kept, of_do = [x.kept.buffer for x in self.own if x.lds is not None], self.own[1]
    def fence(total:UOp) -> list[UOp]: return [self.statements.do(amd.sched_barrier(total), *kept)] if self.tile.fenced else []
    return delta_of_row(self.group, self.tile, of_do.in_block[0], self.row, of_do.together, fence)

  # ***** the loop over tiles *****
  def begin(self, s:Any=None, stores:list[UOp]|None=None) -> Any:
    s = self.state.after(*[workgroup_barrier(UOp.group(*stores))] if stores else [])     # all waves have read LDS before a wave overwrites it
    return s.after(UOp.group(*store_all(s.acc, zeros(self.tile.matrix, 1, s.acc.max_numel())[0])))

  @functools.cached_property
  def trips(self) -> StagedTrips[Any]:
    group, head = self.group, self.head
    loaded: dict[str, Any] = {name: group.operand_rows(name, head) for name in self.walked}
    if self.tile.keys:
      values = tuple(group.query_value_rows(name, head) for name in query_value_names(group.p))
      loaded["query_values"] = QueryValueTensors(values, self.tile.turning)
    return StagedTrips(self.tile, self.new, self.statements, self.state, loaded, group.scores.tile)

  def walk(self, s:Any, work:Callable[[Any, AmdTrip], Any]) -> Any:
    def over_queries(one:Self, s:Any) -> Any:
      s = one.trips.walk(s, self.group.walked, one.trip(work))
      return s if one.turns is None else s.after(one.turn_ended(one.turns, self.group.walked.end - 1, s.acc[0].load(), True))
    if (heads := self.group.walked_heads) == 1: return over_queries(self, s)
    r = self.new.range(heads, AxisType.LOOP)
    done = over_queries(replace(self, head=self.group.first_head + r), s.after(r))
    return s.after(self.statements.do(amd.sched_barrier(done.acc[0].load())).end(r))

  @functools.cached_property
  def turns(self) -> Turns|None: return Turns.of(self.group, self.at.wave, self.at.lane)
  def turn_ended(self, turns:Turns, t:UOp, done:UOp, last:bool=False) -> UOp:
    """Returns a statement, after the operation `done`, that ends this wave's turn to add to dQ, if tile t is the last tile of the turn."""
    # It waits until this wave's additions to dQ in memory are complete, then adds 1 to the counter for which the next workgroup waits. A turn ends
    # with its last tile, or with the workgroup's last tile (`last`).
    return self.statements.do(turns.end(self.head, t, self.statements.begin(atomics.settle(done)).done, last))

  def trip(self, work:Callable[[Any, AmdTrip], Any]) -> Callable[[Any, UOp, bool], UOp]:
    """Returns the loop's body, a function of (state, tile, masked) that calls `work(state, AmdTrip of the tile)` and returns its last operation."""
    # `masked`: whether a mask may hide scores of the tile; the stores with which the iteration ends are the body's last operation
    return lambda s, t, masked: UOp.group(*work(s, AmdTrip(self, t, masked)).stores.found)

  # ***** gradients, and the kernel *****
  def gradient(self, s:Any, name:str) -> list[UOp]:
    # Returns the stores of the gradient `name` to memory. Rows of keys beyond a batch's length (kv_lengths) are stored as 0. If a workgroup that owns
    # keys adds to dQ, there are no stores for dQ: each iteration has already added its part.
    if name == "dq" and self.tile.keys: return []
    mat, p = self.tile.matrix, self.group.p
    known = self.row.index < self.group.sequence.n_k if self.tile.keys and p.kv_lengths else None
    factor = 1.0 if name == "dv" else p.softmax_scale
    columns = [(self.at.h*mat.accumulator + i*mat.M, where_known(known, s.acc[j].load(), factor)) for i, j in enumerate(self.accumulators(name))]
    return self.group.gradient(name, self.row, columns)

  def deltas(self, s:Any) -> list[UOp]:
    number = place_of_row(self.group.p, self.group.sequence, self.row)[0]
    return [flat(self.group.given["delta"])[number.valid(self.row.there & self.at.h.eq(0) & self.group.is_first_part)].store(self.delta)]
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    return self.group.gradient_kernel(f"backward_{name}", cleared, stores, count)

@dataclass(frozen=True)
class AmdTrip:
  """The steps of a backward kernel in one iteration: on tile `t` of the rows (queries or keys) over which the kernel loops."""
  of: AmdBackward
  t: UOp
  masked: bool

  @property
  def count(self) -> int:
    """Number of C fragments that hold this lane's scores of one tile."""
    return self.of.tile.block_n//self.of.tile.matrix.M
  @functools.cached_property
  def left(self) -> Kept: return kept_scores(self.of.scores, [self.of.row], self.t)
  def lds(self, s:Any, name:str) -> Any: return self.of.trips.in_lds(s, self.t, name)

  def query_values(self, s:Any) -> tuple[list[Normaliser], list[UOp]]:
    """Loads lse and -delta for this lane's C fragments; returns (list of `Normaliser`, list of -delta), one entry for each fragment."""
    if self.of.known is None: return self.lds(s, "query_values").load(self.of.at)
    (normaliser, delta), n = self.of.known, self.of.tile.matrix.accumulator
    return [normaliser.each(lambda x: ops.splat(x, n))]*self.count, [ops.splat(scaled_delta(delta, self.of.group.p), n)]*self.count

  def product(self, s:Any, which:int, start:list[UOp]) -> list[UOp]:
    """Returns `start` + A B as C fragments, where A B is S (`which` 0) or dP (1)."""
    # A is the rows of this iteration's tile, and B the rows that the workgroup owns
    number = self.t if self.of.outer_trip is None else self.of.outer_trip      # for each number, own rows outside of registers are read again
    return self.of.products.with_rows(self.lds(s, self.of.walked[which]).row_tile, self.count, self.of.own[which], number, [start])[0]

  # ***** the steps *****
  def start(self, s:Any) -> Any: return s
  def lse(self, s:Any) -> list[Normaliser]: return self.query_values(s)[0]
  def scores(self, s:Any) -> tuple[Any, list[UOp]]: return s, self.product(s, 0, zeros(self.of.tile.matrix, 1, self.count)[0])
  def weights(self, scores:list[UOp], lse:list[Normaliser]) -> Weights:
    return weights_of(self.of.scores, scores, lse, self.of.row, self.t, self.masked)
  def dp(self, s:Any) -> tuple[Any, list[UOp]]:
    minus_delta = self.query_values(s)[1]
    return s, less_delta(self.product(s, 1, dp_start(minus_delta, self.left)), self.left, minus_delta)
  def ds(self, weights:Weights, dp:list[UOp], derivatives:Collection[str]|None=None) -> list[UOp]: return gradients_of(weights, dp, derivatives)
  def kept(self, weights:Weights) -> list[UOp]:
    return [self.left.packed(ops.pack_weights(x, self.of.group.p.dtype), i) for i, x in enumerate(weights.p)]
  def rounded(self, ds:list[UOp]) -> list[UOp]: return [ops.pack(x, self.of.group.p.dtype) for x in ds]
  def add(self, s:Any, name:str, p_or_ds:list[UOp]) -> Any:
    of, places = self.of, self.of.accumulators(name)
    rows, operands = self.lds(s, WEIGHTED[name][0]), fragment_operands(of.at, p_or_ds)
    columns = TurnedColumns(rows.row_tile, of.at, True) if of.tile.turning else rows.column_tile
    found = of.products.with_columns(columns, of.tile.block_n, [operands], [[s.acc[i].load() for i in places]])[0]
    stores = [of.statements.do(amd.made_here(*found)), *[s.acc[i].store(x) for i, x in zip(places, found)]]
    return replace(s, stores=TripStores((*s.stores.found, *stores)))

  # ***** dQ of a workgroup that owns keys *****
  @property
  def sharing(self) -> DqOfTile:
    assert self.of.sharing is not None
    return self.of.sharing

  def start_dq(self, s:Any, ds:list[UOp]) -> Any:
    # `ds` is packed to 16 bits. It is stored to LDS: dS of the lane's key with every query of this iteration's tile.
    return replace(s, stores=TripStores((*s.stores.found, *self.sharing.store(s.ds, self.zero_for_missing_keys(ds)))))

  def zero_for_missing_keys(self, ds:list[UOp]) -> list[UOp]:
    """Returns `ds`, dS of the key that this lane owns, or zeros if the key lies beyond the last key."""
    # For a missing key P = exp(0 - lse) can be inf, and dS too, which would enter dQ, a sum over the keys.
    there = below(self.of.row.index, self.of.group.sequence.n_k)
    if there.op is Ops.CONST and there.arg: return ds
    return [ops.build(*[there.where(ops.extract(x, i), 0) for i in range(ops.length(x))]) for x in ds]

  def interleaved(self, mat:Matrix, products:int, *found:UOp) -> Statements:
    """Returns the kernel's statements and one more, which makes clang alternate matrix instructions with LDS reads of their operands."""
    # `products` matrix instructions `mat` since the last barrier, whose results are `found`; only if the tile description asks for it
    tile, statements = self.of.tile, self.of.statements
    if not tile.ahead: return statements
    together, reads = (1, READS_OF_TURNED) if tile.turning else (mat.unit//mat.operand, 1)
    return statements.begin(amd.interleave(tile.ahead, together, reads, products//together, *found))

  def add_dq(self, s:Any) -> Any:
    # First waits until all waves have stored dS of this iteration's tile of queries.
    of, tile = self.of, self.of.tile
    sums = [s.acc.after(*s.stores.found)[i].load() for i in range(s.acc.max_numel())]
    before = [*s.stores.found, *self.interleaved(tile.matrix, tile.products_of_trip(of.group.p), *sums).effects]
    if of.turns is not None: before.append(of.turn_ended(of.turns, self.t - 1, s.acc.after(*before)[0].load()))
    found = self.sharing.product(s.ds.after(workgroup_barrier(UOp.group(*before))), tile, of.statements)
    statements = self.interleaved(self.sharing.here.matrix, tile.products_of_dq(of.group.p), *found)
    multiplied = statements.done if tile.ahead else ops.extract(found[-1], 0)
    waited = multiplied if of.turns is None else statements.begin(of.turns.begin(of.head, self.t, multiplied)).done
    first = of.group.scores.tile(self.t)*of.tile.block_n
    stores = [of.statements.do(addition) for addition in self.sharing.added(of.group, of.head, first, found, waited)]
    return replace(s, stores=TripStores((*s.stores.found, *stores)))

@dataclass(frozen=True)
class DqOfTile:
  """The part of dQ = dS K that one wave computes for a tile of queries: its matrix tiles of dQ, and its columns of K. The workgroup owns keys."""
  # The sum goes over all keys of the workgroup. The wave computes some matrix tiles of dQ, which lie one below the other in the same columns, and
  # keeps these columns of K in registers.
  at: Lane
  here: Lane              # this lane in a matrix tile of dQ
  columns: list[UOp]      # operand B: the lane's column of K, all keys of the workgroup
  column: UOp             # index of the matrix tile in a row of dQ
  rows: list[UOp]         # indices of the matrix tiles in a column of the tile's dQ
  stride: int             # 16-byte units from a row of dS in LDS to the next
  turning: bool           # whether dS lies in LDS by keys, and is transposed when it is read

  @staticmethod
  def of(group:Workgroup, tile:BackwardTile, at:Lane) -> DqOfTile:
    assert tile.dq_matrix is not None
    mat, across = tile.dq_matrix, tile.dq_columns(group.p)
    here, column = Lane(at.lane, at.wave, mat), at.wave%across
    k = columns_of_rows(group.rows_of("k"), group.first_row, tile.block_m, column*mat.N + here.n, units_of(mat, tile.block_m, here.h))
    rows = [at.wave//across + i*(tile.waves//across) for i in range(tile.dq_tiles(group.p))]
    return DqOfTile(at, here, operands(mat, k), column, rows, tile.ds.stride, tile.turning)

  def store(self, lds:LdsTile, ds:list[UOp]) -> list[UOp]:
    """Returns the stores of dS of the lane's key (C fragments, packed to 16 bits) to LDS."""
    mat, stores = self.at.matrix, list[UOp]()
    key = self.at.wave*mat.N + self.at.n
    if self.turning:
      quads = [(j*mat.M + mat.c_row(self.at.h, i), ops.slice_(words, i//2, 2)) for j, words in enumerate(ds) for i in range(0, mat.accumulator, 4)]
      return [lds.store_piece(key, query//4, 2, words, UOp.const(True)) for query, words in quads]
    to, stride = lds.buffer.bitcast(dtypes.ushort), self.stride*mat.unit
    begin = self.at.h*mat.block*stride + key
    for j, words in enumerate(ds):
      for i in range(ops.length(words)):
        word, row = ops.extract(words, i), j*mat.M + mat.c_row(0, 2*i)
        stores += [to[begin + (row + k)*stride].store((word >> 16*k).cast(dtypes.ushort)) for k in range(2)]
    return stores

  def product(self, lds:LdsTile, tile:BackwardTile, statements:Statements) -> list[UOp]:
    """Returns this wave's part of dQ = dS K for the queries whose dS lies in `lds`: one C fragment for each matrix tile."""
    mat, found = self.here.matrix, list[UOp]()
    for row in self.rows:
      acc = zeros(mat, 1, 1)[0][0]
      if tile.fenced and found: lds = lds.after(statements.do(amd.sched_barrier(found[-1])))
      columns = TurnedColumns(lds, self.here, False) if tile.turning else lds
      a_operands = operands(mat, [columns.load(row*mat.M + self.here.n, u) for u in units_of(mat, tile.block_m, self.here.h)])
      for a, b in zip(a_operands, self.columns, strict=True): acc = amd.shaped_wmma(mat, a, b, acc)
      found.append(acc)
    return found

  def added(self, group:Workgroup, head:UOp, first:UOp, found:list[UOp], *waited:UOp) -> list[UOp]:
    """Returns statements that add `found`, this wave's C fragments of dQ, to the fp32 sums of dQ in global memory."""
    # after the operations `waited`; `first` is the first query of the tile, and `head` its query head
    mat, sums = self.here.matrix, flat(group.given["dq_sums"])
    return [atomic_add(sums[place_of_tile(group, mat, head, first + row*mat.M, self.column) + self.at.lane], x,
                       *waited, steps=tuple(i*mat.wave for i in range(mat.accumulator))) for row, x in zip(self.rows, found)]

def own_rows(group:Workgroup, tile:BackwardTile, at:Lane, statements:Statements, in_lds:tuple[bool, bool]) -> tuple[OwnRows, OwnRows]:
  """Returns (rows of q, rows of dO) if the workgroup owns queries, or (rows of k, rows of v) if it owns keys, as operands B."""
  # `in_lds` says for each of the two tensors whether the rows stay in LDS; otherwise they stay in registers. If registers are short, the rows are
  # loaded a few units at a time, and `statements` orders these loads.
  own = OF_KEYS if tile.keys else OF_QUERIES
  first, second = (OwnRows.of(at, group.operand_rows(name), group.first_row, tile.block_m, group.grid.allocator, kept, tile.sparing, statements)
                   for name, kept in zip(own, in_lds))
  return first, second

def transposed_tiles(new:Allocator, tile:BackwardTile, *layouts:SharedLayout) -> list[LdsTile]|list[None]:
  """Returns one LDS tile for each layout in `layouts`, for a transposed tile, or [None, ...] if load instructions transpose instead."""
  if tile.turning: return [None]*len(layouts)
  # with two passes these tiles share one piece of LDS, because each pass uses only one of them
  if tile.passes == 1: return [LdsTile.of(new, x, tile.buffers) for x in layouts]
  place = LdsTile.of(new, max(layouts, key=lambda x: x.size), tile.buffers)
  return [replace(place, layout=x) for x in layouts]
