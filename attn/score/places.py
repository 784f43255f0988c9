"""Places of queries and keys in their sequences. A place is a number on an axis that queries and keys share: key j stands at place j, and query i at
place i + offset, so that the diagonal joins equal places. `Walk` has the places in a kernel's loop over tiles, `Positions` has them as Tensors."""
from __future__ import annotations
from dataclasses import dataclass, replace
from typing import Any
from attn.problem import Problem
from attn.tinygrad_compat import Tensor, UOp

@dataclass(frozen=True)
class Walk:
  """The rows and columns of a workgroup's loop. The workgroup owns `own` rows, and loops over `count` columns: rows are queries and columns are keys,
  or the reverse. The place of a key is its index. The place of a query is its index plus the offset of the problem. A query and a key with the same
  place meet on the diagonal."""
  p: Problem
  over: str            # "keys" or "queries"
  offset: int|UOp      # from the index of a row to the column where the diagonal meets it
  count: int|UOp
  own: int|UOp
  def place(self, row:Any) -> Any:
    """Returns the place of a row on the axis that queries and keys share: the index of a key, or the index of a query plus the problem's offset."""
    return row + self.offset if self.over == "keys" else row
  def column(self, place:Any) -> Any:
    """Returns the index of the column, a key or a query, that stands at `place`. Key j stands at place j, and query i at place i + offset."""
    return place if self.over == "keys" else place + self.offset
  def diagonal(self, row:UOp) -> UOp:
    """Returns the column where the diagonal meets a row."""
    return row + self.offset

@dataclass(frozen=True)
class Positions:
  """Positions of queries and keys in their sequences, as tensors: the same numbers as the places of `Walk`. `belongs` (bool, broadcastable to (B, 1,
  1, Sq, Sk)) says which keys exist for a query; None: all keys exist. `query` (..., Sq, 1) and `key` (1, Sk) are positions on one axis: under a
  causal mask a query sees the keys up to its own position."""
  belongs: Tensor|None
  query: Tensor
  key: Tensor
  counted: tuple[Tensor, Tensor, Tensor]   # (batch or sequence, query, key) as dropout counts them, broadcastable to (B, 1, 1, Sq, Sk)
  head: Tensor                             # query heads, broadcastable to (Hkv, query heads of each, 1, 1)
  member: Tensor|None = None   # (sequences, Sq): whether a query belongs to a sequence
  def counted_from(self, first:Tensor) -> Positions:
    """Returns these positions for a piece of a larger problem: batches are counted from `first[0]` on, and heads from `first[1]` on."""
    batch, query, key = self.counted
    return replace(self, counted=(batch + first[0], query, key), head=self.head + first[1])
  @property
  def place_of_key(self) -> Tensor:
    """Index of a key in its sequence, counted from the sequence's first key."""
    return self.counted[2]
  @property
  def place_of_query(self) -> Tensor:
    """Place of a query in its sequence, on the axis where key 0 of the sequence has place 0."""
    return self.query - (self.key - self.counted[2])[..., :1]
