"""Operations by which the workgroups of one launch work together through global memory: sums of float32, tickets and turns."""
from __future__ import annotations
import functools
from typing import Any
import numpy as np
from attn.chips import get_chip
from attn.ops.amd import kept_in_order, nothing, waitcnt
from attn.ops.common import length
from attn.ops.language import instruction
from attn.ops.operation import Array, Body, Call, emit, integer, statement
from attn.tinygrad_compat import AddrSpace, DType, Ops, Renderer, ToProgram, UOp, dtypes, programs_through, with_accesses

# `atomic_add` adds to a sum that several workgroups share. A ticket is the number of workgroups that have called `ticket` before: the first
# workgroup gets 0, the next one 1 and so on. A turn is the period in which one workgroup may act: it begins when a counter in memory has the number
# of the turn. `await_turn` waits until the counter has this number. `pass_turn` ends the turn: it adds 1 to the counter. A workgroup that has waited
# for a turn sees everything that was done before the turn was passed. All of these operations have the scope of the whole chip, even if the chip has
# several L2 caches.
#
# If several waves of a workgroup act in a turn, barriers keep them together: `await_turn(counter, number, first)`, by which one lane waits for all;
# a barrier; `atomic_add` in any lane; `settle()`, by which every wave waits until its own additions are complete; a barrier; `pass_turn(counter,
# first)` by one lane. A wave with a counter of its own needs neither the barriers nor `settle`. A counter is an int32 in global memory and must be 0
# when the launch begins.
#
# Only the tickets tell which workgroups have started. If a workgroup waits for a workgroup with a higher block number, or with a higher ticket, it
# can wait forever, because that workgroup may start only when another one ends.

ALL_LANES = UOp.const(True)
IN_GLOBAL, IN_LDS = (f"__attribute__((address_space({n})))" for n in (1, 3))
AGENT = "__HIP_MEMORY_SCOPE_AGENT"

def of_global(pointer:str) -> str:
  """Returns the text of an operand of inline assembly: the address in global memory that the C++ variable `pointer` holds."""
  return f'"l"(__cvta_generic_to_global({pointer}))'

def fence(order:str, scope:str) -> str: return f'__builtin_amdgcn_fence(__ATOMIC_{order}, "{scope}");'

def counts_as_loads(arch:str) -> bool:
  """Tells whether an AMD chip counts stores to memory with the same counter as loads from memory. CDNA does."""
  return (counters := get_chip(arch).unit.counters) is not None and counters.load == counters.store

def with_scope(arch:str) -> list[str]:
  """Returns HIP lines that make compilation for RDNA4 fail with clang 19, whose additions to memory are wrong; none for other chips."""
  # For RDNA4 clang 19 omits the scope of instructions that need one: an addition of float32 gets the scope of one compute unit, and there is no wait
  # for a cache that is written back.
  if (counters := get_chip(arch).unit.counters) is None or counters.store != "storecnt": return []
  return ["#if __clang_major__ < 20", f'#error "{arch} needs clang 20 to add to global memory and to pass a turn"', "#endif"]

def in_global(at:UOp, dtype:DType, name:str) -> UOp:
  """Returns `at`, if it is an index of `dtype` elements in global memory. Otherwise raises ValueError with `name` as the argument's name."""
  if at.op is not Ops.INDEX or at.addrspace is not AddrSpace.GLOBAL or at.dtype != dtype:
    raise ValueError(f"{name}: must be an INDEX of {dtype.name} in global memory, not {at.op.name} of {at.dtype.name} in {at.addrspace}")
  return at

def shared_tensors(u:UOp) -> set[int]:
  """Returns the indices of the kernel arguments that the UOp `u` accesses atomically; an empty set if `u` is not atomic."""
  if not isinstance(u.arg, Call) or not u.arg.operation.atomic: return set()
  return {x.buf_uop.arg.slot for x in u.src if x.op is Ops.INDEX and x.buf_uop.op is Ops.PARAM}

def _with_shared_tensors(lowered:ToProgram, ast:UOp, renderer:Renderer) -> UOp:
  program = lowered(ast, renderer)
  return with_accesses(program, set().union(*map(shared_tensors, program.src[1].src)))

@functools.cache
def show_shared_tensors() -> None:
  """Tells tinygrad, from now on in the whole process, which tensors the atomic operations of a kernel read and write."""
  # tinygrad itself sees only loads and stores. So a kernel that reads a sum would not wait, in a graph under TinyJit, for the kernel that adds to
  # the sum.
  programs_through(_with_shared_tensors)

# ***** sums *****

def _atomic_add(lanes:Any, at:Any, x:Array, gate:Array, *_:Any, steps:tuple[int, ...], together:int) -> Array:
  lanes.atomic_add(at, steps, np.atleast_2d(x).reshape(len(steps), together, -1), lanes.active & gate)
  return nothing(lanes)

