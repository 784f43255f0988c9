"""Dropout of a lane's scores: which scores are kept, and zeros for the scores that are dropped."""
from __future__ import annotations
import functools, operator
from dataclasses import dataclass
from attn.kernels.parts.memory.lanes import Lane, MmaLane, ThreadPlace
from attn.kernels.parts.weights.scores import Scores
from attn.ops import common as ops, dropout as bits
from attn.ops.common import flat
from attn.ops.dropout import OCTET, WORD
from attn.score.term import Row
from attn.tinygrad_compat import UOp, dtypes

# attn/ops/dropout.py makes the bits that say which scores are kept. One call makes the bits of an octet (eight neighbouring keys of a query). Lanes
# that share a row of scores divide the row's octets among them, so that no octet is computed twice in a wave. In backward kernels a lane may own a
# key instead of a query. Eight lanes with neighbouring keys then need bits of the same octets. Each of these lanes computes the octets of other
# queries, and the lanes then transpose the bits among them.

OCTETS = WORD//OCTET     # octets whose bits fill a dword

def bit_of(row:int) -> int:
  """Returns the index of the bit, in a dword for 32 rows, that says whether dropout keeps the score of row `row`."""
  # see attn/ops/dropout.py
  return row//OCTET*4 + row % OCTET//2 + row % 2*16

@dataclass(frozen=True)
class Kept:
  """Bits that say which of a lane's scores dropout keeps, in one tile."""
  at: Lane|MmaLane|ThreadPlace
  # a tuple for each row that the lane owns, with a dword of bits for every 32 of the tile's rows; empty without dropout
  words: tuple[tuple[UOp, ...], ...] = ()

  @property
  def pairs(self) -> int:
    """Number of pairs of neighbouring scores of the same row in one vector of scores."""
    return self.at.matrix.row_part//2
  def bit(self, n:int) -> tuple[int, int]:
    """Returns (index of the dword, index of the bit in it) of the bit that says whether dropout keeps the n-th score of a row."""
    word, row = divmod(self.at.matrix.key_of(0, n), WORD)
    return word, row//OCTET*4 + row % OCTET//4*2 + row//2 % 2*16 if alternate(self.at) else bit_of(row)

  def _of(self, at:list[tuple[int, int]]) -> tuple[UOp, tuple[tuple[int, int], ...]]:
    """Returns (vector of the dwords that hold the bits of the scores `at`, a pair for each score: index of the dword in the vector, index of the
    bit)."""
    # `at` has a pair (row, n) for each score: the n-th score of a row
    found = [(r, *self.bit(n)) for r, n in at]
    used = sorted({(r, word) for r, word, _ in found})
    return ops.build(*[self.words[r][word] for r, word in used]), tuple((used.index((r, word)), place) for r, word, place in found)

  def packed(self, x:UOp, first:int) -> UOp:
    """Returns `x`, packed elements of P, with 0 in place of dropped elements. `x` begins with vector number `first` of this lane's P."""
    if not self.words: return x
    # `x` is one or more of the lane's vectors of P, from the vector with the index `first` on. Each vector has elements of all of the lane's rows,
    # one row after another.
    rows, pairs = range(len(self.words)), range(self.pairs)
    vectors = ops.length(x)//(len(rows)*len(pairs))
    words, places = self._of([(r, ((first + v)*len(pairs) + i)*2) for v in range(vectors) for r in rows for i in pairs])
    return bits.drop_packed(x, words, places, first)

  def drop(self, vectors:list[UOp]) -> list[UOp]:
    """Returns fp32 vectors of all of a lane's scores in a tile, with 0 in place of dropped elements."""
    if not self.words: return vectors
    found, part = [], self.at.matrix.row_part
    for kt, x in enumerate(vectors):
      words, places = self._of([(r, kt*part + i) for r in range(len(self.words)) for i in range(part)])
      found.append(bits.drop_numbers(x, words, places, kt))
    return found

def alternate(at:Lane|MmaLane|ThreadPlace) -> bool:
  # rows 0, 2, 4, ... of a tile, and not neighbouring rows
  return at.matrix.block == 1

def kept_scores(scores:Scores, rows:list[Row], tile:UOp) -> Kept:
  """Returns bits that say which of this lane's scores dropout keeps, for its rows `rows` in tile `tile`."""
  if not scores.p.dropout_p: return Kept(scores.at)
  count = scores.block_n//OCTET      # groups of eight keys, or of eight queries, in a tile
  def words(row:Row) -> tuple[UOp, ...]:
    return tuple(_word(scores, row, scores.tile(tile)*count + first, min(OCTETS, count - first)) for first in range(0, count, OCTETS))
  return Kept(scores.at, tuple(map(words, rows)))

