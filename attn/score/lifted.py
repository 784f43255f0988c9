"""A caller's score_mod or mask_mod on a fragment (the scores that a lane holds): one UOp for each element, or one for each vector of fp32 numbers.
Begin with `Lifted`."""
from __future__ import annotations
import functools, math
from dataclasses import dataclass
from typing import Any, NamedTuple
from attn.functions.indices import linear_in
from attn.functions.symbols import (BATCH, FAR, KEY, QUERY, QUERY_HEAD, SCORE, depends, elements_of, indices_of, is_element, number_of_tensor,
                                    tensor_of)
from attn.functions.trace import MODERATE
from attn.ops import common as ops
from attn.ops.operation import integer
from attn.score.term import Fragment
from attn.tinygrad_compat import Ops, UOp, dtypes
from attn.values import DTYPE_NAMES

# A traced function is a UOp whose arguments are symbols (attn/functions). Each UOp inside the function is computed once, in one of three forms:
# - What is equal for all columns of the fragment is a scalar. Most such scalars do not change in a kernel's loop, so compilers compute them before
# the loop.
# - What differs between columns, and is an integer or a condition, is a scalar for each element.
# - What differs between columns, or depends on the score, and is a float, is a list of vectors. The operations of attn/ops add and multiply whole
# vectors, as the chip's packed instructions do.
# A constant that multiplies the result, such as log2(e) for scores in base 2, is multiplied into the function's own constants where that is possible
# (`scaled`).

Elementwise = list[list[UOp]]     # scalars: for each vector of the fragment, one UOp per element

@dataclass(frozen=True)
class Evaluated:
  """Values of a UOp inside score_mod or mask_mod for the scores that a lane holds; exactly one field is set."""
  same: UOp|None = None  # one scalar for all columns
  each: Elementwise|None = None  # a scalar for each element
  vectors: list[UOp]|None = None  # vectors of fp32 numbers

def elementwise_of(u:UOp, found:Elementwise) -> Evaluated:
  """Makes an `Evaluated` for the UOp u from one scalar for each score of the lane; joins float32 scalars to vectors."""
  return Evaluated(vectors=[ops.build(*x) for x in found]) if u.dtype == dtypes.float else Evaluated(each=found)

class Line(NamedTuple):
  """A number for each column of the score matrix, (start + step*n)*weight; n counts columns from the lane's first one."""
  start: UOp
  step: int
  weight: UOp

IN_DWORDS = ("float16", "bfloat16", "float32", "int32", "uint32")     # dtypes whose elements a buffer load returns as dwords
EXACT = 2**24     # whole numbers up to this are exact in fp32

