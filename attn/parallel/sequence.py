"""A sequence over several devices: its rows dealt out, and put together again."""
from __future__ import annotations
from collections.abc import Sequence
from attn import values
from attn.calls.placement import device_names, sharded_with_gradient
from attn.parallel.shards import numbers_of, rows_held
from attn.problem import ORDERS, check_order
from attn.tinygrad_compat import Tensor
from attn.values import static_shape

def check_axis(x:Tensor, axis:object) -> int:
  """An axis of x, counted from its first. Raises ValueError for one that x does not have."""
  supported = f"an axis of x, which has shape {values.shown_shape(x.shape)}: {-x.ndim}..{x.ndim - 1}"
  return values.whole_number("axis", axis, -x.ndim, x.ndim - 1, supported) % x.ndim

def dealt(count:int, order:str) -> list[int]:
  """The numbers of all pieces of a sequence, in the order in which devices hold them."""
  return [number for device in range(count) for number in numbers_of(device, count, order)]

def rearranged(x:Tensor, axis:int, numbers:Sequence[int]) -> Tensor:
  """x cut up along `axis` into as many equal pieces as there are numbers: piece numbers[0] first, and so on."""
  if list(numbers) == sorted(numbers): return x
  size = int(x.shape[axis])//len(numbers)
  def piece(n:int) -> Tensor: return x.shrink(tuple((n*size, (n + 1)*size) if i == axis else None for i in range(x.ndim)))
  first, *rest = map(piece, numbers)
  return first.cat(*rest, dim=axis)

def in_order(x:Tensor, axis:int, length:int, count:int, order:str) -> Tensor:
  """The first rows of a sequence, of which x has all pieces as `count` devices hold them."""
  numbers = dealt(count, order)
  whole = rearranged(x, axis, [numbers.index(n) for n in range(len(numbers))])
  return whole.shrink(tuple((0, length) if i == axis else None for i in range(x.ndim)))

def shard_sequence(x:Tensor, devices:str|Sequence[str], axis:int, order:str="zigzag") -> Tensor:
  """x, of any shape and dtype on one device, with its rows along `axis` dealt out to `devices`, for `attention(..., sequence_order=order,
  sequence_lengths=...)`. Of one device the whole of x.

  order: "contiguous", each device one piece, or "zigzag", device i of n the pieces i and 2n - 1 - i of 2n: the same work for all under a causal mask
  x is padded with zeros, behind its last row, to a multiple of the pieces: tinygrad shards evenly alone. sequence_lengths says how many rows are no
  padding. The gradient goes back to x.
  Raises ValueError for a tensor on several devices, an axis that it does not have, devices that are none or the same, and for another order.
  """
  x, names, order = values.tensor("x", x), device_names("devices", devices), check_order("order", order)
  if isinstance(x.device, tuple): raise ValueError(f"x is on {x.device}: must be on one device, such as what attn.unshard_sequence returns")
  axis = check_axis(x, axis)
  rows = static_shape("x", x.shape)[axis]
  if not rows: raise ValueError(f"x has shape {values.shown_shape(x.shape)}: axis {axis} must have a row at least")
  padding = rows_held(rows, len(names), order)*len(names) - rows
  # in memory: tinygrad takes a shard of nothing but padding for a constant without a shape
  if padding: x = x.pad(tuple((0, padding) if i == axis else None for i in range(x.ndim))).contiguous()
  # contiguous: what is realized is a buffer, and no longer the copies to it
  return sharded_with_gradient(rearranged(x, axis, dealt(len(names), order)), names, axis).contiguous()

def unshard_sequence(x:Tensor, axis:int, length:int, order:str="zigzag") -> Tensor:
  """What `shard_sequence` was given: the first `length` rows of the sequence that x has along `axis`, on the first of its devices.

  x is what came of it or is like it, such as o or lse of attention. Raises ValueError for a tensor that is sharded along another axis, a number of
  rows that it cannot have and another order."""
  x, order, given = values.tensor("x", x), check_order("order", order), axis
  axis = check_axis(x, given)
  rows, count = static_shape("x", x.shape)[axis], len(x.device) if isinstance(x.device, tuple) else 1
  if count > 1 and x.uop.axis != axis: raise ValueError(f"axis={given}: x is sharded along axis {x.uop.axis}")
  length = values.whole_number("length", length, 1, rows, f"a number of rows, 1..{rows}")
  if rows % (pieces := count*ORDERS[order]):
    raise ValueError(f"order={order!r} with x of shape {values.shown_shape(x.shape)}: axis {axis} is no multiple of its {pieces} pieces")
  return in_order(x.to(x.device[0]) if isinstance(x.device, tuple) else x, axis, length, count, order)
