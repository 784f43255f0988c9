"""Interpreter of the emulator: a `Frame` holds the threads of a run, their values and their memory, and runs a program operation by operation."""
from __future__ import annotations
from collections.abc import Iterator, Sequence
from typing import Any, Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
import numpy as np
from numpy.typing import NDArray
from attn.tinygrad_compat import AddrSpace, UOp
from attn.emulator.alu import elements, numpy_dtype
from attn.emulator.banks import BankCounter
from attn.emulator.chips import SATURATING
from attn.emulator.checks import (BadEntry, Deadlock, DivergentBarrier, DivergentMatrix, EmulatorError, Misaligned,
                                  NegativeTerm, OutOfBounds, SharedSlot)
from attn.emulator.matrix import (WARPGROUP, MatrixUnit, bits_of_sums, depth_of_wgmma, element_size, to_float32, warpgroup_operand,
                                  warpgroup_product)
from attn.emulator.memory import PADDING, Pointer, divided, RegisterPointer, Registers, Space, View
from attn.emulator.meeting import Meeting, WatchedSpace
from attn.emulator.probe import note_probe
from attn.emulator.program import Address, EmulatedProgram
from attn.emulator.shadow import LdsShadow
from attn.emulator.threads import Operand, Threads
from attn.emulator.under_way import UnderWay

Array = NDArray[Any]
class Suspended(Exception):
  """Raised by an operation that must wait for another workgroup. The emulator runs the operation again later."""

@dataclass
class Wait:
  """A wait of threads of a workgroup: each thread waits until a counter in global memory equals the thread's `number`."""
  space: Space
  memory: Array       # int32
  at: Array           # element for each waiting thread
  number: Array       # number for which each waiting thread waits
  threads: Array
  @property
  def over(self) -> bool: return bool((self.memory[self.at] == self.number).all())
  def __str__(self) -> str:
    i = int(np.flatnonzero(self.memory[self.at] != self.number)[0])
    return f"waits until {self.space.name}[{self.at[i]}] is {self.number[i]}, and it is {self.memory[self.at[i]]}"

