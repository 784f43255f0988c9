"""The program that the emulator runs, as plan.py makes it from the UOps of a lowered kernel."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Callable
from attn.emulator.chips import EmulatedChip
from attn.emulator.listing import NOWHERE, Listing, Place
from attn.tinygrad_compat import DType, UOp

@dataclass(frozen=True)
class Address:
  """Address in a program of the emulator: of an element, of type `dtype`, of `buffer`."""
  buffer: UOp
  dtype: DType
  # the offset from the start of the buffer is the sum of `bytes` times the number in `slot` of `Frame.v`, over the pairs (slot, bytes)
  terms: tuple[tuple[int, int], ...] = ()

class EmulatedProgram:
  """A program of the emulator: a list of functions, each of which runs one operation for all threads, and the buffers that they use."""
  name: str
  arch: str
  chip: EmulatedChip
  linear: list[UOp]
  renderer: Callable[[], Any]|None          # makes the renderer that lowered and rendered it; errors use it to find an operation's place
  steps: list[Callable[[Any], int|None]]    # functions of a Frame; each returns the next program counter, or None for the following step
  uops: list[UOp]                           # the UOp of each step, for error messages
  slot: dict[UOp, int]
  constants: list[Any]                      # the initial value of each slot
  frees: list[list[int]]                    # for each step, the slots whose values are not needed after it
  params: list[UOp]
  variables: list[UOp]
  buffers: list[UOp]                        # LDS and register arrays
  names: dict[UOp, str]
  outputs: list[UOp]
  stored: dict[UOp, int]                    # buffer -> bytes of an element in a store to it
  units: dict[UOp, int]                     # LOCAL buffer -> bytes of the narrowest access
  plain: set[UOp]                           # buffers that are accessed by operations which are not atomic
  atomics: set[UOp]                         # parameters that are accessed by atomic operations
  meetings: set[int]                        # indices of the steps that are atomic operations
  waits: bool                               # a workgroup may wait for another one
  whole_waves: bool                         # waves are padded to full size, because operations across lanes are possible
  lds: int                                  # bytes of LDS per workgroup
  live_bytes: int                           # most bytes per thread of values that are alive together
  listing: Listing|None = None

  def place(self, u:UOp) -> Place:
    """Returns where the operation `u` comes from: the line of Python that emitted it, and its line in the rendered source."""
    if self.renderer is None: return NOWHERE
    if self.listing is None: self.listing = Listing(self.linear, self.name, self.renderer())
    return self.listing.place(u)

  @staticmethod
  def nbytes(u:UOp) -> int: return u.max_numel() * u.dtype.itemsize
