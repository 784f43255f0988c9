"""Conversion of kernels to plain UOps, which run on every device that tinygrad has a renderer for. Begin with `plain`."""
from __future__ import annotations
import functools, itertools, operator
from collections.abc import Callable
from typing import Any
from attn.ops.common import OUT_OF_RANGE
from attn.ops.interpret_uops import Elements, PlainUOps, elementwise, number_of
from attn.ops.language import operands_of
from attn.ops.operation import Call
from attn.tinygrad_compat import VECTORS, AddrSpace, Ops, UOp, dtypes, new_uop

# ***** instructions *****

# In the result every value is a scalar: a vector becomes the UOps of its elements, and a buffer of vectors becomes a buffer of elements. A compound
# operation's definition is run again with an interpreter whose values are UOps; an instruction becomes the UOps given by `MEANINGS`.

def plain_load(base:UOp, records:UOp, offset:UOp, *, width:int) -> Elements:
  """Returns UOps that load `width` bytes, as dwords, from `offset` bytes after `base`: zeros if offset + width exceeds `records`."""
  buffer, first = base.src
  size = buffer.dtype.itemsize
  further = (offset & (OUT_OF_RANGE - 1)).cast(dtypes.int)
  inside = (offset < OUT_OF_RANGE) & (further <= records - width)
  at = first + further.cast(dtypes.weakint)//size
  bits = [buffer[(at + i).valid(inside)].load().bitcast({2: dtypes.ushort, 4: dtypes.uint}[size]).cast(dtypes.uint) for i in range(width//size)]
  if size == 4: return Elements(tuple(bits))
  def dword(halves:list[UOp]) -> UOp: return functools.reduce(operator.or_, [x << 16*i for i, x in enumerate(halves)])
  return Elements(tuple(dword(bits[j:j + 2]) for j in range(0, len(bits), 2)))

def plain_load_where(at:UOp, gate:UOp, *, width:int) -> Elements:
  """Returns UOps that load `width` bytes, as dwords, from `at`, an index of 32-bit numbers: zeros if `gate` is false."""
  buffer, first = at.src
  return Elements(tuple(buffer[(first + i).valid(gate)].load().bitcast(dtypes.uint) for i in range(width//buffer.dtype.itemsize)))

MEANINGS: dict[str, Callable[..., Elements]] = {"buffer_load": plain_load, "load_where": plain_load_where, "uniform": number_of,
                                                "page_number": lambda entry, there, *, count: number_of(entry),
                                                "element_number": lambda index, *limits, **of: number_of(index),
                                                "at_least_0": lambda x: number_of(x.maximum(0))}
NUMBER_CHECKS = ("page_number", "element_number")     # instructions that return a number unchanged and let the emulator check it

# ***** a kernel *****

def as_value(x:Elements) -> UOp|Elements:
  """Returns the only element of `x`, or `x` itself if it has several elements."""
  return x if len(x.each) > 1 else x.each[0]

VECTOR_ELEMENT = {"float32": dtypes.float, "uint32": dtypes.uint}

class Plain:
  """Converts the UOps of one kernel to plain UOps."""
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
    if u.op is Ops.BITCAST and vector: return srcs[0]      # a buffer reinterpreted as a buffer of vectors
    if u.op is Ops.INDEX and vector: return self.indexed(u, srcs[1])
    if u.op is Ops.LOAD and vector: return elementwise(UOp.load, srcs[0])
    if u.op is Ops.STORE and isinstance(srcs[0], Elements): return self.stored(srcs[0].each, srcs[1])
    if vector and u.op in ARITHMETIC: return elementwise(ARITHMETIC[u.op], *srcs)
    if all(x is y for x, y in zip(srcs, u.src)): return u
    return new_uop(u.op, tuple(srcs), srcs[0].dtype, u.arg) if vector else u.replace(src=tuple(srcs))

  def indexed(self, u:UOp, at:UOp) -> Elements:
    """Returns the index of each number in the vector that `u` loads or stores: buffers of plain kernels have single numbers as elements."""
    buffer, index, there = self.found[u.src[0]], at.get_idx(), at.get_valid()
    n = 4*VECTORS[u.dtype][1]//buffer.dtype.itemsize
    def place(i:int) -> UOp:
      element = index*n + i
      return buffer[element if there.op is Ops.CONST and there.val is True else element.valid(there)]
    return Elements(tuple(place(i) for i in range(n)))

  def stored(self, to:tuple[UOp, ...], x:Elements) -> UOp:
    """Returns stores of the elements of x, each to the index of a buffer in `to`."""
    values, dtype = x.each, to[0].dtype
    if dtype.itemsize == 2: values = [(w >> 16*i).cast(dtypes.ushort).bitcast(dtype) for w in values for i in range(2)]   # type: ignore[assignment]
    return UOp.group(*[place.store(x) for place, x in zip(to, values, strict=True)])

  def operation(self, u:UOp, srcs:list[Any]) -> Any:
    """Returns plain UOps that compute `u`, an operation of attn, from plain UOps `srcs` of its operands."""
    call = u.arg
    if call.name in self.kept: return u.replace(src=tuple(srcs))
    if call.name == "opaque_uniform":     # tinygrad does not know the value of a number that is loaded from a register
      register = UOp.placeholder((1,), dtypes.int, next(self.slots), AddrSpace.REG)
      return register.after(register[0].store(srcs[0]))[0].load()
    if (meaning := MEANINGS.get(call.name)) is not None: return as_value(meaning(*srcs, **call.parameters))
    if (definition := call.operation.definition) is None: raise NotImplementedError(f"{call.name} is an instruction that has no plain UOps")
    taken = len(srcs) if call.operation.inline else len(operands_of(definition))     # further sources only order the operation
    operands = [x if isinstance(x, Elements) else Elements((x,)) for x in srcs[:taken]]
    return as_value(definition(PlainUOps(), *operands, **call.parameters))

ARITHMETIC = {Ops.ADD: operator.add, Ops.SUB: operator.sub, Ops.MUL: operator.mul}

def plain(sink:UOp, checked:bool=False) -> UOp:
  """Returns the kernel `sink` in plain UOps. `checked`: operations whose operands the emulator checks are not converted."""
  work = Plain(sink, checked)
  for u in sink.toposort(): work.found[u] = work.of(u)
  return work.found[sink]
