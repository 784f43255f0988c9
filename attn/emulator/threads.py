"""Threads of a run: their indices, which of them are active, the barriers that they have passed, and errors that name a thread."""
from __future__ import annotations
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable
import numpy as np
from numpy.typing import NDArray
from attn.emulator.banks import BankCounter
from attn.emulator.checks import EmulatorError
from attn.emulator.program import EmulatedProgram

# Threads are ordered by workgroup (x fastest), within it by lidx2, lidx1, lidx0 (lidx0 fastest). So the threads of a hardware wave are consecutive.
# If threads diverge, a mask tells which threads are active. An inactive thread computes garbage, but it loads, stores and checks nothing. A loop
# whose bound differs between threads runs until the largest bound.

Array = NDArray[Any]

@dataclass(eq=False)
class Product:
  """Asynchronous matrix product (wgmma) that has been started: its results, and the threads that have not waited for it."""
  number: int
  results: dict[int, Array]      # element of the accumulators -> its value when the product is done
  threads: Array                 # mask of the threads that have started the product and not waited for it

class Operand:
  """Operand of an asynchronous matrix product: either locations of LDS, or an element of a register array."""
  def hold(self, product:Product) -> None: raise NotImplementedError
  def release(self, product:Product) -> None: raise NotImplementedError
  # the product may read the operand at any time from its start until the threads have waited for it
  def read_until_now(self, threads:Array) -> None:
    """Records that the matrix product read this operand until `threads` had waited for the end of the product, which is now."""

class Threads:
  """The threads of workgroups that run together: their indices, which of them are active, and the barriers that they have passed."""
  def __init__(self, plan:EmulatedProgram, first:int, workgroups:int, grid:tuple[int, ...], local:tuple[int, ...], checks:bool=True,
               banks:BankCounter|None=None):
    self.plan, self.first, self.workgroups, self.grid, self.local, self.checks, self.banks = plan, first, workgroups, grid, local, checks, banks
    self.wave, self.pc = plan.chip.wave, 0
    self.threads = threads = int(np.prod(local))
    width = -(-threads//self.wave)*self.wave if plan.whole_waves or banks is not None else threads   # lanes without a thread stay inactive
    self.width, self.waves, self.T = width, -(-width//self.wave), width*workgroups
    self.workgroup_of = np.repeat(np.arange(workgroups, dtype=np.int64), width)
    self.local_of = np.tile(np.arange(width, dtype=np.int32), workgroups)
    self.wave_of = self.local_of//self.wave
    self.mask: Array|None = None if width == threads else self.local_of < threads
    self.valid, self.stack = self.mask, list[Array|None]()
    self.everyone = np.ones(self.T, bool)
    # index of each wave's current interval: see note_intervals
    self.interval = self.seen = np.ones((workgroups, self.waves), np.int32)
    self.arrived, self.waited = np.zeros(workgroups, np.int64), np.zeros(workgroups, np.int64)   # phases of the mbarrier
    self.arrivals = np.zeros((workgroups, 0), np.int32)                                          # the interval that each phase ended
    self.taken = self.passed = np.zeros((workgroups, 0), np.int64)      # turns that each warpgroup has taken, and passed on
    self.stride = self.waves
    self.next_interval(np.ones((workgroups, self.waves), bool))
    self.started: list[int] = []                    # the steps that started operation 0, 1, ...
    self.operands: list[Operand]|None = None        # while a product reads its operands, the list that collects them

  def start(self) -> int:
    """Records that the running operation starts an asynchronous one, and returns the number of the asynchronous operation."""
    self.started.append(self.pc)
    return len(self.started) - 1

  def full(self, x:Any) -> Array:
    """Broadcasts `x` to all threads, so that its last axis has one element for each thread."""
    return x if isinstance(x, np.ndarray) and x.shape[-1:] == (self.T,) else np.broadcast_to(x, np.shape(x)[:-1] + (self.T,))

  def error(self, kind:type[EmulatorError], bad:Array, text:Callable[[int], str]) -> EmulatorError:
    """Returns an error of class `kind` that names the first thread of the mask `bad`; text(thread) returns the message."""
    t = int(np.flatnonzero(np.broadcast_to(bad, self.T))[0])
    local, u = t % self.width, self.plan.uops[self.pc]
    where = self.workgroup(self.first + t//self.width)
    return kind(f"{self.plan.name}: {text(t)}; workgroup {where}, wave {local//self.wave}, lane {local % self.wave} "
                f"({u.op.name}, step {self.pc} of {len(self.plan.steps)}, {self.plan.arch})")

  def workgroup(self, number:int) -> tuple[int, int, int]:
    """Returns the indices (x, y, z), in the grid, of the workgroup with the number `number`."""
    return number % self.grid[0], number//self.grid[0] % self.grid[1], number//self.grid[0]//self.grid[1]

  def operation(self, number:int) -> str:
    """Returns a text that names the line of code which started the asynchronous operation with index `number`."""
    step = self.started[number]
    return f"the operation started at {self.plan.place(self.plan.uops[step]).name or f'step {step}'}"

  # ***** divergence *****

  def also(self, condition:Array) -> Array|None:
    """Returns a mask of the active threads for which `condition` is true, or None if these are all threads, active and inactive."""
    m = np.broadcast_to(condition, self.T) if self.mask is None else self.mask & condition
    return None if m.all() else m
  def push(self, mask:Array|None) -> None:
    self.stack.append(self.mask)
    self.mask = mask
  def pop(self) -> None: self.mask = self.stack.pop()
  @contextmanager
  def only(self, gate:Array) -> Iterator[None]:
    self.push(self.also(gate))
    yield
    self.pop()

  # ***** barriers *****

  def next_interval(self, reached:Array) -> None:
    self.interval = self.interval + reached.astype(np.int32)
    self.seen = np.where(reached, self.interval, self.seen)
    self.note_intervals()

  def note_intervals(self) -> None:
    """Recomputes fields such as `settled` from `interval` and `seen`, the fields that record which barriers each wave has passed."""
    # An interval is the time of a wave between two barriers or arrivals at an mbarrier; later intervals have larger numbers. `interval` has the
    # number of each wave's current interval. `seen` has one number n for each wave: the wave has waited for everything that the other waves of its
    # workgroup did in intervals before n.
    self.in_step = bool((self.interval == self.interval[:, :1]).all())      # are all waves of each workgroup in the same interval?
    same = bool((self.interval == self.interval[0, 0]).all())
    self.interval_of: Any = self.interval[0, 0] if same else self.interval[self.workgroup_of, self.wave_of]
    self.settled = bool((self.seen == self.interval).all())
    self.last_interval, self.since = int(self.interval.max()), int(self.seen.min())   # every wave has waited for everything before `since`
    self.seen_of: Any = self.interval_of if self.settled else self.seen[self.workgroup_of, self.wave_of]
    self.tag_floor: Any = self.seen_of*np.int32(self.stride)
    self.tag = self.interval_of*np.int32(self.stride) + self.wave_of

  @property
  def active(self) -> Array: return self.everyone if self.mask is None else self.mask
