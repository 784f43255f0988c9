"""Rows of the tables of tiles: the shapes that a kernel's tile may have, and for which problems each of them is.

A shape is the numbers by which a kernel divides its work, whatever the problem. The tile that a problem gets (attn/kernels/tiles) is of the same
numbers, fewer where the problem has no more rows, and of what the problem adds.
"""
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Generic, TypeVar
from attn.chips.matrix import Matrix

# ***** rows *****

EVERY = 1000    # a release of LLVM that is newer than all: what is for it and older ones is for every release

class Burden(IntEnum):
  """Things that the loop of a problem needs registers for, besides its matrix tiles: one more thing from each to the next."""
  PLAIN = 0
  MASK = 1
  OPTIONS = 2
  ALIBI = 3
  BIAS = 4

AnyShape = TypeVar("AnyShape")

@dataclass(frozen=True)
class UpTo(Generic[AnyShape]):
  """Row of a table: a shape for head dimensions up to `up_to`, where the conditions hold that the row names."""
  up_to: int
  shape: AnyShape
  _: KW_ONLY
  matrix: int = 0                  # which of a chip's matrix instructions for the inputs' dtype it is a shape of, by number
  fills: int = 0                   # workgroups there must be at least, lest a large tile leave compute units idle
  large: bool = False              # so many that every compute unit has one
  beyond: int = 0                  # rows of queries, of the heads that share a key/value head, that there must be more of
  burden: Burden = Burden.BIAS     # the heaviest for which it has registers
  spills_on: tuple[str, ...] = ()  # chips on which it has not
  whole: bool = False              # it has them for rows of whole units and workgroups of all its waves only: rows in pieces have more addresses, and
                                   # fewer waves load as much
  llvm: int = EVERY                # the newest release of LLVM that it is for: of a class those rows count that have the least such number for the
                                   # compiler

# ***** AMD *****

@dataclass(frozen=True)
class ForwardShape:
  """Shape of a tile of the forward kernels on AMD's matrix units."""
  waves: int         # waves of a workgroup, each with its own queries
  q_tiles: int       # tiles of matrix.N queries of a wave: they share the K and V operands
  block_n: int       # keys of a trip
  q_in_lds: bool = False       # Q is read from LDS in every trip instead of being kept in registers
  fenced: bool = False         # matrix work on one K or V tile is done before the next one is read from LDS: fewer registers
  prefetch: int = 1            # K and V tiles are loaded 0: for their own trip, 1: during the one before, 2: so, and stored to a second buffer in LDS

BOTH = (True, True)     # of own rows in LDS

@dataclass(frozen=True)
class BackwardShape:
  """Shape of a tile of a backward kernel on AMD's matrix units."""
  waves: int         # waves of a workgroup, each with its own rows
  block_n: int       # rows of a trip
  own_in_lds: tuple[bool, bool] = (False, False)   # Q and dO, or K and V, are read from LDS in every trip instead of being kept in registers
  fenced: int = 0                                  # work on so many units of a row is done before the next ones are read from LDS; 0: no fences
  prefetch: int = 1
  sparing: bool = False    # what is waited for comes a few units at a time, own rows and what a trip loads for itself: fewer registers
  passes: int = 1          # over the queries: 2 for dv first and then dk, each with all registers for itself, and S twice
  by_item: bool = False    # of what a sparing trip loads for itself a thread takes one item after another: fewer registers still
  read_ahead: int = 0      # of a gradient's products operands of so many tiles are read while one before them is worked on, in spite of fences

@dataclass(frozen=True)
class MlaShape:
  """Shape of a tile of mla."""
  row_tiles: int               # of matrix.N queries of a workgroup, those of all heads that share a key/value head
  block_n: int                 # keys of a trip
  key_parts: int               # into which they are divided for the scores: so many waves have the same queries
  q_anew: bool = False         # Q is read from memory in every trip instead of being kept in registers
  fenced: int = 8              # matrix work on so many units of a row is done before the next ones are read: fewer registers; 0: no fences
  weight_parts: int = 1        # of a trip's keys, whose P is read from LDS by turns
  prefetch: int = 1            # K is loaded 0: for its own trip, 1: during the one before

