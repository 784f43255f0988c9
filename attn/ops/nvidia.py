"""The instructions of NVIDIA's mma.sync kernels that tinygrad has no UOp for: CUDA text and numpy meaning side by side.

Sections are those of the PTX ISA 8.7. A C fragment is a float4, what belongs to the two rows of a lane a float2, an A fragment a uint4, and a uint4
holds the B fragments of two neighbouring tiles.

The emulator takes asynchronous copies strictly: from its start until the thread has waited for it nobody may touch a copy's destination.
"""
from __future__ import annotations
from typing import Any
import numpy as np
from attn.ops.common import f32, u32
from attn.ops.interpret_cuda import declare_mma
from attn.ops.language import compound, instruction
from attn.ops.operation import Array, Value
from attn.ops.numerics import from_xor_lane
from attn.ops.operation import Body, emit, integer, statement
from attn.ops.softmax import RowLanes
from attn.tinygrad_compat import UOp, dtypes

F2, F4, U4 = f32(2), f32(4), u32(4)
ROWS = 2                             # rows of C (and of A) that a lane has a part in: g and g + 8
ROW_LANES = RowLanes(ROWS, (1, 2))   # four neighbouring lanes share them

def shared(name:str) -> str:
  """The address of a pointer to shared memory, as an operand of inline assembly."""
  return f'"r"((unsigned)__cvta_generic_to_shared({name}))'

# ***** asynchronous copies: 9.7.9.25.3 *****

def _copy(lanes:Any, to:Any, source:Any, nbytes:Array, gate:Array, step:tuple[int, int], asynchronous:bool) -> Array:
  data, gate = np.zeros((len(gate), 16), np.uint8).T, gate & lanes.active
  here, there = (np.full(len(gate), x, np.int64) for x in step)
  size = 16 if asynchronous else 2      # bytes of an access
  for i in range(0, 16, size): data[i:i + size] = lanes.load_bytes(source, there + i, size, gate & (nbytes > i))
  if asynchronous: return lanes.start_store(to, here, data, gate)
  lanes.store_bytes(to, here, data, gate)
  return np.zeros(len(gate), np.float32)

def _copy_text(printer:Any, out:str, step:tuple[int, int], asynchronous:bool) -> Body:
  template = (("TO", step[0]), ("FROM", step[1]))
  if asynchronous:
    return Body('if (gate) asm volatile("cp.async.cg.shared.global.L2::128B [%0+%3], [%1+%4], 16, %2;"\n'
                f'    :: {shared("to")}, "l"(from), "r"(nbytes), "n"(TO), "n"(FROM));\nreturn 0.0f;', "to from nbytes gate", template, "copy_async")
  halves = [f"({2*i} < nbytes ? (unsigned)half[{i}] : 0u)" for i in range(8)]
  words = ",\n    ".join(f"{low} | {high} << 16" for low, high in zip(halves[0::2], halves[1::2]))
  return Body(f"if (!gate) return 0.0f;\nconst unsigned short* half = (const unsigned short*)from + FROM/2;\n"
              f"((uint4*)to)[TO/16] = make_uint4(\n    {words});\nreturn 0.0f;", "to from nbytes gate", template, "copy_by_halves")

instruction("copy", _copy, cuda=_copy_text)
instruction("commit", lambda lanes, _: lanes.commit_stores(), cuda=Body('asm volatile("cp.async.commit_group;" ::: "memory");\nreturn 0.0f;', ""))
instruction("wait", lambda lanes, _, but: lanes.wait_stores(but),
            cuda=lambda printer, out, but: Body('asm volatile("cp.async.wait_group %0;" :: "n"(BUT) : "memory");\nreturn 0.0f;', "", (("BUT", but),)))

def _copy_number(lanes:Any, to:Any, source:Any, there:Array, gate:Array) -> Array:
  start, gate = np.zeros(len(gate), np.int64), gate & lanes.active
  return lanes.start_store(to, start, lanes.load_bytes(source, start, 4, gate & there), gate)

instruction("copy_number", _copy_number, cuda=Body(
  f'if (gate) asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" :: {shared("to")}, "l"(from), "r"(there ? 4 : 0));\nreturn 0.0f;',
  "to from there gate"))

