"""Operations that kernels for every vendor use. A value of n numbers is one UOp of a vector type; for n = 1 the value is a scalar."""
from __future__ import annotations
from typing import Any
import numpy as np
from attn.chips import get_chip
from attn.ops.language import compound, instruction
from attn.ops.numerics import IN_A_DWORD, words_of
from attn.ops.operation import Array, Value, Body, emit, integer, statement
from attn.tinygrad_compat import VECTORS, DType, Ops, UOp, dtypes, new_uop, vector_dtype

# if tinygrad has a UOp for an operation on such values, the functions here use that UOp
def f32(n:int) -> DType: return dtypes.float if n == 1 else vector_dtype("float32", n)
def u32(n:int) -> DType: return dtypes.uint if n == 1 else vector_dtype("uint32", n)
def length(x:UOp) -> int: return VECTORS[x.dtype][1] if x.dtype in VECTORS else 1
def resized(x:UOp, n:int) -> DType:
  """Returns the type of a vector of n elements that have the same type as the elements of x."""
  return (u32 if x.dtype == dtypes.uint or VECTORS.get(x.dtype, ("",))[0] == "uint32" else f32)(n)

# ***** vectors *****

@compound("splat", inline=True)
def _splat(c:Any, x:Value, *, n:int) -> Value: return c.splat(x, n)
@compound("build", inline=True)
def _build(c:Any, *xs:Value) -> Value: return c.vector(*xs)
@compound("extract", inline=True)
def _extract(c:Any, x:Value, *, i:int) -> Value: return c.element(x, i)
@compound("slice", inline=True)
def _slice(c:Any, x:Value, *, start:int, n:int) -> Value: return c.part(x, start, n)
@compound("concat", inline=True)
def _concat(c:Any, x:Value, y:Value) -> Value: return c.join(x, y)

def splat(x:float|UOp, n:int) -> UOp:
  number = x if isinstance(x, UOp) else UOp.const(x, dtypes.float)
  return number if n == 1 else emit("splat", f32(n), number, n=n)
def build(*xs:UOp) -> UOp: return emit("build", resized(xs[0], len(xs)), *xs)
def extract(x:UOp, i:int) -> UOp: return emit("extract", resized(x, 1), x, i=i) if length(x) > 1 else x
def slice_(x:UOp, start:int, n:int) -> UOp:
  """Returns a vector of n elements of x, from element `start` on."""
  if n == length(x): return x
  return extract(x, start) if n == 1 else emit("slice", resized(x, n), x, start=start, n=n)
def concat(x:UOp, y:UOp) -> UOp: return emit("concat", resized(x, length(x) + length(y)), x, y)

# ***** fp32 arithmetic, element by element *****

def widest(*xs:UOp) -> tuple[DType, list[UOp]]:
  """Returns (type of the longest vector in `xs`, all operands as vectors of this type). A scalar is repeated."""
  n = max(map(length, xs))
  return f32(n), [x if length(x) == n else splat(x, n) for x in xs]

def arithmetic(op:Ops, *xs:UOp) -> UOp:
  """Returns an arithmetic UOp of tinygrad, such as Ops.ADD, on vectors."""
  # tinygrad's own operators would look for a common type of the operands, and vector types have no common type
  dtype, operands = widest(*xs)
  return new_uop(op, tuple(operands), dtype)
def add(x:UOp, y:UOp) -> UOp: return arithmetic(Ops.ADD, x, y)
def sub(x:UOp, y:UOp) -> UOp: return arithmetic(Ops.SUB, x, y)
def mul(x:UOp, y:UOp|float) -> UOp: return arithmetic(Ops.MUL, x, y if isinstance(y, UOp) else UOp.const(y, dtypes.float))

# tinygrad has UOps for the next operations, but HIPRenderer emits exp2 and log2 as calls that handle denormals, and CStyleLanguage renders a maximum
# as compare and select, which gives NaN for a NaN.
@compound("fma", inline=True)
def _fma(c:Any, x:Value, y:Value, z:Value) -> Value: return c.fma(x, y, z)
@compound("exp2", inline=True)
def _exp2(c:Any, x:Value) -> Value: return c.exp2(x)
@compound("log2", inline=True)
def _log2(c:Any, x:Value) -> Value: return c.log2(x)
@compound("rcp", inline=True)
def _rcp(c:Any, x:Value) -> Value: return c.rcp(x)
@compound("max", inline=True)
def _max(c:Any, x:Value, y:Value) -> Value: return c.max(x, y)
@compound("absolute", inline=True)
def _absolute(c:Any, x:Value) -> Value: return c.abs(x)
@compound("as_float", inline=True)
def _as_float(c:Any, x:Value) -> Value: return c.as_float(x)

