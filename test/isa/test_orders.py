"""Tests of docs/data/order_of_heads_amd.csv, predicted times of forward and backward kernels with other orders of heads in the grid."""
from __future__ import annotations
import csv, math
from pathlib import Path
import pytest
from attn.isa.source import MASKS
from attn.isa.timing import orders
from attn.isa.timing.memory import GroupWork, cut_for_dies
from attn.isa.timing.predict import Division

DOCS = Path(__file__).parents[2]/"docs"
HEAD, *ROWS = map(tuple, csv.reader((DOCS/"data"/"order_of_heads_amd.csv").open()))

def test_a_die_gets_consecutive_workgroups() -> None:
  # The hardware gives workgroups to the dies in turn: with two dies, every second one. In the order for two dies, the first die gets workgroups 0 to
  # 3 of 7, and the second die gets the others. For one die the order stays.
  work = [GroupWork(n, 1) for n in range(7)]
  found = [x.rows for x in cut_for_dies(work, 2)]
  assert found[::2] == [0, 1, 2, 3] and found[1::2] == [4, 5, 6] and cut_for_dies(work, 1) == work

def test_orders_of_a_problem() -> None:
  # 12 heads have no order in which 8 alternate, and only a chip of several dies has an order for its dies.
  x = Division(128, 64, together=4)
  found = orders.orders_of(x, 12, 8)
  assert tuple(found) == orders.HEAD_ORDERS and found["8 heads alternate"] is None and found["in use, ms"] == x
  assert [y.together for y in found.values() if y is not None] == [4, 12, 1, 1]
  assert orders.orders_of(x, 16, 1)[orders.DIES] is None

NUMBER = math.prod(map(len, (orders.CARDS_OF_ORDERS, orders.KERNELS_OF_ORDERS, MASKS, orders.SHAPES_OF_ORDERS)))

@pytest.mark.parametrize("card, kernel, mask, shape", [
  ("MI300X", "forward", "causal", 6), ("RX 7900 XTX", "dkdv", "causal", 5),
  *(pytest.param(card, kernel, "full", 0, marks=pytest.mark.thorough)
    for card in orders.CARDS_OF_ORDERS for kernel in orders.KERNELS_OF_ORDERS)])
def test_the_committed_table(card:str, kernel:str, mask:str, shape:int) -> None:
  pytest.importorskip("ziglang")
  assert HEAD == orders.ORDER_COLUMNS and len(ROWS) == NUMBER
  found = orders.order_row(card, kernel, mask, orders.SHAPES_OF_ORDERS[shape])
  assert found in ROWS, "python -m attn.isa orders --write docs/data/order_of_heads_amd.csv"

def test_the_page_repeats_the_table() -> None:
  # docs/timing.md has the shortest and the longest time of each order for each card, and says that no order is 3% faster than the one in use.
  page = (DOCS/"timing.md").read_text()
  for card in orders.CARDS_OF_ORDERS:
    columns = zip(*(row[5:] for row in ROWS if row[0] == card))
    found = [sorted(float(x) for x in column if x) for column in columns]
    assert f"| {card} | {' | '.join(f'{x[0]:.2f} to {x[-1]:.2f}' if x else '-' for x in found)} |" in page
    assert min(x for column in found for x in column) > 0.97