class Lifted:
  """Computes a caller's score_mod or mask_mod on one fragment, the scores that a lane holds."""
  # `told` names the function in error messages. `raw` are the scores that the function gets, as vectors (None for a mask); `raw` times `factor` are
  # scores in base e.
  def __init__(self, at:Fragment, told:str, raw:list[UOp]|None=None, factor:float=1.0) -> None:
    self.at, self.told, self.raw, self.factor = at, told, raw, factor
    self.lengths = [len(columns) for columns in at.columns]
    own, begin = integer(at.row.index), integer(at.begin)
    shift = integer(at.walk.diagonal(UOp.const(0)))              # from the index of a row to the column where the diagonal meets it
    self.walked = KEY if at.over == "keys" else QUERY            # the symbol that differs between columns
    self.first = begin if at.over == "keys" else begin - shift   # its value at the lane's first column
    owned = {QUERY: own + shift} if at.over == "keys" else {KEY: own}
    first = at.given.get("first_batch_and_head")
    batch, head = integer(at.row.batch), integer(at.row.head)
    if first is not None: batch, head = (x + first[n].load().cast(dtypes.int) for n, x in enumerate((batch, head)))
    self.symbols: dict[UOp, UOp] = {BATCH: batch, QUERY_HEAD: head, **owned}
    self.parts = dict[UOp, Evaluated]()
    self.factors = dict[tuple[UOp, float], list[UOp]]()

  # ***** parts *****
  def part(self, u:UOp) -> Evaluated:
    """Returns the values of u, a UOp inside score_mod or mask_mod, for the scores that the lane holds; computes u's sources first."""
    for x in u.toposort(gate=lambda x: x not in self.parts) if u not in self.parts else ():
      if x not in self.parts and x._shape == () and x.op is not Ops.STACK: self.parts[x] = self.computed(x)
    return self.parts[u]

  def computed(self, u:UOp) -> Evaluated:
    """Computes the values of u, a UOp inside score_mod or mask_mod, for the scores that the lane holds, from the values of u's sources."""
    if u in self.symbols: return Evaluated(same=self.symbols[u])
    if u is SCORE:
      assert self.raw is not None
      return Evaluated(vectors=[ops.mul(x, self.factor) for x in self.raw] if self.factor != 1 else self.raw)
    if u is self.walked: return Evaluated(each=[[self.first + self.column(n, i) for i in range(size)] for n, size in enumerate(self.lengths)])
    if u.op is Ops.CONST: return Evaluated(same=u)
    if is_element(u): return self.element(u)
    parts = [self.parts[s] for s in u.src]
    if all(x.same is not None for x in parts): return Evaluated(same=u.replace(src=tuple(x.same for x in parts if x.same is not None)))
    if u.op is Ops.CAST and u.dtype == dtypes.float and is_element(u.src[0]) and parts[0].each is not None:      # 16-bit floats are loaded as fp32
      return Evaluated(vectors=[ops.build(*map(as_fp32, x)) for x in parts[0].each])
    if (step := self.step(u)) is not None: return Evaluated(vectors=self.numbers_from(self.at_first(u.src[0]), step))
    if u.op is Ops.MUL and u.dtype == dtypes.float and (found := constant_factor(u)) is not None: return Evaluated(vectors=self.scaled(*found))
    if is_magnitude(u): return Evaluated(vectors=[ops.absolute(x) for x in self.vectors(u.src[0])])
    if u.dtype == dtypes.float and u.op in OF_VECTORS: return Evaluated(vectors=OF_VECTORS[u.op](*[self.vectors(s) for s in u.src]))
    operands = zip(*[self.each(s) for s in u.src])      # for each vector, the elements of each operand
    return elementwise_of(u, [[u.replace(src=tuple(xs)) for xs in zip(*vector)] for vector in operands])

  def each(self, u:UOp) -> Elementwise:
    """Returns the values of u, a UOp inside score_mod or mask_mod, as one scalar for each score that the lane holds."""
    x = self.part(u)
    if x.same is not None: return [[x.same]*n for n in self.lengths]
    if x.each is not None: return x.each
    assert x.vectors is not None
    return [[ops.extract(y, i) for i in range(n)] for y, n in zip(x.vectors, self.lengths)]

  def vectors(self, u:UOp) -> list[UOp]:
    """Returns the values of u, a UOp inside score_mod or mask_mod, as fp32 vectors with one element for each score that the lane holds."""
    x = self.part(u)
    if x.vectors is not None: return x.vectors
    if x.same is not None: return [ops.splat(as_fp32(x.same), n) for n in self.lengths]
    return [ops.build(*map(as_fp32, y)) for y in self.each(u)]

  # ***** columns *****
  def column(self, vector:int, i:int) -> int:
    """Returns the column of the score at element `i` of vector number `vector`, counted from the lane's first column."""
    return self.at.columns[0][i] + vector*self.at.apart - self.at.columns[0][0]
  def step(self, u:UOp) -> int|None:
    """Returns by how much the value of u grows from each column to the next; None if this differs between columns, or fp32 would round a value."""
    # The UOp must be an integer expression that is converted to fp32, grow by the same amount in each column, and be exact in fp32.
    if u.op is not Ops.CAST or u.dtype != dtypes.float or not dtypes.is_int(u.src[0].dtype): return None
    return step if (step := linear_in(u.src[0], self.walked)) and self.is_exact(u.src[0], step) else None
  def numbers_from(self, first:UOp, step:int) -> list[UOp]:
    """Returns fp32 vectors with first + step*n for each score that the lane holds; n is the score's column, counted from the lane's first one."""
    # All vectors use the same few constants.
    steps = [UOp.const(float(step*self.column(0, i)), dtypes.float) for i in range(self.lengths[0])]
    start = first.cast(dtypes.float)                # one conversion for all: on NVIDIA it takes the time of eight additions
    def moved(by:int) -> UOp: return ops.add(start, UOp.const(float(step*by), dtypes.float))
    def vector(n:int, size:int) -> UOp:
      if size <= 2: return ops.build(*[moved(self.column(n, i)) for i in range(size)])
      return ops.add(ops.splat(moved(n*self.at.apart), size), ops.build(*steps[:size]))
    return [vector(n, size) for n, size in enumerate(self.lengths)]
  def line(self, u:UOp, k:float) -> Line|None:
    """Returns k*u as a `Line`, or None if u does not grow by the same amount from each column to the next."""
    # The product of all factors could overflow in fp32. Elements of tensors are assumed to be at most 2^64 (MODERATE).
    if not abs(k) <= MODERATE: return None
    if (step := self.step(u)) is not None: return Line(self.at_first(u.src[0]).cast(dtypes.float), step, UOp.const(k, dtypes.float))
    if u.op is not Ops.MUL: return None
    if (found := constant_factor(u)) is not None: return self.line(found[0], found[1]*k)
    for x, y in (u.src, u.src[::-1]):
      if (same := self.part(x).same) is not None and (line := self.line(y, k)) is not None:
        return line._replace(weight=ops.mul(as_fp32(same), line.weight))
    return None
  def plus_line(self, x:UOp, line:Line, k:float) -> list[UOp]:
    """Returns fp32 vectors with k*x plus the value of `line` at the score's column, for each score that the lane holds."""
    def at(n:int) -> UOp:
      # Returns the value of `line` at the first column of vector n.
      start = ops.add(line.start, UOp.const(float(line.step*n*self.at.apart), dtypes.float)) if max(self.lengths) > 2 else line.start
      return ops.mul(start, line.weight)
    # Each element takes two operations: one adds the line's value at the first column of its vector, and one adds the growth from there to the
    # element's column. If x is the score, the first operation also multiplies by k.
    firsts = [ops.splat(at(n), size) for n, size in enumerate(self.lengths)]
    if x is SCORE and self.raw is not None: begun = [ops.fma(raw, self.factor*k, first) for raw, first in zip(self.raw, firsts)]
    else: begun = [ops.add(y, first) for y, first in zip(self.scaled(x, k), firsts)]
    def steps(n:int, size:int) -> UOp:
      of = 0 if max(self.lengths) > 2 else n
      return ops.build(*[UOp.const(float(line.step*self.column(of, i)), dtypes.float) for i in range(size)])
    return [ops.fma(steps(n, size), line.weight, y) for (n, size), y in zip(enumerate(self.lengths), begun)]
  def at_first(self, u:UOp) -> UOp:
    """Returns the value of u, an integer UOp inside score_mod or mask_mod, at the lane's first column."""
    return u.substitute({**self.symbols, self.walked: self.first})
  def is_exact(self, u:UOp, step:int) -> bool:
    """Returns whether fp32 represents the integer u exactly at all columns of the lane; u grows by `step` from each column to the next."""
    first = self.at_first(u)
    reach = abs(step)*(self.column(len(self.lengths) - 1, self.lengths[-1] - 1) + 1)
    return first.vmin - reach > -EXACT and first.vmax + reach < EXACT

  # ***** elements of tensors *****
  def element(self, u:UOp) -> Evaluated:
    """Loads the element of a tensor in mod_tensors that u reads: once if the lane's scores all read the same element, otherwise once for each
    score."""
    # For a query or key that does not exist, the index may lie outside the tensor. Then some other element is loaded, and its value is not used.
    parts = [self.parts[s] for s in indices_of(u)]
    if all(x.same is not None for x in parts): return Evaluated(same=self.loaded(u, [x.same for x in parts if x.same is not None]))
    each = zip(*[self.each(s) for s in indices_of(u)])     # for each vector, the elements of each index
    def vector(n:int, indices:tuple[list[UOp], ...]) -> list[UOp]:
      return [self.loaded(u, list(xs), self.column(n, i)) for i, xs in enumerate(zip(*indices))]
    return elementwise_of(u, [vector(n, indices) for n, indices in enumerate(each)])

  def loaded(self, u:UOp, indices:list[UOp], column:int|None=None) -> UOp:
    """Loads the element at `indices` of the tensor that u reads. `column` is the column of the score, or None if all scores share the element."""
    number, shape = number_of_tensor(u), [int(n) for n in tensor_of(u).shape]
    buffer, count = ops.flat(self.at.given[f"mod_tensor{number}"]), math.prod(shape)
    checked = [self.checked(x, column, size, number, axis) for axis, (x, size) in enumerate(zip(indices, shape))]
    nbytes, name = count*u.dtype.itemsize, DTYPE_NAMES.get(u.dtype)
    if column is None or name not in IN_DWORDS or nbytes > ops.MAX_RECORDS:
      return buffer[flat_index([within(x, n) for x, n in zip(checked, shape)], shape)].load()
    def placed(x:UOp, value:UOp, index:UOp, size:int) -> UOp:
      # a tensor may hold any number, and as far as tinygrad knows, a device's first batch and head may be any
      if has_negative_term(value) or self.of_device(index): x = ops.at_least_0(x)
      return x.minimum(size) if elements_of(index) or self.of_device(index) else x
    offset = flat_index([placed(*axis) for axis in zip(checked, indices, indices_of(u), shape)], shape)*u.dtype.itemsize
    words = ops.buffer_load(buffer[0], UOp.const(nbytes), offset, u.dtype.itemsize)
    if u.dtype in (dtypes.half, dtypes.bfloat16): return ops.widen_to_float(words, 1, name).cast(u.dtype)
    return words if u.dtype == dtypes.uint else words.bitcast(u.dtype)

  def of_device(self, index:UOp) -> bool:
    """Returns whether an index into one of mod_tensors contains a batch or head number, which must count over all devices instead of one."""
    # The kernel loads the numbers of the device's first batch and head.
    return "first_batch_and_head" in self.at.given and any(depends(index, symbol) for symbol in (BATCH, QUERY_HEAD))

  def checked(self, index:UOp, column:int|None, size:int, number:int, axis:int) -> UOp:
    """Returns `index`, which indexes axis `axis` of mod_tensors[number]; on the emulator with a check that it lies in 0..size-1."""
    if index.vmin >= 0 and index.vmax < size: return index
    first, last = self.at.limits
    # The check is made for pairs of a query and a key that are visible: in column `column` of the fragment, or in any column.
    if column is None: limits = UOp.const(0, dtypes.int), integer(last if first is None else last - first.maximum(0))
    else: limits = UOp.const(-FAR, dtypes.int) if first is None else integer(first), integer(last)
    told = f"{self.told}: index of axis {axis} of mod_tensors[{number}], counted from 0,"
    return ops.element_number(index, limits, self.at.row.there, column or 0, size, told)

  # ***** with a factor *****
  def scaled(self, u:UOp, k:float) -> list[UOp]:
    """Returns k*u, for a UOp u of a float dtype, as fp32 vectors with one element for each score that the lane holds."""
    self.part(u)
    if (u, k) not in self.factors: self.factors[u, k] = self._scaled(u, k)
    return self.factors[u, k]

  def _scaled(self, u:UOp, k:float) -> list[UOp]:
    if k == 1 and u in self.parts: return self.vectors(u)
    if u is SCORE and self.raw is not None: return [ops.mul(x, self.factor*k) for x in self.raw]
    if u.op is Ops.CONST: return [ops.splat(float(u.val)*k, n) for n in self.lengths]
    if u.op is Ops.MUL:
      if (found := constant_factor(u)) is not None and math.isfinite(found[1]*k): return self.scaled(found[0], found[1]*k)
      for x, y in (u.src, u.src[::-1]):     # the factor goes into an operand that is equal for all columns
        if (same := self.parts[x].same) is not None: return [ops.mul(v, ops.mul(as_fp32(same), k)) for v in self.vectors(y)]
    if u.op is Ops.WHERE: return [ops.select_each(*of) for of in zip(self.each(u.src[0]), *[self.scaled(s, k) for s in u.src[1:]])]
    if u.op is Ops.ADD:
      for x, y in (u.src, u.src[::-1]):
        if (line := self.line(y, k)) is not None: return self.plus_line(x, line, k)
      x, y = u.src if takes_factor(u.src[1]) else u.src[::-1]
      if takes_factor(x): return [ops.add(a, b) for a, b in zip(self.scaled(x, k), self.scaled(y, k))]
      return [ops.fma(a, k, b) for a, b in zip(self.vectors(x), self.scaled(y, k))]
    return [ops.mul(x, k) for x in self.vectors(u)]

