"""Tile shapes, the sizes by which a kernel divides its work over workgroups and waves, and the classes of the table rows that choose one."""
from __future__ import annotations
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Generic, TypeVar
from attn.chips.matrix import Matrix

# ***** rows *****

# The tile description of a problem (attn/kernels/tiles) is made from a tile shape. A tile description has the sizes of its tile shape, or smaller
# sizes if the problem has few queries or keys, and further fields that depend on the problem.

EVERY = 1000    # number above every release of LLVM: a table row for this release and older ones is for every release

class Burden(IntEnum):
  """How much work a kernel has on each score besides the softmax, from PLAIN (no work) to BIAS (the most registers)."""
  # Each member needs more registers than the one before it. So a kernel with enough registers for one member has enough for all members before it.
  PLAIN = 0
  MASK = 1
  OPTIONS = 2
  ALIBI = 3
  BIAS = 4

# Names in the tables for problems with at most one option, besides those of Problem.options: "" for no option; "window" for no option, but a window
# that hides a query's first keys.
NO_OPTION = ("", "window")
# options for which tiles were searched
NO_BIAS = ("softcap", "alibi", "dropout_p")
ONE_OF_ALL = (*NO_BIAS, "bias")
AT_MOST_ONE = (*NO_OPTION, *ONE_OF_ALL)

AnyShape = TypeVar("AnyShape")

@dataclass(frozen=True)
class UpTo(Generic[AnyShape]):
  """Row of a table of tile shapes: a tile shape, and the problems for which it may be used, e.g. head dimensions up to `up_to`."""
  up_to: int
  shape: AnyShape
  _: KW_ONLY
  matrix: int = 0                  # index of the matrix instruction that the shape uses, among the chip's instructions for the inputs' dtype
  fills: int = 0                   # least number of workgroups: with fewer, a large tile would leave compute units idle
  pages: int = 0                   # if not 0, K and V must lie in pages of at most this many rows
  large: bool = False              # whether there must be a workgroup for every compute unit
  at_once: int = 1                 # workgroups whose LDS must fit a compute unit at the same time
  beyond: int = 0                  # the problem must have more query rows than this, over all heads that share a key/value head
  burden: Burden = Burden.BIAS     # heaviest burden for which the shape has registers
  spills_on: tuple[str, ...] = ()  # chips on which the shape spills registers, whatever the burden
  whole: bool = False              # whether registers are enough only if tensor rows consist of whole 16-byte units and workgroups have all of the
                                   # shape's waves: rows in pieces have more addresses, and with fewer waves each wave loads more
  options: tuple[str, ...] = NO_OPTION    # in a table for problems with at most one option: which options (above)
  llvm: int = EVERY                # newest release of LLVM that the table row is for. Among table rows with the same `up_to`, only those are used
                                   # whose `llvm` is the oldest release that is not older than the compiler

# ***** AMD *****

@dataclass(frozen=True)
class ForwardShape:
  """Tile shape of the forward kernels on AMD's matrix units."""
  waves: int         # waves of a workgroup, each with its own queries
  q_tiles: int       # tiles of a wave, each with matrix.N queries: the tiles share the K and V operands
  block_n: int       # keys of an iteration
  q_in_lds: bool = False       # Q is read from LDS in every iteration instead of being kept in registers
  fenced: bool = False         # matrix work on one K or V tile is done before the next tile is read from LDS: fewer registers
  prefetch: int = 1            # when K and V tiles are loaded. 0: in the iteration that uses them; 1: one iteration earlier; 2: as 1, but to a second
                               # LDS buffer

BOTH = (True, True)     # both tensors of the rows that a workgroup owns are in LDS

@dataclass(frozen=True)
class BackwardShape:
  """Tile shape of the backward kernels on AMD's matrix units, whose workgroups own queries and loop over keys, or own keys and loop over queries."""
  # own rows: queries, or keys
  waves: int         # waves of a workgroup, each with its own rows
  block_n: int       # rows of an iteration
  own_in_lds: tuple[bool, bool] = (False, False)   # Q and dO, or K and V, are read from LDS in every iteration instead of being kept in registers
  fenced: int = 0                                  # work on this many units of a row is done before the next units are read from LDS; 0: no fences
  prefetch: int = 1        # as in ForwardShape
  sparing: bool = False    # own rows, and rows that an iteration loads for itself, come a few units at a time: fewer registers
  passes: int = 1          # passes over the queries. 2: dv first and then dk, each with all registers for itself, and S is computed twice
  by_item: bool = False    # a thread loads one item after another of the rows that a sparing iteration loads for itself: still fewer registers
  turning: bool = False    # columns of tiles are read from LDS by loads that transpose (CDNA4), not from a transposed copy of the tile
  ahead: int = 0           # reads from LDS before the first product, if reads and products alternate (`amd.interleave`); 0: clang orders them
  read_ahead: int = 0      # in a gradient's products, operands of this many tiles are read during the work on a tile before them, in spite of fences

@dataclass(frozen=True)
class ShapeAtOnce:
  """Row of a table of tile shapes: the shape with which one AMD kernel computes dq, dk and dv, and the attention options that it supports."""
  shape: BackwardShape
  # with these options it spills no register in its loops, and is predicted to be faster than two kernels
  options: tuple[str, ...] = ("sinks", "kv_lengths", "alibi", "softcap", "dropout_p")

