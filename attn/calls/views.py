"""Recognises two kinds of tensors that a caller gives: a slice of a cache, which attention reads in place, and a causal mask."""
from __future__ import annotations
import functools, math
from dataclasses import dataclass, replace
from attn.calls.placement import AXES
from attn.calls.plain import bhsd
from attn.kernels.parts.memory.rows import strides
from attn.problem import Count, Strided
from attn.tinygrad_compat import AxisType, GroupOp, Ops, Tensor, UOp, buffer_under, dtypes, flat_element, view_of_placeholder

# tinygrad's models keep keys and values in one buffer, (2, B, S, H, D) or (2, B, H, S, D). These models call `scaled_dot_product_attention` on a
# slice whose length is given by a tinygrad Variable, with the mask `Tensor.full(..., -inf).triu(start_pos + 1)` or none.

Size = int|UOp     # a number of rows in a shape: an int, or an expression of Variables

# ***** a number of rows *****

def most(n:Size) -> int: return n if isinstance(n, int) else int(n.vmax)

def same_size(x:Size, y:Size) -> bool:
  """Returns whether two sizes are equal for all values of their Variables."""
  difference = x - y
  if isinstance(difference, UOp): difference = difference.simplify()
  return difference == 0 if isinstance(difference, int) else difference.op is Ops.CONST and difference.val == 0

def terms_of(x:UOp) -> list[UOp]:
  """Returns the summands of a sum of Variables and constants."""
  return [term for part in x.src for term in terms_of(part)] if x.op is Ops.ADD else [x]

def count_of(n:Size) -> tuple[Count, tuple[UOp, ...]]|None:
  """Returns (number of rows as a `Count`, Variables in it with their values) if `n` is a sum of Variables and constants, otherwise None."""
  if isinstance(n, int): return Count((), n), ()
  terms = terms_of(n)
  constants, bound = [x for x in terms if x.op is Ops.CONST], sorted((x for x in terms if x.is_bound_var), key=lambda x: x.src[0].expr)
  if len(constants) + len(bound) < len(terms): return None
  # `count` has the constant, and for each Variable the name and the smallest and largest value.
  variables = tuple((v.src[0].expr, int(v.src[0].vmin), int(v.src[0].vmax)) for v in bound)
  return Count(variables, sum(int(x.val) for x in constants)), tuple(bound)

def as_a_variable(n:Size) -> tuple[Size, dict[UOp, UOp]]:
  """Replaces a size that is a sum of Variables by a single Variable; returns (this Variable, substitution that makes other expressions use this
  Variable)."""
  # For any other size nothing changes. tinygrad can divide a multiple of a Variable by the Variable, but not a multiple of a sum by the sum.
  if isinstance(n, int) or (found := count_of(n)) is None: return n, {}
  whole, one = UOp.variable("rows", n.vmin, n.vmax), found[1][0]
  return whole, {one: whole - (n - one).simplify()}

# ***** rows that lie in a buffer *****

MOST_VIEWS = 1024     # views whose places are kept: finding the places of one takes a millisecond

@dataclass(frozen=True)
class InBuffer:
  """Position of keys or values (B, Hkv, S, D) in the buffer of which they are a view."""
  # `places` has the start and the strides. Each head of the buffer is `group` neighbouring heads of the view.
  places: Strided
  group: int
  rows: int       # largest number of rows

def flat_buffer(t:Tensor) -> Tensor:
  """Returns the buffer of which a tensor is a view, as one dimension."""
  # Each kernel sees only the part of a tensor on one device.
  if not isinstance(t.device, str): return t.contiguous()
  buffer = buffer_under(t.uop)
  return t.contiguous().flatten() if buffer is None else Tensor(buffer.flatten())

def whole_places(shape:tuple[int, ...], layout:str) -> Strided:
  """Returns the start (0) and the strides of the rows of a tensor that is a whole buffer without gaps."""
  sizes = dict(zip(AXES[layout], shape))
  return Strided(math.prod(shape), 0, *strides(layout, sizes["heads"], sizes["rows"], sizes["width"]))