def constant_factor(u:UOp) -> tuple[UOp, float]|None:
  """Returns (the other factor, the constant) if one factor of the product u is a finite constant, otherwise None."""
  for x, y in (u.src, u.src[::-1]):
    if x.op is Ops.CONST and math.isfinite(x.val): return y, float(x.val)
  return None

def is_magnitude(u:UOp) -> bool:
  """Returns whether a UOp is the absolute value of an fp32 number, written as max(x, -x)."""
  return u.op is Ops.MAX and u.dtype == dtypes.float and u.src[1].op is Ops.MUL and constant_factor(u.src[1]) == (u.src[0], -1.0)

def takes_factor(u:UOp) -> bool:
  """Returns whether u times a constant takes no operation more than u, because constants inside u can be multiplied instead."""
  if u is SCORE or u.op is Ops.CONST: return True
  if u.op is Ops.MUL: return any(s.op is Ops.CONST for s in u.src)
  return u.op in (Ops.ADD, Ops.WHERE) and all(takes_factor(s) for s in u.src if s.dtype != dtypes.bool)

def as_fp32(x:UOp) -> UOp:
  if x.op is Ops.CAST and x.src[0].dtype == dtypes.float: return x.src[0]     # a 16-bit float that was loaded as fp32
  return x if x.dtype == dtypes.float else x.cast(dtypes.float)