def _named(steps:tuple[int, ...], together:int) -> str:
  return "_".join(["atomic_add", *[f"x{together}"]*(together > 1), *map(str, steps)]).replace("-", "minus")

def _atomic_add_hip(printer:Any, out:str, steps:tuple[int, ...], together:int) -> Body:
  # The builtin becomes one instruction; __hip_atomic_fetch_add would become a loop.
  if together > 1 or not get_chip(printer.arch).unit.matrix:
    raise NotImplementedError(f"{printer.arch} has no instruction that adds {together} float32 to global memory")
  adds = [f"__builtin_amdgcn_global_atomic_fadd_f32(sum + {step}, x{f'[{i}]'*(len(steps) > 1)});" for i, step in enumerate(steps)]
  lines = [*with_scope(printer.arch), "if (!gate) return 0.0f;", f"auto sum = ({IN_GLOBAL} float*)at;", *adds, "return 0.0f;"]
  return Body("\n".join(lines), "at x gate", name=_named(steps, together))

def _atomic_add_cuda(printer:Any, out:str, steps:tuple[int, ...], together:int) -> Body:
  if together > 1 and int(printer.arch.removeprefix("sm_")) < 90:
    raise NotImplementedError(f"{printer.arch} has no instruction that adds {together} float32 to global memory")
  elements, lines = [f"x.{e}" for e in "xyzw"] if len(steps)*together > 1 else ["x"], ["if (!gate) return 0.0f;"]
  kind, form = (f".v{together}", "{{{}}}") if together > 1 else ("", "{}")
  for i, step in enumerate(steps):
    operands, values = form.format(", ".join(f"%{j + 1}" for j in range(together))), elements[i*together:(i + 1)*together]
    lines += [f'asm volatile("red.relaxed.gpu.global.add{kind}.f32 [%0+{4*step}], {operands};"',
              f'    :: {", ".join([of_global("at"), *(f"{chr(34)}f{chr(34)}({x})" for x in values)])} : "memory");']
  return Body("\n".join([*lines, "return 0.0f;"]), "at x gate", name=_named(steps, together))

instruction("atomic_add", _atomic_add, _atomic_add_hip, _atomic_add_cuda, atomic=True)

def atomic_add(at:UOp, x:UOp, *after:UOp, gate:UOp=ALL_LANES, steps:tuple[int, ...]=(), together:int=1) -> UOp:
  """Returns a statement that adds x[i] to the float32 number that lies steps[i] elements after `at` in global memory, where `gate` is true."""
  # `steps` has a distance for each element of x, by default 0, 1, 2 and so on. If `together` is 2 or 4, one instruction adds this many neighbouring
  # elements, whose address is a multiple of their size; `steps` then has one distance for each instruction. Only NVIDIA's chips from sm_90 on can do
  # this.
  n = length(x)
  if together not in (1, 2, 4) or n % together: raise ValueError(f"together={together}: must be 1, 2 or 4, and divide the {n} elements of x")
  if len(steps := steps or tuple(range(0, n, together))) != n//together: raise ValueError(f"steps={steps}: must be {n//together} distances")
  return statement("atomic_add", in_global(at, dtypes.float, "at"), x, gate, *after, steps=steps, together=together)

# ***** tickets *****

def _ticket(lanes:Any, counter:Any, first:Array, *_:Any) -> Array:
  found = lanes.fetch_add(counter, lanes.active & first)
  return np.repeat(found.reshape(-1, lanes.wave)[:, 0], lanes.wave)

def _ticket_of_all(lanes:Any, counter:Any, lds:Any, first:Array, *_:Any) -> Array:
  start, gate = np.zeros(len(first), np.int64), lanes.active & first
  lanes.store_bytes(lds, start, np.ascontiguousarray(lanes.fetch_add(counter, gate)[:, None]).view(np.uint8).T, gate)
  lanes.barrier(lanes.active)
  return np.ascontiguousarray(lanes.load_bytes(lds, start, 4, lanes.active).T).view(np.int32)[:, 0]

_AT = f"auto at = ({IN_GLOBAL} int*)counter;"
_DRAWN = f"__hip_atomic_fetch_add(at, 1, __ATOMIC_RELAXED, {AGENT});"
_DRAW = f'asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;" : "=r"(drawn) : {of_global("counter")} : "memory");'

instruction("ticket", _ticket,
            Body(f"{_AT}\nint drawn = 0;\nif (first) drawn = {_DRAWN}\nreturn __builtin_amdgcn_readfirstlane(drawn);", "counter first"),
            Body(f"int drawn = 0;\nif (first) {_DRAW}\nreturn __shfl_sync(0xffffffffu, drawn, 0);", "counter first"), atomic=True)
