"""Tests of the table of masks in attn/score/masks.py. Each mask agrees with attn/reference.py about the keys that a query sees and the queries that
see a key. Kernels with a wrong mask must give wrong results."""
from __future__ import annotations
from collections.abc import Callable
from dataclasses import replace
from typing import Any
import numpy as np
import pytest
import attn
from attn.functions.interval import Interval
from attn.kernels.parts.grid import workgroup
from attn.kernels.parts.program.blocks import Blocks, Extent, blocks_seen, over_keys, over_queries
from attn.problem import OF_MASKS, Problem
from attn.reference import Array, visible
from attn.score import masks
from attn.score.mask import Mask, by_places
from attn.score.masks import SCORE_MASKS, first_seen, hides_some, hiding, last_seen, plain_masks
from attn.score.places import Positions, Walk
from attn.score.window import WINDOW_MASK
from attn.tinygrad_compat import Tensor, UOp, ast_of
from api_cases import emulated, floats
from backward_cases import check_backward_kernels
from cases import check_kernels, in_turn, problem

pytestmark = pytest.mark.usefixtures("not_unrolled")

SIZES = ((40, 40), (23, 57), (57, 23), (1, 30))
SEEN: dict[str, dict[str, Any]] = {
  "all": {}, "causal": {"causal": True}, "top-left": {"causal": "top-left"}, "window": {"window": (7, 3)}, "left": {"window": (5, -1)},
  "right": {"window": (-1, 4)}, "one key": {"window": (0, 0)}}
BLOCK, TILE = 8, 4     # rows of a block; columns of a tile

def number(x:UOp|int) -> int: return x if isinstance(x, int) else int(x.simplify().arg)

def walks(p:Problem) -> list[tuple[Walk, Array]]:
  # Returns a problem's score matrix in two forms (rows are queries, or keys), with a table of which columns each row sees.
  # The table is from attn/reference.py.
  seen, sequence = visible(p.Sq, p.Sk, p.window, p.offset), Extent(p.Sq, p.Sk, 0, 0, p.offset)
  return [(over_keys(p, sequence), seen), (over_queries(p, sequence), seen.T)]

def check_columns(walk:Walk, seen:Array) -> None:
  # Checks that the masks together show each row exactly the columns that `seen` shows, and no column beyond the last one.
  j = np.arange(number(walk.count) + 1)
  for row, want in enumerate(np.pad(seen, ((0, 0), (0, 1)))):
    first, last = first_seen(walk, UOp.const(row)), last_seen(walk, UOp.const(row))
    np.testing.assert_array_equal((j >= (0 if first is None else number(first))) & (j <= number(last)), want)

