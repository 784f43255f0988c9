"""Runs compound operations, which are defined by Python functions, in numpy."""
from __future__ import annotations
from collections.abc import Callable, Sequence
from typing import Any
import numpy as np
from attn.ops import numerics
from attn.ops.eight_bits import bytes_of, numbers, packed_bytes
from attn.ops.numerics import ONES_OF, Array
from attn.ops.operation import Lanes, Value, LocalVariable

class Numbers:
  """Runs a compound operation, which is defined by a Python function, on numpy arrays: (threads,) for a scalar, (n, threads) for a vector."""
  # a register array is any pointer that the emulator's `load_register` takes
  inf, nan = np.float32(np.inf), np.float32(np.nan)
  def __init__(self, lanes:Lanes): self.lanes, self.gate = lanes, lanes.active

  # naming and control
  def let(self, name:str, x:Value) -> Value: return x
  def variable(self, name:str, x:Value) -> LocalVariable: return LocalVariable(x)
  def assign(self, v:LocalVariable, x:Value) -> None: v.value = np.where(self.gate, x, v.value)
  def when(self, condition:Array, body:Callable[[], None]) -> None:
    outside, self.gate = self.gate, self.gate & condition
    if self.gate.any(): body()
    self.gate = outside
  # arithmetic
  def fma(self, x:Value, y:Value, z:Value) -> Value: return numerics.fused_multiply_add(x, np.asarray(y, np.float32), np.asarray(z, np.float32))
  def exp2(self, x:Value) -> Value: return numerics.power_of_two(x)
  def log2(self, x:Value) -> Value: return numerics.logarithm(x)
  def rough_log2(self, x:Value) -> Value:
    # on a chip the result may have an error of 2^-22
    return self.log2(x)
  def rcp(self, x:Value) -> Value: return numerics.reciprocal(x)
  def abs(self, x:Value) -> Value: return np.abs(x)
  def max(self, x:Value, y:Value) -> Value: return np.fmax(x, y)
  def select(self, condition:Value, x:Value, y:Value) -> Value: return np.where(condition, np.asarray(x, np.float32), np.asarray(y, np.float32))
  def number(self, x:float) -> Value: return np.float32(x)
  def masked(self, x:Value, offsets:Sequence[int], operator:str, limit:Value, instead:Value) -> Value:
    """Returns x with `instead` in place of x[i] if offsets[i] is above `limit` (`operator` ">") or below `limit` ("<")."""
    beyond = {">": np.greater, "<": np.less}[operator](np.array(offsets)[:, None], limit)
    return np.where(beyond, instead, x)
  def beyond(self, x:Value, offsets:Sequence[int], first:Value, last:Value, instead:Value) -> Value:
    """Returns x with `instead` in place of x[i] if offsets[i], a column, is not in `first`..`last`."""
    return self.masked(self.masked(x, offsets, ">", last, instead), offsets, "<", first, instead)
  # vectors
  def length(self, x:Value) -> int: return x.shape[0] if x.ndim > 1 else 1
  def element(self, x:Value, i:int) -> Value: return x[i] if x.ndim > 1 else x
  def part(self, x:Value, start:int, n:int) -> Value: return x[start] if n == 1 else x[start:start + n]
  def vector(self, *xs:Value) -> Value: return np.stack(np.broadcast_arrays(*xs)) if len(xs) > 1 else xs[0]
  def join(self, *xs:Value) -> Value: return np.concatenate([x if x.ndim > 1 else x[None] for x in xs])
  def splat(self, x:Value, n:int) -> Value: return np.broadcast_to(x, (n, len(self.gate))) if n > 1 else x
  def constants(self, xs:Sequence[float]) -> Value: return np.array(xs, np.float32)[:, None]
  # bits
  def as_float(self, x:Value) -> Value: return numerics.bits_as(x, "float32")
  def pack(self, x:Value, dtype:str) -> Value:
    packed = packed_bytes(x, dtype, self.lanes.saturates) if numerics.IN_A_DWORD[dtype] == 4 else numerics.pack_pairs(x, dtype)
    return packed if len(packed) > 1 else packed[0]
  def pack_weights(self, x:Value, dtype:str) -> Value:
    """Returns elements of P rounded to `dtype` and packed into dwords."""
    # A chip may give another result for an element that is not finite or above LARGEST_WEIGHT (2^111): any value that is not finite, or the largest
    # 8-bit float.
    return self.pack(x, dtype)
  def widen(self, bits:Value, dtype:str) -> Value: return numerics.widen(bits, dtype)
  def widen_four(self, word:Value, dtype:str) -> Value:
    """Returns the four 8-bit floats of a dword, converted to fp32."""
    return numbers(bytes_of(word), dtype)
  def high_half(self, x:Value) -> Value: return x >> np.uint32(16)
  def add_pairs(self, x:Value, y:Value, dtype:str) -> Value:
    """Returns the sum of two dwords that hold two 16-bit floats each, as a dword of two floats."""
    low, high = (self.widen(f(x), dtype) + self.widen(f(y), dtype) for f in (np.asarray, self.high_half))
    return numerics.pack_pairs(np.stack([low, high]), dtype)[0]
  def word(self, n:int) -> Value: return np.uint32(n)
  def wide_product(self, x:Value, y:int) -> tuple[Value, Value]:
    """Returns (low dword, high dword) of the 64-bit product of two dwords."""
    product = np.asarray(x).astype(np.uint64)*np.uint64(y)
    return product.astype(np.uint32), (product >> np.uint64(32)).astype(np.uint32)
  def at_least(self, x:Value, least:int) -> Value:
    """Returns a dword in which each 16-bit half is 1 if the same half of x is at least `least`, otherwise 0."""
    low, high = ((half >= least).astype(np.uint32) for half in (x & np.uint32(0xffff), x >> np.uint32(16)))
    return low | high << np.uint32(16)
  def sign_halves(self, x:Value) -> Value:
    """Returns a dword in which each 16-bit half has all its bits equal to the highest bit of this half of x."""
    halves = np.ascontiguousarray(x, np.uint32).view(np.int16) >> np.int16(15)
    return halves.view(np.uint32)
  def where_bit(self, word:Value, bit:int, x:Value) -> Value:
    """Returns x where bit `bit` of the dword `word` is 1, and 0 elsewhere."""
    return np.where(word >> np.uint32(bit) & np.uint32(1), x, np.float32(0))
  # registers: arrays of vectors
  def load(self, registers:Any, i:int) -> Value: return self.lanes.load_register(registers, i)
  def store(self, registers:Any, i:int, x:Value) -> None: self.lanes.store_register(registers, i, x, self.gate)
  def read(self, pointer:Any, i:int, n:int) -> Value:
    """Loads `n` fp32 numbers from shared memory as a vector, beginning i*n numbers after `pointer`."""
    raw = self.lanes.load_bytes(pointer, np.full(len(self.gate), 4*n*i), 4*n, self.gate)
    return numerics.bits_as(numerics.words_of(raw), "float32")
  # lanes
  def any_lane(self, condition:Value) -> Value:
    wave = self.lanes.wave
    return np.repeat((condition & self.lanes.active).reshape(-1, wave).any(1), wave)
  def exchange(self, x:Value, step:int, how:str) -> tuple[Value, Value]:
    """Returns x of two lanes, this lane and the lane `step` away, in the order in which the instruction `how` returns them."""
    wave, lane = self.lanes.wave, np.arange(x.shape[-1])
    if how == "bpermute": return x, numerics.from_lane(x, lane + step, wave)
    other = numerics.from_xor_lane(x, step, wave)
    if how != "permlane_swap": return x, other
    odd = lane//step % 2 == 1     # the odd rows (of `step` lanes) of the first operand are swapped with the even rows of the second
    return np.where(odd, other, x), np.where(odd, x, other)
  def whole(self, x:Value) -> None:
    """Does nothing in numpy. The other interpreters render a hint that all of x is in registers at this point."""
  def dot_ones(self, x:Value, c:Value, dtype:str) -> Value:
    """Returns c plus the two or four numbers of type `dtype` in each dword of x."""
    return self.lanes.dot(x, np.full(x.shape, ONES_OF[dtype], np.uint32), c, dtype)
  def times_ones(self, matrix:Any, p:Value, c:Value, dtype:str) -> Value:
    """Returns c plus the row sums of P: the instruction `matrix` multiplies P by a matrix of ones."""
    ones = np.full((2, p.shape[-1]), ONES_OF[dtype], np.uint32)
    # whether P is A or B depends on the matrix instruction
    a, b = matrix.with_ones(p, ones)
    return self.lanes.matrix(matrix.name, a, b, c)