instruction("ticket_of_all", _ticket_of_all,
            Body(f"{_AT}\nif (first) *({IN_LDS} int*)lds = {_DRAWN}\n"
                 f"{fence('RELEASE', 'workgroup')}\n__builtin_amdgcn_s_barrier();\n{fence('ACQUIRE', 'workgroup')}\n"
                 f"return __builtin_amdgcn_readfirstlane(*({IN_LDS} int*)lds);", "counter lds first"),
            Body("if (first) {\n  int drawn;\n" f"  {_DRAW}\n  *(int*)lds = drawn;\n" "}\n"
                 "__syncthreads();\nreturn __shfl_sync(0xffffffffu, *(int*)lds, 0);", "counter lds first"), atomic=True)

def ticket(counter:UOp, block:UOp, first:UOp, *after:UOp, lds:UOp|None=None) -> UOp:
  """Returns in all lanes the int32 at `counter`, and adds 1 to it: workgroups get 0, 1, 2, ... in the order in which they start."""
  # `block` is computed from all block indices and has no effect on the result, but tinygrad launches workgroups along an axis only if an operation
  # has the axis's index. `first` is true in lane 0 of wave 0 only. A workgroup of several waves needs `lds`, an int32 in LDS: wave 0 writes the
  # number there, and the other waves read it. The operation then contains a barrier, and another barrier must come before the next use of this
  # int32.
  sources = in_global(counter, dtypes.int, "counter"), *(() if lds is None else (lds,)), first, integer(block), *after
  return emit("ticket" if lds is None else "ticket_of_all", dtypes.int, *sources)

# ***** turns *****

def _await_turn(lanes:Any, counter:Any, number:Array, first:Array, *_:Any) -> Array:
  lanes.await_turn(counter, number, lanes.active & first)
  return nothing(lanes)

def _settle(lanes:Any, *_:Any) -> Array:
  lanes.settle()
  return nothing(lanes)

def _pass_turn(lanes:Any, counter:Any, first:Array, *_:Any) -> Array:
  lanes.pass_turn(counter, lanes.active & first)
  return nothing(lanes)

def _settle_text(printer:Any, out:str) -> Body:
  # CDNA: s_waitcnt vmcnt(0). A release fence with the scope of a workgroup would wait for nothing there, and one with the scope of the chip would
  # write back the L2 cache. `pass_turn`, which follows, writes the cache back once for all waves.
  return Body(kept_in_order(waitcnt(vmcnt=0)) if counts_as_loads(printer.arch) else f"{fence('RELEASE', 'agent')}\nreturn 0.0f;", "")

def _pass_text(printer:Any, out:str) -> Body:
  # CDNA: clang up to 22 omits the wait for the write-back of the L2 cache (buffer_wbl2) if nothing else is under way (llvm/llvm-project#178316). So
  # the text contains this wait.
  wait = [waitcnt(vmcnt=0)] if counts_as_loads(printer.arch) else []
  lines = [*with_scope(printer.arch), _AT, "if (!first) return 0.0f;", fence("RELEASE", "agent"), *wait, _DRAWN, "return 0.0f;"]
  return Body("\n".join(lines), "counter first")

instruction("await_turn", _await_turn, Body(f"{_AT}\nif (!first) return 0.0f;\n"
            f"while (__hip_atomic_load(at, __ATOMIC_RELAXED, {AGENT}) != number) __builtin_amdgcn_s_sleep(1);\n"
            f"{fence('ACQUIRE', 'agent')}\nreturn 0.0f;", "counter number first"),
            Body("int found = number;\nif (first) do {\n"
                 f'  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : {of_global("counter")} : "memory");\n'
                 "} while (found != number);\n__syncwarp();\nreturn 0.0f;", "counter number first"), atomic=True)
instruction("settle", _settle, _settle_text, Body("__syncwarp();\nreturn 0.0f;", ""), atomic=True)
instruction("pass_turn", _pass_turn, _pass_text, Body(
  f'__syncwarp();\nif (first) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: {of_global("counter")} : "memory");\nreturn 0.0f;',
  "counter first"), atomic=True)

def await_turn(counter:UOp, number:UOp, first:UOp, *after:UOp) -> UOp:
  """Returns a statement that waits, in lanes where `first` is true, until the int32 at `counter`, to which other workgroups add 1, is `number`."""
  # what other workgroups did before they passed the turn is then visible: to this wave at once, to the other waves of the workgroup after a barrier
  return statement("await_turn", in_global(counter, dtypes.int, "counter"), integer(number), first, *after)
def settle(*after:UOp) -> UOp:
  """Returns a statement, executed after `after`, that waits until this wave's additions and stores to global memory are complete."""
  return statement("settle", *after)
def pass_turn(counter:UOp, first:UOp, *after:UOp) -> UOp:
  """Returns a statement that adds 1 to the int32 at `counter`, in lanes where `first` is true, and so ends this workgroup's turn."""
  # A wave that waits for the new number then sees what this wave did before. If other waves of the workgroup acted in the turn too, each of them
  # must call `settle`, and a barrier must follow, before the turn is passed.
  return statement("pass_turn", in_global(counter, dtypes.int, "counter"), first, *after)