def _put(lanes:Any, to:Any, value:Array, gate:Array) -> Array:
  lanes.store_bytes(to, np.zeros(len(gate), np.int64), np.ascontiguousarray(np.atleast_2d(value).T).view(np.uint8).T, gate & lanes.active)
  return np.zeros(len(gate), np.float32)

def _put_text(printer:Any, out:str, kind:str) -> Body:
  return Body(f"if (gate) *({kind}*)to = x;\nreturn 0.0f;", "to x gate", name=f"put_{kind}")

instruction("put", lambda lanes, to, value, gate, kind: _put(lanes, to, value, gate), cuda=_put_text)

def copy(to:UOp, source:UOp, step:tuple[int, int], nbytes:UOp, gate:UOp, asynchronous:bool) -> UOp:
  """Copies `nbytes` (0..16, even) from `source` to `to`, 16 bytes of shared memory of which the rest becomes zero, where `gate` holds. Both are
  INDEXes, each `step` bytes further: as in `ldmatrix`, many addresses then need but one register. With `asynchronous`, nbytes is 0 or 16, both
  addresses are aligned to 16 and the data are there after `wait_copies`. A statement."""
  return statement("copy", to, source, integer(nbytes), gate, step=step, asynchronous=asynchronous)
def copy_number(to:UOp, source:UOp, there:UOp, gate:UOp) -> UOp:
  """Copies 4 bytes from `source` to `to`, both INDEXes, in the way of `copy`, where `gate` holds; 0 where nothing is `there`. A statement."""
  return statement("copy_number", to, source, there, gate)
def put(to:UOp, value:UOp, gate:UOp) -> UOp:
  """Stores a number, or a vector, to shared memory, an INDEX, where `gate` holds. (At a store that tinygrad sees it would add a barrier.) A
  statement."""
  return statement("put", to, value, gate, kind="float" if value.dtype == dtypes.float else value.dtype.name)
def commit(order:UOp) -> UOp:
  """The copies started since the last one make a group. A statement."""
  return statement("commit", order)
def wait_copies(order:UOp, but:int) -> UOp:
  """Waits for this thread's copies, the last `but` groups excepted: a barrier must follow before other threads read them. A statement."""
  return statement("wait", order, but=but)

# ***** fragments: 9.7.14.5.8 (mma.m16n8k16), 9.7.14.5.15 (ldmatrix) *****

def _ldmatrix(lanes:Any, pointer:Any, step:int, transposed:bool) -> Array:
  """Lane l gives the address of row l%8 of 8x8 matrix l//8, and gets two neighbours of each matrix."""
  raw = lanes.load_bytes(pointer, np.full(len(lanes.active), step, np.int64), 16, lanes.active)
  m = np.ascontiguousarray(raw.T).view(np.uint16).reshape(-1, 4, 8, 8)                    # warp, matrix, row, column
  if transposed: m = m.swapaxes(2, 3)
  pairs = np.ascontiguousarray(m).view(np.uint32)                                         # lane l: row l//4, columns 2*(l%4) and + 1
  return np.ascontiguousarray(pairs.transpose(1, 0, 2, 3)).reshape(4, -1)

def _ldmatrix_text(printer:Any, out:str, step:int, transposed:bool) -> Body:
  suffix, results = ".trans" if transposed else "", ", ".join(f'"=r"(x.{e})' for e in "xyzw")
  return Body(f'uint4 x;\nasm volatile("ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%0, %1, %2, %3}}, [%4+%5];"\n'
              f'    : {results} : {shared("row")}, "n"(STEP));\nreturn x;', "row", (("STEP", step),), "ldmatrix" + "_transposed"*transposed)

instruction("ldmatrix", _ldmatrix, cuda=_ldmatrix_text)

def _mma_text(printer:Any, out:str, matrix:Any, half:int) -> str:
  low, high = (("x", "y"), ("z", "w"))[half]
  return f"{declare_mma(printer, matrix)}({{0}}, {{1}}.{low}, {{1}}.{high}, {{2}})"

instruction("mma", lambda lanes, a, b, c, matrix, half: lanes.matrix(matrix.name, a, b[2*half:2*half + 2], c), cuda=_mma_text)

