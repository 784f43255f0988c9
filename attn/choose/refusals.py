"""Reasons why kernels refuse problems: the chip lacks the matrix unit that a kernel needs, or no kernel for this unit can compute the problem."""
from __future__ import annotations
from collections.abc import Sequence
from dataclasses import dataclass
from attn.chips import CHIPS, FAMILIES, Chip
from attn.chips.matrix import MMA, MMA_OF_8_BITS, UNIT_BYTES
from attn.kernels.parts.grid.tensors import too_wide
from attn.kernels.plain.rectangle import serial_items
from attn.problem import OF_8_BITS, Problem

MATRIX_DTYPES = ("float16", "bfloat16")
WITH_TILES = [name for name, family in FAMILIES.items() if family.matrix]

# The functions like this one for other kernels return a text that says what the chip lacks.
def lacks_nothing(arch:Chip) -> None:
  """Returns None: kernels without matrix instructions run on every chip."""

def no_tiles(arch:Chip) -> str|None:
  return None if arch.matrix else f"{arch.name}: AMD's kernels have no tile for its matrix unit; they have some for {', '.join(WITH_TILES)}"

def no_mma(arch:Chip) -> str|None: return None if arch.unit.mma else f"{arch.name} has no mma.sync"

def no_wgmma(arch:Chip) -> str|None: return None if arch.wgmma else f"{arch.name} has no wgmma"

def no_latent_tiles(arch:Chip) -> str|None:
  return None if arch.matrix else f"{arch.name}: it has tiles for {', '.join(WITH_TILES)}"

ABLE_WITH_8_BITS = "kernels for them: " + ", ".join(
  f"{name} ({chip.fp8})" for name, chip in CHIPS.items() if chip.fp8 in chip.matrix or chip.fp8 in MMA_OF_8_BITS)

NO_UNIT = f"none of the kernels runs on this device; they know {', '.join(CHIPS)}, and tiled also OpenCL, Metal and a CPU"

CONVERTED = ("int8", "fp8e4m3", "fp8e4m3fnuz")     # formats of stored rows that kernels convert: int8 on every chip, a chip's own floats on this chip

def unconverted(p:Problem, arch:Chip) -> str|None:
  """Returns why no kernel on the chip can read K and V in the 8-bit format in which they are stored, or None if some kernel can."""
  able = [x for x in CONVERTED if x in ("int8", arch.fp8)]
  return f"stored={p.stored!r}: {arch.name} converts {' and '.join(able)}" if p.stored not in ("", *able) else None

def bits_refused(p:Problem, arch:Chip, able:bool) -> str|None:
  """Returns why no kernel can multiply q, k and v of 8-bit floats, or None if some kernel can; `able`: the chip has kernels for its 8-bit floats."""
  # A chip has one format of 8-bit floats. `able` says whether there is a kernel that multiplies numbers of this format.
  if not p.of_8_bits or (able and p.dtype == arch.fp8): return None
  if able: return f"q, k and v are {p.dtype}: the 8-bit floats of {arch.name} are {arch.fp8}"
  return f"q, k and v are {p.dtype}: {arch.name} multiplies no 8-bit floats; {ABLE_WITH_8_BITS}. Convert them to bfloat16"

def latent_of_8_bits(p:Problem) -> str|None:
  return f"stored={p.stored!r} with v_dim: the kernels for latent attention read such a cache" if p.stored and p.v_in_k else None
def torn_rows(p:Problem, unit:int) -> str|None:
  """Returns why rows of q, k or v cannot be read 16 bytes (`unit` elements) at a time, or None if D and Dv are multiples of `unit`."""
  found = [f"{name}={width}: must be a multiple of {unit}" for name, width in (("D", p.D), ("Dv", p.Dv)) if width % unit]
  return found[0] if found else None

def torn_views(p:Problem, unit:int) -> str|None:
  """Returns why rows of the view k or v cannot be read 16 bytes (`unit` elements) at a time, or None if each row begins at a multiple of 16 bytes."""
  found = [(name, view) for name, view in (("k", p.k_view), ("v", p.v_view)) if view is not None and not view.whole(unit)]
  return f"{found[0][0]} is a view, {found[0][1]}: its start and strides must be multiples of {unit} elements" if found else None

def amd_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := bits_refused(p, arch, arch.fp8 in arch.matrix)) is not None: return reason
  if p.of_8_bits and (reason := torn_rows(p, arch.matrix[p.dtype][0].unit)) is not None: return reason
  if p.dtype not in (*MATRIX_DTYPES, *OF_8_BITS): return f"dtype {p.dtype}: the matrix instructions take {' and '.join(MATRIX_DTYPES)}"
  return unconverted(p, arch) or latent_of_8_bits(p) or too_wide(p)

def mma_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := bits_refused(p, arch, arch.fp8 in MMA_OF_8_BITS)) is not None: return reason
  if p.dtype not in MMA | MMA_OF_8_BITS: return f"dtype {p.dtype}: mma.sync takes {' and '.join(MMA)}"
  return unconverted(p, arch) or latent_of_8_bits(p) or too_wide(p)

def wgmma_refuses(p:Problem, arch:Chip) -> str|None:
  if (reason := bits_refused(p, arch, True)) is not None: return reason
  if p.dtype not in MMA | MMA_OF_8_BITS: return f"dtype {p.dtype}: wgmma takes {' and '.join(MMA)}"
  unit = UNIT_BYTES//p.key_itemsize
  return unconverted(p, arch) or latent_of_8_bits(p) or too_wide(p) or torn_rows(p, unit) or torn_views(p, unit)

MOST_PARTS = 8192    # half of the commands that tinygrad's queue for a CPU holds

def too_many_parts(p:Problem, arch:Chip, blocks:int, heads:int) -> str|None:
  """Returns why a device that runs one workgroup after another, such as a CPU, cannot run so many blocks of queries or keys; None if the device
  can."""
  # Each block is a command in tinygrad's queue, which has limited room. `blocks` counts for each head, `heads` in all batches.
  if (parts := serial_items(p, blocks, heads)[0]) <= MOST_PARTS: return None
  return f"{parts} blocks of rows: {arch.name} takes at most {MOST_PARTS}, because tinygrad gives each its own command"

@dataclass(frozen=True)
class Refusal:
  """Reason why a kernel cannot compute a problem, and facts by which the reason that helps a user most is found."""
  present: bool     # whether the chip has the kernel's unit
  general: bool     # as in `dispatch.ForwardKernel`
  reason: str

def most_telling(refusals:Sequence[Refusal]) -> str:
  """Returns the reason, out of those in `refusals`, that helps a user most."""
  # Best is the reason of a kernel whose matrix unit the chip has, and which takes every problem that this unit can compute.
  return max(refusals, key=lambda x: (x.present, x.general)).reason
