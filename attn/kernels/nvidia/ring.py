"""How tiles come to shared memory on NVIDIA: what the states of kernels know of the copies that are under way."""
from __future__ import annotations
from typing import Self
from attn.kernels.parts.memory.lanes import MmaLane
from attn.kernels.parts.memory.layouts import SwizzledRows
from attn.kernels.parts.program.statements import InOrder, workgroup_barrier
from attn.ops import hopper as wgmma, nvidia as nv
from attn.tinygrad_compat import UOp

class CopyGroups(InOrder):
  """The ring of mma.sync: copies go in groups, and a barrier follows a wait for them. ldmatrix reads the operands."""
  shared: UOp

  def started(self, copies:list[UOp]) -> Self:
    """The copies are under way, as a group of their own."""
    s = self.do(*copies)
    return s.do(nv.commit(s.done))
  def arrived(self, but:int) -> Self:
    """All threads' copies are there, the last `but` groups excepted, and what was read before is read."""
    return self.after(workgroup_barrier(self.statements.do(nv.wait_copies(self.done, but))))

  def read(self, rows:SwizzledRows, row:UOp, unit:UOp, row_step:int, unit_step:int, transposed:bool=False) -> UOp:
    place, step = rows.further(row, unit, row_step, unit_step)
    return nv.ldmatrix(self.shared[place], step, transposed)

class Arrivals(InOrder):
  """The ring of wgmma: all threads arrive at an mbarrier when their part of a tile is there."""
  shared: UOp

  @property
  def arrivals(self) -> UOp:
    """The mbarrier, in the last unit of shared memory."""
    return self.shared[self.shared.max_numel() - 1]
  def expected(self, at:MmaLane, threads:int) -> Self:
    """Makes the mbarrier ready for the arrivals of `threads` threads."""
    s = self.do(wgmma.init(self.arrivals, at.thread.eq(0), threads))
    return s.after(workgroup_barrier(s.done))
