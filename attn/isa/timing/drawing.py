"""Draws loop iterations as a picture: a band of lines for each wave, with a line for each execution unit and a line for waits."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from attn.extras import needs
from attn.isa.timing.steps import Pipe
from attn.isa.timing.trips import LoopTiming, Timing
from attn.isa.timing.waves import ACCESS, BARRIER, BUSY, RESULT
from attn.pictures.svg import EMPTY, FAINT, STRONG, TINTS, Drawing

LANES = (Pipe.MATRIX, Pipe.VECTOR, Pipe.TRANSCENDENTAL, Pipe.LDS, Pipe.MEMORY, Pipe.SCALAR)
COLOURS: dict[Pipe, str] = dict(zip(LANES, ("#d55e00", "#0072b2", "#cc79a7", "#009e73", "#e69f00", "#7f7f7f"), strict=True))
WAITS = {BARRIER: STRONG[0], ACCESS: TINTS[1], RESULT: TINTS[0], BUSY: TINTS[7]}
_LANE, _GAP, _LEFT, _TOP, _WIDTH, _SHOWN = 7, 12, 120, 56, 1500, 2

@dataclass(frozen=True)
class _Bar:
  """A span of cycles in one line of the picture."""
  wave: int
  # a wave has one line for each execution unit, then one for waits
  lane: int
  begin: float
  end: float
  colour: str

def _bars(loop:LoopTiming, shown:list[int], begin:int, end:int) -> Iterator[_Bar]:
  row = {wave: i for i, wave in enumerate(shown)}
  for x in loop.run.issues:
    if x.wave not in row or x.at > end or (x.end < begin and x.at < begin): continue
    step = loop.run.waves[x.wave].steps[x.step]
    unit = Pipe.SCALAR if step.unit in (Pipe.BRANCH, Pipe.NONE) else step.unit
    if step.unit != Pipe.NONE:
      # The bar of an access begins at its issue and lasts while the access transfers data. The wait for the data has a bar in the line of waits.
      length = max(step.hold, step.matrix, step.transfer, step.pause if unit == Pipe.SCALAR else 0)
      yield _Bar(row[x.wave], LANES.index(unit), max(begin, x.at), min(end, x.at + length), COLOURS[unit])
    if x.at > x.since and x.why: yield _Bar(row[x.wave], len(LANES), max(begin, x.since), min(end, x.at), WAITS[x.why])

def _window(loop:LoopTiming, trips:int) -> tuple[int, int]:
  starts = [x for x in loop.run.starts[0] if x >= loop.run.begin]
  return (starts[0], starts[min(trips, len(starts) - 1)]) if len(starts) > 1 else (loop.run.begin, loop.run.end)

def _shown(loop:LoopTiming) -> list[int]:
  """Returns the indices of the waves that the picture shows: those of the first workgroup, sorted by SIMD."""
  return sorted((i for i, w in enumerate(loop.run.waves) if w.group == 0), key=lambda i: (loop.run.waves[i].simd, i))

def svg_of(timing:Timing, loop:LoopTiming, trips:int=_SHOWN) -> str:
  """Returns a drawing of `trips` iterations of a loop, as SVG text."""
  shown, (begin, end) = _shown(loop), _window(loop, trips)
  height, scale = len(LANES)*_LANE + _LANE + _GAP, (_WIDTH - _LEFT - 20)/(end - begin)
  title = f"{timing.name} on {timing.chip.name}: {loop.cycles:.0f} cycles an iteration, matrix unit in use {100*loop.matrix_use:.0f}% (predicted)"
  drawing = Drawing(_WIDTH, _TOP + len(shown)*height + 30, title)
  drawing.text(10, 16, title, size=13, bold=True)
  x = 10.0
  for name, colour in [*((u.name.lower(), COLOURS[u]) for u in LANES), *((f"waits: {why}", colour) for why, colour in WAITS.items())]:
    drawing.box(x, 30, 10, 10, colour)
    drawing.text(x + 14, 35, name, fill=FAINT)
    x += 30 + 7*len(name)
  for i, wave in enumerate(shown):
    y = _TOP + i*height
    drawing.box(_LEFT, y, _WIDTH - _LEFT - 20, (len(LANES) + 1)*_LANE, EMPTY, "none")
    drawing.text(10, y + 3.5*_LANE, f"SIMD {loop.run.waves[wave].simd}, wave {wave}")
  drawing.cells((_LEFT + (b.begin - begin)*scale, _TOP + b.wave*height + b.lane*_LANE, max(0.3, (b.end - b.begin)*scale), _LANE - 1, b.colour)
                for b in _bars(loop, shown, begin, end) if b.end > b.begin)
  bottom = _TOP + len(shown)*height
  for n in range(5):
    at = begin + n*(end - begin)/4
    drawing.text(_LEFT + (at - begin)*scale, bottom + 10, f"{at - begin:.0f}", anchor="middle", fill=FAINT)
  for start in loop.run.starts[0]:
    if begin < start < end: drawing.line([(_LEFT + (start - begin)*scale, _TOP - 4), (_LEFT + (start - begin)*scale, bottom)], FAINT, 0.8)
  return drawing.svg()

def draw_svg(timing:Timing, loop:LoopTiming, path:Path, trips:int=_SHOWN) -> None:
  path.write_text(svg_of(timing, loop, trips), encoding="utf-8")

def draw_png(timing:Timing, loop:LoopTiming, path:Path, trips:int=_SHOWN) -> None:
  """Draws `trips` iterations of a loop to the PNG file `path`. Without matplotlib, SystemExit says what to install."""
  with needs("bench", "a PNG of it", __name__):
    from matplotlib.figure import Figure as Canvas
  shown, (begin, end) = _shown(loop), _window(loop, trips)
  canvas = Canvas(figsize=(16, 1 + 0.8*len(shown)))
  axes = canvas.subplots()
  rows: dict[tuple[int, str], list[tuple[float, float]]] = {}
  for b in _bars(loop, shown, begin, end):
    if b.end > b.begin: rows.setdefault((b.wave*(len(LANES) + 3) + b.lane, b.colour), []).append((b.begin - begin, b.end - b.begin))
  for (y, colour), spans in rows.items(): axes.broken_barh(spans, (y, 0.9), facecolors=colour)
  axes.set_yticks([i*(len(LANES) + 3) + 3 for i in range(len(shown))], [f"SIMD {loop.run.waves[w].simd}, wave {w}" for w in shown])
  axes.invert_yaxis()
  axes.set_xlabel("cycles")
  axes.set_title(f"{timing.name}: {loop.cycles:.0f} cycles an iteration, matrix unit in use {100*loop.matrix_use:.0f}% (predicted)")
  canvas.savefig(path, dpi=120, bbox_inches="tight")
