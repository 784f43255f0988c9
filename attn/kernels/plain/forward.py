"""Forward without matrix instructions, for every device of tinygrad, every dtype, and rows of at most MAX_WIDTH elements. Begin with
`PlainForward.scores`."""
from __future__ import annotations
import functools, math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.kernels.parts.grid.workgroup import Workgroup
from attn.kernels.parts.program.blocks import trip_count
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.statements import Carried, Statements, load_all
from attn.kernels.parts.program.trips import TileLoop
from attn.kernels.parts.weights.dropout import kept_here
from attn.kernels.plain.rectangle import Portion, Rectangle, as_rendered, grid_of, in_quads, nth, turned_over
from attn.kernels.tiles.common import blocks_of_queries
from attn.kernels.tiles.plain import QUAD, TiledTile
from attn.ops import common as ops
from attn.ops.softmax import LOWEST
from attn.problem import Problem
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# The threads of a workgroup form a rectangle (rectangle.py). The threads compute S^T = K Q^T and O^T = V^T P^T, each as a sum of outer products. A
# thread computes some rows of S^T and of O^T. Of each of these rows it computes some quads (elements of four neighbouring queries). Local memory
# holds K and Q transposed, V not transposed, and P^T in the order in which it is computed; K that is copied asynchronously is not transposed. m is
# the maximum of the scores so far. For every tile of keys, O and the row sum l are rescaled to the new maximum.
#
# The kernel uses the operations of attn/ops, as all kernels do. For devices whose renderer does not know these operations, `attn.ops.plain` turns
# them into UOps.

@dataclass(frozen=True)
class Ready:
  """Operations, such as stores and barriers, that must come before the next access to local memory."""
  deps: tuple[UOp, ...] = ()
  def after(self, *deps:UOp) -> Ready: return Ready((*self.deps, *deps))

@dataclass(frozen=True)
class QueryState(Carried):
  """The values that the loop over keys carries from iteration to iteration: sums of O, m, l, and keys and values that are loaded ahead."""
  acc: UOp   # the thread's part of O^T
  m: UOp     # of each query: the maximum of the scores so far
  l: UOp     # of each query: the sum of the P that this thread has computed
  k: UOp     # elements of K that are loaded before the kernel needs them
  v: UOp     # elements of V, as `k`
  ready: Ready

@dataclass(frozen=True)
class Weighed:
  """Result of `weigh` for a tile of keys: the operation after which P is in local memory, and the factors that rescale O."""
  done: UOp            # after this statement, P^T is in local memory
  rescale: list[UOp]   # factors by which O^T must be multiplied, because the rows' maxima may have grown
  stores: list[UOp]    # of the new maxima, and of keys that are loaded to registers before they are needed

