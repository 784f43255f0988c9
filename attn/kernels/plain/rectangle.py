"""Matrix products of the kernels in plain UOps: the threads form a rectangle, and each product is a sum of outer products. Begin with
`Rectangle.product`."""
from __future__ import annotations
import functools, itertools, math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from attn.chips import CHIPS, Chip
from attn.kernels.parts.grid.workgroup import Grid, Workgroup
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.memory.lanes import OwnKeys, ThreadPlace
from attn.kernels.parts.memory.rows import GlobalRows
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.counts import ceildiv
from attn.kernels.parts.program.statements import Statements, workgroup_barrier
from attn.kernels.parts.weights.scores import Scores
from attn.kernels.tiles.plain import LONG_SUM, QUAD, RectangleTile, SectionShape, Sections
from attn.ops import common as ops, nvidia as nv
from attn.ops.formats import FORMATS
from attn.ops.plain import plain
from attn.problem import Problem
from attn.score.masks import hides_some
from attn.tinygrad_compat import AxisType, UOp, dtypes
from attn.values import FLOATS

# A workgroup owns queries and loops over tiles of keys, or owns keys and loops over tiles of queries. The rows that it owns are the own rows, and the
# rows of the tiles are the walked rows. There are two kinds of products. Scores have a row for each walked row and a column for each own row. A sum
# over the walked rows, such as O or a gradient, is computed transposed: it has a row for each element of a row of O, and a column for each own row.
# The threads of the workgroup form a rectangle: `down` threads along the rows of the product, and `across` threads along the own rows. Each thread
# computes some rows of a product. Of each of these rows the thread holds some quads in fp32 registers. A quad has the elements of four neighbouring
# own rows. A step of the product reads one row of each operand from local memory, which holds both operands in fp32. For scores, both operands lie
# transposed; only rows that are copied asynchronously do not. For a sum over the walked rows, the left operand is not transposed, and the right
# operand is the weights in the order in which they were computed.
#
# On a CPU a workgroup is a single thread, which computes the products in this way, too. The thread's own memory takes the place of local memory. The
# thread reads the walked rows directly from global memory. Many threads would compute the pieces of a product at the same time; the single thread
# computes them one after another, in loops over parts of a tile, and over parts of the elements of O or of a gradient.

MAX_WIDTH = 512      # largest D and Dv
ROWS_TOGETHER = 8    # rows of a portion: neighbouring threads copy one quad of each
# Steps of a product that the source has one after another, on NVIDIA. The compiler unrolls the loop over them. With 16 steps in the source, Python
# takes 0.4 s more to make it (D = 128).
WRITTEN_STEPS = 4
JOINED_AT_ONCE = 3   # threads whose numbers the compiler joins in one iteration: with more it takes longer, and the kernel is no faster
MOST_UNROLLED = 8    # most quads that a thread copies without a loop: their loads run at the same time

def beyond_registers(p:Problem) -> str|None:
  """Returns an error message if rows of the problem are too long for the kernels in plain UOps, otherwise None."""
  widths = (("D", p.D), ("Dv", p.Dv))
  return next((f"{name}={value}: this kernel supports at most {MAX_WIDTH}"
               for name, value in widths if value > MAX_WIDTH), None)

def for_rectangles(kernel_of:Callable[..., Callable[..., UOp]]) -> Callable[..., Callable[..., UOp]]:
  """Returns `kernel_of`, a function that makes kernels, with a check: rows that are too long raise NotImplementedError."""
  def checked(p:Problem, *how:Any) -> Callable[..., UOp]:
    if (reason := beyond_registers(p)) is not None: raise NotImplementedError(reason)
    return kernel_of(p, *how)
  return checked

def as_rendered(sink:UOp, arch:Chip, tile:RectangleTile) -> UOp:
  """Returns the kernel `sink` with operations of attn, if the chip's renderer knows them, otherwise in plain UOps."""
  # attn's own renderers take the operations of attn/ops, which work on vectors. All other renderers take plain UOps only: then each operation is
  # replaced by plain UOps. This is also done for a kernel of a single thread.
  ours = arch.name in CHIPS
  return sink if ours and not tile.alone else plain(sink, checked=ours)

