"""Places of queries and keys in their sequences: numbers on an axis that queries and keys share. Key j stands at place j, and query i at place i +
offset, so that the diagonal joins equal places."""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Any
from attn.problem import Problem
from attn.tinygrad_compat import Tensor, UOp

@dataclass(frozen=True)
class Walk:
  """How a workgroup goes through the score matrix: it owns rows and loops over columns. If `over` is "keys", columns are keys and rows are queries;
  otherwise the reverse."""
  p: Problem
  over: str            # "keys" or "queries"
  offset: int|UOp      # from the index of a row to the column where the diagonal meets it
  count: int|UOp  # columns
  own: int|UOp  # rows
  def place(self, row:Any) -> Any:
    """Returns the position of a row of the score matrix on the axis that queries and keys share."""
    return row + self.offset if self.over == "keys" else row
  def column(self, place:Any) -> Any:
    """Returns the index of the column, a key or a query, whose position is `place`."""
    return place if self.over == "keys" else place + self.offset
  def diagonal(self, row:UOp) -> UOp:
    """Returns the column whose position equals that of a row: there the diagonal of the score matrix crosses the row."""
    return row + self.offset

@dataclass(frozen=True)
class Positions:
  """Positions of queries and keys in their sequences, as tensors."""
  # Which keys exist for a query: bool, broadcastable to (B, 1, 1, Sq, Sk); None: all keys exist. `query` (..., Sq, 1) and `key` (1, Sk) are positions
  # on one axis: under a causal mask a query sees the keys up to its own position.
  belongs: Tensor|None
  query: Tensor
  key: Tensor
  counted: tuple[Tensor, Tensor, Tensor]   # (batch or sequence, query, key) as dropout counts them, broadcastable to (B, 1, 1, Sq, Sk)
  head: Tensor                             # query heads, broadcastable to (Hkv, query heads of each, 1, 1)
  member: Tensor|None = None   # (sequences, Sq): whether a query belongs to a sequence
  def counted_from(self, first:Tensor) -> Positions:
    """Returns positions in which batches and heads count from `first`, (first batch, first head), for one device's part of a larger problem."""
    batch, query, key = self.counted
    return replace(self, counted=(batch + first[0], query, key), head=self.head + first[1])
  @property
  def place_of_key(self) -> Tensor:
    """Index of a key in its sequence, counted from the sequence's first key."""
    return self.counted[2]
  @property
  def place_of_query(self) -> Tensor:
    """Position of a query on the axis where key 0 of its sequence has position 0."""
    return self.query - (self.key - self.counted[2])[..., :1]
