"""Context parallelism: which rows of a sequence a device holds, and which launches compute its queries: of some heads over all keys, or of all heads
over the keys of one device after another.

What a device holds are pieces of the sequence: one where the order is "contiguous", and two where it is "zigzag", one from the front and one from the
back (Llama 3, arXiv 2407.21783, section 3.3.2), so that under a causal mask each device sees as many keys as any other:

  pieces of 4 devices, zigzag   device 0: 0, 7   device 1: 1, 6   device 2: 2, 5   device 3: 3, 4

A piece of queries and a piece of keys are an attention problem with an offset of its own, whose mask hides nothing, something or everything.
"""
from __future__ import annotations
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.rows import strides
from attn.problem import BYTES, ORDERS, DealtRows, Problem, Strided
from attn.score.masks import hiding
from attn.score.terms import goes_by_distance, score_terms

REACH = 512     # rows before and behind those that a block of queries sees which its tiles may have besides: more than those on their way

@dataclass(frozen=True)
class SequencePiece:
  """Rows of a sequence, from `start` on, that a device holds from its own row `at` on: `rows` of them, not counting the padding behind all rows."""
  start: int
  rows: int
  at: int

def numbers_of(device:int, count:int, order:str) -> tuple[int, ...]:
  """Which pieces a device of `count` holds, in the order in which they lie there."""
  return (device,) if order == "contiguous" else (device, 2*count - 1 - device)

def pieces_of(device:int, count:int, order:str, held:int, length:int) -> tuple[SequencePiece, ...]:
  """What a device holds of a sequence of `length` rows, where `count` devices hold `held` rows each; pieces of padding alone are left out."""
  size = held//ORDERS[order]
  of = [SequencePiece(n*size, min(max(length - n*size, 0), size), i*size) for i, n in enumerate(numbers_of(device, count, order))]
  return tuple(piece for piece in of if piece.rows)

