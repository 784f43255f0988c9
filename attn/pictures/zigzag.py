"""Draws which keys the queries of each device see, if a causal sequence is sharded over devices."""
from __future__ import annotations
import itertools
import numpy as np
from attn.parallel.shards import SequenceShards, rows_held
from attn.pictures.svg import EMPTY, FAINT, INK, PAPER, TINTS, Drawing
from attn.problem import ORDERS, Problem
from attn.reference import Array, visible

# the positions of each device's queries come from the problem that attn itself makes for the device (`SequenceShards.dealt`)
DEVICES, PIECE = 4, 6       # PIECE: rows of a zigzag piece, few, but enough to show a diagonal
LENGTH = DEVICES*ORDERS["zigzag"]*PIECE
CELL = 7.5                  # size of a row in pixels

def causal_problem() -> Problem: return Problem(1, 1, 1, LENGTH, LENGTH, 64, 64, window=(-1, 0), softmax_scale=1.0)

def shards_in(order:str) -> SequenceShards:
  held = rows_held(LENGTH, DEVICES, order)
  return SequenceShards(DEVICES, order, held, held)

def computed(order:str) -> tuple[Array, list[int]]:
  """Returns (array with the device that computes each pair of a query and a key, -1 for none; number of pairs that each device computes)."""
  owner, pairs = np.full((LENGTH, LENGTH), -1), [0]*DEVICES
  for device in range(DEVICES):
    p = shards_in(order).dealt(causal_problem(), device, (0, 1))
    places = np.array([p.place(row) for row in range(p.queries)])
    found = np.argwhere(visible(LENGTH, LENGTH, p.window, p.offset)[places])
    owner[places[found[:, 0]], found[:, 1]], pairs[device] = device, len(found)
  return owner, pairs

def draw_order(d:Drawing, x:float, y:float, order:str) -> None:
  owner, pairs = computed(order)
  d.text(x, y - 14, order, 13, bold=True)
  side = LENGTH*CELL
  d.cells((x + start*CELL, y + i*CELL, (end - start)*CELL, CELL, TINTS[row[start]] if row[start] >= 0 else EMPTY)
          for i, row in enumerate(owner) for start, end in runs_of(row))
  pieces = DEVICES*ORDERS[order]
  for n in range(1, pieces):
    at = n*side/pieces
    d.line([(x, y + at), (x + side, y + at)], PAPER, 1.6)
    d.line([(x + at, y), (x + at, y + side)], PAPER, 1.6)
  for device in range(DEVICES):
    for piece in shards_in(order).queries_of(causal_problem(), device):
      d.text(x - 6, y + (piece.start + piece.rows/2)*CELL, device, 11, "end")
      d.text(x + (piece.start + piece.rows/2)*CELL, y + side + 11, device, 11, "middle")
  d.line([(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)], INK, 0.8)
  for device in range(DEVICES):
    words = f"device {device}: {100*pairs[device]/max(pairs):.0f} % of the busiest"
    d.box(x, y + side + 28 + 19*device, 12, 12, TINTS[device])
    d.text(x + 18, y + side + 34 + 19*device, words)

def runs_of(row:Array) -> list[tuple[int, int]]:
  """Returns (first index, end index) of each run of equal neighbouring elements in a row."""
  ends = [0, *(int(n) + 1 for n in np.flatnonzero(np.diff(row))), len(row)]
  return list(itertools.pairwise(ends))

def of_zigzag() -> dict[str, Drawing]:
  d = Drawing(840, 590, "A causal sequence on four devices")
  d.text(20, 24, "A causal sequence on four devices", 16, bold=True)
  words = ("Rows are queries, columns keys, and the numbers beside them the devices that hold them. The colour is the",
           "device that computes a pair: that of the query. Queries at the back see more keys than those at the front.")
  for n, line in enumerate(words): d.text(20, 45 + 16*n, line, 12, fill=FAINT)
  for n, order in enumerate(ORDERS): draw_order(d, 40 + n*410, 108, order)
  return {"zigzag": d}