@compound("add_product", suffix="_{i}")
def _add_product(c:Any, x:Value, y:Value, numbers:Value, *, i:int) -> Value: return x + y*c.element(numbers, i)

def add_product(x:UOp, y:UOp, numbers:UOp, i:int) -> UOp:
  """Returns x + y*numbers[i], for vectors x and y. If `numbers` is a scalar, it is the factor."""
  return emit("add_product", x.dtype, x, y, numbers, i=i) if length(numbers) > 1 else add(x, mul(y, numbers))
def fma(x:UOp, y:UOp|float, z:UOp) -> UOp: return emit("fma", z.dtype, x, y if isinstance(y, UOp) else UOp.const(y, dtypes.float), z)
def exp2(x:UOp) -> UOp: return emit("exp2", x.dtype, x)
def log2(x:UOp) -> UOp: return emit("log2", x.dtype, x)
def rcp(x:UOp) -> UOp: return emit("rcp", x.dtype, x)
def absolute(x:UOp) -> UOp: return emit("absolute", x.dtype, x)
def max_(x:UOp, y:UOp) -> UOp: return emit("max", x.dtype, x, y)
def as_float(x:UOp) -> UOp:
  """Returns x, a vector of dwords, reinterpreted as fp32 numbers with the same bits."""
  return emit("as_float", f32(length(x)), x)

# ***** 16-bit floats *****

@compound("pack", inline=True)
def _pack(c:Any, x:Value, *, dtype:str) -> Value: return c.pack(x, dtype)
@compound("pack_weights", inline=True)
def _pack_weights(c:Any, x:Value, *, dtype:str) -> Value: return c.pack_weights(x, dtype)

