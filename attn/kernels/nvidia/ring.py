"""States of NVIDIA kernels that hold a ring of tiles in shared memory, and wait for the copies of a tile before they read it."""
from __future__ import annotations
from typing import Self
from attn.kernels.parts.memory.lanes import MmaLane
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.statements import InOrder, workgroup_barrier
from attn.ops import hopper as wgmma, nvidia as nv
from attn.tinygrad_compat import UOp

class CopyGroups(InOrder):
  """A ring of tiles for mma.sync: copies form groups, and a barrier follows each wait for some of them. ldmatrix reads the operands."""
  shared: UOp

  def started(self, copies:list[UOp]) -> Self:
    """Starts the copies as one group."""
    s = self.do(*copies)
    return s.do(nv.commit(s.done))
  def arrived(self, but:int) -> Self:
    """Waits until the copies of all threads have arrived, except the last `but` groups, and until earlier reads are done."""
    return self.after(workgroup_barrier(self.statements.do(nv.wait_copies(self.done, but))))

  def read(self, rows:SwizzledRows, row:UOp, unit:UOp, row_step:int, unit_step:int, transposed:bool=False) -> UOp:
    place, step = rows.further(row, unit, row_step, unit_step)
    return nv.ldmatrix(self.shared[place], step, transposed)

class Arrivals(InOrder):
  """A ring of tiles for wgmma: all threads arrive at an mbarrier when their part of a tile has arrived."""
  shared: UOp

  @property
  def arrivals(self) -> UOp:
    """The mbarrier, in the last unit of shared memory."""
    return self.shared[self.shared.max_numel() - 1]
  def expected(self, at:MmaLane, threads:int) -> Self:
    """Makes the mbarrier ready for the arrivals of `threads` threads."""
    s = self.do(wgmma.init(self.arrivals, at.thread.eq(0), threads))
    return s.after(workgroup_barrier(s.done))