# ***** quads: vectors of four numbers *****

OfQuad = TypeVar("OfQuad")
def nth(quads:Sequence[UOp], i:int) -> UOp: return ops.extract(quads[i//QUAD], i%QUAD)
def in_quads(x:Sequence[OfQuad]) -> list[Sequence[OfQuad]]: return [x[i:i + QUAD] for i in range(0, len(x), QUAD)]
def turned_over(rows:list[list[UOp]]) -> list[list[UOp]]:
  """Returns the transpose of a matrix, given as rows that are lists of vectors of four numbers."""
  # for example, scores with a list for each walked row, in quads of own rows, become scores with a list for each own row, in quads of walked rows
  columns = [[nth(row, i) for row in rows] for i in range(len(rows[0])*QUAD)]
  return [[ops.build(*quad) for quad in in_quads(column)] for column in columns]

# ***** local memory *****

@dataclass(frozen=True)
class Section:
  """A matrix in local memory: the index of its first float, and its shape."""
  memory: UOp
  base: int|UOp   # index of the matrix's first float
  shape: SectionShape
  def place(self, row:UOp, column:UOp) -> UOp: return self.memory[row*self.shape.pitch + column + self.base]
  def rows_of_numbers(self, rows:list[UOp], columns:list[UOp]) -> list[list[tuple[UOp, int]]]:
    """Loads the elements at `rows` x `columns`: for each row a list of (vector that contains the element, its index in the vector)."""
    # columns come in groups of four neighbours
    quads = [[self.quad(row, column) for column in columns[::QUAD]] for row in rows]
    return [[(quad, i) for quad in of_row for i in range(QUAD)] for of_row in quads]
  def place_of_quad(self, row:UOp, column:UOp) -> UOp:
    return self.memory.bitcast(ops.f32(QUAD))[row*(self.shape.pitch//QUAD) + column//QUAD + self.base//QUAD]
  def quad(self, row:UOp, column:UOp) -> UOp: return self.place_of_quad(row, column).load()
  def store_quad(self, row:UOp, column:UOp, x:UOp) -> list[UOp]: return [self.place_of_quad(row, column).store(x)]

@dataclass(frozen=True)
class Turned(Section):
  """The transpose of a matrix in local memory."""
  def rows_of_numbers(self, rows:list[UOp], columns:list[UOp]) -> list[list[tuple[UOp, int]]]:
    """Loads the elements at `rows` x `columns`: for each row a list of (vector that contains the element, its index in the vector)."""
    # rows come in groups of four neighbours
    quads = [[self.quad(column, row) for column in columns] for row in rows[::QUAD]]
    return [[(quad, i) for quad in of_rows] for of_rows in quads for i in range(QUAD)]

@dataclass(frozen=True)
class GlobalOperand:
  """Left operand of a product in a kernel of single threads, which read it directly from global memory."""
  # The operand is rows of a tensor, transposed if `turned`. In place of a row that does not exist, the last row is read: masks hide its scores, and
  # in a sum over rows its weights are 0.
  source: GlobalRows
  first: UOp
  turned: bool
  width: int              # elements of a row
  element: Callable[[UOp, UOp, UOp], UOp]     # loads an element, in fp32: the element of a column, of the row whose number is the sum of two
  column: UOp|int = 0     # first column in the tensor
  def rows_of_numbers(self, rows:list[UOp], columns:list[UOp]) -> list[list[tuple[UOp, int]]]:
    return [[(self.number(row, x), 0) for x in columns] for row in rows]
  def number(self, row:UOp, column:UOp) -> UOp:
    row, column = (column, row + self.column) if self.turned else (row, column + self.column)
    x = self.element((self.first + row).minimum(self.source.count - 1).maximum(0), UOp.const(0), column.minimum(self.width - 1))
    return x if self.turned else (self.first + row < self.source.count).where(x, 0.0)

@dataclass(frozen=True)
class Portion:
  """Rows and columns of a tensor that all threads together copy at one time to a matrix in local memory."""
  section: str
  tensor: str
  first: UOp    # first row
  column: UOp   # first element of each row; the portion has as many elements as the section has room for
  n: int        # number of rows

# ***** how the work is divided *****

def serial_items(p:Problem, blocks:int, heads:int) -> tuple[int, int]:
  """Returns (number of independent parts of the work, heads that each part loops over) for a device without workgroups, such as a CPU."""
  # The work is `blocks` blocks of rows of each of `heads` heads (counted over batches). A part loops over its heads. If batches have different
  # numbers of keys, no part has heads of two batches, because the length of the loop over keys must not depend on the loop over heads.
  parts = p.B if p.kv_lengths or p.varlen else 1
  return parts*blocks, heads//parts

LANES_DOWN, LANES_ACROSS = 4, 8     # the rectangle of 32 neighbouring threads

def place_in_rectangle(tile:RectangleTile, thread:UOp) -> tuple[UOp, UOp]:
  """Returns the row and the column of a thread in the rectangle of threads."""
  # With asynchronous copies, 32 neighbouring threads form a small rectangle, so that neighbours read the same quads from local memory: threads 2n and
  # 2n + 1 lie in one column, and threads n and n + 2 mostly in one row.
  if not tile.asynchronous: return thread//tile.across, thread%tile.across
  # on an H100 this order of threads made a kernel for D = 64 1.2 times as fast
  down, across = math.gcd(LANES_DOWN, tile.down), math.gcd(LANES_ACROSS, tile.across)
  near, (number, lane) = math.gcd(2, down), (thread//(down*across), thread%(down*across))
  h, x = lane//(near*across)*near + lane%near, lane//near%across
  return number//(tile.across//across)*down + h, number%(tile.across//across)*across + x

def grid_of(p:Problem, arch:Chip, tile:RectangleTile, blocks:int, heads:int) -> tuple[Grid, ThreadPlace]:
  """Returns (grid of `blocks` workgroups for each of `heads` heads, position of the thread in its workgroup)."""
  # Heads are counted over batches. A device without workgroups, such as a CPU, computes one part after another: a part owns one block of rows and
  # loops over some heads (`serial_items`).
  new, here, own = Allocator(), UOp.const(0), OwnKeys(tile.down, tile.walked)
  if arch.serial:
    parts, together = serial_items(p, blocks, heads)
    part, head = new.range(parts, AxisType.GLOBAL), new.range(together, AxisType.LOOP)
    groups = heads//together
    return Grid(new, (part, head), part%groups*together + head, part//groups, here, here), ThreadPlace(here, here, here, own)
  block, head = new.range(blocks, AxisType.GLOBAL), new.range(heads, AxisType.GLOBAL)
  if tile.alone: return Grid(new, (block, head), head, block, here, here), ThreadPlace(here, here, here, own)
  thread = new.range(tile.threads, AxisType.WARP)
  h, x = place_in_rectangle(tile, thread)
  return Grid(new, (block, head, thread), head, block, thread, here), ThreadPlace(h, x, thread, own)

@dataclass(frozen=True)
class Rectangle:
  """Builder of a kernel in plain UOps for one problem, whose threads form a rectangle: its methods return UOps for one thread."""
  tile: RectangleTile
  new: Allocator
  group: Workgroup
  at: ThreadPlace
  memory: UOp        # local memory; for a single thread, the thread's own memory
  apart: UOp         # registers for one part of a long sum
  some: UOp          # registers for one block of columns of a sum, if a thread goes through several blocks
  statements: Statements
  head: UOp|None     # the head whose queries are walked over, if keys are owned

  # ***** sizes and places *****
  @property
  def p(self) -> Problem: return self.group.p
  @property
  def quads(self) -> range:
    """Indices 0, 1, ... of this thread's groups of four neighbouring rows. The thread computes these among the rows that the workgroup owns."""
    return range(self.tile.own//QUAD)
  @functools.cached_property
  def sections(self) -> Sections: return self.tile.sections(self.p)
  @property
  def part_scores(self) -> Scores:
    """The scores with one part of a tile: the keys (or queries) that all threads together compute at one time."""
    scores = replace(self.group.scores, block_n=self.tile.down*self.tile.walked)
    return scores if self.head is None else scores.of_head(self.head)
  @property
  def masked(self) -> bool:
    """Whether the kernel applies masks."""
    # not needed if every row of every tile exists and no mask hides a score
    return hides_some(self.group.scores.walk, self.tile.block_n)
  @property
  def items(self) -> list[UOp]:
    """A list with the range of the loop over heads, if the device has no workgroups, otherwise an empty list."""
    return [x for x in self.group.grid.ranges if x.arg[-1] is AxisType.LOOP]
  def rows_of(self, tensor:str) -> GlobalRows: return self.group.rows_of(tensor, self.head)
  def in_block(self, j:int) -> UOp:
    """Returns the index, among the rows that the workgroup owns, of the first row of this thread's j-th group of four rows."""
    return (self.at.x + j*self.tile.across)*QUAD
  def result_row(self, i:int) -> UOp:
    """Returns the index of this thread's i-th row of a product, among the rows that all threads compute."""
    # In scores, a row of the product belongs to a walked row. O and gradients are computed transposed, so there a row of the product is a column of O
    # or of the gradient.
    return self.at.h*QUAD + (i//QUAD*QUAD*self.tile.down + i%QUAD)
  def section(self, name:str, *deps:UOp) -> Section:
    """Returns the matrix `name` in local memory, to be accessed only after the operations `deps`."""
    return Section(self.memory.after(*deps), self.sections.places[name], self.sections.shapes[name])
  def loop(self, n:int) -> tuple[UOp, list[UOp]]:
    """Makes a loop of n iterations: returns (index of the iteration, [the loop]), or (0, []) if n is 1."""
    if n == 1: return UOp.const(0), []
    part = self.new.range(n, AxisType.LOOP)
    return part, [part]

  # ***** registers *****
  def all(self, x:UOp) -> list[UOp]: return [x[i] for i in range(x.max_numel())]
  def each(self, x:UOp) -> list[UOp]:
    """Returns the registers `x`, which have one number for each row that this thread owns, as vectors of four numbers."""
    return [x[j] for j in self.quads]
  def zeroed(self, x:UOp) -> UOp: return UOp.group(*[y.store(ops.splat(0.0, QUAD)) for y in self.all(x)])
  def width(self, acc:UOp) -> int:
    """Returns how many columns of O (or of a gradient) this thread sums in the registers `acc`."""
    return acc.max_numel()//len(self.quads)
  def blocks(self, acc:UOp) -> int:
    """Returns the number of groups into which a thread divides its columns of `acc` (O or a gradient), to compute one group after another."""
    # the thread computes one block after another
    return self.width(acc)//(self.tile.columns or self.width(acc))
  def block_of(self, acc:UOp, block:UOp) -> list[UOp]:
    """Returns this thread's registers in `acc`, which sums O or a gradient, for one of its groups of columns: group number `block`."""
    count = acc.max_numel()//self.blocks(acc)
    return [acc[block*count + i] for i in range(count)]
  def cleared(self, acc:UOp) -> UOp:
    """Returns the stores of 0 to the registers of the sum `acc` (O or a gradient)."""
    block, loop = self.loop(self.blocks(acc))
    return UOp.group(*[x.store(ops.splat(0.0, QUAD)) for x in self.block_of(acc.after(*loop), block)]).end(*loop)
  def in_rows(self, registers:Sequence[UOp]) -> list[list[UOp]]:
    """Loads `registers`, in which a matrix lies row by row, and returns a list of vectors for each row."""
    n, found = len(self.quads), [x.load() for x in registers]
    return [found[i:i + n] for i in range(0, len(found), n)]
  def barrier(self, *deps:UOp) -> UOp: return UOp.group(*deps) if self.tile.alone else workgroup_barrier(UOp.group(*deps))

  # ***** products *****
  def product(self, to:UOp, walked:str, own:str, kept:str, t:UOp, ready:list[UOp], ahead:UOp|None=None) -> UOp:
    """Multiplies part number `t` of the rows of tensor `walked` by the workgroup's own rows of tensor `own`; returns `to`, registers that get the
    result."""
    # Rows are copied to local memory a few columns at a time, after the operations `ready`. If the own rows stay in local memory, `kept` is the name
    # of the section (matrix) of local memory from which they are read. If the kernel loads data to registers before it needs them, the registers
    # `ahead` have the first walked rows.
    tile, n, width = self.tile, self.tile.down*self.tile.walked, self.width_of(walked)
    depth, (step, loop) = tile.depth_of(width), self.loop(tile.steps(width))
    now, first, mine = [*ready, *loop], step*depth, [self.result_row(i) for i in range(tile.walked)]
    long = width > LONG_SUM
    zeroed = self.zeroed(to.after(*ready))
    acc = self.apart.after(self.zeroed(self.apart.after(*now))) if long else to.after(zeroed, *loop)
    if tile.alone:
      where = GlobalOperand(self.rows_of(walked), self.group.scores.row(t*n), True, width, functools.partial(self.element, walked), first)
      done = self.outer_products(acc, where, mine, self.section(kept, *now), first, depth)
    else:
      portion = Portion("walked", walked, self.group.scores.row(t*n), first, n)
      copied = [] if tile.keeps_own else [self.carried(Portion("own", own, self.group.first_row, first, tile.block_m), now)]
      later, of_v = replace(portion, column=(step + 1)*depth), self.first_of("v", t)
      left, there = self.arriving(portion, later, of_v, (step, tile.steps(width)), now, copied, ahead)
      lies, from_row = (kept, first) if tile.keeps_own else ("own", UOp.const(0))
      done = self.outer_products(acc, left, mine, self.section(lies, *there), from_row, depth)
    if long:
      so_far, part = (self.all(x) for x in (to.after(zeroed, *loop), self.apart.after(done)))
      done = UOp.group(*[x.store(ops.add(x.load(), y.load())) for x, y in zip(so_far, part)])
    return to.after(done.end(*loop))

  def summed(self, acc:UOp, tensor:str, weights:str, t:UOp, ready:list[UOp], weighed:list[UOp], rescale:list[UOp]|None=None,
             ahead:UOp|None=None) -> UOp:
    """Computes acc = acc*rescale + X^T W, where X is tile t of `tensor` and W holds P or dS; returns the last operation."""
    # W is P or dS. The rows are copied to local memory a few at a time, after the operations `ready`. `weights` is the name of the section (matrix)
    # of local memory that holds the weights after the operations `weighed`. If the kernel loads data to registers before it needs them, the registers
    # `ahead` have the first rows.
    tile, n, first = self.tile, len(self.quads), self.group.scores.row(t*self.tile.block_n)
    block, blocks = self.loop(self.blocks(acc))
    to = self.some.after(*ready, *blocks) if tile.columns else acc
    if rescale is None and not tile.columns: begun = to
    else:
      numbers = [x.load() for x in self.block_of(acc.after(*blocks), block)]
      if rescale is not None: numbers = [ops.mul(x, rescale[i%n]) for i, x in enumerate(numbers)]
      begun = to.after(UOp.group(*[y.store(x) for x, y in zip(numbers, self.all(to))]))
    own = [self.result_row(i) for i in range(self.width(to))]
    if tile.alone:
      where = GlobalOperand(self.rows_of(tensor), first, False, self.width_of(tensor), functools.partial(self.element, tensor))
      columns = [block*tile.columns + x for x in own]
      done = self.outer_products(begun, where, columns, self.section(weights, *ready, *weighed), UOp.const(0), tile.block_n)
      return UOp.group(*[x.store(y.load()) for x, y in zip(self.block_of(acc.after(*blocks), block), self.all(to.after(done)))]).end(*blocks)
    step, loop = self.loop(parts := tile.block_n//tile.values)
    now, portion = [*ready, *loop], Portion("rows", tensor, first + step*tile.values, UOp.const(0), tile.values)
    later, of_k = replace(portion, first=portion.first + tile.values), self.first_of("k", t + 1)
    left, there = self.arriving(portion, later, of_k, (step, parts), now, weighed, ahead)
    return self.outer_products(begun.after(*loop), left, own, self.section(weights, *there), step*tile.values, tile.values).end(*loop)

  def outer_products(self, acc:UOp, left:Section|GlobalOperand, columns:list[UOp], right:Section, first:UOp, n:int) -> UOp:
    """Adds to the registers `acc` the outer products of n rows of `left` with n rows of `right`; returns the last operation."""
    # of row i of `left` and row `first` + i of `right`; `columns` are the columns of `left` that this thread computes
    steps_of_iteration = math.gcd(n, self.tile.steps_at_once)
    unrolled = steps_of_iteration//math.gcd(steps_of_iteration, WRITTEN_STEPS) if self.tile.asynchronous else 1
    together = steps_of_iteration//unrolled
    k = self.new.range(n//together, AxisType.LOOP, unrolled)
    places = [acc.after(k)[i] for i in range(len(columns)*len(self.quads))]
    sums = [place.load() for place in places]
    steps = [k*together + i for i in range(together)]
    for step, numbers in zip(steps, left.rows_of_numbers(steps, columns)):
      quads = [right.quad(first + step, self.in_block(j)) for j in self.quads]
      sums = [ops.add_product(x, y, *number) for x, (number, y) in zip(sums, itertools.product(numbers, quads))]
    return UOp.group(*[place.store(x) for place, x in zip(places, sums)]).end(k)

  # ***** from global to local memory *****
  def first_of(self, tensor:str, t:UOp) -> Portion:
    """Returns the rows and columns of K or V that the threads copy to local memory first, when they copy tile t."""
    # a tile may be copied in several such portions
    tile, first = self.tile, self.group.scores.row(t*self.tile.block_n)
    if tensor == "k": return Portion("walked", "k", first, UOp.const(0), tile.block_n)
    return Portion("rows", "v", first, UOp.const(0), tile.values)

  def converted(self, tensor:str) -> Callable[[UOp], UOp]:
    """Returns the function that converts an element of the tensor `tensor` to fp32."""
    if self.p.stored and tensor in ("k", "v"): return FORMATS[self.p.stored].decode
    # dO is first rounded to the inputs' dtype, as in the kernels with matrix instructions
    return lambda x: (x.cast(FLOATS[self.p.dtype]) if tensor == "do" else x).cast(dtypes.float)

  def width_of(self, tensor:str) -> int: return self.p.D if tensor == "k" else self.rows_of(tensor).width

  def element(self, tensor:str, first:UOp, row:UOp, column:UOp, *there:UOp) -> UOp:
    """Loads one element of row `first` + `row` of `tensor` in fp32: 0 if any condition in `there` is false."""
    def loaded(name:str, column:UOp|int) -> UOp:
      rows = self.rows_of(name)
      at = rows.start(first, row) + column
      return rows.buffer[at.valid(functools.reduce(UOp.__and__, there)) if there else at].load()
    p, convert = self.p, self.converted(tensor)
    if tensor != "k" or not p.stored or not p.v_in_k: return convert(loaded(tensor, column))
    # K in 8 bits in a latent cache: in the latent columns the stored number times the row's scale, and after them the rotary columns, which have 16
    # bits
    found = ops.mul(convert(loaded("k", column.minimum(p.Dv - 1))), loaded("k_scales", 0).cast(dtypes.float))
    return found if p.Dv == p.D else (column < p.Dv).where(found, loaded("k_rotary", (column - p.Dv).maximum(0)).cast(dtypes.float))

  def units(self, portion:Portion) -> int:
    """Returns the number of groups of four neighbouring elements that each row of `portion` has."""
    shape = self.sections.shapes[portion.section]
    if self.tile.asynchronous and portion.section == "walked": return self.tile.depth_of(self.p.D)//QUAD
    return (shape.rows if shape.turned else self.tile.width(self.width_of(portion.tensor)))//QUAD

  def quads_carried(self, portion:Portion) -> int:
    """Returns the number of groups of four neighbouring elements that each thread copies of `portion`."""
    return ceildiv(portion.n*self.units(portion), self.tile.threads)

  def carried(self, portion:Portion, ready:list[UOp]) -> UOp:
    """Copies this thread's elements of `portion` to local memory, after the operations `ready`, and returns the last operation."""
    # the data are transposed if the matrix in local memory is the transpose of the rows; elements that do not exist become 0
    to, count = self.section(portion.section, *ready), self.quads_carried(portion)
    item, loop = self.loop(count) if self.tile.alone or count > MOST_UNROLLED else (UOp.const(0), [])
    items = [item] if loop else [UOp.const(i) for i in range(count)]
    return UOp.group(*[to.memory[place].store(x) for i in items for x, place in self.quad_of(portion, i)]).end(*loop)

  def quad_of(self, portion:Portion, item:UOp) -> list[tuple[UOp, UOp]]:
    """Loads four elements of `portion`, this thread's group number `item`; returns (fp32 element, index in local memory) for each."""
    to, rows, threads, units = self.section(portion.section), self.rows_of(portion.tensor), self.tile.threads, self.units(portion)
    turned, width = to.shape.turned, self.width_of(portion.tensor)
    count, fast = portion.n*units, math.gcd(portion.n, ROWS_TOGETHER) if turned else 1
    index = item*threads + self.at.thread
    row, begin = index//(fast*units)*fast + index%fast, index//fast%units*QUAD
    mine, found = [index < count] if count % threads else [], []
    for i in range(QUAD):
      inside = [portion.first + row < rows.count, portion.column + begin + (0 if width % QUAD == 0 else i) < width]
      x = self.element(portion.tensor, portion.first, row, portion.column + begin + i, *mine, *inside)
      place = ((begin + i)*to.shape.pitch + row if turned else row*to.shape.pitch + begin + i) + to.base
      found.append((x, place.valid(mine[0]) if mine else place))
    return found

  def fetched(self, portion:Portion, ahead:UOp) -> list[UOp]:
    """Returns stores that load this thread's elements of `portion` from global memory to the registers `ahead`."""
    values = [x for j in range(self.quads_carried(portion)) for x, _ in self.quad_of(portion, UOp.const(j))]
    return [UOp.group(*[ahead[i].store(x) for i, x in enumerate(values)])]

  def brought(self, portion:Portion, then:Portion|None, ready:list[UOp], ahead:UOp|None) -> list[UOp]:
    """Returns stores of `portion` to local memory, from global memory. If registers `ahead` are given, the data come from them, and `then` is loaded
    to them."""
    # If `ahead` is None, the data comes from global memory. Otherwise it comes from the registers `ahead`, to which it was loaded earlier, and the
    # next data, `then`, is loaded to these registers afterwards.
    if ahead is None: return [self.carried(portion, ready)]
    to, now = self.section(portion.section, *ready), ahead.after(*ready)
    places = [place for j in range(self.quads_carried(portion)) for _, place in self.quad_of(portion, UOp.const(j))]
    stores = UOp.group(*[to.memory[place].store(now[i].load()) for i, place in enumerate(places)])
    return [stores, *(self.fetched(then, ahead.after(stores)) if then is not None else [])]

  # ***** asynchronous copies *****
  def started(self, portion:Portion, place:UOp, ready:list[UOp], gate:UOp|None=None) -> UOp:
    """Returns a statement that starts this thread's asynchronous copies of `portion` to local memory, where `gate` is true."""
    # The copies come after the operations `ready`, and are made only if `gate` is true. The section has room for one or two portions: `place` is 1
    # for the second half of the section, and 0 otherwise. Elements beyond the tensor's last row or column become 0.
    threads, rows, to = self.tile.threads, self.rows_of(portion.tensor), self.section(portion.section, *ready)
    units, pitch, copies = self.units(portion), to.shape.pitch//QUAD, list[UOp]()
    regular = threads % units == 0 and rows.regular      # the copies of a thread are at constant distances
    for j in range(self.quads_carried(portion)):
      moved, index = (j*(threads//units), self.at.thread) if regular else (0, j*threads + self.at.thread)
      row, unit = index//units, index%units
      there = (portion.first + row + moved < rows.count) & (portion.column + unit*QUAD < rows.width)
      mine = row + moved < portion.n if portion.n*units % threads else UOp.const(True)
      source = rows.buffer[rows.start(portion.first, row) + portion.column + unit*QUAD]
      at = to.memory.bitcast(ops.u32(QUAD))[(place*portion.n + row)*pitch + unit + to.base//QUAD]
      further = UNIT_BYTES*moved*pitch, rows.size*moved*rows.stride
      copies.append(nv.copy(at, source, further, there.where(UNIT_BYTES, 0), mine if gate is None else mine & gate, UNIT_BYTES))
    return UOp.group(*map(self.statements.do, copies))

  def committed(self, *copies:UOp) -> UOp:
    """Returns a statement that closes a group of asynchronous `copies`, for which threads can wait together."""
    return self.statements.do(nv.commit(self.statements.after(*copies).done), *copies)

  def arriving(self, now:Portion, later:Portion, other:Portion, at:tuple[UOp, int], ready:list[UOp], further:list[UOp],
               ahead:UOp|None) -> tuple[Section, list[UOp]]:
    """Returns (matrix in local memory with the data `now`, operations after which it may be read). Starts to fetch `later`, or in the last step
    `other`."""
    # For step s of n steps, where `at` = (s, n). The operations `ready` come first. The returned operations include `further`, operations that fill
    # other sections. With asynchronous copies, the step before has started the copies of `now`. This step waits for these copies, and starts the next
    # ones, which run during the products. The next copies are those of `later`, the data of the next step. In the last step they are those of
    # `other`, the first data of another section. Without asynchronous copies, this step stores `now`. If `ahead` is not None, it also loads `later`
    # to the registers `ahead`.
    step, steps = at
    if not self.tile.asynchronous:
      stores = self.brought(now, later if steps > 1 else None, ready, ahead)
      return self.section(now.section, *ready, *further, *stores), [*ready, *further, *stores]
    waits, last = self.statements.after(*ready, *further), step.eq(steps - 1)
    met = self.barrier(waits.do(nv.wait_copies(waits.done, 0), *ready, *further))
    copies = [self.started(other, UOp.const(0), [met], last if steps > 1 else None)]
    if steps > 1: copies.append(self.started(later, (step + 1)%2, [met], step < steps - 1))
    there, section = [met, self.committed(*copies)], self.sections.shapes[now.section]
    place = self.sections.places[now.section] + step%2*(now.n*section.pitch)
    return (Turned if now.section == "walked" else Section)(self.memory.after(*there), place, section), there

  def over_threads(self, parts:list[UOp], join:Callable[[UOp, UOp], UOp], ready:list[UOp], *done:UOp) -> tuple[list[UOp], list[UOp]]:
    """Joins the `parts` of all threads by the function `join`. Returns (a number for each row of this thread, operations after which local memory is
    free)."""
    # `parts` has this thread's numbers, a vector for each four of its own rows. The threads exchange the numbers through local memory, after the
    # operations `ready` and the statements `done`. The second list has the operations after which local memory is free for other data.
    if self.tile.alone: return parts, [*ready, *done]
    to = self.section("exchanged", *ready)
    met = self.barrier(*done, *[y for j, x in enumerate(parts) for y in to.store_quad(self.at.h, self.in_block(j), x)])
    got, down = self.section("exchanged", met), self.tile.down
    def quads(h:UOp) -> list[UOp]: return [got.quad(h, self.in_block(j)) for j in self.quads]
    if not self.tile.asynchronous:
      of_threads = [quads(UOp.const(h)) for h in range(down)]
      return [functools.reduce(join, column) for column in zip(*of_threads)], [met]
    joined, h = self.new.registers(len(self.quads), ops.f32(QUAD)), self.new.range(down - 1, AxisType.LOOP, JOINED_AT_ONCE)
    began = UOp.group(*[to.store(x) for to, x in zip(self.each(joined), quads(UOp.const(0)))])
    so_far = self.each(joined.after(began, h))
    ended = UOp.group(*[to.store(join(to.load(), x)) for to, x in zip(so_far, quads(h + 1))]).end(h)
    return [x.load() for x in self.each(joined.after(ended))], [met]
