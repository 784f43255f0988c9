"""What a problem takes on a card, from the cycles of a trip. A prediction, not a measurement.

A workgroup's time is its trips and what it does before and after them. The compute units take workgroups as they become free; of them the busiest
decides, at a clock that is given, and the memory's bandwidth where that takes longer. The parts of a trip's time that overlap between workgroups of
one compute unit are in the cycles of a trip, which are of all of them at once.
"""
from __future__ import annotations
from dataclasses import dataclass
from attn.chips import Card
from attn.isa.report import LoopProducts
from attn.isa.roofline import makespan
from attn.isa.timing.trips import Timing
from attn.kernels.parts.counts import ceildiv
from attn.problem import Problem

@dataclass(frozen=True)
class Division:
  """How a kernel divides a problem: rows of a workgroup's own, and those that it walks over in a trip."""
  own: int
  walked: float
  keys: bool = False                     # its own rows are keys, and it walks over the queries of every head that shares them
  products: LoopProducts = ((1, 1),)

@dataclass(frozen=True)
class Prediction:
  card: Card
  ghz: float
  trips: float              # of a workgroup, in the mean
  compute_seconds: float
  memory_seconds: float
  tflops: float             # of the products that the kernel has to compute, two of forward, over the longer of the two times
  @property
  def seconds(self) -> float: return max(self.compute_seconds, self.memory_seconds)

def trips_of_blocks(p:Problem, x:Division) -> list[float]:
  """The trips of each block of own rows of one head: of queries by the keys that they see, of keys by the queries that see them."""
  left, right = p.window
  mine, others = (p.Sk, p.Sq) if x.keys else (p.Sq, p.Sk)
  back, ahead, shift = (right, left, -p.offset) if x.keys else (left, right, p.offset)
  found = []
  for first in range(0, mine, x.own):
    last = min(first + x.own, mine) - 1
    begin = max(0, first + shift - back) if back >= 0 else 0
    end = min(others, last + shift + ahead + 1) if ahead >= 0 else others
    heads = p.H//p.Hkv if x.keys else 1
    found.append(heads*max(0, ceildiv(end, round(x.walked)) - begin//round(x.walked)))
  return [float(t) for t in found]

def predict(p:Problem, timing:Timing, x:Division, card:Card, ghz:float|None=None) -> Prediction:
  """What a problem takes on a card at a clock, its rated one where none is given."""
  clock = ghz or card.ghz
  if not clock: raise ValueError(f"the clock of {card.name} is not known: give --ghz")
  trips, copies = trips_of_blocks(p, x), p.B*(p.Hkv if x.keys else p.H)
  units = max(1, card.cus//(2 if timing.whole_processor else 1))
  cycles = [round(t*timing.cycles + timing.edges/timing.groups) for t in trips]
  busiest = makespan(cycles, copies, units*timing.groups)
  pairs = p.flops/(2*(p.D + p.Dv))
  flops = pairs*sum(2*(a*p.D + b*p.Dv) for a, b in x.products)
  moved = p.B*(p.H*p.Sq*(p.D*p.itemsize + p.Dv*p.out_itemsize) + p.Hkv*p.Sk*(p.D + p.Dv)*p.itemsize)
  compute, memory = busiest/(clock*1e9), moved/(card.gbs*1e9) if card.gbs else 0.0
  return Prediction(card, clock, sum(trips)/len(trips), compute, memory, flops/max(compute, memory)/1e12)