@compound("widen", suffix="_{dtype}")
def _widen(c:Any, words:Value, *, n:int, dtype:str) -> Value:
  def half(i:int) -> Value:
    word = c.element(words, i//2)
    return c.widen(c.high_half(word) if i % 2 else word, dtype)
  return c.vector(*map(half, range(n)))

def pack(x:UOp, dtype:str) -> UOp:
  """Returns fp32 numbers rounded to `dtype`, of 16 or 8 bits, to nearest even, and packed into dwords."""
  return emit("pack", u32(length(x)//IN_A_DWORD[dtype]), x, dtype=dtype)
def pack_weights(x:UOp, dtype:str) -> UOp:
  """Returns elements of P rounded to `dtype` (16 or 8 bits) and packed into dwords; faster than `pack`, with other results for inf and NaN."""
  # for an element that is not finite, or above LARGEST_WEIGHT (2^111), the result is any value that is not finite, or the largest 8-bit float
  return emit("pack_weights", u32(length(x)//IN_A_DWORD[dtype]), x, dtype=dtype)
def widen_to_float(x:UOp, n:int, dtype:str) -> UOp:
  """Returns n 16-bit floats, packed in the dwords x, converted to fp32."""
  # if n is 1, the float lies in the low half of a dword
  return emit("widen", f32(n), x, n=n, dtype=dtype)

# ***** scores *****

@compound("mask_above")
def _mask_above(c:Any, x:Value, limit:Value, *, offsets:tuple[int, ...]) -> Value:
  # a select and no addition of -inf, so that a NaN score is replaced too
  return c.masked(x, offsets, ">", limit, -c.inf)

@compound("mask_beyond")
def _mask_beyond(c:Any, x:Value, first:Value, last:Value, *, offsets:tuple[int, ...]) -> Value:
  return c.beyond(x, offsets, first, last, -c.inf)

@compound("mask_rows_above", suffix="_{vectors}")
def _mask_rows_above(c:Any, scores:Value, low:Value, high:Value, *, offsets:tuple[int, ...], apart:int, vectors:int) -> Value:
  return masked_rows(c, scores, ">", (low, high), offsets, apart, vectors)

@compound("mask_rows_below", suffix="_{vectors}")
def _mask_rows_below(c:Any, scores:Value, low:Value, high:Value, *, offsets:tuple[int, ...], apart:int, vectors:int) -> Value:
  return masked_rows(c, scores, "<", (low, high), offsets, apart, vectors)

def masked_rows(c:Any, scores:Value, operator:str, limits:tuple[Value, ...], offsets:tuple[int, ...], apart:int, vectors:int) -> Value:
  n = len(offsets)
  for i in range(vectors):
    x, further = c.load(scores, i), [offset + i*apart for offset in offsets]
    c.store(scores, i, c.join(*[c.masked(c.part(x, r*n, n), further, operator, limit, -c.inf) for r, limit in enumerate(limits)]))
  return c.number(0.0)

@compound("clear_above")
def _clear_above(c:Any, x:Value, limit:Value, *, offsets:tuple[int, ...]) -> Value:
  return c.masked(x, offsets, ">", limit, c.number(0.0))

@compound("clear_beyond")
def _clear_beyond(c:Any, x:Value, first:Value, last:Value, *, offsets:tuple[int, ...]) -> Value:
  return c.beyond(x, offsets, first, last, c.number(0.0))

@compound("weights")
def _weights(c:Any, scores:Value, addend:Value, *, rows:int, scale:float) -> Value:
  n = c.length(scores)//rows
  return c.join(*[c.exp2(c.let("x", c.fma(c.part(scores, r*n, n), c.number(scale), c.element(addend, r)))) for r in range(rows)])

def mask_above(x:UOp, limit:UOp, offsets:tuple[int, ...]) -> UOp:
  """Returns the scores x, with -inf in place of x[i] if its column offsets[i] is above `limit`."""
  return emit("mask_above", x.dtype, x, integer(limit - offsets[0]), offsets=from_first(offsets))
def mask_beyond(x:UOp, first:UOp, last:UOp, offsets:tuple[int, ...]) -> UOp:
  """Returns the scores x, with -inf in place of x[i] if its column offsets[i] is not in `first`..`last`."""
  return emit("mask_beyond", x.dtype, x, *[integer(limit - offsets[0]) for limit in (first, last)], offsets=from_first(offsets))
def mask_rows(scores:UOp, limits:list[UOp], side:str, offsets:tuple[int, ...], apart:int, *after:UOp) -> UOp:
  """Returns a statement that sets scores in registers to -inf where their column is above (`side` "above") or below ("below") their row's limit."""
  # Each vector of `scores` holds scores of one row, then as many of the next row. Score j of a row in vector i has the column index offsets[j] +
  # i*apart. It is masked if its index is above the limit of its row (`side` "above") or below it ("below").
  return statement(f"mask_rows_{side}", scores[0], *[integer(limit) for limit in limits], *after, offsets=offsets, apart=apart,
                   vectors=scores.max_numel())
def clear_above(x:UOp, limit:UOp, offsets:tuple[int, ...]) -> UOp:
  """Returns the vector x, with 0 in place of x[i], even if NaN, if its column offsets[i] is above `limit`."""
  return emit("clear_above", x.dtype, x, integer(limit - offsets[0]), offsets=from_first(offsets))
def clear_beyond(x:UOp, first:UOp, last:UOp, offsets:tuple[int, ...]) -> UOp:
  """Returns the vector x, with 0 in place of x[i], even if NaN, if its column offsets[i] is not in `first`..`last`."""
  return emit("clear_beyond", x.dtype, x, *[integer(limit - offsets[0]) for limit in (first, last)], offsets=from_first(offsets))
def select_each(conditions:list[UOp], x:UOp|float, y:UOp|float) -> UOp:
  """Returns a vector with element i of x where conditions[i] is true, and of y elsewhere. A float stands for a vector of equal elements."""
  def element(v:UOp|float, i:int) -> Any: return v if isinstance(v, float) else extract(v, i)
  return build(*[condition.where(element(x, i), element(y, i)) for i, condition in enumerate(conditions)])
def from_first(offsets:tuple[int, ...]) -> tuple[int, ...]:
  """Returns the column indices `offsets`, each minus the first of them, e.g. (0, 1, 8) for (16, 17, 24)."""
  # vectors of scores whose indices then agree can be masked by one rendered C function
  return tuple(x - offsets[0] for x in offsets)
def weights(scores:UOp, addend:UOp, scale:float) -> UOp:
  """Returns P = exp2(scores*scale + addend[r]). The vector `scores` holds several rows of equal length, and r is the index of a score's row."""
  return emit("weights", scores.dtype, scores, addend, rows=length(addend), scale=scale)

# ***** memory *****

OUT_OF_RANGE = 0x80000000   # an offset beyond every descriptor's range, which is at most 0x7ffffffe
MAX_RECORDS = 0x7ffffff0   # largest range of a buffer descriptor in bytes

def flat(placeholder:UOp) -> UOp:
  """Returns a kernel argument or register array, reshaped to one dimension."""
  # its own `.flatten()` would make tinygrad compute each index twice, which makes lowering slow
  while placeholder.op is Ops.RESHAPE: placeholder = placeholder.src[0]
  return placeholder.flatten()

def loaded_within(lanes:Any, pointer:Any, records:Array, offset:Array, width:int) -> Array:
  # `records` is the size of the buffer's range in bytes; hardware compares unsigned 32-bit numbers
  records, offset = records.astype(np.int64) & 0xffffffff, offset.astype(np.int64) & 0xffffffff
  lanes.check_extent(pointer, records)
  return words_of(lanes.load_bytes(pointer, offset, width, lanes.active & (offset + width <= records)))

def descriptor(arch:str) -> str:
  """Returns the C++ expression of a buffer descriptor for `records` bytes at `base`; the C++ function around it has variables of these names."""
  return f"__builtin_amdgcn_make_buffer_rsrc((void*)base, 0, records, 0x{get_chip(arch).unit.descriptor:08x})"

def _buffer_load_hip(printer:Any, out:str, width:int) -> Body:
  load = f"auto buffer = {descriptor(printer.arch)};\nauto found = __builtin_amdgcn_raw_buffer_load_b{8*width}(buffer, offset, 0, 0);\n"
  return Body(f"{load}return {'found' if width < 4 else f'__builtin_bit_cast({out}, found)'};", "base records offset", name=f"buffer_load_b{8*width}")

def _buffer_load_cuda(printer:Any, out:str, width:int) -> Body:
  kind = {1: "unsigned char", 2: "unsigned short", 4: "unsigned", 8: "uint2", 16: "uint4"}[width]
  nothing = f"make_{out}({', '.join(['0u']*(width//4))})" if width > 4 else "0u"
  return Body(f"if (offset + {width}u > (unsigned)records) return {nothing};\nreturn *(const {kind}*)((const char*)base + offset);",
              "base records offset", name=f"buffer_load_b{8*width}")

instruction("buffer_load", lambda lanes, pointer, records, offset, width: loaded_within(lanes, pointer, records, offset, width),
            _buffer_load_hip, _buffer_load_cuda)

def buffer_load(base:UOp, records:UOp, offset:UOp, width:int) -> UOp:
  """Returns `width` (1, 2, 4, 8 or 16) bytes at `offset` bytes after `base`, as dwords: zeros if offset + width exceeds `records`."""
  # `base` is equal in all lanes of the wave. The memory unit checks the range, so a masked lane needs no branch. One or two bytes are in the low end
  # of a dword.
  return emit("buffer_load", u32(max(1, width//4)), base, integer(records), offset.cast(dtypes.uint), width=width)

def _load_where_text(printer:Any, out:str, width:int) -> Body:
  kind = {1: "unsigned char", 2: "unsigned short"}.get(width, out)
  return Body(f"{out} found = {{}};\nif (gate) found = *(const {kind}*)(const void*)at;\nreturn found;", "at gate", name=f"load_where_b{8*width}")

def _load_where(lanes:Any, pointer:Any, gate:Array, width:int) -> Array:
  return words_of(lanes.load_bytes(pointer, np.zeros(len(gate), np.int64), width, lanes.active & gate))

instruction("load_where", _load_where, _load_where_text, _load_where_text)

def load_where(at:UOp, gate:UOp, width:int) -> UOp:
  """Returns `width` (1, 2, 4, 8 or 16) bytes at `at`, as dwords: zeros in lanes where `gate` is false."""
  # `at` may differ from lane to lane; one or two bytes are in the low end of a dword
  return emit("load_where", u32(max(1, width//4)), at, gate, width=width)

# ***** numbers that the caller wrote: the emulator checks them *****

def _page_number(lanes:Any, entry:Array, there:Array, count:int) -> Array:
  lanes.check_numbers("an entry of block_table", entry, lanes.active & there, count)
  return entry
def _alone(lanes:Any, page:Array, slot:Array, gate:Array) -> Array:
  lanes.check_alone("slot", slot, lanes.active & gate)
  return page

def _element_number(lanes:Any, index:Array, first:Array, last:Array, there:Array, column:int, size:int, index_name:str) -> Array:
  lanes.check_numbers(index_name, index, lanes.active & there & (first <= column) & (column <= last), size)
  return index

instruction("page_number", _page_number, "{0}", "{0}")
instruction("element_number", _element_number, "{0}", "{0}")
instruction("alone", _alone, "{0}", "{0}")
instruction("at_least_0", lambda lanes, x: np.maximum(x, 0), *[Body("return x > 0 ? x : 0;", "x")]*2)

def page_number(entry:UOp, there:UOp, count:int) -> UOp:
  """Returns `entry`, the index of a page. The emulator stops with an error if it is not in 0..count-1 in a lane where `there` is true."""
  return emit("page_number", dtypes.int, entry, there, count=count)
def element_number(index:UOp, limits:tuple[UOp, UOp], there:UOp, column:int, size:int, index_name:str) -> UOp:
  """Returns `index`, at which a score_mod or mask_mod reads a tensor. The emulator stops with an error if it is not in 0..size-1."""
  # `index` is used along an axis of `size` elements for the score at column `column` of a row. The emulator checks lanes that use the score: those
  # where `there` is true, and whose row sees the column, which lies within `limits`. Its message calls the index `index_name`.
  return emit("element_number", dtypes.int, index, *limits, there, column=column, size=size, index_name=index_name)
def at_least_0(x:UOp) -> UOp:
  """Returns max(x, 0) of an integer x, hidden from the compiler, which so cannot rewrite it as a sum with negative terms."""
  # an offset computed from the result then has no negative term (attn/emulator/offsets.py explains why this matters)
  return emit("at_least_0", dtypes.int, x)
def alone(page:UOp, slot:UOp, gate:UOp) -> UOp:
  """Returns `page`. The emulator stops with an error if two lanes with a true `gate` write to the same `slot` of one page."""
  return emit("alone", dtypes.int, integer(page), slot, gate)

# ***** what the compilers know about an integer *****

instruction("uniform", lambda lanes, x: x, "__builtin_amdgcn_readfirstlane({0})", "__shfl_sync(0xffffffffu, {0}, 0)")
# clang computes some numbers in vector registers (v_med3_i32) although it knows that they are uniform, and then does not copy them to a scalar
# register. clang knows nothing about the result of inline assembly, so it keeps a v_readfirstlane_b32 of such a result.
instruction("opaque_uniform", lambda lanes, x: x, Body('asm volatile("" : "+v"(x));\nreturn __builtin_amdgcn_readfirstlane(x);', "x"),
            Body('asm volatile("" : "+r"(x));\nreturn x;', "x"))

def uniform(x:UOp) -> UOp:
  """Returns the integer x, and tells the compiler that x is equal in all lanes."""
  # on AMD's chips (v_readfirstlane_b32) the integer goes to a scalar register
  return emit("uniform", dtypes.int, integer(x))
def opaque_uniform(x:UOp) -> UOp:
  """Returns the integer x, equal in all threads of the workgroup, and hides from tinygrad and the compiler how it is computed."""
  return emit("opaque_uniform", dtypes.int, integer(x))
def not_negative(x:UOp, most:int) -> UOp:
  """Returns the integer x, in 0..most, hidden from tinygrad and the compiler, which so cannot split it into a sum of terms."""
  # x must be equal in the whole workgroup. An offset computed from the result then has no negative term (attn/emulator/offsets.py explains why this
  # matters).
  bits = (1 << most.bit_length()) - 1     # lowering keeps the bounds of a mask, but loses the bounds of a maximum
  return (opaque_uniform(x).cast(dtypes.weakint) & bits).minimum(most) if most else UOp.const(0)
