"""Picture of reports: the measured time of each problem beside the predicted one."""
from __future__ import annotations
import math
from collections.abc import Callable, Sequence
from attn.pictures.svg import EMPTY, FAINT, GRID, PAPER, STRONG, Drawing
from attn.report.schema import CardReport

COLOURS_OF_REPORTS = (STRONG[1], STRONG[0], "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
AXIS_LEFT, AXIS_RIGHT, PICTURE_WIDTH, LINE_HEIGHT, PICTURE_HEAD = 330, 60, 1000, 15, 60

def comparison(reports:Sequence[tuple[str, CardReport]]) -> str:
  """Returns a picture of reports, given as (name, report), as SVG text: each problem's measured and predicted times on a logarithmic axis."""
  # Every problem has a line for each report: a filled mark is the measured time, an open mark the predicted one, and the number beside them is
  # measured/predicted. The emulator's times are not drawn.
  if len(reports) > len(COLOURS_OF_REPORTS): raise ValueError(f"{len(reports)} reports: at most {len(COLOURS_OF_REPORTS)} can be told apart")
  shapes = list(dict.fromkeys(row.shape for _, x in reports for row in x.rows))
  lines = [(shape, n, row) for shape in shapes for n, (_, x) in enumerate(reports) for row in x.rows if row.shape == shape and row.right]
  times = {(shape, n): (None if reports[n][1].emulated else row.seconds, row.predicted) for shape, n, row in lines}
  known = [1e3*t for pair in times.values() for t in pair if t is not None]
  if not known: raise ValueError("no report has a measured or a predicted time to draw")
  low, high = 10**math.floor(math.log10(min(known))), 10**math.ceil(math.log10(max(known)) + 1e-9)
  drawing = Drawing(PICTURE_WIDTH, PICTURE_HEAD + LINE_HEIGHT*(len(reports)*len(shapes) + len(shapes)) + 30, "measured and predicted times")
  def place(ms:float) -> float: return AXIS_LEFT + (PICTURE_WIDTH - AXIS_LEFT - AXIS_RIGHT)*math.log(ms/low)/math.log(high/low)
  legend_of_reports(drawing, [name for name, _ in reports])
  y: float = PICTURE_HEAD
  for i, shape in enumerate(shapes):
    height = LINE_HEIGHT*(len(reports) + 1)
    if i % 2 == 0: drawing.box(0, y, PICTURE_WIDTH, height, EMPTY, "none")
    drawing.text(8, y + height/2, str(shape), size=10)
    for n in range(len(reports)):
      if (shape, n) in times: marks(drawing, *times[shape, n], place, y + LINE_HEIGHT*(n + 1), COLOURS_OF_REPORTS[n])
    y += height
  axis(drawing, low, high, place, y)
  return drawing.svg()

def legend_of_reports(drawing:Drawing, names:Sequence[str]) -> None:
  drawing.text(8, 14, "time of a shape in ms: filled is measured, open is predicted; the number is measured/predicted", size=12, bold=True)
  x: float = 8
  for name, colour in zip(names, COLOURS_OF_REPORTS):
    drawing.box(x, 28, 10, 10, colour, colour)
    drawing.text(x + 15, 33, name, fill=FAINT)
    x += 35 + 7*len(name)

def marks(drawing:Drawing, measured:float|None, predicted:float|None, place:Callable[[float], float], y:float, colour:str) -> None:
  """Draws one problem's measured time (a filled mark), predicted time (an open mark), and measured/predicted."""
  # `place` converts milliseconds to a position along the axis of time; `y` is the position across it
  at = [(None if t is None else place(1e3*t)) for t in (measured, predicted)]
  if at[0] is not None and at[1] is not None: drawing.line([(at[0], y), (at[1], y)], colour)
  for x, fill in zip(at, (colour, PAPER)):
    if x is not None: drawing.box(x - 4, y - 4, 8, 8, fill, colour, 1.5)
  if measured is not None and predicted is not None:
    drawing.text(max(x for x in at if x is not None) + 9, y, f"{measured/predicted:.2f}", size=9, fill=FAINT)

def axis(drawing:Drawing, low:float, high:float, place:Callable[[float], float], y:float) -> None:
  for power in range(round(math.log10(low)), round(math.log10(high)) + 1):
    x = place(10.0**power)
    drawing.line([(x, PICTURE_HEAD), (x, y)], GRID, 0.5)
    drawing.text(x, y + 12, f"{10.0**power:g}", anchor="middle", fill=FAINT)
