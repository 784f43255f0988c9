"""How many queries and keys a workgroup's sequence has, and over which tiles the workgroup loops."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Mapping
from attn.kernels.parts.program.counts import bounded
from attn.ops import common as ops
from attn.ops.common import flat
from attn.problem import Count, Problem
from attn.score.masks import first_seen, scattered, seen_up_to
from attn.score.places import Walk
from attn.tinygrad_compat import UOp

def run_time(x:UOp, most:int) -> UOp:
  """Returns `x`, a number that the kernel loads and that is equal in all threads, as an index clamped to 0..`most`."""
  # clamped, so that no access can leave a buffer
  return bounded(ops.uniform(x), 0, most)

FEW, MANY = 3, 1000    # numbers of iterations

def trip_count(n:UOp) -> UOp|None:
  """Returns n as the number of iterations of a loop, hidden from the compilers if n is small, or None if n is always 0."""
  # If tinygrad knew that a loop runs at most once, it would move values from before the loop into the loop, and code after the loop could not use
  # them. If clang knew that a loop runs at most three times, it would keep more values in registers than fit: dual_wave spilled 106 registers with
  # 200 keys and a mask, and 52 with 250 queries and 515 keys.
  # A number up to FEW is hidden from tinygrad and from the compiler, which would both make a worse program of such a short loop.
  if (n := n.simplify()).vmax <= 0: return None
  return n if n.vmax > FEW else bounded(ops.opaque_uniform(n), 0, MANY)

@dataclass(frozen=True)
class Extent:
  """One sequence: its numbers of queries and keys, and the first rows that it has in the tensors q, k and v."""
  n_q: int|UOp
  n_k: int|UOp
  q_start: int|UOp   # row of the tensor q at which the sequence begins
  k_start: int|UOp   # row of the tensors k and v at which the sequence begins
  offset: int|UOp    # places the diagonal of causal masks: query i is on the diagonal at key i + offset

def counted(n:Count) -> UOp:
  """Returns a number of rows, a constant plus tinygrad Variables, as a UOp of a kernel."""
  return sum((UOp.variable(*v, param=True) for v in n.variables), UOp.const(n.constant))

def extent(p:Problem, batch:UOp, given:Mapping[str, UOp]) -> Extent:
  """Returns the sequence number `batch`, of a batch or among packed sequences; `given` are the kernel's tensors {name: tensor}."""
  def keys_of() -> tuple[UOp, int|UOp]:
    # the batch's number of keys, and its first key
    end = run_time(flat(given["kv_lengths"])[batch].load(), p.Sk)
    if not p.kv_starts: return end, 0
    start = run_time(flat(given["kv_starts"])[batch].load(), p.Sk)
    return (end - start).maximum(0), start
  if p.varlen:
    def bounds(name:str, total:int, longest:int) -> tuple[UOp, UOp]:
      start, end = (run_time(flat(given[name])[batch + i].load(), total) for i in range(2))
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
  """Rows of a packed tensor that lie in no sequence, such as padding, and that the workgroups of one sequence set to 0."""
  # These are the rows after this sequence, up to the next sequence or the end of the tensor, and for the first sequence also the rows before it. If
  # cu_seqlens are valid, every row of the tensor belongs either to one sequence or to one `Outside`.
  count: UOp
  before: UOp   # number of these rows at the beginning of the tensor, before the first sequence
  after: UOp    # index of the first of these rows after the sequence
  total: int      # number of rows of the tensor: those of all sequences, and those between them
  def row(self, i:UOp) -> UOp:
    """Returns the index, in the tensor, of the i-th row that belongs to no sequence."""
    return (i < self.before).where(i, self.after + i - self.before)

def outside(p:Problem, x:Extent, batch:UOp, given:Mapping[str, UOp], keys:bool=False) -> Outside:
  """Returns the rows of the queries, or with `keys` of the keys, that belong to no sequence."""
  if p.dealt is not None:
    # devices share a sequence: the padding after the rows that a device holds
    there = p.dealt.queries
    return Outside(UOp.const(p.Sq - there), UOp.const(0), UOp.const(there), p.Sq)
  name, total, start, n = ("cu_seqlens_k", p.total_k, x.k_start, x.n_k) if keys else ("cu_seqlens_q", p.total_q, x.q_start, x.n_q)
  after, end = start + n, run_time(flat(given[name])[batch + 1].load(), total)
  end = batch.eq(p.B - 1).where(UOp.const(total), end)
  before = batch.eq(0).where(start, UOp.const(0))
  return Outside(before + (end - after).maximum(0), before, UOp.const(0) + after, total)

@dataclass(frozen=True)
class Blocks:
  """The tiles `begin` <= t < `end` over which a workgroup loops, and which of them no mask touches."""
  begin: UOp
  full_begin: UOp   # in the tiles from full_begin up to, but not including, full_end no mask hides a score
  full_end: UOp
  end: UOp
  masked_first: bool   # False if no tile lies before full_begin

  def share(self, index:UOp, of:int) -> Blocks:
    """Divides the tiles into `of` shares of almost equal size, and returns share number `index`."""
    # if there are fewer than `of` tiles, the last parts are empty
    each = (self.end - self.begin + (of - 1))//of
    first = (self.begin + index*each).minimum(self.end)
    return self.between(first, (first + each).minimum(self.end))
  def range(self, index:UOp, tiles:int) -> Blocks:
    """Returns the tiles of this object whose index t is in one range of `tiles` tiles: `index`*`tiles` <= t < (`index` + 1)*`tiles`."""
    first = (index*tiles).maximum(self.begin).minimum(self.end)
    return self.between(first, ((index + 1)*tiles).maximum(first).minimum(self.end))
  def between(self, first:UOp, last:UOp) -> Blocks:
    full_begin, full_end = (x.maximum(first).minimum(last) for x in (self.full_begin, self.full_end))
    return Blocks(first, full_begin, full_end, last, self.masked_first)

