"""Draws the key tiles over which a block of queries loops, as `blocks_seen` computes them, and the keys that these queries see."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any
from attn.kernels.parts.program.blocks import Blocks, Extent, blocks_seen, over_keys
from attn.pictures.svg import EMPTY, FAINT, INK, TINTS, Drawing
from attn.problem import Problem, problem_of
from attn.reference import visible
from attn.tinygrad_compat import UOp

QUERY_BLOCK, KEY_TILE = 64, 32
UNMASKED, MASKED = TINTS[0], TINTS[1]
PIXELS = 0.78       # size of a key or a query in the drawing

def problem_of_size(Sq:int, Sk:int, **options:Any) -> Problem:
  q, k = (1, 1, Sq, 64), (1, 1, Sk, 64)
  return problem_of(q, q, k, k, dtypes=["float16"]*4, **options)

CASES: dict[str, Problem] = {
  "full, Sk = 300: the last tile is not whole": problem_of_size(256, 300),
  "causal, Sq = Sk = 320": problem_of_size(320, 320, causal=True),
  "causal, Sq = 192, Sk = 320: bottom-right": problem_of_size(192, 320, causal=True),
  "window (100, 40), Sq = Sk = 320": problem_of_size(320, 320, window=(100, 40)),
}

@dataclass(frozen=True)
class KeyRange:
  """Key tiles over which a block of queries loops, from `begin` up to `end`. In the tiles from `full_begin` up to `full_end` the mask hides no
  key."""
  # kernels compute these four numbers as UOps (`Blocks`); here they are ints
  begin: int
  full_begin: int
  full_end: int
  end: int
  @property
  def masked(self) -> int: return self.end - self.begin - (self.full_end - self.full_begin)

def range_of(p:Problem, block:int) -> KeyRange:
  first = UOp.const(block*QUERY_BLOCK)
  x: Blocks = blocks_seen(over_keys(p, Extent(p.Sq, p.Sk, 0, 0, p.offset)), first, first + QUERY_BLOCK - 1, KEY_TILE)
  return KeyRange(*[n.simplify().vmin for n in (x.begin, x.full_begin, x.full_end, x.end)])

def draw_ranges(d:Drawing, x:float, y:float, title:str, p:Problem) -> None:
  d.text(x, y, title, 12, bold=True)
  y += 18
  for block in range(-(-p.Sq//QUERY_BLOCK)):
    r, top, height = range_of(p, block), y + block*QUERY_BLOCK*PIXELS, QUERY_BLOCK*PIXELS
    def fill(tile:int, r:KeyRange=r) -> str:
      if not r.begin <= tile < r.end: return EMPTY
      return UNMASKED if r.full_begin <= tile < r.full_end else MASKED
    tiles, width = -(-p.Sk//KEY_TILE), KEY_TILE*PIXELS
    d.cells((x + tile*width, top, width, height, fill(tile)) for tile in range(tiles))
    d.text(x + tiles*width + 8, top + height/2, f"{r.full_end - r.full_begin} + {r.masked}", 11)
  seen = visible(p.Sq, p.Sk, p.window, p.offset)
  rows = [(i, int(row.argmax()), int(row.size - row[::-1].argmax())) for i, row in enumerate(seen) if row.any()]
  left = [(x + first*PIXELS, y + (i + j)*PIXELS) for i, first, _ in rows for j in range(2)]
  right = [(x + end*PIXELS, y + (i + j)*PIXELS) for i, _, end in rows for j in range(2)]
  d.line([*left, *right[::-1], left[0]], INK, 1.3)

def of_key_ranges() -> dict[str, Drawing]:
  d = Drawing(860, 680, "The key tiles of a block of queries")
  d.text(20, 24, "The key tiles of a block of queries", 16, bold=True)
  words = f"A row is a block of {QUERY_BLOCK} queries, a column a tile of {KEY_TILE} keys. Inside the line is what the queries see."
  d.text(20, 45, words, 12, fill=FAINT)
  for n, (fill, words) in enumerate(((UNMASKED, "iteration without a mask"), (MASKED, "iteration with the mask"), (EMPTY, "no iteration"))):
    d.box(20 + n*190, 62, 12, 12, fill)
    d.text(38 + n*190, 68, words)
  d.text(38 + 3*190 - 40, 68, "At the right: iterations without + with", fill=FAINT)
  for n, (title, p) in enumerate(CASES.items()): draw_ranges(d, 30 + n%2*430, 106 + n//2*290, title, p)
  return {"key_ranges": d}
