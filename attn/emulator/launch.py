"""Runs a program on a grid of workgroups. Begin with `launch`."""
from __future__ import annotations
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
import time
import numpy as np
from attn.emulator.banks import BankCounter, BankUse
from attn.emulator.checks import EmulatorError, LaunchLimit
from attn.emulator.machine import Frame
from attn.emulator.meeting import Meeting
from attn.emulator.memory import View
from attn.emulator.program import EmulatedProgram
from attn.emulator.switches import number_of_switch, switch

# A `Frame` holds the threads and values of a range of workgroups, and executes each operation for all of them at the same time. Workgroups without
# atomic operations are independent, so they run in ranges of many workgroups. If a program has atomic operations, each workgroup has its own
# `Frame`, which stops before each atomic operation, so that other workgroups can run.
#
# On hardware, workgroups with atomic operations may run in any order. Two environment variables choose one. ATTN_EMU_RESIDENT is the number of
# workgroups that the chip holds at the same time; another one starts when one of them ends. With ATTN_EMU_ORDER=0 the workgroups start in the order
# of their numbers, and the first workgroup that can run does so. Any other number is the seed of a random order, in which workgroups start and run,
# and in which their atomic additions happen.

GRID_LIMIT, WORKGROUP_LIMIT = (2**31-1, 65535, 65535), 1024
WORKING_SET = 48 << 20   # most bytes of live values of a range of workgroups that run together: small enough for the caches
LIVE_TOGETHER = 2 << 30       # most bytes of live values of resident workgroups, unless ATTN_EMU_RESIDENT gives the number of workgroups
KEEPING = (0.0, 0.5, 0.9, 0.99)    # random order: a launch draws one as the probability that a workgroup continues after an atomic operation
OVERHEAD = 64            # bytes per thread of the frame itself: numbers of threads, waves and workgroups

@dataclass
class Launch:
  """One run of a kernel on the emulator: its sizes, its duration, and, if they were counted, its bank conflicts."""
  kernel: str
  arch: str
  workgroups: int
  threads: int      # threads per workgroup
  lds: int          # bytes of LDS per workgroup
  # time of the run on the emulator
  seconds: float = 0.0
  bank_conflicts: list[BankUse] = field(default_factory=list)   # with ATTN_EMU_BANKS=1: one entry per LDS buffer, direction and width of access

_last: list[Launch] = []

def last_run() -> Launch|None:
  """Returns the record of the kernel that ran last on the emulator, or None before the first run."""
  return _last[0] if _last else None

# ***** workgroups that wait for each other *****

class Resident:
  """A workgroup that has started and has not ended, stopped at some point of the program."""
  def __init__(self, make:Callable[[], Frame]):
    self.frame: Frame|None = None
    self.parts = self._parts(make)
  def _parts(self, make:Callable[[], Frame]) -> Iterator[None]:
    self.frame = make()
    yield from self.frame.parts()
  @property
  def can_run(self) -> bool: return self.frame is None or self.frame.can_run

def run_together(make:Callable[[int], Frame], meeting:Meeting, workgroups:int, resident:int) -> None:
  """Runs all workgroups of a launch, at most `resident` at the same time; make(i) returns a `Frame`, which holds the threads of workgroup i."""
  random = meeting.random
  waiting = list(range(workgroups))[::-1] if random is None else random.permutation(workgroups).tolist()
  keeping = 1.0 if random is None else float(random.choice(KEEPING))
  there, latest = list[Resident](), Resident(partial(make, 0))
  while waiting or there:
    while waiting and len(there) < resident: there.append(Resident(partial(make, waiting.pop())))
    # `meeting` records what the workgroups do to each other through global memory
    if not (ready := [x for x in there if x.can_run]): raise deadlock([x.frame for x in there if x.frame is not None], len(waiting))
    if latest not in ready or (random is not None and random.random() >= keeping):
      latest = ready[0 if random is None else int(random.integers(len(ready)))]
    meeting.some_happen()
    if next(latest.parts, True): there.remove(latest)        # the parts yield None
  meeting.all_happen()

def deadlock(frames:list[Frame], others:int) -> EmulatorError:
  """Returns the error Deadlock: all workgroups that have started, whose threads are `frames`, wait, and `others` workgroups have not started."""
  told = [f"workgroup {f.workgroup(f.first)} {f.wait}" for f in frames[1:4]] + ["..."]*(len(frames) > 4)
  return frames[0].deadlock("; ".join([f"resident workgroups: {len(frames)}, all of them waiting; not started: {others}", *told]))

def launch(plan:EmulatedProgram, views:list[View], values:tuple[int, ...], grid:tuple[int, ...], local:tuple[int, ...]) -> float:
  """Runs a program on a grid of workgroups, with buffers `views` and values of the kernel's Variables; returns the seconds that the run took."""
  # grid, local: numbers of workgroups, and of threads in a workgroup, along the axes x, y and z
  start = time.perf_counter()
  grid, local = (*grid, 1, 1)[:3], (*local, 1, 1)[:3]
  if any(g != int(g) for g in grid): raise LaunchLimit(f"{plan.name}: the grid {grid} must be whole numbers")
  grid = tuple(int(g) for g in grid)
  if any(not 1 <= g <= limit for g, limit in zip(grid, GRID_LIMIT)): raise LaunchLimit(f"{plan.name}: the grid {grid} is not within {GRID_LIMIT}")
  if (threads := int(np.prod(local))) > WORKGROUP_LIMIT:
    raise LaunchLimit(f"{plan.name}: a workgroup of {local} threads is beyond the limit of {WORKGROUP_LIMIT}")
  params, count = dict(zip(plan.params, views)), int(np.prod(grid, dtype=np.int64))
  checks = switch("ATTN_EMU_CHECKS", True)
  banks = BankCounter(plan.chip.family, plan.chip.wave) if switch("ATTN_EMU_BANKS", False) else None
  waves = -(-threads//plan.chip.wave)
  each = threads*(plan.live_bytes + OVERHEAD) + plan.lds*(waves + 2)      # bytes of a workgroup
  at_once = max(1, WORKING_SET//each)
  def frame(first:int, workgroups:int, meeting:Meeting|None=None) -> Frame:
    return Frame(plan, first, workgroups, grid, local, params, dict(zip(plan.variables, values)), checks, banks, meeting)
  with np.errstate(all="ignore"):
    if plan.meetings:
      meeting = Meeting(plan, params, count, waves, number_of_switch("ATTN_EMU_ORDER"))
      resident = number_of_switch("ATTN_EMU_RESIDENT") or max(1, LIVE_TOGETHER//each)
      run_together(partial(frame, workgroups=1, meeting=meeting), meeting, count, resident)
    else:
      for first in range(0, count, at_once): frame(first, min(at_once, count - first)).run()
  for u in params:
    if (itemsize := plan.stored.get(u, u.dtype.itemsize if u in plan.outputs else None)) is not None:
      params[u].stored_by(plan.name, plan.names[u], itemsize, u in plan.stored)
  seconds = time.perf_counter() - start
  if banks is not None: banks.show(plan.name, plan.arch)
  _last[:] = [Launch(plan.name, plan.arch, count, threads, plan.lds, seconds, list(banks.uses.values()) if banks is not None else [])]
  return seconds
