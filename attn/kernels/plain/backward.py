"""Backward without matrix instructions, in UOps that every device of tinygrad can render. Begin with `PlainTrip`."""
from __future__ import annotations
import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from attn.chips import Chip
from attn.kernels.parts.backward.gradients import (WEIGHTED, Normaliser, Weights, exact_normaliser, exact_weights, gradients_of, scaled_delta,
                                                   where_known)
from attn.kernels.parts.grid.tensors import Shapes, log_sums
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.memory.lanes import element_sum
from attn.kernels.parts.program.blocks import trip_count
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.statements import Statements, store_all
from attn.kernels.parts.weights.dropout import KeptHere, kept_here
from attn.kernels.parts.weights.epilogue import place_of_row
from attn.kernels.plain.rectangle import Portion, Rectangle, as_rendered, grid_of, in_quads, nth, turned_over
from attn.kernels.tiles.common import OF_KEYS, OF_QUERIES, query_value_names
from attn.kernels.tiles.plain import KEPT, QUAD, TiledBackwardTile
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import AxisType, UOp, dtypes

# The threads form a rectangle (rectangle.py). The same code serves a workgroup that owns queries and loops over tiles of keys, and a workgroup that
# owns keys and loops over tiles of queries. The rows of the tiles are the walked rows. Scores and dP are products of the walked rows with the own
# rows. Each gradient is a sum over the walked rows, with P or dS as weights. P and dS are stored to local memory before this sum.

Columns = list[list[UOp]]      # a list for each own row: vectors with one number for each of four walked rows

@dataclass(frozen=True)
class PlainState:
  """The values that a backward kernel in plain UOps carries from step to step and from iteration to iteration: sums of gradients, lse, delta."""
  sums: tuple[UOp, ...]                                       # registers in which each gradient is summed
  # if the workgroup owns queries, registers of the lse, which turn scores into P. If a score may be as large as fp32 allows (`wide_scores`), also
  # registers of lse_rest: the part of the lse that rounding to fp32 lost.
  normalisers: tuple[UOp, ...]
  minus_deltas: UOp                                           # if the workgroup owns queries, registers of -delta
  # operations that must come before the next access to local memory, such as barriers, and the ranges of the loops around the access
  ready: tuple[UOp, ...] = ()
  stores: tuple[UOp, ...] = ()                                # the stores of delta to memory
  before: tuple[UOp, ...] = ()                                # operations of this iteration that must come before the next matrix product
  weights: dict[str, Columns] = field(default_factory=dict)   # P and dS, the weights in the sums that make up the gradients

  def after(self, *deps:UOp) -> PlainState:
    sums, normalisers = (tuple(x.after(*deps) for x in registers) for registers in (self.sums, self.normalisers))
    return replace(self, sums=sums, normalisers=normalisers, minus_deltas=self.minus_deltas.after(*deps))

PlainWork = Callable[[PlainState, "PlainTrip"], PlainState]