def check_tiles(walk:Walk, seen:Array) -> None:
  # Checks that a block loops over every tile in which one of its rows sees a column, and which tiles it computes without the mask.
  # The mask is left out exactly in tiles where all rows see all columns. `seen` says for each row which columns it sees.
  rows, count = seen.shape
  for begin in range(0, rows, BLOCK):
    x = blocks_seen(walk, UOp.const(begin), UOp.const(begin + BLOCK - 1), TILE)
    found = {name: number(getattr(x, name)) for name in ("begin", "full_begin", "full_end", "end")}
    some = seen[begin:begin + BLOCK]
    for tile in range(-(-count//TILE)):
      of_tile = some[:, tile*TILE:(tile + 1)*TILE]
      assert not of_tile.any() or found["begin"] <= tile < found["end"], (tile, found)
      if found["full_begin"] <= tile < found["full_end"]: assert of_tile.all() and of_tile.shape[1] == TILE, (tile, found)
      elif len(some) == BLOCK and of_tile.shape[1] == TILE: assert not of_tile.all(), (tile, found)
    assert found["begin"] == found["full_begin"] or x.masked_first

@pytest.mark.parametrize("name", SEEN)
@pytest.mark.parametrize("Sq, Sk", SIZES)
def test_both_sides_see_what_the_reference_does(Sq:int, Sk:int, name:str) -> None:
  p = problem(H=1, Sq=Sq, Sk=Sk, **SEEN[name])
  for walk, seen in walks(p):
    check_columns(walk, seen)
    check_tiles(walk, seen)
    for n in (1, 4, 5): assert hides_some(walk, n) or (seen.all() and seen.shape[1] % n == 0)
  query, key = np.arange(p.Sq)[:, None] + p.offset, np.arange(p.Sk)[None]
  with emulated("gfx942"):
    at = Positions(None, *(Tensor(x, device="EMU") for x in (query, key)), counted=(Tensor(0),)*3, head=Tensor(0))
    sees = plain_masks(p, {})(at)
    np.testing.assert_array_equal(np.ones((Sq, Sk), np.bool_) if sees is None else np.broadcast_to(sees.numpy(), (Sq, Sk)), walks(p)[0][1])

def test_which_masks_a_problem_has() -> None:
  assert tuple(mask.name for mask in SCORE_MASKS) == (*OF_MASKS, "count")
  names = {name: tuple(tuple(mask.name for mask in side) for side in hiding(problem(**x))) for name, x in SEEN.items()}
  window = ("window",)
  assert names == {"all": ((), ()), "causal": ((), window), "top-left": ((), window), "window": (window, window), "left": (window, ()),
                   "right": ((), window), "one key": (window, window)}
  assert not hides_some(walks(problem(Sq=40, Sk=40))[0][0], 8) and hides_some(walks(problem(Sq=40, Sk=40))[0][0], 16)

# ***** planted faults *****

def moved(before:int, after:int) -> Callable[[pytest.MonkeyPatch], None]:
  # Returns a function that plants a fault: the first and the last column of a window are moved by `before` and `after` columns.
  def seen(walk:Walk, row:Any) -> Interval:
    x = WINDOW_MASK.seen(walk, row)
    return Interval(None if x.first is None else x.first + before, None if x.last is None else x.last + after)
  def plant(m:pytest.MonkeyPatch) -> None: m.setattr(masks, "SCORE_MASKS", with_row(replace(WINDOW_MASK, seen=seen, plain=by_places(seen))))
  plant.__name__ = f"first_{before:+}_last_{after:+}"
  return plant

def with_row(row:Mask) -> tuple[Mask, ...]: return tuple(row if mask.name == row.name else mask for mask in SCORE_MASKS)

def uncounted(m:pytest.MonkeyPatch) -> None:
  # Plants a fault: the mask of lengths shows one column beyond the last.
  row = next(mask for mask in SCORE_MASKS if mask.name == "count")
  m.setattr(masks, "SCORE_MASKS", with_row(replace(row, seen=lambda walk, i: Interval(last=walk.count))))

def shifted(**by:int) -> Callable[[pytest.MonkeyPatch], None]:
  # Returns a function that plants a fault: it adds numbers to fields of `Blocks`, which says over which tiles a workgroup loops.
  original = blocks_seen
  # A workgroup loops over the tiles from `begin` to `end`, of which `full_begin` to `full_end` need no mask.
  def plant(m:pytest.MonkeyPatch) -> None:
    def seen(*args:Any) -> Blocks:
      x = original(*args)
      return replace(x, **{name: getattr(x, name) + n for name, n in by.items()})
    m.setattr(workgroup, "blocks_seen", seen)
    m.setitem(globals(), "blocks_seen", seen)
  plant.__name__ = "_".join(f"{name}_{n:+}" for name, n in by.items())
  return plant

ROWS = [moved(0, 1), moved(0, -1), moved(1, 0), moved(-1, 0)]
FAULTS = [*ROWS, shifted(begin=1), shifted(end=-1), shifted(full_begin=-1), shifted(full_end=1)]

@pytest.mark.parametrize("plant", (*FAULTS, uncounted), ids=lambda x: x.__name__)
def test_planted_fault_in_tiles(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None]) -> None:
  # If a row of the table of masks is wrong, or a workgroup leaves out tiles, the checks of columns and tiles fail: for kernels that loop over keys
  # and for kernels that loop over queries.
  for side in range(2):
    with monkeypatch.context() as m:
      plant(m)
      walk, seen = walks(problem(H=1, Sq=39, Sk=57, window=(7, 3)))[side]
      with pytest.raises(AssertionError): (check_columns if plant in (*ROWS, uncounted) else check_tiles)(walk, seen)

SMALL: dict[str, Any] = dict(H=1, Sq=100, Sk=150, D=16, window=(70, 60))

KINDS = ("forward", "dq", "dkdv")

def compute(kind:str) -> None:
  if kind == "forward": check_kernels("gfx942", tile=lambda x: replace(x, waves=1, block_n=32), **SMALL)
  else: check_backward_kernels("gfx942", only=kind, **SMALL)

@pytest.mark.sample(4)
@in_turn("plant, kind", FAULTS, KINDS)
def test_planted_fault_in_kernels(monkeypatch:pytest.MonkeyPatch, plant:Callable[[pytest.MonkeyPatch], None], kind:str) -> None:
  compute(kind)
  plant(monkeypatch)
  ast_of.cache_clear()
  with pytest.raises((AssertionError, RuntimeError)): compute(kind)

def test_a_key_too_many_shows(monkeypatch:pytest.MonkeyPatch) -> None:
  # The check of the forward kernel fails if a mask shows one key beyond the last. The kernel reads this key as zeros. Its weight changes the forward
  # result, but it would add nothing to a gradient.
  uncounted(monkeypatch)
  with pytest.raises(AssertionError): compute("forward")

# ***** a mask that depends on more than the distance of query and key *****

def test_devices_that_share_rows_refuse_it(monkeypatch:pytest.MonkeyPatch) -> None:
  monkeypatch.setattr(masks, "SCORE_MASKS", with_row(replace(WINDOW_MASK, moves=False)))
  with emulated("gfx942"):
    q, devices = Tensor(floats(1, 2, 8, 16), device="EMU").realize(), ("EMU:0", "EMU:1")
    k = q.shard(devices, 2)
    with pytest.raises(NotImplementedError, match="window with k and v sharded along their rows"):
      attn.attention(q.shard(devices), k, k, window=(3, -1))
