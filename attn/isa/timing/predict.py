"""Predicts the time of a problem on a card from the cycles of one loop iteration. The result is a prediction, not a measurement. Begin with
`predict`."""
from __future__ import annotations
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol
from attn.chips import Card, Chip
from attn.isa.report import GRADIENTS, PRODUCTS, LoopProducts
from attn.isa.timing.memory import GroupWork, cut_for_dies, makespan_in_order, rows_fetched, starting_order
from attn.isa.timing.trips import Timing
from attn.kernels.parts.grid.tensors import all_arguments, arguments, dkdv_arguments, dq_arguments
from attn.kernels.parts.program.counts import ceildiv
from attn.problem import BYTES, Problem, Shapes

# A workgroup's time is the time of its loop iterations and of its code before and after the loop. Workgroups start in the order of the kernel's
# grid, each on the first compute unit of its die that has room (memory.py). Several workgroups on one compute unit run at the same time: the cycles
# of an iteration are the cycles in which all these workgroups make one iteration. The prediction is the longest of four times: compute, until the
# last workgroup has ended, at a given clock; L2, everything that workgroups read (each workgroup reads the rows that it loops over, and its own
# rows), at the rate of the L2 caches; Infinity Cache, what the L2 caches of the dies fetch, at the bandwidth of the cache that the dies share;
# memory, every tensor once, and rows that no cache still has, at the memory's bandwidth.

class CodeTime(Protocol):
  """What `predict` must know of a kernel's machine code, such as the cycles of an iteration; a `Timing` has it."""
  @property
  def chip(self) -> Chip: ...
  @property
  def groups(self) -> int: ...                 # workgroups on a compute unit
  @property
  def whole_processor(self) -> bool: ...       # RDNA: a workgroup runs on both compute units of a pair
  @property
  def cycles(self) -> float: ...               # of one iteration of every loop
  @property
  def edges(self) -> int: ...                  # cycles of a workgroup before and after its loops

@dataclass(frozen=True)
class Division:
  """How a kernel divides a problem over workgroups: rows that each one owns (`own`), rows that it reads in a loop iteration (`walked`)."""
  own: int
  walked: float
  keys: bool = False                     # a workgroup owns keys, and loops over the queries of every head that shares them
  products: LoopProducts = PRODUCTS
  heads: int = 1                         # query heads whose rows a workgroup owns: row r is query r//heads
  splits: int = 1                        # workgroups that share the iterations of a block of own rows
  together: int = 0                      # heads whose blocks alternate in the order of the grid; 0: all heads
  dies: int = 1                          # dies among which the order of the grid is cut into consecutive parts; 1: dies take workgroups in turn

  def tensors(self, p:Problem) -> Shapes:
    """Returns {name: (shape, dtype)} of the tensors that the kernel reads and writes."""
    if self.products == PRODUCTS: return arguments(p)
    if self.products == (GRADIENTS,): return all_arguments(p)
    return dkdv_arguments(p) if self.keys else dq_arguments(p)

@dataclass(frozen=True)
class Prediction:
  card: Card
  ghz: float
  trips: float              # iterations of a workgroup, in the mean
  compute_seconds: float
  bytes: dict[str, float]   # bytes that each level of memory delivers or takes; a level is missing if its size is not known
  rates: dict[str, float]   # bytes a second of each level whose rate is known
  flops: float              # operations of the products that the kernel has to compute, two for forward
  bytes_apart: dict[str, float] = field(default_factory=dict)   # the same bytes, if workgroups drift apart: see memory.py
  def times_of(self, moved:Mapping[str, float]) -> dict[str, float]:
    return {"compute": self.compute_seconds, **{level: n/self.rates[level] for level, n in moved.items() if level in self.rates}}
  @property
  def times(self) -> dict[str, float]: return self.times_of(self.bytes)
  @property
  def seconds(self) -> float: return max(self.times.values())
  @property
  def seconds_apart(self) -> float: return max(self.times_of(self.bytes_apart).values())
  @property
  def limit(self) -> str: return max(self.times, key=lambda name: self.times[name])
  @property
  def tflops(self) -> float: return self.flops/self.seconds/1e12

