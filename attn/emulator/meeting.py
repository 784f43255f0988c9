"""Effects that the workgroups of a launch have on each other through global memory: atomic additions, tickets and turns. Begin with `Meeting`."""
from __future__ import annotations
from collections import deque
from dataclasses import dataclass, field
from typing import Any
import numpy as np
from numpy.typing import NDArray
from attn.emulator.checks import AtomicRace, NotWaitedFor
from attn.emulator.memory import Allocation, Pointer, Space, View
from attn.emulator.program import EmulatedProgram
from attn.emulator.threads import Threads

# A workgroup gets a ticket by adding 1 to a counter: the ticket is the counter's value before, so no two workgroups get the same ticket. A turn is
# the period in which one workgroup may act. It begins when a counter has the number of the turn. A wave passes the turn on by adding 1 to this
# counter. A wave settles when it waits until its own accesses are complete.
#
# A `Meeting` belongs to one launch, and knows which accesses are ordered. Each wave counts its own time, its clock. A wave knows a clock of each
# other wave: the accesses that the other wave made up to this time come before its own next accesses. This knowledge passes from wave to wave in two
# ways. A wave that passes a turn on stores what it knows with the counter; a wave that has waited for the turn then knows this, too. After a barrier
# each wave of the workgroup knows what any of them knew, and the accesses that the others had made when they last settled (on NVIDIA, all their
# accesses before the barrier).
#
# ATTN_EMU_ORDER can select a random order. Then an addition does not happen at once: the additions of one wave happen in order, but at any time
# until the wave settles or passes a turn on. On NVIDIA a wave can also send additions to the copy engine (TMA), which adds in the background
# (attn/ops/hopper.py). Sent additions happen at any time until the wave waits for the copy engine; nothing else waits for them.

Array = NDArray[Any]

@dataclass
class Trace:
  """Record of one access by one wave: the 4-byte elements of a buffer that the wave accessed, the wave's clock, and the index of the operation."""
  wave: int
  clock: int
  step: int
  elements: Array      # indices of the elements of 4 bytes, each once, in ascending order
  verb: str

@dataclass
class Traces:
  """All accesses to one allocation so far: a list of atomic ones, and a list of the others."""
  # for each element: the wave that last added to the element (-1: none), and that wave's clock at the time
  adder: Array
  added: Array
  atomic: list[Trace] = field(default_factory=list)
  plain: list[Trace] = field(default_factory=list)

Addition = tuple[Array, Array, Array, Array|None]     # memory, elements, numbers, and the elements that are set instead, as flags (None: no element)