def flat_index(indices:list[UOp], shape:list[int]) -> UOp:
  return functools.reduce(lambda flat, of: flat*of[1] + of[0], zip(indices, shape), UOp.const(0, dtypes.int))

def has_negative_term(x:UOp) -> bool:
  """Returns whether an integer expression may be negative; for a sum, whether any of its terms may be negative."""
  return any(map(has_negative_term, x.src)) if x.op is Ops.ADD else x.vmin < 0

def within(index:UOp, size:int) -> UOp:
  """Returns an index clamped to 0..size-1."""
  if index.vmin < 0: index = index.maximum(0)
  return index if index.vmax < size else index.minimum(size - 1)

def by_vector(operation:Any) -> Any:
  """Returns a function on lists of vectors that applies `operation` to the first vectors of all lists, then to the second ones, and so on."""
  return lambda *lists: [operation(*xs) for xs in zip(*lists)]

# operations of traced functions that attn/ops has for vectors
OF_VECTORS: dict[Ops, Any] = {Ops.ADD: by_vector(ops.add), Ops.MUL: by_vector(ops.mul), Ops.SUB: by_vector(ops.sub), Ops.MAX: by_vector(ops.max_),
                              Ops.RECIPROCAL: by_vector(ops.rcp), Ops.EXP2: by_vector(ops.exp2), Ops.LOG2: by_vector(ops.log2)}
