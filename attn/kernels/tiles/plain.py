"""Tile descriptions of the kernels in plain UOps: how the threads of a workgroup form a rectangle, which rows each thread computes, and which
matrices lie in local memory."""
from __future__ import annotations
import functools
from dataclasses import dataclass
from typing import ClassVar
from attn.kernels.parts.program.counts import ceildiv, round_up
from attn.problem import Problem

QUAD = 4     # elements of a vector, where a kernel chooses its length
TURNED_PADDING = 4   # floats of padding after each row of a transposed matrix: neighbouring threads then store to different banks
LONG_SUM = 128       # a score with more products than this is summed in parts: the rounding error of one long sum would be too large
SHORTEST_PART = 16   # least products of such a part: with shorter parts the kernel would be slower

def summed_together(width:int) -> int:
  """Returns how many products of elements, e.g. of a row of Q and one of K, a thread sums before it adds the sum to a score."""
  # All `width` products of a short row, or a divisor of `width` for a long row: a sum of such partial sums has a smaller rounding error than one long
  # sum.
  part = max(n for n in range(1, LONG_SUM + 1) if width % n == 0)
  return width if width <= LONG_SUM or part < SHORTEST_PART else part

# ***** local memory *****

KEPT = ("kept", "kept of dp")      # sections for the own rows of a backward kernel: own rows of D elements, own rows of Dv elements

@dataclass(frozen=True)
class SectionShape:
  """Shape of a matrix in local memory, in floats."""
  rows: int
  pitch: int             # floats from one row to the next
  turned: bool = False   # whether the matrix is the transpose of the rows that are copied there
  @property
  def floats(self) -> int: return self.rows*self.pitch

@dataclass(frozen=True)
class Sections:
  """The matrices in local memory, called sections, and their names."""
  kept: dict[str, SectionShape]                # come first, and stay for the whole kernel
  turns: tuple[dict[str, SectionShape], ...]   # groups that use the same part of local memory at different times
  rest: dict[str, SectionShape]                # lie at the end
  @property
  def shapes(self) -> dict[str, SectionShape]: return functools.reduce(lambda x, y: x | y, (self.kept, *self.turns, self.rest))
  @property
  def places(self) -> dict[str, int]:
    """Index of the first float of each section (matrix) in local memory, by the section's name."""
    kept = after_each(self.kept, 0)
    turns = [after_each(turn, kept[END]) for turn in self.turns]
    rest = after_each(self.rest, max(turn[END] for turn in turns))
    return functools.reduce(lambda x, y: x | y, (kept, *turns, rest))
  @property
  def floats(self) -> int: return self.places[END]

END = ""     # name, among the places, of the end of the last section

def after_each(shapes:dict[str, SectionShape], first:int) -> dict[str, int]:
  """Returns {name: index of its first float} for matrices that lie one after another from float `first` on. The name END has the index after the last
  matrix."""
  found = {END: first}
  for name, shape in shapes.items(): found |= {name: found[END], END: found[END] + shape.floats}
  return found

# ***** how the work is divided *****