def meet(distance:int, steps:list[tuple[int, int]]) -> bool:
  """Returns whether `distance` is a sum of steps, at most n of each (size, n) in `steps`, forward or back: 16 = 10 + 10 - 4 for [(4, 1), (10, 2)]."""
  # `steps` has pairs (size, n). For example, with steps [(4, 1), (10, 2)] distance 16 is 10 + 10 - 4.
  if not steps: return distance == 0
  (step, most_), rest = steps[0], steps[1:]
  if not step: return meet(distance, rest)
  reach = sum(s*n for s, n in rest)
  times = range(max(-most_, -((reach - distance)//step)), min(most_, (distance + reach)//step) + 1)
  return any(meet(distance - i*step, rest) for i in times)

def room_for_rows(places:Strided, batches:int, heads:int, width:int) -> int:
  """Returns the largest number of rows that each head of a cache in a buffer can have, before another head's rows or the buffer's end."""
  if not places.row: raise ValueError("a cache of one row: nothing says how far apart its rows lie")
  # The rows must end within the buffer, and before the rows of the next head or batch begin. `width` is the number of elements of a row.
  end = places.start + (batches - 1)*places.batch + (heads - 1)*places.head + width
  steps = [step for step, n in ((places.batch, batches), (places.head, heads)) if n > 1 and step > places.row]
  return min([(places.size - end)//places.row + 1, *(step//places.row for step in steps)])

def overlapping(x:Strided, y:Strided, counts:tuple[int, int, int, int]) -> bool:
  """Returns whether two caches in one buffer have memory in common. If their strides differ, the answer is true as soon as their ranges in the buffer
  overlap."""
  # `counts` are the numbers of batches, heads, rows, and elements of a row.
  def extent(s:Strided) -> int: return sum((n - 1)*step for n, step in zip(counts, (s.batch, s.head, s.row, 1)))
  if x.start + extent(x) < y.start or y.start + extent(y) < x.start: return False
  steps = [((x.batch, x.head, x.row, 1)[i], n - 1) for i, n in enumerate(counts)]
  # If the strides differ, only the first and the last element of each cache were compared.
  return (x.batch, x.head, x.row) != (y.batch, y.head, y.row) or meet(y.start - x.start, sorted(steps, reverse=True))

def coefficients(where:UOp, indices:list[UOp]) -> tuple[int, list[int]]|None:
  """Writes an index as c + a0*indices[0] + a1*indices[1] + ..., and returns (c, [a0, a1, ...]), or None if the index is not linear."""
  if where.op is Ops.CONST: return int(where.val), [0]*len(indices)
  if where in indices: return 0, [int(i is where) for i in indices]
  parts = [coefficients(x, indices) for x in where.src] if where.op in (Ops.ADD, Ops.MUL) else []
  if not parts or parts[0] is None or parts[1] is None: return None
  (c, x), (d, y) = parts[0], parts[1]
  if where.op is Ops.ADD: return c + d, [i + j for i, j in zip(x, y)]
  return (c*d, [c*j + d*i for i, j in zip(x, y)]) if not any(x) or not any(y) else None

def rows_there(u:UOp, n:Size) -> int:
  """Returns the largest number of rows that a view can have, where its number of rows `n` depends on Variables."""
  # This is the largest value of `n`, or the size of the tensor from which the view was cut, if that is smaller.
  fewest = most(n)
  while u.op in GroupOp.Movement:
    if u.op is Ops.SHRINK:
      fewest = min([fewest, *(whole for part, whole in zip(u.shape, u.src[0].shape) if isinstance(whole, int) and same_size(part, n))])
    u = u.src[0]
  return fewest

def in_buffer(t:Tensor, group:int=1) -> InBuffer|None:
  """Returns where the rows of a tensor (B, heads, S, D) lie in its buffer; None unless it is a view with constant strides. `group` neighbouring heads
  are one head of the buffer."""
  return None if (view := view_of_placeholder(t.uop)) is None else places_of_view(view, group)

@functools.lru_cache(MOST_VIEWS)
def places_of_view(view:UOp, group:int) -> InBuffer|None:
  """Returns where the rows of `view` (B, heads, S, D) lie in its buffer; None without constant strides. `group` neighbouring heads are one head of
  the buffer."""
  batch, heads, n, width = view.shape
  there, (rows, instead) = rows_there(view, n), as_a_variable(n)
  b, h, s, d = (UOp.range(n, axis, AxisType.LOOP) for axis, n in enumerate((batch, heads//group, rows, width)))
  same = UOp.range(group, 4, AxisType.LOOP)
  element = flat_element(view.substitute(instead).index(b, h*group + same if group > 1 else h, s, d))
  if element is None: return None
  (buffer, position), bounded = element.src, UOp.range(there, 5, AxisType.LOOP)
  if (linear := coefficients(position.substitute({s: bounded}).simplify(), [b, h, bounded, d, same])) is None: return None
  start, (sb, sh, ss, sd, repeated) = linear
  if repeated or (sd != 1 and width > 1) or min(sb, sh, ss) < 0: return None
  return InBuffer(Strided(buffer.max_numel(), start, sb, sh, ss), group, there)

def cache_of(k:Tensor, v:Tensor) -> tuple[InBuffer, InBuffer]|None:
  """Returns where keys and values (B, heads, S, D) lie in their buffers, or None if k or v is not a view with constant strides."""
  # Heads that repeat one head of the buffer count as this head.
  for group in [n for n in range(int(k.shape[1]), 0, -1) if k.shape[1] % n == 0]:
    in_k, in_v = in_buffer(k, group), in_buffer(v, group)
    if in_k is not None and in_v is not None: return in_k, in_v
  return None

def is_all_of_its_buffer(t:Tensor, places:Strided, layout:str) -> bool:
  """Returns whether a tensor is its whole buffer in order; `places` says where its rows lie."""
  shape = tuple(map(int, t.shape))
  sizes, whole = dict(zip(AXES[layout], shape)), whole_places(shape, layout)
  # The stride of an axis of size 1 does not matter.
  single = [step for axis, step in (("batch", "batch"), ("heads", "head"), ("rows", "row")) if sizes.get(axis, 1) == 1]
  return replace(places, **{step: getattr(whole, step) for step in single}) == whole

def places_in_cache(k:Tensor, v:Tensor, layout:str) -> tuple[Strided, Strided]|None:
  """Returns (start and strides of the rows of k, the same of v); None if k and v are whole buffers, or if k or v is no view with constant strides."""
  found = [in_buffer(bhsd(t, layout)) for t in (k, v)]
  if found[0] is None or found[1] is None: return None
  if all(x is not None and is_all_of_its_buffer(t, x.places, layout) for x, t in zip(found, (k, v))): return None
  return found[0].places, found[1].places

# ***** the causal mask *****

def just_stored(u:UOp) -> UOp|None:
  """Returns the value that a pending store writes to the whole tensor `u`, if this store is the only one, otherwise None."""
  if u.op is not Ops.AFTER or len(u.src) != 2 or u.src[1].op is not Ops.STORE: return None
  stored_to, value = u.src[1].src[:2]
  return value if stored_to is u.src[0] else None

def filled_with(u:UOp) -> float|None:
  """Returns the number that every element of a tensor equals, or None if the tensor is not known to be constant."""
  while u.op in (Ops.RESHAPE, Ops.EXPAND, Ops.PERMUTE, Ops.SHRINK): u = u.src[0]
  if u.op is Ops.CONST: return float(u.val)
  return None if (value := just_stored(u)) is None else filled_with(value)

def is_causal_mask(mask:Tensor, n_q:Size, n_k:Size) -> bool:
  """Returns whether a mask (..., n_q, n_k) is the causal mask of the last n_q of n_k positions, for all values of the Variables."""
  # The mask is -inf for keys j > i + n_k - n_q and 0 for all others. It is recognised by the exact expression that tinygrad builds for
  # `Tensor.full(shape, -inf).triu(n_k - n_q + 1)`, so no other mask is mistaken for the causal mask.
  u = mask.uop
  while u.op is Ops.CAST or (u.op is Ops.RESHAPE and u.src[0].shape[-2:] == u.shape[-2:]): u = u.src[0]
  if not dtypes.is_float(u.dtype) or u.op is not Ops.WHERE or filled_with(u.src[1]) != -math.inf or filled_with(u.src[2]) != 0.0: return False
  if any(n != 1 for n in u.shape[:-2]): return False
  rows, columns = u.shape[-2:]
  if not (same_size(rows, n_q) and same_size(columns, n_k)): return False
  filled = Tensor(u.src[1])
  diagonals: list[int|UOp] = [n_k - n_q + 1]
  if isinstance(n_k - n_q, UOp): diagonals = [x for x in u.src[0].toposort() if x.shape == () and x.dtype == dtypes.weakint]
  return any(same_size(d, n_k - n_q + 1) and filled.triu(d).uop is u for d in diagonals)
