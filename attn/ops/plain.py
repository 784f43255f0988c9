"""Kernels in plain UOps: no operation that a device's renderer would have to know, and every value a number.

`plain` takes a kernel that is written in operations (attn/ops/operation.py) and runs the definition of each once more, with an interpreter whose
values are UOps. A vector becomes the UOps of its elements, a buffer of vectors one of their elements, and an instruction what `MEANINGS` says. So the
parts of kernels serve every device that tinygrad renders for, and an operation is still written once.
"""
from __future__ import annotations
import functools, itertools, operator
from collections.abc import Callable
from typing import Any
from attn.ops.common import OUT_OF_RANGE
from attn.ops.interpret_uops import Elements, PlainUOps, elementwise, number_of
from attn.ops.language import operands_of
from attn.ops.operation import Call
from attn.tinygrad_compat import VECTORS, AddrSpace, Ops, UOp, dtypes

# ***** instructions *****

def plain_load(base:UOp, records:UOp, offset:UOp, *, width:int) -> Elements:
  """`buffer_load`: dwords of the elements of a buffer that follow the INDEX `base`, zero beyond `records` bytes."""
  buffer, first = base.src
  size = buffer.dtype.itemsize
  further = (offset & (OUT_OF_RANGE - 1)).cast(dtypes.int)
  inside = (offset < OUT_OF_RANGE) & (further <= records - width)
  at = first + further.cast(dtypes.weakint)//size
  bits = [buffer[(at + i).valid(inside)].load().bitcast({2: dtypes.ushort, 4: dtypes.uint}[size]).cast(dtypes.uint) for i in range(width//size)]
  if size == 4: return Elements(tuple(bits))
  return Elements(tuple(functools.reduce(operator.or_, [x << 16*i for i, x in enumerate(bits[j:j + 2])]) for j in range(0, len(bits), 2)))

def plain_load_where(at:UOp, gate:UOp, *, width:int) -> Elements:
  """`load_where`: dwords of the numbers of 32 bits that follow the INDEX `at`, zero where `gate` does not hold."""
  buffer, first = at.src
  return Elements(tuple(buffer[(first + i).valid(gate)].load().bitcast(dtypes.uint) for i in range(width//buffer.dtype.itemsize)))

MEANINGS: dict[str, Callable[..., Elements]] = {"buffer_load": plain_load, "load_where": plain_load_where, "uniform": number_of,
                                                "page_number": lambda entry, there, *, count: number_of(entry)}
NUMBER_CHECKS = ("page_number",)     # instructions that give a number back as it is

# ***** a kernel *****

def as_value(x:Elements) -> UOp|Elements:
  """What a UOp of the kernel becomes: of one element that."""
  return x if len(x.each) > 1 else x.each[0]

VECTOR_ELEMENT = {"float32": dtypes.float, "uint32": dtypes.uint}

class Plain:
  """The way of one kernel's UOps to plain ones."""
  def __init__(self, sink:UOp, checked:bool):
    self.found: dict[UOp, Any] = {}
    taken = [u.arg.slot for u in sink.toposort() if u.op is Ops.BUFFER]
    self.slots = itertools.count(max(taken, default=-1) + 1)
    self.kept = NUMBER_CHECKS if checked else ()

  def of(self, u:UOp) -> Any:
    srcs = [self.found[s] for s in u.src]
    vector = u.dtype in VECTORS
    if isinstance(u.arg, Call): return self.operation(u, srcs)
    if u.op is Ops.BUFFER and vector:
      element, n = VECTORS[u.dtype]
      return UOp.placeholder((u.max_numel()*n,), VECTOR_ELEMENT[element], u.arg.slot, u.addrspace)
    if u.op is Ops.BITCAST and vector: return srcs[0]      # a buffer seen as one of vectors
    if u.op is Ops.INDEX and vector: return self.indexed(u, srcs[1])
    if u.op is Ops.LOAD and vector: return elementwise(UOp.load, srcs[0])
    if u.op is Ops.STORE and isinstance(srcs[0], Elements): return self.stored(srcs[0].each, srcs[1])
    if vector and u.op in ARITHMETIC: return elementwise(ARITHMETIC[u.op], *srcs)
    if all(x is y for x, y in zip(srcs, u.src)): return u
    return u.replace(src=tuple(srcs), dtype=srcs[0].dtype if vector else u.dtype)

  def indexed(self, u:UOp, at:UOp) -> Elements:
    """Of an INDEX into vectors of dwords: those of its numbers, in the buffer of these."""
    buffer, index, there = self.found[u.src[0]], at.get_idx(), at.get_valid()
    n = 4*VECTORS[u.dtype][1]//buffer.dtype.itemsize
    def place(i:int) -> UOp:
      element = index*n + i
      return buffer[element if there.op is Ops.CONST and there.val is True else element.valid(there)]
    return Elements(tuple(place(i) for i in range(n)))

  def stored(self, to:tuple[UOp, ...], x:Elements) -> UOp:
    """Of dwords that are two 16-bit numbers each these are stored one by one."""
    values, dtype = x.each, to[0].dtype
    if dtype.itemsize == 2: values = [(w >> 16*i).cast(dtypes.ushort).bitcast(dtype) for w in values for i in range(2)]   # type: ignore[assignment]
    return UOp.group(*[place.store(x) for place, x in zip(to, values, strict=True)])

  def operation(self, u:UOp, srcs:list[Any]) -> Any:
    """A value of an operation, by its definition or its meaning."""
    call = u.arg
    if call.name in self.kept: return u.replace(src=tuple(srcs))
    if call.name == "opaque_uniform":     # a number that tinygrad cannot tell: one that is loaded
      register = UOp.placeholder((1,), dtypes.int, next(self.slots), AddrSpace.REG)
      return register.after(register[0].store(srcs[0]))[0].load()
    if (meaning := MEANINGS.get(call.name)) is not None: return as_value(meaning(*srcs, **call.parameters))
    if (definition := call.operation.definition) is None: raise NotImplementedError(f"{call.name} is an instruction that has no plain UOps")
    taken = len(srcs) if call.operation.inline else len(operands_of(definition))     # what else there is only says what comes before
    operands = [x if isinstance(x, Elements) else Elements((x,)) for x in srcs[:taken]]
    return as_value(definition(PlainUOps(), *operands, **call.parameters))

ARITHMETIC = {Ops.ADD: operator.add, Ops.SUB: operator.sub, Ops.MUL: operator.mul}

def plain(sink:UOp, checked:bool=False) -> UOp:
  """The same kernel in plain UOps, and where it is `checked` with what the emulator checks, for renderers of ours. Raises NotImplementedError for an
  instruction that one thread by itself does not have."""
  work = Plain(sink, checked)
  for u in sink.toposort(): work.found[u] = work.of(u)
  return work.found[sink]
