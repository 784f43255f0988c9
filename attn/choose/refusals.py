"""Why a chip lacks what a kernel is made of, and what every kernel of a matrix unit refuses on a chip that has it."""
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from attn.chips import CHIPS, FAMILIES, Chip
from attn.chips.matrix import MMA
from attn.kernels.parts.grid.tensors import too_wide
from attn.kernels.plain.rectangle import serial_items
from attn.problem import Problem

MATRIX_DTYPES = ("float16", "bfloat16")
WITH_TILES = [name for name, family in FAMILIES.items() if family.matrix]

def lacks_nothing(arch:Chip) -> None:
  """Reason of a kernel of plain UOps, which every chip runs: none."""

def no_tiles(arch:Chip) -> str|None:
  return None if arch.matrix else f"{arch.name}: AMD's kernels have no tile for its matrix unit; they have some for {', '.join(WITH_TILES)}"

def no_mma(arch:Chip) -> str|None: return None if arch.unit.mma else f"{arch.name} has no mma.sync"

def no_wgmma(arch:Chip) -> str|None: return None if arch.wgmma else f"{arch.name} has no wgmma"

def no_latent_tiles(arch:Chip) -> str|None:
  return None if arch.matrix else f"{arch.name}: it has tiles for {', '.join(WITH_TILES)}"

NO_UNIT = f"none of the kernels runs on this device; they know {', '.join(CHIPS)}, and tiled also OpenCL, Metal and a CPU"

def amd_refuses(p:Problem, arch:Chip) -> str|None:
  if p.dtype not in MATRIX_DTYPES: return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MATRIX_DTYPES)}"
  return too_wide(p)

def mma_refuses(p:Problem, arch:Chip) -> str|None:
  if p.dtype not in MMA: return f"dtype {p.dtype}: mma.sync takes {' and '.join(MMA)}"
  return too_wide(p)

def wgmma_refuses(p:Problem, arch:Chip) -> str|None:
  if p.dtype not in MMA: return f"dtype {p.dtype}: wgmma takes {' and '.join(MMA)}"
  if (reason := too_wide(p)) is not None: return reason
  for name, width in (("D", p.D), ("Dv", p.Dv)):
    if width % (unit := MMA[p.dtype].unit): return f"{name}={width}: rows are copied by {unit} elements"
  for name, view in (("k", p.k_view), ("v", p.v_view)):
    if view is not None and not view.whole(unit): return f"{name} lies as {view} says: rows are copied by {unit} elements, from a multiple of them on"
  return None

MOST_PARTS = 8192    # half of what tinygrad's queue of commands for a CPU holds

def too_many_parts(p:Problem, arch:Chip, blocks:int, heads:int) -> str|None:
  """Why a device without workgroups does not take so many blocks of rows of so many heads, over batches, or None."""
  if (parts := serial_items(p, blocks, heads)[0]) <= MOST_PARTS: return None
  return f"{parts} blocks of rows: {arch.name} takes {MOST_PARTS} at most, which tinygrad tells it one by one"

@dataclass(frozen=True)
class Refusal:
  """Why a kernel does not take a problem."""
  present: bool     # the chip has what the kernel is made of
  general: bool     # of ForwardKernel
  reason: str

def most_telling(refusals:Sequence[Refusal]) -> str:
  """The reason of one of several kernels: of a general one made of what the chip has, if there is one."""
  return max(refusals, key=lambda x: (x.present, x.general)).reason
