"""Draws boxes, lines and words as SVG. The same calls give the same SVG text on every machine, so that a test can compare it."""
from __future__ import annotations
from collections.abc import Iterable
from xml.sax.saxutils import escape, quoteattr

# Colours of Okabe and Ito (jfly.uni-koeln.de/color), distinct for every kind of colour vision, mixed with white so that text on them is legible.
TINTS = ("#9dcbe6", "#f7d28a", "#8fd6bf", "#f0b899", "#cfe6f7", "#f8f3b0", "#e8c6d9", "#d9d9d9")
INK, FAINT, GRID, PAPER, EMPTY = "#1a1a1a", "#5a5a5a", "#b8b8b8", "#ffffff", "#f2f2f2"
STRONG = ("#d55e00", "#0072b2")     # outlines

def number(x:float) -> str: return f"{x:.2f}".rstrip("0").rstrip(".")

class Drawing:
  """SVG drawing. Coordinates are in pixels from the top left. Later shapes lie over earlier ones."""
  def __init__(self, width:float, height:float, title:str):
    self.width, self.height, self.title, self.shapes = width, height, title, list[str]()
    self.box(0, 0, width, height, PAPER, "none")

  def _add(self, tag:str, text:str|None=None, **attributes:str|float) -> None:
    words = " ".join(f"{name.replace('_', '-')}={quoteattr(x if isinstance(x, str) else number(x))}" for name, x in attributes.items())
    self.shapes.append(f"<{tag} {words}/>" if text is None else f"<{tag} {words}>{escape(text)}</{tag}>")

  def box(self, x:float, y:float, width:float, height:float, fill:str="none", stroke:str=GRID, stroke_width:float=0.6) -> None:
    self._add("rect", x=x, y=y, width=width, height=height, fill=fill, stroke=stroke, stroke_width=stroke_width)
  def cells(self, boxes:Iterable[tuple[float, float, float, float, str]]) -> None:
    """Draws boxes (x, y, width, height, fill) with white lines between them."""
    colours:dict[str, str] = {}
    for x, y, width, height, fill in boxes:
      sides = f"M{number(x)} {number(y)}h{number(width)}v{number(height)}h{number(-width)}z"
      colours[fill] = colours.get(fill, "") + sides
    # all boxes of one colour become one SVG shape, which keeps the file small
    for fill, sides in sorted(colours.items()): self._add("path", d=sides, fill=fill, stroke=PAPER, stroke_width=0.7)
  def line(self, points:list[tuple[float, float]], stroke:str=INK, stroke_width:float=1.2) -> None:
    self._add("polyline", points=" ".join(f"{number(x)},{number(y)}" for x, y in points), fill="none", stroke=stroke, stroke_width=stroke_width)
  def text(self, x:float, y:float, words:str|int, size:float=11, anchor:str="start", fill:str=INK, bold:bool=False) -> None:
    """Draws words at x, with the middle of their height at y. `anchor` is the point of the words at x: "start", "middle" or "end"."""
    more = {"text_anchor": anchor} if anchor != "start" else {}
    if fill != INK: more["fill"] = fill
    if bold: more["font_weight"] = "bold"
    self._add("text", str(words), x=x, y=y + 0.35*size, font_size=size, **more)

  def svg(self) -> str:
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" width="{number(self.width)}" height="{number(self.height)}" '
            f'viewBox="0 0 {number(self.width)} {number(self.height)}" font-family="DejaVu Sans, Verdana, Arial, sans-serif" fill="{INK}">')
    return "\n".join([head, f"<title>{escape(self.title)}</title>", *self.shapes, "</svg>", ""])
