"""Functions that compute tinygrad's arithmetic UOps on numpy arrays: C semantics for integers, IEEE with one rounding per operation for floats."""
from __future__ import annotations
from typing import Any, Callable
import numpy as np
from numpy.typing import NDArray
from attn.tinygrad_compat import VECTORS, DType, Ops, dtypes

# The last axis of a value is the thread: its length is the number of threads. If the value is equal in all threads, the length is 1 or the axis is
# absent. A vector has its elements on the first axis. A bfloat16 is stored as a uint16 that holds its 16 bits, as HIPRenderer does with `unsigned
# short`. Only CUDARenderer emits arithmetic on bfloat16; it is done in fp32 and rounded.

Array = NDArray[Any]

def numpy_dtype(dt:DType) -> np.dtype[Any]:
  """Returns the numpy type of one element of a value of tinygrad type `dt`."""
  if dt in VECTORS: return np.dtype(VECTORS[dt][0])
  if dt == dtypes.bfloat16: return np.dtype(np.uint16)
  if dt.fmt is None: raise NotImplementedError(f"the emulator has no values of type {dt.name!r}")
  return np.dtype(dt.fmt)

def elements(dt:DType) -> int: return VECTORS[dt][1] if dt in VECTORS else 1

def literal(value:Any, dt:DType) -> Array:
  """Returns the value of a constant `value` of type `dt`: for a vector type, a vector of equal elements."""
  to = numpy_dtype(dt)
  if dt == dtypes.bfloat16: return float_to_bf16(np.asarray(value, np.float32))[()]
  if dtypes.is_int(dt): value = (int(value) - dt.min) % 2**(8*to.itemsize) + dt.min
  return np.full((elements(dt), 1), value, to) if dt in VECTORS else to.type(value)

def stack(*xs:Array) -> Array:
  """Returns a vector (n, threads) of n scalars (threads,)."""
  # (n, 1) if each scalar is equal in all threads
  out = np.empty((len(xs), max(np.size(x) for x in xs)), xs[0].dtype)
  for i, x in enumerate(xs): out[i] = x
  return out

# ***** bfloat16 *****

def bf16_to_float(x:Array) -> Array: return (np.asarray(x).astype(np.uint32) << np.uint32(16)).view(np.float32)

def float_to_bf16(x:Array) -> Array:
  """Returns fp32 numbers rounded to the nearest bfloat16, ties to even, as 16 bits each."""
  bits = np.asarray(x, np.float32).view(np.uint32)
  # half an ulp is added to the bits; a NaN keeps its upper bits and stays a NaN
  rounded = (bits + np.uint32(0x7fff) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
  return np.where(np.isnan(x), (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)

# ***** conversions *****

def _float_to_int(x:Array, to:np.dtype[Any]) -> Array:
  """Converts floats to integers as v_cvt_i32_f32 does: numbers out of range saturate, and NaN becomes 0 (CDNA3 ISA section 12.8)."""
  # a type narrower than 32 bits gets the low bits of the 32-bit result
  wide = to if to.itemsize >= 4 else np.dtype(np.int32)
  info, real = np.iinfo(wide), np.asarray(x).astype(np.float64)
  low, high = real <= float(info.min), real >= float(info.max)
  inside = np.where(low | high | np.isnan(real), 0, real).astype(wide)
  return np.where(high, wide.type(info.max), np.where(low, wide.type(info.min), inside)).astype(to)

def cast(x:Array, src:DType, dst:DType) -> Array:
  if src == dst: return x
  if src == dtypes.bfloat16: return cast(bf16_to_float(x), dtypes.float, dst)
  if dst == dtypes.bfloat16: return float_to_bf16(cast(x, src, dtypes.float))
  to = numpy_dtype(dst)
  if dtypes.is_float(src) and dtypes.is_int(dst): return _float_to_int(x, to)
  return np.asarray(x).astype(to)

def bitcast(x:Array, dst:DType) -> Array:
  """Returns the bits of x as values of the type `dst`."""
  to, x = numpy_dtype(dst), np.asarray(x)
  if x.dtype.itemsize == to.itemsize: return x.view(to)
  # types of different sizes: the number of a vector's elements changes
  rows = np.ascontiguousarray((x if x.ndim > 1 else x.reshape(1, -1)).T).view(to)   # (threads, elements)
  return np.ascontiguousarray(rows.T) if rows.shape[1] > 1 else rows[:, 0]

# ***** arithmetic *****

def _cdiv(x:Array, y:Array) -> Array:
  safe = np.where(y == 0, np.ones_like(y), y)   # a division by zero does not trap on hardware; its result is undefined
  return (x - np.fmod(x, safe)) // safe

def _cmod(x:Array, y:Array) -> Array: return np.fmod(x, np.where(y == 0, np.ones_like(y), y))

ALU: dict[Ops, Callable[..., Array]] = {
  Ops.SQRT: np.sqrt, Ops.RECIPROCAL: lambda x: np.divide(np.ones_like(x), x), Ops.NEG: np.negative, Ops.EXP2: np.exp2, Ops.LOG2: np.log2,
  Ops.SIN: np.sin, Ops.TRUNC: np.trunc, Ops.AND: np.bitwise_and, Ops.XOR: np.bitwise_xor, Ops.OR: np.bitwise_or, Ops.ADD: np.add,
  Ops.SUB: np.subtract, Ops.MUL: np.multiply, Ops.CMOD: _cmod, Ops.CDIV: _cdiv, Ops.CMPNE: np.not_equal, Ops.CMPLT: np.less, Ops.CMPEQ: np.equal,
  Ops.SHR: lambda x, n: np.right_shift(x, np.asarray(n).astype(x.dtype)), Ops.SHL: lambda x, n: np.left_shift(x, np.asarray(n).astype(x.dtype)),
  Ops.WHERE: np.where,
}

def alu(op:Ops, dt:DType, operand:DType) -> Callable[..., Array]:
  """Returns the numpy function that computes the arithmetic UOp `op`, with a result of type `dt` and a last operand of type `operand`."""
  if op not in ALU: raise NotImplementedError(f"the emulator does not know the operation {op}: HIPRenderer and CUDARenderer do not print it")
  fn = ALU[op]
  if operand != dtypes.bfloat16 or op is Ops.WHERE: return fn
  if dt == dtypes.bool: return lambda *xs: fn(*map(bf16_to_float, xs))
  return lambda *xs: float_to_bf16(fn(*map(bf16_to_float, xs)))
