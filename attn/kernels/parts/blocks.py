"""Which rows and keys there are, and which key tiles a block of queries walks over: those that some mask touches, and those that none does."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Mapping
from attn.kernels.parts.rows import flat
from attn.ops import common as ops
from attn.problem import Problem
from attn.tinygrad_compat import UOp, dtypes

def run_time(x:UOp, low:int, high:int) -> UOp:
  """A number that is loaded, the same in the whole workgroup: as an index, held within `low`..`high` so that no access can leave a buffer."""
  return ops.uniform(x).cast(dtypes.weakint).maximum(low).minimum(high)

def trip_count(n:UOp) -> UOp|None:
  """How often a loop runs, None where it never does. Into a loop that runs once at most tinygrad places values from before it, which then are not
  known after it: of such a number neither tinygrad nor the compiler may tell."""
  if (n := n.simplify()).vmax <= 0: return None
  return n if n.vmax > 1 else ops.opaque_uniform(n).cast(dtypes.weakint).maximum(0).minimum(2)

@dataclass(frozen=True)
class Extent:
  """The sequence of a workgroup: its queries and keys, the rows of the tensors at which they begin, and the `offset` of the diagonal."""
  n_q: int|UOp
  n_k: int|UOp
  q_start: int|UOp
  k_start: int|UOp
  offset: int|UOp

def extent(p:Problem, batch:UOp, given:Mapping[str, UOp]) -> Extent:
  """`given` has the optional tensors by name."""
  if p.varlen:
    def bounds(name:str, total:int, longest:int) -> tuple[UOp, UOp]:
      start, end = (run_time(flat(given[name])[batch + i].load(), 0, total) for i in range(2))
      return start, (end - start).maximum(0).minimum(longest)
    (q_start, n_q), (k_start, n_k) = bounds("cu_seqlens_q", p.total_q, p.Sq), bounds("cu_seqlens_k", p.total_k, p.Sk)
    return Extent(n_q, n_k, q_start, k_start, 0 if p.top_left else n_k - n_q)
  if p.kv_lengths: keys: int|UOp = run_time(flat(given["kv_lengths"])[batch].load(), 0, p.Sk)
  else: keys = UOp.variable(*p.sk_variable, param=True) if p.sk_variable is not None else p.Sk
  return Extent(p.Sq, keys, 0, 0, p.offset if p.top_left or isinstance(keys, int) else keys + (p.offset - p.Sk))

@dataclass(frozen=True)
class Outside:
  """The rows of q, among packed sequences, that the workgroups of one of these write though they are of none: those from its last query to the next
  sequence, or the end, and for the first sequence those before it. Where cu_seqlens say what they should, every row is either a query or here."""
  count: UOp
  before: UOp
  after: UOp
  def row(self, i:UOp) -> UOp:
    """The i-th of them."""
    return (i < self.before).where(i, self.after + i - self.before)

def outside(p:Problem, x:Extent, batch:UOp, given:Mapping[str, UOp]) -> Outside:
  after, end = x.q_start + x.n_q, run_time(flat(given["cu_seqlens_q"])[batch + 1].load(), 0, p.total_q)
  end = batch.eq(p.B - 1).where(UOp.const(p.total_q), end)
  before = batch.eq(0).where(x.q_start, UOp.const(0))
  return Outside(before + (end - after).maximum(0), before, UOp.const(0) + after)

@dataclass(frozen=True)
class KeyBlocks:
  """Key tiles `begin`..`end`, of which no mask touches `full_begin`..`full_end`."""
  begin: UOp
  full_begin: UOp
  full_end: UOp
  end: UOp

  def share(self, index:UOp, of:int) -> KeyBlocks:
    """The `index`-th of `of` parts, in tiles as equal as can be; the last ones may be empty."""
    each = (self.end - self.begin + (of - 1))//of
    first = (self.begin + index*each).minimum(self.end)
    last = (first + each).minimum(self.end)
    return KeyBlocks(first, self.full_begin.maximum(first).minimum(last), self.full_end.maximum(first).minimum(last), last)

def key_blocks(p:Problem, x:Extent, first_query:UOp, last_query:UOp, block_n:int) -> KeyBlocks:
  """The key tiles that queries `first_query`..`last_query` see."""
  (left, right), keys = p.window, x.n_k if isinstance(x.n_k, UOp) else UOp.const(x.n_k)
  seen = keys if right < 0 else (last_query + x.offset + right + 1).maximum(0).minimum(x.n_k)
  unseen = UOp.const(0) if left < 0 else (first_query + x.offset - left).maximum(0).minimum(x.n_k)
  if p.varlen: seen, unseen = ((first_query < x.n_q).where(n, 0) for n in (seen, unseen))   # a shorter sequence has no such block
  begin, end = unseen//block_n, (seen + block_n - 1)//block_n
  full_begin = begin if left < 0 else ((last_query + x.offset - left).maximum(0) + block_n - 1)//block_n
  full_end = keys//block_n if right < 0 else (first_query + x.offset + right + 1).maximum(0).minimum(x.n_k)//block_n
  full_begin = full_begin.minimum(end)
  return KeyBlocks(begin, full_begin, full_end.maximum(full_begin).minimum(end), end)