class Frame(Threads):
  """Threads of a range of workgroups, with their values and memory, that execute a program: each operation for all threads at once."""
  def __init__(self, plan:EmulatedProgram, first:int, workgroups:int, grid:tuple[int, ...], local:tuple[int, ...], params:dict[UOp, View],
               values:dict[UOp, int], checks:bool=True, banks:BankCounter|None=None, meeting:Meeting|None=None):
    super().__init__(plan, first, workgroups, grid, local, checks, banks)
    self.meeting = meeting
    self.wait: Wait|None = None         # what the threads wait for
    self.matrix_unit = MatrixUnit(plan.chip.family, plan.arch)
    self.saturates = plan.chip.family in SATURATING
    self.under_way = UnderWay(self)
    # values and memory
    self.v: list[Any] = list(plan.constants)
    for u, x in values.items(): self.v[plan.slot[u]] = numpy_dtype(u.dtype).type(x)
    self.spaces: dict[UOp, Space] = {}
    self.registers: dict[UOp, Registers] = {}
    for u, view in params.items():
      make = partial(WatchedSpace, meeting) if meeting is not None and checks and u in meeting.watched else Space
      self.spaces[u] = make(self, plan.names[u], view.data, view.size, written=view.written, guarded=view.base.touched, base=view.base,
                            begin=view.offset)
    for u in plan.buffers:
      name, nbytes = plan.names[u], plan.nbytes(u)
      if u.addrspace is AddrSpace.REG: self.registers[u] = Registers(self, name, u.max_numel(), numpy_dtype(u.dtype), elements(u.dtype))
      else:
        stride, unit = -(-nbytes//PADDING)*PADDING, plan.units.get(u, 4)
        self.spaces[u] = Space(self, name, np.zeros(stride*workgroups, np.uint8), nbytes, stride,
                               shadow=LdsShadow(self, unit, stride//unit) if checks else None)

  @contextmanager
  def _explained(self) -> Iterator[None]:
    """Context manager that adds to an error which operation was running: its line of Python, and its line in the rendered source."""
    try: yield
    except EmulatorError as e:
      e.args = (f"{e}{self.plan.place(self.plan.uops[self.pc])}",)
      raise
    except Exception as e:
      e.add_note(f"in {self.plan.name}, step {self.pc} of {len(self.plan.steps)}{self.plan.place(self.plan.uops[self.pc])}")
      raise

  def run(self) -> None:
    with self._explained():
      try: self._run()
      finally: self._release()

  def _release(self) -> None:
    # Without what refers back to this object, its memory is freed at once. Python collects cycles of objects later, if at all.
    self.v.clear()
    self.spaces.clear()
    self.registers.clear()
    del self.under_way

  def _run(self) -> None:
    pc, steps, frees, v = 0, self.plan.steps, self.plan.frees, self.v
    while pc < len(steps):
      self.pc = pc
      if (jump := steps[pc](self)) is None:
        for slot in frees[pc]: v[slot] = None
        pc += 1
      else: pc = jump

  def parts(self) -> Iterator[None]:
    """Runs the program as a generator. It yields before each atomic operation, and when an operation must wait for another workgroup."""
    pc, steps, frees, v = 0, self.plan.steps, self.plan.frees, self.v
    with self._explained():
      try:
        while pc < len(steps):
          if pc in self.plan.meetings: yield
          self.pc = pc
          try: jump = steps[pc](self)
          except Suspended: continue
          if jump is None:
            for slot in frees[pc]: v[slot] = None
            pc += 1
          else: pc = jump
      finally: self._release()

  @property
  def can_run(self) -> bool: return self.wait is None or self.wait.over

  def deadlock(self, why:str) -> EmulatorError:
    """Returns the error Deadlock for this workgroup, whose wait can never end; `why` says what the other workgroups do."""
    assert self.wait is not None
    bad, wait = np.zeros(self.T, bool), self.wait
    bad[wait.threads[wait.memory[wait.at] != wait.number]] = True
    error = self.error(Deadlock, bad, lambda t: f"{wait}; {why}")
    return Deadlock(f"{error}{self.plan.place(self.plan.uops[self.pc])}")

  # ***** threads *****

  def special(self, kind:str, axis:int) -> Array:
    """Returns an index of each thread along a grid axis, by `kind`: "g" of its workgroup, "l" within the workgroup, "i" within the grid."""
    # the kinds are the first letters of gidx, lidx and idx in tinygrad's UOp SPECIAL
    wg, size = self.workgroup_of + self.first, self.local[axis]
    group = (wg // int(np.prod(self.grid[:axis], dtype=np.int64)) % self.grid[axis]).astype(np.int32)
    thread = self.local_of // int(np.prod(self.local[:axis], dtype=np.int64)) % size
    return group if kind == "g" else thread if kind == "l" else group*np.int32(size) + thread

  def offset(self, at:Address) -> Array:
    """Returns the offset of an address from the start of its buffer, in bytes."""
    return np.asarray(sum((np.asarray(self.v[s], np.int64)*size for s, size in at.terms), np.int64(0)))

  def aligned(self, index:Array, per:int, name:str, active:Array|None) -> Array:
    """Converts `index`, which counts elements of the buffer `name`, to count vectors of `per` elements. Raises Misaligned for an index that is no
    multiple of `per`."""
    index, beyond = divided(index, per)
    if beyond.any() and (bad := (beyond != 0) if active is None else (beyond != 0) & active).any():
      at = self.full(index*per + beyond)
      raise self.error(Misaligned, bad, lambda t: f"access of {per} elements at {name}[{at[t]}] is not aligned to its width")
    return index

  def leave(self, to:int|None=None) -> int|None:
    """Ends a loop: the threads that were active before it are active again. Returns `to`, the index of the next operation."""
    self.pop()
    return to

  def iterate(self, slot:int, i:Any, bound:Array) -> bool:
    """Begins iteration i of a loop: only threads where i < `bound` stay active. Returns False if no thread is active."""
    self.v[slot] = i
    if not np.shape(bound): return bool(i < bound)
    self.mask = self.stack[-1]
    self.mask = self.also(i < bound)
    return self.mask is None or bool(self.mask.any())

  def barrier(self, gate:Array|None=None) -> Array:
    """Executes a barrier in the waves of threads where `gate` is true, or without `gate` in whole workgroups; returns zeros."""
    # A new interval, the time between two barriers, begins for their waves. A wave (with `gate`) or workgroup that is not whole is an error.
    mask, unit = self.mask if gate is None else gate, self.width if gate is None else self.wave
    reached = np.ones(self.interval.shape, bool)
    if mask is not None:
      here = mask.reshape(-1, unit)
      missing = (~here if self.valid is None else ~here & self.valid.reshape(here.shape)) & here.any(axis=1, keepdims=True)
      if self.checks and missing.any():
        raise self.error(DivergentBarrier, missing.ravel(), lambda t: "this thread does not reach a barrier that others of its workgroup wait in")
      reached = np.broadcast_to(here.any(axis=1).reshape(self.workgroups, -1), self.interval.shape)
    for s in self.spaces.values():
      if s.shadow is not None: s.shadow.barrier(bool(reached.all()) and self.in_step)
    self.next_interval(reached)
    if self.meeting is not None and reached.all(): self.meeting.barrier(self)
    return np.zeros(self.T, np.float32)

  def arrive(self, with_copies:bool=True) -> Array:
    """Records that all threads of a workgroup arrive at their mbarrier, and with `with_copies` that their copies are complete; returns zeros."""
    # The arrivals complete a phase. A thread that later waits for this phase may access what the arriving threads have stored before; with
    # `with_copies` also the data of their asynchronous copies.
    if with_copies:
      self.under_way.commit()
      self.under_way.wait_copies(0)
    here = self._whole(self.width, DivergentBarrier, "this thread does not arrive at an mbarrier that counts all of its workgroup")
    if self.arrived.max(initial=0) >= self.arrivals.shape[1]: self.arrivals = np.pad(self.arrivals, ((0, 0), (0, 64)))
    self.arrivals[here, self.arrived[here]] = self.interval[here, 0]
    self.arrived[here] += 1
    self.interval = self.interval + here[:, None].astype(np.int32)
    self.note_intervals()
    return np.zeros(self.T, np.float32)

  def await_arrivals(self, parity:Array) -> Array:
    """Makes whole workgroups wait for the end of the next phase of their mbarrier; `parity` (0 or 1) must be the phase number modulo 2. Returns
    zeros."""
    here = self._whole(self.width, DivergentBarrier, "this thread does not wait for an mbarrier as others of its workgroup do")
    def each(bad:Array) -> Array: return np.repeat(bad & here, self.width) & self.active
    if (bad := each(self.waited >= self.arrived)).any():
      raise self.error(DivergentBarrier, bad, lambda t: "this thread waits for a phase of an mbarrier at which nobody has arrived")
    if (bad := self.active & (np.repeat(self.waited, self.width) % 2 != parity)).any():
      raise self.error(DivergentBarrier, bad, lambda t: f"this thread waits for a phase of parity {self.full(parity)[t]}, but the next phase has "
                                                     "the other parity")
    self.seen = self.seen.copy()
    self.seen[here] = self.arrivals[here, self.waited[here]][:, None] + 1
    self.waited[here] += 1
    self.note_intervals()
    return np.zeros(self.T, np.float32)

  def begin_turn(self, groups:int) -> Array:
    """Makes each warpgroup of a block of `groups` warpgroups wait until the warpgroup before it has called `end_turn`. Returns zeros."""
    # The first warpgroup does not wait in its first turn. The emulator runs all warpgroups at the same time, so it lets the others begin one turn
    # too early.
    if self.taken.shape[1] != groups: self.taken = self.passed = np.zeros((self.workgroups, groups), np.int64)
    self.taken = self.taken + self._warpgroups(np.ones(self.T, bool))
    if (late := self.taken > np.roll(self.passed, 1, 1) + (np.arange(groups) > 0)).any():
      raise self.error(DivergentBarrier, np.repeat(late.ravel(), WARPGROUP), lambda t: "this thread waits for a turn that no warpgroup passes on")
    return np.zeros(self.T, np.float32)
  def end_turn(self, groups:int, gate:Array) -> Array:
    """Lets the next warpgroup of a block go on from `begin_turn`, in the warpgroups where `gate` is true. Returns zeros."""
    if self.taken.shape[1] != groups: self.taken = self.passed = np.zeros((self.workgroups, groups), np.int64)
    self.passed = self.passed + self._warpgroups(self.full(gate))
    return np.zeros(self.T, np.float32)
  def _warpgroups(self, gate:Array) -> Array:
    """Returns a bool for each warpgroup (workgroups, warpgroups): whether its threads are active and `gate` is true. Raises DivergentBarrier if its
    threads differ."""
    with self.only(gate):
      found = self._whole(WARPGROUP, DivergentBarrier, "this thread does not reach a barrier that others of its warpgroup reach")
    return found.reshape(self.workgroups, -1)

  def _whole(self, size:int, kind:type[EmulatorError], text:str) -> Array:
    """Returns a bool for each group of `size` threads: whether the group is active. Raises `kind` with the message `text` if only some threads of a
    group are active."""
    here = self.active.reshape(-1, size)
    if self.checks and (missing := ~here & here.any(axis=1, keepdims=True)).any(): raise self.error(kind, missing.ravel(), lambda t: text)
    return np.asarray(here.any(axis=1))

  def whole_waves_only(self) -> None:
    """Raises DivergentMatrix if only some lanes of a wave are active."""
    # a matrix instruction works on all lanes of a wave and ignores EXEC (CDNA3 ISA section 7)
    if self.mask is None or not self.checks: return
    here = self.mask.reshape(-1, self.wave)
    missing = ~here & here.any(axis=1, keepdims=True)
    if missing.any():
      raise self.error(DivergentMatrix, missing.ravel(), lambda t: "this lane does not reach a matrix instruction that others of its wave execute")

  # ***** ops.operation.Lanes *****

  def pointer(self, at:Address) -> Pointer|RegisterPointer:
    if at.buffer in self.registers:
      return RegisterPointer(self.registers[at.buffer], sum(int(self.v[s])*size for s, size in at.terms)//at.buffer.dtype.itemsize)
    return Pointer(self.spaces[at.buffer], at.buffer, self.offset(at))
  def load_bytes(self, pointer:Pointer, offset:Array, nbytes:int, gate:Array) -> Array:
    return pointer.load(offset, nbytes, np.broadcast_to(gate, self.T))
  def store_bytes(self, pointer:Pointer, offset:Array, data:Array, gate:Array) -> None:
    pointer.store(offset, data, np.broadcast_to(gate, self.T))
  def load_register(self, pointer:RegisterPointer, i:int) -> Array:
    return self.full(pointer.array.load(np.asarray(pointer.first + i), self.mask))
  def store_register(self, pointer:RegisterPointer, i:int, value:Array, gate:Array) -> None:
    pointer.array.store(np.asarray(pointer.first + i), value, np.broadcast_to(gate, self.T))
  def start_store(self, pointer:Pointer, offset:Array, data:Array, gate:Array) -> Array:
    gate = np.broadcast_to(gate, self.T)
    pointer.store(offset, data, gate)
    if self.checks and (shadow := pointer.space.shadow) is not None and gate.any():
      by, count = np.flatnonzero(gate), len(data)//shadow.unit
      first = np.broadcast_to(pointer.offset + offset, self.T)[by]//shadow.unit
      at = self.workgroup_of[by]*(pointer.space.stride//shadow.unit) + first
      self.under_way.copy(shadow, at + np.arange(count)[:, None], by, (int(first.min()), int(first.max()) + count))
    return np.zeros(self.T, np.float32)
  def commit_stores(self) -> Array:
    self.under_way.commit()
    return np.zeros(self.T, np.float32)
  def wait_stores(self, but:int) -> Array:
    self.under_way.wait_copies(but)
    return np.zeros(self.T, np.float32)
  def check_alignment(self, pointer:Pointer, nbytes:int) -> None:
    at = np.broadcast_to(pointer.offset, self.T)
    if (bad := self.active & (at % nbytes != 0)).any():
      raise self.error(Misaligned, bad, lambda t: f"an operand begins at byte {at[t]} of {pointer.space.name}: must be a multiple of {nbytes}")
  def check_extent(self, pointer:Pointer, nbytes:Array) -> None:
    bad = self.active & (nbytes > 0) & ((pointer.offset < 0) | (pointer.offset + nbytes > pointer.space.limit))
    if bad.any():
      raise self.error(OutOfBounds, bad, lambda t: f"a descriptor of {self.full(nbytes)[t]} bytes from byte {self.full(pointer.offset)[t]} on "
                                                   f"reaches beyond {pointer.space.name} ({pointer.space.limit} bytes)")
  def check_term(self, slot:int, subtracted:bool) -> None:
    """Raises NegativeTerm if a term of a buffer offset is negative in an active thread: the value number `slot` of the program, negated if
    `subtracted`."""
    # a term of a buffer instruction's offset
    term = self.full(-self.v[slot] if subtracted else self.v[slot])
    if self.checks and (bad := self.active & (term < 0)).any():
      raise self.error(NegativeTerm, bad, lambda t: f"a term of the offset of a {self.plan.uops[self.pc].arg.name} is {term[t]}: no document says "
                                                    "what the memory unit does with an address register below 0")
  def check_numbers(self, name:str, x:Array, gate:Array, count:int) -> None:
    bad = gate & ((x < 0) | (x >= count))
    if bad.any(): raise self.error(BadEntry, bad, lambda t: f"{name} is {self.full(x)[t]}: must lie in 0..{count - 1}")
  def check_alone(self, name:str, x:Array, gate:Array) -> None:
    at = np.flatnonzero(np.broadcast_to(gate, self.T))
    found, first, count = np.unique(self.full(x)[at], return_index=True, return_counts=True)
    if (twice := np.flatnonzero(count > 1)).size:
      bad = np.zeros(self.T, bool)
      bad[at[first[twice[0]]]] = True
      raise self.error(SharedSlot, bad, lambda t: f"{name} {found[twice[0]]} is written {count[twice[0]]} times in one launch")
  def atomic_add(self, pointer:Pointer, steps:Sequence[int], x:Array, gate:Array, sent:bool=False, sets:Array|None=None) -> None:
    for step, values in zip(steps, x):
      memory, at = self._atomic(pointer, 4*step, 4*len(values), gate, "adds to", sets)
      for i, value in enumerate(values): self._meeting.add(self, pointer.space, memory.view(np.float32), at + i, value, gate, sent, sets)
  def sent(self) -> Array:
    self._meeting.await_sent(self, self.active)
    return np.zeros(self.T, np.float32)
  def fetch_add(self, pointer:Pointer, gate:Array) -> Array:
    memory, at = self._atomic(pointer, 0, 4, gate, "adds to")
    found, counters = np.zeros(self.T, np.int32), memory.view(np.int32)
    for t in self._meeting.in_order(np.flatnonzero(gate)):
      found[t] = counters[at[t]]
      counters[at[t]] += 1
    return found
  def await_turn(self, pointer:Pointer, number:Array, gate:Array) -> None:
    memory, at = self._atomic(pointer, 0, 4, gate, "waits for")
    threads = np.flatnonzero(gate)
    self.wait = Wait(pointer.space, memory.view(np.int32), at[threads], self.full(number)[threads], threads)
    if not self.wait.over: raise Suspended
    self.wait = None
    self._meeting.take_turn(self, pointer, gate)
  def settle(self) -> None: self._meeting.settle(self, self.active)
  def pass_turn(self, pointer:Pointer, gate:Array) -> None:
    self._meeting.pass_turn(self, pointer, gate)
    self.fetch_add(pointer, gate)
  @property
  def _meeting(self) -> Meeting:
    if self.meeting is None:
      name = self.plan.uops[self.pc].arg.name
      raise ValueError(f"the operation {name} works on global memory that workgroups share: it must be defined with atomic=True")
    return self.meeting
  def _atomic(self, pointer:Pointer, offset:int, nbytes:int, gate:Array, verb:str, sets:Array|None=None) -> tuple[Array, Array]:
    self.plan.stored.setdefault(pointer.buffer, 4)
    return pointer.space.atomic(np.asarray(pointer.offset + offset), nbytes, gate, verb, sets)
  def start_product(self, acc:RegisterPointer, count:int, a:Callable[[], Array], b:Callable[[], Array], dtype:str, more:bool) -> Array:
    self._whole(WARPGROUP, DivergentMatrix, "this thread does not reach a wgmma that others of its warpgroup execute")
    self.operands = operands = list[Operand]()
    rows, columns = to_float32(a(), dtype), to_float32(b(), dtype)
    self.operands = None
    indices = range(acc.first, acc.first + count)
    old = np.concatenate([self.full(acc.array.result(i, self.mask)) for i in indices]) if more else np.zeros((4*count, self.T), np.float32)
    new = warpgroup_product(rows, columns, old, depth_of_wgmma(dtype), bits_of_sums(self.plan.arch, dtype))
    self.under_way.product(acc.array, {index: new[4*i:4*i + 4] for i, index in enumerate(indices)}, operands)
    return np.zeros(self.T, np.float32)
  def start_nothing(self, acc:RegisterPointer) -> None: self.under_way.product(acc.array, {}, [])
  def wait_products(self, but:int) -> Array:
    self.under_way.wait_products(but)
    return np.zeros(self.T, np.float32)
  def warpgroup_operand(self, a:Array, dtype:str) -> Array: return warpgroup_operand(a, element_size(dtype))
  def probe(self, name:str, x:Array) -> Array:
    at = np.flatnonzero(self.active)
    local, wg = at % self.width, self.first + at//self.width
    workgroup = np.stack([wg // int(np.prod(self.grid[:axis], dtype=np.int64)) % self.grid[axis] for axis in range(3)], 1)
    note_probe(name, workgroup, local//self.wave, local % self.wave, self.full(x)[..., at])
    return x
  def dot(self, a:Array, b:Array, c:Array, dtype:str) -> Array: return self.matrix_unit.dot(a, b, c, dtype)
  def matrix(self, name:str, a:Array, b:Array, c:Array) -> Array:
    self.whole_waves_only()
    return self.matrix_unit.instruction(name, a, b, c)
