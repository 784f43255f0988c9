"""Converts compound operations, which are defined by Python functions, to UOps."""
from __future__ import annotations
import math, operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from attn.ops.operation import LocalVariable
from attn.tinygrad_compat import UOp, as_uint64, dtypes
from attn.values import FLOATS

@dataclass(frozen=True)
class Elements:
  """A scalar or a vector, as a tuple of UOps: one for each element."""
  each: tuple[UOp, ...]
  def with_(self, operation:Callable[[Any, Any], Any], other:Any) -> Elements: return elementwise(operation, self, other)
  def __add__(self, y:Any) -> Elements: return self.with_(operator.add, y)
  def __radd__(self, y:Any) -> Elements: return self.with_(lambda a, b: b + a, y)
  def __sub__(self, y:Any) -> Elements: return self.with_(operator.sub, y)
  def __rsub__(self, y:Any) -> Elements: return self.with_(lambda a, b: b - a, y)
  def __mul__(self, y:Any) -> Elements: return self.with_(operator.mul, y)
  def __rmul__(self, y:Any) -> Elements: return self.with_(lambda a, b: b*a, y)
  def __neg__(self) -> Elements: return elementwise(operator.neg, self)
  def __lt__(self, y:Any) -> Elements: return self.with_(operator.lt, y)
  def __and__(self, y:Any) -> Elements: return self.with_(operator.and_, y)
  def __or__(self, y:Any) -> Elements: return self.with_(operator.or_, y)
  def __xor__(self, y:Any) -> Elements: return self.with_(operator.xor, y)
  def __lshift__(self, y:Any) -> Elements: return self.with_(operator.lshift, y)
  def __rshift__(self, y:Any) -> Elements: return self.with_(operator.rshift, y)

def number_of(x:float|UOp) -> Elements: return Elements((x if isinstance(x, UOp) else UOp.const(float(x), dtypes.float),))

def elementwise(f:Callable[..., UOp], *xs:Any) -> Elements:
  """Returns the vector of results of `f`, called for each element of the operands; a scalar operand is used for every element."""
  def value(x:Any) -> Elements:
    if isinstance(x, Elements): return x
    return number_of(x) if isinstance(x, float) else Elements((x,))
  values = [value(x).each for x in xs]
  n = max(map(len, values))
  return Elements(tuple(map(f, *[each if len(each) > 1 else each*n for each in values])))

class PlainUOps:
  """Converts a compound operation, which is defined by a Python function, to UOps, if the operation needs only one thread."""
  inf, nan = number_of(math.inf), number_of(math.nan)
  def let(self, name:str, x:Elements) -> Elements: return x
  def variable(self, name:str, x:Elements) -> LocalVariable: return LocalVariable(x)
  def assign(self, v:LocalVariable, x:Elements) -> None: v.value = x
  # arithmetic
  def number(self, x:float) -> Elements: return number_of(x)
  def fma(self, x:Elements, y:Elements, z:Elements) -> Elements: return elementwise(lambda a, b, c: a*b + c, x, y, z)
  def exp2(self, x:Elements) -> Elements: return elementwise(UOp.exp2, x)
  def log2(self, x:Elements) -> Elements: return elementwise(UOp.log2, x)
  def rough_log2(self, x:Elements) -> Elements: return self.log2(x)
  def rcp(self, x:Elements) -> Elements: return elementwise(UOp.reciprocal, x)
  def abs(self, x:Elements) -> Elements: return elementwise(lambda a: (a < 0).where(-a, a), x)
  def max(self, x:Elements, y:Elements) -> Elements: return elementwise(UOp.maximum, x, y)
  def select(self, condition:Elements, x:Any, y:Any) -> Elements: return elementwise(lambda c, a, b: c.where(a, b), condition, x, y)
  def masked(self, x:Elements, offsets:Sequence[int], comparison:str, limit:Elements, instead:Any) -> Elements:
    beyond = {">": operator.gt, "<": operator.lt}[comparison]
    keys = Elements(tuple(UOp.const(n, dtypes.int) for n in offsets))
    return elementwise(lambda a, n, most, other: beyond(n, most).where(other, a), x, keys, limit, instead)
  def beyond(self, x:Elements, offsets:Sequence[int], first:Elements, last:Elements, instead:Any) -> Elements:
    return self.masked(self.masked(x, offsets, ">", last, instead), offsets, "<", first, instead)
  # vectors
  def length(self, x:Elements) -> int: return len(x.each)
  def element(self, x:Elements, i:int) -> Elements: return Elements((x.each[i],))
  def part(self, x:Elements, start:int, n:int) -> Elements: return Elements(x.each[start:start + n])
  def vector(self, *xs:Elements) -> Elements: return self.join(*xs)
  def join(self, *xs:Elements) -> Elements: return Elements(tuple(y for x in xs for y in x.each))
  def splat(self, x:Elements, n:int) -> Elements: return Elements(x.each*n)
  def constants(self, xs:Sequence[float]) -> Elements: return self.join(*map(number_of, xs))
  # bits
  def as_float(self, x:Elements) -> Elements: return elementwise(lambda a: a.bitcast(dtypes.float), x)
  def pack(self, x:Elements, dtype:str) -> Elements:
    halves = [y.cast(FLOATS[dtype]).bitcast(dtypes.ushort).cast(dtypes.uint) for y in x.each]
    return Elements(tuple(low | high << 16 for low, high in zip(halves[::2], halves[1::2])))
  def widen(self, bits:Elements, dtype:str) -> Elements:
    return elementwise(lambda a: a.cast(dtypes.ushort).bitcast(FLOATS[dtype]).cast(dtypes.float), bits)
  def high_half(self, x:Elements) -> Elements: return x >> 16
  def word(self, n:int) -> Elements: return Elements((UOp.const(n, dtypes.uint),))
  def wide_product(self, x:Elements, y:int) -> tuple[Elements, Elements]:
    product = elementwise(lambda a: as_uint64(a)*y, x)
    return elementwise(lambda a: a.cast(dtypes.uint), product), elementwise(lambda a: (a >> 32).cast(dtypes.uint), product)
  def at_least(self, x:Elements, least:int) -> Elements:
    zero, one = (UOp.const(n, dtypes.uint) for n in (0, 1))
    low, high = (elementwise(lambda a: (a < least).where(zero, one), half) for half in (x & 0xffff, x >> 16))
    return low | high << 16
  def where_bit(self, word:Elements, bit:int, x:Elements) -> Elements: return elementwise(lambda w, a: (w >> bit & 1).eq(1).where(a, 0.0), word, x)
