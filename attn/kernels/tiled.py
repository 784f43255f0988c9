"""Flash attention forward in plain UOps: for every device that tinygrad renders for, every type of inputs, and rows of up to MAX_WIDTH elements.

A workgroup owns one head and BLOCK_M queries and walks over the keys in tiles of BLOCK_N, with the online softmax (Milakov and Gimelshein 2018,
arXiv 1805.02867; FlashAttention-2, arXiv 2307.08691, algorithm 1). It computes S^T = K Q^T and O^T = V^T P^T, each as a sum of outer products: of a
column of the left operand and a row of the right one. Its threads stand in a rectangle, `down` over the keys, or the columns of O, and `across` over
the queries: a thread has some rows of S^T and of O^T, and of each some quads of four neighbouring queries, in fp32 registers. Operands lie in local
memory, in fp32, so that what a step of a product takes is one row: K and Q transposed, V as it is, and P^T as it comes.

One thread by itself, on a CPU, runs the same program. What threads share is then its own memory, K and V are read where they lie, and what many
threads would have at a time it goes through in loops: parts of a tile's keys, and parts of the columns of O.

It is written in the operations of all kernels (attn/ops), of which `attn.ops.plain` makes UOps.
"""
from __future__ import annotations
import functools, math
from collections.abc import Callable
from dataclasses import dataclass, replace
from attn.chips import Chip
from attn.kernels.parts.allocator import Allocator
from attn.kernels.parts.blocks import trip_count
from attn.kernels.parts.counts import ceildiv, round_up
from attn.kernels.parts.lanes import QUAD, OwnKeys, ThreadPlace
from attn.kernels.parts.rows import GlobalRows
from attn.kernels.parts.scores import Row
from attn.kernels.parts.statements import Carried, workgroup_barrier
from attn.kernels.parts.tensors import check_problem
from attn.kernels.parts.workgroup import Grid, Workgroup
from attn.ops import common as ops
from attn.ops.plain import plain
from attn.ops.softmax import LOWEST
from attn.problem import Problem
from attn.tinygrad_compat import AxisType, UOp, dtypes

MAX_WIDTH = 512      # D and Dv
TURNED_PADDING = 4   # floats between the rows of what is stored transposed: those that neighbouring threads store to lie in different banks
LONG_SUM = 128       # products, beyond which a score is summed in parts: the error of one long sum would be above the contract's limit
ROWS_TOGETHER = 8    # rows of which neighbouring threads carry a quad each

@dataclass(frozen=True)
class TiledTile:
  """How a workgroup divides the work."""
  down: int       # threads over the keys, and over the columns of O
  across: int     # threads over the queries
  keys: int       # of a thread, at a time
  queries: int    # of a thread
  depth: int      # elements of rows of Q and K that are in local memory at a time
  values: int     # keys whose rows of V are in local memory at a time
  keeps_q: bool = True     # the whole of Q stays in local memory
  ahead: bool = False      # the next part of K, and of V, is on its way to registers while work is done
  parts: int = 1           # of a tile's keys, which a thread goes through one after another
  columns: int = 0         # of O that a thread has in registers at a time; 0: all that are its own

  @property
  def block_m(self) -> int: return self.across*self.queries
  @property
  def block_n(self) -> int: return self.down*self.keys*self.parts
  @property
  def threads(self) -> int: return self.down*self.across
  @property
  def alone(self) -> bool:
    """One thread, which shares nothing."""
    return self.threads == 1
  @property
  def waves(self) -> int: return ceildiv(self.threads, 32)
  @property
  def pack_gqa(self) -> bool: return False
  def items(self, p:Problem, name:str) -> int:
    """Quads that a thread carries of a part of K or V."""
    return ceildiv(self.down*self.keys*self.depth if name == "k" else self.values*self.width(p), QUAD*self.threads)
  def width(self, p:Problem) -> int:
    """Columns of O over all threads."""
    return round_up(p.Dv, self.columns or QUAD*self.down)
  def steps(self, p:Problem) -> int:
    """Parts in which rows of Q and K come to local memory."""
    return ceildiv(p.D, self.depth)
  def sections(self, p:Problem) -> Sections:
    turned = self.block_m + (0 if self.alone else TURNED_PADDING)
    shapes = {"kept_q": (self.steps(p)*self.depth*self.keeps_q, turned), "q": (self.depth*(not self.keeps_q), turned),
              "k": (0 if self.alone else self.depth, self.block_n + TURNED_PADDING), "v": (0 if self.alone else self.values, self.width(p)),
              "p": (self.block_n, self.block_m), "exchanged": (0 if self.alone else self.down, self.block_m)}
    return Sections(**{name: SectionShape(*x) for name, x in shapes.items()})
  def lds_bytes(self, p:Problem) -> int: return 0 if self.alone else 4*self.sections(p).floats
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} " + ("1 thread" if self.alone else f"{self.down}x{self.across} threads of {self.keys}x{self.queries}")

