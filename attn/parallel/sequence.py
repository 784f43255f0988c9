"""Shards the rows of a sequence over several devices, and gathers them again."""
from __future__ import annotations
from collections.abc import Sequence
from attn import values
from attn.calls.placement import device_names, sharded_with_gradient
from attn.parallel.shards import numbers_of, rows_held
from attn.problem import ORDERS, check_order
from attn.tinygrad_compat import Tensor
from attn.values import static_shape

def check_axis(x:Tensor, axis:object) -> int:
  """Returns an axis of x as a number from 0 on; raises ValueError for an axis that x does not have."""
  supported = f"an axis of x, which has shape {values.shown_shape(x.shape)}: {-x.ndim}..{x.ndim - 1}"
  return values.whole_number("axis", axis, -x.ndim, x.ndim - 1, supported) % x.ndim

def pieces_by_device(count:int, order:str) -> list[int]:
  """Returns the numbers of all pieces of a sequence, device by device: [0, 3, 1, 2] for two devices and the order "zigzag"."""
  return [number for device in range(count) for number in numbers_of(device, count, order)]

def rearranged(x:Tensor, axis:int, numbers:Sequence[int]) -> Tensor:
  """Cuts x along `axis` into equal pieces and joins them in the order `numbers`."""
  if list(numbers) == sorted(numbers): return x
  size = int(x.shape[axis])//len(numbers)
  def piece(n:int) -> Tensor: return x.shrink(tuple((n*size, (n + 1)*size) if i == axis else None for i in range(x.ndim)))
  first, *rest = map(piece, numbers)
  return first.cat(*rest, dim=axis)

def in_order(x:Tensor, axis:int, length:int, count:int, order:str) -> Tensor:
  """Puts the pieces of a sequence, which lie in the order of `count` devices, into their natural order; returns the first `length` rows."""
  numbers = pieces_by_device(count, order)
  whole = rearranged(x, axis, [numbers.index(n) for n in range(len(numbers))])
  return whole.shrink(tuple((0, length) if i == axis else None for i in range(x.ndim)))

@values.names_itself
def shard_sequence(x:Tensor, devices:str|Sequence[str], axis:int, order:str="zigzag") -> Tensor:
  """Shards the rows of x along `axis` over `devices`, for `attention(..., sequence_order=order, sequence_lengths=...)`. A single device gets all of
  x.

    x      a tensor of any shape and dtype, on one device
    order  "contiguous": each device holds one piece; or "zigzag": device i of n holds pieces i and 2n - 1 - i of 2n, so that all devices have equal
           work under a causal mask

  x is padded with zeros behind its last row to a multiple of the number of pieces, because tinygrad only makes equal shards. Pass the numbers of rows
  without padding as sequence_lengths. Gradients flow back to x. Raises ValueError for a tensor on several devices, an axis that x does not have,
  devices that don't exist or are given twice, and an unknown order.
  """
  x, names, order = values.tensor("x", x), device_names("devices", devices), check_order("order", order)
  if isinstance(x.device, tuple): raise ValueError(f"x is on {x.device}: must be on one device, as attn.unshard_sequence returns it")
  axis = check_axis(x, axis)
  rows = static_shape("x", x.shape)[axis]
  if not rows: raise ValueError(f"x has shape {values.shown_shape(x.shape)}: axis {axis} must have at least one row")
  padding = rows_held(rows, len(names), order)*len(names) - rows
  # contiguous: tinygrad would treat a shard that has only padding as a constant without a shape
  if padding: x = x.pad(tuple((0, padding) if i == axis else None for i in range(x.ndim))).contiguous()
  # contiguous: the realized tensor is then a buffer and not the copies into it
  return sharded_with_gradient(rearranged(x, axis, pieces_by_device(len(names), order)), names, axis).contiguous()

@values.names_itself
def unshard_sequence(x:Tensor, axis:int, length:int, order:str="zigzag") -> Tensor:
  """Gathers a sharded sequence: returns the first `length` rows of the sequence along `axis`, in their natural order, on the first of x's devices.

  x: a result of `shard_sequence`, or a tensor that is sharded like one, such as o or lse of attention
  Raises ValueError for a tensor that is sharded along another axis, a length that it cannot have, and an unknown order."""
  x, order, given = values.tensor("x", x), check_order("order", order), axis
  axis = check_axis(x, given)
  rows, count = static_shape("x", x.shape)[axis], len(x.device) if isinstance(x.device, tuple) else 1
  if count > 1 and x.uop.axis != axis: raise ValueError(f"axis={given}: x is sharded along axis {x.uop.axis}; must be that")
  length = values.whole_number("length", length, 1, rows, f"a number of rows, 1..{rows}")
  if rows % (pieces := count*ORDERS[order]):
    raise ValueError(f"order={order!r} with x of shape {values.shown_shape(x.shape)}: axis {axis} must be a multiple of its {pieces} pieces")
  return in_order(x.to(x.device[0]) if isinstance(x.device, tuple) else x, axis, length, count, order)
