"""What every tile says, and what follows from it for any kernel; what tiles share whose waves share rows."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Protocol
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.program.counts import ceildiv
from attn.problem import Problem
from attn.tinygrad_compat import UOp

class BlockTile(Protocol):
  """What a kernel's tile says of how its workgroups divide the work."""
  @property
  def block_m(self) -> int: """Queries of a workgroup, times the heads that share its rows."""
  @property
  def block_n(self) -> int: """Keys of a trip."""
  @property
  def waves(self) -> int: """Waves (on NVIDIA warps) of a workgroup."""
  @property
  def threads(self) -> int: """Threads of a workgroup."""
  @property
  def pack_gqa(self) -> bool: """Whether a tile's rows are the queries of all the heads that share a key/value head."""
  def lds_bytes(self, p:Problem) -> int: """LDS that a workgroup takes."""

def heads_of(p:Problem, tile:BlockTile) -> int:
  """Query heads of a workgroup: row r of its block is query r//heads of head r%heads."""
  return p.H//p.Hkv if tile.pack_gqa else 1

def blocks_of_queries(p:Problem, tile:BlockTile) -> tuple[int, int]:
  """(pieces, workgroups for each of them) of the queries of a head, or of as many heads as a workgroup takes. Where a device holds a piece from the
  front of a sequence and one from the back (`DealtRows`) none has rows of both: it would walk over keys which the first ones don't see."""
  pieces = 1 if p.dealt is None or not p.dealt.front else 2
  return pieces, ceildiv(p.Sq//pieces*heads_of(p, tile), tile.block_m)

def numbers_of_queries(p:Problem) -> tuple[str, ...]:
  """The tensors that have the numbers of each query which kernels that own keys bring to shared memory."""
  return ("lse", "delta", *["lse_rest"]*p.wide_scores)

def units_of_numbers(p:Problem, queries:int) -> int:
  """The units that the numbers of so many queries take there."""
  return len(numbers_of_queries(p))*4*queries//UNIT_BYTES

@dataclass(frozen=True)
class Told:
  """The numbers of a row that waves tell each other: by which factor what was accumulated of it is to be multiplied, its largest score among each of
  `parts` of the keys, and at the end its reference and the sums of P over each part, of `kinds` kinds."""
  parts: int
  kinds: int
  factor: int = 0
  reference: int = 1
  @property
  def count(self) -> int: return 2 + self.parts*(1 + self.kinds)
  def units(self, rows:int) -> int:
    """What those of so many rows take in LDS, in fp32."""
    return ceildiv(rows*self.count, 4)
  def top(self, part:int|UOp) -> int|UOp: return 2 + part
  def total(self, kind:int, part:int|UOp) -> int|UOp: return 2 + (1 + kind)*self.parts + part

class SharingTile:
  """A tile of a kernel whose waves share rows: of the queries of all heads that share a key/value head, and of a trip's keys."""
  matrix: Any
  row_tiles: int
  key_parts: int
  @property
  def waves(self) -> int: return self.row_tiles*self.key_parts
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def pack_gqa(self) -> bool: return True
  def told(self, p:Problem) -> Told: return Told(self.key_parts, 1 + p.writes_lse)