@dataclass(frozen=True)
class PlainForward(Rectangle):
  """Builder of the forward kernel in plain UOps for one problem: its methods return the UOps of the steps of `online_softmax`, for one thread."""
  s: UOp             # S^T of the keys of a part of a tile
  top: UOp           # the maximum of each query's scores, including this iteration's scores
  state: QueryState
  parts = (None,)    # a tile's keys are not divided

  @staticmethod
  def of(p:Problem, arch:Chip, tile:TiledTile, args:tuple[UOp, ...]) -> PlainForward:
    grid, at = grid_of(p, arch, tile, math.prod(blocks_of_queries(p, tile)), p.all_heads)
    new, floats, quads, threads = grid.allocator, tile.sections(p).floats, tile.own//QUAD, tile.threads
    memory = new.registers(floats) if tile.alone else new.lds(floats, dtypes.float)
    carried = (ceildiv(tile.down*tile.walked*tile.depth, QUAD*threads), ceildiv(tile.values*tile.width(p.Dv), QUAD*threads))
    k, v = (new.registers(n*QUAD if tile.ahead else 1) for n in carried)
    acc, m, l = (new.registers(n*quads, ops.f32(QUAD)) for n in (tile.width(p.Dv)//tile.down, 1, 1))
    state = QueryState(acc, m, l, k, v, Ready())
    s, apart, some, top = (new.registers(n*quads, ops.f32(QUAD)) for n in (tile.walked, tile.walked, tile.columns, 1))
    group = Workgroup.of(p, arch, tile, args, grid, at)
    group, statements = replace(group, scores=replace(group.scores, natural=True)), Statements.of(new)
    return PlainForward(tile, new, group, at, memory, apart, some, statements, None, s, top, state)

  @functools.cached_property
  def queries(self) -> list[Row]: return [self.group.row(self.in_block(j) + i) for j in self.quads for i in range(QUAD)]

  # ***** the steps *****
  def begin(self) -> QueryState:
    tile, items = self.tile, self.items
    state, ready = self.state.after(self.start(*items)), items
    if tile.keeps_own:
      ready = [*items, self.barrier(self.carried(Portion("kept", "q", self.group.first_row, UOp.const(0), tile.block_m), items))]
    return replace(state, ready=Ready(tuple(ready)))

  def loops(self) -> Iterator[TileLoop[QueryState]]:
    # A single loop over all tiles. It applies masks to all tiles if any tile needs masks.
    walked = self.group.walked
    if (count := trip_count(walked.end - walked.begin)) is not None: yield TileLoop(walked.begin, count, self.masked, self.new)

  def scores(self, s:QueryState, t:UOp, masked:bool) -> tuple[QueryState, UOp]:
    """Computes S^T of tile t; returns (state, a statement after which S^T is in registers)."""
    # after the statement the registers `top` hold the maximum score of each query so far; if the kernel loads data to registers before it needs them
    # (`tile.ahead`), the loads of V start here
    s = s.after(*(self.fetched(self.first_of("v", t), s.v) if self.tile.ahead else []))
    return s, self.scored(s, t, list(s.ready.deps))

  def weigh(self, s:QueryState, x:UOp, t:UOp, part:None, masked:bool) -> tuple[QueryState, Weighed]:
    tops, ready = self.over_threads([y.load() for y in self.each(self.top.after(x))], ops.max_, list(s.ready.deps), x)
    rescale = [self.weight(m.load(), top) for m, top in zip(self.each(s.m), tops)]
    scaled = UOp.group(*[l.store(ops.mul(l.load(), factor)) for l, factor in zip(self.each(s.l), rescale)])
    weighed = self.weights(s.l.after(scaled), tops, t, ready)
    coming = self.fetched(self.first_of("k", t + 1), s.k.after(x)) if self.tile.ahead else []
    moved = [m.store(top) for m, top in zip(self.each(s.m), tops)]
    return replace(s, ready=Ready((*ready, *coming))), Weighed(weighed, rescale, [*coming, *moved])

  def add_to_o(self, s:QueryState, p:Weighed, t:UOp, part:None, masked:bool) -> UOp:
    added = self.summed(s.acc, "v", "p", t, list(s.ready.deps), [p.done], p.rescale, s.v if self.tile.ahead else None)
    return UOp.group(added, *p.stores)

  def kernel(self, s:QueryState) -> UOp:
    group = self.group
    return as_rendered(group.kernel("tiled", self.outputs(s), self.tile.lds_bytes(self.p) if group.arch.unit.says_lds else 0), group.arch,
                       self.tile)

  # ***** parts of the steps *****
  def start(self, *deps:UOp) -> UOp:
    """Returns the stores that give the row sums and maxima their values before the first key, after the operations `deps`."""
    # if the kernel loads or copies data before it needs them (`tile.ahead`, `tile.asynchronous`), the part of K that is needed first is loaded or
    # copied here
    s, of_k, first = self.state.after(*deps), self.first_of("k", self.group.walked.begin), list[UOp]()
    if self.tile.ahead: first = self.fetched(of_k, s.k)
    if self.tile.asynchronous: first = [self.statements.first, self.committed(self.started(of_k, UOp.const(0), list(deps)))]
    return UOp.group(self.cleared(s.acc), *first,
                     *[x.store(ops.splat(value, QUAD)) for of, value in ((s.m, LOWEST), (s.l, 0.0)) for x in self.all(of)])

  def scored(self, state:QueryState, t:UOp, ready:list[UOp]) -> UOp:
    """Computes S^T of tile t, updates the largest score of each of the thread's queries, and returns the last operation."""
    # On a CPU the workgroup is one thread, which computes a tile in parts. It stores S^T to its own memory, where P^T replaces it later.
    tile, began = self.tile, UOp.group(*[top.store(x.load()) for top, x in zip(self.each(self.top.after(*ready)), self.each(state.m))])
    part, loop = self.loop(tile.parts)
    s = self.product(self.s, "k", "q", "kept", t*tile.parts + part, [*ready, *loop], state.k if tile.ahead else None)
    raw = self.in_rows(self.all(s))
    if self.p.stored and not self.p.v_in_k:     # the elements of a latent cache include their scales
      first = self.group.scores.row(t*tile.block_n) + part*(tile.down*tile.walked)
      raw = [[ops.mul(x, self.scale("k_scales", first, self.result_row(i), *loop)) for x in row] for i, row in enumerate(raw)]
    rows = self.finished(raw, t*tile.parts + part)
    tops, to = self.each(self.top.after(began, *loop)), self.section("p", *ready, *loop)
    stores = [top.store(functools.reduce(ops.max_, [row[j] for row in rows], top.load())) for j, top in enumerate(tops)]
    for i, row in enumerate(rows):
      for j, y in enumerate(row):
        stores += to.store_quad(part*tile.walked + self.result_row(i), self.in_block(j), y) if tile.alone else [s[i*len(row) + j].store(y)]
    return UOp.group(*stores).end(*loop)

  def finished(self, rows:list[list[UOp]], t:UOp) -> list[list[UOp]]:
    """Applies score terms and masks to `rows`, the raw scores with part number `t` of the keys; returns the scores in base e, a list for each key."""
    # `rows` and the result have a list for each key. The scores are regrouped by query for this, because parts/weights/scores.py works on one query
    # at a time.
    if self.part_scores.raw and not self.masked: return [[ops.mul(x, self.part_scores.unit.natural) for x in row] for row in rows]
    return turned_over([self.part_scores.finished(x, [row], t, self.masked) for x, row in zip(turned_over(rows), self.queries)])

  def weight(self, x:UOp, top:UOp) -> UOp:
    """Returns P of the score `x`: exp(x - top), where `top` is the maximum of the scores in the same row."""
    # the subtraction comes before the multiplication by log2(e), because the difference is exact for scores near the maximum
    return ops.exp2(ops.mul(ops.sub(x, top), self.part_scores.to_log2))

  def weights(self, l:UOp, tops:list[UOp], t:UOp, ready:list[UOp]) -> UOp:
    """Computes P^T from this thread's scores in tile t, adds P to the row sums `l`, stores P^T to local memory; returns the last operation."""
    # `tops` are the maxima of the thread's queries; P^T is stored after dropout, and after the operations `ready`
    tile = self.tile
    four, loop = self.loop(tile.block_n//QUAD) if tile.alone else (UOp.const(0), [])
    rows = [four*QUAD + i for i in range(QUAD)] if tile.alone else [self.result_row(i) for i in range(tile.walked)]
    p, stores = self.section("p", *ready, *loop), []
    first = self.group.scores.row(t*tile.block_n)
    scores = [[p.quad(x, self.in_block(j)) for j in self.quads] for x in rows] if tile.alone else self.in_rows(self.all(self.s.after(*ready)))
    weights = [[self.weight(y, top) for y, top in zip(row, tops)] for row in scores]
    for part, column in zip(self.each(l.after(*loop)), zip(*weights)): stores.append(part.store(functools.reduce(ops.add, column, part.load())))
    if self.p.stored:
      scales = [self.scale("v_scales", first, x, *loop) for x in rows]
      weights = [[self.scaled(w, y, scale) for w, y in zip(*each)] for *each, scale in zip(weights, scores, scales)]
    for x, row in zip(rows, self.dropped(weights, [first + x for x in rows[::QUAD]])):
      stores += [y for j, w in enumerate(row) for y in p.store_quad(x, self.in_block(j), w)]
    return UOp.group(*stores).end(*loop)

  def scale(self, name:str, first:UOp, row:UOp, *after:UOp) -> UOp:
    """Returns the scale of row `first` + `row` of K ("k_scales") or V ("v_scales"), or 0 for a row that does not exist."""
    # loaded after the operations `after`
    rows = self.rows_of(name).after(*after)
    return rows.buffer[rows.start(first, row).valid(first + row < rows.count)].load().cast(dtypes.float)

  def scaled(self, weights:UOp, scores:UOp, scale:UOp) -> UOp:
    """Returns `weights`, P of a key, times the scale of its row of V, and exactly 0 where the score is hidden."""
    found = ops.mul(weights, scale)
    if not self.masked: return found
    # where the score is hidden (-inf), P stays 0 even if the scale is NaN
    return ops.select_each([ops.extract(scores, i).eq(-math.inf) for i in range(QUAD)], 0.0, found)

  def dropped(self, weights:list[list[UOp]], firsts:list[UOp]) -> list[list[UOp]]:
    """Returns `weights` with 0 in place of P that dropout drops, as a list for each key."""
    if not self.p.dropout_p: return weights
    # the keys come in groups of four neighbours; `firsts` has the first key of each group
    kept = [x for rows in in_quads(self.queries) for x in kept_here(self.part_scores, list(rows), firsts)]
    return turned_over([x.drop(column) for x, column in zip(kept, turned_over(weights))])

  def outputs(self, state:QueryState) -> list[UOp]:
    tile, group = self.tile, self.group
    sums, _ = self.over_threads([x.load() for x in self.each(state.l)], ops.add, [state.l])
    ends = [group.normalised(row, nth(load_all(state.m), i), [nth(sums, i)]) for i, row in enumerate(self.queries)]
    stores = [x for row, (_, log_sum) in zip(self.queries, ends) for x in group.outputs(row, [], log_sum)]
    block, loop = self.loop(self.blocks(state.acc))
    part, o = self.block_of(state.acc.after(*loop), block), []
    for row, (factor, _), column in zip(self.queries, ends, turned_over(self.in_rows(part))):
      for k, values in enumerate(column):
        o += group.outputs(row, [(block*tile.columns + self.result_row(k*QUAD), ops.mul(values, factor))], None)
    return [*stores, UOp.group(*o).end(*loop)]
