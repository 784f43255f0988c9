"""Makes UOps and changes them: values of vector types, buffers and their views, and the parameters of a kernel."""
from __future__ import annotations
import functools
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from tinygrad import Tensor
from tinygrad.dtype import DType, dtypes, promo_lattice
from tinygrad.schedule.multi import multi_pm
from tinygrad.schedule.rangeify import pm_mops
from tinygrad.uop.ops import GroupOp, Ops, UOp, graph_rewrite
from tinygrad.uop.spec import glbls as spec_names
from tinygrad.uop.symbolic import symbolic
from tinygrad.uop.weak import pm_cast_weak, pm_commit_weak

def new_uop(op:Ops, src:tuple[UOp, ...]=(), dtype:DType|None=None, arg:Any=None) -> UOp:
  """Makes a UOp from its fields; if `dtype` is None, tinygrad infers it."""
  # No other function uses UOp's constructor, because its fields change between versions.
  return UOp(op, dtype, src, arg)   # type: ignore[arg-type] # its metaclass accepts None

# **** dtypes of Python numbers ****
_COMMIT = pm_commit_weak + pm_cast_weak

def committed(u:UOp) -> UOp:
  """Gives each Python number in an expression a dtype: that of the operation that uses it."""
  return graph_rewrite(u, _COMMIT)

Number = TypeVar("Number", UOp, Tensor)
def as_uint64(x:Number) -> Number:
  """Casts 32-bit numbers to uint64."""
  # Without the bitcast tinygrad merges this cast with an earlier cast from an index, and gets a 64-bit index. Where a 64-bit index meets 32-bit
  # numbers, tinygrad computes it in floats, and then fails to lower the kernel.
  return x.cast(dtypes.int).bitcast(dtypes.uint).cast(dtypes.ulong)

# **** vector-typed values ****
# A fragment is ONE value of a clang vector type and not n scalars: the devectorizer would split a shaped value into n UOps, and lowering time grows
# with the number of UOps. A dtype's name is printed unchanged, so the name is the C type; every pass sees a scalar of an unknown dtype.
class VectorDType(DType):
  """Dtype of a vector in a register."""
  # This is a class of its own for tinygrad's worker processes: to unpickle such a dtype, a process imports this module.
  def __repr__(self) -> str: return f"VectorDType({self.name!r})"
  def __reduce__(self) -> Any: return vector_dtype, VECTORS[self]     # a worker that unpickles a dtype adds it to VECTORS too

VECTORS: dict[DType, tuple[str, int]] = {}   # dtype -> (numpy element type, lanes)
_ELEMENT = {"float32": "float", "uint32": "uint"}

@functools.cache
def vector_dtype(element:str, n:int) -> DType:
  """Returns the dtype of a register vector of `n` elements, which are "float32" or "uint32"."""
  # Its name, such as float4, is the vector's type in both HIP and CUDA.
  dtype = VectorDType(20, 32*n, f"{_ELEMENT[element]}{n}", None)
  VECTORS[dtype] = (element, n)
  promo_lattice[dtype] = []     # compatible only with itself: with SPEC=2 tinygrad asks for the type of a sum when it prints one
  return dtype

# With SPEC=2 tinygrad prints each AST as Python and evaluates it: it must find the name that `VectorDType.__repr__` prints.
spec_names["VectorDType"] = lambda name: next(dtype for dtype in VECTORS if dtype.name == name)

# **** buffers and their views (attn/calls/views.py) ****
def buffer_under(u:UOp) -> UOp|None:
  """Returns the buffer behind `u` (`u` itself, or the buffer that `u` is a view of), after all pending writes; None if `u` is a computed value."""
  while not u.has_buffer_identity() and u.op in GroupOp.Movement: u = u.src[0]
  inner = u
  while inner.op is Ops.CONTIGUOUS: inner = inner.src[0]
  return u if inner.has_buffer_identity(after_ok=True) and all(isinstance(n, int) for n in u.shape) else None

def on_top(u:UOp, base:UOp, other:UOp) -> UOp|None:
  """If `u` is a view of `base`, returns the same view of `other` (same slices and reshapes), otherwise None."""
  views = []
  while u is not base and u.op in GroupOp.Movement:
    views.append(u)
    u = u.src[0]
  if u is not base: return None
  for view in reversed(views): other = view.replace(src=(other, *view.src[1:]))
  return other

def bits_under_views(u:UOp, dtype:DType) -> UOp:
  """Reinterprets the bits of a tensor as another dtype of the same size; a view stays a view, without a copy."""
  # Otherwise tinygrad might copy the view first, and on devices where it emulates 8-bit floats, a copy loses denormal numbers.
  views = []
  while u.op in GroupOp.Movement:
    views.append(u)
    u = u.src[0]
  bits = u.bitcast(dtype)
  for view in reversed(views): bits = view.replace(dtype=dtype, src=(bits, *view.src[1:]))
  return bits

def view_of_placeholder(u:UOp) -> UOp|None:
  """Returns the view `u` with a placeholder in place of its buffer, so that equal views of different buffers are equal; None if it is no view."""
  # So equal views of different buffers become the identical UOp.
  if (base := buffer_under(u)) is None: return None
  return on_top(u, base, UOp.placeholder((base.max_numel(),), dtypes.uchar, 0).reshape(base.shape))

