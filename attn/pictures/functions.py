"""Draws what the functions of attn.mods do, by calling them: which keys each query sees, or how a score changes."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any
import numpy as np
from attn import mods
from attn.functions.trace import MASK_FUNCTION, SCORE_FUNCTION, FunctionForm, trace
from attn.pictures.svg import EMPTY, FAINT, GRID, INK, PAPER, STRONG, TINTS, Drawing
from attn.pictures.zigzag import runs_of
from attn.reference import Array
from attn.score.in_tensors import parts_in_tensors
from attn.score.places import Positions
from attn.tinygrad_compat import Context, Tensor

PLACES, PAIR = 48, 3.0          # queries and keys of a panel (48 = an image of 6 x 8 pixels); size of a query or key in the drawing
SIDE = PLACES*PAIR
FURTHEST = 6.0                  # the scores of a curve run from -FURTHEST to FURTHEST
SHADES = ("#ffffff", "#d6e8f3", "#aed1e7", "#85badb", "#5da3cf", "#348cc3")     # colours, from the lowest value to the highest

def value_of(form:FunctionForm, function:Callable[..., Any], tensors:tuple[Array, ...], scores:Array, i:Array, j:Array, h:Array) -> Array:
  """Computes a caller's function, a score_mod or mask_mod as `form` says, on arrays of scores, query indices i, key indices j and heads h."""
  found = trace(form, function, tuple((t.shape, str(t.dtype)) for t in tensors))
  assert found is not None
  # tinygrad computes the values on its device PYTHON; `tensors` are the tensors that the function reads
  with Context(DEV="PYTHON"):
    b, h_, i_, j_ = (Tensor(np.asarray(x, np.int32)) for x in (np.zeros((1, 1)), h, i, j))
    given = {f"mod_tensor{n}": Tensor(t) for n, t in enumerate(tensors)}
    made = parts_in_tensors(found.value, Tensor(scores.astype(np.float32)), Positions(None, i_, j_, (b, i_, j_), h_), given)
    return made[found.value].numpy()

@dataclass(frozen=True)
class Pairs:
  """Drawing with a cell for each pair of a query and a key: which pairs a mask_mod lets through, or a score_mod's values for score 0."""
  title: str
  function: Callable[..., Any]
  tensors: tuple[Array, ...] = ()
  # whether the function is a score_mod
  of_scores: bool = False
  def values(self) -> Array:
    places, zero = np.arange(PLACES), np.zeros((1, 1))
    found = value_of(SCORE_FUNCTION if self.of_scores else MASK_FUNCTION, self.function, self.tensors, zero, places[:, None], places[None], zero)
    return np.broadcast_to(found, (PLACES, PLACES))
  def draw(self, d:Drawing, x:float, y:float) -> None:
    found = self.values()
    low, high = float(found.min()), float(found.max())
    levels = np.rint((found - low)/(high - low)*(len(SHADES) - 1)).astype(int) if self.of_scores else found.astype(int)
    colours = SHADES if self.of_scores else (EMPTY, TINTS[0])
    d.cells((x + start*PAIR, y + i*PAIR, (end - start)*PAIR, PAIR, colours[row[start]])
            for i, row in enumerate(levels) for start, end in runs_of(row))
    d.box(x, y, SIDE, SIDE, "none", INK, 0.8)
    words = f"{low:.1f} (white) to {high:.1f}" if self.of_scores else f"{100*found.mean():.0f} % of the pairs"
    d.text(x, y + SIDE + 11, words, 10, fill=FAINT)

