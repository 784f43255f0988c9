"""Steps the waves of a compute unit through their loop iterations together, and tells when each wave issues each instruction. Begin with
`step_waves`."""
from __future__ import annotations
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from attn.chips import Chip
from attn.isa.timing.steps import Pipe, TripStep

# An event is the issue of an instruction. A wave can issue its next instruction when enough cycles have passed since its last issue, the results
# that the instruction needs are ready, and the accesses that it waits for are complete. Then the instruction's unit has to be free, and it has to be
# the turn of the wave's SIMD to issue: every fourth cycle on CDNA, every cycle on RDNA. If several waves could issue in the same cycle, the wave
# with the highest priority issues. Among waves of equal priority it is the wave whose last issue is longest ago. So if one wave issues MFMAs and
# another wave vector instructions, neither wave delays the other. Measurements confirm this (attn/chips/machine.py, "coissue"). An instruction holds
# its unit from its issue on. An access holds LDS or memory for as long as its data takes, in the order of issue.

SHARED = (Pipe.LDS, Pipe.MEMORY)     # units that all SIMDs of a compute unit share

# reasons why an instruction was not issued as soon as the instruction before it allowed
ACCESS, RESULT, BUSY, BARRIER = "access", "result", "unit", "barrier"

@dataclass(frozen=True)
class Wave:
  """A wave of the simulation: its workgroup, its SIMD, and the instructions of one loop iteration."""
  group: int                 # workgroup
  simd: int
  steps: Sequence[TripStep]      # the steps of an iteration
  behind: bool = False       # the wave begins one barrier later than the others of its workgroup

@dataclass(frozen=True)
class Issue:
  """The issue of one instruction by a wave of the simulation."""
  wave: int
  trip: int
  step: int
  since: int        # earliest cycle that the instruction before allowed
  at: int           # cycle of the issue
  end: int          # cycle until which the instruction holds its unit, or its access lasts
  why: str          # reason for the wait between `since` and `at`: ACCESS, RESULT, BUSY, BARRIER, or ""

@dataclass
class Run:
  """Result of a simulation: the cycle in which each instruction was issued, and the spans in which the matrix units were in use."""
  waves: Sequence[Wave]
  trips: int                                             # timed iterations of a wave, in the mean
  begin: int = 0                                         # cycle where the timed iterations began
  end: int = 0                                           # cycle where the timed iterations ended
  issues: list[Issue] = field(default_factory=list)      # issues from `begin` on
  starts: list[list[int]] = field(default_factory=list)  # for each wave, the cycles where its iterations began
  matrix: list[list[tuple[int, int]]] = field(default_factory=list)     # for each SIMD, spans in which its matrix unit was in use, from `begin` on

  @property
  def cycles(self) -> float:
    """Simulated cycles of one iteration, in which every wave runs its instructions once; a mean over the measured iterations."""
    return (self.end - self.begin)/self.trips

class _Groups:
  """Barriers of the simulated workgroups: how many barriers each wave has reached, and which waves wait."""
  def __init__(self, waves:Sequence[Wave]):
    self.members = {g: [i for i, w in enumerate(waves) if w.group == g] for g in {w.group for w in waves}}
    self.arrived = [0]*len(waves)
    self.complete: dict[tuple[int, int], int] = {}      # (workgroup, index of a barrier) -> cycle when its last wave arrived
    self.parked: dict[int, int] = {}                    # wave -> index of the barrier it waits at
  def arrive(self, wave:int, group:int, now:int) -> list[int]:
    """Records that the wave `wave` of workgroup `group` arrives at a barrier in cycle `now`. Returns the waves that the barrier releases."""
    self.arrived[wave] += 1
    nth = self.arrived[wave]
    if min(self.arrived[i] for i in self.members[group]) < nth: return []
    self.complete[group, nth] = now
    return [i for i in self.members[group] if self.parked.get(i) == nth]

