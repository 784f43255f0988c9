"""Instructions of NVIDIA's mma.sync kernels that tinygrad has no UOp for, each as CUDA text and as the numpy function that the emulator runs."""
from __future__ import annotations
from typing import Any
import numpy as np
from attn.ops.common import f32, u32
from attn.ops.interpret_cuda import declare_mma
from attn.ops.language import compound, instruction
from attn.ops.operation import Array, Value
from attn.ops.numerics import from_xor_lane
from attn.ops.operation import Body, emit, integer, statement
from attn.ops.softmax import RowLanes, packed_together
from attn.tinygrad_compat import UOp, dtypes

# Section numbers refer to the PTX ISA 8.7. A C fragment is a float4: a lane has elements of two rows. A number per row, such as the row's maximum,
# is a float2: one element for each of the lane's two rows. An A fragment is a uint4. The B fragments of two neighbouring tiles share a uint4. The
# emulator is strict about asynchronous copies: from the start of a copy until the thread has waited for the copy, no thread may access its
# destination.

F2, F4, U4 = f32(2), f32(4), u32(4)
ROWS = 2                             # a lane has elements of two rows of C (and of A): g and g + 8
ROW_LANES = RowLanes(ROWS, (1, 2))   # four neighbouring lanes share these rows

def shared(name:str) -> str:
  """Returns the text of an operand of inline assembly: the address in shared memory that the C++ variable `name` holds."""
  return f'"r"((unsigned)__cvta_generic_to_shared({name}))'

# ***** asynchronous copies: 9.7.9.25.3 *****

def _copy(lanes:Any, to:Any, source:Any, nbytes:Array, gate:Array, step:tuple[int, int], piece:int) -> Array:
  data, gate = np.zeros((len(gate), 16), np.uint8).T, gate & lanes.active
  here, there = (np.full(len(gate), x, np.int64) for x in step)
  for i in range(0, 16, piece): data[i:i + piece] = lanes.load_bytes(source, there + i, piece, gate & (nbytes > i))
  if piece == 16: return lanes.start_store(to, here, data, gate)
  lanes.store_bytes(to, here, data, gate)
  return np.zeros(len(gate), np.float32)

