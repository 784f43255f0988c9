"""Memory of the emulated chip as plain bytes: device allocations, the buffers of a running kernel (global and LDS), and register arrays."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Any, Callable
import numpy as np
from numpy.typing import NDArray
from attn.tinygrad_compat import UOp
from attn.emulator.checks import Finding, Misaligned, NotWaitedFor, OutOfBounds, Span, UninitialisedRead, UnwrittenOutput
from attn.emulator.shadow import LdsOperand, LdsShadow
from attn.emulator.threads import Operand, Product, Threads

# In an access, each thread reads or writes a chunk: the bytes of a number, or of all numbers of a vector. An index counts chunks of this size. The
# memory is viewed as a numpy array of such chunks. So numpy reads or writes the chunks of all threads in one operation. To read the bytes as another
# type, the emulator makes another view of the array.

Array = NDArray[Any]
POISON, PADDING = 0xff, 64   # value of each byte of fresh memory (NaN in every float type); LDS buffers are padded to a multiple of PADDING bytes

def chunk_type(nbytes:int) -> np.dtype[Any]:
  """Returns the numpy type of `nbytes` bytes, for data that are copied and never interpreted."""
  return np.dtype({1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}.get(nbytes, f"V{nbytes}"))

def divided(x:Array, n:int) -> tuple[Array, Array]:
  """Returns (x//n, x%n)."""
  # shifts, if n is a power of two, are many times as fast
  return (x >> n.bit_length() - 1, x & n - 1) if n & n - 1 == 0 else (x//n, x % n)

def to_values(raw:Array, dtype:np.dtype[Any], n:int) -> Array:
  """Converts each thread's bytes, one element of `raw` (threads,), to numbers of type `dtype`: (threads,), or (n, threads) for vectors."""
  if n == 1: return raw.view(dtype)
  return np.ascontiguousarray(np.atleast_1d(raw).view(dtype).reshape(-1, n).T)

def to_chunks(x:Array, n:int, chunk:int) -> Array:
  """Returns each thread's numbers, (threads,) or (n, threads) for vectors, as one element of `chunk` bytes for each thread."""
  if n == 1 and x.ndim < 2: return np.asarray(x).view(chunk_type(chunk))
  return np.ascontiguousarray(x.T).view(chunk_type(chunk))[..., 0]

# ***** device allocations *****

class Allocation:
  """A piece of device memory that tinygrad has allocated, as bytes."""
  # `written` has a flag for each byte that says whether the byte was written since the allocation; None: every byte was
  def __init__(self, size:int):
    self.data = np.full(size, POISON, np.uint8)
    self.written: Array|None = np.zeros(size, np.uint8)
    self.touched = False                                        # has any byte been written?
    # (offset, size) of an output of a kernel -> (kernel, buffer, element size, text about a missing store)
    self.outputs: dict[tuple[int, int], tuple[str, str, int, str]] = {}

class View:
  """A range of device memory: `size` bytes of an allocation, from byte `offset` on. A Buffer of tinygrad holds a View instead of a device address."""
  def __init__(self, base:Allocation, offset:int, size:int): self.base, self.offset, self.size = base, offset, size
  def sub(self, offset:int, size:int) -> View: return View(self.base, self.offset + offset, size)
  @property
  def data(self) -> Array: return self.base.data[self.offset:self.offset + self.size]
  @property
  def written(self) -> Array|None: return None if self.base.written is None else self.base.written[self.offset:self.offset + self.size]

  def settle(self) -> None:
    """Records that a program or the host has written to the allocation. From now on, a read of a byte that was never written is an error."""
    self.base.touched = True
    # if every byte is written by now, flags for single bytes are not needed any more
    if self.base.written is not None and self.base.written.all(): self.base.written = None

  def stored_by(self, kernel:str, buffer:str, itemsize:int, stores:bool) -> None:
    """Records that a kernel with the output `buffer`, whose elements have `itemsize` bytes, has run and that this memory is the output."""
    # `stores` is false if lowering has removed all stores to the buffer from the kernel
    if stores: self.settle()
    why = "" if stores else ": every store to it was simplified away, because its condition is never true or its loop has no iterations"
    if self.written is not None: self.base.outputs[self.offset, self.size] = kernel, buffer, itemsize, why

  def fill(self, data:Array, written:Array|None=None) -> None:
    """Copies `data` to the memory. `written` says of each byte whether it counts as written; None: all bytes do."""
    self.data[:] = data
    if (mine := self.written) is not None: mine[:] = 1 if written is None else written
    self.settle()

  def check_written(self) -> None:
    """Raises UnwrittenOutput if a kernel's output in this range has an element that was never written."""
    if (written := self.written) is None or written.all(): return
    for (offset, size), (kernel, buffer, itemsize, why) in self.base.outputs.items():
      missing = np.flatnonzero(self.base.written[max(offset, self.offset):min(offset+size, self.offset+self.size)] == 0)   # type: ignore[index]
      if len(missing):
        first = (int(missing[0]) + max(offset, self.offset) - offset)//itemsize
        raise UnwrittenOutput(f"{kernel}: output element {buffer}[{first}] was never written "
                              f"(missing elements: {len(missing)//itemsize} of {size//itemsize} in all){why}")

# ***** buffers of a running kernel *****

class Space:
  """Buffer that threads address by an index: a kernel argument in global memory, or a buffer in LDS."""
  # an LDS buffer has one copy for each workgroup, `stride` bytes apart
  def __init__(self, f:Threads, name:str, data:Array, limit:int, stride:int=0, written:Array|None=None, guarded:bool=False,
               shadow:LdsShadow|None=None, base:Allocation|None=None, begin:int=0):
    self.f, self.name, self.data, self.limit, self.stride, self.shadow = f, name, data, limit, stride, shadow
    self.base, self.begin = base, begin       # allocation, which is aligned for every type, and the buffer's first byte in the allocation
    self.written = written                                                      # flags that stores set
    self.guarded = guarded and written is not None and not bool(written.all())   # can a load find bytes that were never written?
    self.kind = "LDS" if stride else "global memory"
    self._views: dict[tuple[int, bool], Array] = {}
    self._bases: dict[int, Array] = {}

  def _view(self, chunk:int, flags:bool=False) -> Array:
    if (v := self._views.get((chunk, flags))) is None:
      source = self.written if flags else self.data
      assert source is not None
      v = self._views[chunk, flags] = source[:source.size//chunk*chunk].view(chunk_type(chunk))
    return v

  def _at(self, index:Array, chunk:int, active:Array|None, verb:str) -> Array:
    """Converts each thread's `index` in this buffer to an index in the memory, both in chunks of `chunk` bytes. Raises OutOfBounds for an active
    thread outside the buffer."""
    # `index` counts chunks of `chunk` bytes from the start of the buffer; inactive threads get 0; `verb` says in error messages what the access does
    if self.begin % chunk:
      bad = np.ones(self.f.T, bool) if active is None else np.broadcast_to(active, self.f.T)
      if bad.any():
        raise self.f.error(Misaligned, bad, lambda t: f"{verb} {chunk} bytes of {self.name}, which begins at byte {self.begin} of its memory")
    if active is not None: index = index * active
    limit = self.limit // chunk
    if (index.view(_UNSIGNED[index.dtype.itemsize]).max() if index.shape else index.item() % 2**64) >= limit:
      bad = np.broadcast_to((index < 0) | (index >= limit), self.f.T)
      if active is None or (bad := bad & active).any():
        raise self.f.error(OutOfBounds, bad, lambda t: f"{verb} {self.name}[{np.broadcast_to(index, self.f.T)[t]}] is out of bounds: "
                                                       f"the {self.kind} buffer has {limit} elements of {chunk} bytes")
    if not self.stride: return index
    if (base := self._bases.get(chunk)) is None: base = self._bases[chunk] = self.f.workgroup_of * (self.stride//chunk)
    return base + index

  def load(self, index:Array, chunk:int, active:Array|None) -> Array:
    at = self._at(index, chunk, active, "load of")
    if self.stride and self.f.banks is not None: self.f.banks.count(self.name, True, at % (self.stride//chunk)*chunk, chunk, active)
    if len(view := self._view(chunk)) == 0: return np.zeros(self.f.T, view.dtype)
    if self.f.checks:
      if self.shadow is not None: self._note(self.shadow.on_read, index, at, chunk, active, "reads")
      elif self.guarded: self._check_flags(at, chunk, active)
    return view.take(at)

  def store(self, index:Array, chunk:int, values:Array, active:Array|None) -> None:
    at = self._at(index, chunk, active, "store to")
    if self.stride and self.f.banks is not None: self.f.banks.count(self.name, False, at % (self.stride//chunk)*chunk, chunk, active)
    if len(view := self._view(chunk)) == 0: return
    if self.shadow is not None and self.f.checks: self._note(self.shadow.on_write, index, at, chunk, active, "writes")
    at = np.broadcast_to(at, self.f.T)
    if active is not None: at, values = at[active], np.broadcast_to(values, active.shape)[active]
    view[at] = values
    if self.written is not None:
      flags = self._view(chunk, True)
      flags[at] = np.full(chunk, 1, np.uint8).view(chunk_type(chunk))[0]

  def atomic(self, index:Array, nbytes:int, gate:Array, verb:str, sets:Array|None=None) -> tuple[Array, Array]:
    """Prepares atomic operations on `nbytes` bytes, from byte `index` on. Returns (memory as uint32, index in this memory of each thread's first
    uint32)."""
    # where `sets` is true, the thread replaces the numbers without reading them
    index, beyond = divided(index, nbytes)
    if (bad := gate & (beyond != 0)).any():
      raise self.f.error(Misaligned, bad, lambda t: f"{verb} {nbytes} bytes of {self.name} at once, but the address is no multiple of {nbytes}")
    at = np.broadcast_to(self._at(index, nbytes, gate, verb), self.f.T)
    if self.f.checks and self.guarded: self._check_flags(at, nbytes, gate if sets is None else gate & ~sets)
    if self.written is not None: self._view(nbytes, True)[at[gate]] = np.full(nbytes, 1, np.uint8).view(chunk_type(nbytes))[0]
    at = at*(nbytes//4)
    self.note_atomic(at, nbytes//4, gate, verb)
    return self._view(4).view(np.uint32), at

  def note_atomic(self, at:Array, count:int, gate:Array, verb:str) -> None:
    """Does nothing. The subclass `WatchedSpace` records an atomic operation on `count` 4-byte elements, from number `at` on, where `gate` is true."""

  def _check_flags(self, at:Array, chunk:int, active:Array|None) -> None:
    bad = np.broadcast_to((np.atleast_1d(self._view(chunk, True).take(at)).view(np.uint8).reshape(-1, chunk) == 0).any(axis=1), self.f.T)
    if active is not None: bad = bad & active
    if bad.any():
      raise self.f.error(UninitialisedRead, bad, lambda t: f"load of {self.name}[{np.broadcast_to(at, self.f.T)[t]}] (elements of {chunk} bytes) "
                                                           "reads global memory that nobody has written")

  def _note(self, note:Callable[[Array, Array|None, Span], Finding|None], index:Array, at:Array, chunk:int, active:Array|None, verb:str) -> None:
    shadow = self.shadow
    assert shadow is not None
    per, locations = max(1, chunk//shadow.unit), self.stride//shadow.unit
    operands = self.f.operands if verb == "reads" else None
    if (touched := index if active is None else np.broadcast_to(index, active.shape)[active]).size == 0: return
    span = int(touched.min())*chunk//shadow.unit, -(-(int(touched.max()) + 1)*chunk//shadow.unit)
    if chunk == per*shadow.unit and per in (1, 2, 4) and at.shape == (self.f.T,) and (
        shadow.clean_read if verb == "reads" else shadow.clean_write)(at, per, active, span):
      if operands is not None: operands.append(LdsOperand(shadow, at, per, active, span))
      return
    for part in range(per):
      where = at if chunk == shadow.unit else at*chunk//shadow.unit + part
      if (wrong := note(where, active, span)) is None:
        if operands is not None: operands.append(LdsOperand(shadow, where, 1, active, span))
        continue
      def text(t:int) -> str:
        what = f"{verb} {self.name} at byte {where[t] % locations * shadow.unit} (element {at[t] % (self.stride//chunk)} of {chunk} bytes)"
        if wrong.other is None: return f"{what}, LDS that nobody has written"
        if wrong.error is NotWaitedFor: return f"{what}, which {self.f.operation(int(wrong.other[t]))} still {wrong.verb}: it was not waited for"
        return f"{what}, which wave {wrong.other[t]} has {wrong.verb} with no barrier between: LDS race"
      raise self.f.error(wrong.error, wrong.threads, text)

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}

class Pointer:
  """Address operand of an operation: a buffer in global memory or LDS, and for each thread a byte offset."""
  def __init__(self, space:Space, buffer:UOp, offset:Array): self.space, self.buffer, self.offset = space, buffer, offset

  def chunks(self, offset:Array, nbytes:int, gate:Array) -> tuple[Array, int]:
    """Divides an access of `nbytes` bytes into aligned chunks; returns (index of each thread's first chunk, bytes of a chunk)."""
    # A chunk is the whole access if the addresses of all threads where `gate` is true are multiples of `nbytes`. Otherwise a chunk has at most 4
    # bytes, and the addresses must be multiples of its size.
    at = np.broadcast_to(self.offset + offset, self.space.f.T)
    index, beyond = divided(at, nbytes)
    if not beyond.any(): return index, nbytes
    chunk = nbytes if not beyond[gate].any() else min(nbytes & -nbytes, 4)
    index, beyond = divided(at, chunk)
    if (bad := gate & (beyond != 0)).any():
      raise self.space.f.error(Misaligned, bad, lambda t: f"access of {nbytes} bytes at byte {at[t]} of {self.space.name} is not aligned to {chunk}")
    return index, chunk

  def load(self, offset:Array, nbytes:int, gate:Array) -> Array:
    at, chunk = self.chunks(offset, nbytes, gate)
    active = None if gate.all() else gate
    parts = [self.space.load(at + i, chunk, active) for i in range(nbytes//chunk)]
    raw = (parts[0] if len(parts) == 1 else np.stack(parts, -1)).view(np.uint8).reshape(-1, nbytes)
    if active is not None: raw[~active] = 0
    return raw.T

  def store(self, offset:Array, data:Array, gate:Array) -> None:
    nbytes = data.shape[0]
    at, chunk = self.chunks(offset, nbytes, gate)
    self.space.f.plan.stored.setdefault(self.buffer, chunk)
    raw = np.ascontiguousarray(np.broadcast_to(data, (nbytes, self.space.f.T)).T).view(chunk_type(chunk))
    for i in range(nbytes//chunk): self.space.store(at + i, chunk, raw[:, i], gate)

class Registers:
  """Register array: a numpy array (threads,) for each element. A store by all threads replaces this array."""
  # `written` says for each element which threads have written it: True (all), False (none), or a mask
  def __init__(self, f:Threads, name:str, count:int, dtype:np.dtype[Any], lanes:int):
    self.f, self.name, self.blank = f, name, np.zeros(() if lanes == 1 else (lanes, 1), dtype)
    self.values: list[Array] = [self.blank] * count
    self.written: list[Array|bool] = [False] * count
    self.coming: dict[int, Product] = {}    # element -> product under way that writes it
    self.held: dict[int, Product] = {}      # element -> product under way that reads it

  def _index(self, index:Array, active:Array|None, verb:str) -> Array:
    if not index.shape and 0 <= index < len(self.values): return index
    bad = (index < 0) | (index >= len(self.values))
    if active is not None: bad = bad & active
    if bad.any():
      raise self.f.error(OutOfBounds, bad, lambda t: f"{verb} {self.name}[{np.broadcast_to(index, self.f.T)[t]}] is out of bounds: "
                                                     f"the register array has {len(self.values)} elements")
    return index

  def _settled(self, i:int, product:Product, active:Array|None, does:str, still:str) -> None:
    """Raises NotWaitedFor if an active thread accesses element i, which the asynchronous matrix product `product` uses, before the thread has waited
    for the product."""
    if not self.f.checks or not (bad := product.threads if active is None else product.threads & active).any(): return
    # `does` is what the thread does, such as "stores to"; `still` is what the product does: "reads" or "writes"
    raise self.f.error(NotWaitedFor, bad, lambda t: f"{does} {self.name}[{i}], which {self.f.operation(product.number)} still {still}: "
                                                    "it was not waited for")

  def _check(self, i:int, active:Array|None) -> None:
    if i in self.coming: self._settled(i, self.coming[i], active, "reads the accumulator", "writes")
    if (operands := self.f.operands) is not None: operands.append(RegisterOperand(self, i))
    if (w := self.written[i]) is True or not self.f.checks: return
    bad = np.broadcast_to(~np.asarray(w), self.f.T)
    if active is not None: bad = bad & active
    if bad.any(): raise self.f.error(UninitialisedRead, bad, lambda t: f"load of {self.name}[{i}] reads a register that nobody has written")

  def load(self, index:Array, active:Array|None) -> Array:
    index = self._index(index, active, "load of")
    if not index.shape:
      self._check(int(index), active)
      return self.values[int(index)]
    out = np.broadcast_to(self.blank, self.blank.shape[:-1] + (self.f.T,)).copy()
    for i in np.unique(index if active is None else index[active]):
      here = (index == i) if active is None else (index == i) & active
      self._check(int(i), here)
      out[..., here] = np.broadcast_to(self.values[i], out.shape)[..., here]
    return out

  def result(self, i:int, active:Array|None) -> Array:
    """Returns element i in the active threads, where asynchronous matrix products count as complete."""
    if (product := self.coming.get(i)) is None: return self.load(np.asarray(i), active)
    # a product need not wait for earlier products that add to the same element
    return np.where(product.threads, product.results[i], self.values[i])

  def store(self, index:Array, value:Array, active:Array|None) -> None:
    index = self._index(index, active, "store to")
    if not index.shape: return self._set(int(index), value, active)
    for i in np.unique(index if active is None else index[active]):
      self._set(int(i), value, (index == i) if active is None else (index == i) & active)

  def _set(self, i:int, value:Array, active:Array|None) -> None:
    if i in self.coming: self._settled(i, self.coming[i], active, "stores to the accumulator", "writes")
    if i in self.held: self._settled(i, self.held[i], active, "stores to", "reads")
    self.put(i, value, active)

  def put(self, i:int, value:Array, active:Array|None) -> None:
    """Sets element i to `value` in the active threads, without checks."""
    if active is None or active.all(): self.values[i], self.written[i] = value, True
    elif active.any():
      self.values[i] = np.where(active, value, self.values[i])
      if self.written[i] is not True: self.written[i] = self.written[i] | active

@dataclass(frozen=True)
class RegisterPointer:
  """Address operand of an operation: one element of a register array."""
  array: Registers
  first: int

@dataclass(frozen=True)
class RegisterOperand(Operand):
  """Element of a register array that an asynchronous matrix product reads."""
  array: Registers
  number: int
  def hold(self, product:Product) -> None: self.array.held[self.number] = product
  def release(self, product:Product) -> None:
    if self.array.held.get(self.number) is product: del self.array.held[self.number]