def rows_held(length:int, count:int, order:str) -> int:
  """Rows that each of `count` devices holds of a sequence of `length` rows, padded so that all pieces are equal."""
  return -(-length//(count*ORDERS[order]))*ORDERS[order]

# ***** what a mask leaves of some queries and some keys *****

@dataclass(frozen=True)
class SeenKeys:
  """Query i of some sees key j of some where i + offset - left <= j <= i + offset + right, of (left, right) = `window`, -1 for no bound."""
  window: tuple[int, int]
  offset: int

def seen_keys(window:tuple[int, int], offset:int, queries:int, keys:int, by_distance:bool) -> SeenKeys|None:
  """The same for the same keys seen, so that two can be compared: bounds that hide nothing are none, and an offset that nothing goes by is 0. Scores
  go by it, too, where they are `by_distance`. None where no query sees a key."""
  left, right = window
  first, last = offset - left, queries - 1 + offset + right      # the first key of the first query, the last one of the last
  if (left >= 0 and first >= keys) or (right >= 0 and last < 0): return None
  bounds = (left if left >= 0 and queries - 1 + offset - left > 0 else -1, right if right >= 0 and offset + right < keys - 1 else -1)
  return SeenKeys(bounds, offset if by_distance or bounds != (-1, -1) else 0)

# ***** launches *****

@dataclass(frozen=True)
class PieceRun:
  """Pieces that lie one after another in what a device holds."""
  pieces: tuple[SequencePiece, ...]
  @property
  def first(self) -> int: return self.pieces[0].at
  @property
  def count(self) -> int: return sum(piece.rows for piece in self.pieces)
  @property
  def unbroken(self) -> bool: return all(x.at + x.rows == y.at for x, y in itertools.pairwise(self.pieces))

@dataclass(frozen=True)
class ContextLaunch:
  """One launch of attention: queries of a device over keys that it has, its own or another's."""
  queries: PieceRun
  keys: PieceRun
  seen: SeenKeys

def pair_seen(p:Problem, queries:SequencePiece, keys:SequencePiece, offset:int|None=None) -> SeenKeys|None:
  """What the queries of one piece see of the keys of another: by their places in the sequence, or by another offset."""
  return seen_keys(p.window, p.offset + queries.start - keys.start if offset is None else offset, queries.rows, keys.rows, goes_by_distance(p))

def as_one(p:Problem, queries:PieceRun, keys:PieceRun) -> SeenKeys|None:
  """What all these queries see of all these keys, if one window and one offset, counted from the first of each, say so of every pair of pieces."""
  if not (queries.unbroken and keys.unbroken): return None
  def moved(x:SequencePiece, y:SequencePiece) -> int:
    """How much further the diagonal is in the pair than in the whole, by where the pieces lie."""
    return (x.at - queries.first) - (y.at - keys.first)
  pairs = {(x, y): pair_seen(p, x, y) for x in queries.pieces for y in keys.pieces}
  bounded = [(x, y) for (x, y), seen in pairs.items() if seen is not None and (goes_by_distance(p) or seen.window != (-1, -1))]
  x, y = next(iter(bounded), (queries.pieces[0], keys.pieces[0]))
  offset, window = p.offset + x.start - y.start - moved(x, y), p.window if bounded else (-1, -1)
  def in_whole(x:SequencePiece, y:SequencePiece) -> SeenKeys|None: return seen_keys(window, offset + moved(x, y), x.rows, y.rows, goes_by_distance(p))
  if any(in_whole(x, y) != seen for (x, y), seen in pairs.items()): return None
  return seen_keys(window, offset, queries.count, keys.count, goes_by_distance(p))

def launches(p:Problem, queries:Sequence[SequencePiece], keys:Sequence[SequencePiece]) -> tuple[ContextLaunch, ...]:
  """The fewest launches that compute the queries of some pieces over the keys of some others: none for pairs that see nothing."""
  if all(pair_seen(p, x, y) is None for x in queries for y in keys): return ()
  if (seen := as_one(p, PieceRun(tuple(queries)), PieceRun(tuple(keys)))) is not None:
    return (ContextLaunch(PieceRun(tuple(queries)), PieceRun(tuple(keys)), seen),)
  ways = []
  if len(queries) > 1: ways.append(launches(p, queries[:1], keys) + launches(p, queries[1:], keys))
  if len(keys) > 1: ways.append(launches(p, queries, keys[:1]) + launches(p, queries, keys[1:]))
  return min(ways, key=len)

def owners(device:int, count:int) -> tuple[int, ...]:
  """The devices whose keys a device sees, in this order: its own first, and then each of the others so that at no time two read from the same."""
  return tuple((device + i) % count for i in range(count))

@dataclass(frozen=True)
class SequenceShards:
  """How `count` devices share out a problem's rows: each holds `keys` rows of k and v, and `queries` rows of q, or all of q where that is None.
  `as_q`: the terms' tensors, by name, whose rows lie as those of q do."""
  count: int
  order: str
  keys: int
  queries: int|None
  as_q: tuple[str, ...] = ()

  def queries_of(self, p:Problem, device:int) -> tuple[SequencePiece, ...]:
    """What a device computes."""
    return (SequencePiece(0, p.Sq, 0),) if self.queries is None else pieces_of(device, self.count, self.order, self.queries, p.Sq)
  def keys_of(self, p:Problem, device:int) -> tuple[SequencePiece, ...]: return pieces_of(device, self.count, self.order, self.keys, p.Sk)
  def plan(self, p:Problem, device:int) -> tuple[tuple[int, tuple[ContextLaunch, ...]], ...]:
    """The launches of a device, by the device whose keys they see, in order. Where all have all queries, each sees its own keys alone."""
    seen = owners(device, self.count) if self.queries is not None else (device,)
    found = [(owner, launches(p, self.queries_of(p, device), self.keys_of(p, owner))) for owner in seen]
    return tuple((owner, some) for owner, some in found if some)
  def keys_read(self, p:Problem, device:int) -> tuple[range, ...]:
    """The rows of k and v that a kernel may read where it computes all queries of a device: those that these see and REACH more on either side."""
    (left, right), found = p.window, list[range]()
    for piece in self.queries_of(p, device) or (SequencePiece(0, 0, 0),):
      first, last = p.offset + piece.start, p.offset + piece.start + piece.rows - 1
      begin = min(max(first - left, 0), p.Sk) if left >= 0 else 0
      end = min(max(last + right + 1, begin), p.Sk) if right >= 0 else p.Sk
      read = range(max(begin - REACH, 0), min(end + REACH, p.Sk))
      if found and read.start <= found[-1].stop: read = range(found.pop().start, read.stop)
      found.append(read)
    return tuple(found)
  def keys_held(self, p:Problem, device:int) -> tuple[range, ...]:
    """The rows of k and v that a device holds."""
    return tuple(range(piece.start, piece.start + piece.rows) for piece in self.keys_of(p, device))
  def keys_copied(self, p:Problem, device:int) -> tuple[tuple[int, range], ...]:
    """(owner, rows) of each copy of keys to a device, in this order."""
    found = [(owner, range(max(x.start, y.start), min(x.stop, y.stop))) for owner in owners(device, self.count)[1:]
             for x in self.keys_held(p, owner) for y in self.keys_read(p, device)]
    return tuple((owner, rows) for owner, rows in found if rows)
  def keys_gathered(self, p:Problem, device:int) -> range:
    """The rows that a device has room for: what it reads, its own, and those between."""
    some = (*self.keys_read(p, device), *self.keys_held(p, device))
    return range(min(x.start for x in some), max(x.stop for x in some))
  def dealt(self, p:Problem, device:int, heads:tuple[int, int]) -> Problem:
    """What a device computes in one launch, of the key/value heads (first, count) over batches. The same for all that are computed alike: where rows
    lie, and which heads they are of, is said where something goes by it. k and v are what it gathers, (rows, heads, width), or all that there are
    where it has them by itself."""
    assert self.queries is not None
    pieces, first, jump = self.queries_of(p, device), 0, 0
    if pieces and (goes_by_distance(p) or any(hiding(p))):
      first = pieces[0].start
      jump = sum(y.start - x.start - y.at for x, y in itertools.pairwise(pieces))
    heads = heads if p.layout == "bshd" or any(term.tensors for term in score_terms(p)) or p.sinks else (0, heads[1])
    rows = self.keys_gathered(p, device)
    def view(width:int) -> Strided:
      if self.count == 1: return Strided(p.B*p.Hkv*self.keys*width, 0, *strides(p.layout, p.Hkv, self.keys, width))
      row = heads[1]*width
      return Strided(len(rows)*row, -heads[0]*width - rows.start*row, p.Hkv*width, width, row)
    dealt = DealtRows(first, pieces[-1].at if jump else 0, jump, sum(piece.rows for piece in pieces), heads)
    return replace(p, Sq=self.queries, return_lse=True, lse_rest=p.wide_scores, dealt=dealt, k_view=view(p.D),
                   v_view=None if p.v_in_k else view(p.Dv))
  def told(self, p:Problem, gathered:int) -> str:
    """What `explain` says of it, where each device computes in so many launches of some heads each, over all keys; 0: over those of one device."""
    shared = f"{'keys' if self.queries is None else 'rows'} shared by {self.count} devices, {self.order}:"
    if gathered:
      others = max(len({owner for owner, _ in self.keys_copied(p, device)}) for device in range(self.count))
      return f"{shared} {gathered} launches on each, for whose heads the keys of at most {others} others come over"
    plans = [self.plan(p, device) for device in range(self.count)]
    each = f"{shared} at most {max(sum(len(some) for _, some in plan) for plan in plans)} launches on each, and"
    if self.queries is None: return f"{each} o and lse exchanged once"
    return f"{each} the keys of {max(sum(owner != device for owner, _ in plan) for device, plan in enumerate(plans))} others passed to it"

# ***** heads that are computed one after another *****

AT_ONCE = 1 << 29     # bytes, at most, of k and v of all devices for the heads of a launch; a device has those of two
LONG_COPIES = 1 << 27 # bytes of the same from which on a device has two launches at least: only for the keys of the first one it waits

def head_chunks(p:Problem, shards:SequenceShards) -> list[tuple[int, int]]:
  """(first, count) of the key/value heads, over batches, of each launch of a device: equally many, so that it is one kernel, and else as many as may
  be. While it computes some the keys of the next come over. The heads of q and o of each launch begin at a whole unit of their buffers."""
  heads, of_head = p.B*p.Hkv, shards.count*shards.keys*(p.D + p.Dv)*BYTES[p.dtype]
  most = min(AT_ONCE//of_head, heads//2 if heads*of_head >= LONG_COPIES else heads)
  rows = p.H//p.Hkv*(shards.queries or 0)
  def whole(n:int) -> bool:
    return n == heads or all(n*rows*size % UNIT_BYTES == 0 for size in (p.D*BYTES[p.dtype], p.Dv*BYTES[p.out_dtype]))
  counts = [n for n in range(1, heads + 1) if heads % n == 0 and whole(n)]
  count = max((n for n in counts if n <= most), default=counts[0])
  return [(first, count) for first in range(0, heads, count)]