def flat_element(index:UOp) -> UOp|None:
  """Rewrites `index`, an indexed view of a kernel's parameter, as the parameter itself with a single index; returns None if that is impossible."""
  found = graph_rewrite(index, pm_mops + symbolic, name="attn element")
  return found if found.op is Ops.INDEX and found.src[0].op is Ops.PARAM and len(found.src) == 2 else None

def copy_call(to:UOp, source:UOp, *held:UOp) -> UOp:
  """Returns the launch that copies `source` to `to`, buffers or regions of buffers, and keeps the buffers `held` allocated until then."""
  # The launch takes the buffers `held` as arguments only so that they stay in use; `to` and `source` may be regions of them.
  srcs = (to, source, *held)
  params = [UOp.param(i, x.dtype, x.max_shape, x.device) for i, x in enumerate(srcs)]
  copy = new_uop(Ops.COPY, (params[1],), arg=to.device).call(*params)
  return new_uop(Ops.LINEAR, (copy,)).call(*srcs)

def also_after(u:UOp, *calls:UOp) -> UOp:
  """Returns the buffer `u`, changed so that every reader of it also waits for the launches `calls`."""
  # One AFTER, tinygrad's UOp for this order, does both. With nested AFTERs tinygrad 0.14.0 would wait only for the launches of the outermost one; if
  # these don't read what the inner launches have written, nothing would wait for the inner ones.
  return u.after(*dict.fromkeys((*(u.src[1:] if u.op is Ops.AFTER else ()), *calls)))

def remembered(u:UOp) -> UOp:
  """Marks the AFTER `u`, tinygrad's UOp for a buffer's value after a kernel, so that tinygrad never replaces it by the bare buffer."""
  # When a value that depends on the AFTER is computed, tinygrad 0.14.0 replaces the AFTER by the bare buffer in all expressions. A later write by
  # another kernel would then be mistaken for the write of this kernel. tinygrad does not replace a UOp that has a tag, even an empty one.
  return u.rtag(())

# **** the parameters of a kernel ****
MOST_SINKS = 128     # kernels whose outputs are kept: a walk over an AST takes a millisecond

@functools.lru_cache(MOST_SINKS)
def output_params(sink:UOp) -> tuple[UOp, ...]:
  """Returns the parameters (PARAMs) to which a kernel's AST stores, in the order of their numbers."""
  found = {target for u in sink.toposort() if u.op is Ops.STORE and (target := u.src[0].buf_uop).op is Ops.PARAM}
  return tuple(sorted(found, key=lambda u: u.arg.slot))

def with_outputs(sink:UOp) -> UOp:
  """Adds a kernel's outputs to the sources of the root (SINK) of its AST: an output then stays an argument even if simplification removes all stores
  to it."""
  return sink.replace(src=sink.src + tuple(p for p in output_params(sink) if p not in sink.src))

def with_accesses(program:UOp, slots:Collection[int]) -> UOp:
  """Marks the parameters with numbers in `slots` as read and written by a compiled kernel, so that later kernels wait for this kernel."""
  # In a graph under TinyJit, kernels then wait for other kernels that read or write these tensors.
  info = program.arg
  return program.replace(arg=replace(info, outs=tuple(sorted({*info.outs, *slots})), ins=tuple(sorted({*info.ins, *slots})))) if slots else program

def begins_at(u:UOp) -> int:
  """Returns the byte offset in its buffer, on each device, at which a kernel's argument begins."""
  # The argument may be a slice without gaps: tinygrad passes it in place, without a copy.
  while u.op in (Ops.CONTIGUOUS, Ops.MSELECT): u = u.src[0]
  under = u.base
  while under.op in (Ops.BITCAST, Ops.UNSHARD): under = under.src[0].base
  if u.has_buffer_identity() or under.op is not Ops.BUFFER or not all(isinstance(n, int) for n in u.shape): return 0
  if not isinstance(u.device, str) and (u := graph_rewrite(u, multi_pm)).op is Ops.UNSHARD: u = u.src[0]
  view = u.contiguous_view()
  return 0 if view is None else view[1]*view[0].dtype.itemsize

MOST_ASTS = 128     # number of kernels' ASTs that a cache of this package keeps; tinygrad's own caches hold the ASTs of more kernels

def with_params(sink:UOp, tensors:Sequence[UOp]) -> UOp:
  """Adds `tensors` to a kernel's AST as parameters 0, 1, ..., so that the kernel waits for their writers, even if the kernel does not use the
  tensors."""
  # In a graph under TinyJit the kernel then waits for everything that writes these tensors. (`with_used_tensors` later removes tensors from a call if
  # its program does not take them.)
  return _with_params_of(sink, *(UOp.placeholder_like(u, slot) for slot, u in enumerate(tensors) if not (u.is_variable or u.is_bound_var)))

@functools.lru_cache(MOST_ASTS)
def _with_params_of(sink:UOp, *placeholders:UOp) -> UOp:
  """Adds the PARAMs in `placeholders` to the sources of the root (SINK) of a kernel's AST."""
  params = dict.fromkeys(u for x in placeholders for u in x.toposort() if u.op is Ops.PARAM)
  return sink.replace(src=sink.src + tuple(u for u in params if u not in sink.src))