# ***** NVIDIA *****

@dataclass(frozen=True)
class MmaShape:
  """Shape of a tile of forward_mma."""
  q_tiles: int                 # tiles of 16 queries of a warp: they share the K and V operands
  block_n: int                 # keys of a trip
  q_in_lds: bool = False       # Q is read from shared memory in every trip instead of being kept in registers
  parts: int = 2               # of a trip's keys, whose P is computed and used by turns
  stages: int = 2              # K and V tiles in shared memory

@dataclass(frozen=True)
class WgmmaShape:
  """Shape of a tile of forward_wgmma."""
  groups: int                  # warpgroups of a block, each with 64 queries
  block_n: int                 # keys of a trip

@dataclass(frozen=True)
class RatedUpTo(UpTo[WgmmaShape]):
  """A row that also says how fast the tile is: TFLOP/s with a large grid and many keys, without and with a causal mask. A multiprocessor has
  registers for `resident` blocks. A block's work besides its trips (waiting for Q and its first K and V, storing O) takes as long as `prologue`
  keys."""
  resident: int
  full: int
  causal: int
  prologue: int
  few_keys: bool = False       # for problems whose keys all fit into it

@dataclass(frozen=True)
class MlaMmaShape:
  """Shape of a tile of mla_mma."""
  row_tiles: int               # of 16 queries of a block, those of all heads that share a key/value head
  block_n: int                 # keys of a trip
  key_parts: int               # into which they are divided for the scores: so many warps have the same queries

@dataclass(frozen=True)
class MmaBackwardShape:
  """Shape of a tile of a backward kernel on mma.sync."""
  row_tiles: int           # tiles of 16 rows of a warp: they share the operands that it reads
  block_n: int             # rows of a trip
  part_n: int              # of them those whose P and dS are computed and used at a time
  waves: int = 4           # warps of a block, each with its own rows
  passes: int = 1          # over the queries: 2 for dv first and then dk, each with all registers for itself, and S twice

@dataclass(frozen=True)
class WgmmaBackwardShape:
  """Shape of a tile of a backward kernel on wgmma."""
  groups: int              # warpgroups of a block
  block_n: int             # rows of a trip
  passes: int = 1          # over the queries: 2 for dv first and then dk, each with all registers for itself, and S twice

@dataclass(frozen=True)
class GradientsUpTo(UpTo[WgmmaBackwardShape]):
  """A row with conditions that only gradients have."""
  _: KW_ONLY
  varied: bool = True            # whether there are registers for the derivative of a term that is not 1
  few_queries: int|None = None   # for at most so many: of one head, or where keys are owned of all heads that share them

# ***** of a family that has no tiles yet: the fewest registers that a kernel gets by with *****

def cautious(mat:Matrix) -> tuple[UpTo[ForwardShape], ...]:
  """Rows for forward of a family without a table, for its preferred matrix instruction."""
  return (UpTo(256, ForwardShape(4, 1, mat.least_keys, q_in_lds=True, fenced=True, prefetch=0)),)

def cautious_backward(mat:Matrix, keys:bool) -> tuple[UpTo[BackwardShape], ...]:
  """Rows for a backward kernel of a family without a table; the kernel owns queries, or `keys`."""
  return (UpTo(256, BackwardShape(2, mat.least_keys, BOTH, fenced=max(1, mat.operand//mat.unit), prefetch=0, sparing=True, passes=1 + keys,
                                  by_item=True)),)

def cautious_latent(mat:Matrix) -> tuple[UpTo[MlaShape], ...]:
  """Rows for mla of a family without a table."""
  return (UpTo(576, MlaShape(2, 2*mat.least_keys, 2, q_anew=True, weight_parts=2, prefetch=0)),)
