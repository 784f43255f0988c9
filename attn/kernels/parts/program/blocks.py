"""Which queries and keys there are, and which tiles of the others a block of either walks over: those that some mask touches, and those that none
does."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Mapping
from attn.kernels.parts.program.counts import bounded
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Count, Problem
from attn.score.mask import Walk
from attn.score.masks import first_seen, seen_up_to
from attn.tinygrad_compat import UOp

def run_time(x:UOp, low:int, high:int) -> UOp:
  """A number that is loaded, the same in the whole workgroup: as an index, held within `low`..`high` so that no access can leave a buffer."""
  return bounded(ops.uniform(x), low, high)

FEW, MANY = 3, 1000    # trips

def trip_count(n:UOp) -> UOp|None:
  """How often a loop runs, None where it never does. Of a number up to FEW neither tinygrad nor the compiler may tell: into a loop that runs once at
  most tinygrad places values from before it, which then are not known after it, and of one that runs up to three times clang keeps more in registers
  than there are (dual_wave spilled 106 with 200 keys and a mask, 52 with 250 queries and 515 keys)."""
  if (n := n.simplify()).vmax <= 0: return None
  return n if n.vmax > FEW else bounded(ops.opaque_uniform(n), 0, MANY)

@dataclass(frozen=True)
class Extent:
  """The sequence of a workgroup: its queries and keys, the rows of the tensors at which they begin, and the `offset` of the diagonal."""
  n_q: int|UOp
  n_k: int|UOp
  q_start: int|UOp
  k_start: int|UOp
  offset: int|UOp

def counted(n:Count) -> UOp:
  """What Variables say, as a kernel has it."""
  return sum((UOp.variable(*v, param=True) for v in n.variables), UOp.const(n.constant))

def extent(p:Problem, batch:UOp, given:Mapping[str, UOp]) -> Extent:
  """`given` has the optional tensors by name."""
  def keys_of() -> tuple[UOp, int|UOp]:
    """How many keys the batch has by kv_lengths, and where they begin."""
    end = run_time(flat(given["kv_lengths"])[batch].load(), 0, p.Sk)
    if not p.kv_starts: return end, 0
    start = run_time(flat(given["kv_starts"])[batch].load(), 0, p.Sk)
    return (end - start).maximum(0), start
  if p.varlen:
    def bounds(name:str, total:int, longest:int) -> tuple[UOp, UOp]:
      start, end = (run_time(flat(given[name])[batch + i].load(), 0, total) for i in range(2))
      return start, (end - start).maximum(0).minimum(longest)
    q_start, n_q = bounds("cu_seqlens_q", p.total_q, p.Sq)
    if p.pages is not None: n_k, k_start = keys_of()
    else: k_start, n_k = bounds("cu_seqlens_k", p.total_k, p.Sk)
    return Extent(n_q, n_k, q_start, k_start, 0 if p.top_left else n_k - n_q)
  if p.kv_lengths:
    n_k, k_start = keys_of()
    return Extent(p.Sq, n_k, 0, k_start, p.offset if p.top_left else n_k + (p.offset - p.Sk))
  keys: int|UOp = counted(p.sk_variable).minimum(p.Sk) if p.sk_variable is not None else p.Sk
  if p.sk_variable is not None and p.sq_variable is not None: offset: int|UOp = counted(p.sk_variable) - counted(p.sq_variable)
  else: offset = p.offset if p.top_left or isinstance(keys, int) else keys + (p.offset - p.Sk)
  return Extent(p.queries, keys, 0, 0, offset)

def over_keys(p:Problem, x:Extent) -> Walk: return Walk(p, "keys", x.offset, x.n_k, x.n_q)
def over_queries(p:Problem, x:Extent) -> Walk: return Walk(p, "queries", -x.offset, x.n_q, x.n_k)

@dataclass(frozen=True)
class Outside:
  """The rows, among packed sequences, that the workgroups of one of these write though they are of none: those from its last row to the next
  sequence, or the end, and for the first sequence those before it. Where cu_seqlens say what they should, every row is either of a sequence or
  here."""
  count: UOp
  before: UOp
  after: UOp
  total: int      # rows of all sequences, and between them
  def row(self, i:UOp) -> UOp:
    """The i-th of them."""
    return (i < self.before).where(i, self.after + i - self.before)

def outside(p:Problem, x:Extent, batch:UOp, given:Mapping[str, UOp], keys:bool=False) -> Outside:
  """Rows of no sequence, of q and tensors like it, or of k and v with `keys`. For rows that devices share these are the padding behind them."""
  if p.dealt is not None:
    there = p.dealt.queries
    return Outside(UOp.const(p.Sq - there), UOp.const(0), UOp.const(there), p.Sq)
  name, total, start, n = ("cu_seqlens_k", p.total_k, x.k_start, x.n_k) if keys else ("cu_seqlens_q", p.total_q, x.q_start, x.n_q)
  after, end = start + n, run_time(flat(given[name])[batch + 1].load(), 0, total)
  end = batch.eq(p.B - 1).where(UOp.const(total), end)
  before = batch.eq(0).where(start, UOp.const(0))
  return Outside(before + (end - after).maximum(0), before, UOp.const(0) + after, total)

@dataclass(frozen=True)
class Blocks:
  """Tiles `begin`..`end` of what is walked over, of which no mask touches `full_begin`..`full_end`. `masked_first`: masks may touch some
  before these."""
  begin: UOp
  full_begin: UOp
  full_end: UOp
  end: UOp
  masked_first: bool

  def share(self, index:UOp, of:int) -> Blocks:
    """The `index`-th of `of` parts, in tiles as equal as can be; the last ones may be empty."""
    each = (self.end - self.begin + (of - 1))//of
    first = (self.begin + index*each).minimum(self.end)
    return self.between(first, (first + each).minimum(self.end))
  def range(self, index:UOp, tiles:int) -> Blocks:
    """The tiles of this block among the `index`-th group of `tiles` tiles, counted from tile 0."""
    first = (index*tiles).maximum(self.begin).minimum(self.end)
    return self.between(first, ((index + 1)*tiles).maximum(first).minimum(self.end))
  def between(self, first:UOp, last:UOp) -> Blocks:
    full_begin, full_end = (x.maximum(first).minimum(last) for x in (self.full_begin, self.full_end))
    return Blocks(first, full_begin, full_end, last, self.masked_first)

def blocks_seen(walk:Walk, first:UOp, last:UOp, block_n:int) -> Blocks:
  """The tiles that rows `first`..`last` see. None of these rows sees a column before those of the first one, or after those of
  the last."""
  masked_first = first_seen(walk, first) is not None
  def hidden(row:UOp) -> UOp: return UOp.const(0) if (column := first_seen(walk, row)) is None else column.maximum(0)
  seen, unseen = seen_up_to(walk, last), hidden(first).minimum(walk.count)
  if isinstance(walk.own, UOp): seen, unseen = ((first < walk.own).where(n, 0) for n in (seen, unseen))   # a shorter sequence has no such block
  begin, end = unseen//block_n, (seen + block_n - 1)//block_n
  full_begin = ((hidden(last) + block_n - 1)//block_n if masked_first else begin).minimum(end)
  full_end = seen_up_to(walk, first)//block_n
  return Blocks(begin, full_begin, full_end.maximum(full_begin).minimum(end), end, masked_first)