def blocks_of_grid(p:Problem, own:int, keys:bool=False, heads:int=1) -> int:
  """Returns the number of workgroups if each owns `own` rows: rows of keys if `keys`, otherwise rows of queries of `heads` heads together."""
  rows, copies = (p.Sk, p.B*p.Hkv) if keys else (p.Sq*heads, p.B*p.H//heads)
  return ceildiv(rows, own)*copies*p.num_splits

def walked_in_a_trip(timing:Timing, own:int) -> float:
  """Returns how many keys (or queries, if the workgroup owns keys) a workgroup that owns `own` rows reads in one loop iteration."""
  assert timing.loops[0].scores is not None
  # scores of an iteration, divided by own rows
  return timing.loops[0].scores*timing.waves/own

def trips_of_blocks(p:Problem, x:Division) -> list[float]:
  """Returns the number of loop iterations of each workgroup of one head, the workgroup with the first rows first."""
  # a workgroup that owns queries loops over the keys that these queries see; one that owns keys over the queries that see these keys
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

def fed_by_l2(timing:Timing, x:Division, row:int) -> float:
  """Returns how fast L2 delivers what a loop reads, relative to the matrix units' need at their peak rate. A row has `row` bytes."""
  # `row` is the number of bytes that one row of the loop needs: a row of K and one of V, or of Q and one of dO. The speed of L2 is that of the card
  # with the least L2 bandwidth per compute unit.
  given = [card.l2/card.cus for card in timing.chip.cards if card.l2]
  flops = sum(loop.flops for loop in timing.loops)*timing.waves
  return min(given, default=math.inf)*flops/(x.walked*row*len(x.products)*timing.chip.pipes.flops)

def heads_of_grid(p:Problem, x:Division) -> int:
  """Returns how many heads, in all batches, a kernel's grid has. Heads whose queries one workgroup owns together count as one."""
  return p.B*(p.Hkv if x.keys else p.H//x.heads)

def work_of_grid(p:Problem, x:Division) -> list[GroupWork]:
  """Returns the workgroups of a problem, divided as `x` says, in the order in which they start."""
  heads = heads_of_grid(p, x)
  order = starting_order(trips_of_blocks(p, x), heads, 1 if x.keys else p.H//p.Hkv//x.heads, x.together or heads, x.splits)
  return cut_for_dies(order, x.dies)

def bytes_of_levels(p:Problem, x:Division, work:list[GroupWork], chip:Chip, slots:int, apart:bool=False) -> dict[str, float]:
  """Returns the bytes that pass through each level of memory, such as {"L2": 1e9, "memory": 1e8}, if `slots` workgroups run at a time."""
  # `apart`: workgroups drift apart (memory.py); a level is missing if its size is not known
  caches, of_queries, of_keys = chip.caches, (p.D + p.Dv)*p.itemsize, p.key_bytes
  trip = x.walked*(of_queries if x.keys else of_keys)*len(x.products)
  own = p.B*(p.Hkv*p.Sk*of_keys if x.keys else p.H*p.Sq*x.splits*of_queries)
  moved = float(sum(math.prod(shape)*BYTES.get(dtype, 4) for shape, dtype in x.tensors(p).values()))   # other tensors are of 32-bit integers
  found = {"L2": sum(w.trips for w in work)*trip + own}
  if not caches.l2: return {**found, "memory": moved}
  once = rows_fetched(work, len(work), 0)
  fetched = sum(rows_fetched(work[die::caches.dies], slots//caches.dies, caches.l2/trip, apart) for die in range(caches.dies))
  if caches.shared:
    found["Infinity Cache"] = fetched*trip + own
    fetched = rows_fetched(work, slots, caches.shared/trip, apart)
  return {**found, "memory": moved + (fetched - once)*trip}

def predict(p:Problem, timing:CodeTime, x:Division, card:Card, ghz:float|None=None) -> Prediction:
  """Returns the predicted time of a problem, divided as `x` says, on a card at the clock `ghz`, by default the rated clock."""
  clock, chip = ghz or card.ghz, timing.chip
  if not clock: raise ValueError(f"the clock of {card.name} is not known: give it with --ghz")
  work, slots = work_of_grid(p, x), max(1, card.cus//(2 if timing.whole_processor else 1))*timing.groups
  cycles = makespan_in_order(work, slots, chip.caches.dies, timing.cycles, timing.edges/timing.groups)
  rates = {"L2": card.l2*clock*1e9, "Infinity Cache": chip.caches.shared_gbs*1e9, "memory": card.gbs*1e9}
  flops = p.all_heads*p.visible_scores*sum(2*(a*p.D + b*p.Dv) for a, b in x.products)
  together, apart = (bytes_of_levels(p, x, work, chip, slots, drift) for drift in (False, True))
  return Prediction(card, clock, sum(w.trips for w in work)/len(work), cycles/(clock*1e9), together,
                    {level: rate for level, rate in rates.items() if rate}, flops, apart)

def at_both_clocks(p:Problem, timing:CodeTime, x:Division, card:Card) -> tuple[Prediction, Prediction|None]:
  """Returns the predicted times of a problem on a card at the rated clock, and at the clock sustained under matrix work."""
  # derived from the fastest published GEMM on this card; None if no such GEMM is known
  clock = timing.chip.sustained(card)
  return predict(p, timing, x, card), predict(p, timing, x, card, clock) if clock else None
