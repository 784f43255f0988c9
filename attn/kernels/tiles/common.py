"""What the tile descriptions of all kernels have in common: the rows that a workgroup owns and loops over, and sizes that follow from them."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Protocol
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.program.counts import ceildiv
from attn.problem import Problem
from attn.tinygrad_compat import UOp

QUERIES_OF_SUMS = 64      # queries of a tile of dQ's fp32 accumulator
OF_QUERIES, OF_KEYS = ("q", "do"), ("k", "v")            # tensors by rows of queries and of keys: the first of each makes scores, the second dP
TURNS_OF_SUMS = 8         # counters of turns for each tile of dQ's fp32 accumulator
TILES_OF_TURN = 2         # neighbouring tiles of queries for which a workgroup has a turn to add to dQ

class BlockTile(Protocol):
  """Properties that the tile description of every kernel has."""
  @property
  def block_m(self) -> int: """Number of rows that a workgroup owns."""
  @property
  def block_n(self) -> int: """Number of keys in a tile of the loop over keys, or of queries in a tile of the loop over queries."""
  @property
  def waves(self) -> int: """Number of waves (on NVIDIA: warps) in a workgroup."""
  @property
  def threads(self) -> int: ...
  @property
  def pack_gqa(self) -> bool:
    """Whether the rows of a workgroup belong to all query heads that share a key/value head: for each query, one row from each head."""
  def lds_bytes(self, p:Problem) -> int: ...

def heads_of(p:Problem, tile:BlockTile) -> int:
  """Returns the number of query heads that a workgroup computes."""
  # if there are several, the workgroup's rows alternate between the heads: row r belongs to query r//heads of head r%heads
  return p.H//p.Hkv if tile.pack_gqa else 1

def blocks_of_queries(p:Problem, tile:BlockTile) -> tuple[int, int]:
  """Returns (pieces into which the queries of a head are divided, workgroups for each piece): 2 pieces in the order "zigzag", otherwise 1."""
  # There are two pieces if a device holds two pieces of a sequence: one from its front and one from its back (`DealtRows`). No workgroup has rows of
  # both pieces, because rows from the back see many keys that rows from the front do not see.
  pieces = 1 if p.dealt is None or not p.dealt.front else 2
  return pieces, ceildiv(p.Sq//pieces*heads_of(p, tile), tile.block_m)

def query_value_names(p:Problem) -> tuple[str, ...]:
  """Returns the names of the tensors that have one number for each query: lse, delta and, with wide scores, lse_rest."""
  # lse_rest: the part of lse that rounding to fp32 lost; a kernel whose workgroups own keys copies these numbers to shared memory
  return ("lse", "delta", *["lse_rest"]*p.wide_scores)

def units_of_query_values(p:Problem, queries:int) -> int:
  """Returns the number of 16-byte units of shared memory that lse, delta (and lse_rest) of `queries` queries take."""
  return len(query_value_names(p))*4*queries//UNIT_BYTES

@dataclass(frozen=True)
class ScalarPlaces:
  """Indices, in a table in LDS, of the fp32 numbers (m, maxima, sums of P) of a row. Waves exchange these numbers through the table."""
  parts: int           # parts of a tile's keys
  kinds: int           # number of sums of P: of P as rounded to 16 bits and, if lse is written, of P before rounding
  factor: int = 0      # the number that rescales O after an iteration
  reference: int = 1   # the number that the softmax subtracts from the row's scores, after the last iteration
  @property
  def count(self) -> int: return 2 + self.parts*(1 + self.kinds)
  def units(self, rows:int) -> int:
    """Returns the number of 16-byte units of LDS that the table takes for `rows` rows."""
    return ceildiv(rows*self.count, 4)
  # the largest score of a part in an iteration
  def top(self, part:int|UOp) -> int|UOp: return 2 + part
  # a part's sum of P after the last iteration
  def total(self, kind:int, part:int|UOp) -> int|UOp: return 2 + (1 + kind)*self.parts + part

class SharingTile:
  """Base class for tile descriptions of latent attention, in which waves divide both the queries and the keys of a tile."""
  # The rows are the queries of all heads that share a key/value head. In each iteration a wave computes the scores of one of `row_tiles` matrix tiles
  # of rows with one of `key_parts` parts of the keys.
  matrix: Any
  row_tiles: int
  key_parts: int
  @property
  def waves(self) -> int: return self.row_tiles*self.key_parts
  @property
  def threads(self) -> int: return self.waves*self.matrix.wave
  @property
  def pack_gqa(self) -> bool: return True
  def scalar_places(self, p:Problem) -> ScalarPlaces: return ScalarPlaces(self.key_parts, 1 + p.writes_lse)