def _counted(scores:Scores, row:Row) -> tuple[tuple[UOp, UOp], UOp, UOp]:
  """Returns what the random bits for a row are computed from: (two dwords of the seed, batch, head)."""
  seed, first = scores.given["dropout_seed"], scores.given.get("first_batch_and_head")
  seed0, seed1 = (ops.uniform(flat(seed)[i].load()) for i in range(2))
  if first is None: return (seed0, seed1), row.batch, row.head
  # counted over all devices
  batch, head = (x.cast(dtypes.uint) + flat(first)[i].load() for i, x in enumerate((row.batch, row.head)))
  return (seed0, seed1), batch, head

def _word(scores:Scores, row:Row, first:UOp, count:int) -> UOp:
  """Returns a dword with a bit for each score of this lane in `row`, over `count` groups of eight keys (or queries): 1 if dropout keeps the score."""
  # an octet is eight neighbouring rows; the first one has the index `first`
  at, p = scores.at, scores.p
  assert not isinstance(at, ThreadPlace)
  shared = min(at.matrix.groups, count)           # number of lanes that share the octets: each computes every `shared`-th one
  mine = at.h%shared
  def octet(i:int) -> UOp:
    number = first + mine + i*shared
    query, keys = (row.index, number) if scores.walk.over == "keys" else (number*OCTET + at.in_octet, row.index//OCTET)
    return bits.kept_octet(*_counted(scores, row), query, keys, p.dropout_p) << 4*shared*i
  x = functools.reduce(operator.or_, map(octet, range(count//shared)))
  x = bits.together(x, mine*4, *at.sharing)
  if scores.walk.over == "queries": x = bits.transposed_bits(x, at.in_octet, *at.neighbours)
  return bits.lane_bits(x, at.h*bit_of(at.matrix.block), alternate(at))

# ***** threads that exchange nothing *****

@dataclass(frozen=True)
class KeptHere:
  """Bits that say which scores of a row dropout keeps, for a thread of a kernel in plain UOps, which exchanges no bits with other threads."""
  words: tuple[UOp, ...]                # a vector of dwords for each of the row's vectors of scores
  places: tuple[tuple[int, int], ...]   # for each element of a vector: (index of the dword, position of the bit in the dword)
  def drop(self, vectors:list[UOp]) -> list[UOp]:
    """Returns fp32 vectors of all of this row's scores in a tile, with 0 in place of dropped elements."""
    if not self.words: return vectors
    _, first_bit = self.places[0]
    return [bits.drop_numbers(x, words, self.places, first_bit) for x, words in zip(vectors, self.words, strict=True)]

def kept_here(scores:Scores, rows:list[Row], firsts:list[UOp]) -> list[KeptHere]:
  """Returns, for each of four neighbouring `rows`, a bit for each score of this thread in the row: whether dropout keeps the score."""
  # The rows are queries and the rows of a tile are keys, or the other way round. The thread computes scores with groups of four neighbouring rows of
  # the tile; `firsts` has the first row of each group.
  if not scores.p.dropout_p: return [KeptHere((), ()) for _ in rows]
  neighbours = range(len(rows))
  if scores.walk.over == "keys":      # a dword has the bits of one query and four keys
    words = [tuple(ops.build(_kept_half(scores, row, row.index, first)) for first in firsts) for row in rows]
    return [KeptHere(own, tuple((0, bit_of(key)) for key in neighbours)) for own in words]
  def of_queries(first:UOp) -> UOp: return ops.build(*[_kept_half(scores, rows[0], first + i, rows[0].index) for i in neighbours])
  shared = tuple(map(of_queries, firsts))
  return [KeptHere(shared, tuple((query, bit_of(key)) for query in neighbours)) for key in neighbours]

def _kept_half(scores:Scores, row:Row, query:UOp, key:UOp) -> UOp:
  # the bits of the query's scores with four neighbouring keys, of which `key` is the first and has bit 0: half of the bits of an octet
  octet = bits.kept_octet(*_counted(scores, row), query, key//OCTET, scores.p.dropout_p)
  return (key//(OCTET//2)%2).eq(0).where(octet, octet >> 2)
