"""What every tile says, what follows from that for any kernel, and what tiles share whose waves share rows."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Protocol
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.program.counts import ceildiv
from attn.problem import Problem
from attn.tinygrad_compat import UOp

class BlockTile(Protocol):
  """What the tile of any kernel says about the division of the work over workgroups."""
  @property
  def block_m(self) -> int: """Rows of a workgroup. A query has one row for each head that the workgroup takes."""
  @property
  def block_n(self) -> int: """Keys of a trip."""
  @property
  def waves(self) -> int: """Waves (on NVIDIA warps) of a workgroup."""
  @property
  def threads(self) -> int: """Threads of a workgroup."""
  @property
  def pack_gqa(self) -> bool: """Whether the rows of a tile are the queries of all heads that share a key/value head."""
  def lds_bytes(self, p:Problem) -> int: """Bytes of LDS that a workgroup takes."""

def heads_of(p:Problem, tile:BlockTile) -> int:
  """Number of query heads of a workgroup: row r of its block is query r//heads of head r%heads."""
  return p.H//p.Hkv if tile.pack_gqa else 1

def blocks_of_queries(p:Problem, tile:BlockTile) -> tuple[int, int]:
  """(pieces, workgroups for each piece) of the queries of a head, or of all heads that a workgroup takes together. A device may hold a piece from the
  front of a sequence and one from the back (`DealtRows`). Then no workgroup has rows of both: it would walk over keys that the front rows don't
  see."""
  pieces = 1 if p.dealt is None or not p.dealt.front else 2
  return pieces, ceildiv(p.Sq//pieces*heads_of(p, tile), tile.block_m)

def numbers_of_queries(p:Problem) -> tuple[str, ...]:
  """Names of the tensors, with one number for each query, that kernels bring to shared memory if they own keys."""
  return ("lse", "delta", *["lse_rest"]*p.wide_scores)

def units_of_numbers(p:Problem, queries:int) -> int:
  """Units of shared memory that the numbers of `queries` queries take."""
  return len(numbers_of_queries(p))*4*queries//UNIT_BYTES

@dataclass(frozen=True)
class Told:
  """Places of the numbers that waves tell each other about a row. They are: the factor that rescales what is accumulated so far; for each of `parts`
  parts of the keys the row's largest score; and at the end its reference and, for each part, the sums of P, of which there are `kinds` kinds."""
  parts: int
  kinds: int
  factor: int = 0
  reference: int = 1
  @property
  def count(self) -> int: return 2 + self.parts*(1 + self.kinds)
  def units(self, rows:int) -> int:
    """Units of LDS that the numbers of `rows` rows take, in fp32."""
    return ceildiv(rows*self.count, 4)
  def top(self, part:int|UOp) -> int|UOp: return 2 + part
  def total(self, kind:int, part:int|UOp) -> int|UOp: return 2 + (1 + kind)*self.parts + part

class SharingTile:
  """A tile of a kernel whose waves share rows. The rows are the queries of all heads that share a key/value head. The waves share a trip's keys,
  too."""
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