def ldmatrix(row:UOp, step:int, transposed:bool=False) -> UOp:
  """Four 8x8 matrices of 16-bit elements; lane l's `row` is an INDEX, `step` units before row l%8 of matrix l//8."""
  return emit("ldmatrix", U4, row, step=16*step, transposed=transposed)
def mma(matrix:Any, a:UOp, b:UOp, half:int, c:UOp) -> UOp:
  """c + A B by one mma.sync; `half` says which of the two B fragments in `b`."""
  return emit("mma", F4, a, b, c, matrix=matrix, half=half)

# ***** the operand P *****

@compound("pack_a", inline=True)
def _pack_a(c:Any, x:Value, y:Value, *, dtype:str) -> Value: return c.join(c.pack(x, dtype), c.pack(y, dtype))

@compound("row_unit", suffix="_{row}")
def _row_unit(c:Any, x:Value, y:Value, z:Value, w:Value, factor:Value, *, row:int, dtype:str) -> Value:
  return c.join(*[c.pack(c.part(fragment, ROWS*row, 2)*factor, dtype) for fragment in (x, y, z, w)])

@compound("clear", suffix="_{count}")
def _clear(c:Any, acc:Value, *, count:int) -> Value:
  for i in range(count): c.store(acc, i, c.splat(c.number(0.0), 4))
  return c.number(0.0)

@compound("zero", inline=True)
def _zero(c:Any, order:Value) -> Value: return c.splat(c.number(0.0), 4)

def zero(order:UOp) -> UOp:
  """A C fragment of zeros, made after `order`."""
  return emit("zero", F4, order)
def clear(acc:UOp, *done:UOp) -> UOp:
  """Zeros in all C fragments of a placeholder of registers. A statement."""
  return statement("clear", acc[0], *done, count=acc.max_numel())
def row_unit(fragments:list[UOp], row:int, factor:UOp, dtype:str) -> UOp:
  """What a lane has of a row in four neighbouring C fragments, times a factor: four pairs, rounded to nearest even."""
  return emit("row_unit", U4, *fragments, factor, row=row, dtype=dtype)
def pack_a(p:UOp, q:UOp, dtype:str) -> UOp:
  """The C fragments of two neighbouring tiles -> the A fragment of 16 columns, rounded to nearest even."""
  return emit("pack_a", U4, p, q, dtype=dtype)

# ***** across lanes *****

instruction("xor_lane", lambda lanes, x, mask: from_xor_lane(x, mask, lanes.wave),
            cuda=lambda printer, out, mask: f"__shfl_xor_sync(0xffffffffu, {{0}}, {mask})")

def xor_lane(x:UOp, mask:int) -> UOp:
  """x of the lane whose number differs in the bits of `mask` (shfl.sync.bfly)."""
  return emit("xor_lane", dtypes.float, x, mask=mask)

def _transposed(lanes:Any, words:Array, in_quad:Array) -> Array:
  lane = np.arange(words.shape[-1])
  return np.stack([words[lane%4, lane//4*4 + source] for source in range(4)])

# Two exchanges of half of the words each: between neighbours of the words that are neighbours, then between pairs of lanes of pairs of words.
instruction("transposed", _transposed, cuda=Body("\n".join([
  "bool odd = lane & 1, upper = lane & 2;",
  "unsigned a = __shfl_xor_sync(0xffffffffu, odd ? words.x : words.y, 1), b = __shfl_xor_sync(0xffffffffu, odd ? words.z : words.w, 1);",
  "if (odd) { words.x = a; words.z = b; } else { words.y = a; words.w = b; }",
  "a = __shfl_xor_sync(0xffffffffu, upper ? words.x : words.z, 2), b = __shfl_xor_sync(0xffffffffu, upper ? words.y : words.w, 2);",
  "if (upper) { words.x = a; words.y = b; } else { words.z = a; words.w = b; }",
  "return words;"]), "words lane"))

def transposed(words:UOp, in_quad:UOp) -> UOp:
  """Of four words in each of four neighbouring lanes, of which this one is number `in_quad`: those that are number `in_quad` in each lane."""
  return emit("transposed", U4, words, integer(in_quad))
