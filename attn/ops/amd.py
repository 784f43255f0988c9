"""Instructions of AMD's chips that tinygrad has no UOp for, each as HIP text and as the numpy function that the emulator runs. Operations for all
vendors are in common.py."""
from __future__ import annotations
from typing import Any
import functools
import numpy as np
from attn.ops.common import descriptor, f32, length, u32
from attn.ops.interpret_hip import exchange_rows
from attn.ops.interpret_numpy import Numbers
from attn.ops.language import instruction
from attn.ops.operation import Array
from attn.ops.numerics import from_xor_lane
from attn.ops.operation import Body, emit, integer, statement
from attn.tinygrad_compat import UOp, dtypes

def nothing(lanes:Any, *_:Any, **static:Any) -> Array:
  """Returns 0 for each thread. This is the numpy function of operations that compute no value, such as a scheduling barrier."""
  return np.zeros(lanes.active.shape, np.float32)

# ***** vectors and bits *****

def _byte_perm(lanes:Any, hi:Array, lo:Array, selector:int) -> Array:
  moved: dict[tuple[int, int], int] = {}     # (word, shift up in bytes) -> mask of the result's bytes that come from it
  for i in range(4):
    word, byte = divmod(selector >> 8*i & 7, 4)
    moved[word, i - byte] = moved.get((word, i - byte), 0) | 0xff << 8*i
  def shifted(x:Array, up:int) -> Array: return x << np.uint32(8*up) if up > 0 else x >> np.uint32(-8*up) if up else x
  parts = [shifted((lo, hi)[word], up) & np.uint32(mask) for (word, up), mask in moved.items()]
  return functools.reduce(np.bitwise_or, parts)

def _byte_perm_cuda(printer:Any, out:str, selector:int) -> str:
  picked = sum((selector >> 8*i & 7) << 4*i for i in range(4))      # four bits for each byte
  return f"__byte_perm({{1}}, {{0}}, 0x{picked:04x}u)"

instruction("byte_perm", _byte_perm, lambda printer, out, selector: f"__builtin_amdgcn_perm({{0}}, {{1}}, 0x{selector:08x}u)", _byte_perm_cuda)

def byte_perm(hi:UOp, lo:UOp, selector:int) -> UOp:
  """Returns a dword made of four bytes of lo and hi (v_perm_b32): byte i of `selector` says which, 0 to 3 from lo, 4 to 7 from hi."""
  return emit("byte_perm", dtypes.uint, hi, lo, selector=selector)

instruction("side_by_side", lambda lanes, x: x, Body('asm("" : "+v"(x));\nreturn x;', "x"))

def side_by_side(x:UOp) -> UOp:
  """Returns the vector x unchanged, and makes the compiler keep its elements in neighbouring registers."""
  # Neighbouring registers lie in different banks, and two instructions issue together only if their operands, and their results, lie in different
  # banks (VOPD: RDNA3 ISA section 7.6). The compiler might otherwise choose any registers.
  return emit("side_by_side", x.dtype, x)

# ***** across lanes *****

def _pair_text(printer:Any, out:str, step:int, exchange:str) -> Body:
  first, second = printer.exchange(printer.named("x", "float"), step, exchange)
  statements = "\n".join(line.strip() for line in printer.lines)
  return Body(f"{statements}\nreturn (float2){{{first.text}, {second.text}}};", "x", name=f"pair_over_{step}")

instruction("pair", lambda lanes, x, step, exchange: np.stack(Numbers(lanes).exchange(x, step, exchange)), _pair_text)

def pair(x:UOp, step:int, matrix:Any) -> UOp:
  """Returns a vector of x from two lanes, this lane and the lane `step` away, in the order in which the chip's instruction returns them."""
  # So combine the two by a commutative operation, such as a sum or a maximum. Lanes that share a query are at the distances `matrix.group_steps`.
  # The instruction is v_permlane16_swap_b32 or v_permlane32_swap_b32 (CDNA4 ISA section 12), v_permlanex16_b32 or ds_bpermute_b32.
  return emit("pair", f32(2), x, step=step, exchange=matrix.exchange)

def _share_halves(lanes:Any, x:Array, low:Array) -> Array:
  other = from_xor_lane(x, 16, lanes.wave)
  return np.concatenate([np.where(low, x, other), np.where(low, other, x)])

def _share_halves_text(printer:Any, out:str) -> Body:
  n = int(out.removeprefix("uint"))//2
  others = ",\n    ".join(exchange_rows(f"x[{i}]") for i in range(n))
  at = ", ".join(map(str, range(2*n)))
  return Body(f"uint{n} other = {{\n    {others}}};\n"
              f"return low ? __builtin_shufflevector(x, other, {at}) : __builtin_shufflevector(other, x, {at});", "x low")

