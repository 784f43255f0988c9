"""Plans of context parallelism: the rows of a sequence that each device holds, and the launches that compute its queries. A launch computes some
heads over all keys, or all heads over the keys of one device."""
from __future__ import annotations
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from attn.chips.matrix import UNIT_BYTES
from attn.kernels.parts.memory.rows import strides
from attn.problem import BYTES, ORDERS, DealtRows, Problem, Strided
from attn.score.masks import hiding
from attn.score.terms import goes_by_distance, score_terms

# A device holds pieces of the sequence. With the order "contiguous" it holds one piece. With "zigzag" it holds two, one from the front and one from
# the back (Llama 3, arXiv 2407.21783, section 3.3.2), so that under a causal mask every device sees the same number of keys:
# pieces of 4 devices, zigzag: device 0: 0, 7; device 1: 1, 6; device 2: 2, 5; device 3: 3, 4
# A piece of queries with a piece of keys is an attention problem with its own offset. Its mask hides no pair, some pairs or all pairs.

REACH = 512     # more rows than a block of queries may read before or after its visible keys, including tiles that are loaded ahead

@dataclass(frozen=True)
class SequencePiece:
  """A piece of a sequence on one device: rows start..start+rows-1 of the sequence are rows at..at+rows-1 of the device's tensor."""
  start: int
  rows: int
  at: int  # first row in the device's tensor

def numbers_of(device:int, count:int, order:str) -> tuple[int, ...]:
  """Returns the indices of the pieces that device number `device` of `count` holds: (0, 3) for device 0 of 2 in the order "zigzag"."""
  return (device,) if order == "contiguous" else (device, 2*count - 1 - device)

def pieces_of(device:int, count:int, order:str, held:int, length:int) -> tuple[SequencePiece, ...]:
  """Returns the pieces of a sequence of `length` rows that device number `device` of `count` holds, without pieces that are only padding."""
  # `held` is the number of rows that each device holds, padding included.
  size = held//ORDERS[order]
  of = [SequencePiece(n*size, min(max(length - n*size, 0), size), i*size) for i, n in enumerate(numbers_of(device, count, order))]
  return tuple(piece for piece in of if piece.rows)

