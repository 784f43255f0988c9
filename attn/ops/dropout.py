"""Choice of the elements of P that dropout keeps, by a counter-based random number generator: the same choice on every chip, in every pass and for
tiles of every size."""
from __future__ import annotations
import functools, operator
from collections.abc import Sequence
from typing import Any
from attn.ops.common import f32, length, u32
from attn.ops.language import compound
from attn.ops.operation import Value
from attn.ops.operation import emit
from attn.tinygrad_compat import Tensor, UOp, as_uint64, dtypes

# Philox4x32-7 (Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3") computes 128 random bits from a counter and a key.
# Here the counter is (query, octet, head, batch), and the key is the seed. An octet is eight neighbouring keys of a query. One call serves an octet,
# with 16 bits for each key: half h of word i is the 16-bit number for key 2*i + h of the octet. The key's element of P is kept if this number is at
# least p * 2^16. So p has steps of 2^-16.
#
# The dropout bit of an element of P says whether the element is kept. A lane needs the dropout bits of the scores in its registers. Lanes that share
# a query, or eight lanes whose keys form an octet, divide the calls of Philox among themselves and exchange the results. A dword holds the dropout
# bits of 32 neighbouring keys of a query, or of 32 neighbouring queries of a key: number 8*j + 2*i + h has bit 4*j + i + 16*h. So two neighbours
# have the same bit position in the two halves of the dword, and one shift moves both bits to where a mask for two packed 16-bit numbers has them.

OCTET = 8                      # keys of a query that one call of Philox serves
WORD = 32                      # rows whose bits form a dword
STEPS_OF_P = 1 << 16           # the probability p is a multiple of 1/STEPS_OF_P
SPREAD = 15                    # distance by which `lane_bits` moves the second of two neighbouring rows' bits up

MULTIPLIERS = (0xd2511f53, 0xcd9e8d57)
BUMPS = (0x9e3779b9, 0xbb67ae85)       # added to the key from round to round: the golden ratio and sqrt(3) - 1
PHILOX_ROUNDS = 7                      # the fewest rounds that pass all tests of BigCrush, according to the authors (section 5.1)

def threshold(p:float) -> int:
  """Returns the smallest 16-bit random number for which dropout keeps an element of P, where p is the dropout probability."""
  return min(round(p*STEPS_OF_P), STEPS_OF_P - 1)

def philox(c:Any, counter:Sequence[Value], key:Sequence[Value]) -> list[Value]:
  """Returns the four random words that Philox4x32-7 computes from `counter`, four words, and `key`, two words."""
  # of the interpreter `c` (attn/ops/language.py) only the methods `word` and `wide_product` are used
  x0, x1, x2, x3 = counter
  k0, k1 = key
  for i in range(PHILOX_ROUNDS):
    if i: k0, k1 = k0 + c.word(BUMPS[0]), k1 + c.word(BUMPS[1])
    (low0, high0), (low1, high1) = c.wide_product(x0, MULTIPLIERS[0]), c.wide_product(x2, MULTIPLIERS[1])
    x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
  return [x0, x1, x2, x3]

# ***** the bits of an octet *****

@compound("kept_octet")
def _kept_octet(c:Any, seed0:Value, seed1:Value, batch:Value, head:Value, query:Value, octet:Value, *, least:int) -> Value:
  if not least: return c.word(0x000f000f)
  words = philox(c, (query, octet, head, batch), (seed0, seed1))
  return functools.reduce(operator.or_, [c.at_least(c.let("word", x), least) << c.word(i) for i, x in enumerate(words)])

def kept_octet(seed:tuple[UOp, UOp], batch:UOp, head:UOp, query:UOp, octet:UOp, p:float) -> UOp:
  """Returns a dword that says which of eight keys dropout keeps for a query: bit i + 16*h is 1 if it keeps key 8*octet + 2*i + h."""
  # `octet` is the index of the octet among the keys; `batch`, `head` and `query` are the indices of the query
  operands = [x.cast(dtypes.uint) for x in (*seed, batch, head, query, octet)]
  return emit("kept_octet", dtypes.uint, *operands, least=threshold(p))

# ***** exchanges between lanes *****

@compound("together")
def _together(c:Any, x:Value, place:Value, *, steps:tuple[int, ...], exchange:str) -> Value:
  x = c.let("bits", x << place)
  for step in steps: x = c.let("bits", functools.reduce(operator.or_, c.exchange(x, step, exchange)))
  return x

def together(x:UOp, place:UOp, steps:tuple[int, ...], exchange:str) -> UOp:
  """Returns one dword with the dropout bits of all lanes that share a query. The bits `x` of this lane begin at bit `place` of the dword."""
  # `x` has this lane's bits in its lowest bits, `place` is their position in the dword. Lanes whose indices differ by a distance in `steps` exchange
  # their bits, by the instruction `exchange` (`Matrix.exchange`).
  return emit("together", dtypes.uint, x, place.cast(dtypes.uint), steps=steps, exchange=exchange)

LOW_BITS = {16: 0x0000ffff, 1: 0x55555555, 2: 0x33333333}    # {distance: mask of the bits exchanged with the bits `distance` higher}