instruction("share_halves", _share_halves, _share_halves_text)

def share_halves(x:UOp, low:UOp) -> UOp:
  """Returns in both lanes l and l+16 the same vector: x of lane l, then x of lane l+16. `low` is true in lanes 0 to 15."""
  return emit("share_halves", u32(2*length(x)), x, low)

def _low_lanes_text(printer:Any, out:str) -> Body:
  # Inline assembly hides the mask 0xffff from clang, so that clang can't reuse an earlier result. The intrinsic is called by its LLVM name, because
  # clang 19 has no builtin for it.
  return Body('__attribute__((device)) bool lanes_of(unsigned) __asm("llvm.amdgcn.inverse.ballot.i32");\n'
              'unsigned bits = 0xffffu;\nasm("" : "+s"(bits) : "v"(x[0]));\nreturn lanes_of(bits);', "x")

instruction("low_lanes", lambda lanes, x: np.arange(x.shape[-1])%lanes.wave < 16, _low_lanes_text)

def low_lanes(x:UOp) -> UOp:
  """Returns whether this lane is one of lanes 0 to 15, computed after the vector `x` and not shared with other calls."""
  # The answer selects elements of x. It lies in the register VCC, so two selects by it can be one instruction (v_dual_cndmask_b32: RDNA3 ISA section
  # 7.6). Comparisons overwrite VCC, so each call computes the answer again.
  return emit("low_lanes", dtypes.bool, x)

# ***** order *****

def waitcnt(vmcnt:int=63, lgkmcnt:int=15) -> str:
  """Returns C++ text that waits until at most `vmcnt` loads and `lgkmcnt` LDS accesses of this wave are incomplete (s_waitcnt of CDNA)."""
  # the encoding is in LLVM's AMDGPUBaseInfo.cpp
  return f"__builtin_amdgcn_s_waitcnt(0x{vmcnt & 15 | 7 << 4 | lgkmcnt << 8 | vmcnt >> 4 << 14:04x});"

def kept_in_order(*statements:str) -> str:
  """Returns the C++ text of `statements` between two fences, past which clang moves no access to memory."""
  # The fences have the scope of one wave and cost nothing. A release fence with the scope of the workgroup would wait until all loads from memory to
  # LDS are complete, even loads that no other wave reads until later.
  fence, scheduling = '__builtin_amdgcn_fence({}, "wavefront");', "__builtin_amdgcn_sched_barrier(0);"
  return "\n".join([scheduling, fence.format("__ATOMIC_RELEASE"), *statements, fence.format("__ATOMIC_ACQUIRE"), scheduling, "return 0.0f;"])

instruction("barrier", lambda lanes, *_: lanes.barrier(lanes.active),
            Body(kept_in_order(waitcnt(lgkmcnt=0), "__builtin_amdgcn_s_barrier();"), "", name="ordered_barrier"))
instruction("barrier_of", lambda lanes, waves, *_: lanes.barrier(lanes.active & (waves != 0)),
            Body("if (__builtin_amdgcn_readfirstlane(waves)) __builtin_amdgcn_s_barrier();\nreturn 0.0f;", "waves"))
instruction("wait_loads", lambda lanes, *_, n: lanes.wait_stores(n),
            lambda printer, out, n: Body(f"{waitcnt(vmcnt=n)}\nreturn 0.0f;", "", name=f"wait_loads_but_{n}"))
instruction("priority", nothing,
            lambda printer, out, level: Body(f"__builtin_amdgcn_s_setprio({level});\nreturn 0.0f;", "", name=f"priority_{level}"))
instruction("fp32_apart", nothing, Body("return 0.0f;", ""))
instruction("written_here", nothing, Body("return 0.0f;", ""))
instruction("sched_barrier", nothing, Body("__builtin_amdgcn_sched_barrier(0);\nreturn 0.0f;", ""))

def _interleave_text(printer:Any, out:str, ahead:int, products:int, reads:int, steps:int) -> Body:
  def group(kind:int, n:int) -> str: return f"__builtin_amdgcn_sched_group_barrier({kind}, {n}, 0);"
  return Body(f"{group(LDS_READS, ahead)}\n#pragma clang loop unroll(full)\nfor (int i = 0; i < {steps}; i++) {{\n"
              f"  {group(MATRIX_PRODUCTS, products)}\n  {group(LDS_READS, reads)}\n}}\nreturn 0.0f;", "",
              name=f"interleave_{ahead}_{steps}x{products}_{reads}")