@dataclass(frozen=True)
class PlainBackward(Rectangle):
  """Builder of a backward kernel in plain UOps for one problem: its methods return the UOps of the kernel's steps, as one thread runs them."""
  # if the workgroup owns keys, it loops over the queries of one head after another: `head` is the present one
  s: UOp               # S^T of the walked keys of a part, or S of the walked queries of a part
  dp: UOp              # dP of these keys or queries, transposed if they are keys
  state: PlainState    # before the first iteration
  wanted: tuple[str, ...]

  @staticmethod
  def of_queries(p:Problem, arch:Chip, tile:TiledBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> PlainBackward:
    return PlainBackward.of(p, arch, tile, args, shapes, parts, ("dq",))
  @staticmethod
  def of_keys(p:Problem, arch:Chip, tile:TiledBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int) -> list[PlainBackward]:
    # A single loop over the queries gives dk and dv.
    return [PlainBackward.of(p, arch, tile, args, shapes, parts, ("dk", "dv"))]

  @staticmethod
  def of(p:Problem, arch:Chip, tile:TiledBackwardTile, args:tuple[UOp, ...], shapes:Shapes, parts:int, wanted:tuple[str, ...]) -> PlainBackward:
    rows, heads = (p.Sk, p.Hkv) if tile.keys else (p.Sq, p.H)
    grid, at = grid_of(p, arch, tile, ceildiv(rows, tile.block_m), p.B*heads)
    new, floats, quads = grid.allocator, tile.sections(p).floats, tile.own//QUAD
    memory = new.registers(floats) if tile.alone else new.lds(floats, dtypes.float)
    group = (Workgroup.of_keys if tile.keys else Workgroup.of)(p, arch, tile, args, grid, at, shapes, parts)
    columns = [tile.width(p.Dv if name == "dv" else p.D)//tile.down for name in wanted]
    group = replace(group, scores=replace(group.scores, natural=True))
    apart, some, s, dp, high, deltas, *sums = (new.registers(n*quads, ops.f32(QUAD))
                                               for n in (tile.walked, tile.columns, tile.walked, tile.walked, 1, 1, *columns))
    normalisers = (high, new.registers(quads, ops.f32(QUAD))) if p.wide_scores else (high,)
    head = group.first_head if tile.keys else None
    state = PlainState(tuple(sums), normalisers, deltas)
    return PlainBackward(tile, new, group, at, memory, apart, some, Statements.of(new), head, s, dp, state, wanted)

  # ***** rows *****
  @property
  def keys(self) -> bool: return self.head is not None
  @property
  def own(self) -> tuple[str, str]: return OF_KEYS if self.keys else OF_QUERIES
  @property
  def walked(self) -> tuple[str, str]: return OF_QUERIES if self.keys else OF_KEYS

  @functools.cached_property
  def own_rows(self) -> list[Row]:
    group, x = self.group, self.group.sequence
    numbers = [self.in_block(j) + i for j in self.quads for i in range(QUAD)]
    if self.head is None: return [group.row(n) for n in numbers]
    keys = [group.first_row + n for n in numbers]
    return [Row(group.batch, self.head, key, key < (x.n_k if self.p.varlen else self.p.Sk)) for key in keys]

  # ***** the loop over tiles *****
  def begin(self, s:PlainState|None=None, stores:list[UOp]|None=None) -> PlainState:
    tile, items = self.tile, self.items
    began, ready = [self.cleared(acc.after(*items)) for acc in self.state.sums], items
    if tile.keeps_own:
      kept = [self.carried(Portion(*x, self.group.first_row, UOp.const(0), tile.block_m), items) for x in zip(KEPT, self.own)]
      ready = [*ready, self.barrier(*kept)]
    if self.keys: return replace(self.state, ready=tuple(ready)).after(*began)
    known, s = self.deltas_and_normalisers(ready)
    return s.after(*began, known)

  def walk(self, s:PlainState, work:PlainWork) -> PlainState:
    group = self.group
    if (count := trip_count(group.walked.end - group.walked.begin)) is None: return s
    r, heads = self.loop(group.walked_heads)
    of_head, inside = (replace(self, head=group.first_head + r), s.after(*heads)) if heads else (self, s)
    trip = self.new.range(count, AxisType.LOOP)
    done = of_head.trip(inside.after(trip), group.walked.begin + trip, [*s.ready, *heads, trip], work)
    return s.after(done.end(trip).end(*heads))

  def trip(self, s:PlainState, t:UOp, ready:list[UOp], work:PlainWork) -> UOp:
    """Adds the contributions of tile t to all gradients, where `work` computes P and dS, and returns the last operation."""
    # The tile is divided into parts. For one part after another, `work` computes P and dS, which are stored to local memory. Then the tile's rows,
    # times P or dS, are added to the gradients. Accesses to local memory come after the operations `ready`.
    tile, (part, loop) = self.tile, self.loop(self.tile.parts)
    found, stores = work(s, PlainTrip(self, t*tile.parts + part, [*ready, *loop])).weights, list[UOp]()
    for name, columns in found.items():
      to = self.section(name, *ready, *loop)
      for i, row in enumerate(turned_over(columns)):
        for j, y in enumerate(row): stores += to.store_quad(part*tile.walked + self.result_row(i), self.in_block(j), y)
    done = UOp.group(*stores).end(*loop)
    for acc, name in zip(s.sums, self.wanted): done = self.summed(acc, *WEIGHTED[name], t, [*ready, met := self.barrier(done)], [met])
    return done

  # ***** values of own queries *****
  def deltas_and_normalisers(self, ready:list[UOp]) -> tuple[UOp, PlainState]:
    """Computes delta, and lse as exp2 needs it, of each query that the workgroup owns; returns (stores of both to registers, state)."""
    # accesses to local memory come after the operations `ready`; the state has the stores of delta to memory
    group, p, s = self.group, self.p, self.state
    column, loop = self.loop(ceildiv(p.Dv, QUAD*self.tile.down))
    sums = s.minus_deltas.after(self.zeroed(s.minus_deltas.after(*ready)), *loop)
    first = (column*self.tile.down + self.at.h)*QUAD
    parts = [ops.build(*[self.part_of_delta(row, first) for row in rows]) for rows in in_quads(self.own_rows)]
    done = UOp.group(*[to.store(ops.add(to.load(), x)) for to, x in zip(self.each(sums), parts)]).end(*loop)
    totals, ready = self.over_threads([x.load() for x in self.each(s.minus_deltas.after(done))], ops.add, ready, done)
    delta = [nth(totals, i) for i in range(len(self.own_rows))]
    if "dlse" in group.given: delta = [ops.sub(x, group.query_value("dlse", row)) for x, row in zip(delta, self.own_rows)]
    normalisers = [exact_normaliser(p, *[group.query_value(name, row) for name in log_sums(group.given)]).values for row in self.own_rows]
    numbers = dict(zip(s.normalisers, zip(*normalisers))) | {s.minus_deltas: tuple(scaled_delta(x, p) for x in delta)}
    registers = [y for to, x in numbers.items() for y in store_all(to.after(*ready), [ops.build(*quad) for quad in in_quads(x)])]
    mine = self.at.h.eq(0) & group.is_first_part
    stores = [flat(group.given["delta"])[place_of_row(p, group.sequence, row)[0].valid(row.there & mine)].store(x)
              for row, x in zip(self.own_rows, delta)]
    return UOp.group(*registers), replace(s, ready=tuple(ready), stores=tuple(stores))

  def part_of_delta(self, row:Row, first:UOp) -> UOp:
    """Returns the sum of dO * O of the query `row` over four elements, from element `first` on."""
    # dO is rounded to the inputs' dtype, because the product dP = dO V^T uses rounded dO
    def elements(tensor:str) -> UOp:
      rows, convert = self.rows_of(tensor), self.converted(tensor)
      begin, whole = rows.start(UOp.const(0), row.index) + first, rows.width % QUAD == 0
      inside = [row.there & (first + (0 if whole else i) < rows.width) for i in range(QUAD)]
      return ops.build(*[convert(rows.buffer[(begin + i).valid(there)].load()) for i, there in enumerate(inside)])
    return element_sum(ops.mul(elements("o"), elements("do")))

  # ***** gradients, and the kernel *****
  def gradient(self, s:PlainState, name:str) -> list[UOp]:
    # Rows of keys beyond a batch's length (kv_lengths) are stored as 0.
    acc = s.sums[self.wanted.index(name)]
    block, loop = self.loop(self.blocks(acc))
    part, stores = self.block_of(acc.after(*loop), block), list[UOp]()
    for row, column in zip(self.own_rows, turned_over(self.in_rows(part))):
      known = row.index < self.group.sequence.n_k if self.keys and self.p.kv_lengths else None
      factor = 1.0 if name == "dv" else self.p.softmax_scale
      stores += self.group.gradient(name, row, [(block*self.tile.columns + self.result_row(k*QUAD), where_known(known, x, factor))
                                                for k, x in enumerate(column)])
    return [UOp.group(*stores).end(*loop)]
  def deltas(self, s:PlainState) -> list[UOp]: return list(s.stores)
  def kernel(self, name:str, cleared:tuple[str, ...], stores:list[UOp], count:int) -> UOp:
    nbytes = self.tile.lds_bytes(self.p) if self.group.arch.unit.says_lds else 0
    return as_rendered(self.group.gradient_kernel(f"backward_{name}_tiled", cleared, stores, count, nbytes), self.group.arch, self.tile)

@dataclass(frozen=True)
class PlainTrip:
  """The steps of a backward kernel on part number `t` of the rows over which the kernel loops; each tile has `tile.parts` parts."""
  # accesses to local memory come after the operations `ready`
  of: PlainBackward
  t: UOp
  ready: list[UOp]

  @functools.cached_property
  def firsts(self) -> list[UOp]:
    """Indices in the sequence: of the first row of each group of four neighbouring rows of the tile that this thread computes."""
    return [self.of.part_scores.row(self.t*self.of.part_scores.block_n) + self.of.result_row(i) for i in range(0, self.of.tile.walked, QUAD)]
  @functools.cached_property
  def left(self) -> list[KeptHere]:
    return [x for rows in in_quads(self.of.own_rows) for x in kept_here(self.of.part_scores, list(rows), self.firsts)]

  def own(self, x:UOp, i:int) -> UOp:
    """Returns four copies, as a vector, of the i-th number in the registers `x`, which have one number for each row that this thread owns."""
    return ops.splat(ops.extract(x[i//QUAD].load(), i%QUAD), QUAD)
  def of_walked(self, name:str) -> list[list[UOp]]:
    """Loads one number, such as lse, of each query in this part of a tile. Returns a list for each group of four neighbouring queries."""
    rows = self.of.group.query_value_rows(name, self.of.own_rows[0].head)
    return [[rows.buffer[(rows.base + first + e).valid(first + e < rows.count)].load() for e in range(QUAD)] for first in self.firsts]
  def minus_delta(self, s:PlainState) -> Columns:
    if self.of.keys: return [[ops.build(*[scaled_delta(x, self.of.p) for x in quad]) for quad in self.of_walked("delta")]]*len(self.of.own_rows)
    return [[self.own(s.minus_deltas, i)]*len(self.firsts) for i in range(len(self.of.own_rows))]
  def product(self, to:UOp, which:int, ready:list[UOp]) -> tuple[UOp, Columns]:
    """Computes S (`which` 0) or dP (1) in the registers `to`; returns (`to`, the results of each row that this thread owns, as vectors)."""
    # the rows of this part of a tile times the own rows; accesses to local memory come after the operations `ready`
    of = self.of
    x = of.product(to, of.walked[which], of.own[which], KEPT[which], self.t, ready)
    return x, turned_over(of.in_rows(of.all(x)))

  # ***** the steps *****
  def start(self, s:PlainState) -> PlainState: return s
  def lse(self, s:PlainState) -> list[list[Normaliser]]:
    own = range(len(self.of.own_rows))
    if not self.of.keys:
      numbers_of_own = [[self.own(x, i) for x in s.normalisers] for i in own]
      return [[Normaliser(low[0] if low else None, high)]*len(self.firsts) for high, *low in numbers_of_own]
    def of_quad(*quads:list[UOp]) -> Normaliser:
      return Normaliser.joined([exact_normaliser(self.of.p, *numbers) for numbers in zip(*quads)], ops.build)
    names = [name for name in query_value_names(self.of.p) if name != "delta"]
    return [[*map(of_quad, *map(self.of_walked, names))]]*len(own)
  def scores(self, s:PlainState) -> tuple[PlainState, Columns]:
    x, scores = self.product(self.of.s, 0, self.ready)
    return replace(s, before=(x,)), scores
  def weights(self, scores:Columns, lse:list[list[Normaliser]]) -> list[Weights]:
    return [exact_weights(self.of.part_scores, x, own, row, self.t, self.of.masked) for x, own, row in zip(scores, lse, self.of.own_rows)]
  def dp(self, s:PlainState) -> tuple[PlainState, Columns]:
    _, dp = self.product(self.of.dp, 1, [*self.ready, self.of.barrier(*s.before)])
    kept = [left.drop(x) for left, x in zip(self.left, dp)]
    return s, [[ops.add(x, y) for x, y in zip(*row)] for row in zip(kept, self.minus_delta(s))]
  def ds(self, weights:list[Weights], dp:Columns, derivatives:Collection[str]|None=None) -> Columns:
    return [gradients_of(w, x, derivatives) for w, x in zip(weights, dp)]
  def kept(self, weights:list[Weights]) -> Columns: return [left.drop(w.p) for left, w in zip(self.left, weights)]
  def rounded(self, ds:Columns) -> Columns: return ds
  def add(self, s:PlainState, name:str, p_or_ds:Columns) -> PlainState: return replace(s, weights={**s.weights, WEIGHTED[name][1]: p_or_ds})