@compound("transposed_bits")
def _transposed_bits(c:Any, x:Value, row:Value, *, steps:tuple[int, int, int], exchange:str) -> Value:
  for i, (step, (far, low)) in enumerate(zip(steps, LOW_BITS.items())):
    upper = c.let("upper", row >> c.word(i) & c.word(1))
    turn = c.let("turn", c.word(far) + upper*c.word(32 - 2*far))
    mine = c.let("mine", c.word(low) ^ (c.word(0) - upper))
    other = c.let("theirs", c.exchange(x, step, exchange)[1])
    x = c.let("bits", (x & mine) | ((other << turn | other >> (c.word(32) - turn)) & (c.word(0xffffffff) ^ mine)))
  return x

def transposed_bits(x:UOp, row:UOp, steps:tuple[int, int, int], exchange:str) -> UOp:
  """Transposes four 8 x 8 bit matrices that eight lanes hold: this lane gives row `row` of each matrix, and gets column `row` of each."""
  # Element 2*i + h of a row (or column) of matrix j is bit 4*j + i + 16*h. `steps` has one distance between lanes for each of the three bits of
  # `row`: two lanes at this distance differ in this bit. The lanes exchange blocks of 1 x 1, then 2 x 2, then 4 x 4 bits (Warren, Hacker's Delight,
  # 7-3), by the instruction `exchange` (`Lane.neighbours`).
  return emit("transposed_bits", dtypes.uint, x, row.cast(dtypes.uint), steps=steps, exchange=exchange)

@compound("lane_bits")
def _lane_bits(c:Any, x:Value, place:Value, *, alternate:bool) -> Value:
  x = c.let("bits", x >> place)
  if not alternate: return x
  x = c.let("own", x & c.word(0xffff))
  return x | x << c.word(SPREAD)

def lane_bits(x:UOp, place:UOp, alternate:bool) -> UOp:
  """Returns the dropout bits `x` shifted right by `place`, so that bit 0 belongs to the first score that this lane holds."""
  # With `alternate` the lane has scores of pairs of consecutive rows, whose bits are neighbours in `x`; the result has the bit of a pair's second
  # row in the upper half of the dword.
  return emit("lane_bits", dtypes.uint, x, place.cast(dtypes.uint), alternate=alternate)

# ***** dropping elements *****

@compound("drop_packed", suffix="_{vector}")
def _drop_packed(c:Any, packed:Value, words:Value, *, places:tuple[tuple[int, int], ...], vector:int) -> Value:
  def kept(i:int) -> Value:
    word, place = places[i]
    return c.element(packed, i) & c.sign_halves(c.element(words, word) << c.word(15 - place))
  return c.vector(*map(kept, range(len(places))))

@compound("drop_numbers", suffix="_{vector}")
def _drop_numbers(c:Any, x:Value, words:Value, *, places:tuple[tuple[int, int], ...], vector:int) -> Value:
  return c.vector(*[c.where_bit(c.element(words, word), place, c.element(x, i)) for i, (word, place) in enumerate(places)])

def drop_packed(packed:UOp, words:UOp, places:tuple[tuple[int, int], ...], vector:int) -> UOp:
  """Returns packed pairs of 16-bit numbers, each replaced by 0 if its bit in the dropout bits `words` is 0; `places` says where the bits are."""
  # For each pair, `places` has (index in `words` of the dword with the pair's two bits, position of the bits in the two halves of this dword). The
  # rendered function has `vector` in its name: a kernel gives vectors with different `places` different numbers.
  return emit("drop_packed", u32(length(packed)), packed, words, places=places, vector=vector)
def drop_numbers(x:UOp, words:UOp, places:tuple[tuple[int, int], ...], vector:int) -> UOp:
  """Returns fp32 numbers, each replaced by 0 if its bit in the dropout bits `words` is 0; `places` says where the bits are."""
  # For each number, `places` has (index in `words` of the dword with the number's bit, position of the bit); `vector` is as for `drop_packed`.
  return emit("drop_numbers", f32(length(x)), x, words, places=places, vector=vector)

# ***** dropout in tensor operations *****

class TensorWords:
  """Arithmetic on uint32 tensors for the random number generator `philox`."""
  @staticmethod
  def word(n:int) -> int: return n
  @staticmethod
  def wide_product(x:Tensor, y:int) -> tuple[Tensor, Tensor]:
    product = as_uint64(x)*y
    return product.cast(dtypes.uint), (product >> 32).cast(dtypes.uint)

def kept_elements(seed:Tensor, p:float, batch:Tensor, head:Tensor, query:Tensor, key:Tensor) -> Tensor:
  """Returns a tensor of bool that tells which elements of P dropout keeps. The index tensors broadcast; `seed` is uint32 (2,)."""
  if not threshold(p): return Tensor.full((batch + head + query + key).shape, True, device=seed.device)
  batch, head, query, key = (x.cast(dtypes.uint) for x in (batch, head, query, key))
  words = philox(TensorWords, (query, key >> 3, head, batch), (seed[0], seed[1]))
  word = functools.reduce(lambda found, i: (key >> 1 & 3).eq(i).where(words[i], found), range(1, len(words)), words[0])
  return (key & 1).eq(1).where(word >> 16, word & 0xffff) >= threshold(p)
