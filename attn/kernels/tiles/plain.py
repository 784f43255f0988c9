"""The tiles of the kernels in plain UOps, whose threads stand in a rectangle, and what these kernels have in local memory."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import ClassVar
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.problem import Problem

QUAD = 4     # elements of a vector, where a kernel chooses its length
TURNED_PADDING = 4   # floats between rows that are stored transposed: so neighbouring threads store to different banks
LONG_SUM = 128       # a score that is a sum of more products is summed in parts: one long sum would have too large an error
SHORTEST_PART = 16   # products of the shortest such part: shorter ones would take longer

def summed_together(width:int) -> int:
  """Number of elements of a row whose products a thread sums before it adds that sum to a score: all of them, or for a long row a part that divides
  it."""
  part = max(n for n in range(1, LONG_SUM + 1) if width % n == 0)
  return width if width <= LONG_SUM or part < SHORTEST_PART else part

# ***** local memory *****

KEPT = ("kept", "kept of dp")      # sections for the own rows of a backward kernel: those of D and those of Dv elements

@dataclass(frozen=True)
class SectionShape:
  """Shape of a matrix in local memory: rows, floats from one row to the next, and whether its contents lie transposed."""
  rows: int
  pitch: int
  turned: bool = False
  @property
  def floats(self) -> int: return self.rows*self.pitch

@dataclass(frozen=True)
class Sections:
  """The sections of local memory, by name. The sections `kept` stay for the whole kernel. The groups in `turns` use one place, one group after
  another. The `rest` lies behind them."""
  kept: dict[str, SectionShape]
  turns: tuple[dict[str, SectionShape], ...]
  rest: dict[str, SectionShape]
  @property
  def shapes(self) -> dict[str, SectionShape]: return functools.reduce(lambda x, y: x | y, (self.kept, *self.turns, self.rest))
  @property
  def places(self) -> dict[str, int]:
    """First float of each section."""
    kept = after_each(self.kept, 0)
    turns = [after_each(turn, kept[END]) for turn in self.turns]
    rest = after_each(self.rest, max(turn[END] for turn in turns))
    return functools.reduce(lambda x, y: x | y, (kept, *turns, rest))
  @property
  def floats(self) -> int: return self.places[END]

END = ""     # name, among the places, of the end of the last section

def after_each(shapes:dict[str, SectionShape], first:int) -> dict[str, int]:
  """Places of sections that lie one after another, from float `first` on."""
  found = {END: first}
  for name, shape in shapes.items(): found |= {name: found[END], END: found[END] + shape.floats}
  return found

# ***** how the work is divided *****

@dataclass(frozen=True)
class RectangleTile:
  """How a workgroup whose threads stand in a rectangle divides the work. It owns some rows, and walks over the rows of the other kind, the walked
  rows, in tiles."""
  down: int       # threads along the walked rows, and along the columns of a sum
  across: int     # threads along the own rows
  walked: int     # walked rows that a thread has at a time
  own: int        # own rows that a thread has
  depth: int      # elements of each row that are in local memory at a time, transposed; 0: those that one thread sums together
  values: int     # walked rows that are in local memory at a time, not transposed
  keeps_own: bool = True   # the own rows stay in local memory, as a whole
  ahead: bool = False      # loads of what goes to local memory next run during the work
  parts: int = 1           # parts of a tile's rows, which a thread goes through one after another
  columns: int = 0         # columns of a sum that a thread has in registers at a time; 0: all its columns
  steps_at_once: int = 1   # steps of a product in one trip of its loop, if the number of steps is divisible by it

  @property
  def block_m(self) -> int: return self.across*self.own
  @property
  def block_n(self) -> int: return self.down*self.walked*self.parts
  @property
  def threads(self) -> int: return self.down*self.across
  @property
  def alone(self) -> bool:
    """Whether one thread works by itself, and shares nothing."""
    return self.threads == 1
  @property
  def waves(self) -> int: return ceildiv(self.threads, 32)
  @property
  def pack_gqa(self) -> bool: return False
  def width(self, of:int) -> int:
    """Columns of a sum over all threads, for rows of `of` elements."""
    return round_up(of, self.columns or QUAD*self.down)
  def depth_of(self, width:int) -> int: return self.depth or summed_together(width)
  def steps(self, width:int) -> int:
    """Number of parts in which rows of `width` elements come to local memory."""
    return ceildiv(width, self.depth_of(width))
  def kept_rows(self, width:int) -> SectionShape:
    """Shape of own rows of `width` elements, if they stay in local memory as a whole."""
    elements = round_up(self.steps(width)*self.depth_of(width), QUAD)
    return SectionShape(elements*self.keeps_own, self.block_m + (0 if self.alone else TURNED_PADDING), turned=True)
  def turns(self, width:int) -> tuple[dict[str, SectionShape], ...]:
    """Sections that use one place in turn: first parts of own rows and of walked rows, both transposed; then walked rows that are not transposed, of
    `width` elements at most."""
    shared = 0 if self.alone else 1
    own = SectionShape(self.depth*(not self.keeps_own), self.block_m + TURNED_PADDING, turned=True)
    walked = SectionShape(self.depth*shared, self.block_n + TURNED_PADDING, turned=True)
    return {"own": own, "walked": walked}, {"rows": SectionShape(self.values*shared, self.width(width))}
  def sections(self, p:Problem) -> Sections: raise NotImplementedError("each kernel's tile says what lies in local memory")
  def lds_bytes(self, p:Problem) -> int: return 0 if self.alone else 4*self.sections(p).floats
  @property
  def options(self) -> str:
    """The options of the tile that differ from the default, in words."""
    return " ".join(["own rows in parts"]*(not self.keeps_own) + ["ahead"]*self.ahead)
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} " + ("1 thread" if self.alone else f"{self.down}x{self.across} threads of {self.walked}x{self.own}")

@dataclass(frozen=True)
class TiledTile(RectangleTile):
  """How a workgroup of the forward kernel divides the work: it owns queries and walks over keys."""
  kernel: ClassVar[str] = "tiled"
  def sections(self, p:Problem) -> Sections:
    """Sections of local memory. `p` holds S^T first and then P^T. `exchanged` holds one number of each query from each thread."""
    rest = {"p": SectionShape(self.block_n, self.block_m), "exchanged": SectionShape(0 if self.alone else self.down, self.block_m)}
    return Sections({"kept": self.kept_rows(p.D)}, self.turns(p.Dv), rest)

@dataclass(frozen=True)
class TiledBackwardTile(RectangleTile):
  """How a workgroup of a backward kernel divides the work: it owns queries, or with `keys` keys."""
  suffix: ClassVar[str] = "_tiled"
  keys: bool = False
  def sections(self, p:Problem) -> Sections:
    """Sections of local memory. `p` holds P, if a gradient is summed with it, and `ds` holds dS. `exchanged` holds one number of each query from each
    thread."""
    weights = SectionShape(self.block_n, self.block_m)
    of_keys = {"p": weights} if self.keys else {"exchanged": SectionShape(0 if self.alone else self.down, self.block_m)}
    kept = dict(zip(KEPT, map(self.kept_rows, (p.D, p.Dv))))
    return Sections(kept, self.turns(max(p.D, p.Dv) if self.keys else p.D), {"ds": weights, **of_keys})
