"""Predicts the time of a problem on a card from the cycles of one loop iteration. The result is a prediction, not a measurement.

A workgroup's time is the time of its loop iterations and of its code before and after the loop. A compute unit gets a new workgroup when it has
finished one. The compute time is the time of the busiest compute unit, at a given clock. Several workgroups on one compute unit run at the same time:
the cycles of an iteration are the cycles in which all these workgroups make one iteration. The prediction is the longest of three times: the compute
time, and two lower bounds from the data that is moved:

  memory  one transfer of every tensor, at the memory's bandwidth
  L2      everything that workgroups read (each workgroup reads the rows that it loops over, and its own rows) at the rate of the
          L2 caches. A workgroup with half as many own rows reads twice the bytes per result

The number of bytes that really come from memory lies between these two numbers of bytes. It is not modelled."""
from __future__ import annotations
import math
from dataclasses import dataclass
from attn.chips import Card
from attn.isa.report import GRADIENTS, PRODUCTS, LoopProducts
from attn.isa.roofline import makespan
from attn.isa.timing.trips import Timing
from attn.kernels.parts.grid.tensors import all_arguments, arguments, dkdv_arguments, dq_arguments
from attn.kernels.parts.program.counts import ceildiv
from attn.problem import BYTES, Problem, Shapes

@dataclass(frozen=True)
class Division:
  """Division of a problem among workgroups: the rows that each workgroup owns, and the rows that it reads in each loop iteration."""
  own: int
  walked: float
  keys: bool = False                     # a workgroup owns keys, and loops over the queries of every head that shares them
  products: LoopProducts = PRODUCTS
  heads: int = 1                         # query heads whose rows a workgroup owns: row r is query r//heads
  splits: int = 1                        # workgroups that share the iterations of a block of own rows

  def tensors(self, p:Problem) -> Shapes:
    """Tensors that the kernel reads and writes."""
    if self.products == PRODUCTS: return arguments(p)
    if self.products == (GRADIENTS,): return all_arguments(p)
    return dkdv_arguments(p) if self.keys else dq_arguments(p)

@dataclass(frozen=True)
class Prediction:
  card: Card
  ghz: float
  trips: float              # iterations of a workgroup, in the mean
  compute_seconds: float
  memory_seconds: float     # 0 if the card's memory bandwidth is not known
  l2_seconds: float         # 0 if the card's L2 rate is not known
  flops: float              # operations of the products that the kernel has to compute, two for forward
  @property
  def times(self) -> dict[str, float]: return {"compute": self.compute_seconds, "memory": self.memory_seconds, "L2": self.l2_seconds}
  @property
  def seconds(self) -> float: return max(self.times.values())
  @property
  def limit(self) -> str: return max(self.times, key=lambda name: self.times[name])
  @property
  def tflops(self) -> float: return self.flops/self.seconds/1e12

def blocks_of_grid(p:Problem, own:int, keys:bool=False, heads:int=1) -> int:
  """Returns the number of workgroups if each workgroup owns `own` rows. The rows are queries of `heads` heads, or keys if `keys` is true."""
  rows, copies = (p.Sk, p.B*p.Hkv) if keys else (p.Sq*heads, p.B*p.H//heads)
  return ceildiv(rows, own)*copies*p.num_splits

def walked_in_a_trip(timing:Timing, own:int) -> float:
  """Returns the number of rows that a workgroup with `own` rows of its own reads in one loop iteration. It is the number of scores that the workgroup
  computes in an iteration, divided by `own`."""
  assert timing.loops[0].scores is not None
  return timing.loops[0].scores*timing.waves/own

def trips_of_blocks(p:Problem, x:Division) -> list[float]:
  """Returns the number of loop iterations of each workgroup of one head. A workgroup that owns queries loops over the keys that these queries see. A
  workgroup that owns keys loops over the queries that see these keys."""
  left, right = p.window
  mine, others = (p.Sk, p.Sq) if x.keys else (p.Sq, p.Sk)
  back, ahead, shift = (right, left, -p.offset) if x.keys else (left, right, p.offset)
  walked, found = round(x.walked), list[float]()
  for first in range(0, mine*x.heads, x.own):
    last = min(first + x.own, mine*x.heads) - 1
    begin = max(0, first//x.heads + shift - back) if back >= 0 else 0
    end = min(others, last//x.heads + shift + ahead + 1) if ahead >= 0 else others
    repeated = p.H//p.Hkv if x.keys else 1
    found.append(float(repeated*max(0, ceildiv(end, walked) - begin//walked)))
  return found

def bytes_read(p:Problem, x:Division, trips:list[float], copies:int) -> float:
  """Returns the number of bytes that all workgroups together read. A workgroup reads rows of two tensors in each loop iteration, and its own rows of
  two tensors once."""
  row = (p.D + p.Dv)*p.itemsize
  own = p.Hkv*p.Sk if x.keys else p.H*p.Sq*x.splits
  return sum(trips)*copies*x.walked*row*len(x.products) + p.B*own*row

def fed_by_l2(timing:Timing, x:Division, row:int) -> float:
  """Returns the share of the chip's peak rate for which the L2 caches can deliver the data, on the card with the lowest L2 rate per compute unit.
  `row` is the size in bytes of one row of both tensors together. If the share is 1 or more, L2 does not slow the kernel."""
  given = [card.l2/card.cus for card in timing.chip.cards if card.l2]
  flops = sum(loop.flops for loop in timing.loops)*timing.waves
  return min(given, default=math.inf)*flops/(x.walked*row*len(x.products)*timing.chip.pipes.flops)

def predict(p:Problem, timing:Timing, x:Division, card:Card, ghz:float|None=None) -> Prediction:
  """Predicts the time of a problem on a card, at the clock `ghz` or by default at the card's rated clock. Raises ValueError if the clock is not
  known."""
  clock = ghz or card.ghz
  if not clock: raise ValueError(f"the clock of {card.name} is not known: give it with --ghz")
  trips, copies = trips_of_blocks(p, x), p.B*(p.Hkv if x.keys else p.H//x.heads)
  units = max(1, card.cus//(2 if timing.whole_processor else 1))
  cycles = [round(ceildiv(round(t), x.splits)*timing.cycles + timing.edges/timing.groups) for t in trips]
  busiest = makespan(cycles, copies*x.splits, units*timing.groups)
  pairs = p.flops/(2*(p.D + p.Dv))
  flops = pairs*sum(2*(a*p.D + b*p.Dv) for a, b in x.products)
  moved = sum(math.prod(shape)*BYTES.get(dtype, 4) for shape, dtype in x.tensors(p).values())    # tensors that are no floats are 32-bit integers
  memory = moved/(card.gbs*1e9) if card.gbs else 0.0
  l2 = bytes_read(p, x, trips, copies)/(card.l2*clock*1e9) if card.l2 else 0.0
  return Prediction(card, clock, sum(trips)/len(trips)/x.splits, busiest/(clock*1e9), memory, l2, flops)
