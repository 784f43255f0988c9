"""Instructions of Hopper's warpgroup kernels: for each, the CUDA text that is printed, and the numpy function with which the emulator computes it.

Section numbers refer to the PTX ISA 8.7. A warpgroup of 128 threads executes wgmma.mma_async (9.7.15) together: it multiplies 64 rows of A, from
registers or shared memory, by up to 256 columns of B, from shared memory. For each 8 columns a thread holds the elements of the result that it holds
in mma.m16n8k16, and warp w of the group holds the rows from 16*w on. If A is in registers, its elements also lie as in mma.m16n8k16.

A tile in shared memory consists of panels of 64 columns. A panel's rows have 128 bytes; the 16-byte units of a row are permuted by xor with the row
number modulo 8 (the 128-byte swizzle of 9.7.15.5.1). A tile begins at a multiple of 1024 bytes.

The emulator is strict about asynchronous products. `scores` and `output` start them. Until `wait_products` has waited for a product, no thread may
access its accumulators, or write its operands in shared memory or registers.
"""
from __future__ import annotations
from typing import Any, Callable
import numpy as np
from attn.ops.language import instruction
from attn.ops.operation import Array
from attn.ops.printer import wrapped
from attn.ops.nvidia import shared
from attn.ops.operation import Body, Lanes, emit, integer, statement
from attn.tinygrad_compat import UOp, dtypes

GROUP = 128                  # threads of a warpgroup
M, K = 64, 16                # rows of A and depth of one instruction
PANEL, ATOM = 128, 1024      # bytes of a panel's row, and of 8 rows, after which the swizzle repeats
PTX = {"float16": "f16", "bfloat16": "bf16"}
EVERYWHERE = UOp.const(True)

# ***** the meaning *****

