"""Choice of kernels that run before the attention kernel on wgmma, and write buffers that it reads in place of its inputs.

One converts k and v from 8 to 16 bits (attn/kernels/nvidia/widen.py), one transposes V of 8-bit floats (attn/kernels/nvidia/turn.py). The attention
kernel can do both itself, but then each block of queries does so again."""
from __future__ import annotations
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from attn.chips import Chip
from attn.chips.matrix import UNIT_BYTES
from attn.chips.nvidia import FORWARD_WGMMA_TURNED
from attn.chips.shapes import UpTo, WgmmaShape
from attn.choose.refusals import wgmma_refuses
from attn.choose.rows import burden, fitting
from attn.choose.tiles import wgmma_tile
from attn.kernels.nvidia.turn import TURNED_TENSORS, turn_arguments, turn_values, turned_problem
from attn.kernels.nvidia.widen import WIDENED_TENSORS, widen_arguments, widen_rows, widened_problem
from attn.kernels.tiles.wgmma import WgmmaTile
from attn.problem import BYTES, Problem, Shapes
from attn.tinygrad_compat import UOp

@dataclass(frozen=True)
class Preparation:
  """A kernel that runs before the attention kernel, and writes buffers that the attention kernel reads in place of k or v."""
  # the functions get the problem of the call and the tile description of the attention kernel
  buffers: Mapping[str, str]      # inputs of the attention kernel, and the names of the buffers that it gets in their place
  problem: Callable[[Problem, Any], Problem]      # returns the problem as the attention kernel reads it
  arguments: Callable[[Problem, Any], Shapes]     # returns (shape, dtype) of the tensors that the kernel takes, by name and in order
  program: Callable[[Problem, Chip, Any], Callable[..., UOp]]     # makes the kernel
  unsupported: tuple[str, ...]    # fields of a problem with which the kernel cannot be used
  readers: int                    # rows of q that must read a key, on average, for the kernel to pay
  does: tuple[str, str]           # what the kernel makes, and what the attention kernel without it does itself, in words

  def size(self, p:Problem, tile:Any) -> int:
    """Returns the bytes of the buffers that this kernel writes."""
    return sum(math.prod(shape)*BYTES[dtype] for name, (shape, dtype) in self.arguments(p, tile).items() if name in self.buffers.values())
  def refuses(self, p:Problem, arch:Chip) -> str|None:
    if (reason := wgmma_refuses(p, arch)) is not None: return reason
    return next((f"{name}: this kernel does not support it" for name in self.unsupported if getattr(p, name)), None)
  def slower(self, p:Problem, tile:Any) -> str|None:
    """Returns why the attention kernel alone is faster, or None if this kernel should run before it."""
    does, itself = self.does
    if (size := self.size(p, tile)) > MOST_PREPARED: return f"the {does} would take {size} bytes, more than {MOST_PREPARED}"
    rows = p.visible_scores*(p.H//p.Hkv)//keys_that_some_query_sees(p)
    if rows >= self.readers: return None
    return f"on average {rows} rows of q read a key; with less than {self.readers}, forward_wgmma, which {itself}, is faster"

MOST_PREPARED = 1 << 30     # bytes of the buffers
WIDEN = Preparation(WIDENED_TENSORS, lambda p, tile: widened_problem(p), lambda p, tile: widen_arguments(p),
                    lambda p, arch, tile: widen_rows(p, arch, tile.block_n, tile.block_m),
                    ("v_in_k", "varlen", "dealt", "mask_mod", "batch_invariant"), 1536, ("converted rows", "converts keys itself"))
TURN = Preparation(TURNED_TENSORS, lambda p, tile: turned_problem(p, tile.block_n), lambda p, tile: turn_arguments(p, tile.block_n),
                   lambda p, arch, tile: turn_values(p, arch, tile.block_n, tile.block_m),
                   ("kv_starts", "varlen", "mask_mod", "batch_invariant"), 2048, ("transposed V", "transposes V itself"))

def keys_that_some_query_sees(p:Problem) -> int:
  """Returns the number of keys of a head that at least one query sees, if each sequence has the largest length that the problem allows."""
  left, right = p.window
  return p.Sk if left < 0 else min(p.Sk, p.Sq + left + (right if right >= 0 else p.Sk))

def widened_refuses(p:Problem, arch:Chip) -> str|None:
  return WIDEN.refuses(p, arch) if p.stored else "k and v are not stored in 8 bits: there is nothing to convert"

def widened_tile(p:Problem, arch:Chip) -> WgmmaTile: return wgmma_tile(widened_problem(p), arch)

def widened_slower(p:Problem, arch:Chip) -> str|None: return WIDEN.slower(p, widened_tile(p, arch))

def turned_refuses(p:Problem, arch:Chip) -> str|None:
  return TURN.refuses(p, arch) if p.of_8_bits else f"q, k and v are {p.dtype}: V need not be transposed"

def turned_tile(p:Problem, arch:Chip) -> WgmmaTile:
  """Returns the tile description of the attention kernel that reads V as an earlier kernel has transposed it."""
  def tile(row:UpTo[WgmmaShape]) -> WgmmaTile: return WgmmaTile(**vars(row.shape))
  read = turned_problem(p, UNIT_BYTES)     # the room in shared memory depends on whether V is transposed, and not on the size of its tiles
  return next(fitting("turned_wgmma", read, arch, FORWARD_WGMMA_TURNED, tile, burden(p)))

def turned_slower(p:Problem, arch:Chip) -> str|None: return TURN.slower(p, turned_tile(p, arch))
