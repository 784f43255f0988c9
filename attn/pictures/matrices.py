"""Draws which lane holds which element of the matrices A, B and C of a matrix instruction, as the kernels use the instruction."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from attn.chips.cdna3 import CDNA3
from attn.chips.cdna4 import CDNA4
from attn.chips.matrix import MMA, Matrix, Mma, contraction
from attn.chips.rdna3 import RDNA3
from attn.chips.rdna4 import RDNA4
from attn.kernels.parts.memory.lanes import units_of
from attn.pictures.svg import FAINT, INK, STRONG, TINTS, Drawing
from attn.tinygrad_compat import UOp

UNIT = CDNA3.matrix["float16"][0].unit    # elements in 16 bytes

SHOWN_LANE = 5     # the lane whose elements show their indices

@dataclass(frozen=True)
class Holder:
  """Where a matrix element is: number of the lane, number of the matrix instruction that takes the element, and index in that lane's operand."""
  lane: int
  step: int
  element: int

Cells = dict[tuple[int, int], list[Holder]]    # (row, column) -> holders of this element: one, or two if two lanes hold it

# ***** AMD: S^T = K Q^T *****

def steps_of(mat:Matrix, h:int) -> dict[int, tuple[int, int]]:
  """Returns {k: (number of the matrix instruction, index in the lane's operand)} for each column k that lane group h holds of an operand's row."""
  # k counts the elements over which a product sums. A lane reads its operands in units of 16 bytes. The row is as short as possible with whole units
  # and whole operands.
  units = [u.simplify().vmin for u in units_of(mat, contraction(mat, 1), UOp.const(h))]
  return {unit*UNIT + i: divmod(n*UNIT + i, mat.operand) for n, unit in enumerate(units) for i in range(UNIT)}

def operand_cells(mat:Matrix) -> Cells:
  """Returns which lane holds each element A[row][k] of operand A. A comes from K, and the product sums over k."""
  # the picture of the operand B, which comes from Q^T, is the mirror image
  cells: Cells = {}
  for h in range(mat.groups):
    for d, (step, element) in steps_of(mat, h).items():
      for row in range(mat.M): cells.setdefault((row, d), []).append(Holder(h*mat.N + row, step, element))
  return cells

def accumulator_cells(mat:Matrix) -> Cells:
  """Returns which lane holds each element C[row][column] of S^T. A row is a key, and a column is a query."""
  return {(mat.c_row(h, i), n): [Holder(h*mat.N + n, 0, i)] for h in range(mat.groups) for i in range(mat.accumulator) for n in range(mat.N)}