@dataclass(frozen=True)
class SectionShape:
  """Of a matrix in local memory: rows, and floats from one to the next."""
  rows: int
  pitch: int
  @property
  def floats(self) -> int: return self.rows*self.pitch

@dataclass(frozen=True)
class Sections:
  """What lies in local memory: Q^T where all of it stays; in one place, one after the other, parts of Q^T and K^T, and of V; S^T, which P^T replaces;
  and a number of each query from each thread."""
  kept_q: SectionShape
  q: SectionShape
  k: SectionShape
  v: SectionShape
  p: SectionShape
  exchanged: SectionShape
  @property
  def places(self) -> dict[str, int]:
    """The first float of each."""
    parts = self.kept_q.floats
    p = parts + max(self.q.floats + self.k.floats, self.v.floats)
    return {"kept_q": 0, "q": parts, "k": parts + self.q.floats, "v": parts, "p": p, "exchanged": p + self.p.floats}
  @property
  def floats(self) -> int: return self.places["exchanged"] + self.exchanged.floats

@dataclass(frozen=True)
class Section:
  """A matrix in local memory, which begins at float `base`."""
  memory: UOp
  base: int
  shape: SectionShape
  def place(self, row:UOp, column:UOp) -> UOp: return self.memory[row*self.shape.pitch + column + self.base]
  def number(self, row:UOp, column:UOp) -> UOp: return self.place(row, column).load()
  def quad(self, row:UOp, column:UOp) -> UOp: return ops.build(*[self.number(row, column + i) for i in range(QUAD)])
  def store_quad(self, row:UOp, column:UOp, x:UOp) -> list[UOp]: return [self.place(row, column + i).store(ops.extract(x, i)) for i in range(QUAD)]

@dataclass(frozen=True)
class WhereItLies:
  """The left operand of one thread, in global memory, as it lies there or `turned`. Of a row of the tensor that there is not the last one is read."""
  rows: GlobalRows
  first: UOp
  turned: bool
  column: UOp|int = 0     # of the tensor, the first one
  def number(self, row:UOp, column:UOp) -> UOp:
    row, column = (column, row + self.column) if self.turned else (row, column + self.column)
    begin = self.rows.base + (self.first + row).minimum(self.rows.count - 1).maximum(0)*self.rows.stride
    return self.rows.buffer[begin + column.minimum(self.rows.width - 1)].load().cast(dtypes.float)

@dataclass(frozen=True)
class QueryState(Carried):
  """What a thread carries from trip to trip: its part of O^T; of each of its queries the maximum so far and its own part of the sum of P; and what it
  has loaded ahead of K and of V."""
  acc: UOp
  m: UOp
  l: UOp
  k: UOp
  v: UOp

def tiled(p:Problem, arch:Chip, tile:TiledTile) -> Callable[..., UOp]:
  """The kernel of problem `p` as a function of its placeholders, as `forward.forward` has it. Raises ValueError where p.num_splits is still 0, and
  NotImplementedError for rows of more than MAX_WIDTH elements."""
  check_problem(p, tile)
  if (reason := beyond_registers(p)) is not None: raise NotImplementedError(reason)
  return functools.cache(lambda *args: plain(Tiled.of(p, arch, tile, args).program()))     # it takes a while to make