MATRIX_PRODUCTS, LDS_READS = 0x8, 0x100     # kinds of instructions, in the numbers that clang's builtin takes
instruction("interleave", nothing, _interleave_text)
instruction("opaque", lambda lanes, x, _: x, Body('asm volatile("" : "+v"(x));\nreturn x;', "x"))

def barrier(*after:UOp) -> UOp:
  """Returns a statement, executed after `after`: a barrier of the workgroup, across which the compiler moves no access to LDS."""
  return statement("barrier", *after)
def barrier_of(waves:UOp, *after:UOp) -> UOp:
  """Returns a statement, executed after `after`: a barrier that only those waves execute in which the integer `waves` is not 0."""
  # These waves then run one barrier behind the others, which execute their next barrier at the same time: the two groups of waves take turns.
  return statement("barrier_of", integer(waves), *after)
def wait_loads(n:int, *after:UOp) -> UOp:
  """Returns a statement, executed after `after`, that waits until at most `n` of this wave's loads from memory to LDS are not complete."""
  return statement("wait_loads", *after, n=n)
def priority(level:int, *after:UOp) -> UOp:
  """Returns a statement, executed after `after`, that sets this wave's priority on its SIMD to `level`, 0 to 3 (s_setprio)."""
  return statement("priority", *after, level=level)
def fp32_apart(*after:UOp) -> UOp:
  """Returns a statement that keeps clang, in the whole kernel, from packing two fp32 operations into one instruction."""
  # GLOBAL_UNPACKED in ops.renderers says why
  return statement("fp32_apart", *after)
def written_here(*after:UOp) -> UOp:
  """Returns a statement that does nothing, but is written in the kernel's source after the statements `after`."""
  return statement("written_here", *after)
def sched_barrier(*after:UOp) -> UOp:
  """Returns a statement, executed after `after`, across which clang moves no instruction."""
  # loads then don't start long before their use
  return statement("sched_barrier", *after)
def interleave(ahead:int, products:int, reads:int, steps:int, *after:UOp) -> UOp:
  """Returns a statement for clang's scheduler: first `ahead` LDS reads, then `steps` times `products` matrix instructions and `reads` LDS reads."""
  # Operands are then read long before their use. The order holds back to the last barrier or branch; instructions of other kinds stand where clang
  # puts them.
  return statement("interleave", *after, ahead=ahead, products=products, reads=reads, steps=steps)
def opaque(x:UOp, trip:UOp) -> UOp:
  """Returns the integer x, which to the compiler seems to depend on the loop index `trip`. So each iteration computes again what depends on x."""
  # `trip` is usually the index of a loop's iteration: without the new load the compiler would keep the loaded value in registers
  return emit("opaque", dtypes.int, integer(x), trip if trip.dtype == dtypes.float else integer(trip))

instruction("made_here", nothing, lambda printer, out, n: Body("\n".join([f'asm volatile("" :: "v"({"abcdefghijklmnop"[i]}[0]));' for i in range(n)]
                                                                        + ["return 0.0f;"]), " ".join("abcdefghijklmnop"[:n])))

def made_here(*values:UOp) -> UOp:
  """Returns a statement before which the compiler must have computed the vectors `values`."""
  # otherwise the compiler may move their computation behind a barrier, into a later branch
  return statement("made_here", *values, n=len(values))

# ***** memory *****

def _load_to_lds(lanes:Any, pointer:Any, records:Array, offset:Array, lds:Any, *_:Any) -> Array:
  records, offset = records.astype(np.int64) & 0xffffffff, offset.astype(np.int64) & 0xffffffff
  lanes.check_extent(pointer, records)
  raw = lanes.load_bytes(pointer, offset, 16, lanes.active & (offset + 16 <= records))
  lanes.start_store(lds, np.arange(raw.shape[1]) % lanes.wave * 16, raw, lanes.active)
  return lanes.commit_stores()    # s_waitcnt counts each load by itself

def _load_to_lds_text(printer:Any, out:str) -> Body:
  # The instruction is called by its LLVM name, because clang 20 has no builtin for it.
  shared = "__attribute__((address_space(3))) void*"
  return Body(f"__attribute__((device)) void load(__amdgpu_buffer_rsrc_t, {shared}, unsigned, int, int, int, int)\n"
              '    __asm("llvm.amdgcn.raw.ptr.buffer.load.lds");\n'
              f"load({descriptor(printer.arch)},\n    ({shared})lds, 16, offset, 0, 0, 0);\nreturn 0.0f;", "base records offset lds")

instruction("load_to_lds", _load_to_lds, _load_to_lds_text)