def rows_held(length:int, count:int, order:str) -> int:
  """Returns how many rows each of `count` devices holds of a sequence of `length` rows, padding included."""
  return -(-length//(count*ORDERS[order]))*ORDERS[order]

# ***** keys that a mask leaves visible *****

@dataclass(frozen=True)
class SeenKeys:
  """Mask between some queries and some keys: query i sees key j if i + offset - left <= j <= i + offset + right, with window = (left, right)."""
  # (left, right); a bound of -1 hides nothing. i and j count from the first of these queries and keys.
  window: tuple[int, int]
  offset: int

def seen_keys(window:tuple[int, int], offset:int, queries:int, keys:int, by_distance:bool) -> SeenKeys|None:
  """Returns the mask between `queries` queries and `keys` keys, simplified so that equal masks are equal objects; None if no query sees a key."""
  left, right = window
  first, last = offset - left, queries - 1 + offset + right      # first visible key of the first query, last visible key of the last query
  if (left >= 0 and first >= keys) or (right >= 0 and last < 0): return None
  # A bound of the window that hides no key becomes -1. The offset becomes 0 if no bound is left and no score depends on the distance of query and
  # key.
  bounds = (left if left >= 0 and queries - 1 + offset - left > 0 else -1, right if right >= 0 and offset + right < keys - 1 else -1)
  return SeenKeys(bounds, offset if by_distance or bounds != (-1, -1) else 0)

# ***** launches *****

@dataclass(frozen=True)
class PieceRun:
  """Pieces of q that one launch computes, or pieces of k that it reads, in their order in the device's tensor."""
  pieces: tuple[SequencePiece, ...]
  @property
  # `first` is the first row in the device's tensor; `unbroken`: no other rows lie between the pieces.
  def first(self) -> int: return self.pieces[0].at
  @property
  def count(self) -> int: return sum(piece.rows for piece in self.pieces)
  @property
  def unbroken(self) -> bool: return all(x.at + x.rows == y.at for x, y in itertools.pairwise(self.pieces))

@dataclass(frozen=True)
class ContextLaunch:
  """A launch of attention on one device: some of its queries, over keys that one device holds."""
  queries: PieceRun
  keys: PieceRun
  seen: SeenKeys  # mask between queries and keys

def pair_seen(p:Problem, queries:SequencePiece, keys:SequencePiece, offset:int|None=None) -> SeenKeys|None:
  """Returns the mask between one piece of q and one piece of k, or None if no query in `queries` sees a key in `keys`."""
  # `offset`, if given, stands in place of the positions.
  return seen_keys(p.window, p.offset + queries.start - keys.start if offset is None else offset, queries.rows, keys.rows, goes_by_distance(p))

def as_one(p:Problem, queries:PieceRun, keys:PieceRun) -> SeenKeys|None:
  """Returns a mask that is right for all pieces of `queries` and `keys`, so that a single launch can compute them; None if there is no such mask."""
  # The window and offset of the mask count from the first query and the first key.
  if not (queries.unbroken and keys.unbroken): return None
  def moved(x:SequencePiece, y:SequencePiece) -> int:
    # Returns by how much the mask's offset changes if rows count from the beginning of the runs instead of the pieces `x` and `y`.
    return (x.at - queries.first) - (y.at - keys.first)
  pairs = {(x, y): pair_seen(p, x, y) for x in queries.pieces for y in keys.pieces}
  bounded = [(x, y) for (x, y), seen in pairs.items() if seen is not None and (goes_by_distance(p) or seen.window != (-1, -1))]
  x, y = next(iter(bounded), (queries.pieces[0], keys.pieces[0]))
  offset, window = p.offset + x.start - y.start - moved(x, y), p.window if bounded else (-1, -1)
  def in_whole(x:SequencePiece, y:SequencePiece) -> SeenKeys|None: return seen_keys(window, offset + moved(x, y), x.rows, y.rows, goes_by_distance(p))
  if any(in_whole(x, y) != seen for (x, y), seen in pairs.items()): return None
  return seen_keys(window, offset, queries.count, keys.count, goes_by_distance(p))

def launches(p:Problem, queries:Sequence[SequencePiece], keys:Sequence[SequencePiece]) -> tuple[ContextLaunch, ...]:
  """Returns the shortest list of launches that compute the pieces `queries` of q over the pieces `keys` of k."""
  # If no query of a piece sees a key of another piece, this pair has no launch.
  if all(pair_seen(p, x, y) is None for x in queries for y in keys): return ()
  if (seen := as_one(p, PieceRun(tuple(queries)), PieceRun(tuple(keys)))) is not None:
    return (ContextLaunch(PieceRun(tuple(queries)), PieceRun(tuple(keys)), seen),)
  ways = []
  if len(queries) > 1: ways.append(launches(p, queries[:1], keys) + launches(p, queries[1:], keys))
  if len(keys) > 1: ways.append(launches(p, queries, keys[:1]) + launches(p, queries, keys[1:]))
  return min(ways, key=len)

def owners(device:int, count:int) -> tuple[int, ...]:
  """Returns the order in which a device takes the keys of all devices, beginning with its own: (1, 2, 0) for device 1 of 3."""
  # No two devices read from the same device at the same time.
  return tuple((device + i) % count for i in range(count))

@dataclass(frozen=True)
class SequenceShards:
  """How the rows of a problem are divided over `count` devices."""
  count: int
  order: str
  keys: int  # rows of k and v on each device
  queries: int|None  # rows of q on each device; None: all
  as_q: tuple[str, ...] = ()  # names of other tensors, such as a bias, whose rows are divided like those of q

  def queries_of(self, p:Problem, device:int) -> tuple[SequencePiece, ...]:
    return (SequencePiece(0, p.Sq, 0),) if self.queries is None else pieces_of(device, self.count, self.order, self.queries, p.Sq)
  def keys_of(self, p:Problem, device:int) -> tuple[SequencePiece, ...]: return pieces_of(device, self.count, self.order, self.keys, p.Sk)
  def plan(self, p:Problem, device:int) -> tuple[tuple[int, tuple[ContextLaunch, ...]], ...]:
    """Returns the launches of a device in order, as pairs (number of the device whose keys are read, launches over these keys)."""
    # If every device has all queries, each device computes them only over its own keys.
    seen = owners(device, self.count) if self.queries is not None else (device,)
    found = [(owner, launches(p, self.queries_of(p, device), self.keys_of(p, owner))) for owner in seen]
    return tuple((owner, some) for owner, some in found if some)
  def keys_read(self, p:Problem, device:int) -> tuple[range, ...]:
    """Returns the rows of k and v, counted in the whole sequence, that kernels may read to compute a device's queries."""
    (left, right), found = p.window, list[range]()
    for piece in self.queries_of(p, device) or (SequencePiece(0, 0, 0),):
      first, last = p.offset + piece.start, p.offset + piece.start + piece.rows - 1
      begin = min(max(first - left, 0), p.Sk) if left >= 0 else 0
      end = min(max(last + right + 1, begin), p.Sk) if right >= 0 else p.Sk
      # A kernel reads whole tiles of keys and loads tiles ahead: up to REACH rows more on either side of the rows that the queries see.
      read = range(max(begin - REACH, 0), min(end + REACH, p.Sk))
      if found and read.start <= found[-1].stop: read = range(found.pop().start, read.stop)
      found.append(read)
    return tuple(found)
  def keys_held(self, p:Problem, device:int) -> tuple[range, ...]:
    """Returns the rows of k and v, counted in the whole sequence, that a device holds."""
    return tuple(range(piece.start, piece.start + piece.rows) for piece in self.keys_of(p, device))
  def keys_copied(self, p:Problem, device:int) -> tuple[tuple[int, range], ...]:
    """Returns what a device must copy from other devices, in order, as pairs (device that holds the rows, range of rows of the whole sequence)."""
    found = [(owner, range(max(x.start, y.start), min(x.stop, y.stop))) for owner in owners(device, self.count)[1:]
             for x in self.keys_held(p, owner) for y in self.keys_read(p, device)]
    return tuple((owner, rows) for owner, rows in found if rows)
  def keys_gathered(self, p:Problem, device:int) -> range:
    """Returns the rows of k and v, counted in the whole sequence, for which a device that gathers keys has buffers."""
    # These are the rows of k and v that it reads, the rows that it holds, and the rows between them.
    some = (*self.keys_read(p, device), *self.keys_held(p, device))
    return range(min(x.start for x in some), max(x.stop for x in some))
  def dealt(self, p:Problem, device:int, heads:tuple[int, int]) -> Problem:
    """Returns the problem of a launch that computes a device's queries over all keys, for the key/value heads `heads`, (first, count)."""
    # Heads count over all batches. k and v are the gathered rows (rows, heads, width), or all of k and v if there is only one device.
    assert self.queries is not None
    pieces, first, jump = self.queries_of(p, device), 0, 0
    # The positions of rows and the first head are in the problem only if the kernel needs them, because launches with equal problems share one
    # kernel.
    if pieces and (goes_by_distance(p) or any(hiding(p)) or p.functions):
      first = pieces[0].start
      jump = sum(y.start - x.start - y.at for x, y in itertools.pairwise(pieces))
    heads = heads if p.layout == "bshd" or any(term.tensors for term in score_terms(p)) or p.sinks or p.functions else (0, heads[1])
    rows = self.keys_gathered(p, device)
    def view(width:int) -> Strided:
      if self.count == 1: return Strided(p.B*p.Hkv*self.keys*width, 0, *strides(p.layout, p.Hkv, self.keys, width))
      row = heads[1]*width
      return Strided(len(rows)*row, -heads[0]*width - rows.start*row, p.Hkv*width, width, row)
    dealt = DealtRows(first, pieces[-1].at if jump else 0, jump, sum(piece.rows for piece in pieces), heads)
    return replace(p, Sq=self.queries, return_lse=True, lse_rest=p.wide_scores, dealt=dealt, k_view=view(p.D),
                   v_view=None if p.v_in_k else view(p.Dv))
  def explanation(self, p:Problem, gathering_launches:int) -> str:
    """Returns the sentence in which `attn.explain` says how rows are divided among devices."""
    shared = f"{'keys' if self.queries is None else 'rows'} shared by {self.count} devices, {self.order}:"
    # Each launch computes some heads over all keys, which the device gathers. Otherwise (0) each launch computes all heads over the keys of one
    # device.
    if gathering_launches:
      others = max(len({owner for owner, _ in self.keys_copied(p, device)}) for device in range(self.count))
      return f"{shared} {gathering_launches} launches on each, for whose heads the keys of at most {others} others come over"
    plans = [self.plan(p, device) for device in range(self.count)]
    each = f"{shared} at most {max(sum(len(some) for _, some in plan) for plan in plans)} launches on each, and"
    if self.queries is None: return f"{each} o and lse exchanged once"
    return f"{each} the keys of {max(sum(owner != device for owner, _ in plan) for device, plan in enumerate(plans))} others passed to it"

# ***** division of heads into launches *****

AT_ONCE = 1 << 29     # most bytes of k and v that a device gathers for the heads of one launch; it has buffers for two launches
LONG_COPIES = 1 << 27 # with at least so many bytes of k and v, a device has two or more launches: it then waits only for the keys of the first

def head_chunks(p:Problem, shards:SequenceShards) -> list[tuple[int, int]]:
  """Returns the key/value heads of each launch on a device that gathers keys, as (first head, number of heads)."""
  heads, of_head = p.B*p.Hkv, shards.count*shards.keys*(p.D + p.Dv)*BYTES[p.dtype]
  # All launches have the same number of heads, so that one kernel serves them all. It is the largest number for which k and v of a launch have at
  # most AT_ONCE bytes, and for which each launch's heads of q, o and lse begin at a multiple of 16 bytes. If k and v have LONG_COPIES bytes or more
  # in all, there are at least two launches: while one runs, the keys for the next one are copied.
  most = min(AT_ONCE//of_head, heads//2 if heads*of_head >= LONG_COPIES else heads)
  rows = p.H//p.Hkv*(shards.queries or 0)
  def whole(n:int) -> bool:
    return n == heads or all(n*rows*size % UNIT_BYTES == 0 for size in (p.D*BYTES[p.dtype], p.Dv*BYTES[p.out_dtype], BYTES["float32"]))
  counts = [n for n in range(1, heads + 1) if heads % n == 0 and whole(n)]
  count = max((n for n in counts if n <= most), default=counts[0])
  return [(first, count) for first in range(0, heads, count)]