@dataclass(frozen=True)
class MlaShape:
  """Tile shape of `mla`, the kernel of latent attention on AMD's matrix units."""
  row_tiles: int               # tiles of matrix.N queries of a workgroup, over all heads that share a key/value head
  block_n: int                 # keys of an iteration
  key_parts: int               # parts of an iteration's keys for the scores: this many waves have the same queries, and each has one part of the keys
  q_reloaded: bool = False     # Q is read from memory in every iteration instead of being kept in registers
  fenced: int = 8              # matrix work on this many units of a row is done before the next units are read: fewer registers; 0: no fences
  weight_parts: int = 1        # parts of an iteration's keys: P is read from LDS for one part after another
  prefetch: int = 1            # when K is loaded. 0: in its own iteration; 1: in the iteration before

# ***** NVIDIA *****

@dataclass(frozen=True)
class MmaShape:
  """Tile shape of `forward_mma`, the forward kernel with NVIDIA's mma.sync."""
  q_tiles: int                 # tiles of a warp, each with 16 queries: the tiles share the K and V operands
  block_n: int                 # keys of an iteration
  q_in_lds: bool = False       # Q is read from shared memory in every iteration instead of being kept in registers
  parts: int = 2               # parts of an iteration's keys: P is computed and used for one part after another
  stages: int = 2              # number of K and V tiles in shared memory

@dataclass(frozen=True)
class WgmmaShape:
  """Tile shape of `forward_wgmma`, the forward kernel with Hopper's wgmma."""
  groups: int                  # warpgroups of a block, each with 64 queries
  block_n: int                 # keys of an iteration
  turns: bool = False          # whether warpgroups start their products in turn: one computes weights while another multiplies
  keeps_q: bool = False        # whether registers keep Q, so that products do not read it from shared memory; only for k and v of 8 bits with scales

@dataclass(frozen=True)
class RatedUpTo(UpTo[WgmmaShape]):
  """Row of a table of tile shapes that also has the speed of the wgmma forward kernel with this shape."""
  # number of blocks for which a multiprocessor has enough registers
  resident: int
  # full, causal: TFLOP/s without a mask, and under a causal mask, for a large grid and many keys
  full: int
  causal: int
  # time of a block's work besides its loop over keys (waiting for Q and the first K and V, storing O), as the number of keys over which the block
  # could loop in the same time
  prologue: int
  few_keys: bool = False       # whether the table row is only for problems whose keys all fit into one tile

@dataclass(frozen=True)
class MlaMmaShape:
  """Tile shape of `mla_mma`, the kernel of latent attention with NVIDIA's mma.sync."""
  row_tiles: int               # tiles of 16 queries of a block, over all heads that share a key/value head
  block_n: int                 # keys of an iteration
  key_parts: int               # parts of an iteration's keys for the scores: this many warps have the same queries, and each has one part of the keys
  stages: int = 2              # tiles of K in shared memory

@dataclass(frozen=True)
class MlaWgmmaShape:
  """Tile shape of `mla_wgmma`, the kernel of latent attention with Hopper's wgmma."""
  block_n: int                 # keys of an iteration

@dataclass(frozen=True)
class MmaBackwardShape:
  """Tile shape of the backward kernels with mma.sync, whose blocks own queries and loop over keys, or own keys and loop over queries."""
  row_tiles: int           # tiles of a warp, each with 16 rows: the tiles share the operands that the warp reads
  block_n: int             # rows of an iteration
  part_n: int              # rows of an iteration whose P and dS are computed and used at a time
  waves: int = 4           # warps of a block, each with its own rows
  passes: int = 1          # passes over the queries. 2: dv first and then dk, each with all registers for itself, and S is computed twice

@dataclass(frozen=True)
class WgmmaBackwardShape:
  """Tile shape of the backward kernels with wgmma, whose blocks own queries and loop over keys, or own keys and loop over queries."""
  groups: int              # warpgroups of a block
  block_n: int             # rows of an iteration
  passes: int = 1          # passes over the queries. 2: dv first and then dk, each with all registers for itself, and S is computed twice

@dataclass(frozen=True)
class GradientsUpTo(UpTo[WgmmaBackwardShape]):
  """Row of a table of tile shapes for backward kernels with Hopper's wgmma: a shape, and the problems for which it may be used."""
  _: KW_ONLY
  varied: bool = True            # whether there are registers for a term whose derivative is not 1
  few_queries: int|None = None   # most queries that the table row is for: of one head, or if the kernel owns keys, of all heads that share the keys

# ***** tiles for a family without tables *****

def cautious(mat:Matrix) -> tuple[UpTo[ForwardShape], ...]:
  """Returns forward tile shapes that use as few registers as possible, for a family whose shapes were neither searched nor measured."""
  return (UpTo(256, ForwardShape(4, 1, mat.least_keys, q_in_lds=True, fenced=True, prefetch=0)),)

def cautious_backward(mat:Matrix, keys:bool) -> tuple[UpTo[BackwardShape], ...]:
  """Returns backward tile shapes that use as few registers as possible, for a family without searched shapes. `keys`: workgroups own keys."""
  return (UpTo(256, BackwardShape(2, mat.least_keys, BOTH, fenced=max(1, mat.operand//mat.unit), prefetch=0, sparing=True, passes=1 + keys,
                                  by_item=True)),)

def cautious_latent(mat:Matrix) -> tuple[UpTo[MlaShape], ...]:
  """Returns tile shapes of `mla` that use as few registers as possible, for a family whose shapes were neither searched nor measured."""
  return (UpTo(576, MlaShape(2, 2*mat.least_keys, 2, q_reloaded=True, weight_parts=2, prefetch=0)),)