def key_order(mat:Matrix) -> list[tuple[int, int]]:
  """Returns, for each element of a row of V^T in LDS, (number of the lane group that reads the element, key of the element)."""
  # the keys have the order in which the lanes hold P^T
  return [(u % mat.groups, mat.key_of(u % mat.groups, u//mat.groups*UNIT + i)) for u in range(contraction(mat, mat.M)//UNIT) for i in range(UNIT)]

# ***** NVIDIA: S = Q K^T *****
# ldmatrix (PTX ISA 9.7.14.5.15): lanes 8j..8j+7 give the addresses of the eight rows of matrix j, and lane 4r + c gets elements 2c and 2c+1 of row r.

def loaded(addresses:list[tuple[int, int]]) -> Cells:
  """Returns which lane holds each matrix element (row, column) after an ldmatrix; lane n gives the address (row, 16-byte unit) addresses[n]."""
  return {(row, unit*UNIT + column): [Holder(n % UNIT*4 + column//2, 0, n//UNIT*2 + column % 2)]
          for n, (row, unit) in enumerate(addresses) for column in range(UNIT)}

def mma_a(mat:Mma) -> Cells: return loaded([mat.a_address(lane) for lane in range(mat.wave)])
def mma_b(mat:Mma) -> Cells:
  """Returns which lane holds each element B[k][key] of the operand B of mma.sync. The product sums over k."""
  # one ldmatrix reads the operands B of two tiles; the result is for the first tile
  cells = loaded([mat.b_address(lane) for lane in range(mat.wave)])
  return {(d, key): holders for (key, d), holders in cells.items() if key < mat.N}
def mma_c(mat:Mma) -> Cells:
  return {(mat.c_row(lane, r), mat.key_of(lane % mat.groups, n)): [Holder(lane, 0, r*mat.row_part + n)]
          for lane in range(mat.wave) for r in range(2) for n in range(mat.row_part)}

# ***** drawing *****

def mirrored(cells:Cells) -> Cells: return {(column, row): holders for (row, column), holders in cells.items()}

def draw_matrix(d:Drawing, x:float, y:float, cells:Cells, size:float, colour:Callable[[int], int], outlined:set[int],
                number_lanes:bool=False) -> None:
  """Draws a matrix of cells, coloured by lane. Cells of the lanes `outlined` have an outline and show the element's index."""
  d.cells((x + (column + i/len(holders))*size, y + row*size, size/len(holders), size, TINTS[colour(holder.lane)])
          for (row, column), holders in sorted(cells.items()) for i, holder in enumerate(holders))
  for (row, column), holders in sorted(cells.items()):
    left, top = x + column*size, y + row*size
    if holders[0].lane in outlined: d.text(left + size/2, top + size/2, holders[0].element, size*0.62, "middle", bold=True)
    # the other cells show the index of the lane
    elif number_lanes: d.text(left + size/2, top + size/2, holders[0].lane, size*0.42, "middle", FAINT)
  for (row, column), holders in sorted(cells.items()):
    if holders[0].lane not in outlined: continue
    def same(row:int, column:int) -> bool: return (row, column) in cells and cells[row, column][0].lane in outlined
    left, top, right, bottom = x + column*size, y + row*size, x + (column + 1)*size, y + (row + 1)*size
    sides = {(0, -1): ((left, top), (left, bottom)), (0, 1): ((right, top), (right, bottom)),
             (-1, 0): ((left, top), (right, top)), (1, 0): ((left, bottom), (right, bottom))}
    for (down, across), side in sides.items():
      if not same(row + down, column + across): d.line(list(side), STRONG[0], 1.8)

def legend(d:Drawing, y:float, colours:list[str], words:list[str]) -> None:
  """Draws the meaning of the colours and the lines `words`, in the corner of the picture that A, B and C leave free."""
  for n, meaning in enumerate(colours):
    d.box(20, y + n*18, 12, 12, TINTS[n])
    d.text(38, y + n*18 + 6, meaning)
  for n, line in enumerate(words): d.text(20, y + 18*len(colours) + 12 + n*16, line, fill=FAINT)

def strip(d:Drawing, x:float, y:float, width:float, colour:int, keys:list[int], words:str) -> None:
  """Draws keys as a row of cells in a frame, with the text `words` below."""
  d.cells((x + n*width, y, width, 22, TINTS[colour]) for n in range(len(keys)))
  for n, key in enumerate(keys):
    d.text(x + (n + 0.5)*width, y + 11, key, min(11, width*0.5), "middle")
  d.box(x, y, len(keys)*width, 22, "none", INK, 1.2)
  d.text(x + len(keys)*width/2, y + 34, words, 10, "middle", FAINT)

TOP, GAP = 100, 44     # top of the first matrix, and the gap between matrices

def draw_amd(mat:Matrix, chips:str) -> Drawing:
  """Draws the matrices A, B and C of an AMD matrix instruction, and the order of the keys along a row of V^T in LDS."""
  # B above C, and A to the left of C
  a, b, c, depth = operand_cells(mat), mirrored(operand_cells(mat)), accumulator_cells(mat), contraction(mat, 1)
  size = min(18, 640//(depth + mat.N))
  a_x, b_y = 110, TOP
  c_x, c_y = a_x + depth*size + GAP, b_y + depth*size + GAP
  below = c_y + mat.M*size
  d = Drawing(900, below + 116, mat.name)
  d.text(20, 24, mat.name, 16, bold=True)
  d.text(20, 45, f"{chips}: Sᵀ = K Qᵀ, a query is a lane", 12, fill=FAINT)

  lanes = {SHOWN_LANE + h*mat.N for h in range(mat.groups)}
  for x, y, cells in ((c_x, b_y, b), (a_x, c_y, a), (c_x, c_y, c)): draw_matrix(d, x, y, cells, size, lambda lane: lane//mat.N, lanes)
  d.text(c_x, b_y - 14, f"B: Qᵀ, {depth} rows (d), {mat.N} queries", bold=True)
  d.text(a_x, below + 16, f"A: K, {mat.M} keys, {depth} of d", bold=True)
  d.text(c_x, below + 16, f"C: Sᵀ, {mat.M} keys, {mat.N} queries", bold=True)
  for row in range(0, mat.M, 4): d.text(c_x + mat.N*size + 8, c_y + (row + 0.5)*size, f"key {row}", 10, fill=FAINT)
  steps = {column//mat.operand: holders[0].step for (row, column), holders in a.items() if row == 0}
  if len(set(steps.values())) > 1:
    for run, step in steps.items():
      middle = (run + 0.5)*mat.operand*size
      d.text(c_x + mat.N*size + 8, b_y + middle, f"instruction {step}", 10, fill=FAINT)
      d.text(a_x + middle, c_y - 10, step, 10, "middle", FAINT)
    d.text(a_x - 8, c_y - 10, "instruction", 10, "end", FAINT)

  words = [f"Outlined: lanes {', '.join(map(str, sorted(lanes)))}", f"(row {SHOWN_LANE} of A, column {SHOWN_LANE} of B and C).",
           "The number is that of the element", "in the lane's registers."]
  if mat.duplicated: words += ["", "Both lane groups hold all of A and B."]
  legend(d, b_y, [f"h = {h}: lanes {h*mat.N} to {h*mat.N + mat.N - 1}" for h in range(mat.groups)], words)

  order = key_order(mat)
  width = min(26.0, 856/len(order))
  d.text(20, below + 46, "Pᵀ as B of Oᵀ = Vᵀ Pᵀ: the keys in the order in which the lanes hold them, which is that of Vᵀ in LDS", bold=True)
  for u in range(len(order)//UNIT):
    unit, first = order[u*UNIT:(u + 1)*UNIT], u//mat.groups*UNIT
    strip(d, 20 + u*UNIT*width, below + 60, width, unit[0][0], [key for _, key in unit], f"h = {unit[0][0]}, elements {first} to {first + UNIT - 1}")
  return d

def draw_nvidia(mat:Mma) -> Drawing:
  """Draws the matrices A, B and C of the product S = Q K^T with mma.sync, and the keys of each lane's weights."""
  # B above C, and A to the left of C; a row of C is a query. Below them is a strip for each of the four lanes that share a query. It has the keys
  # whose weights P the lane holds, in the order in which they are operand A of O = P V.
  a, b, c, size = mma_a(mat), mma_b(mat), mma_c(mat), 22
  a_x, b_y = 110, TOP
  c_x, c_y = a_x + mat.K*size + GAP, b_y + mat.K*size + GAP
  below = c_y + mat.M*size
  d = Drawing(900, below + 116, mat.name)
  d.text(20, 24, "mma.sync.m16n8k16", 16, bold=True)
  d.text(20, 45, "sm_80 and later: S = Q Kᵀ, a query is a row, which four lanes share", 12, fill=FAINT)
  for x, y, cells in ((c_x, b_y, b), (a_x, c_y, a), (c_x, c_y, c)):
    draw_matrix(d, x, y, cells, size, lambda lane: lane%mat.groups, {SHOWN_LANE}, number_lanes=True)
  d.text(c_x, b_y - 14, f"B: Kᵀ, {mat.K} rows (d), {mat.N} keys", bold=True)
  d.text(a_x, below + 16, f"A: Q, {mat.M} queries, {mat.K} of d", bold=True)
  d.text(c_x, below + 16, f"C: S, {mat.M} queries, {mat.N} keys", bold=True)
  legend(d, b_y, [f"lanes {h}, {h + 4}, {h + 8}, ..." for h in range(mat.groups)],
          ["The small numbers are lanes.", "", f"Outlined: lane {SHOWN_LANE}, with the number of the element in its registers.", "",
           "A and B are shown as ldmatrix brings them,", "C as the instruction leaves it."])
  d.text(20, below + 46, "P as A of O = P V: the keys of two tiles of C that each of the four lanes holds, in its order", bold=True)
  n = 2*mat.row_part
  for h in range(mat.groups): strip(d, 20 + h*(n*44 + 8), below + 60, 44, h, [mat.key_of(h, i) for i in range(n)], f"lane % 4 = {h}")
  return d

# Pictures by file name. CDNA4's second instruction, 16x16x32, has no picture: its rows are like the rows of 16x16x16, its units like 32x32x16's.
DRAWN: dict[str, tuple[Matrix, str]] = {
  "mfma_32x32x8": (CDNA3.matrix["float16"][0], "gfx942"), "mfma_16x16x16": (CDNA3.matrix["float16"][1], "gfx942"),
  "mfma_32x32x16": (CDNA4.matrix["float16"][0], "gfx950"), "wmma_rdna3": (RDNA3.matrix["float16"][0], "RDNA3 (gfx11xx)"),
  "wmma_rdna4": (RDNA4.matrix["float16"][0], "RDNA4 (gfx12xx)"),
}

def of_instructions() -> dict[str, Drawing]:
  return {name: draw_amd(mat, chips) for name, (mat, chips) in DRAWN.items()} | {"mma_m16n8k16": draw_nvidia(MMA["float16"])}