def _read(lanes:Lanes, pointer:Any, lines:int, line:Callable[[Array], Array], units:int) -> Array:
  """Reads an operand of each warpgroup from shared memory: `lines` lines, each of `units` neighbouring units of 16 bytes, as uint16 (groups, lines,
  8*units). `line` maps the number of a line to its first byte, counted from the start of the tile, before the swizzle."""
  lanes.check_alignment(pointer, ATOM)
  groups = len(lanes.active)//GROUP
  def load(turned:int) -> list[Array]:
    thread, read = (np.arange(GROUP) + turned) % GROUP, list[Array]()
    for first in range(0, lines*units, GROUP):
      i = np.minimum(first + thread, lines*units - 1)
      there = line(i//units) + i % units*16
      # a tile begins where the pattern of the swizzle repeats, so the offset in the tile is swizzled as the address is
      offset, gate = there ^ (there//PANEL % 8*16), first + thread < lines*units
      read.append(lanes.load_bytes(pointer, np.tile(offset, groups), 16, lanes.active & np.tile(gate, groups)))
    return read
  load(lanes.wave)     # hardware does not specify which wave of the group reads what: for the race check a second wave reads everything too
  read = load(0)
  bits = np.stack([np.ascontiguousarray(x.T).view(np.uint16).reshape(groups, GROUP, 8) for x in read], 1)
  return bits.reshape(groups, -1, 8)[:, :lines*units].reshape(groups, lines, units*8)

def _rows(lanes:Lanes, pointer:Any, rows:int, steps:int, panel:int) -> Array:
  """Reads `rows` rows of K*steps columns from shared memory, for a product that sums along a row. Returns (warpgroups, rows, K*steps)."""
  def line(i:Array) -> Array: return i//steps//8*ATOM + i//steps % 8*PANEL + i % steps//4*panel + i % steps % 4*2*K
  return _read(lanes, pointer, rows*steps, line, 2).reshape(-1, rows, steps*K)

def _columns(lanes:Lanes, pointer:Any, keys:int, width:int, panel:int) -> Array:
  """Reads `keys` rows of `width` columns from shared memory, for a product that sums across rows. Returns (warpgroups, width, keys)."""
  blocks = width//8
  def line(i:Array) -> Array: return i//blocks//8*ATOM + i//blocks % 8*PANEL + i % blocks//8*panel + i % blocks % 8*16
  return _read(lanes, pointer, keys*blocks, line, 1).reshape(-1, keys, width).swapaxes(1, 2)

def _scores(lanes:Lanes, acc:Any, q:Any, k:Any, there:Array, _:Array, accs:int, steps:int, panels:tuple[int, int], dtype:str) -> Array:
  def of_q() -> Array: return _rows(lanes, q, M, steps, panels[0])
  def of_k() -> Array: return _rows(lanes, k, 8*accs, steps, panels[1])
  with lanes.only(there): return lanes.start_product(acc, accs, of_q, of_k, dtype, False)

def _output(lanes:Lanes, acc:Any, p:Any, v:Any, there:Array, _:Array, accs:int, steps:int, panel:int, dtype:str) -> Array:
  def fragments() -> Array: return lanes.warpgroup_operand(np.concatenate([lanes.load_register(p, i) for i in range(steps)]))
  def of_v() -> Array: return _columns(lanes, v, K*steps, 8*accs, panel)
  with lanes.only(there): return lanes.start_product(acc, accs, fragments, of_v, dtype, True)

# ***** the text *****

def accumulators(n:int) -> str:
  """Returns the names that inline assembly uses for the registers of n C fragments."""
  return ", ".join(f"%{i}" for i in range(4*n))

def both_ways(n:int) -> str:
  """Returns the registers of n C fragments as operands of inline assembly that are read and written."""
  return wrapped(", ".join(f'"+f"(acc[{i}].{e})' for i in range(n) for e in "xyzw"), "      ")

def _descriptor(name:str, pointer:str, apart:int=16) -> str:
  """Returns a statement that makes a matrix descriptor (9.7.15.5.1.2) of the address, the distance of panels for a transposed B, the distance of 8
  rows, and the 128-byte swizzle."""
  rest = apart >> 4 << 16 | ATOM >> 4 << 32 | 1 << 62
  return f"unsigned long long {name} = (unsigned long long)(((unsigned)__cvta_generic_to_shared({pointer}) & 0x3ffffu) >> 4) | {rest}ull;"

def _assembly(accs:int, descriptors:list[str], lines:list[str], operands:str, there:int) -> str:
  """Returns inline assembly of one group of instructions, with the registers and predicates that they need. A thread skips the group if operand
  number `there` is 0. (The branch is inside the assembly: with a branch around it, ptxas would wait for each wgmma, warning C7511.)"""
  body = [f'{{ .reg .pred p; .reg .b64 {", ".join(descriptors)};', f"setp.eq.u32 p, %{there}, 0; @p bra over;", "wgmma.fence.sync.aligned;", *lines,
          "wgmma.commit_group.sync.aligned; over: }"]
  quoted = "\n    ".join(f'"{part} "' for line in body for part in wrapped(line, "  ").split("\n"))
  return f'asm volatile(\n    {quoted}\n    : {both_ways(accs)}\n    : {wrapped(operands, "      ")} : "memory");\nreturn 0.0f;'

def _scores_text(printer:Any, out:str, accs:int, steps:int, panels:tuple[int, int], dtype:str) -> Body:
  lines, c, ptx = [], 4*accs, PTX[dtype]
  for step in range(steps):
    at = [step//4*panel + step % 4*2*K for panel in panels]
    lines += [f"add.s64 a, %{c}, {at[0] >> 4}; add.s64 b, %{c+1}, {at[1] >> 4}; setp.ne.u32 p, %{c+2}, {step and 2};",
              f"wgmma.mma_async.sync.aligned.m64n{8*accs}k16.f32.{ptx}.{ptx} {{{accumulators(accs)}}}, a, b, p, 1, 1, 0, 0;"]
  operands = '"l"(of_q), "l"(of_k), "r"(0), "r"((int)there)'
  statements = [_descriptor("of_q", "q"), _descriptor("of_k", "k"), _assembly(accs, ["a", "b"], lines, operands, c + 3)]
  return Body("\n".join(statements), "acc q k there", name=f"start_scores_{8*accs}x{K*steps}")

def _output_text(printer:Any, out:str, accs:int, steps:int, panel:int, dtype:str) -> Body:
  lines, c, ptx = [], 4*accs, PTX[dtype]
  for step in range(steps):
    a = ", ".join(f"%{c + 1 + 4*step + i}" for i in range(4))
    lines += [f"add.s64 b, %{c}, {step*2*ATOM >> 4};",
              f"wgmma.mma_async.sync.aligned.m64n{8*accs}k16.f32.{ptx}.{ptx} {{{accumulators(accs)}}}, {{{a}}}, b, 1, 1, 1, 1;"]
  p = ", ".join(f'"r"(p[{step}].{e})' for step in range(steps) for e in "xyzw")
  statements = [_descriptor("of_v", "v", panel), _assembly(accs, ["b"], lines, f'"l"(of_v), {p}, "r"((int)there)', c + 1 + 4*steps)]
  return Body("\n".join(statements), "acc p v there", name=f"start_output_{8*accs}x{K*steps}")

def _wait_text(printer:Any, out:str, accs:int, but:int) -> Body:
  return Body(f'asm volatile("wgmma.wait_group.sync.aligned {but};"\n    : {both_ways(accs)}\n    :: "memory");\nreturn 0.0f;', "acc",
              name=f"wait_for_{accs}" + f"_but_{but}"*(but > 0))

# ***** the operations *****

# 9.7.13.15: one mbarrier, in whose phases all threads of a block arrive
instruction("init_arrivals", lambda lanes, bar, gate, threads: np.zeros(len(lanes.active), np.float32),
            cuda=lambda printer, out, threads: Body(
              f'if (first) asm volatile("mbarrier.init.shared.b64 [%0], {threads};" :: {shared("bar")} : "memory");\n'
              "return 0.0f;", "bar first"))
instruction("arrive", lambda lanes, bar, _: lanes.arrive(),
            cuda=Body(f'asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: {shared("bar")} : "memory");\nreturn 0.0f;', "bar"))
instruction("await_arrivals", lambda lanes, bar, parity, _: lanes.await_arrivals(parity),
            cuda=Body('unsigned at = (unsigned)__cvta_generic_to_shared(bar), there = 0u;\n'
                      'while (!there) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"\n'
                      '    : "=r"(there) : "r"(at), "r"(parity) : "memory");\n'
                      'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\nreturn 0.0f;', "bar parity"))
instruction("start_scores", _scores, cuda=_scores_text)
instruction("start_output", _output, cuda=_output_text)
instruction("wait_products", lambda lanes, *_, accs, but: lanes.wait_products(but), cuda=_wait_text)
instruction("warpgroup", lambda lanes, x: x, cuda="__shfl_sync(0xffffffffu, {0}, 0)")

def init(barrier:UOp, first:UOp, threads:int) -> UOp:
  """Initialises an mbarrier for `threads` threads in the 8 bytes of shared memory at `barrier` (an INDEX). Only the thread where `first` is true does
  this. Returns a statement, after which a block barrier must follow."""
  return statement("init_arrivals", barrier, first, threads=threads)
def arrive(barrier:UOp, order:UOp) -> UOp:
  """Makes this thread arrive at the mbarrier's next phase once the copies that it has started are complete. Returns a statement."""
  return statement("arrive", barrier, order)
def arrived(barrier:UOp, phase:UOp, order:UOp) -> UOp:
  """Waits until all threads have arrived at phase number `phase`, so that wgmma may read what they copied. Returns a statement."""
  return statement("await_arrivals", barrier, integer(phase % 2), order)
def scores(acc:UOp, q:UOp, k:UOp, order:UOp, steps:int, panels:tuple[int, int], dtype:str, there:UOp=EVERYWHERE) -> UOp:
  """Starts acc = Q K^T, with 64 rows of Q, 8 rows of K for each C fragment in `acc` (a placeholder), and 16*steps columns of both. `q` and `k` are
  INDEXes of their first units; `panels` has the distance between panels in bytes, of Q and of K. Warpgroups where `there` is false do nothing.
  Returns a statement."""
  return statement("start_scores", acc[0], q, k, there, order, accs=acc.max_numel(), steps=steps, panels=panels, dtype=dtype)
def output(acc:UOp, p:UOp, v:UOp, order:UOp, panel:int, dtype:str, place:range|None=None, there:UOp=EVERYWHERE) -> UOp:
  """Starts acc += P V, with the A fragments `p` (a placeholder, 16 keys each) and one row of V for each key. `panel` is the distance between V's
  panels in bytes. `place` selects C fragments of `acc`; None stands for all. Warpgroups where `there` is false do nothing. Returns a statement."""
  first, accs = (place.start, len(place)) if place is not None else (0, acc.max_numel())
  return statement("start_output", acc[first], p[0], v, there, order, accs=accs, steps=p.max_numel(), panel=panel, dtype=dtype)
def wait_products(acc:UOp, order:UOp, but:int=0) -> UOp:
  """Waits for all products that were started, except the last `but` products. After that `acc` may be used. Returns a statement."""
  return statement("wait_products", acc[0], order, accs=acc.max_numel(), but=but)
def group(wave:UOp) -> UOp:
  """Returns the number of this thread's warpgroup. Tells the compiler that this number is equal in the whole warp."""
  return emit("warpgroup", dtypes.int, integer(wave//4))