@dataclass(frozen=True)
class RectangleTile:
  """Tile description of a kernel in plain UOps, whose workgroup's threads form a rectangle."""
  # the workgroup owns some rows (queries or keys) and loops over tiles of the rows of the other kind, the walked rows
  down: int       # threads along the walked rows of scores, and along the columns of O or of a gradient
  across: int     # threads along the own rows
  walked: int     # walked rows that a thread computes at a time
  own: int        # own rows that a thread computes
  depth: int      # elements of each row that are in local memory at a time, transposed; 0: `summed_together` elements
  values: int     # walked rows that are in local memory at a time, not transposed
  keeps_own: bool = True   # the own rows stay in local memory, as a whole
  ahead: bool = False      # loads run ahead: the data that local memory receives next is loaded during the products
  asynchronous: bool = False   # walked rows are copied to local memory by NVIDIA's asynchronous copies, during the products
  parts: int = 1           # parts of a tile's rows, which a thread goes through one after another
  columns: int = 0         # columns of O or of a gradient that a thread has in registers at a time; 0: all its columns
  steps_at_once: int = 1   # steps of a product in one iteration of its loop, if this divides the number of steps

  @property
  def block_m(self) -> int: return self.across*self.own
  @property
  def block_n(self) -> int: return self.down*self.walked*self.parts
  @property
  def threads(self) -> int: return self.down*self.across
  @property
  def alone(self) -> bool:
    """Whether the workgroup is a single thread, which uses no local memory."""
    return self.threads == 1
  @property
  def waves(self) -> int: return ceildiv(self.threads, 32)
  @property
  def pack_gqa(self) -> bool: return False
  def width(self, of:int) -> int:
    """Returns `of`, a number of columns of a result such as O, rounded up to a multiple of the columns that the threads compute together."""
    # a multiple of `columns`, the columns that a thread computes at a time, or, if a thread computes all its columns at once, of 4 columns for each
    # of the `down` threads
    return round_up(of, self.columns or QUAD*self.down)
  def depth_of(self, width:int) -> int: return self.depth or summed_together(width)
  def steps(self, width:int) -> int:
    """Returns the number of steps in which rows of `width` elements are copied to local memory, each with some columns of all rows."""
    return ceildiv(width, self.depth_of(width))
  def kept_rows(self, width:int) -> SectionShape:
    """Returns the shape of the matrix that holds the workgroup's own rows, transposed, in local memory during the whole kernel."""
    # 0 rows if the kernel does not keep these rows in local memory
    elements = round_up(self.steps(width)*self.depth_of(width), QUAD)
    return SectionShape(elements*self.keeps_own, self.block_m + (0 if self.alone else TURNED_PADDING), turned=True)
  def turns(self, width:int) -> tuple[dict[str, SectionShape], ...]:
    """Returns two dicts {name: shape} of matrices in local memory. The matrices of the second dict later use the bytes that those of the first dict
    used."""
    # The first group holds some elements of the own rows and of the walked rows, both transposed. The second group holds walked rows of at most
    # `width` elements, not transposed.
    shared = 0 if self.alone else 1
    own = SectionShape(self.depth*(not self.keeps_own), self.block_m + TURNED_PADDING, turned=True)
    walked = SectionShape(self.depth*shared, self.block_n + TURNED_PADDING, turned=True)
    return {"own": own, "walked": walked}, {"rows": SectionShape(self.values*shared, self.width(width))}
  def copied(self, p:Problem) -> dict[str, SectionShape]:
    """Returns {name: shape} of the matrices in local memory to which tiles of K and V are copied asynchronously."""
    # "walked" for some elements of each key of a tile, "rows" for some rows of V; if a tile is copied in several portions, a section has room for
    # two: one is copied while the kernel reads the other
    places_of_k, places_of_v = (min(2, n) for n in (self.steps(p.D), self.block_n//self.values))
    return {"walked": SectionShape(places_of_k*self.block_n, self.depth_of(p.D) + TURNED_PADDING),
            "rows": SectionShape(places_of_v*self.values, self.width(p.Dv))}
  def sections(self, p:Problem) -> Sections: raise NotImplementedError("each kernel's tile says what lies in local memory")
  def lds_bytes(self, p:Problem) -> int: return 0 if self.alone else 4*self.sections(p).floats
  @property
  def options(self) -> str:
    """Text that names the options of this tile description whose values are not the default."""
    return " ".join(["own rows in parts"]*(not self.keeps_own) + ["ahead"]*self.ahead + ["asynchronous"]*self.asynchronous)
  def __str__(self) -> str:
    return f"{self.block_m}x{self.block_n} " + ("1 thread" if self.alone else f"{self.down}x{self.across} threads of {self.walked}x{self.own}")

@dataclass(frozen=True)
class TiledTile(RectangleTile):
  """Tile description of the forward kernel in plain UOps: a workgroup owns queries and loops over keys."""
  kernel: ClassVar[str] = "tiled"
  def sections(self, p:Problem) -> Sections:
    """Returns the sections (matrices) of local memory."""
    # section `p` holds P^T, and for a single thread first S^T; in section `exchanged` each thread stores one number for each of its queries
    rest = {"p": SectionShape(self.block_n, self.block_m), "exchanged": SectionShape(0 if self.alone else self.down, self.block_m)}
    return Sections({"kept": self.kept_rows(p.D)}, (self.copied(p),) if self.asynchronous else self.turns(p.Dv), rest)

@dataclass(frozen=True)
class TiledBackwardTile(RectangleTile):
  """Tile description of a backward kernel in plain UOps: a workgroup owns queries, or, if `keys` is set, keys."""
  suffix: ClassVar[str] = "_tiled"
  keys: bool = False
  def sections(self, p:Problem) -> Sections:
    """Returns the sections (matrices) of local memory."""
    # section `ds` holds dS, and section `p`, if the workgroup owns keys, P; in section `exchanged` each thread stores one number for each of its
    # queries
    weights = SectionShape(self.block_n, self.block_m)
    of_keys = {"p": weights} if self.keys else {"exchanged": SectionShape(0 if self.alone else self.down, self.block_m)}
    kept = dict(zip(KEPT, map(self.kept_rows, (p.D, p.Dv))))
    return Sections(kept, self.turns(max(p.D, p.Dv) if self.keys else p.D), {"ds": weights, **of_keys})