@dataclass(frozen=True)
class Curve:
  """Drawing of a score_mod as a function of the score, with a line for each head."""
  title: str
  function: Callable[..., Any]
  # the first has a number for each head, which the score_mod reads; without tensors there is one line
  tensors: tuple[Array, ...] = ()
  def values(self) -> tuple[Array, Array]:
    """Returns two arrays: the scores along the x axis, and the score_mod's values at these scores, of shape (heads, scores)."""
    x, heads = np.linspace(-FURTHEST, FURTHEST, 49), len(self.tensors[0]) if self.tensors else 1
    found = value_of(SCORE_FUNCTION, self.function, self.tensors, x[None], np.zeros((1, 1)), np.zeros((1, 1)), np.arange(heads)[:, None])
    return x, np.broadcast_to(found, (heads, len(x)))
  def draw(self, d:Drawing, x:float, y:float) -> None:
    def at(score:float, value:float) -> tuple[float, float]:
      return x + (score/FURTHEST + 1)*SIDE/2, y + (1 - value/FURTHEST)*SIDE/2
    d.box(x, y, SIDE, SIDE, PAPER, INK, 0.8)
    for line in (((-FURTHEST, 0), (FURTHEST, 0)), ((0, -FURTHEST), (0, FURTHEST)), ((-FURTHEST, -FURTHEST), (FURTHEST, FURTHEST))):
      d.line([at(*point) for point in line], GRID, 0.8)
    scores, found = self.values()
    for values in found: d.line([at(*point) for point in zip(scores, values)], STRONG[1], 1.6)
    words = ", ".join(f"{t:g}" for t in self.tensors[0]) if self.tensors else "one line for all heads"
    d.text(x, y + SIDE + 11, f"heads with {words}" if self.tensors else words, 10, fill=FAINT)

def of_heads(*numbers:float) -> Array: return np.array(numbers, np.float32)

DISTANCES = np.arange(1 - PLACES, PLACES)
IN_DOCUMENT = np.repeat(np.arange(4), (10, 5, 19, 14))[None].astype(np.int32)
BIASES = np.where(DISTANCES < 0, -2, -0.5)[None]*np.log1p(abs(DISTANCES))

PANELS:tuple[Pairs|Curve, ...] = (
  Pairs("causal", mods.causal), Pairs("sliding_window(12)", mods.sliding_window(12)), Pairs("dilated_window(24, 4)", mods.dilated_window(24, 4)),
  Pairs("sinks_and_window(3, 10)", mods.sinks_and_window(3, 10)), Pairs("prefix_lm(16)", mods.prefix_lm(16)),
  Pairs("documents", mods.documents, (IN_DOCUMENT,)), Pairs("sliding_tile(8, 1)", mods.sliding_tile(8, 1)),
  Pairs("sliding_tile(8, 1, tile=2)", mods.sliding_tile(8, 1, tile=2)),
  Pairs("alibi_bias, slope 0.25", mods.alibi_bias, (of_heads(0.25),), True),
  Pairs("relative_bias(48)", mods.relative_bias(PLACES), (BIASES.astype(np.float32),), True),
  Curve("tanh_softcap(3)", mods.tanh_softcap(3.0)), Curve("tanh_gate", mods.tanh_gate, (of_heads(-0.5, 0.25, 1.5),)),
  Curve("head_scale", mods.head_scale, (of_heads(0.25, 0.5, 1),)))
PANELS_ACROSS = 5

@cache
def of_functions() -> dict[str, Drawing]:
  d = Drawing(32 + PANELS_ACROSS*(SIDE + 26), 66 + -(-len(PANELS)//PANELS_ACROSS)*(SIDE + 48), "The functions of attn.mods")
  d.text(20, 24, "The functions of attn.mods", 16, bold=True)
  words = f"{PLACES} queries from top to bottom, {PLACES} keys from left to right. Blue: the query sees the key, or the value at score 0."
  d.text(20, 45, words, 12, fill=FAINT)
  for n, panel in enumerate(PANELS):
    x, y = 20 + n%PANELS_ACROSS*(SIDE + 26), 82 + n//PANELS_ACROSS*(SIDE + 48)
    d.text(x, y - 10, panel.title, 10, bold=True)
    panel.draw(d, x, y)
  x, y = 20 + len(PANELS)%PANELS_ACROSS*(SIDE + 26), 82 + len(PANELS)//PANELS_ACROSS*(SIDE + 48)
  for n, words in enumerate(("Curves: the score before the function", f"from left to right, {-FURTHEST:g} to {FURTHEST:g}, the score after",
                             "it from bottom to top. Grey: the axes,", "and the score unchanged.")):
    d.text(x, y + 8 + 16*n, words, fill=FAINT)
  return {"functions": d}