def step_waves(waves:Sequence[Wave], chip:Chip, trips:int, first:int=0, apart:int=0, every:bool=False) -> Run:
  """Simulates the waves until each has made `trips` loop iterations on average, and returns when each instruction was issued."""
  # `every`: until each wave has made `trips` iterations. Nothing is recorded during the `first` iterations. Each workgroup begins `apart` cycles
  # after the workgroup before it.
  m, cu = chip.latencies, chip.pipes
  simds, ports, turn = max(w.simd for w in waves) + 1, m.lds_ports.value, m.turn.value
  beside, drain, barrier = bool(m.beside.value), m.packed_drain.value, m.barrier.value
  vector, matrix, slow = [0]*simds, [0]*simds, [0]*simds     # cycle from which each SIMD's unit is free
  packed = [False]*simds                                     # whether the matrix unit was last held by packed fp32
  slots = {unit: [0]*simds for unit in (Pipe.SCALAR, Pipe.BRANCH, Pipe.LDS, Pipe.MEMORY)}
  units = -(-simds//cu.simds)                                # number of compute units: 2 if a workgroup runs on a pair
  port, banks, memory = [0]*(ports*units), [0]*units, [0]*units
  queue = m.memory_queue.value*1024//m.memory_bytes.value
  groups = _Groups(waves)
  issued: list[list[int]] = [[] for _ in waves]              # cycle of each issue of a wave
  done: list[list[int]] = [[] for _ in waves]                # cycle when the access of each issue is done
  free, priority, position = [w.group*apart for w in waves], [0]*len(waves), [0]*len(waves)
  released: dict[int, int] = {}                              # wave -> cycle when its barrier was complete
  result = Run(waves, trips - first, starts=[[] for _ in waves], matrix=[[] for _ in range(simds)])
  heap: list[tuple[int, int, int, int]] = []
  for i, w in enumerate(waves):
    if w.behind:
      groups.arrive(i, w.group, 0)
      groups.parked[i] = 1
    else: heapq.heappush(heap, (free[i], -priority[i], -1, i))
  count = len(waves)
  to_make, to_warm = trips*count, first*count
  measuring = not to_warm
  while to_make and heap:
    key, _, _, i = heapq.heappop(heap)
    w, own, times = waves[i], free[i], issued[i]
    n = position[i]
    trip, at = divmod(n, len(w.steps))
    x, simd, unit = w.steps[at], w.simd, w.steps[at].unit
    cu_of, now, why = simd//cu.simds, own, ""
    # results, accesses and barriers that the instruction waits for
    if (t := released.get(i, 0)) > now: now, why = t, BARRIER
    for need in x.needs:
      if n >= need.back and (t := times[n - need.back] + need.latency) > now: now, why = t, RESULT
    for back in x.awaits:
      if n >= back and (t := done[i][n - back]) > now: now, why = t, ACCESS
    # the instruction's unit
    if unit == Pipe.NONE: ready = now
    elif unit == Pipe.VECTOR:
      ready = max(now, vector[simd])
      if x.alone: ready = max(ready, matrix[simd] + (0 if packed[simd] else drain))
    elif unit == Pipe.MATRIX: ready = max(now, vector[simd], matrix[simd])
    elif unit == Pipe.TRANSCENDENTAL: ready = max(now, vector[simd], slow[simd] if beside else 0)
    else:
      ready = max(now, slots[unit][simd])
    if turn > 1: ready += (simd - ready) % turn
    # `ready` is not rounded up to a turn here: when there is room, a wave of any SIMD can issue
    if unit in SHARED: ready = max(ready, port[simd*ports//cu.simds] - m.lds_queue.value if unit == Pipe.LDS else memory[cu_of] - queue)
    if ready > key:
      heapq.heappush(heap, (ready, -priority[i], times[-1] if times else -1, i))
      continue
    if unit != Pipe.NONE and ready - turn >= now and ready - now > now - own: why = BUSY
    # the issue
    now, end = ready, ready
    if at == 0:
      result.starts[i].append(now)
      if trip and (not every or trip <= trips):
        to_make, to_warm = to_make - 1, to_warm - 1
        if not to_warm: measuring, result.begin = True, now
        if not to_make:
          result.end = now
          break
    if unit == Pipe.VECTOR:
      end = vector[simd] = now + x.hold
      if x.alone: matrix[simd], packed[simd] = end, True
    elif unit == Pipe.MATRIX:
      vector[simd], end, packed[simd] = now + x.hold, now + x.matrix, False
      matrix[simd] = end
      if measuring: result.matrix[simd].append((now, end))
    elif unit == Pipe.TRANSCENDENTAL:
      end = now + x.hold
      if beside: vector[simd], slow[simd] = now + cu.valu, end
      else: vector[simd] = end
    elif unit != Pipe.NONE:
      slots[unit][simd] = now + turn
      if unit == Pipe.LDS:
        p = simd*ports//cu.simds
        start = max(now, port[p], banks[cu_of] - x.transfer)
        port[p] = start + x.transfer
        banks[cu_of] = max(banks[cu_of], start) + x.banks
        end = max(port[p], banks[cu_of]) + x.latency
      elif unit == Pipe.MEMORY:
        start = max(now, memory[cu_of])
        memory[cu_of] = start + x.transfer
        end = start + x.transfer + x.latency
        if x.banks: banks[cu_of] = max(banks[cu_of], now) + x.banks
      elif x.latency: end = now + x.latency
    times.append(now)
    done[i].append(end)
    if measuring: result.issues.append(Issue(i, trip, at, own, now, end, why))
    if x.priority is not None: priority[i] = x.priority
    free[i], position[i] = now + x.pause, n + 1
    if x.arrives:
      for other in groups.arrive(i, w.group, now):
        del groups.parked[other]
        released[other] = now + barrier
        heapq.heappush(heap, (free[other], -priority[other], issued[other][-1] if issued[other] else -1, other))
    if x.waits_for_all:
      nth = groups.arrived[i]
      if (w.group, nth) not in groups.complete:
        groups.parked[i] = nth
        continue
      released[i] = groups.complete[w.group, nth] + barrier
    heapq.heappush(heap, (free[i], -priority[i], now, i))
  if to_make: raise RuntimeError("the waves wait for each other: some never reach a barrier. Give with --behind how many begin one barrier later")
  return result
