"""Rows of the tables of tiles: shapes worth trying, and what they are for."""
from __future__ import annotations
from dataclasses import dataclass
from enum import IntEnum
from attn.chips.matrix import Matrix

EVERY = 1000    # a release of LLVM that is newer than all: what is for it and older ones is for every release

@dataclass(frozen=True)
class Candidate:
  """A tile of the AMD kernel for head dimensions up to `up_to`."""
  up_to: int
  waves: int
  q_tiles: int
  block_n: int
  q_in_lds: bool = False
  fenced: bool = False
  prefetch: int = 1
  matrix: int = 0        # index into Chip.matrix of the dtype
  fills: int = 0         # workgroups there must be at least, lest a large tile leave compute units idle
  llvm: int = EVERY      # the newest release of LLVM that it is for: of a class those rows count that have the least such number for the compiler

BOTH = (True, True)     # of own rows in LDS

@dataclass(frozen=True)
class BackwardCandidate:
  """A tile of a backward kernel for head dimensions up to `up_to`; the fields are those of BackwardTile, but for `whole`: it has the registers for
  rows of whole units and workgroups of all its waves only. Rows in pieces have more addresses, and fewer waves load as much."""
  up_to: int
  waves: int
  block_n: int
  own_in_lds: tuple[bool, bool] = (False, False)
  fenced: int = 0
  prefetch: int = 1
  sparing: bool = False
  passes: int = 1
  matrix: int = 0        # index into Chip.matrix of the dtype
  by_item: bool = False
  read_ahead: int = 0
  whole: bool = False

class Burden(IntEnum):
  """What the loop of a problem needs registers for, besides its matrix tiles: one more thing from each to the next."""
  PLAIN = 0
  MASK = 1
  OPTIONS = 2
  ALIBI = 3
  BIAS = 4

@dataclass(frozen=True)
class MmaCandidate:
  """A tile of forward_mma for head dimensions up to `up_to` and a burden of at most `burden`, beyond which it spills registers, and, where it is
  `large`, grids of at least one block per multiprocessor."""
  up_to: int
  q_tiles: int
  block_n: int
  q_in_lds: bool
  burden: Burden = Burden.BIAS
  large: bool = False
  parts: int = 2

@dataclass(frozen=True)
class FewQueries:
  """A tile of forward_mma for head dimensions up to `up_to` where queries fill half of a block's warps at most: the warps share out the keys."""
  up_to: int
  block_n: int
  stages: int

@dataclass(frozen=True)
class WgmmaCandidate:
  """A tile of forward_wgmma for head dimensions up to `up_to`: warpgroups and keys, of how many blocks a multiprocessor has the registers, and
  TFLOP/s with a large grid and many keys, without and with a causal mask. What a block does besides its trips (waits for Q and its first K and V,
  stores O) takes as long as `prologue` keys. One that is for `few` keys takes problems whose keys all fit into it."""
  up_to: int
  groups: int
  block_n: int
  resident: int
  full: int
  causal: int
  prologue: int
  few: bool = False

@dataclass(frozen=True)
class MlaCandidate:
  """A tile of mla for problems of more than `beyond` rows, queries times heads that share a key/value head; the other fields are those of MlaTile."""
  beyond: int
  matrix: int        # index into Chip.matrix of the dtype
  row_tiles: int
  block_n: int
  key_parts: int
  q_anew: bool = False
  fenced: int = 8
  weight_parts: int = 1
  prefetch: int = 1

@dataclass(frozen=True)
class MlaMmaCandidate:
  """A tile of mla_mma for problems of more than `beyond` rows; the other fields are those of MlaMmaTile."""
  beyond: int
  row_tiles: int
  block_n: int
  key_parts: int

@dataclass(frozen=True)
class MmaBackwardCandidate:
  """A tile of a backward kernel on mma.sync for head dimensions up to `up_to` and a burden of at most `burden`, beyond which it spills registers, as
  it does on the chips `spills_on`; the other fields are those of MmaBackwardTile."""
  up_to: int
  row_tiles: int
  block_n: int
  part_n: int
  waves: int = 4
  passes: int = 1
  burden: Burden = Burden.BIAS
  spills_on: tuple[str, ...] = ()

@dataclass(frozen=True)
class WgmmaBackwardCandidate:
  """A tile of a backward kernel on wgmma for head dimensions up to `up_to`; the other fields are those of WgmmaBackwardTile, measured on an H200
  (docs/nvidia.md)."""
  up_to: int
  groups: int
  block_n: int
  passes: int = 1
  varied: bool = True      # whether there are registers for the derivative of a term that is not 1
  few: int|None = None     # for at most so many queries: of one head, or where keys are owned of all heads that share them

# ***** of a family that has no tiles yet: the fewest registers that a kernel gets by with *****

def cautious(mat:Matrix) -> tuple[Candidate, ...]:
  """Tiles to try for forward of a family without a table, for its preferred matrix instruction."""
  return (Candidate(256, 4, 1, mat.least_keys, q_in_lds=True, fenced=True, prefetch=0),)

def cautious_backward(mat:Matrix, keys:bool) -> tuple[BackwardCandidate, ...]:
  """Tiles to try for a backward kernel of a family without a table; the kernel owns queries, or `keys`."""
  return (BackwardCandidate(256, 2, mat.least_keys, BOTH, fenced=max(1, mat.operand//mat.unit), prefetch=0, sparing=True, passes=1 + keys,
                            by_item=True),)

def cautious_latent(mat:Matrix) -> tuple[MlaCandidate, ...]:
  """Tiles to try for mla of a family without a table."""
  return (MlaCandidate(0, 0, 2, 2*mat.least_keys, 2, q_anew=True, weight_parts=2, prefetch=0),)