def beyond_registers(p:Problem) -> str|None:
  """Why the rows of a problem are too long, or None."""
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: a row is held in local memory and registers, up to {MAX_WIDTH}"
               for name, value in widths if value > MAX_WIDTH), None)

def serial_items(p:Problem, tile:TiledTile) -> tuple[int, int]:
  """Of a device without workgroups: how many parts it is told to do one after another, and how many (head, block) each has, over which it loops. What
  keys there are must be the same in all of these, for the bound of a loop may not depend on another loop."""
  blocks, parts = ceildiv(p.Sq, tile.block_m), p.B if p.kv_lengths or p.varlen else 1
  return parts*blocks, p.B*p.H//parts

def grid_of(p:Problem, arch:Chip, tile:TiledTile) -> tuple[Grid, ThreadPlace]:
  """A head and a block of queries for each workgroup; where a device has none, a block for each part that it does, and a loop over heads."""
  new, here, own = Allocator(), UOp.const(0), OwnKeys(tile.down, tile.keys)
  if arch.serial:
    parts, heads = serial_items(p, tile)
    part, head = new.range(parts, AxisType.GLOBAL), new.range(heads, AxisType.LOOP)
    groups = p.B*p.H//heads
    return Grid(new, (part, head), part%groups*heads + head, part//groups, here, here), ThreadPlace(here, here, 1, own)
  block, head = new.range(ceildiv(p.Sq, tile.block_m), AxisType.GLOBAL), new.range(p.B*p.H, AxisType.GLOBAL)
  if tile.alone: return Grid(new, (block, head), head, block, here, here), ThreadPlace(here, here, 1, own)
  x, h = new.range(tile.across, AxisType.WARP), new.range(tile.down, AxisType.WARP)
  return Grid(new, (block, head, x, h), head, block, x, h), ThreadPlace(h, x, tile.across, own)

@dataclass(frozen=True)
class Tiled:
  """The kernel of one problem, as a thread sees it."""
  tile: TiledTile
  new: Allocator
  group: Workgroup
  at: ThreadPlace
  memory: UOp        # local memory, or of one thread its own
  s: UOp             # S^T of some keys
  o: UOp             # O^T, or a part of its rows, where a thread goes through several
  apart: UOp         # a part of long sums
  top: UOp           # the maxima with those of a trip
  state: QueryState

  @staticmethod
  def of(p:Problem, arch:Chip, tile:TiledTile, args:tuple[UOp, ...]) -> Tiled:
    grid, at = grid_of(p, arch, tile)
    new, floats, quads = grid.allocator, tile.sections(p).floats, tile.queries//QUAD
    memory = new.registers(floats) if tile.alone else new.lds(floats, dtypes.float)
    width = tile.width(p)//tile.down
    ahead = [new.registers(tile.items(p, name)*QUAD if tile.ahead else 1) for name in ("k", "v")]
    state = QueryState(*[new.registers(n*quads, ops.f32(QUAD)) for n in (width, 1, 1)], *ahead)
    s, apart, o, top = (new.registers(n*quads, ops.f32(QUAD)) for n in (tile.keys, tile.keys, tile.columns, 1))
    return Tiled(tile, new, Workgroup.of(p, arch, tile, args, grid, at), at, memory, s, o if tile.columns else state.acc, apart, top, state)

  # ***** sizes and places *****
  @property
  def p(self) -> Problem: return self.group.p
  @property
  def quads(self) -> range:
    """Of queries, of a thread."""
    return range(self.tile.queries//QUAD)
  @functools.cached_property
  def queries(self) -> list[Row]: return [self.group.row(self.query(j) + i) for j in self.quads for i in range(QUAD)]
  def query(self, j:int) -> UOp:
    """The first one of a thread's j-th quad, in the block."""
    return (self.at.x + j*self.tile.across)*QUAD
  def own_row(self, i:int) -> UOp:
    """A thread's i-th row of S^T or of O^T."""
    return self.at.h*QUAD + (i//QUAD*QUAD*self.tile.down + i%QUAD)
  def section(self, name:str, *deps:UOp) -> Section:
    """A matrix in local memory, after these."""
    shapes = self.tile.sections(self.p)
    return Section(self.memory.after(*deps), shapes.places[name], getattr(shapes, name))
  def loop(self, n:int) -> tuple[UOp, list[UOp]]:
    """The number of one of n parts, and the loop over them, where there are several."""
    if n == 1: return UOp.const(0), []
    part = self.new.range(n, AxisType.LOOP)
    return part, [part]

  # ***** the algorithm *****
  def program(self) -> UOp:
    group, tile = self.group, self.tile
    items = [x for x in group.grid.ranges if x.arg[-1] is AxisType.LOOP]
    state, ready = self.state.after(self.start(*items)), items
    if tile.keeps_q: ready = [*items, self.barrier(self.carried("kept_q", items, "q", group.first_row, UOp.const(0), tile.block_m))]
    if (count := trip_count(group.walked.end - group.walked.begin)) is not None:
      trip = self.new.range(count, AxisType.LOOP)
      state = state.after(self.trip(state.after(trip), group.walked.begin + trip, [*ready, trip]).end(trip))
    return group.kernel("tiled", self.outputs(state), tile.lds_bytes(self.p) if group.arch.family == "nvidia" else 0)

  def start(self, *deps:UOp) -> UOp:
    """The stores that begin a sum over keys, of which none was seen."""
    s, (block, blocks) = self.state.after(*deps), self.loop(self.blocks)
    zeroed = UOp.group(*[x.store(ops.splat(0.0, QUAD)) for x in self.part(s.acc.after(*blocks), block)]).end(*blocks)
    first = self.fetched("k", s.k, self.group.walked.begin, UOp.const(0)) if self.tile.ahead else []
    return UOp.group(zeroed, *first, *[x.store(ops.splat(value, QUAD)) for of, value in ((s.m, LOWEST), (s.l, 0.0)) for x in self.all(of)])

  def trip(self, state:QueryState, t:UOp, ready:list[UOp]) -> UOp:
    """S^T of a tile of keys, its softmax, and its part of O^T."""
    coming = self.fetched("v", state.v, t, UOp.const(0)) if self.tile.ahead else []
    state = state.after(*coming)
    scored = self.scores(state, t, [*ready, *coming])
    tops, ready = self.over_keys([x.load() for x in self.each(self.top.after(scored))], ops.max_, ready, scored)
    rescale = [self.weight(m.load(), top) for m, top in zip(self.each(state.m), tops)]
    scaled = UOp.group(*[l.store(ops.mul(l.load(), factor)) for l, factor in zip(self.each(state.l), rescale)])
    weighed = self.weigh(state.l.after(scaled), tops, ready)
    coming = self.fetched("k", state.k.after(scored), t + 1, UOp.const(0)) if self.tile.ahead else []
    moved = [m.store(top) for m, top in zip(self.each(state.m), tops)]
    return UOp.group(self.add_to_o(state, rescale, t, [*ready, *coming], weighed), *coming, *moved)

  def scores(self, state:QueryState, t:UOp, ready:list[UOp]) -> UOp:
    """S^T of a tile, to where P^T will lie, and the maxima of a thread's part of it and of those before."""
    tile, began = self.tile, UOp.group(*[top.store(x.load()) for top, x in zip(self.each(self.top.after(*ready)), self.each(state.m))])
    part, loop = self.loop(tile.parts)
    s = self.raw_scores(state.k, t*tile.parts + part, [*ready, *loop])
    rows = self.finished([[s[i*len(self.quads) + j].load() for j in self.quads] for i in range(tile.keys)], t*tile.parts + part)
    tops, to = self.each(self.top.after(began, *loop)), self.section("p", *ready, *loop)
    stores = [top.store(functools.reduce(ops.max_, [row[j] for row in rows], top.load())) for j, top in enumerate(tops)]
    stores += [x for i, row in enumerate(rows) for j, y in enumerate(row) for x in to.store_quad(part*tile.keys + self.own_row(i), self.query(j), y)]
    return UOp.group(*stores).end(*loop)

  def raw_scores(self, ahead:UOp, t:UOp, ready:list[UOp]) -> UOp:
    """S^T = K Q^T of some keys, a part of the rows at a time."""
    tile, n = self.tile, self.tile.down*self.tile.keys
    step, loop = self.loop(tile.steps(self.p))
    now, first, own = [*ready, *loop], step*tile.depth, [self.own_row(i) for i in range(tile.keys)]
    long = self.p.D > LONG_SUM
    zeroed = self.zeroed(self.s.after(*ready))
    acc = self.apart.after(self.zeroed(self.apart.after(*now))) if long else self.s.after(zeroed, *loop)
    if tile.alone:
      where, right = WhereItLies(self.group.rows("k"), t*n, turned=True, column=first), self.section("kept_q", *now)
      done = self.outer_products(acc, where, own, right, first, tile.depth)
    else:
      stores = self.brought("k", ahead, now, t, step, tile.steps(self.p))
      if not tile.keeps_q: stores.append(self.carried("q", now, "q", self.group.first_row, first, tile.block_m))
      q, from_row = ("kept_q", first) if tile.keeps_q else ("q", UOp.const(0))
      done = self.outer_products(acc, self.section("k", *now, *stores), own, self.section(q, *now, *stores), from_row, tile.depth)
    if long:
      so_far, part = (self.all(x) for x in (self.s.after(zeroed, *loop), self.apart.after(done)))
      done = UOp.group(*[x.store(ops.add(x.load(), y.load())) for x, y in zip(so_far, part)])
    return self.s.after(done.end(*loop))

  def zeroed(self, x:UOp) -> UOp: return UOp.group(*[y.store(ops.splat(0.0, QUAD)) for y in self.all(x)])

  def finished(self, rows:list[list[UOp]], t:UOp) -> list[list[UOp]]:
    """What the softmax takes, of the raw scores of some keys. `parts.scores` takes the scores of one query at a time."""
    tile, scores = self.tile, replace(self.group.scores, block_n=self.tile.down*self.tile.keys)
    if scores.raw and not self.masked: return rows
    def of_query(j:int, e:int) -> list[UOp]:
      vectors = [ops.build(*[ops.extract(rows[i + k][j], e) for k in range(QUAD)]) for i in range(0, tile.keys, QUAD)]
      found = scores.finished(vectors, [self.queries[j*QUAD + e]], t, self.masked)
      return [ops.extract(x, k) for x in found for k in range(QUAD)]
    columns = [[of_query(j, e) for e in range(QUAD)] for j in self.quads]
    return [[ops.build(*[column[i] for column in quad]) for quad in columns] for i in range(tile.keys)]

  @property
  def masked(self) -> bool:
    """Whether some key of a tile may be hidden, or not there."""
    p = self.p
    return p.window != (-1, -1) or p.kv_lengths or p.varlen or p.sk_variable is not None or p.Sk % self.tile.block_n > 0

  def weight(self, x:UOp, top:UOp) -> UOp:
    """P of a score: the difference first, which is exact where it matters."""
    return ops.exp2(ops.mul(ops.sub(x, top), self.group.scores.to_log2))

  def weigh(self, l:UOp, tops:list[UOp], ready:list[UOp]) -> UOp:
    """P^T of a thread's scores in their place, and its sums."""
    row, loop = self.loop(self.tile.block_n) if self.tile.alone else (UOp.const(0), [])
    rows = [row] if self.tile.alone else [self.own_row(i) for i in range(self.tile.keys)]
    p, stores = self.section("p", *ready, *loop), []
    for j, (top, part) in enumerate(zip(tops, self.each(l.after(*loop)))):
      weights = [self.weight(p.quad(x, self.query(j)), top) for x in rows]
      stores.append(part.store(functools.reduce(ops.add, weights, part.load())))
      stores += [y for x, w in zip(rows, weights) for y in p.store_quad(x, self.query(j), w)]
    return UOp.group(*stores).end(*loop)

  def add_to_o(self, state:QueryState, rescale:list[UOp], t:UOp, ready:list[UOp], weighed:UOp) -> UOp:
    """O^T += V^T P^T, some keys at a time."""
    tile, n, acc = self.tile, len(self.quads), state.acc
    block, blocks = self.loop(self.blocks)
    o = acc if self.o is self.state.acc else self.o.after(*ready, *blocks)
    scaled = UOp.group(*[y.store(ops.mul(x.load(), rescale[i%n])) for i, (x, y) in enumerate(zip(self.part(acc.after(*blocks), block), self.all(o)))])
    own = [self.own_row(i) for i in range(self.o.max_numel()//n)]
    if tile.alone:
      first, rows = t*tile.block_n, self.group.rows("v")
      where, columns = WhereItLies(rows, first, turned=False), [block*tile.columns + x for x in own]
      done = self.outer_products(o.after(scaled), where, columns, self.section("p", *ready, weighed), UOp.const(0), tile.block_n)
      return UOp.group(*[x.store(y.load()) for x, y in zip(self.part(acc.after(*blocks), block), self.all(self.o.after(done)))]).end(*blocks)
    step, loop = self.loop(parts := tile.block_n//tile.values)
    now = [*ready, *loop]
    stores = self.brought("v", state.v, now, t, step, parts)
    left, right = (self.section(name, *now, weighed, *stores) for name in ("v", "p"))
    return self.outer_products(o.after(scaled, *loop), left, own, right, step*tile.values, tile.values).end(*loop)

  def outputs(self, state:QueryState) -> list[UOp]:
    """O = O^T / l, LSE = m + ln l."""
    tile, group, n = self.tile, self.group, len(self.quads)
    sums, _ = self.over_keys([x.load() for x in self.each(state.l)], ops.add, [state.l])
    ends = [group.normalised(row, ops.extract(state.m[i//QUAD].load(), i%QUAD), [ops.extract(sums[i//QUAD], i%QUAD)])
            for i, row in enumerate(self.queries)]
    stores = [x for row, (_, log_sum) in zip(self.queries, ends) for x in group.outputs(row, [], log_sum)]
    block, loop = self.loop(self.blocks)
    part, o = self.part(state.acc.after(*loop), block), []
    for i, (row, (factor, _)) in enumerate(zip(self.queries, ends)):
      for k in range(0, len(part)//n, QUAD):
        values = ops.build(*[ops.extract(part[(k + e)*n + i//QUAD].load(), i%QUAD) for e in range(QUAD)])
        o += group.outputs(row, [(block*tile.columns + self.own_row(k), ops.mul(values, factor))], None)
    return [*stores, UOp.group(*o).end(*loop)]

  # ***** what it is made of *****
  @property
  def width(self) -> int:
    """Columns of O of a thread."""
    return self.tile.width(self.p)//self.tile.down
  @property
  def blocks(self) -> int:
    """In which a thread goes through its columns of O."""
    return self.width//(self.tile.columns or self.width)
  def part(self, acc:UOp, block:UOp) -> list[UOp]:
    """The registers of one of them."""
    return [acc[block*self.o.max_numel() + i] for i in range(self.o.max_numel())]
  def all(self, x:UOp) -> list[UOp]: return [x[i] for i in range(x.max_numel())]
  def each(self, x:UOp) -> list[UOp]:
    """Of registers that have a number for each query: those of each quad."""
    return [x[j] for j in self.quads]
  def barrier(self, *deps:UOp) -> UOp: return UOp.group(*deps) if self.tile.alone else workgroup_barrier(UOp.group(*deps))

  def outer_products(self, acc:UOp, left:Section|WhereItLies, columns:list[UOp], right:Section, first:UOp, n:int) -> UOp:
    """acc += the outer products of n rows of a left operand, of which a thread has some columns, and as many of a right one, from row `first` on."""
    k = self.new.range(n, AxisType.LOOP)
    acc = acc.after(k)
    quads, numbers = [right.quad(first + k, self.query(j)) for j in self.quads], [left.number(k, x) for x in columns]
    places = [acc[i*len(quads) + j] for i in range(len(numbers)) for j in range(len(quads))]
    products = [ops.mul(y, x) for x in numbers for y in quads]
    return UOp.group(*[place.store(ops.add(place.load(), x)) for place, x in zip(places, products)]).end(k)

  def carried(self, name:str, ready:list[UOp], tensor:str, first:UOp, column:UOp, n:int) -> UOp:
    """The stores to local memory of a part of n rows of a tensor, those from row `first` on, of the elements from `column` on: of V as they lie, else
    transposed. What there is not becomes 0. Each thread carries some quads."""
    to = self.section(name, *ready)
    item, loop = self.loop(ceildiv(n*self.units(name), self.tile.threads))
    return UOp.group(*[to.memory[place].store(x) for x, place in self.quad_of(name, tensor, item, first, column, n)]).end(*loop)

  def units(self, name:str) -> int:
    """Quads of a row of what goes to a section of local memory."""
    shape = self.section(name).shape
    return (shape.pitch if name == "v" else shape.rows)//QUAD

  def quad_of(self, name:str, tensor:str, item:UOp, first:UOp, column:UOp, n:int) -> list[tuple[UOp, UOp]]:
    """The numbers of a thread's `item`-th quad of those, and the places of local memory where they go."""
    to, rows, threads, turned, units = self.section(name), self.group.rows(tensor), self.tile.threads, name != "v", self.units(name)
    count, fast = n*units, math.gcd(n, ROWS_TOGETHER) if turned else 1
    index = item*threads + self.at.thread
    row, begin = index//(fast*units)*fast + index%fast, index//fast%units*QUAD
    mine, found = [index < count] if count % threads else [], []
    for i in range(QUAD):
      inside = [first + row < rows.count, column + begin + (0 if rows.width % QUAD == 0 else i) < rows.width]
      at = rows.base + (first + row)*rows.stride + column + begin + i
      x = rows.buffer[at.valid(functools.reduce(UOp.__and__, [*mine, *inside]))].load().cast(dtypes.float)
      place = ((begin + i)*to.shape.pitch + row if turned else row*to.shape.pitch + begin + i) + to.base
      found.append((x, place.valid(mine[0]) if mine else place))
    return found

  def part_of(self, name:str, t:UOp, step:UOp) -> tuple[UOp, UOp, int]:
    """The first row, the first element and the rows of a part of a tile of K or V, by the number of the part."""
    tile = self.tile
    if name == "k": return t*tile.block_n, step*tile.depth, tile.block_n
    return t*tile.block_n + step*tile.values, UOp.const(0), tile.values

  def fetched(self, name:str, ahead:UOp, t:UOp, step:UOp) -> list[UOp]:
    """A part of a tile of K or V to registers."""
    values = [x for j in range(self.tile.items(self.p, name)) for x, _ in self.quad_of(name, name, UOp.const(j), *self.part_of(name, t, step))]
    return [UOp.group(*[ahead[i].store(x) for i, x in enumerate(values)])]

  def brought(self, name:str, ahead:UOp, ready:list[UOp], t:UOp, step:UOp, parts:int) -> list[UOp]:
    """A part of a tile of K or V to local memory: from where it lies, or from registers, to which the next part is then on its way."""
    first, column, n = self.part_of(name, t, step)
    if not self.tile.ahead: return [self.carried(name, ready, name, first, column, n)]
    to, now = self.section(name, *ready), ahead.after(*ready)
    places = [place for j in range(self.tile.items(self.p, name)) for _, place in self.quad_of(name, name, UOp.const(j), first, column, n)]
    stores = UOp.group(*[to.memory[place].store(now[i].load()) for i, place in enumerate(places)])
    return [stores, *(self.fetched(name, ahead.after(stores), t, step + 1) if parts > 1 else [])]

  def over_keys(self, parts:list[UOp], join:Callable[[UOp, UOp], UOp], ready:list[UOp], *done:UOp) -> tuple[list[UOp], list[UOp]]:
    """Of each of a thread's queries what all threads of that query have together, and what comes after that exchange, before which these are
    `done`."""
    if self.tile.alone: return parts, [*ready, *done]
    to = self.section("exchanged", *ready)
    met = self.barrier(*done, *[y for j, x in enumerate(parts) for y in to.store_quad(self.at.h, self.query(j), x)])
    got = self.section("exchanged", met)
    return [functools.reduce(join, [got.quad(UOp.const(h), self.query(j)) for h in range(self.tile.down)]) for j in self.quads], [met]
