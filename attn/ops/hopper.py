"""Instructions of Hopper's warpgroup kernels (wgmma, mbarrier, TMA), each as CUDA text and as the numpy function that the emulator runs."""
from __future__ import annotations
from typing import Any, Callable
import numpy as np
from attn.ops.language import instruction
from attn.ops.numerics import IN_A_DWORD
from attn.ops.operation import Array
from attn.ops.printer import wrapped
from attn.ops.nvidia import shared
from attn.ops.atomics import in_global, of_global
from attn.ops.operation import Body, Lanes, emit, integer, statement
from attn.tinygrad_compat import UOp, dtypes

# Section numbers refer to the PTX ISA 8.7. A warpgroup of 128 threads executes wgmma.mma_async (9.7.15) together. The instruction multiplies 64 rows
# of A, from registers or shared memory, by up to 256 columns of B, from shared memory. Warp w of the group holds 16 rows of the result, from row
# 16*w on. For every 8 columns of the result, a thread holds the same elements as in mma.m16n8k16. If A is in registers, its elements also lie as in
# mma.m16n8k16.
#
# A tile in shared memory consists of panels of 64 columns. A panel's rows have 128 bytes. The 16-byte units of a row are permuted: the index of a
# unit is changed by xor with the row index modulo 8 (the 128-byte swizzle of 9.7.15.5.1). A tile begins at a multiple of 1024 bytes.
#
# The emulator is strict about asynchronous products. `scores`, `output` and `sums` start products. Until `wait_products` has waited for a product,
# no thread may access its accumulators, or write its operands in shared memory or registers.

GROUP = 128                  # threads of a warpgroup
M, K = 64, 16                # rows of A and depth of one instruction
PANEL, ATOM = 128, 1024      # bytes of a panel's row, and of 8 rows, after which the swizzle repeats
PTX = {"float16": "f16", "bfloat16": "bf16", "fp8e4m3": "e4m3"}
EVERYWHERE = UOp.const(True)

# ***** the numpy functions *****