@dataclass(frozen=True)
class TileList:
  """The list of tiles over which one workgroup loops. It has only tiles in which a mask leaves visible scores."""
  # attn/kernels/tile_lists.py makes the list. A list begins with two numbers: how many tiles its first group has, and how many tiles the list has.
  # Then come the indices of the tiles. The first group has the tiles of which the mask hides some scores, and the second group those of which it
  # hides none. With turns, the two groups are in the other order. The entries left over, at least one, are filled with the number `tiles`. A list
  # with turns has one more number for each of its tiles: how many blocks that start before the workgroup's block have this tile in their lists
  # (attn/kernels/parts/backward/turns.py).
  entries: UOp       # buffer with the lists of all workgroups
  first: UOp         # index at which the workgroup's list begins
  tiles: int         # number of tiles of the sequence
  size: int          # rows of a tile of the list
  block_n: int       # rows of a tile of the workgroup's loop, which divides `size`
  with_turns: bool   # whether the list also has turns
  def entry(self, i:int|UOp) -> UOp: return run_time(self.entries[self.first + i].load(), self.tiles)
  def row(self, place:UOp) -> UOp:
    """Returns the index in the sequence of row number `place` in the listed tiles, whose rows are counted tile by tile, in the order of the list."""
    # beyond the list: a row beyond the sequence
    return self.entry((place//self.size).minimum(self.tiles) + OF_A_LIST)*self.size + place%self.size
  def turn(self, i:UOp) -> UOp:
    """Returns how many of the workgroups that start earlier also loop over the tile of iteration i."""
    return self.entries[self.first + list_length(self.tiles) + i//(self.size//self.block_n)].load()
  @property
  def blocks(self) -> Blocks:
    """The tiles that the workgroup loops over, as positions in the list: 0 is the first listed tile."""
    (first, count), none = (self.entry(i)*(self.size//self.block_n) for i in range(2)), UOp.const(0)
    return Blocks(none, none, first, count, False) if self.with_turns else Blocks(none, first, count, count, True)

@dataclass(frozen=True)
class Descending:
  """A loop over tiles in descending order, from the last tile to the first."""
  # Under a causal mask the keys nearest to the queries then come first. If scores fall with the distance (ALiBi), later scores never rise above the
  # number that the softmax subtracts, and nothing is rescaled.
  tiles: Blocks   # tiles over which the workgroup loops
  count: UOp      # number of rows of the sequence
  size: int       # rows of a tile
  def row(self, place:UOp) -> UOp:
    """Returns the index in the sequence of row number `place`, where rows are counted tile by tile, from the last tile to the first."""
    tile, beyond = place//self.size, (self.count + (self.size - 1))//self.size
    # after the loop: a row beyond the sequence
    return (tile < self.tiles.end).where(self.mirrored(tile) - 1, beyond)*self.size + place%self.size
  def mirrored(self, x:UOp) -> UOp:
    """Converts a boundary between tiles from a count that begins at the first tile to one that begins at the last tile, or back."""
    return self.tiles.begin + self.tiles.end - x
  @property
  def blocks(self) -> Blocks:
    """The tiles over which the workgroup loops, numbered from the last tile of the loop: 0 is the last tile."""
    x = self.tiles
    return Blocks(x.begin, self.mirrored(x.full_end), self.mirrored(x.full_begin) if x.masked_first else x.end, x.end, True)

OF_A_LIST = 2      # numbers before the first tile of a list

def list_length(tiles:int, with_turns:bool=False) -> int:
  """Returns the number of entries in the list of a workgroup with `tiles` tiles. `with_turns`: each tile also has the number of workgroups that add
  before."""
  return OF_A_LIST + tiles + 1 + tiles*with_turns

def tiles_of_list(length:int, with_turns:bool) -> int:
  """Returns the largest number of tiles that a list of `length` entries can hold."""
  return (length - list_length(0))//(1 + with_turns)

def blocks_seen(walk:Walk, first:UOp, last:UOp, block_n:int) -> Blocks:
  """Returns the tiles of `block_n` keys that queries `first` to `last` see, or the tiles of queries that see keys `first` to `last`, as `walk`
  says."""
  # Columns are keys if rows are queries, and queries if rows are keys. The tiles go from the first column that row `first` sees to the last column
  # that row `last` sees. This covers the rows between, because from row to row neither the first nor the last seen column moves back.
  masked_first = first_seen(walk, first) is not None
  def hidden(row:UOp) -> UOp: return UOp.const(0) if (column := first_seen(walk, row)) is None else column.maximum(0)
  seen, unseen = seen_up_to(walk, last), hidden(first).minimum(walk.count)
  if isinstance(walk.own, UOp): seen, unseen = ((first < walk.own).where(n, 0) for n in (seen, unseen))   # a shorter sequence has no such block
  begin, end = unseen//block_n, (seen + block_n - 1)//block_n
  if walk.p.mask_bounds is not None: begin = begin.minimum(end)     # a row may see no column: then its first one may lie after its last one
  full_begin = ((hidden(last) + block_n - 1)//block_n if masked_first else begin).minimum(end)
  full_end = seen_up_to(walk, first)//block_n if not scattered(walk.p) else full_begin
  return Blocks(begin, full_begin, full_end.maximum(full_begin).minimum(end), end, masked_first)
