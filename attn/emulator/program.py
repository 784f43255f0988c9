"""What a run needs of a program: its steps, and the buffers and values that they work on. attn/emulator/plan.py makes one of linear UOps."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Callable
from attn.emulator.chips import EmulatedChip
from attn.emulator.listing import NOWHERE, Listing, Place
from attn.tinygrad_compat import DType, UOp

@dataclass(frozen=True)
class Address:
  """A pointer as the plan knows it: the buffer, the type it points to, and the (slot, bytes per unit) of each index that was added."""
  buffer: UOp
  dtype: DType
  terms: tuple[tuple[int, int], ...] = ()

class EmulatedProgram:
  """A program that is compiled for the interpreter."""
  name: str
  arch: str
  chip: EmulatedChip
  linear: list[UOp]
  renderer: Callable[[], Any]|None          # what it was lowered and printed with, for errors to say where an operation stands
  steps: list[Callable[[Any], int|None]]    # of a Frame; they return the next program counter where that is not simply the following one
  uops: list[UOp]                           # the UOp of each step, for error messages
  slot: dict[UOp, int]
  constants: list[Any]                      # the initial value of each slot
  frees: list[list[int]]                    # slots whose values nobody needs after a step
  params: list[UOp]
  variables: list[UOp]
  buffers: list[UOp]                        # LDS and register arrays
  names: dict[UOp, str]
  outputs: list[UOp]
  stored: dict[UOp, int]                    # buffer -> bytes of an element as it is stored
  units: dict[UOp, int]                     # LOCAL buffer -> the narrowest access in bytes
  whole_waves: bool                         # lanes may talk to each other
  lds: int                                  # bytes of a workgroup
  live_bytes: int                           # of the values of a thread that are alive at a time
  listing: Listing|None = None

  def place(self, u:UOp) -> Place:
    """Where an operation stands in Python and in the source."""
    if self.renderer is None: return NOWHERE
    if self.listing is None: self.listing = Listing(self.linear, self.name, self.renderer())
    return self.listing.place(u)

  @staticmethod
  def nbytes(u:UOp) -> int: return u.max_numel() * u.dtype.itemsize
