"""Predicted times of forward and backward kernels with other orders of their workgroups: the table docs/data/order_of_heads_amd.csv."""
from __future__ import annotations
from collections.abc import Iterable
from dataclasses import replace
from attn.chips import get_chip
from attn.isa.source import BACKWARD, FORWARD, MASKS, Shape, Spec
from attn.isa.timing.kernels import Predicted, predicted_kernel
from attn.isa.timing.predict import Division, at_both_clocks, heads_of_grid
from attn.isa.timing.published import csv_text

# The order of the grid decides which heads run together, and on which die of the chip. Each row is one problem in bf16 with D = 128, at the clock
# that the card sustains under matrix work. The first time is that of the order in use.

HEAD_WIDTH, HEADS_TOGETHER = 128, (1, 8)     # head dimension; heads that alternate in an order
CARDS_OF_ORDERS = {"MI300X": "gfx942", "MI355X": "gfx950", "RX 7900 XTX": "gfx1100", "RX 9070 XT": "gfx1201"}
# heads fewer and more than the dies, no multiple of the dies, shared keys; K and V that fit into the caches, and that do not
SHAPES_OF_ORDERS = (Shape(4, 32, 32, 4096), Shape(1, 16, 16, 16384), Shape(16, 16, 16, 16384), Shape(1, 64, 8, 8192), Shape(2, 12, 12, 8192),
                    Shape(1, 20, 4, 16384), Shape(8, 32, 8, 2048), Shape(1, 5, 5, 32768))
ALTERNATE, DIES = "all heads alternate", "a die has consecutive heads"
def alternating(together:int) -> str: return f"{together} heads alternate" if together > 1 else "one head after another"
HEAD_ORDERS = ("in use, ms", ALTERNATE, *map(alternating, HEADS_TOGETHER), DIES)
KERNELS_OF_ORDERS = (FORWARD, *BACKWARD)
ORDER_COLUMNS = ("card", "kernel", "B, H/Hkv, N, mask", "order in use", *HEAD_ORDERS)

def orders_of(x:Division, heads:int, dies:int) -> dict[str, Division|None]:
  """Returns {name of an order of heads: the division `x` with this order}, None for an order that the numbers of heads or dies do not allow."""
  found: dict[str, Division|None] = {HEAD_ORDERS[0]: x, ALTERNATE: replace(x, together=heads)}
  found |= {name: replace(x, together=n) if heads % n == 0 else None for name, n in zip(HEAD_ORDERS[2:], HEADS_TOGETHER)}
  return found | {DIES: replace(x, together=1, dies=dies) if dies > 1 else None}

def order_row(card:str, kernel:str, mask:str, shape:Shape) -> tuple[str, ...]:
  """Compiles the kernel for a problem, and returns the problem's row of docs/data/order_of_heads_amd.csv."""
  chip = get_chip(CARDS_OF_ORDERS[card])
  found = predicted_kernel(Spec(chip.name, HEAD_WIDTH, "bfloat16", mask, kernel), shape, lines=False)
  assert found.problem is not None and found.division is not None
  heads = heads_of_grid(found.problem, found.division)
  seconds = {name: seconds_in_order(found, x, card) for name, x in orders_of(found.division, heads, chip.caches.dies).items() if x is not None}
  used = seconds[HEAD_ORDERS[0]]
  # times of other orders are ratios to the time of the order in use; empty: no such order
  ratios = (f"{seconds[name]/used:.3f}" if name in seconds else "" for name in HEAD_ORDERS[1:])
  in_use = ALTERNATE if found.division.together in (0, heads) else alternating(found.division.together)
  return card, kernel, f"{shape.b}, {shape.h}/{shape.hkv}, {shape.n}, {mask}", in_use, f"{1e3*used:.2f}", *ratios

def seconds_in_order(found:Predicted, x:Division, card:str) -> float:
  assert found.problem is not None
  rated, sustained = at_both_clocks(found.problem, found.timing, x, next(c for c in found.timing.chip.cards if c.name == card))
  return (sustained or rated).seconds

def order_table(cards:Iterable[str]=CARDS_OF_ORDERS) -> str:
  return csv_text(ORDER_COLUMNS, (order_row(card, kernel, mask, shape) for card in cards for kernel in KERNELS_OF_ORDERS for mask in MASKS
                                  for shape in SHAPES_OF_ORDERS))
