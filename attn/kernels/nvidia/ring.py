"""Base classes for the state of an NVIDIA kernel whose tiles pass through a ring buffer in shared memory."""
from __future__ import annotations
from typing import Self
from attn.kernels.parts.memory.lanes import MmaLane
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.statements import InOrder, workgroup_barrier
from attn.ops import hopper as wgmma, nvidia as nv
from attn.tinygrad_compat import UOp

class CopyGroups(InOrder):
  """Base class for the state of a kernel with mma.sync, whose tiles pass through a ring buffer in shared memory."""
  # The copies (cp.async) form groups. A thread waits for its own groups, and a barrier then waits for the groups of all threads. ldmatrix reads the
  # operands.
  shared: UOp

  def started(self, copies:list[UOp]) -> Self:
    """Executes the statements `copies`, which start asynchronous copies, as one group for which threads can wait; returns the state."""
    s = self.do(*copies)
    return s.do(nv.commit(s.done))
  def arrived(self, but:int) -> Self:
    """Waits until the copies of all threads, except each thread's last `but` groups, are complete, and returns the state."""
    # also waits until all threads have done their earlier reads
    return self.after(workgroup_barrier(self.statements.do(nv.wait_copies(self.done, but))))

  def read(self, rows:SwizzledRows, row:UOp, unit:UOp, row_step:int, unit_step:int, transposed:bool=False) -> UOp:
    place, step = rows.further(row, unit, row_step, unit_step)
    return nv.ldmatrix(self.shared[place], step, transposed)

class Arrivals(InOrder):
  """Base class for the state of a kernel with wgmma, whose tiles pass through a ring buffer in shared memory."""
  # a thread arrives at an mbarrier when its copies to a tile are complete
  shared: UOp

  @property
  def arrivals(self) -> UOp:
    """The mbarrier (a counter of arrived threads), which lies in the last 16 bytes of shared memory."""
    return self.shared[self.shared.max_numel() - 1]
  def expected(self, at:MmaLane, threads:int) -> Self:
    """Initialises the mbarrier so that each phase waits for `threads` arrivals, and returns the state."""
    return self.do(wgmma.init(self.arrivals, at.thread.eq(0), threads)).after_barrier()
