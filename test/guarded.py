"""Buffers of DEV=CPU between protected memory pages: a kernel that reads or writes outside its buffer crashes the process at once."""
from __future__ import annotations
import contextlib, ctypes, mmap
from collections.abc import Iterator
from typing import Any
import pytest
from attn.tinygrad_compat import Context
from tinygrad.device import BufferSpec
from tinygrad.runtime.ops_cpu import CPUAllocator
from tinygrad.runtime.support.hcq import HCQBuffer, MMIOInterface

PAGE, ALIGNED = mmap.PAGESIZE, 16      # tinygrad's vectors of four floats lie at multiples of 16 bytes
SIDES = ("end", "begin")
LIBC = ctypes.CDLL(None, use_errno=True)

def closed(address:int) -> None:
  # Protects the memory page at `address`: any access to it kills the process.
  if LIBC.mprotect(ctypes.c_void_p(address), PAGE, 0): raise OSError(ctypes.get_errno(), "mprotect")

@contextlib.contextmanager
def guarded(side:str) -> Iterator[None]:
  # Context in which every CPU buffer has its own memory between two protected pages, and begins or ends (`side`) at a page.
  # With side "end", the buffer may end a few bytes before the page, because it must begin at a multiple of ALIGNED bytes. Memory that no kernel has
  # written is NaN in every float type.
  own = CPUAllocator._alloc
  def alloc(self:Any, size:int, options:BufferSpec) -> HCQBuffer:
    if options.external_ptr is not None: return own(self, size, options)
    inner = -(-size//PAGE)*PAGE
    memory = mmap.mmap(-1, inner + 2*PAGE, mmap.MAP_ANON|mmap.MAP_SHARED)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + PAGE
    ctypes.memset(first, 0xff, inner)
    for address in (first - PAGE, first + inner): closed(address)
    at = first + (inner - size)//ALIGNED*ALIGNED if side == "end" else first
    return HCQBuffer(at, size, meta=memory, view=MMIOInterface(at, size, fmt="B"), owner=self.dev)
  with pytest.MonkeyPatch.context() as patch, Context(NO_MEMORY_PLANNER=1, LRU=0):      # each buffer needs its own memory
    patch.setattr(CPUAllocator, "_alloc", alloc)
    yield