def _copy_text(printer:Any, out:str, step:tuple[int, int], piece:int) -> Body:
  template = (("TO", step[0]), ("FROM", step[1]))
  if piece == 16:
    return Body('if (gate) asm volatile("cp.async.cg.shared.global.L2::128B [%0+%3], [%1+%4], 16, %2;"\n'
                f'    :: {shared("to")}, "l"(from), "r"(nbytes), "n"(TO), "n"(FROM));\nreturn 0.0f;', "to from nbytes gate", template, "copy_async")
  kind, name, each = {2: ("unsigned short", "half", 2), 1: ("unsigned char", "byte", 4)}[piece]
  pieces = [f"({piece*i} < nbytes ? (unsigned){name}[{i}] : 0u)" + f" << {8*piece*(i%each)}"*(i%each > 0) for i in range(16//piece)]
  words = ",\n    ".join(" | ".join(pieces[i:i + each]) for i in range(0, len(pieces), each))
  return Body(f"if (!gate) return 0.0f;\nconst {kind}* {name} = (const {kind}*)from + FROM/{piece};\n"
              f"((uint4*)to)[TO/16] = make_uint4(\n    {words});\nreturn 0.0f;", "to from nbytes gate", template,
              "copy_by_halves" if piece == 2 else "copy_by_bytes")

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

def copy(to:UOp, source:UOp, step:tuple[int, int], nbytes:UOp, gate:UOp, piece:int) -> UOp:
  """Returns a statement that, if `gate` is true, copies `nbytes` bytes (0 to 16) from global to shared memory, followed by zeros up to 16 bytes."""
  # `step` has two constants in bytes: the first is added to `to`, the second to `source`, so copies at several constant distances share one address
  # register. The copy is made in pieces of `piece` bytes (16, 2 or 1); `nbytes` and the address in `source` must be multiples of `piece`. If `piece`
  # is 16, the copy is asynchronous: the data have arrived only after `wait_copies`.
  return statement("copy", to, source, integer(nbytes), gate, step=step, piece=piece)
def copy_number(to:UOp, source:UOp, there:UOp, gate:UOp) -> UOp:
  """Returns a statement that, if `gate` is true, starts to copy 4 bytes from global to shared memory; if `there` is false, 4 zero bytes arrive."""
  return statement("copy_number", to, source, there, gate)
def put(to:UOp, value:UOp, gate:UOp) -> UOp:
  """Returns a statement that stores a number or a vector to shared memory at `to`, if `gate` is true."""
  # `store` of the UOp would make tinygrad add a barrier
  return statement("put", to, value, gate, kind="float" if value.dtype == dtypes.float else value.dtype.name)
def commit(after:UOp) -> UOp:
  """Returns a statement that closes a group of copies: all copies that this thread has started since the thread's last `commit`."""
  return statement("commit", after)
def wait_copies(after:UOp, but:int) -> UOp:
  """Returns a statement that waits for this thread's groups of copies, except the last `but` groups."""
  # a barrier must follow before other threads read the data
  return statement("wait", after, but=but)

# ***** fragments: 9.7.14.5.8 (mma.m16n8k16), 9.7.14.5.15 (ldmatrix) *****

def _ldmatrix(lanes:Any, pointer:Any, step:int, transposed:bool) -> Array:
  """Returns, for each thread, its part of four 8x8 matrices in shared memory, two neighbouring elements of each, as ldmatrix does."""
  # lane l gives the address of row l%8 of matrix l//8, `step` bytes after `pointer`
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

def _stmatrix(lanes:Any, row:Any, words:Array, gate:Array|bool=True) -> Array:
  """Stores four 8x8 matrices of 16-bit elements to shared memory, as stmatrix does, and returns zeros."""
  # lane l gives `row`, the address of row l%8 of matrix l//8, and `words`, two neighbouring elements of each of the four matrices
  pairs = words.reshape(4, -1, 8, 4).transpose(1, 0, 2, 3)                                # warp, matrix, row, pair of columns
  raw = np.ascontiguousarray(pairs).view(np.uint8).reshape(-1, 16)
  lanes.store_bytes(row, np.zeros(len(raw), np.int64), np.ascontiguousarray(raw.T), lanes.active & gate)
  return np.zeros(len(raw), np.float32)

STMATRIX = ('asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"\n'      # 9.7.14.5.16
            f'    :: {shared("row")}, "r"(words.x), "r"(words.y), "r"(words.z), "r"(words.w) : "memory");\nreturn 0.0f;')
instruction("stmatrix", _stmatrix, cuda=Body(STMATRIX, "row words"))
instruction("stmatrix_where", _stmatrix, cuda=Body(f"if (gate) {STMATRIX}", "row words gate"))

def _mma_text(printer:Any, out:str, matrix:Any, half:int) -> str:
  low, high = (("x", "y"), ("z", "w"))[half]
  return f"{declare_mma(printer, matrix)}({{0}}, {{1}}.{low}, {{1}}.{high}, {{2}})"

instruction("mma", lambda lanes, a, b, c, matrix, half: lanes.matrix(matrix.name, a, b[2*half:2*half + 2], c), cuda=_mma_text)

def ldmatrix(row:UOp, step:int, transposed:bool=False) -> UOp:
  """Returns this lane's elements of four 8x8 matrices of 16-bit elements in shared memory: two neighbouring elements of each."""
  # lane l gives the address of row l%8 of matrix l//8: `row` plus `step` times 16 bytes; with `transposed`, each matrix is transposed first
  return emit("ldmatrix", U4, row, step=16*step, transposed=transposed)
def stmatrix(row:UOp, words:UOp) -> UOp:
  """Returns a statement that stores four 8x8 matrices of 16-bit elements, this lane's part of which is `words`, to shared memory."""
  # sm_90 and later chips have this instruction. Lane l's `row` is the address of row l%8 of matrix l//8. `words` has two neighbouring elements of
  # each matrix, in the layout of an A fragment of mma.m16n8k16.
  return statement("stmatrix", row, words)
def stmatrix_where(row:UOp, words:UOp, gate:UOp) -> UOp:
  """Returns a statement that stores four 8x8 matrices as `stmatrix` does, only in warps where `gate` is true."""
  # the gate must be equal in the whole warp
  return statement("stmatrix_where", row, words, gate)
def mma(matrix:Any, a:UOp, b:UOp, half:int, c:UOp) -> UOp:
  """Returns c + A B of one mma.sync, the instruction `matrix`, on fragments. `half` selects one of the two B fragments in `b`."""
  return emit("mma", F4, a, b, c, matrix=matrix, half=half)

# ***** the operand P *****

@compound("pack_a", inline=True)
def _pack_a(c:Any, *fragments:Value, dtype:str) -> Value: return packed_together(c, list(fragments), ROWS, dtype)

# the bytes of four keys of an even column, and of four keys of an odd column, from two dwords that have both columns of two keys each
EVEN_BYTES, ODD_BYTES = 0x6420, 0x7531

def _columns_apart(lanes:Any, words:Array) -> Array:
  pairs = np.ascontiguousarray(words.T).view(np.uint8).reshape(-1, 2, 2, 2, 2)               # thread, half of K, dword, key, column
  return np.ascontiguousarray(pairs.transpose(0, 4, 1, 2, 3)).reshape(len(pairs), 16).view(np.uint32).T

instruction("columns_apart", _columns_apart, cuda=Body(
  "return make_uint4(" + ", ".join(f"__byte_perm(words.{x}, words.{y}, 0x{selector:04x}u)"
                                   for selector in (EVEN_BYTES, ODD_BYTES) for x, y in ("xy", "zw")) + ");", "words"))

def columns_apart(words:UOp) -> UOp:
  """Returns B fragments for 32 keys and 16 columns of V, first the 8 even columns, then the 8 odd columns, from 8-bit pairs that ldmatrix loaded."""
  # `words` is what ldmatrix returned for 32 rows of 16 columns, transposed. Because ldmatrix moves pairs of bytes, each dword has two neighbouring
  # columns of two keys. A lane's keys are in the order in which `pack_a` packs the weights.
  return emit("columns_apart", U4, words)

@compound("row_unit", suffix="_{row}")
def _row_unit(c:Any, x:Value, y:Value, z:Value, w:Value, factor:Value, *, row:int, dtype:str) -> Value:
  return c.join(*[c.pack(c.part(fragment, ROWS*row, 2)*factor, dtype) for fragment in (x, y, z, w)])

@compound("clear", suffix="_{count}")
def _clear(c:Any, acc:Value, *, count:int) -> Value:
  for i in range(count): c.store(acc, i, c.splat(c.number(0.0), 4))
  return c.number(0.0)

@compound("zero", inline=True)
def _zero(c:Any, order:Value) -> Value: return c.splat(c.number(0.0), 4)

def zero(after:UOp) -> UOp:
  """Returns a C fragment of zeros that the kernel sets after the operation `after`."""
  return emit("zero", F4, after)
def clear(acc:UOp, *after:UOp) -> UOp:
  """Returns a statement that sets all C fragments in the register array `acc` to zero."""
  return statement("clear", acc[0], *after, count=acc.max_numel())
def row_unit(fragments:list[UOp], row:int, factor:UOp, dtype:str) -> UOp:
  """Returns 8 neighbouring elements of one row in four C fragments, times `factor`, rounded to the 16-bit `dtype` and packed into 16 bytes."""
  # a lane has two of these elements in each of four neighbouring C fragments; `row` is 0 or 1, for the first or the second of the lane's two rows
  return emit("row_unit", U4, *fragments, factor, row=row, dtype=dtype)
def pack_a(fragments:list[UOp], dtype:str) -> UOp:
  """Returns one A fragment, made by rounding two neighbouring C fragments to 16-bit `dtype`, or four to 8-bit `dtype`."""
  return emit("pack_a", U4, *fragments, dtype=dtype)

# ***** across lanes *****

instruction("xor_lane", lambda lanes, x, mask: from_xor_lane(x, mask, lanes.wave),
            cuda=lambda printer, out, mask: f"__shfl_xor_sync(0xffffffffu, {{0}}, {mask})")

def xor_lane(x:UOp, mask:int) -> UOp:
  """Returns x of another lane, whose index is this lane's index xor `mask` (shfl.sync.bfly)."""
  return emit("xor_lane", dtypes.float, x, mask=mask)

def _transposed(lanes:Any, words:Array, in_quad:Array) -> Array:
  lane = np.arange(words.shape[-1])
  return np.stack([words[lane%4, lane//4*4 + source] for source in range(4)])

# Each of two steps exchanges half of the words: first neighbouring lanes exchange neighbouring words, then pairs of lanes exchange pairs of words.
instruction("transposed", _transposed, cuda=Body("\n".join([
  "bool odd = lane & 1, upper = lane & 2;",
  "unsigned a = __shfl_xor_sync(0xffffffffu, odd ? words.x : words.y, 1), b = __shfl_xor_sync(0xffffffffu, odd ? words.z : words.w, 1);",
  "if (odd) { words.x = a; words.z = b; } else { words.y = a; words.w = b; }",
  "a = __shfl_xor_sync(0xffffffffu, upper ? words.x : words.z, 2), b = __shfl_xor_sync(0xffffffffu, upper ? words.y : words.w, 2);",
  "if (upper) { words.x = a; words.y = b; } else { words.z = a; words.w = b; }",
  "return words;"]), "words lane"))

def transposed(words:UOp, in_quad:UOp) -> UOp:
  """Transposes a 4 x 4 matrix of words across four neighbouring lanes: this lane gives a row, `words`, and gets column `in_quad`."""
  return emit("transposed", U4, words, integer(in_quad))
