"""Draws where the rows of a tile lie in LDS (shared memory), and in which banks, from the kernels' own layouts. A cell of a picture is a piece of a
row: 16 or 8 bytes."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips.cdna3 import CDNA3
from attn.chips.cdna4 import CDNA4
from attn.chips.family import Family
from attn.chips.matrix import MMA, Matrix
from attn.chips.rdna4 import RDNA4
from attn.emulator.banks import phases
from attn.kernels.amd.staging import Staging
from attn.kernels.dual_wave import HEAD, K_LAYOUT, V_LAYOUT
from attn.kernels.parts.memory.layouts import PaddedRows, SwizzledRows
from attn.kernels.tiles.amd import v_columns, v_skew
from attn.pictures.matrices import UNIT
from attn.pictures.svg import FAINT, STRONG, TINTS, Drawing
from attn.tinygrad_compat import UOp

Piece = tuple[int, int]      # row and column: a unit of 16 bytes, or half of one
HEIGHT = 18                  # height of a cell, in pixels

@dataclass(frozen=True)
class Access:
  """Cells of a picture (each is 8 or 16 bytes of a tile) that some lanes of a wave read or write in LDS at the same time."""
  words: str
  # they must lie in different banks
  pieces: list[Piece]

@dataclass(frozen=True)
class Panel:
  """Picture of a tile in LDS as a grid of cells: a cell is a piece of 8 or 16 bytes of a row."""
  title: str
  words: tuple[str, ...]
  rows: int
  columns: int
  # neighbouring pieces that fill all banks once
  groups: int
  # returns the index of a piece in LDS, counted in pieces
  place: Callable[[int, int], UOp|int]
  accesses: tuple[Access, ...]
  width: float = 24
  def group(self, piece:Piece) -> int:
    """Returns which LDS banks hold a piece of the tile, as a number from 0 to groups - 1; a group is as many banks as a piece fills."""
    x = self.place(*piece)
    return (x if isinstance(x, int) else int(x.simplify().vmin)) % self.groups

def constant(x:UOp) -> int: return int(x.simplify().vmin)

# ***** the AMD kernel *****

def first_matrix(family:Family) -> Matrix: return family.matrix["float16"][0]

def forward_k(family:Family, chip:str) -> Panel:
  mat = first_matrix(family)
  lanes = [int(lane) for lane in phases(family.name, mat.wave, True, 16)[1][0]]
  layout = PaddedRows(64, 8)
  return Panel("K, D = 64", ("A row is 8 units and one left free:", "an odd stride."), 32, 8, 8,
               lambda row, unit: layout.place(UOp.const(row), UOp.const(unit)),
               (Access(f"read in one phase ({chip})", [(lane % mat.N, lane//mat.N) for lane in lanes]),))

def forward_v(family:Family, chip:str, block_n:int=32) -> Panel:
  mat = first_matrix(family)
  columns, units = v_columns(block_n), HEAD//UNIT
  layout = PaddedRows(HEAD, block_n//UNIT, v_skew(mat, block_n))
  pieces = []
  for lane in phases(family.name, mat.wave, False, 8)[1][0]:
    quad, unit, _ = Staging(block_n, units, 4*mat.wave, UOp.const(int(lane)), 4, columns, 2).item(0)
    pieces.append((mat.row_of(constant(unit)*UNIT), constant(quad)))
  gap = f"A gap of {layout.skew} units after every 16 rows." if layout.skew else "An odd stride, here of 5 units."
  return Panel(f"Vᵀ, {chip}", (f"A row is a column of V, {block_n} keys long.", gap), 32, block_n//4, 16,
               lambda row, half: layout.place(UOp.const(row), UOp.const(half), 2), (Access("stored in one phase", pieces),))

# ***** dual_wave *****

def dual_wave_k(mat:Matrix) -> Panel:
  lanes = [int(lane) for lane in phases(CDNA4.name, mat.wave, True, 16)[1][0]]
  return Panel("K", ("Chunks of four rows, a gap after each;", "units exchanged by xor with the row's number in its chunk."), 32, 16, 16,
               lambda row, unit: K_LAYOUT.place(UOp.const(row), UOp.const(unit)),
               (Access("read in one phase", [(lane % mat.N, lane//mat.N) for lane in lanes]),), 20)

def dual_wave_v(mat:Matrix) -> Panel:
  """Returns the picture of V in LDS, with the pieces that CDNA4's transposing LDS load reads in one phase."""
  # 32 lanes load at the same time. Groups of four lanes read the same row of V (one key), 4 elements each. After the load, these four lanes hold
  # rows of V^T whose indices differ by four.
  def piece(lane:int) -> Piece:
    m = lane//16%2*16 + lane%4*4
    d = next(d for d in range(mat.M) if mat.row_of(d) == m)
    return mat.key_of(lane//mat.N, 0) + lane%16//4, d//4
  lanes = [int(lane) for lane in phases(CDNA4.name, mat.wave, True, 8)[1][0]]
  return Panel("V", ("A cell is half a unit. The same, but xor with four times", "the row's number in its chunk."), 8, 32, 32,
               lambda row, half: V_LAYOUT.place(UOp.const(row), UOp.const(half//2))*2 + half % 2,
               (Access("read in one phase, transposed", [piece(lane) for lane in lanes]),), 14.5)

# ***** NVIDIA *****

def swizzled(width:int) -> Panel:
  rows, mat = SwizzledRows(16, width//UNIT), MMA["float16"]
  copied = [divmod(thread, rows.across) for thread in range(UNIT)]
  matrix = [mat.b_address(lane) for lane in range(8)]
  return Panel(f"D = {width}", ("Whole lines of 128 bytes, whose units are", "exchanged by xor with the row's number."), 16, rows.units, 8,
               lambda row, unit: rows.place(UOp.const(row), UOp.const(unit)),
               (Access("one 8x8 matrix of ldmatrix", matrix), Access("eight threads of cp.async", copied)))

# ***** drawing *****

def draw_panel(d:Drawing, x:float, y:float, p:Panel) -> None:
  d.text(x, y, p.title, 12, bold=True)
  for n, line in enumerate(p.words): d.text(x, y + 18 + n*15, line, 10.5, fill=FAINT)
  left, top = x + 26, y + 26 + 15*len(p.words)
  pieces = [(row, column) for row in range(p.rows) for column in range(p.columns)]
  d.cells((left + column*p.width, top + row*HEIGHT, p.width, HEIGHT, TINTS[p.group((row, column)) % len(TINTS)]) for row, column in pieces)
  for row in range(p.rows): d.text(left - 6, top + (row + 0.5)*HEIGHT, row, 9, "end", FAINT)
  for row, column in pieces:
    d.text(left + (column + 0.5)*p.width, top + (row + 0.5)*HEIGHT, p.group((row, column)), min(9.5, 0.6*p.width), "middle")
  for n, (access, colour) in enumerate(zip(p.accesses, STRONG)):
    for row, column in access.pieces:
      d.box(left + column*p.width + 1.5*n, top + row*HEIGHT + 1.5*n, p.width - 3*n, HEIGHT - 3*n, "none", colour, 2)
    d.box(left, top + p.rows*HEIGHT + 9 + 17*n, 10, 10, "none", colour, 2)
    d.text(left + 16, top + p.rows*HEIGHT + 14 + 17*n, access.words, 10.5, fill=FAINT)

def draw_page(title:str, words:str, panels:list[Panel], apart:float) -> Drawing:
  d = Drawing(900, 190 + max(p.rows for p in panels)*HEIGHT, title)
  d.text(20, 24, title, 16, bold=True)
  d.text(20, 45, words, 12, fill=FAINT)
  for n, p in enumerate(panels): draw_panel(d, 20 + n*apart, 80, p)
  return d

NUMBERS = "The number is that of its banks: within a phase all must differ."
PAGES: dict[str, tuple[str, str, list[Panel], float]] = {
  "lds_forward": ("K and Vᵀ in LDS: forward", f"A cell of K is a unit of 16 bytes, of Vᵀ half a unit. {NUMBERS}",
                  [forward_k(CDNA3, "gfx942"), forward_v(CDNA3, "gfx942"), forward_v(RDNA4, "RDNA4")], 290),
  "lds_dual_wave": ("K and V in LDS: dual_wave on gfx950, whose 64 banks serve 256 bytes at a time", f"A cell is a piece of a row. {NUMBERS}",
                    [dual_wave_k(first_matrix(CDNA4)), dual_wave_v(first_matrix(CDNA4))], 366),
  "lds_nvidia": ("Q, K and V in shared memory: mma.sync", f"A cell is a unit of 16 bytes. {NUMBERS}", [swizzled(64), swizzled(128)], 330),
}

def of_shared_memory() -> dict[str, Drawing]: return {name: draw_page(*parts) for name, parts in PAGES.items()}
