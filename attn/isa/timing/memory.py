"""Predicts how many bytes each cache, and the memory, deliver to a kernel."""
from __future__ import annotations
import heapq, math
from collections.abc import Sequence
from dataclasses import dataclass

@dataclass(frozen=True)
# The prediction follows from which workgroups run at the same time, and from which rows of K and V these workgroups share. The hardware starts
# workgroups in the order of their numbers, and gives them to the chip's dies in turn. The workgroups that run on a die at the same time are a round.
# Workgroups of a round that loop over the same rows (of a key head, or of the query heads that share it) loop over them together. So their die reads
# each of these rows once: from its own L2, if the previous round read the rows and the L2 has room for all rows of the round, and otherwise from the
# next level. In the same way the rounds of the whole chip read each row once from memory, or from the cache that all dies share.
#
# Workgroups of a round may also drift apart, so that each reads its rows at another time. How far they drift is not modelled. Instead there is a
# second prediction (`apart`): workgroups then share rows only in a cache that has room for all rows of the round, and otherwise each fetches its own
# rows.

class GroupWork:
  """Work of one workgroup: its number of loop iterations, and a number that is the same for all workgroups that loop over the same rows."""
  rows: int         # index of the set of rows that it loops over
  trips: float      # iterations

def starting_order(trips:Sequence[float], heads:int, sharing:int, together:int, splits:int=1) -> list[GroupWork]:
  """Returns the workgroups of a problem in the order in which they start. `trips` lists the loop iterations of each workgroup for one head."""
  # `sharing` consecutive heads read the same rows of K and V. `splits` workgroups share the keys of each block. A group of `together` heads comes
  # after another. In a group, the blocks with the most iterations come first. For each block, its heads follow one another.
  blocks = sorted(trips, reverse=True)
  return [GroupWork((group*together + head)//sharing*splits + split, math.ceil(t/splits)) for group in range(heads//together) for t in blocks
          for head in range(together) for split in range(splits)]

def cut_for_dies(work:Sequence[GroupWork], dies:int) -> list[GroupWork]:
  """Reorders the workgroups `work` so that each die gets consecutive ones, although the hardware deals workgroups to the dies in turn."""
  part = -(-len(work)//dies)
  return [work[i] for first in range(part) for i in range(first, len(work), part)]

def makespan_in_order(work:Sequence[GroupWork], slots:int, dies:int, cycles:float, edges:float) -> float:
  """Returns the cycles until the last workgroup has ended, if the chip runs `slots` workgroups at a time, started in the order of `work`."""
  # Each die has room for slots//dies workgroups, and starts its next one when one ends. A workgroup takes `cycles` cycles for each iteration, and
  # `edges` cycles for what comes before and after its iterations.
  ends = []
  for die in range(dies):
    free = [0.0]*max(1, slots//dies)
    for x in work[die::dies]: heapq.heapreplace(free, free[0] + x.trips*cycles + edges)
    ends.append(max(free))
  return max(ends)

def rows_fetched(work:Sequence[GroupWork], slots:int, room:float, apart:bool=False) -> float:
  """Returns how much a cache of size `room` fetches from the next level. Both are counted in units: the rows of K and V that one iteration reads."""
  # `slots` workgroups run at a time; they are a round. With `apart`, the workgroups of a round share fetched rows only if the cache has room for all
  # rows of the round.
  fetched, before = 0.0, dict[int, float]()
  for first in range(0, len(work), max(1, slots)):
    now, together = dict[int, float](), work[first:first + max(1, slots)]
    for x in together: now[x.rows] = max(now.get(x.rows, 0.0), x.trips)
    fits = sum(now.values()) <= room
    kept = before if fits else {}
    if apart and not fits: fetched += sum(x.trips for x in together)
    else: fetched += sum(max(0.0, trips - kept.get(rows, 0.0)) for rows, trips in now.items())
    before = now
  return fetched
