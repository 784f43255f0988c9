"""Compiles a lowered kernel, a list of UOps, to a `Plan`: a list of Python functions, each of which runs one operation for all threads."""
from __future__ import annotations
from typing import Any, Callable
from collections import Counter
import math
import numpy as np
from numpy.typing import NDArray
from attn.ops.operation import Call, is_ours
from attn.tinygrad_compat import AddrSpace, GroupOp, Ops, UOp, dtypes
from attn.emulator.alu import alu, bitcast, cast, elements, literal, numpy_dtype, stack
from attn.emulator.checks import LdsLimit, OutOfScope, Overflow
from attn.emulator.chips import emulated_chip
from attn.emulator.machine import Frame
from attn.emulator.memory import to_chunks, to_values
from attn.emulator.offsets import OffsetTerm, may_be_negative
from attn.emulator.program import Address, EmulatedProgram
from attn.emulator.ranges import Ranges, held_by

# the functions are called steps; a plan is made once per kernel, and the values of a run are in a `machine.Frame`
Array = NDArray[Any]
Step = Callable[[Frame], "int|None"]   # returns the next program counter, or None for the following step

class Plan(EmulatedProgram):
  """A program for the emulator, made from UOps in the order in which they are executed."""
  # `renderer` returns the renderer that turned these UOps into C or CUDA source: error messages find the line of an operation by it
  def __init__(self, uops:list[UOp], name:str, arch:str, renderer:Callable[[], Any]|None=None):
    self.name, self.arch, self.chip, self.renderer = name, arch, emulated_chip(arch), renderer
    self.linear = uops
    self.steps = []
    self.uops, self.slot, self.constants = [], {}, []
    self.addresses: dict[UOp, Address] = {}
    self.loops: dict[UOp, int] = {}           # RANGE -> index of its step
    self.ends: dict[UOp, int] = {}            # RANGE -> index of its END's step
    self.params = sorted((u for u in uops if u.op is Ops.PARAM and u.addrspace is not AddrSpace.ALU), key=lambda u: u.arg.slot)
    self.variables = sorted((u for u in uops if u.op is Ops.PARAM and u.addrspace is AddrSpace.ALU), key=lambda u: u.arg.slot)
    self.buffers = [u for u in uops if u.op is Ops.BUFFER]
    def kind(u:UOp) -> str: return "data" if u.op is Ops.PARAM else "lds" if u.addrspace is AddrSpace.LOCAL else "reg"
    self.names = {u: f"{kind(u)}{u.arg.slot}" for u in self.params + self.buffers}
    self.whole_waves = any(u.op in (Ops.CUSTOM, Ops.CUSTOMI, Ops.WMMA) for u in uops)
    self.plain, self.atomics, self.meetings, self.waits = set[UOp](), set[UOp](), set[int](), False
    self.outputs = [s for u in uops if u.op is Ops.SINK for s in u.src if s.op is Ops.PARAM]
    self.stored, self.units = {}, {}
    self.ranges = Ranges(uops) if is_ours(name, uops) else None
    self.unproven = self.ranges.beyond if self.ranges is not None else {}     # integers that may not fit their type
    self.offset_terms: dict[UOp, list[OffsetTerm]] = {}   # buffer instruction -> terms of its offset that are checked at run time
    for u in uops:
      self._compile(u)
      if u in self.unproven: self._check_fits(u)
    self._check_scopes(uops)
    self.lds = sum(self.nbytes(u) for u in self.buffers if u.addrspace is AddrSpace.LOCAL)
    if self.lds > self.chip.lds:
      each = ", ".join(f"{self.names[u]}: {self.nbytes(u)}" for u in self.buffers if u.addrspace is AddrSpace.LOCAL)
      raise LdsLimit(f"{name}: a workgroup needs {self.lds} bytes of LDS ({each}), {arch} has {self.chip.lds}")
    self.frees, self.live_bytes = self._lifetimes(uops)

  # ***** slots *****

  def _new(self, u:UOp, value:Any=None) -> int:
    self.slot[u] = len(self.constants)
    self.constants.append(value)
    return self.slot[u]

  def _slot(self, u:UOp) -> int:
    if u in self.addresses: raise ValueError(f"{self.name}: an address in {self.names[self.addresses[u].buffer]} is used as a number: .load() it")
    return self.slot[u]

  def _emit(self, u:UOp, step:Step) -> None:
    self.steps.append(step)
    self.uops.append(u)

  def _value(self, u:UOp, fn:Callable[..., Any], *srcs:UOp) -> None:
    """Adds a step to the plan that computes the UOp `u` as `fn` of the values of the UOps `srcs`."""
    ins, out = [self._slot(s) for s in srcs], self._new(u)
    if len(ins) == 1:
      a, = ins
      def step(f:Frame) -> None: f.v[out] = fn(f.v[a])
    elif len(ins) == 2:
      a, b = ins
      def step(f:Frame) -> None: f.v[out] = fn(f.v[a], f.v[b])
    else:
      def step(f:Frame) -> None: f.v[out] = fn(*[f.v[i] for i in ins])
    self._emit(u, step)

  def _check_fits(self, u:UOp) -> None:
    """Adds a step to the plan that raises Overflow if the exact value of the integer `u` is out of the range of its type."""
    ins, (least, most) = [self._slot(s) for s in u.src], held_by(u.dtype)
    fn: Callable[..., Array] = alu(u.op, u.dtype, u.src[-1].dtype) if u.op in GroupOp.ALU else np.asarray
    exactly = np.dtype(np.int64 if u.dtype.itemsize < 8 else object)      # a type that holds the sum or product of two numbers of u's type
    def step(f:Frame) -> None:
      if not f.checks: return
      exact = f.full(fn(*[np.asarray(f.v[i]).astype(exactly) for i in ins]))
      if (bad := f.active & ((exact < least) | (exact > most))).any():
        raise f.error(Overflow, bad, lambda t: f"an integer is {exact[t]}, but {u.dtype.name} holds only {least}..{most}")
    self._emit(u, step)

  # ***** one UOp *****

  def _compile(self, u:UOp) -> None:
    if u.op in (Ops.SINK, Ops.NOOP, Ops.GROUP) or (u.op is Ops.STACK and not u.src): return
    if u.op is Ops.AFTER:
      if u.src[0] in self.addresses: self.addresses[u] = self.addresses[u.src[0]]
      elif u.src[0] in self.slot: self.slot[u] = self.slot[u.src[0]]
      return
    if u.op is Ops.PARAM and u.addrspace is AddrSpace.ALU: self._new(u)
    elif u.op in (Ops.PARAM, Ops.BUFFER): self.addresses[u] = Address(u, u.dtype)
    elif u.op is Ops.CONST: self._new(u, u.val)
    elif u.op in (Ops.CAST, Ops.BITCAST) and u.src[0] in self.addresses:
      self.addresses[u] = Address(self.addresses[u.src[0]].buffer, u.dtype, self.addresses[u.src[0]].terms)
    elif u.op in (Ops.INDEX, Ops.SHRINK) and u.src[0] in self.addresses:
      at = self.addresses[u.src[0]]
      self.addresses[u] = Address(at.buffer, u.dtype, at.terms + ((self._slot(u.src[1]), u.src[0].dtype.itemsize),))
    elif (rule := _RULES.get(u.op)) is not None: rule(self, u)
    elif u.op in GroupOp.ALU: self._value(u, alu(u.op, u.dtype, u.src[-1].dtype), *u.src)
    else: raise NotImplementedError(f"{self.name}: the emulator does not run {u.op}")

  def special(self, u:UOp) -> None:
    out, kind, axis = self._new(u), u.arg[0], int(u.arg[-1])
    self._emit(u, lambda f: f.v.__setitem__(out, f.special(kind, axis)))

  def cast(self, u:UOp) -> None:
    src, dst = u.src[0].dtype, u.dtype
    if u.src[0].op is Ops.CONST: self._new(u, literal(u.src[0].val, dst))
    else: self._value(u, lambda x: cast(x, src, dst), u.src[0])

  def bitcast(self, u:UOp) -> None:
    self._value(u, lambda x: bitcast(x, u.dtype), u.src[0])

  def stack(self, u:UOp) -> None:
    self._value(u, stack, *u.src)

  def lane(self, u:UOp) -> None:
    """Adds a step to the plan for a UOp `u` that selects one element of a vector."""
    def step(x:Array, i:Array) -> Array:
      if not np.shape(i): return x[int(i)]
      return np.take_along_axis(np.broadcast_to(x, (x.shape[0], len(i))), np.asarray(i, np.int64)[None], 0)[0]
    self._value(u, step, *u.src)

  def _index(self, at:Address, chunk:int) -> Callable[[Frame, Array|None], Array]:
    """Returns a function that computes, for each thread, the index of the chunk of `chunk` bytes that the thread accesses at the address `at`."""
    if not at.terms: return lambda f, active: np.asarray(0)
    if len(at.terms) == 1 and at.terms[0][1] == chunk:
      slot = at.terms[0][0]
      return lambda f, active: f.v[slot]
    name = self.names[at.buffer]
    if len(at.terms) == 1 and chunk % at.terms[0][1] == 0:
      slot, per = at.terms[0][0], chunk//at.terms[0][1]
      return lambda f, active: f.aligned(f.v[slot], per, name, active)
    return lambda f, active: f.aligned(f.offset(at), chunk, name, active)

  def _access(self, u:UOp) -> tuple[Address, int, int]:
    """Returns (address, bytes that each thread accesses, elements that each thread accesses) of `u`, a LOAD or STORE."""
    target, at = u.src[0], self.addresses[u.src[0]]
    chunk = target.dtype.itemsize * target.max_numel()
    if at.buffer.addrspace is AddrSpace.LOCAL: self.units[at.buffer] = math.gcd(self.units.get(at.buffer, 0), chunk)
    return at, chunk, elements(target.dtype) * target.max_numel()

  def load(self, u:UOp) -> None:
    at, chunk, n = self._access(u)
    gate, alt = (self.slot[u.src[2]], self.slot[u.src[1]]) if len(u.src) == 3 else (None, -1)
    buffer, dtype, out, count = at.buffer, numpy_dtype(u.dtype), self._new(u), u.max_numel()
    if buffer.addrspace is AddrSpace.REG:
      index = self._index(at, u.src[0].dtype.itemsize)
      def step(f:Frame) -> None:
        i, r = index(f, f.mask), f.registers[buffer]
        f.v[out] = r.load(i, f.mask) if count == 1 else stack(*[r.load(i + j, f.mask) for j in range(count)])
    else:
      self.plain.add(buffer)
      index = self._index(at, chunk)
      def step(f:Frame) -> None:
        active = f.mask if gate is None else f.also(f.v[gate])
        value = to_values(f.spaces[buffer].load(index(f, active), chunk, active), dtype, n)
        f.v[out] = value if gate is None or active is None else np.where(f.v[gate], value, f.v[alt])
    self._emit(u, step)

  def store(self, u:UOp) -> None:
    at, chunk, n = self._access(u)
    buffer, value, count, dtype = at.buffer, self._slot(u.src[1]), u.src[0].max_numel(), numpy_dtype(u.src[0].dtype)
    if buffer.addrspace is AddrSpace.REG:
      index = self._index(at, u.src[0].dtype.itemsize)
      def step(f:Frame) -> None:
        i, r, x = index(f, f.mask), f.registers[buffer], f.v[value]
        if count == 1: r.store(i, x, f.mask)
        else:
          for j in range(count): r.store(i + j, x[j], f.mask)
    else:
      self.plain.add(buffer)
      self.stored[buffer] = u.src[0].dtype.itemsize
      index = self._index(at, chunk)
      def step(f:Frame) -> None:
        raw = to_chunks(np.asarray(f.v[value], dtype), n, chunk)
        f.spaces[buffer].store(index(f, f.mask), chunk, raw, f.mask)
    self._emit(u, step)

  def wmma(self, u:UOp) -> None:
    dims, dtype, out = u.arg[0], "tfloat32" if u.arg[1] == dtypes.float else _NAMES[u.arg[1]], _NAMES[u.dtype]
    slots, dst = [self._slot(s) for s in u.src], self._new(u)
    def step(f:Frame) -> None:
      f.whole_waves_only()
      a, b, c = [f.full(f.v[s]) for s in slots]
      f.v[dst] = f.matrix_unit.wmma(dims, dtype, a, b, c, out)
    self._emit(u, step)

  def custom(self, u:UOp) -> None:
    if not isinstance(u.arg, Call):
      raise NotImplementedError(f"{self.name}: the emulator does not know what this {u.op.name} means: {u.arg!r}. Build it with "
                                "attn.ops.operation.emit, of an operation that attn.ops.language.instruction or compound has defined")
    meaning, static = u.arg.operation.meaning, u.arg.parameters
    args: list[Address|int] = [self.addresses[s] if s in self.addresses else self.slot[s] for s in u.src]
    for a in args:
      if isinstance(a, Address):
        (self.atomics if u.arg.operation.atomic and a.buffer in self.params else self.plain).add(a.buffer)
        self.units[a.buffer] = math.gcd(self.units.get(a.buffer, 0), 4)
    if u.arg.operation.atomic:
      self.meetings.add(len(self.steps))
      self.waits |= u.arg.name == "await_turn"
    out, dtype = self._new(u), None if u.dtype == dtypes.void else numpy_dtype(u.dtype)
    if self.ranges is not None and self.chip.family != "nvidia" and (terms := may_be_negative(u, self.ranges)): self.offset_terms[u] = terms
    looked_at = [(self._slot(term.number), term.subtracted) for term in self.offset_terms.get(u, ())]
    def step(f:Frame) -> None:
      for slot, subtracted in looked_at: f.check_term(slot, subtracted)
      got = meaning(f, *[f.pointer(a) if isinstance(a, Address) else f.full(f.v[a]) for a in args], **static)
      if got is not None: f.v[out] = np.asarray(got, dtype)
      else: f.v[out] = None if dtype is None else literal(0, u.dtype)
    self._emit(u, step)

  # ***** control flow *****

  def barrier(self, u:UOp) -> None:
    def step(f:Frame) -> None: f.barrier()
    self._emit(u, step)
  def enter_if(self, u:UOp) -> None:
    gate = self.slot[u.src[0]]
    self._emit(u, lambda f: f.push(f.also(f.v[gate])))
  def leave_if(self, u:UOp) -> None: self._emit(u, lambda f: f.pop())

  def loop(self, u:UOp) -> None:
    self.loops[u] = len(self.steps)
    if u.dtype == dtypes.void: return self._emit(u, lambda f: f.push(f.mask))   # for (;;)
    out, bound, number = self._new(u), self.slot[u.src[0]], numpy_dtype(u.dtype).type
    def step(f:Frame) -> int|None:
      f.push(f.mask)
      return None if f.iterate(out, number(0), f.v[bound]) else f.leave(self.ends[u] + 1)
    self._emit(u, step)

  def end(self, u:UOp) -> None:
    loop = u.src[1]
    self.ends[loop], body = len(self.steps), self.loops[loop] + 1
    if loop.dtype == dtypes.void:
      again = self.slot[u.src[2]]
      def step(f:Frame) -> int|None:
        f.mask = f.also(f.v[again])
        return body if f.mask is None or f.mask.any() else f.leave()
    else:
      out, bound = self.slot[loop], self.slot[loop.src[0]]
      def step(f:Frame) -> int|None: return body if f.iterate(out, f.v[out] + f.v[out].dtype.type(1), f.v[bound]) else f.leave()
    self._emit(u, step)

  # ***** scopes *****

  def _check_scopes(self, uops:list[UOp]) -> None:
    """Raises OutOfScope if a value from inside a loop is used after the loop."""
    # The renderer declares a variable where its UOp stands, so the C source would not compile, while the emulator would use the last value.
    # (tinygrad's linearizer places loop-invariant values inside a loop if it assumes that the loop runs at most once.)
    uses, inside, scope = Counter(s for u in uops for s in u.src), dict[UOp, tuple[UOp, ...]](), tuple[UOp, ...]()
    for u in uops:
      for s in u.src:
        if (of := inside.get(s, ())) != scope[:len(of)]:
          raise OutOfScope(f"{self.name}: a {s.op.name} computed inside a loop is used by a {u.op.name} after its end: C knows no such variable"
                           f"{self.place(s)}{self.place(u)}")
      if u.op is Ops.RANGE: scope += (u,)
      elif u.op is Ops.END: scope = scope[:-1]
      elif u.op in _NAMED or (u.op in GroupOp.ALU and uses[u] > 1): inside[u] = scope

  # ***** lifetimes *****

  def _lifetimes(self, uops:list[UOp]) -> tuple[list[list[int]], int]:
    """Returns a list and a number: for each step of the program, the values that no later step needs; and the most bytes per thread that all values
    take at one time."""
    position = {u: i for i, u in enumerate(self.uops)}
    loop_of: list[tuple[int, int]] = sorted((self.loops[r], self.ends[r]) for r in self.loops)
    born: dict[int, int] = {}
    last: dict[int, int] = {}
    size: dict[int, int] = {}
    for u, i in position.items():
      if u in self.slot:
        born[self.slot[u]] = last[self.slot[u]] = i
        size[self.slot[u]] = u.dtype.itemsize * (u.max_numel() if u._shape is not None else 1)
      for s in u.src:
        if s in self.addresses: used = [t for t, _ in self.addresses[s].terms]
        else: used = [self.slot[s]] if s in self.slot else []
        used += [self._slot(term.number) for term in self.offset_terms.get(u, ())]
        if u.op is Ops.END and u.src[1] in self.slot: used += [self.slot[u.src[1]], self.slot[u.src[1].src[0]]]
        for slot in used:
          outer = [end for start, end in loop_of if start <= i <= end and not start <= born.get(slot, -1) <= end]
          last[slot] = max(last.get(slot, 0), i, *outer)
    frees: list[list[int]] = [[] for _ in self.steps]
    for slot, i in last.items():
      if slot in born: frees[i].append(slot)
    registers = sum(self.nbytes(u) for u in self.buffers if u.addrspace is AddrSpace.REG)
    alive = peak = 0
    births = {i: slot for slot, i in born.items()}
    for i in range(len(self.steps)):
      peak = max(peak, alive := alive + size.get(births.get(i, -1), 0))
      alive -= sum(size[s] for s in frees[i])
    return frees, peak + registers

_NAMED = {Ops.CUSTOM, Ops.WMMA}   # UOps that the renderer always emits as a variable

_RULES: dict[Ops, Callable[[Plan, UOp], None]] = {
  Ops.SPECIAL: Plan.special, Ops.CAST: Plan.cast, Ops.BITCAST: Plan.bitcast, Ops.STACK: Plan.stack, Ops.INDEX: Plan.lane, Ops.LOAD: Plan.load,
  Ops.STORE: Plan.store, Ops.WMMA: Plan.wmma, Ops.CUSTOM: Plan.custom, Ops.CUSTOMI: Plan.custom, Ops.BARRIER: Plan.barrier, Ops.IF: Plan.enter_if,
  Ops.ENDIF: Plan.leave_if, Ops.RANGE: Plan.loop, Ops.END: Plan.end,
}
_NAMES = {dtypes.half: "float16", dtypes.bfloat16: "bfloat16", dtypes.float: "float32", dtypes.int8: "int8", dtypes.int32: "int32"}
