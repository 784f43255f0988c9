"""What the forward kernels with mma.sync and with wgmma have in common: the registers of the online softmax, and a kernel's loops."""
from __future__ import annotations
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar
from attn.chips.matrix import UNIT_BYTES, Mma
from attn.kernels.nvidia.stored import StoredKeys
from attn.kernels.nvidia.warps import Warps
from attn.kernels.parts.program.allocator import Allocator
from attn.kernels.parts.program.statements import InOrder, Statements, add_all, load_all
from attn.kernels.parts.program.trips import TileLoop, tile_loops
from attn.ops import nvidia as nv
from attn.problem import Problem
from attn.tinygrad_compat import UOp

@dataclass(frozen=True)
class SoftmaxState(InOrder):
  """Base class of the values that the loop over keys carries from iteration to iteration: shared memory, O, m, l, scores and P."""
  shared: UOp
  acc: UOp      # accumulators of O
  m: UOp        # of each row: the number that the softmax subtracts from the scores
  addend: UOp   # of each row: -m*Scores.to_log2
  l: UOp        # of each row: the sums of P
  scores: UOp   # within an iteration
  p: UOp        # within an iteration: P as operand A of the product P V
  statements: Statements
  l_of_trip: UOp   # the iteration's part of l

  @classmethod
  def of(cls, new:Allocator, lds_bytes:int, *, accs:int, scores:int, operands:int, kinds:int, row_tiles:int=1, **others:Any) -> Self:
    """Makes the state before the first iteration, with registers for 16*`row_tiles` queries of a warp, and `lds_bytes` bytes of shared memory."""
    # `accs` C fragments of O, `scores` C fragments of scores, `operands` A operands of P, and `kinds` different sums of P for each row (such as P
    # before and after rounding); `others` are the further fields of the state
    def of_rows(n:int) -> UOp: return new.registers(n*row_tiles, nv.F2)
    return cls(new.lds(lds_bytes//UNIT_BYTES), new.registers(accs, nv.F4), of_rows(1), of_rows(1), of_rows(kinds), new.registers(scores, nv.F4),
               new.registers(operands, nv.U4), Statements.of(new), of_rows(kinds), **others)

  def summed(self) -> Self:
    """Adds this iteration's row sums of P to l, the row sums of all iterations, and returns the state."""
    return self.store(add_all(self.l, load_all(self.l_of_trip)))

TileT = TypeVar("TileT")
StateT = TypeVar("StateT", bound=InOrder)

@dataclass(frozen=True)
class WarpsForward(Generic[TileT, StateT]):
  """Base class of builders of forward kernels on NVIDIA: their methods return the UOps of the steps of `online_softmax`, for one thread."""
  # no field changes during the loop over tiles of keys
  warps: Warps
  tile: TileT
  state: StateT      # before the first iteration

  @property
  def mat(self) -> Mma: return self.warps.at.matrix
  @property
  def p(self) -> Problem: return self.warps.group.p
  @property
  def stored(self) -> StoredKeys: return StoredKeys(self.warps)
  @property
  def in_one_loop(self) -> bool:
    """Whether a single loop computes the tiles in which a mask hides some scores and those in which it hides none."""
    return False
  def loops(self) -> Iterator[TileLoop[StateT]]:
    return tile_loops(self.warps.group.walked, self.warps.group.grid.allocator, together=self.in_one_loop)
