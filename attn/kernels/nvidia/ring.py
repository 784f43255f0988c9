"""Base classes for the states of NVIDIA kernels. Such a kernel copies tiles to a ring buffer in shared memory, and waits for the copies of a tile
before it reads the tile."""
from __future__ import annotations
from typing import Self
from attn.kernels.parts.memory.lanes import MmaLane
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.statements import InOrder, workgroup_barrier
from attn.ops import hopper as wgmma, nvidia as nv
from attn.tinygrad_compat import UOp

class CopyGroups(InOrder):
  """A ring buffer of tiles for kernels with mma.sync. The copies (cp.async) form groups. A thread waits for its own groups, and a barrier then waits
  for the groups of all threads. ldmatrix reads the operands."""
  shared: UOp

  def started(self, copies:list[UOp]) -> Self:
    """Starts copies to shared memory as one group. The method `arrived` waits for whole groups."""
    s = self.do(*copies)
    return s.do(nv.commit(s.done))
  def arrived(self, but:int) -> Self:
    """Waits until the copies of all threads are complete, except the last `but` groups of each thread. Also waits until all threads have done their
    earlier reads."""
    return self.after(workgroup_barrier(self.statements.do(nv.wait_copies(self.done, but))))

  def read(self, rows:SwizzledRows, row:UOp, unit:UOp, row_step:int, unit_step:int, transposed:bool=False) -> UOp:
    place, step = rows.further(row, unit, row_step, unit_step)
    return nv.ldmatrix(self.shared[place], step, transposed)

class Arrivals(InOrder):
  """A ring buffer of tiles for kernels with wgmma. Each thread arrives at an mbarrier when its copies to a tile are complete."""
  shared: UOp

  @property
  def arrivals(self) -> UOp:
    """The mbarrier, which lies in the last 16 bytes of shared memory."""
    return self.shared[self.shared.max_numel() - 1]
  def expected(self, at:MmaLane, threads:int) -> Self:
    """Initialises the mbarrier for `threads` arrivals in each phase."""
    s = self.do(wgmma.init(self.arrivals, at.thread.eq(0), threads))
    return s.after(workgroup_barrier(s.done))