def _load_transposed(lanes:Any, pointer:Any) -> Array:
  loaded = lanes.load_bytes(pointer, np.zeros(lanes.active.shape, np.int64), 8, lanes.active)
  raw = np.ascontiguousarray(loaded.T).view(np.uint16).astype(np.uint32)   # (threads, 4)
  lane = np.arange(raw.shape[0])
  got = [raw[lane // 16 * 16 + 4*e + lane % 16 // 4, lane % 4] for e in range(4)]
  return np.stack([got[0] | got[1] << np.uint32(16), got[2] | got[3] << np.uint32(16)])

instruction("load_transposed", _load_transposed,
            Body("typedef short four __attribute__((vector_size(8)));\n"
                 "return __builtin_bit_cast(uint2, __builtin_amdgcn_ds_read_tr16_b64_v4i16((__attribute__((address_space(3))) four*)p));", "p"))

def _load_column(lanes:Any, pointer:Any, steps:tuple[int, ...]) -> Array:
  start = np.zeros(lanes.active.shape, np.int64)
  halves = [lanes.load_bytes(pointer, start + step, 2, lanes.active).astype(np.uint32) for step in steps]
  numbers = [low | high << np.uint32(8) for low, high in halves]
  return np.stack([low | high << np.uint32(16) for low, high in zip(numbers[0::2], numbers[1::2])])

def _load_column_text(printer:Any, out:str, steps:tuple[int, ...]) -> Body:
  elements = ", ".join(f"p[{step//2}]" for step in steps)
  return Body(f"typedef unsigned short numbers __attribute__((vector_size({2*len(steps)})));\n"
              "auto p = (const __attribute__((address_space(3))) unsigned short*)column;\n"
              f"return __builtin_bit_cast({out}, (numbers){{{elements}}});", "column", name=f"load_column_{steps[-1]}")

instruction("load_column", _load_column, _load_column_text)

def load_column(lds:UOp, steps:tuple[int, ...]) -> UOp:
  """Loads 16-bit numbers from LDS, `steps` bytes after the address `lds`, and packs each two into a dword (ds_read_u16)."""
  # such as a column of a tile that is stored by rows
  return emit("load_column", u32(len(steps)//2), lds, steps=steps)
def load_to_lds(base:UOp, records:UOp, offset:UOp, lds:UOp, *after:UOp) -> UOp:
  """Returns a statement that starts a copy of 16 bytes per lane, from `base` + `offset` bytes in global memory to `lds` + 16*lane bytes."""
  # The copy is complete only after `wait_loads`. `base` and `lds` are equal in all lanes of the wave. The bytes are zero if offset + 16 exceeds
  # `records`, the size of the buffer's range in bytes.
  return statement("load_to_lds", base, integer(records), offset.cast(dtypes.uint), lds, *after)
def load_transposed(lds:UOp) -> UOp:
  """Returns column l of a 4 x 16 matrix of 16-bit elements in LDS, where l is the lane's index among 16 lanes (ds_read_b64_tr_b16)."""
  # in lane l `lds` is the address of 4 consecutive elements, columns 4*(l%4) to 4*(l%4)+3 of row l//4 (CDNA4 ISA section 11.4)
  return emit("load_transposed", u32(2), lds)

# ***** matrix unit *****

def _matrix_text(printer:Any, out:str, matrix:Any) -> str:
  # A C cast converts a vector to the instruction's vector type of the same size and keeps the bits; one number of type long needs __builtin_bit_cast.
  if matrix.operand_type == "long": a, b = (f"__builtin_bit_cast(long, {{{i}}})" for i in range(2))
  else: a, b = (f"({matrix.operand_type}{matrix.operand_elements}){{{i}}}" for i in range(2))
  return str(matrix.call(a, b, "{2}"))

instruction("matrix", lambda lanes, a, b, c, matrix: lanes.matrix(matrix.name, a, b, c), _matrix_text)

def shaped_wmma(matrix:Any, a:UOp, b:UOp, acc:UOp) -> UOp:
  """Returns acc + A B, computed by the matrix instruction `matrix`. `a`, `b` and `acc` are vectors: this lane's part of each matrix."""
  # tinygrad's own operation, `Ops.WMMA`, is not used: tinygrad wraps each operand of it in further UOps (RESHAPE, STACK, INDEX), and lowering takes
  # 25 to 60 % longer (gfx942, D=64: 0.54 s instead of 0.39 s). Besides, HIPRenderer's `#define` names compiler builtins that do not exist for the
  # 32x32 matrix shapes.
  return emit("matrix", acc.dtype, a, b, acc, matrix=matrix)