def _read(lanes:Lanes, pointer:Any, lines:int, line:Callable[[Array], Array], units:int, begin:Array|int=0) -> Array:
  """Reads `lines` lines, each of `units` neighbouring 16-byte units, from a swizzled tile in shared memory, as uint16 (warpgroups, lines,
  8*units)."""
  # A line has `units` neighbouring units of 16 bytes. `line` returns, from the line's index, the offset of the line's first byte from the start of
  # the tile, before the swizzle. `begin` is added to every offset; it may differ from thread to thread.
  lanes.check_alignment(pointer, ATOM)
  groups = len(lanes.active)//GROUP
  def load(turned:int) -> list[Array]:
    thread, read = (np.arange(GROUP) + turned) % GROUP, list[Array]()
    for first in range(0, lines*units, GROUP):
      i = np.minimum(first + thread, lines*units - 1)
      there: Array = np.tile(line(i//units) + i % units*16, groups) + begin
      # a tile begins where the pattern of the swizzle repeats, so swizzling the offset in the tile swizzles the address
      offset, gate = there ^ (there//PANEL % 8*16), first + thread < lines*units
      read.append(lanes.load_bytes(pointer, offset, 16, lanes.active & np.tile(gate, groups)))
    return read
  load(lanes.wave)     # hardware does not specify which wave of the group reads what: for the race check a second wave reads everything too
  read = load(0)
  bits = np.stack([np.ascontiguousarray(x.T).view(np.uint16).reshape(groups, GROUP, 8) for x in read], 1)
  return bits.reshape(groups, -1, 8)[:, :lines*units].reshape(groups, lines, units*8)

def _rows(lanes:Lanes, pointer:Any, rows:int, steps:int, panel:int) -> Array:
  """Reads 16*steps numbers of 16 bits from each row of a tile in shared memory, as wgmma does; returns them as uint16 (warpgroups, rows,
  16*steps)."""
  # `panel` is the distance in bytes between panels, which hold 128 bytes of each row; a number of 16 bits may be a pair of 8-bit floats
  def line(i:Array) -> Array: return i//steps//8*ATOM + i//steps % 8*PANEL + i % steps//4*panel + i % steps % 4*2*K
  return _read(lanes, pointer, rows*steps, line, 2).reshape(-1, rows, steps*K)

def _elements(bits:Array, dtype:str) -> Array:
  # `bits` are numbers of 16 bits: pairs of 8-bit floats are taken apart
  return np.ascontiguousarray(bits).view(np.uint8) if IN_A_DWORD[dtype] == 4 else bits

def _columns(lanes:Lanes, pointer:Any, keys:int, width:int, panel:int, begin:Array|int=0) -> Array:
  """Reads `keys` rows of `width` 16-bit numbers from a tile in shared memory, as wgmma does; returns them transposed: (warpgroups, width, keys)."""
  # `panel` is the distance in bytes between panels, which hold 64 columns; `begin` is an offset in bytes from the start of the tile
  blocks = width//8
  def line(i:Array) -> Array: return i//blocks//8*ATOM + i//blocks % 8*PANEL + i % blocks//8*panel + i % blocks % 8*16
  return _read(lanes, pointer, keys*blocks, line, 1, begin).reshape(-1, keys, width).swapaxes(1, 2)

def _start(lanes:Lanes, there:Array, acc:Any, *product:Any) -> Array:
  # A warpgroup where `there` is false starts a group without products, so that waits count equally many groups in all warpgroups.
  with lanes.only(~there): lanes.start_nothing(acc)
  with lanes.only(there): return lanes.start_product(acc, *product)

def _scores(lanes:Lanes, acc:Any, q:Any, k:Any, there:Array, _:Array, accs:int, steps:int, panels:tuple[int, int], dtype:str, sums:int) -> Array:
  def of_q() -> Array: return _elements(_rows(lanes, q, M, steps, panels[0]), dtype)
  def of_k() -> Array:
    rows = _rows(lanes, k, 8*accs//sums, steps, panels[1])
    step = np.arange(steps*K)//K//-(-steps//sums)     # the partial sum of each column: for this sum, K is 0 in all other columns
    return _elements(np.concatenate([np.where(step == i, rows, np.uint16(0)) for i in range(sums)], 1), dtype)
  return _start(lanes, there, acc, accs, of_q, of_k, dtype, False)

def _output(lanes:Lanes, acc:Any, p:Any, v:Any, there:Array, _:Array, accs:int, steps:int, panel:int, dtype:str, more:bool,
            by_rows:bool) -> Array:
  def fragments() -> Array: return lanes.warpgroup_operand(np.concatenate([lanes.load_register(p, i) for i in range(steps)]), dtype)
  def of_v() -> Array:
    return _elements(_rows(lanes, v, 8*accs, steps, panel), dtype) if by_rows else _columns(lanes, v, K*steps, 8*accs, panel)
  return _start(lanes, there, acc, accs, fragments, of_v, dtype, more)

def _shared_output(lanes:Lanes, acc:Any, p:Any, v:Any, _:Array, accs:int, steps:int, panel:int, dtype:str) -> Array:
  def of_p() -> Array: return _rows(lanes, p, M, steps, 0)
  def of_v() -> Array: return _columns(lanes, v, K*steps, 8*accs, panel)
  return lanes.start_product(acc, accs, of_p, of_v, dtype, True)

def _sums(lanes:Lanes, acc:Any, x:Any, y:Any, unit:Array, _:Array, accs:int, steps:int, panel:int, dtype:str, more:bool) -> Array:
  def of_x() -> Array: return _columns(lanes, x, K*steps, M, 0)
  def of_y() -> Array: return _columns(lanes, y, K*steps, 8*accs, panel, unit.astype(np.int64)*16)
  return lanes.start_product(acc, accs, of_x, of_y, dtype, more)

# ***** the CUDA text *****

def accumulators(accs:range) -> str:
  """Returns names of registers in inline assembly: those of the C fragments with the indices `accs`, e.g. "%0, %1, %2, %3" for range(1)."""
  return ", ".join(f"%{i}" for i in range(4*accs.start, 4*accs.stop))

def both_ways(n:int) -> str:
  """Returns the constraints of inline assembly for the registers of n C fragments that the assembly reads and writes, e.g. "+f"(acc[0].x)."""
  return wrapped(", ".join(f'"+f"(acc[{i}].{e})' for i in range(n) for e in "xyzw"), "      ")

def _descriptor(name:str, pointer:str, apart:int=16) -> str:
  """Returns a C++ statement that makes the matrix descriptor `name` (PTX ISA 9.7.15.5.1.2) for the tile at `pointer`."""
  # the distance `apart` between panels in bytes (used for a transposed B), the distance between 8 rows and the next 8 rows, and the 128-byte swizzle
  rest = apart >> 4 << 16 | ATOM >> 4 << 32 | 1 << 62
  return f"unsigned long long {name} = (unsigned long long)(((unsigned)__cvta_generic_to_shared({pointer}) & 0x3ffffu) >> 4) | {rest}ull;"

def _assembly(accs:int, descriptors:list[str], lines:list[str], operands:str, there:int) -> str:
  """Returns inline assembly that runs the wgmma instructions `lines` on `accs` C fragments. The assembly skips `lines` where its operand %`there` is
  0."""
  # `operands` are the operands after the C fragments. Where operand `there` is 0, a thread commits a group without products, so waits that count
  # groups are the same for all threads. The branch is inside the assembly: with a branch around the assembly, ptxas would wait for each wgmma,
  # warning C7511.
  body = [f'{{ .reg .pred p; .reg .b64 {", ".join(descriptors)};', f"setp.eq.u32 p, %{there}, 0; @p bra over;", "wgmma.fence.sync.aligned;", *lines,
          "over: wgmma.commit_group.sync.aligned; }"]
  quoted = "\n    ".join(f'"{part} "' for line in body for part in wrapped(line, "  ").split("\n"))
  return f'asm volatile(\n    {quoted}\n    : {both_ways(accs)}\n    : {wrapped(operands, "      ")} : "memory");\nreturn 0.0f;'

def _send(lanes:Lanes, acc:Any, stage:Any, to:Any, lane:Array, there:Array, *sets_and_after:Array, accs:int, sets:bool) -> Array:
  for i in range(accs):
    x = np.ascontiguousarray(lanes.load_register(acc, i), np.float32)
    lanes.store_bytes(stage, (lane.astype(np.int64) + i*32)*16, np.ascontiguousarray(x.T).view(np.uint8).T, lanes.active)
    lanes.atomic_add(to, [i*128], x[None], lanes.active & there, sent=True, sets=sets_and_after[0] if sets else None)
  return np.zeros(len(lanes.active), np.float32)

def _send_text(printer:Any, out:str, accs:int, sets:bool) -> Body:
  stores = [f"((float4*)stage)[{32*i} + lane] = acc[{i}];" for i in range(accs)]
  def copy(when:str, instruction:str) -> list[str]:
    return [f'if (lane == 0 && {when}) asm volatile("{instruction} [%0], [%1], %2;\\ncp.async.bulk.commit_group;"',
            f'    :: {of_global("to")}, {shared("stage")}, "r"({512*accs}) : "memory");']
  adds = copy("there && !sets" if sets else "there", "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32")
  return Body("\n".join([
    'if (lane == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");', "__syncwarp();", *stores,
    'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");', "__syncwarp();",
    *(copy("there && sets", "cp.async.bulk.global.shared::cta.bulk_group") if sets else []), *adds, "return 0.0f;"]),
    f"acc stage to lane there{' sets'*sets}", name=f"send_{accs}{'_or_set'*sets}")

def _wgmma(accs:range, dtype:str, a:str, more:str, transposed:str) -> str:
  """Returns the text of one wgmma instruction: C fragments `accs` = A B, or += A B if the predicate `more` is true; `a` is the text of A."""
  # `transposed` says which operands in shared memory are transposed; operands of 8 bits cannot be
  lies = f", {transposed}" if IN_A_DWORD[dtype] == 2 else ""
  return (f"wgmma.mma_async.sync.aligned.m64n{8*len(accs)}k{K*IN_A_DWORD[dtype]//2}.f32.{PTX[dtype]}.{PTX[dtype]} {{{accumulators(accs)}}}, "
          f"{a}, b, {more}, 1, 1{lies};")

def _shared_product(accs:int, steps:list[tuple[int, int]], transposed:tuple[int, int], operands:str, dtype:str, sums:int=1) -> str:
  """Returns inline assembly for a product of two operands in shared memory, split into `sums` partial sums; `accs` counts the C fragments of all."""
  # `steps` has for each instruction the distances in bytes at which it reads A and B. `transposed` has 1 for a transposed operand, else 0.
  # `operands` are the two descriptors, and the numbers that say whether to add to the accumulators and whether to start the product. The steps, and
  # the fragments, are divided into `sums` partial sums, one after another.
  lines, c, of_sum, together = [], 4*accs, accs//sums, -(-len(steps)//sums)
  for i, at in enumerate(steps):
    place = range(i//together*of_sum, (i//together + 1)*of_sum)
    lines += [f"add.s64 a, %{c}, {at[0] >> 4}; add.s64 b, %{c+1}, {at[1] >> 4}; setp.ne.u32 p, %{c+2}, {i%together and 2};",
              _wgmma(place, dtype, "a", "p", "{}, {}".format(*transposed))]
  return _assembly(accs, ["a", "b"], lines, operands, c + 3)

def _scores_text(printer:Any, out:str, accs:int, steps:int, panels:tuple[int, int], dtype:str, sums:int) -> Body:
  q, k = ([step//4*panel + step % 4*2*K for step in range(steps)] for panel in panels)
  product = _shared_product(accs, list(zip(q, k)), (0, 0), '"l"(of_q), "l"(of_k), "r"(0), "r"((int)there)', dtype, sums)
  name = f"start_scores_{8*accs}x{K*steps}" + f"_in_{sums}"*(sums > 1)
  return Body("\n".join([_descriptor("of_q", "q"), _descriptor("of_k", "k"), product]), "acc q k there", name=name)

def _sums_text(printer:Any, out:str, accs:int, steps:int, panel:int, dtype:str, more:bool) -> Body:
  operands = f'"l"(of_x), "l"(of_y + unit), "r"({int(more)}), "r"(1)'
  product = _shared_product(accs, [(i*2*ATOM, i*2*ATOM) for i in range(steps)], (1, 1), operands, dtype)
  name = f"start_sums_{8*accs}x{K*steps}" + "_more"*more
  return Body("\n".join([_descriptor("of_x", "x"), _descriptor("of_y", "y", panel), product]), "acc x y unit", name=name)

def _output_text(printer:Any, out:str, accs:int, steps:int, panel:int, dtype:str, more:bool, by_rows:bool) -> Body:
  lines, c = [], 4*accs
  for step in range(steps):
    a = ", ".join(f"%{c + 1 + 4*step + i}" for i in range(4))
    at = step//4*panel + step % 4*2*K if by_rows else step*2*ATOM
    lines += [f"add.s64 b, %{c}, {at >> 4};", _wgmma(range(accs), dtype, f"{{{a}}}", "1" if more or step else "0", str(int(not by_rows)))]
  p = ", ".join(f'"r"(p[{step}].{e})' for step in range(steps) for e in "xyzw")
  product = _assembly(accs, ["b"], lines, f'"l"(of_v), {p}, "r"((int)there)', c + 1 + 4*steps)
  statements = [_descriptor("of_v", "v", 16 if by_rows else panel), product]
  return Body("\n".join(statements), "acc p v there", name=f"start_output_{8*accs}x{K*steps}" + "_anew"*(not more) + "_by_rows"*by_rows)

def _shared_output_text(printer:Any, out:str, accs:int, steps:int, panel:int, dtype:str) -> Body:
  product = _shared_product(accs, [(step*2*K, step*2*ATOM) for step in range(steps)], (0, 1), '"l"(of_p), "l"(of_v), "r"(1), "r"(1)', dtype)
  statements = [_descriptor("of_p", "p"), _descriptor("of_v", "v", panel), product]
  return Body("\n".join(statements), "acc p v", name=f"start_shared_output_{8*accs}x{K*steps}")

def _wait_text(printer:Any, out:str, accs:int, but:int) -> Body:
  return Body(f'asm volatile("wgmma.wait_group.sync.aligned {but};"\n    : {both_ways(accs)}\n    :: "memory");\nreturn 0.0f;', "acc",
              name=f"wait_for_{accs}" + f"_but_{but}"*(but > 0))

# ***** the operations *****

# 9.7.13.15: a block has one mbarrier; all threads of the block arrive at each of its phases
instruction("init_arrivals", lambda lanes, bar, gate, threads: np.zeros(len(lanes.active), np.float32),
            cuda=lambda printer, out, threads: Body(
              f'if (first) asm volatile("mbarrier.init.shared.b64 [%0], {threads};" :: {shared("bar")} : "memory");\n'
              "return 0.0f;", "bar first"))
instruction("arrive", lambda lanes, bar, _: lanes.arrive(),
            cuda=Body(f'asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: {shared("bar")} : "memory");\nreturn 0.0f;', "bar"))
instruction("arrive_stored", lambda lanes, bar, _: lanes.arrive(False),
            cuda=Body(f'asm volatile("mbarrier.arrive.shared.b64 _, [%0];" :: {shared("bar")} : "memory");\nreturn 0.0f;', "bar"))
instruction("await_arrivals", lambda lanes, bar, parity, _, published: lanes.await_arrivals(parity), cuda=lambda printer, out, published: Body(
  'unsigned at = (unsigned)__cvta_generic_to_shared(bar), there = 0u;\n'
  'while (!there) asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"\n'
  '    : "=r"(there) : "r"(at), "r"(parity) : "memory");\n' + 'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n'*(not published) +
  'return 0.0f;', "bar parity", name="await_published"*published))
# The second arrival is for the data that the thread has stored itself: it makes them visible to products of threads that wait for this phase.
instruction("arrive_twice", lambda lanes, bar, _: lanes.arrive(), cuda=Body(
  'asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\n'
  f'asm volatile("{{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }}" :: {shared("bar")} : "memory");\n'
  f'asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: {shared("bar")} : "memory");\nreturn 0.0f;', "bar"))
# 9.7.13.1: barrier 1 + g counts the threads of warpgroup g, which wait there, and those of the warpgroup that lets it pass
OF_TURN = 2*GROUP
instruction("begin_turn", lambda lanes, group, _, groups: lanes.begin_turn(groups),
            cuda=lambda printer, out, groups: Body(
              f'asm volatile("barrier.cta.sync %0, {OF_TURN};" :: "r"(1 + group) : "memory");\nreturn 0.0f;', "group"))
instruction("end_turn", lambda lanes, group, gate, _, groups: lanes.end_turn(groups, gate), cuda=lambda printer, out, groups: Body(
  f'int next = group == {groups - 1} ? 1 : 2 + group;\n'
  f'if (gate) asm volatile("barrier.cta.arrive %0, {OF_TURN};" :: "r"(next) : "memory");\nreturn 0.0f;', "group gate"))
instruction("start_scores", _scores, cuda=_scores_text)
instruction("start_output", _output, cuda=_output_text)
instruction("start_shared_output", _shared_output, cuda=_shared_output_text)
instruction("start_sums", _sums, cuda=_sums_text)
instruction("send", _send, cuda=_send_text, atomic=True)      # 9.7.9.25.4.1, 9.7.9.25.5.2: cp.async.bulk, cp.reduce.async.bulk
instruction("sent", lambda lanes, _: lanes.sent(), atomic=True,
            cuda=Body('asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");\nreturn 0.0f;', ""))
instruction("publish", lambda lanes, _: np.zeros(len(lanes.active), np.float32),
            cuda=Body('asm volatile("fence.proxy.async.shared::cta;" ::: "memory");\nreturn 0.0f;', ""))
instruction("may_send", lambda lanes, _: np.zeros(len(lanes.active), np.float32),
            cuda=Body('asm volatile("fence.proxy.async.global;" ::: "memory");\nreturn 0.0f;', ""))
instruction("wait_products", lambda lanes, *_, accs, but: lanes.wait_products(but), cuda=_wait_text)
instruction("warpgroup", lambda lanes, x: x, cuda="__shfl_sync(0xffffffffu, {0}, 0)")

def init(barrier:UOp, first:UOp, threads:int) -> UOp:
  """Returns a statement that makes the thread where `first` is true initialise the mbarrier at `barrier`, for arrivals of `threads` threads."""
  # a block barrier must follow
  return statement("init_arrivals", barrier, first, threads=threads)
def arrive(barrier:UOp, after:UOp) -> UOp:
  """Returns a statement that makes this thread arrive at the mbarrier when all its asynchronous copies so far are complete."""
  # the thread does not wait
  return statement("arrive", barrier, after)
def arrive_stored(barrier:UOp, after:UOp) -> UOp:
  """Returns a statement that makes this thread arrive at the mbarrier at once, even if its asynchronous copies are not complete."""
  # threads that wait for the phase see these stores, but not what this thread's copies under way write
  return statement("arrive_stored", barrier, after)
def arrive_twice(barrier:UOp, after:UOp) -> UOp:
  """Returns a statement that makes this thread arrive at the mbarrier twice: at once, and when its asynchronous copies are complete."""
  # The first arrival is for what the thread has stored to shared memory. The thread does not wait.
  return statement("arrive_twice", barrier, after)
def arrived(barrier:UOp, phase:UOp, after:UOp, published:bool=False) -> UOp:
  """Returns a statement that waits until all threads have arrived in phase number `phase` of the mbarrier."""
  # wgmma can then read the data that these threads have copied or stored; `published`: each thread has called `publish` before it arrived
  return statement("await_arrivals", barrier, integer(phase % 2), after, published=published)
def begin_turn(group:UOp, groups:int, after:UOp) -> UOp:
  """Returns a statement that makes warpgroup `group` wait until the previous one of `groups` warpgroups, which take turns, has called `end_turn`."""
  # the turns go round all `groups` warpgroups of a block
  return statement("begin_turn", group, after, groups=groups)
def end_turn(group:UOp, groups:int, gate:UOp, after:UOp) -> UOp:
  """Returns a statement that, if `gate` is true, ends the turn of warpgroup `group`, so that the next of `groups` warpgroups may begin."""
  return statement("end_turn", group, gate, after, groups=groups)
def scores(acc:UOp, q:UOp, k:UOp, after:UOp, steps:int, panels:tuple[int, int], dtype:str, there:UOp=EVERYWHERE, sums:int=1) -> UOp:
  """Returns a statement that starts the product acc = Q K^T, made of `steps` wgmma instructions, in warpgroups where `there` is true."""
  # Q has 64 rows, and K has 8 rows for each fragment in `acc`. Each instruction multiplies 16 columns of Q and K, or 32 columns of 8-bit floats. `q`
  # and `k` index shared memory at the first 16 bytes of Q and of K. `panels` has the distances in bytes between panels (128 bytes of each row) of Q,
  # and of K. If `sums` is above 1, `acc` has the fragments of several partial sums, one sum after another: each is over neighbouring columns. Where
  # `there` is false `wait_products` counts a product, too.
  return statement("start_scores", acc[0], q, k, there, after, accs=acc.max_numel(), steps=steps, panels=panels, dtype=dtype, sums=sums)
def output(acc:UOp, p:UOp, v:UOp, after:UOp, panel:int, dtype:str, place:range|None=None, there:UOp=EVERYWHERE, more:bool=True,
           by_rows:bool=False) -> UOp:
  """Returns a statement that starts the product acc += P V, or acc = P V if `more` is False, in warpgroups where `there` is true."""
  # `place` selects some of the C fragments in `acc`. `p` has one A fragment for each 16 keys, or 32 keys of 8-bit floats. `v` indexes shared memory
  # at the first 16 bytes of V, which has one row for each key, or of V^T if `by_rows` is true or `dtype` has 8 bits. `panel` is the distance in
  # bytes between panels (128 bytes of each row). Where `there` is false `wait_products` counts a product, too.
  first, accs = (place.start, len(place)) if place is not None else (0, acc.max_numel())
  return statement("start_output", acc[first], p[0], v, there, after, accs=accs, steps=p.max_numel(), panel=panel, dtype=dtype,
                   more=more, by_rows=by_rows or IN_A_DWORD[dtype] == 4)
def shared_output(acc:UOp, p:UOp, v:UOp, after:UOp, keys:int, panel:int, dtype:str) -> UOp:
  """Returns a statement that starts the product acc += P V; P and V, with `keys` keys, lie in shared memory."""
  # P has 64 rows of at most 64 columns, one for each of the `keys` rows of V. `p` and `v` index the first 16 bytes of P and of V. `panel` is the
  # distance in bytes between panels (128 bytes of each row) of V.
  return statement("start_shared_output", acc[0], p, v, after, accs=acc.max_numel(), steps=keys//K, panel=panel, dtype=dtype)
def sums(acc:UOp, x:UOp, y:UOp, unit:UOp, after:UOp, rows:int, panel:int, dtype:str, more:bool=False) -> UOp:
  """Returns a statement that starts the product acc = X^T Y (acc += X^T Y if `more`) of X and Y, `rows` rows each, in shared memory."""
  # `rows` is a multiple of 16. X has 64 columns, and Y has 8 columns for each fragment in `acc`. `x` and `y` index shared memory at the first 16
  # bytes of a panel (64 columns). Y begins at the 16-byte unit with index `unit` of its panel. Y ends in this panel, or consists of whole panels,
  # which lie `panel` bytes apart.
  return statement("start_sums", acc[0], x, y, integer(unit), after, accs=acc.max_numel(), steps=rows//K, panel=panel, dtype=dtype, more=more)
def send(acc:UOp, stage:UOp, to:UOp, lane:UOp, there:UOp, after:UOp, sets:UOp|None=None) -> UOp:
  """Returns a statement that starts to add the C fragments `acc` to fp32 numbers in global memory; the copy engine (TMA) does the additions."""
  # Each number is added atomically, in no fixed order. `to` indexes this lane's first sum: the first fragment has four neighbouring sums for each
  # lane, lane after lane; then the next fragment follows. The warp copies the fragments to shared memory at `stage`, and TMA adds them from there.
  # `sent` waits for the additions. In warps where `sets` is true, the numbers replace the sums.
  given = (acc[0], stage, in_global(to, dtypes.float, "to"), integer(lane), there, *([] if sets is None else [sets]), after)
  return statement("send", *given, accs=acc.max_numel(), sets=sets is not None)
def sent(after:UOp) -> UOp:
  """Returns a statement that waits until all additions that this thread has started with `send` are complete."""
  return statement("sent", after)
def may_send(after:UOp) -> UOp:
  """Returns a statement (a fence) that orders additions by a later `send` after everything that this thread has waited for."""
  # PTX ISA 9.7.13.4, fence.proxy.async
  return statement("may_send", after)
def publish(after:UOp) -> UOp:
  """Returns a statement (a fence) that makes this thread's stores to shared memory visible to wgmma after the next barrier."""
  # PTX ISA 9.7.13.4, fence.proxy.async
  return statement("publish", after)
def wait_products(acc:UOp, after:UOp, but:int=0, place:range|None=None) -> UOp:
  """Returns a statement that waits for the wgmma products that this thread has started, except the last `but`. Then `acc` may be read."""
  # A use of the accumulators `acc` must come after this; `place` selects some of them, all of which are computed then.
  first, accs = (place.start, len(place)) if place is not None else (0, acc.max_numel())
  return statement("wait_products", acc[first], after, accs=accs, but=but)
def group(wave:UOp) -> UOp:
  """Returns the index of the warpgroup that contains warp `wave`. The compiler knows that the index is equal in all lanes of the warp."""
  return emit("warpgroup", dtypes.int, integer(wave//4))
