"""Smallest and largest value of every integer of a program, computed exactly from grid, loops, constants and clamps."""
from __future__ import annotations
from collections import Counter
from collections.abc import Callable
from attn.ops.operation import Call
from attn.tinygrad_compat import DType, Ops, UOp, dtypes

# If the range of an integer fits its type, the integer cannot overflow, for any content of the tensors. Only the lowered program is needed for this,
# so it is possible even for shapes that are too large for this machine. Otherwise the emulator checks the value at run time (checks.Overflow).
#
# Integers that may wrap are left out: arithmetic on unsigned numbers, conversions between unsigned types or between types of the same width (they
# keep the bits), and conversions to fewer than 32 bits. All other integers count or address something. A range is (least, most). If nothing is known
# about a number, its range is the range of its type.

Range = tuple[int, int]

# operations that return their first source
THE_SAME = ("uniform", "opaque_uniform", "opaque", "page_number", "element_number", "alone", "warpgroup")
WRAPPING = (Ops.ADD, Ops.SUB, Ops.MUL, Ops.SHL, Ops.NEG)

def held_by(dtype:DType) -> Range:
  """Returns (smallest, largest) of the numbers that an integer type can hold."""
  return (0, 1) if dtype == dtypes.bool else (int(dtype.min), int(dtype.max))

def is_number(u:UOp) -> bool: return u.dtype in dtypes.ints or u.dtype == dtypes.bool

def must_fit(u:UOp) -> bool:
  """Tells whether the emulator raises an error if the integer `u` overflows its type."""
  # no error: arithmetic on unsigned numbers, and conversions that keep the bits or leave fewer than 32
  if u.dtype not in dtypes.ints: return False
  if u.op in WRAPPING: return not dtypes.is_unsigned(u.dtype)
  source = u.src[0].dtype if u.op is Ops.CAST else u.dtype
  return source in dtypes.ints and 4 <= u.dtype.itemsize != source.itemsize and not (dtypes.is_unsigned(source) and dtypes.is_unsigned(u.dtype))

# ***** operations *****

def extremes(f:Callable[[int, int], int], x:Range, y:Range) -> Range:
  """Returns (smallest, largest) of f(a, b) for all a in the range x and b in the range y, where f is monotone in each operand."""
  found = [f(a, b) for a in x for b in y]
  return min(found), max(found)

def quotient(x:int, y:int) -> int: return abs(x)//abs(y)*(1 if (x < 0) == (y < 0) else -1)

def of_quotient(x:Range, y:Range) -> Range|None: return None if y[0] <= 0 <= y[1] else extremes(quotient, x, y)

def remainder(x:Range, y:Range) -> Range:
  most = max(map(abs, y)) - 1
  return max(min(x[0], 0), -most), min(max(x[1], 0), most)

def shifted(f:Callable[[int, int], int], x:Range, by:Range) -> Range|None: return extremes(f, x, by) if by[0] >= 0 and by[1] < 64 else None

def both_bits(x:Range, y:Range) -> Range|None:
  most = [high for low, high in (x, y) if low >= 0]
  return (0, min(most)) if most else None

def some_bits(x:Range, y:Range) -> Range|None: return (0, (1 << max(x[1], y[1]).bit_length()) - 1) if min(x[0], y[0]) >= 0 else None

def differing_bits(x:Range, y:Range) -> Range|None: return (~x[1], ~x[0]) if y == (-1, -1) else some_bits(x, y)     # ~x, in a minimum

OF_TWO: dict[Ops, Callable[[Range, Range], Range|None]] = {
  Ops.ADD: lambda x, y: (x[0] + y[0], x[1] + y[1]), Ops.SUB: lambda x, y: (x[0] - y[1], x[1] - y[0]),
  Ops.MUL: lambda x, y: extremes(int.__mul__, x, y),
  Ops.CDIV: of_quotient, Ops.CMOD: remainder, Ops.MAX: lambda x, y: (max(x[0], y[0]), max(x[1], y[1])), Ops.AND: both_bits, Ops.OR: some_bits,
  Ops.XOR: differing_bits, Ops.CMPLT: lambda x, y: (int(x[1] < y[0]), int(x[0] < y[1])),
  Ops.SHL: lambda x, by: shifted(int.__lshift__, x, by), Ops.SHR: lambda x, by: shifted(int.__rshift__, x, by)}

