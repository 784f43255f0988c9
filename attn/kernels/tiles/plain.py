"""The tiles of the kernels of plain UOps, whose threads stand in a rectangle, and what they have in local memory."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import ClassVar
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.problem import Problem

QUAD = 4     # neighbouring elements of a vector where a kernel chooses
TURNED_PADDING = 4   # floats between the rows of what is stored transposed: those that neighbouring threads store to lie in different banks
LONG_SUM = 128       # products, beyond which a score is summed in parts: the error of one long sum would show
SHORTEST_PART = 16   # of a sum in parts, which would take longer

def summed_together(width:int) -> int:
  """The elements of a row whose products one thread sums before it adds that to a score: all, or of a long row a part that divides it."""
  part = max(n for n in range(1, LONG_SUM + 1) if width % n == 0)
  return width if width <= LONG_SUM or part < SHORTEST_PART else part

# ***** local memory *****

KEPT = ("kept", "kept of dp")      # own rows of a kernel of gradients: of D and of Dv elements

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
  """What lies in local memory, by name: what stays there; in one place, one after the other, what takes turns; and the rest."""
  kept: dict[str, SectionShape]
  turns: tuple[dict[str, SectionShape], ...]
  rest: dict[str, SectionShape]
  @property
  def shapes(self) -> dict[str, SectionShape]: return functools.reduce(lambda x, y: x | y, (self.kept, *self.turns, self.rest))
  @property
  def places(self) -> dict[str, int]:
    """The first float of each."""
    kept = after_each(self.kept, 0)
    turns = [after_each(turn, kept[END]) for turn in self.turns]
    rest = after_each(self.rest, max(turn[END] for turn in turns))
    return functools.reduce(lambda x, y: x | y, (kept, *turns, rest))
  @property
  def floats(self) -> int: return self.places[END]

END = ""     # among places: where the last one ends

def after_each(shapes:dict[str, SectionShape], first:int) -> dict[str, int]:
  """The places of these, one after another from float `first` on."""
  found = {END: first}
  for name, shape in shapes.items(): found |= {name: found[END], END: found[END] + shape.floats}
  return found

# ***** how the work is divided *****

@dataclass(frozen=True)
class RectangleTile:
  """How a workgroup divides the work."""
  down: int       # threads over what is walked over, and over the columns of a sum
  across: int     # threads over the own rows
  walked: int     # rows of a thread, at a time, of what is walked over
  own: int        # own rows of a thread
  depth: int      # elements of rows that are in local memory at a time, transposed; 0: as many as one thread sums together
  values: int     # rows of what is walked over that are in local memory at a time, as they lie
  keeps_own: bool = True   # the whole of the own rows stays in local memory
  ahead: bool = False      # what goes to local memory next is on its way to registers while work is done
  parts: int = 1           # of a tile's rows, which a thread goes through one after another
  columns: int = 0         # of a sum that a thread has in registers at a time; 0: all that are its own
  steps_at_once: int = 1   # of a product, in a trip of its loop, where so many divide them

  @property
  def block_m(self) -> int: return self.across*self.own
  @property
  def block_n(self) -> int: return self.down*self.walked*self.parts
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
  def width(self, of:int) -> int:
    """Columns of a sum over all threads, of rows of so many elements."""
    return round_up(of, self.columns or QUAD*self.down)
  def depth_of(self, width:int) -> int: return self.depth or summed_together(width)
  def steps(self, width:int) -> int:
    """Parts in which rows of so many elements come to local memory."""
    return ceildiv(width, self.depth_of(width))
  def kept_rows(self, width:int) -> SectionShape:
    """Shape of own rows of `width` elements, where all of them stay in local memory."""
    elements = round_up(self.steps(width)*self.depth_of(width), QUAD)
    return SectionShape(elements*self.keeps_own, self.block_m + (0 if self.alone else TURNED_PADDING), turned=True)
  def turns(self, width:int) -> tuple[dict[str, SectionShape], ...]:
    """Parts of own rows and of those walked over, transposed; and of the latter as they lie, of so many elements at most."""
    shared = 0 if self.alone else 1
    own = SectionShape(self.depth*(not self.keeps_own), self.block_m + TURNED_PADDING, turned=True)
    walked = SectionShape(self.depth*shared, self.block_n + TURNED_PADDING, turned=True)
    return {"own": own, "walked": walked}, {"rows": SectionShape(self.values*shared, self.width(width))}
  def sections(self, p:Problem) -> Sections: raise NotImplementedError("a tile of a kernel says what lies in local memory")
  def lds_bytes(self, p:Problem) -> int: return 0 if self.alone else 4*self.sections(p).floats
  @property
  def options(self) -> str:
    """What is not by default, in words."""
    return " ".join(["own rows in parts"]*(not self.keeps_own) + ["ahead"]*self.ahead)
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} " + ("1 thread" if self.alone else f"{self.down}x{self.across} threads of {self.walked}x{self.own}")

@dataclass(frozen=True)
class TiledTile(RectangleTile):
  """How a workgroup divides the work: what is walked over are keys, its own rows queries."""
  kernel: ClassVar[str] = "tiled"
  def sections(self, p:Problem) -> Sections:
    """S^T is in the place of P^T before that; `exchanged` is a number of each query from each thread."""
    rest = {"p": SectionShape(self.block_n, self.block_m), "exchanged": SectionShape(0 if self.alone else self.down, self.block_m)}
    return Sections({"kept": self.kept_rows(p.D)}, self.turns(p.Dv), rest)

@dataclass(frozen=True)
class TiledBackwardTile(RectangleTile):
  """How a workgroup divides the work: of a kernel that owns queries, or `keys`."""
  suffix: ClassVar[str] = "_tiled"
  keys: bool = False
  def sections(self, p:Problem) -> Sections:
    """P, where a gradient is summed with it, and dS; `exchanged` is a number of each query from each thread."""
    weights = SectionShape(self.block_n, self.block_m)
    of_keys = {"p": weights} if self.keys else {"exchanged": SectionShape(0 if self.alone else self.down, self.block_m)}
    kept = dict(zip(KEPT, map(self.kept_rows, (p.D, p.Dv))))
    return Sections(kept, self.turns(max(p.D, p.Dv) if self.keys else p.D), {"ds": weights, **of_keys})