class Meeting:
  def __init__(self, plan:EmulatedProgram, views:dict[Any, View], workgroups:int, waves:int, seed:int):
    self.plan, self.waves, self.count = plan, waves, workgroups*waves
    self.random = np.random.default_rng(seed) if seed else None
    self.clock, self.settled = np.ones(self.count, np.int32), np.zeros(self.count, np.int32)
    self.added = dict[int, tuple[int, int]]()       # wave -> its clock and step at its last addition
    self.sent = dict[int, int]()                    # wave -> step at which it last sent additions, if it has not waited for them since
    self.known = dict[int, Array]()                 # wave -> what it knows: a clock for each wave
    self.left = dict[tuple[Allocation, int], Array]()      # counter -> what the waves that passed its turns knew
    self.pending = dict[int, deque[Addition]]()     # wave -> additions that have not happened yet
    bases = {views[u].base for u in plan.atomics}
    sizes = {base: base.data.size//4 if plan.waits else 0 for base in bases}
    self.traces = {base: Traces(np.full(size, -1, np.int32), np.zeros(size, np.int32)) for base, size in sizes.items()}
    both = bases & {view.base for u, view in views.items() if u in plan.plain}
    self.watched = {u for u, view in views.items() if view.base in both}      # parameters that atomic and other operations access

  # ***** the order of accesses *****

  def of_wave(self, wave:int) -> Array:
    """Returns a clock value for each wave of the launch: accesses of that wave up to this clock surely precede the next access of wave `wave`."""
    return found if (found := self.known.get(wave)) is not None else np.zeros(self.count, np.int32)

  def waves_of(self, f:Threads, gate:Array) -> list[tuple[int, Array]]:
    """Returns (index of a wave in the launch, threads of this wave where `gate` is true) for each wave with at least one such thread."""
    threads = np.flatnonzero(gate)
    return [(f.first*self.waves + int(w), threads[f.wave_of[threads] == w]) for w in np.unique(f.wave_of[threads])]

  def settle(self, f:Threads, gate:Array) -> None:
    for wave, _ in self.waves_of(f, gate): self._settle(wave)

  def await_sent(self, f:Threads, gate:Array) -> None:
    """Records that each wave with a thread where `gate` is true has waited for all additions that the wave had sent to the copy engine (TMA)."""
    for wave, _ in self.waves_of(f, gate):
      self.sent.pop(wave, None)
      self.happen(wave)

  def _settle(self, wave:int) -> None:
    if wave in self.sent: return
    self.happen(wave)
    self.settled[wave] = self.clock[wave]
    self.clock[wave] += 1

  def barrier(self, f:Threads) -> None:
    """Records that all waves of a workgroup have passed a barrier."""
    # After it, each wave knows which accesses are complete, as far as any of these waves knew, and the accesses that the other waves had made when
    # they last settled; on NVIDIA all accesses that they made before the barrier.
    if not self.plan.waits and not self.watched: return
    here = range(f.first*self.waves, (f.first + 1)*self.waves)
    if self.plan.chip.family == "nvidia":
      for wave in here: self._settle(wave)
    joint: Array = np.maximum.reduce([self.of_wave(wave) for wave in here])
    joint[here.start:here.stop] = np.maximum(joint[here.start:here.stop], self.settled[here.start:here.stop])
    for wave in here: self.known[wave] = joint

  def take_turn(self, f:Threads, pointer:Pointer, gate:Array) -> None:
    """Records that threads where `gate` is true have waited until the counter at `pointer` had the number of their turn."""
    # their waves now know which accesses were complete when earlier turns were passed on
    for wave, threads in self.waves_of(f, gate):
      for counter in self._counters(pointer, threads):
        if (left := self.left.get(counter)) is not None: self.known[wave] = np.maximum(self.of_wave(wave), left)

  def pass_turn(self, f:Threads, pointer:Pointer, gate:Array) -> None:
    """Records that threads end their turn by adding 1 to the counter at `pointer`. Raises NotWaitedFor if additions of their workgroup may be
    incomplete."""
    passing = self.waves_of(f, gate)
    for wave, threads in passing:
      if f.checks and (step := self.sent.get(wave)) is not None:
        raise f.error(NotWaitedFor, gate, lambda t: f"passes a turn, but additions that this wave has sent at {self._line(step)} may not be complete")
      knows = self.of_wave(wave)
      for other in {*range(f.first*self.waves, (f.first + 1)*self.waves)} - {w for w, _ in passing}:
        if f.checks and (last := self.added.get(other)) is not None and last[0] > knows[other]:
          raise f.error(NotWaitedFor, gate, lambda t: f"passes a turn, but additions by wave {other % self.waves}, started at {self._line(last[1])}, "
                                                      "may not be complete: that wave must settle, and a barrier must follow")
      self._settle(wave)
      knows = knows.copy()
      knows[wave] = self.settled[wave]
      for counter in self._counters(pointer, threads):
        self.left[counter] = np.maximum(knows, self.left[counter]) if counter in self.left else knows

  def _counters(self, pointer:Pointer, threads:Array) -> set[tuple[Allocation, int]]:
    at = np.broadcast_to(pointer.offset, pointer.space.f.T)[threads] + pointer.space.begin
    return {(_base(pointer.space), int(x)) for x in at}

  def _line(self, step:int) -> str: return self.plan.place(self.plan.uops[step]).name or f"step {step}"

  def who(self, f:Threads, wave:int) -> str: return f"wave {wave % self.waves} of workgroup {f.workgroup(wave//self.waves)}"

  # ***** additions *****

  def in_order(self, threads:Array) -> Array:
    """Returns `threads` in the order in which they execute an atomic operation: ascending by index, or random if ATTN_EMU_ORDER is set."""
    return threads if self.random is None else self.random.permutation(threads)

  def add(self, f:Threads, space:Space, memory:Array, at:Array, values:Array, gate:Array, sent:bool=False, sets:Array|None=None) -> None:
    """Adds each thread's number in `values` to element `at` of `memory`, where `gate` is true. Where `sets` is true, the number replaces the
    element."""
    traces, first = self.traces[_base(space)], space.begin//4
    for wave, threads in self.waves_of(f, gate):
      threads = self.in_order(threads)
      elements = at[threads]
      # an error if another wave of the workgroup has waited for the turn to add, and no barrier has made the adding wave wait, too
      if self.plan.waits and f.checks: self._check_turn(f, traces, wave, elements + first, threads, space.name)
      self.added[wave] = int(self.clock[wave]), f.pc
      if sent: self.sent[wave] = f.pc
      addition = memory, elements, np.broadcast_to(values, f.T)[threads], None if sets is None else np.broadcast_to(sets, f.T)[threads]
      if self.random is None: _perform(*addition)
      else: self.pending.setdefault(wave, deque()).append(addition)

  def _check_turn(self, f:Threads, traces:Traces, wave:int, elements:Array, threads:Array, name:str) -> None:
    adder, added = traces.adder[elements], traces.added[elements]
    if (others := (adder >= 0) & (adder//self.waves != f.first)).any():
      early = others & (self.of_wave(wave)[adder] < added)
      for other in range(f.first*self.waves, (f.first + 1)*self.waves):
        if (bad := early & (self.of_wave(other)[adder] >= added)).any():
          which = np.zeros(f.T, bool)
          which[threads[bad]] = True
          raise f.error(AtomicRace, which, lambda t: f"adds to {name}, where {self.who(f, int(adder[bad][0]))} has added in an earlier turn: wave "
                                                     f"{other % self.waves} has waited for this turn, but no barrier has followed")
    traces.adder[elements], traces.added[elements] = wave, self.clock[wave]

  def happen(self, wave:int, count:int|None=None) -> None:
    """Performs the first `count` additions of a wave that have been delayed, or all of them if `count` is None."""
    if (waiting := self.pending.get(wave)) is None: return
    for _ in range(len(waiting) if count is None else count):
      _perform(*waiting.popleft())
    if not waiting: del self.pending[wave]

  def some_happen(self) -> None:
    """Performs some of the delayed additions, of some of the waves, both chosen at random."""
    if self.random is None: return
    for wave in self.random.permutation(sorted(self.pending)):
      if self.random.random() < 0.5: self.happen(int(wave), int(self.random.integers(1, len(self.pending[int(wave)]) + 1)))

  def all_happen(self) -> None:
    while self.pending: self.some_happen()

  # ***** accesses of both kinds *****

  def note(self, f:Threads, space:Space, elements:Array, active:Array|None, verb:str, atomic:bool) -> None:
    """Records that active threads accessed `elements`. Raises AtomicRace if an atomic and a non-atomic access to one element have no defined
    order."""
    # Raises AtomicRace if nothing orders this access and an earlier access to the same element, and just one of the two is atomic. `verb` says in
    # error messages what the access does.
    traces, elements = self.traces[_base(space)], elements + space.begin//4
    mine, others = (traces.atomic, traces.plain) if atomic else (traces.plain, traces.atomic)
    for wave, threads in self.waves_of(f, f.active if active is None else active):
      if not atomic: self.happen(wave)
      found, knows = np.unique(elements[:, threads]), self.of_wave(wave)
      for other in others:
        if other.wave == wave or knows[other.wave] >= other.clock or other.elements[0] > found[-1] or found[0] > other.elements[-1]: continue
        if len(same := np.intersect1d(found, other.elements, assume_unique=True)):
          bad = np.zeros(f.T, bool)
          bad[threads] = (elements[:, threads] == same[0]).any(axis=0)
          raise f.error(AtomicRace, bad, lambda t: f"{verb} {space.name}[{same[0] - space.begin//4}] (elements of 4 bytes), which "
                        f"{self.who(f, other.wave)} {other.verb} at {self._line(other.step)}: an atomic and another access, with no defined order")
      mine.append(Trace(wave, int(self.clock[wave]), f.pc, found, verb))

def _perform(memory:Array, elements:Array, numbers:Array, sets:Array|None) -> None:
  """Adds `numbers` to `elements` of `memory`. Where `sets` is true, the numbers replace the elements instead."""
  if sets is not None: memory[elements[sets]] = 0
  np.add.at(memory, elements, numbers)

def _base(space:Space) -> Allocation:
  assert space.base is not None
  return space.base

class WatchedSpace(Space):
  """Buffer that atomic and other operations access. A `Meeting` checks that their order is defined."""
  def __init__(self, meeting:Meeting, *args:Any, **more:Any):
    super().__init__(*args, **more)
    self.meeting = meeting
  def load(self, index:Array, chunk:int, active:Array|None) -> Array:
    self._note_plain(index, chunk, active, "reads")
    return super().load(index, chunk, active)
  def store(self, index:Array, chunk:int, values:Array, active:Array|None) -> None:
    self._note_plain(index, chunk, active, "writes")
    super().store(index, chunk, values, active)
  def note_atomic(self, at:Array, count:int, gate:Array, verb:str) -> None:
    """Records that threads accessed `count` neighbouring 4-byte elements, from number `at` on, by an atomic operation where `gate` is true."""
    self.meeting.note(self.f, self, at + np.arange(count)[:, None], gate, verb, atomic=True)
  def _note_plain(self, index:Array, chunk:int, active:Array|None, verb:str) -> None:
    at = np.broadcast_to(self._at(index, chunk, active, verb), self.f.T).astype(np.int64)*chunk
    self.meeting.note(self.f, self, at//4 + np.arange(max(1, chunk//4))[:, None], active, verb, atomic=False)