Sum = dict[UOp|None, int]      # sum of terms: number -> its factor; None -> the constant
NumberBounds = dict[UOp, Range]       # ranges of numbers under some condition
MOST_TERMS = 16                # longest sum that is tracked; in a longer sum, terms that cancel are not found

# ranges of conditions, whose values are 1 and 0
OF_CONDITIONS: dict[Ops, Callable[[Range, Range], Range]] = {
  Ops.CMPLT: lambda x, y: (int(x[1] < y[0]), int(x[0] < y[1])), Ops.AND: lambda x, y: (x[0] & y[0], x[1] & y[1])}

class Ranges:
  """The smallest and the largest value that each integer of a program can have."""
  # `of` maps each integer's UOp to its range; `beyond` maps each integer that may overflow its type to the range that it would have without overflow
  def __init__(self, uops:list[UOp]):
    self.of, self.beyond, self.sums = dict[UOp, Range](), dict[UOp, Range](), dict[UOp, Sum]()
    # uses of each number, counted without uses in which a choice (WHERE) or the gate of an access excludes values that do not fit
    self.unguarded = Counter(s for u in uops for s in u.src)
    self.unguarded.subtract(place.src[1] for place in gated(uops))
    for u in uops:
      if u.op is Ops.CONST and isinstance(u.val, int): self.of[u], self.sums[u] = (int(u.val), int(u.val)), {None: int(u.val)}
      elif is_number(u): self.of[u] = self._within(u, self._exact(u) or held_by(u.dtype))
    self.beyond = {u: exact for u, exact in self.beyond.items() if self.unguarded[u]}

  def _within(self, u:UOp, exact:Range) -> Range:
    """Returns `exact`, the range of the integer `u`, if its type can hold it. Otherwise records the overflow, and returns the type's whole range."""
    total = self._sum(u)
    # the terms of a sum may give a narrower range
    if len(total) > 1:
      low, high = self._extent(total)
      exact = max(low, exact[0]), min(high, exact[1])
    (low, high), (least, most) = exact, held_by(u.dtype)
    if fits := least <= low and high <= most: self.sums[u] = total
    else:
      self.sums[u] = {u: 1}
      if must_fit(u): self.beyond[u] = exact
    return exact if fits else (least, most)

  def _exact(self, u:UOp) -> Range|None:
    """Returns (smallest, largest) of the integer `u` if no overflow happened, or None if nothing is known."""
    known = [self.of.get(s) for s in u.src]
    if u.op in (Ops.SPECIAL, Ops.RANGE): return (0, max(known[0][1] - 1, 0)) if known[0] is not None else None
    if u.op is Ops.PARAM: return int(u.vmin), int(u.vmax)       # a Variable
    if u.op in (Ops.AFTER, Ops.CAST, Ops.INDEX) or (isinstance(u.arg, Call) and u.arg.name in THE_SAME): return known[0]
    if isinstance(u.arg, Call) and u.arg.name == "at_least_0": return None if known[0] is None else (max(known[0][0], 0), max(known[0][1], 0))
    if u.op is Ops.WHERE: return self._chosen(u)
    if u.dtype == dtypes.bool:
      (x, y), rule = known if len(known) == 2 else (None, None), OF_CONDITIONS.get(u.op)
      return rule(x, y) if rule is not None and x is not None and y is not None else None
    if u.op in OF_TWO or u.op is Ops.NEG:
      x, y = (known[0], known[1]) if len(known) == 2 else ((0, 0), known[0])
      return OF_TWO[u.op if len(known) == 2 else Ops.SUB](x, y) if x is not None and y is not None else None
    return None

  # ***** sums, in which equal terms of opposite sign cancel *****
  def _sum(self, u:UOp) -> Sum:
    """Returns the integer `u` as a sum {term: factor}, with the constant under the key None: 3*x - y + 5 gives {x: 3, y: -1, None: 5}."""
    parts, found = [self.sums.get(s) for s in u.src], None
    if u.op is Ops.CAST and parts[0] is not None: found = parts[0]
    elif len(parts) == 2 and (x := parts[0]) is not None and (y := parts[1]) is not None:
      factor = y.get(None, 0) if not set(y) - {None} else None      # factor of x, if y is a constant
      if u.op is Ops.ADD: found = plus(x, y, 1)
      elif u.op is Ops.SUB: found = plus(x, y, -1)
      elif u.op is Ops.XOR and factor == -1: found = plus({None: -1}, x, -1)
      elif u.op is Ops.MUL and factor is not None: found = plus({}, x, factor)
      elif u.op is Ops.SHL and factor is not None and 0 <= factor < 64: found = plus({}, x, 1 << factor)
    return found if found is not None and len(found) <= MOST_TERMS else {u: 1}

  def _extent(self, total:Sum) -> Range:
    low = high = total.get(None, 0)
    for x, factor in total.items():
      if x is None: continue
      a, b = sorted(factor*n for n in self.of[x])
      low, high = low + a, high + b
    return low, high

  # ***** choices *****
  def _chosen(self, u:UOp) -> Range|None:
    """Returns (smallest, largest) of the integer `u`, a WHERE: one of two values, chosen by a condition. None if nothing is known."""
    condition, *branches = u.src
    if any(b not in self.of for b in branches): return None
    # where x < y holds, x is below the largest y; where it doesn't, y is at most the largest x: so the ranges of x and y, or of casts of them, are
    # narrower
    possible = [(low, high) for low, high in map(self._taken, branches, self._known_by(condition)) if low <= high]    # one branch may never be taken
    return (min(low for low, _ in possible), max(high for _, high in possible)) if possible else None

  def _known_by(self, condition:UOp) -> tuple[NumberBounds, NumberBounds]:
    """Returns two dicts {number: range} that follow from a condition such as x < y: the ranges if the condition is true, and the ranges if it is
    false."""
    if condition.op is Ops.CMPLT and all(s in self.of for s in condition.src):
      x, y = condition.src
      (a, b), (c, d) = self.of[x], self.of[y]
      return {x: (a, min(b, d - 1)), y: (max(c, a + 1), d)}, {x: (max(a, c), b), y: (c, min(d, b))}
    if condition.op not in (Ops.AND, Ops.OR): return {}, {}
    (yes, no), (other_yes, other_no) = map(self._known_by, condition.src)
    return (both(yes, other_yes), {}) if condition.op is Ops.AND else ({}, both(no, other_no))

  def _taken(self, branch:UOp, bounds:NumberBounds) -> Range:
    """Returns (smallest, largest) of `branch`, the value that a WHERE takes while a condition holds; `bounds` has the ranges {number: range} under
    this condition."""
    # `bounds` has the ranges of numbers there; elsewhere the value of `branch` does not matter
    if branch in bounds: return bounds[branch]
    if branch.op is not Ops.CAST or (exact := bounds.get(branch.src[0])) is None: return self.of[branch]
    least, most = held_by(branch.dtype)
    if exact[0] < least or exact[1] > most: return self.of[branch]
    self.unguarded[branch] -= 1
    return exact

def gated(uops:list[UOp]) -> set[UOp]:
  """Returns the addresses that are accessed only under a condition. If such an address overflows, the access does not happen."""
  # Where the condition is false, the access does not happen. tinygrad uses 32-bit indices only up to 2^31 elements, so larger buffers are left out.
  places = {u.src[1] if u.op is Ops.IF else u.src[0] for u in uops if u.op is Ops.IF or (u.op is Ops.LOAD and len(u.src) == 3)}
  return {u for u in places if u.op in (Ops.INDEX, Ops.SHRINK) and u.src[0].max_numel() <= held_by(dtypes.int)[1] + 1}

def both(x:NumberBounds, y:NumberBounds) -> NumberBounds:
  """Returns {number: range} where both `x` and `y` hold: a number in both dicts gets the intersection of its two ranges."""
  return x | y | {u: (max(x[u][0], y[u][0]), min(x[u][1], y[u][1])) for u in x if u in y}

def plus(x:Sum, y:Sum, factor:int) -> Sum:
  """Returns the sum x + factor*y of two sums {term: factor}, without terms of factor 0."""
  found = {key: x.get(key, 0) + factor*y.get(key, 0) for key in (*x, *y)}
  return {key: n for key, n in found.items() if n or key is None}
